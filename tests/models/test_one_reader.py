"""Configurations are read in `models` only, so that every reader of a model takes the same defaults."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import meshwise
from meshwise.core.errors import ConfigError
from meshwise.models import load_model, read_config
from meshwise.models.numerics import read_numerics
from meshwise.models.spec import Mixture, Router

ROOT = Path(meshwise.__file__).parent
ROUTER_KEYS = ("scoring_func", "topk_method", "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob")


def is_configuration(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("config", "text_config", "raw_config")


def raw_reads(text: str) -> list[int]:
    """Lines that look up a key of a configuration: `config["key"]`, `model.config.get("key")`."""
    lines: list[int] = []
    if not re.search(r"config\s*(\[|\.\s*get\b)", text):  # most files have neither, and need not be parsed
        return lines
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Subscript) and is_configuration(node.value):
            lines.append(node.lineno)
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "get" and is_configuration(called.value):
            lines.append(node.lineno)
    return lines


def test_raw_reads_are_seen() -> None:
    text = 'model.config["a"]\nconfig.get("a")\njax.config.update("a", 1)\ntext_config["a"]'
    assert sorted(raw_reads(text)) == [1, 2, 4]


def test_nothing_outside_models_reads_keys_of_configurations() -> None:
    files = [f for f in ROOT.rglob("*.py") if f.relative_to(ROOT).parts[0] != "models"]
    found = {str(f.relative_to(ROOT)): raw_reads(f.read_text(encoding="utf-8")) for f in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def without(name: str, *keys: str) -> dict[str, Any]:
    return {k: v for k, v in load_model(name).config.items() if k not in keys}


def router_of(config: dict[str, Any]) -> Router:
    (mixture,) = read_config(config, name="x").mixtures
    return mixture.router


def test_a_router_that_is_not_described_is_the_reference_implementation_s() -> None:
    assert router_of(without("deepseek-v3", *ROUTER_KEYS)) == Router("sigmoid", scale=2.5, groups=8, groups_limit=4)
    assert router_of(without("deepseek-v2", *ROUTER_KEYS)) == Router("softmax", normalised=False)


def test_deepseek_v3_without_its_router_s_keys_is_the_same_to_all_readers() -> None:
    whole, bare = load_model("deepseek-v3"), read_config(without("deepseek-v3", *ROUTER_KEYS), name="deepseek-v3")
    assert bare.spec.groups == whole.spec.groups
    assert read_numerics(bare) == read_numerics(whole)
    assert any("n_group = 8, topk_group = 4" in note for note in bare.notes)


def test_deepseek_v2_s_groups_are_those_of_its_configuration() -> None:
    said = Router("softmax", normalised=False, scale=16.0, groups=8, groups_limit=3)
    assert router_of(without("deepseek-v2")) == said


def test_groups_that_cannot_be_are_refused() -> None:
    config = without("deepseek-v3")
    with pytest.raises(ConfigError, match="'topk_group': expected at most n_group"):
        read_config({**config, "n_group": 2}, name="x")
    with pytest.raises(ConfigError, match="'n_routed_experts': expected a multiple of n_group"):
        read_config({**config, "n_group": 7, "topk_group": 4}, name="x")


def test_every_mixture_says_its_router() -> None:
    models = (load_model(name) for name in ("mixtral-8x7b", "qwen3-30b-a3b", "glm-4.5-air", "minimax-m2.7"))
    found = [g.layer.ffn.router for m in models for g in m.spec.groups if isinstance(g.layer.ffn, Mixture)]
    assert found == [Router(), Router(), Router("sigmoid"), Router("sigmoid")]
