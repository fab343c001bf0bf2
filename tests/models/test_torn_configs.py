"""Whatever stands in a configuration, it is read or refused in words: nothing else ever escapes."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError
from meshwise.core.tensors import Attention, Fused
from meshwise.models import load_model, model_names, parse_json, read_config

FILE = Path(__file__).parents[1] / "data" / "models" / "reference_counts.jsonl"
SMALL: list[dict[str, Any]] = [
    json.loads(line)["config"]
    for file in (FILE, FILE.with_name("reference_towers.jsonl"))
    for line in file.read_text(encoding="utf-8").splitlines()
]
REAL: list[dict[str, Any]] = [dict(load_model(name).config) for name in model_names()]

junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from(
        [
            "",
            "gelu",
            "full_attention",
            "é",
            "\x00",
            "llama",
            [],
            {},
            [None],
            ["full_attention"],
            {"factor": 2},
            [[1, 2]],
        ]
    ),
    st.lists(st.integers(-3, 3), max_size=4),
)


def keys_of(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Paths of every key, of nested objects too."""
    return [path for k, v in config.items() for path in ((k,), *(((k, n) for n in v) if isinstance(v, dict) else ()))]


def use(config: dict[str, Any]) -> None:
    """Read it, and if that works, count it."""
    model = None
    with contextlib.suppress(ConfigError):
        model = read_config(config, name="x")
    if model is None:
        return
    assert model.parameters.total >= model.parameters.active > 0
    assert model.forward_flops_per_token(64) > 0
    assert model.kv_cache_bytes_per_token() >= 0
    mixes = any(isinstance(op, Attention | Fused) for block in model.train_program() for op in block.ops)
    assert (model.kv_cache.bytes_per_sequence(1, DType.BF16) > 0) == mixes


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_one_wrong_value_is_read_or_refused(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from([*SMALL, *REAL])))
    path = data.draw(st.sampled_from(keys_of(config)))
    inner = config if len(path) == 1 else config[path[0]]
    inner[path[-1]] = data.draw(junk)
    use(config)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_one_missing_key_is_read_or_refused(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from([*SMALL, *REAL])))
    path = data.draw(st.sampled_from(keys_of(config)))
    (config if len(path) == 1 else config[path[0]]).pop(path[-1])
    use(config)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_torn_file_is_refused(data: st.DataObject) -> None:
    text = json.dumps(data.draw(st.sampled_from(REAL)))
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(ConfigError, match="not valid JSON"):
        parse_json(text[:cut], "config.json")
