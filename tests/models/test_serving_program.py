"""Steps of serving are the model of training again: the same weights and FLOPs, and caches as exact as published."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError
from meshwise.core.tensors import Kind
from meshwise.models import load_model
from meshwise.models.catalog import model_names
from tests.each import each

FILE = Path(__file__).parents[1] / "data" / "models" / "kv_cache.csv"
ROWS = list(csv.DictReader(FILE.read_text(encoding="utf-8").splitlines()))
SERVED = [name for name in model_names() if load_model(name).spec.encoder is None]


def caches(program):
    """Block, its repeat count, and each cache that it reads, once."""
    for block in program:
        for t in {t.name: t for op in block.ops for t in op.inputs if t.kind is Kind.KV_CACHE}.values():
            yield block.repeat, t


def elements(program, *, positions, fixed=False):
    """Elements of all caches that have positions (or have none) when each holds `positions` of them."""
    sizes = dict(program.bind(batch=1, queries=1, keys=positions))
    total = 0
    for repeat, t in caches(program):
        if any(a.startswith("S") and a.partition(".")[0] == "S" for a in t.axes) is not fixed:
            sizes |= {a: positions for a in t.axes if a.startswith("S.")}
            total += repeat * math.prod(sizes[a] for a in t.axes)
    return total


@each("name", SERVED)
@each("step", ["prefill", "decode"])
def test_every_model_has_its_weights_in_every_step(name, step):
    model = load_model(name)
    for spread in (False, True):
        assert model.serving_program(step, spread_norms=spread).parameters() == model.parameters.total


@each("row", ROWS)
def test_a_token_leaves_in_the_caches_what_is_published(row):
    model = load_model(row["name"])
    published = int(row["bytes_per_token_all_if_no_window_bf16"])
    keys_of_indexers = model.kv_cache.index_bytes_per_token(DType.BF16)
    for step in ("prefill", "decode"):
        program = model.serving_program(step)
        assert 2 * elements(program, positions=1) == published + keys_of_indexers
        states = int(row["ssm_state_elems_per_seq"]) + int(row["conv_state_elems_per_seq"])
        assert elements(program, positions=1, fixed=True) == states


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-9b-it", "mixtral-8x7b", "jamba-v0.1", "gpt2", "deepseek-v3"])
def test_a_whole_prompt_takes_the_flops_of_a_forward_pass(name):
    model = load_model(name)
    train, prefill = model.train_program(), model.serving_program("prefill")
    sizes = {**prefill.bind(batch=2, queries=512), "Tl": 1}
    sizes |= {a: 512 for _, t in caches(prefill) for a in t.axes if a.startswith("S.")}
    for one, other in zip(train, prefill, strict=True):
        if one.role == "layer":
            assert other.flops(sizes) == pytest.approx(one.flops(train.bind(batch=2, queries=512)), rel=1e-12)
    head, trained = prefill.blocks[-1], train.blocks[-1]
    assert head.flops(sizes) == trained.flops(train.bind(batch=2, queries=1))


def test_latents_absorbed_multiply_by_the_same_matrices():
    """Per head: q w_k and o w_v instead of expanding keys and values, and products as wide as the latent."""
    model = load_model("deepseek-v3")
    prefill, decode = model.serving_program("prefill"), model.serving_program("decode")
    sizes = decode.bind(batch=1, queries=1, keys=1000)
    heads, rank, rope, nope, width = 128, 512, 64, 128, 128
    block = next(b for b in decode if b.role == "layer")
    attention = next(op for op in block.ops if op.name == "attention")
    assert attention.flops(sizes) == 2 * heads * (2 * rank + rope) * 1000
    absorbed = sum(op.flops(sizes) for op in block.ops if op.name.endswith("_absorb"))
    assert absorbed == 2 * heads * rank * (nope + width)
    assert {t.name for _, t in caches(prefill)} == {t.name for _, t in caches(decode)}


def test_encoder_decoders_are_refused():
    encoders = [name for name in model_names() if load_model(name).spec.encoder is not None]
    for name in encoders:
        with pytest.raises(ConfigError, match="encoder-decoders cannot be served yet"):
            load_model(name).serving_program("decode")
