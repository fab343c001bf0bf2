"""The program of every built-in model hangs together, and random models count as their closed forms say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.kernels import CompressedAttention, IndexScores, Scan, SelectiveScan
from meshwise.core.tensors import Attention, Block, Einsum, Kind, Program, Tensor
from meshwise.models import load_model, model_names, read_config, read_model_json
from tests.each import each

every_model = each("name", model_names())


@every_model
def test_blocks_stand_in_order(name: str) -> None:
    model = load_model(name)
    roles = [b.role for b in model.train_program()]
    towers = sum(len(tower.parts) for tower in model.spec.towers)
    start: list[str] = []
    if model.spec.encoder is not None:
        start = ["embed", *["layer"] * len(model.spec.encoder.groups), "embed"]
    rest = len(model.spec.groups)
    assert roles == [*start, *["embed"] * (1 + towers), *["layer"] * rest, "head"]
    layers = [b for b in model.train_program() if b.role == "layer"]
    assert sum(b.repeat for b in layers) == model.num_layers == model.sizes["L"]
    assert all(b.name.split(".")[0] == "layer" for b in layers)
    assert len({b.name for b in layers}) == len(layers)


@every_model
def test_every_tensor_is_made_before_it_is_read_and_has_sizes(name: str) -> None:
    program = load_model(name).train_program()
    sizes = program.bind(batch=2, queries=16)
    for block in program:
        check_block(block, sizes)


def check_block(block: Block, sizes: dict[str, Any]) -> None:
    known = dict.fromkeys(block.inputs)
    axes: dict[str, tuple[str, ...]] = {}
    for op in block.ops:
        for t in op.inputs:
            assert t.kind is Kind.WEIGHT or t.name in known, f"{block.name}/{op.name} reads {t} before it is made"
            assert seen_as(t, op) == axes.setdefault(t.name, seen_as(t, op)), f"{t} changes its axes"
            assert t.elements(sizes) > 0
        assert op.output.name not in known, f"{op.output} is made twice"
        known[op.output.name] = None
        axes[op.output.name] = op.output.axes
        assert op.flops(sizes) >= 0
    assert set(block.outputs) <= set(known)


def seen_as(t: Tensor, op: object) -> tuple[str, ...]:
    """Keys and values are read along S, which is T by position."""
    return tuple("T" if a == "S" else a for a in t.axes) if isinstance(op, Attention) else t.axes


@every_model
def test_einsums_multiply_an_activation_and_a_weight(name: str) -> None:
    for block in load_model(name).train_program():
        for op in block.ops:
            if isinstance(op, Einsum):
                assert [t.kind for t in op.inputs] == [Kind.ACTIVATION, Kind.WEIGHT]
                assert set(op.output.axes) <= set(op.inputs[0].axes) | set(op.inputs[1].axes)


@every_model
def test_what_a_tied_head_reads_is_the_embedding(name: str) -> None:
    program = load_model(name).train_program()
    embed, head = program.blocks[0], program.blocks[-1]
    assert "w_embed" in {t.name for t in embed.weights}
    tables = {t.name: t.axes for t in embed.weights}
    read = {t.name: t.axes for op in head.ops for t in op.inputs if t.kind is Kind.WEIGHT}
    for tied in head.tied:
        assert read[tied] == tables[tied]
    assert bool(head.tied) == ("w_head" not in read)


@every_model
def test_a_model_survives_its_json(name: str) -> None:
    model = load_model(name)
    again = read_model_json(model.to_json())
    assert again == model
    assert again.parameters == model.parameters


@every_model
def test_flops_take_arrays(name: str) -> None:
    program: Program = load_model(name).train_program()
    batches, lengths = np.array([1.0, 2.0, 8.0]), np.array([128.0, 512.0, 64.0])
    together = program.flops(program.bind(batch=batches, queries=lengths))
    each = [program.flops(program.bind(batch=b, queries=t)) for b, t in zip(batches, lengths, strict=True)]
    assert together.tolist() == each


def test_forward_flops_are_about_two_per_active_parameter() -> None:
    model = load_model("llama-3-70b")
    # The embedding is looked up, the head is not; norms do no matrix work.
    linear = 2 * (model.parameters.total - model.parameters.by_part["embedding"] - model.parameters.by_part["norms"])
    attention = 80 * 4 * 64 * 128 * (4096 + 1) / 2
    assert model.forward_flops_per_token(4096) == linear + attention
    assert model.train_flops_per_token(4096) == 3 * (linear + attention)


LLAMA_LIKE = st.fixed_dictionaries(
    {
        "heads": st.integers(1, 8),
        "groups": st.integers(1, 4),
        "head_dim": st.integers(1, 64),
        "hidden_size": st.integers(1, 512),
        "intermediate_size": st.integers(1, 2048),
        "num_hidden_layers": st.integers(1, 12),
        "vocab_size": st.integers(1, 5000),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
    }
)


@given(c=LLAMA_LIKE, seq=st.integers(1, 300))
def test_llama_like_models_count_as_their_closed_form(c: dict[str, Any], seq: int) -> None:
    k, h, d, f, layers, v = (
        c[x] for x in ("heads", "head_dim", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    )
    n = k * c.pop("groups")
    del c["heads"]
    model = read_config({"model_type": "llama", "num_attention_heads": n, "num_key_value_heads": k, **c}, name="x")
    matrices = 2 * d * n * h + 2 * d * k * h + 3 * d * f
    biases = c["attention_bias"] * ((n + 2 * k) * h + d) + c["mlp_bias"] * (2 * f + d)
    tables = v * d * (1 if c["tie_word_embeddings"] else 2)
    assert model.parameters.total == layers * (matrices + biases + 2 * d) + d + tables
    assert model.kv_cache_bytes_per_token() == 2 * 2 * layers * k * h
    full = 2 * (layers * matrices + v * d) + layers * 4 * n * h * seq
    assert model.forward_flops_per_token(seq, attention="full") * seq == pytest.approx(full * seq, rel=1e-12)


@given(
    experts=st.integers(1, 64),
    data=st.data(),
    hidden=st.integers(1, 128),
    shared=st.integers(0, 3),
    dense=st.integers(0, 4),
)
def test_mixtures_count_what_a_token_visits(
    experts: int, data: st.DataObject, hidden: int, shared: int, dense: int
) -> None:
    chosen = data.draw(st.integers(1, experts))
    d, layers = 32, 4
    config = {
        "model_type": "glm4_moe", "hidden_size": d, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_hidden_layers": layers, "vocab_size": 10, "n_routed_experts": experts, "num_experts_per_tok": chosen,
        "moe_intermediate_size": hidden, "n_shared_experts": shared, "first_k_dense_replace": dense,
    }  # fmt: skip
    count = read_config(config, name="x").parameters
    routed = (layers - dense) * experts * 3 * d * hidden
    assert count.by_part.get("experts", 0) == routed
    assert count.total - count.active == round(routed * (1 - chosen / experts))
    assert count.by_part.get("shared experts", 0) == (layers - dense) * 3 * d * hidden * shared


def test_prediction_modules_are_counted_apart() -> None:
    model = load_model("deepseek-v3")
    d, ranks = 7168, (1536, 512)
    attention = d * 1536 + 1536 * 128 * 192 + d * 576 + 512 * 128 * 256 + 128 * 128 * d + sum(ranks)
    experts = 257 * 3 * d * 2048 + 256 * d + 256
    assert model.parameters.mtp == attention + experts + 2 * d + 2 * d * d + 3 * d
    assert any("multi-token" in note for note in model.notes)
    assert load_model("kimi-k2").parameters.mtp == 0


def test_towers_are_said_to_be_left_out() -> None:
    for name in ("gemma-3-27b", "llama-4-scout"):
        assert any("vision tower" in note for note in load_model(name).notes)


def test_layer_groups_of_interleaved_models() -> None:
    def groups(name: str) -> list[tuple[str, int]]:
        return [(b.name, b.repeat) for b in load_model(name).train_program() if b.role == "layer"]

    assert groups("gemma-3-27b") == [("layer.local", 52), ("layer.global", 10)]
    assert groups("deepseek-v3") == [("layer.dense", 3), ("layer.moe", 58)]
    assert groups("llama-4-scout") == [("layer.chunked", 36), ("layer.global", 12)]
    assert groups("smollm3-3b") == [("layer.rope", 27), ("layer.nope", 9)]
    assert groups("llama-3-70b") == [("layer", 80)]


def state_elements(block: Block, sizes: dict[str, Any]) -> float:
    """What a recurrence carries from position to position."""
    (scan,) = (op for op in block.ops if isinstance(op, Scan | SelectiveScan))
    if isinstance(scan, SelectiveScan):
        return scan.inputs[2].elements(sizes)
    value, key = scan.inputs[:2]
    return math.prod(sizes[a] for a in (*value.axes[2:], key.axes[-1]))


@every_model
def test_the_cache_holds_what_attention_reads(name: str) -> None:
    """Latent attention caches the latent instead, of which keys and values are made."""
    model = load_model(name)
    sizes = model.train_program().bind(batch=1, queries=1)
    groups = {b.name: b for b in model.train_program() if b.role == "layer"}
    for kind in model.kv_cache.kinds:
        if kind.name not in groups:  # the compressed positions of a group: a share of a key each
            whole = groups[kind.name.removesuffix(".compressed")]
            shares = {t.axes[-1]: t for op in whole.ops if isinstance(op, Attention) for t in op.inputs[1:3]}
            read = [t for axis, t in shares.items() if axis.partition(".")[0] == "Hs"]
            assert kind.elements + kind.index == sum(t.elements(sizes) for t in read)
            continue
        ops = {op.name: op for op in groups[kind.name].ops}
        if any(isinstance(op, Scan | SelectiveScan) for op in ops.values()):
            assert kind.elements == 0
            assert kind.state == state_elements(groups[kind.name], sizes)
            continue
        mixing = [op for op in ops.values() if isinstance(op, Attention) and not isinstance(op, IndexScores)]
        read = [t for op in mixing for t in op.inputs[1 : 2 if isinstance(op, CompressedAttention) else 3]]
        cached = [ops["kv_a"].output, ops["k_rope"].output] if "kv_a" in ops else read
        assert kind.elements == sum(t.elements(sizes) for t in cached)
        assert kind.layers == groups[kind.name].repeat


def test_an_encoder_is_read_whole_and_its_decoder_attends_to_it() -> None:
    model = load_model("t5-11b")
    program = model.train_program()
    assert [b.name for b in program] == [
        "encoder.embed", "layer.encoder", "encoder.end", "embed", "layer.decoder", "head",
    ]  # fmt: skip
    seen = [(b.name, op.name, op.causal) for b in program for op in b.ops if isinstance(op, Attention)]
    assert seen == [
        ("layer.encoder", "attention", False),
        ("layer.decoder", "attention", True),
        ("layer.decoder", "cross.attention", False),
    ]
    layers, tokens, heads, width, d, hidden = 24, 512, 128, 128, 1024, 65536
    matrices = layers * ((4 + 8) * d * heads * width + 2 * 2 * d * hidden) + d * model.vocab_size
    pairs = layers * (2 * tokens * tokens + tokens * (tokens + 1) / 2)
    assert model.forward_flops_per_token(tokens) * tokens == 2 * tokens * matrices + 4 * heads * width * pairs
    assert model.kv_cache_bytes_per_token() == 2 * layers * 2 * 2 * heads * width
    assert model.num_layers == 2 * layers
    assert [str(t) for t in model.passed_along] == ["encoded[B, T, D]"]


def test_a_table_of_every_layer_is_held_and_is_no_work() -> None:
    config = {
        "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "intermediate_size": 128, "vocab_size": 512,
        "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32,
    }  # fmt: skip
    model = read_config({**config, "num_kv_shared_layers": 0}, name="x")
    assert [str(t) for t in model.passed_along] == ["layer_tokens[B, T, layers, Dw]"]
    assert load_model("llama-3-8b").passed_along == ()
    count = model.parameters
    assert count.by_part["layer embedding"] == 512 * 6 * 32
    assert count.active == count.total
    assert count.active_in_mfu == count.total - 512 * 6 * 32


def test_layers_hand_on_every_residual_stream() -> None:
    assert load_model("deepseek-v4-flash").residual_axes == ("B", "T", "M", "D")
    assert load_model("deepseek-v4-flash").sizes["M"] == 4
    assert load_model("deepseek-v3").residual_axes == load_model("t5-11b").residual_axes == ("B", "T", "D")
