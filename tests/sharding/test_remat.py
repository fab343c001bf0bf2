"""Rematerialisation: what each policy keeps, and what it runs again."""

from __future__ import annotations

import random

import pytest
from tiny_models import BLOCKS, Shape, tiny_block

from meshwise.errors import UnknownNameError
from meshwise.sharding.remat import REMAT_POLICIES, Saved, remat_policy, saved_activations
from meshwise.tensors import Attention, Block, Einsum, Kind, backward

POLICIES = ["none", "matmuls", "attention", "full"]


def block_of(name: str) -> Block:
    shape = Shape(1, 1, random.Random(0))  # noqa: S311 - a seed, no secret
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


def test_gates_of_a_mixture_need_what_they_weigh() -> None:
    assert {"gates", "expert.down", "slots"} <= kept("mixtral", "none")
    assert "expert.down" in again("mixtral", "full")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_backward_pass_finds_all_it_reads(name: str, policy: str) -> None:
    """Recomputation runs in order, from what is kept, weights and indices; afterwards every gradient can be had."""
    block = block_of(name)
    s = saved_activations(block, remat_policy(policy))
    outside = {t.name for op in block.ops for t in op.inputs if t.kind is not Kind.ACTIVATION}
    known = outside | {t.name for t in s.kept} | {f"d_{n}" for n in block.outputs}
    for op in (*s.recompute, *backward(block)):
        assert {t.name for t in op.inputs} <= known, f"{op.name} reads what is not there"
        known.add(op.output.name)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_is_kept_and_also_run_again(name: str, policy: str) -> None:
    s = saved(name, policy)
    assert not {t.name for t in s.kept} & {t.name for t in s.recomputed}
    assert [t.name for t in s.recomputed] == [op.output.name for op in s.recompute]
    assert all(t.kind is Kind.ACTIVATION for t in s.kept)


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_kept_from_a_policy_is_what_the_policy_keeps(name: str) -> None:
    block = block_of(name)
    makers = {op.output.name: op for op in block.ops}
    for policy in REMAT_POLICIES.values():
        made_here = {t.name for t in saved_activations(block, policy).kept} & set(makers)
        assert all(policy.keeps(makers[n]) for n in made_here)
    assert all(isinstance(makers[n], Einsum | Attention) for n in kept(name, "matmuls") & set(makers))
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
    assert str(caught.value) == "unknown remat policy ''. Known: attention, full, matmuls, none."
