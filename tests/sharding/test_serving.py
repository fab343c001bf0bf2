"""Rule tables of serving give the communication that papers describe; nobody wrote it down."""

from __future__ import annotations

import pytest

from meshwise.core.errors import LayoutError, UnknownNameError
from meshwise.models import load_model
from meshwise.sharding import CollectiveKind
from meshwise.sharding.place import place_forward
from meshwise.sharding.placed import LocalOp, Transfer
from meshwise.sharding.serving import SERVING_AXES, ServingLayout, parse_serving_layout, serving_strategy
from tests.each import each

KINDS = {
    CollectiveKind.ALL_GATHER: "AG",
    CollectiveKind.REDUCE_SCATTER: "RS",
    CollectiveKind.ALL_REDUCE: "AR",
    CollectiveKind.ALL_TO_ALL: "A2A",
    CollectiveKind.PERMUTE: "send",
}


def layer(model, step, **choices):
    program = load_model(model).serving_program(step, spread_norms=choices.get("wide", False))
    block = next(b for b in program if b.role == "layer")
    return place_forward(block, serving_strategy(**choices))


def sent(placed, *axes):
    """What moves over mesh axes that are all among `axes` (the others have size 1): kind, tensor, axes."""
    found = []
    for t in (item for item in placed.forward if isinstance(item, Transfer)):
        over = tuple(a for a in t.collective.mesh_axes if a in axes)
        if over:
            found.append((KINDS[t.collective.kind], t.tensor.name, "".join(a[0] for a in sorted(over))))
    return found


def test_tensor_parallelism_reduces_twice_a_layer():
    assert sent(layer("llama-3-70b", "decode"), "tensor") == [("AR", "o", "t"), ("AR", "down", "t")]
    prefill = layer("llama-3-70b", "prefill", residual="positions")
    assert sent(prefill, "tensor") == [
        ("AG", "x.attn", "t"), ("RS", "o", "t"), ("AG", "x.mlp", "t"), ("RS", "down", "t"),
    ]  # fmt: skip


def test_a_cache_split_by_sequences_takes_two_exchanges():
    """Book, Inference: AllToAll of queries to where their sequences are, and back."""
    placed = layer("llama-3-70b", "decode", cache_split="batch")
    moved = sent(placed, "cache")
    assert [(kind, name) for kind, name, _ in moved if kind == "A2A"] == [("A2A", "q.rope"), ("A2A", "attention")]
    assert not [m for m in moved if m[0] == "send"]
    (cache, *_) = placed.caches
    assert cache.sharding.splits[0] == ("fsdp", "expert", "cache")


def test_a_cache_split_by_positions_adds_up_partial_sums():
    placed = layer("llama-3-70b", "decode", cache_split="sequence")
    moved = [m for m in sent(placed, "cache") if m[1] in ("q.rope", "attention")]
    assert moved == [("AG", "q.rope", "c"), ("RS", "attention", "c")]
    assert "cache" in placed.caches[0].sharding.splits[1]


def test_two_dimensions_of_weights_are_those_of_the_paper():
    """Pope et al. 2022, figure 2: gather E over yz, scatter F over x, gather F over x, scatter E over yz."""
    placed = layer("llama-3-70b", "decode", cache_split="batch", wide=True, residual="width")
    feed_forward = [m for m in sent(placed, "cache", "width") if m[1] in ("x.mlp", "gate", "up", "act", "down")]
    assert feed_forward == [
        ("AG", "x.mlp", "c"), ("RS", "gate", "w"), ("RS", "up", "w"), ("AG", "act", "w"), ("RS", "down", "c"),
    ]  # fmt: skip
    weights = {h.tensor.name: h.sharding for h in placed.weights}
    assert weights["w_up"].splits == (("width", "fsdp"), ("tensor", "cache"))
    assert weights["w_down"].splits == (("tensor", "cache"), ("width", "fsdp"))


def test_gathered_weights_move_and_activations_do_not():
    moved = sent(layer("llama-3-70b", "prefill"), "fsdp")
    assert {kind for kind, _, _ in moved} == {"AG"}
    assert {name for _, name, _ in moved} >= {"w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down"}
    assert not [name for _, name, _ in moved if not name.startswith(("w_", "norm"))]


def test_experts_exchange_tokens_and_attention_nothing():
    placed = layer("mixtral-8x7b", "decode", experts=("E", "C"))
    assert [(k, n) for k, n, _ in sent(placed, "expert")] == [
        ("A2A", "slots"),
        ("A2A", "slot_gates"),
        ("A2A", "expert.down"),
    ]
    assert placed.caches[0].sharding.splits[0] == ("fsdp", "expert")


def test_whole_experts_where_tokens_are_whole_exchange_nothing():
    """Each device has all tokens, and adds its experts' part, beside its part of the shared one, in one AllReduce."""
    placed = layer("mixtral-8x7b", "decode", experts=("E",))
    assert sent(placed, "tensor") == [("AR", "o", "t"), ("AR", "combine", "t")]
    shared = [b for b in load_model("deepseek-v3").serving_program("decode") if b.role == "layer"][-1]
    moved = sent(place_forward(shared, serving_strategy(experts=("E",))), "tensor", "expert")
    assert [m for m in moved if m[1] not in ("o", "attention")][-4:] == [
        ("A2A", "slots", "e"), ("A2A", "slot_gates", "e"), ("A2A", "expert.down", "e"), ("AR", "mixture", "t"),
    ]  # fmt: skip


def test_context_gathers_keys_and_values_of_prompts_alone():
    moved = sent(layer("llama-3-70b", "prefill"), "context")
    assert {(kind, name) for kind, name, _ in moved} == {("AG", "cached.k.rope"), ("AG", "cached.v")}


def test_latents_of_attention_are_on_every_device_of_the_tensor_axis():
    placed = layer("deepseek-v3", "decode")
    assert all("tensor" not in axes for h in placed.caches for axes in h.sharding.splits)


@each("model", ["llama-3-8b", "deepseek-v3", "jamba-v0.1", "gemma-2-9b-it", "qwen3-next-80b-a3b"])
@each("split", ["heads", "batch", "sequence"])
@each("wide", [False, True])
def test_splits_of_one_index_agree_in_every_operation(model, split, wide):
    """What an operation reads is split as its index space is; no mesh axis splits two indices."""
    for step in ("prefill", "decode"):
        program = load_model(model).serving_program(step, spread_norms=wide)
        strategy = serving_strategy(cache_split=split, wide=wide, residual="width" if wide else "whole")
        for block in program:
            for item in place_forward(block, strategy).forward:
                if isinstance(item, LocalOp):
                    splits = dict(item.splits)
                    # Groups go with their heads, slots with their tokens.
                    own = {a: s for a, s in splits.items() if a.partition(".")[0] not in ("K", "Kr", "C")}
                    used = [m for axes in own.values() for m in axes]
                    assert len(used) == len(set(used)), f"{item.op.name}: {splits}"
                    for held in item.inputs:
                        pairs = zip(held.tensor.axes, held.sharding.splits, strict=True)
                        assert all(s == splits.get(a, ()) for a, s in pairs), f"{item.op.name} reads {held}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensor=8,cache=2", "write cache_split=batch or cache_split=sequence"),
        ("tensor=16", "needs 16 chips, the cluster has 8"),
        ("tensor=0", "tensor must be at least 1"),
        ("tp=-1,dp=-1", "only one axis can be -1"),
        ("tensor", "expected name=value"),
        ("tp=2,tensor=4", "tensor is given twice"),
        ("cache=2,cache_split=tokens", "unknown cache split 'tokens'"),
        ("width=2,tensor=4,sp=on", "leave sequence_parallel out"),
        ("zero=3", "unknown layout axis or choice 'zero'"),
        ("tensor=3,dp=-1", "cannot fill 8 chips"),
    ],
)
def test_what_is_wrong_with_a_layout_is_said(text, said):
    with pytest.raises((LayoutError, UnknownNameError), match=said.replace("(", r"\(")):
        parse_serving_layout(text, num_chips=8)


def test_layouts_round_trip():
    layout = parse_serving_layout("tp=2,cache=4,cache_split=batch,dp=-1", num_chips=64)
    assert str(layout) == "tensor=2,cache=4,replicas=8,cache_split=batch"
    assert parse_serving_layout(str(layout), num_chips=64) == layout
    wired = layout.replace(wires=(("tensor", (2, 1)), ("cache", (1, 4))))
    assert ServingLayout.from_json(wired.to_json()) == wired
    assert set(wired.sizes) == set(SERVING_AXES)


def test_a_saved_layout_whose_wires_are_none_is_refused_in_words():
    value = {**ServingLayout(tensor=4).to_json(), "wires": [4]}
    with pytest.raises(LayoutError, match="wires must map a mesh axis to a list of extents"):
        ServingLayout.from_json(value)
