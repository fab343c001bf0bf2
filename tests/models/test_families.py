"""The table of families is one: a model type has one row, a key one meaning."""

from __future__ import annotations

from meshwise.models import families, read_config
from meshwise.models.families import FAMILIES, NOT_YET
from meshwise.models.families.ignored import IRRELEVANT
from meshwise.models.families.keys import known_keys

ROUTER_KEYS = ["n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor"]


def test_every_model_type_is_of_one_row() -> None:
    assert all(FAMILIES[kind] is row for row in families.ROWS for kind in row.model_types)
    assert len(FAMILIES) == 123


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
        said = known_keys(FAMILIES[kind].keys) & (IRRELEVANT | FAMILIES[kind].ignored)
        assert said <= set(ROUTER_KEYS), kind  # they change nothing that is counted, and are a field of routers
