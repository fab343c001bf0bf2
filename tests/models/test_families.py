"""The table of families says what the modules hold."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from meshwise.models import families, read_config
from meshwise.models.families import FAMILIES, NOT_YET
from meshwise.models.families.irrelevant import IRRELEVANT

ROUTER_KEYS = ["n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor"]

NO_FAMILIES = {"activations", "base", "decoder", "irrelevant", "keys", "not_yet", "towered"}
NO_FAMILIES |= {"vision_towers", "audio_towers", "towers_plain", "towers_qwen"}


def test_every_reader_is_in_the_table() -> None:
    modules = [m.name for m in pkgutil.iter_modules(families.__path__) if m.name not in NO_FAMILIES]
    readers = [reader for name in modules for reader in import_module(f"{families.__name__}.{name}").FAMILIES]
    listed = [kind for reader in readers for kind in reader.model_types]
    assert sorted(listed) == sorted(FAMILIES)
    assert len(set(listed)) == len(listed)
    for reader in readers:
        for kind in reader.model_types:
            assert FAMILIES[kind] is reader


def test_no_family_is_both_read_and_refused() -> None:
    assert not set(FAMILIES) & set(NOT_YET)
    assert all(NOT_YET.values())


WIDTH = {"intermediate_size": 96}


def test_mamba_takes_its_width_from_the_file_before_the_factor() -> None:
    base = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 4}
    totals = [read_config({**base, "expand": 2, **given}, name="x").parameters.total for given in ({}, WIDTH)]
    assert totals == [62656, 48640]  # as the reference implementation counts


def test_no_key_is_both_used_and_of_no_consequence() -> None:
    for kind in FAMILIES:
        said = FAMILIES[kind].known_keys() & (IRRELEVANT | FAMILIES[kind].ignored)
        assert said <= set(ROUTER_KEYS), kind  # they change nothing that is counted, and are a field of routers
