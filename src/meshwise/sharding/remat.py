"""Rematerialisation policies: which activations of a block are kept for its backward pass; the rest are computed again.

A policy is a predicate on the operation that makes a tensor. Not here: bytes or seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwise.errors import UnknownNameError
from meshwise.tensors import Attention, Block, Convert, Einsum, Kind, Op, Tensor, backward

__all__ = ["REMAT_POLICIES", "RematPolicy", "Saved", "remat_policy", "saved_activations"]


@dataclass(frozen=True, slots=True)
class RematPolicy:
    """What is kept.

    Args:
        name: what users type.
        keeps: whether the output of an operation is kept.
        meaning: one line for help and reports.
        jax_name: the policy of `jax.checkpoint_policies` that does the same.
    """

    name: str
    keeps: Callable[[Op], bool]
    meaning: str
    jax_name: str


def _is_matmul(op: Op) -> bool:
    return isinstance(op, Einsum | Attention)


_POLICIES = (
    RematPolicy("none", lambda _: True, "keep every activation that the backward pass reads", "everything_saveable"),
    RematPolicy(
        "matmuls", _is_matmul, "keep the outputs of matmuls and attention, repeat the elementwise rest", "dots_saveable"
    ),
    RematPolicy(
        "attention",
        lambda op: _is_matmul(op) and any(a.partition(".")[0] in ("N", "K") for t in op.tensors for a in t.axes),
        "keep q, k, v and attention's outputs, repeat the feed-forward part",
        "save_only_these_names('q', 'k', 'v', 'attention', 'o')",
    ),
    RematPolicy(
        "full", lambda _: False, "keep only the input of each layer, repeat its whole forward pass", "nothing_saveable"
    ),
)

#: Every policy by the name that users type, from least to most recomputation.
REMAT_POLICIES = {p.name: p for p in _POLICIES}


def remat_policy(name: str) -> RematPolicy:
    """Find a policy.

    Raises:
        UnknownNameError: with the names there are.
    """
    if name not in REMAT_POLICIES:
        raise UnknownNameError("remat policy", name, REMAT_POLICIES)
    return REMAT_POLICIES[name]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a policy means for one block.

    Args:
        kept: activations held from the forward to the backward pass.
        recomputed: activations made again just before the backward pass (one block at a time).
        recompute: the operations that make them, in order.
    """

    kept: tuple[Tensor, ...]
    recomputed: tuple[Tensor, ...]
    recompute: tuple[Op, ...]


def saved_activations(block: Block, policy: RematPolicy) -> Saved:
    """Which activations of `block` are kept, and what is run again, for its backward pass to find what it reads."""
    makers = {op.output.name: op for op in block.ops}
    tensors = {t.name: t for op in reversed(block.ops) for t in (*op.inputs, op.output)}
    tensors |= {op.output.name: op.output for op in block.ops}  # the maker's axes (T), not a reader's (S)

    def is_kept(name: str) -> bool:
        if name not in makers:
            return True
        maker = makers[name]
        return policy.keeps(maker) and not (isinstance(maker, Convert) and not maker.lasting)

    wanted = [t.name for op in backward(block) for t in op.inputs if _is_activation(tensors.get(t.name))]
    kept: dict[str, Tensor] = {}
    again: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in kept or name in again:
            continue
        if is_kept(name):
            kept[name] = tensors[name]
        else:
            again.add(name)
            wanted += [t.name for t in makers[name].inputs if _is_activation(tensors.get(t.name))]
    recompute = tuple(op for op in block.ops if op.output.name in again)
    return Saved(tuple(kept.values()), tuple(op.output for op in recompute), recompute)


def _is_activation(t: Tensor | None) -> bool:
    return t is not None and t.kind is Kind.ACTIVATION
