"""Rematerialisation: what each policy keeps and runs again; what users write, in our words, JAX's and Megatron-LM's."""

from __future__ import annotations

import random

import pytest

from meshwise.core.backward import backward
from meshwise.core.errors import LayoutError, UnknownNameError
from meshwise.core.kernels import Scan, SelectiveScan
from meshwise.core.tensors import Attention, Block, Einsum, Kind, Program
from meshwise.jobs import narrowed, parse_precision
from meshwise.models import load_model
from meshwise.sharding.layout import Layout, parse_layout
from meshwise.sharding.remat import (
    REMAT_POLICIES,
    RematRequest,
    Saved,
    check_remat,
    parse_remat,
    remat_policy,
    saved_activations,
)
from tests.each import each
from tests.sharding.tiny_models import BLOCKS, Shape, tiny_block

POLICIES = ["none", "matmuls", "attention", "full"]


def block_of(name: str) -> Block:
    shape = Shape(stored=1, tensor=1, heads=1, experts=1, choose=random.Random(0))  # noqa: S311 - a seed, no secret
    return tiny_block(name, shape, batch=2, queries=2)[0]


def saved(name: str, policy: str) -> Saved:
    return saved_activations(block_of(name), remat_policy(policy))


def kept(name: str, policy: str) -> set[str]:
    return {t.name for t in saved(name, policy).kept}


def again(name: str, policy: str) -> list[str]:
    return [op.name for op in saved(name, policy).recompute]


def test_policies_are_listed_from_least_to_most_recomputation() -> None:
    assert list(REMAT_POLICIES) == POLICIES
    counts = [len(again("llama", p)) for p in POLICIES]
    assert counts == sorted(counts)
    assert len(set(counts)) == len(counts)


def test_nothing_is_run_again_without_rematerialisation() -> None:
    assert again("llama", "none") == []
    # What the backward pass reads: not q and k (rope is linear), nor what only enters the residual sum.
    assert kept("llama", "none") == {
        "x", "x.attn", "q.rope", "k.rope", "v", "attention", "x.mid", "x.mlp", "gate", "up", "act",
    }  # fmt: skip


def test_matmuls_keeps_what_matmuls_and_attention_make() -> None:
    assert kept("llama", "matmuls") == {"x", "q", "k", "v", "attention", "o", "gate", "up"}
    assert again("llama", "matmuls") == ["norm.attn", "rope.q", "rope.k", "residual.attn", "norm.mlp", "act"]


def test_attention_keeps_attention_and_repeats_the_feed_forward_part() -> None:
    assert kept("llama", "attention") == {"x", "q", "k", "v", "attention", "o"}
    assert again("llama", "attention") == [
        "norm.attn", "rope.q", "rope.k", "residual.attn", "norm.mlp", "gate", "up", "act",
    ]  # fmt: skip


def test_full_keeps_the_input_and_repeats_all_but_the_end() -> None:
    """The last product and the residual sum are not run again: no gradient reads them."""
    assert kept("llama", "full") == {"x"}
    forward = [op.name for op in block_of("llama").ops]
    assert again("llama", "full") == forward[: forward.index("down")]


def test_a_bias_needs_nothing_kept() -> None:
    """Adding a bias is linear: what it was added to is not read again."""
    assert "o" not in kept("gpt-2", "none")
    assert "q" not in kept("gpt-2", "none")
    assert "q.bias" in kept("gpt-2", "none")


def test_gates_of_a_mixture_weigh_what_experts_made_before_their_last_matrix() -> None:
    """Megatron-LM: what comes back from the experts is only added up, and nothing so wide is kept or made again."""
    assert {"slots", "slot_gates", "expert.gate", "expert.up", "expert.act"} <= kept("mixtral", "none")
    assert not {"expert.down", "combine"} & kept("mixtral", "none")
    assert not {"expert.down", "combine"} & set(again("mixtral", "full"))
    assert not {"expert.down", "expert.down.weighed"} & kept("gpt-oss", "none")


def test_gates_that_weigh_what_experts_read_do_not_travel() -> None:
    """Llama 4, whose tokens go to one expert each: the token is weighed before it leaves."""
    block = next(b for b in load_model("llama-4-scout").train_program() if b.name == "layer.global")
    names = [op.name for op in block.ops]
    assert names.index("weigh") < names.index("dispatch")
    assert "dispatch.gates" not in names
    made = {t.name for t in saved_activations(block, remat_policy("none")).kept}
    assert {"x.mlp", "slots", "expert.act"} <= made
    assert not {"weighed", "expert.down", "combine"} & made


@each("policy", POLICIES)
@each("name", BLOCKS)
def test_the_backward_pass_finds_all_it_reads(name: str, policy: str) -> None:
    """Recomputation runs in order, from what is kept, weights and indices; afterwards every gradient can be had."""
    block = block_of(name)
    s = saved_activations(block, remat_policy(policy))
    outside = {t.name for op in block.ops for t in op.inputs if t.kind is not Kind.ACTIVATION}
    known = outside | {t.name for t in s.kept} | {f"d_{n}" for n in block.outputs}
    for op in (*s.recompute, *backward(block)):
        assert {t.name for t in op.inputs} <= known, f"{op.name} reads what is not there"
        known.add(op.output.name)


@each("policy", POLICIES)
@each("name", BLOCKS)
def test_nothing_is_kept_and_also_run_again(name: str, policy: str) -> None:
    s = saved(name, policy)
    assert not {t.name for t in s.kept} & {op.output.name for op in s.recompute}
    assert all(t.kind is Kind.ACTIVATION for t in s.kept)


@each("name", BLOCKS)
def test_what_is_kept_from_a_policy_is_what_the_policy_keeps(name: str) -> None:
    block = block_of(name)
    makers = {op.output.name: op for op in block.ops}
    for policy in REMAT_POLICIES.values():
        made_here = {t.name for t in saved_activations(block, policy).kept} & set(makers)
        assert all(policy.keeps(makers[n]) for n in made_here)
    assert all(
        isinstance(makers[n], Einsum | Attention | Scan | SelectiveScan) for n in kept(name, "matmuls") & set(makers)
    )
    assert kept(name, "full") <= set(block.inputs)


def test_keys_and_values_are_kept_as_they_were_made() -> None:
    """Attention reads them along S; they lie in memory along T, as their projections wrote them."""
    (v,) = (t for t in saved("llama", "none").kept if t.name == "v")
    assert v.axes[1] == "T"


def test_an_unknown_policy_names_the_known() -> None:
    with pytest.raises(UnknownNameError) as caught:
        remat_policy("fulll")
    assert str(caught.value) == "unknown remat policy 'fulll'. Nearest: full."
    with pytest.raises(UnknownNameError) as caught:
        remat_policy("")
    assert str(caught.value) == (
        "unknown remat policy ''. "
        "Known: attention, full, matmuls, none, projections, recompute:..., save:..., selective."
    )


def test_selective_repeats_attention_alone() -> None:
    assert again("llama", "selective") == ["attention"]
    assert kept("llama", "selective") == kept("llama", "none") - {"attention"}


def test_projections_keep_what_weights_make() -> None:
    """A dot with no batch dimensions: not attention, and not experts, whose weights differ along E."""
    assert kept("llama", "projections") == {"x", "q", "k", "v", "o", "gate", "up"}
    assert "attention" in again("llama", "projections")
    assert {"expert.gate", "expert.up"} <= set(again("mixtral", "projections"))
    assert "router" not in again("mixtral", "projections")


@pytest.mark.parametrize(
    ("policy", "ops"),
    [
        ("recompute:layernorm", ["norm.attn", "norm.mlp"]),
        ("recompute:core_attn", ["attention"]),
        ("recompute:mlp", ["gate", "up", "act"]),  # nothing reads the result of the last product
        ("recompute:act+norm.mlp", ["norm.mlp", "act"]),
        ("recompute:x.mlp", ["norm.mlp"]),  # by the tensor that it makes
        ("save:q+k+v+attention+o", again("llama", "attention")),
        ("save:q+k+v+attention+o+gate+up", again("llama", "matmuls")),
    ],
)
def test_lists_of_operations(policy: str, ops: list[str]) -> None:
    assert again("llama", policy) == ops


def test_modules_of_a_mixture_and_of_latent_attention() -> None:
    assert again("mixtral", "recompute:moe_act") == ["expert.act"]
    assert again("mixtral", "recompute:moe")[0] == "router"
    latent = next(name for name in BLOCKS if "q_a" in {op.name for op in block_of(name).ops})
    assert again(latent, "recompute:mla_up_proj") == ["q", "k", "v", "rope.q", "rope.k"]


def test_modules_are_the_same_in_narrow_formats() -> None:
    block = next(b for b in load_model("deepseek-v3").train_program() if b.name == "layer.moe")
    (narrow,) = narrowed(Program("train", (block,)), parse_precision("fp8-block"))
    check_remat("recompute:mla_up_proj+moe_act", [narrow])
    recompute = saved_activations(narrow, remat_policy("recompute:mla_up_proj")).recompute
    assert [op.name for op in recompute] == ["q", "k", "v", "rope.q", "rope.k"]


@each("name", BLOCKS)
def test_the_backward_pass_finds_all_it_reads_whatever_is_listed(name: str) -> None:
    block = block_of(name)
    choose = random.Random(name)  # noqa: S311 - a seed, no secret
    names = [op.name for op in block.ops]
    for verb in ("save", "recompute"):
        listed = "+".join(choose.sample(names, min(3, len(names))))
        s = saved_activations(block, remat_policy(f"{verb}:{listed}"))
        outside = {t.name for op in block.ops for t in op.inputs if t.kind is not Kind.ACTIVATION}
        known = outside | {t.name for t in s.kept} | {f"d_{n}" for n in block.outputs}
        for op in (*s.recompute, *backward(block)):
            assert {t.name for t in op.inputs} <= known, f"{op.name} reads what is not there"
            known.add(op.output.name)


def test_operations_that_no_layer_has_are_refused() -> None:
    layer = Block("layer", block_of("llama").ops, role="layer")
    check_remat("save:q+attention", [layer])
    check_remat("full", [layer])
    for policy, name in (
        ("save:qq", "qq"),
        ("recompute:act+moe_act", "moe_act"),
        ("recompute:mla_up_proj", "mla_up_proj"),
    ):
        with pytest.raises(UnknownNameError, match=rf"unknown operation of a layer \(remat\) '{name}'"):
            check_remat(policy, [layer])


def test_lists_that_say_nothing_are_refused() -> None:
    with pytest.raises(LayoutError, match="expected names of operations, as in save:attention"):
        remat_policy("save:")
    with pytest.raises(LayoutError, match="names an operation twice"):
        remat_policy("recompute:act+act")


@pytest.mark.parametrize(
    ("text", "policy", "layers"),
    [
        ("full", "full", None),
        ("full:40", "full", 40),
        ("Matmuls:3", "matmuls", 3),
        ("selective", "selective", None),
        ("selective:12", "selective", 12),
        ("selective:core_attn+moe_act", "recompute:core_attn+moe_act", None),
        ("selective:mlp:5", "recompute:mlp", 5),
        ("save:q+k,v", "save:q+k+v", None),
        ("recompute:act+norm.attn:7", "recompute:act+norm.attn", 7),
        ("uniform", "full", None),
        ("uniform:1", "full", None),
        ("everything_saveable", "none", None),
        ("nothing_saveable", "full", None),
        ("dots_saveable", "matmuls", None),
        ("dots_with_no_batch_dims_saveable", "projections", None),
        ("save_only_these_names('q', 'k', \"attention\")", "save:q+k+attention", None),
        ("save_any_names_but_these(act):9", "recompute:act", 9),
    ],
)
def test_names(text: str, policy: str, layers: int | None) -> None:
    assert parse_remat(text) == RematRequest(policy, layers)


def test_block_counts_layers_of_each_stage() -> None:
    assert parse_remat("block:3") == RematRequest("full", 3, of_each_stage=True)
    read = parse_layout("stage=4,remat=block:3", num_chips=4).choices
    assert (read["remat"], read["remat_layers"]) == ("full", 12)
    read = parse_layout("stage=2,schedule=interleaved,vpp=3,recompute=block:2", num_chips=4).choices
    assert read["remat_layers"] == 2 * 2 * 3  # Megatron-LM counts those of each piece of a stage


def test_saving_and_offloading_names() -> None:
    read = parse_layout("fsdp=4,remat=save_and_offload_only_these_names('q', 'attention'),mbs=2", num_chips=4).choices
    assert read == {"remat": "save:q+attention", "offload": ("activations",), "micro_batch": 2}
    both = parse_layout("fsdp=4,remat=save_and_offload_only_these_names(q),offload=optimizer", num_chips=4).choices
    assert both["offload"] == ("optimizer", "activations")


def test_commas_within_a_list_belong_to_it() -> None:
    read = parse_layout("fsdp=4,remat=save:q,k,attention,micro_batch=2", num_chips=4).choices
    assert read == {"remat": "save:q+k+attention", "micro_batch": 2}
    read = parse_layout("remat=recompute:act , norm.mlp, fsdp:4", num_chips=4)
    assert (read.choices, read.sizes["fsdp"]) == ({"remat": "recompute:act+norm.mlp"}, 4)


def test_what_is_printed_reads_back() -> None:
    layout = Layout(fsdp=4, remat="recompute:act+norm.mlp", remat_layers=3, offload=("optimizer", "activations"))
    read = parse_layout(str(layout), num_chips=4)
    assert Layout(**read.sizes, **read.choices) == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("remat=uniform:4", "keeps one input for every 4 layers, which is not modelled"),
        ("remat=block", "remat=block needs the layers of each stage"),
        ("remat=full:x", "expected a number of layers after remat=full:, found 'x'"),
        ("remat=full:4:4", "expected remat=POLICY or remat=POLICY:LAYERS"),
        ("remat=none:4", "remat_layers=4 of remat=none recompute nothing"),
        ("remat=full:0", "remat_layers must be a whole number of at least 1, found 0"),
        ("remat=full:4,remat_layers=4", "remat_layers is given twice"),
        ("remat=save:", "expected names of operations"),
        ("offload=optimizer+optimizer", "offload names a part twice"),
    ],
)
def test_words_for_what_has_no_meaning(text: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        parse_layout(text, num_chips=4)


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="unknown remat policy 'dots_savable'"):
        parse_remat("dots_savable")
