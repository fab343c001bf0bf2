"""Rematerialisation policies: which activations of a block are kept for its backward pass; the rest are recomputed.

A policy is a predicate on the operation that makes a tensor; users name it in our words, JAX's or Megatron-LM's. Not
here: bytes or seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from meshwise.core.backward import backward
from meshwise.core.errors import LayoutError, UnknownNameError
from meshwise.core.kernels import Scan, SelectiveScan
from meshwise.core.tensors import Attention, Block, Convert, Einsum, Elementwise, Kind, Op, Tensor
from meshwise.sharding.layout_fields import read_count


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
    mixes = isinstance(op, Attention | Scan | SelectiveScan)
    return mixes or isinstance(op, Einsum) or (isinstance(op, Elementwise) and op.joins)


#: Heads, channels and groups of attention and of what stands in its place.
_MIXING_AXES = ("N", "K", "Nr", "Kr", "Cr")


_POLICIES = (
    RematPolicy("none", lambda _: True, "keep every activation that the backward pass reads", "everything_saveable"),
    RematPolicy(
        "matmuls",
        _is_matmul,
        "keep the outputs of matmuls, attention and recurrences, repeat the elementwise rest",
        "dots_saveable",
    ),
    RematPolicy(
        "attention",
        lambda op: _is_matmul(op) and any(a.partition(".")[0] in _MIXING_AXES for t in op.tensors for a in t.axes),
        "keep q, k, v and attention's outputs, repeat the feed-forward part",
        "save_only_these_names('q', 'k', 'v', 'attention', 'o')",
    ),
    RematPolicy(
        "full", lambda _: False, "keep only the input of each layer, repeat its whole forward pass", "nothing_saveable"
    ),
)

#: Every policy that a search tries by the name that users type, from least to most recomputation.
REMAT_POLICIES = {p.name: p for p in _POLICIES}


def _is_projection(op: Op) -> bool:
    """Whether an operation multiplies by a weight that all batches share: a "dot with no batch dimensions"."""
    weights = [t for t in op.inputs if t.kind is Kind.WEIGHT]
    if not isinstance(op, Einsum) or len(weights) != 1:
        return False
    (other,) = (t for t in op.inputs if t.kind is not Kind.WEIGHT)
    return not set(weights[0].axes) & set(other.axes) & set(op.output.axes)


#: Policies that are asked for by name: others of `REMAT_POLICIES` recompute as much and keep less, or keep as much and
#: recompute less.
FURTHER_POLICIES = {
    p.name: p
    for p in (
        RematPolicy(
            "selective",
            lambda op: not isinstance(op, Attention),
            "repeat attention itself, keep the rest; fused attention never keeps its scores, so little is saved",
            "save_any_names_but_these('attention')",
        ),
        RematPolicy(
            "projections",
            _is_projection,
            "keep the products with weights, repeat attention, experts and the elementwise rest",
            "dots_with_no_batch_dims_saveable",
        ),
    )
}


def _reads_latent(op: Op) -> bool:
    """Whether an operation multiplies a latent, in whichever format."""
    names = (t.name if t.dtype is None else t.name.removeprefix(f"{t.dtype.value}.") for t in op.inputs)
    return isinstance(op, Einsum) and any(name.startswith(("q_a", "kv_a")) for name in names)


#: Part of a layer, by Megatron-LM's name for it -> whether an operation is of it.
MODULES: dict[str, Callable[[Op], bool]] = {
    "core_attn": lambda op: isinstance(op, Attention),
    "layernorm": lambda op: op.name in ("norm.attn", "norm.mlp"),
    "mla_up_proj": lambda op: op.name in ("rope.q", "rope.k") or _reads_latent(op),
    "mlp": lambda op: op.name.removeprefix("bias.") in ("gate", "up", "act", "down"),
    "moe_act": lambda op: op.name == "expert.act",
    "moe": lambda op: (
        op.name.startswith(("expert.", "shared.", "dispatch")) or op.name in ("router", "top_k", "weigh", "combine")
    ),
    "shared_experts": lambda op: op.name.startswith("shared."),
}

#: What makes a module one of the model's: rotary embeddings alone are no projections out of a latent.
_NEEDED: dict[str, Callable[[Op], bool]] = {"mla_up_proj": _reads_latent, "moe": lambda op: op.name == "router"}


def remat_policy(name: str) -> RematPolicy:
    """Find a policy, or make one of a list of operations.

    >>> remat_policy("save:attention+o").jax_name
    "save_only_these_names('attention', 'o')"

    Args:
        name: of `REMAT_POLICIES` or `FURTHER_POLICIES`; or "save:" or "recompute:" and names, joined by "+", of
            operations, of the tensors that they make, or of `MODULES`: only these are kept, or all but these.

    Raises:
        LayoutError: a list without names, or with one twice.
        UnknownNameError: with the names there are.
    """
    verb, colon, listed = name.partition(":")
    if colon and verb in ("save", "recompute"):
        return _list_policy(verb, tuple(listed.split("+")))
    known = REMAT_POLICIES | FURTHER_POLICIES
    if name not in known:
        raise UnknownNameError("remat policy", name, (*known, "save:...", "recompute:..."))
    return known[name]


@cache
def _list_policy(verb: str, names: tuple[str, ...]) -> RematPolicy:
    text = f"{verb}:{'+'.join(names)}"
    if not all(names):
        raise LayoutError(f"layout: expected names of operations, as in {verb}:attention+o, found {text!r}")
    if len(set(names)) < len(names):
        raise LayoutError(f"layout: {text!r} names an operation twice")
    quoted = ", ".join(map(repr, names))
    saves = verb == "save"
    jax_name = f"save_only_these_names({quoted})" if saves else f"save_any_names_but_these({quoted})"
    meaning = f"{'keep' if saves else 'repeat'} {', '.join(names)}"
    return RematPolicy(text, lambda op: _is_any(op, names) is saves, meaning, jax_name)


def _is_any(op: Op, names: Iterable[str]) -> bool:
    return any(name in (op.name, op.output.name) or (name in MODULES and MODULES[name](op)) for name in names)


def check_remat(name: str, blocks: Iterable[Block]) -> None:
    """Refuse a policy that lists what no layer has.

    Args:
        name: as for `remat_policy`.
        blocks: of the program.

    Raises:
        UnknownNameError: with the operations and modules of the layers.
    """
    verb, _, listed = name.partition(":")
    if verb not in ("save", "recompute"):
        return
    ops = [op for block in blocks if block.role == "layer" for op in block.ops]
    found = dict.fromkeys(op.name for op in ops)
    modules = [m for m, is_of in MODULES.items() if any(_NEEDED.get(m, is_of)(op) for op in ops)]
    tensors = {op.output.name for op in ops}
    for one in listed.split("+"):
        if one not in found and one not in modules and one not in tensors:
            raise UnknownNameError("operation of a layer (remat)", one, (*found, *modules))


@dataclass(frozen=True, slots=True)
class Saved:
    """What a policy means for one block.

    Args:
        kept: activations held from the forward to the backward pass.
        recompute: the operations that make the others again just before the backward pass, in order.
    """

    kept: tuple[Tensor, ...]
    recompute: tuple[Op, ...]


def is_passing(op: Op) -> bool:
    """Whether what `op` makes is used up by the next operation: a weight widened for one multiplication."""
    return isinstance(op, Convert) and not op.lasting


def saved_activations(block: Block, policy: RematPolicy) -> Saved:
    """Which activations of `block` are kept, and what is run again, for its backward pass to find what it reads."""
    makers = {op.output.name: op for op in block.ops}
    activations, read = _activations_read(block)

    def is_kept(maker: Op | None) -> bool:
        return maker is None or (policy.keeps(maker) and not is_passing(maker))

    wanted = [*read]
    kept: dict[str, Tensor] = {}
    again: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in kept or name in again:
            continue
        if is_kept(makers.get(name)):
            kept[name] = activations[name]
        else:
            again.add(name)
            wanted += [t.name for t in makers[name].inputs if t.name in activations]
    return Saved(tuple(kept.values()), tuple([op for op in block.ops if op.output.name in again]))


@lru_cache(maxsize=256)  # every policy asks again
def _activations_read(block: Block) -> tuple[Mapping[str, Tensor], tuple[str, ...]]:
    """The activations of a block by name, as they are made, and the names of those that its backward pass reads."""
    tensors = {t.name: t for op in reversed(block.ops) for t in (*op.inputs, op.output)}
    tensors |= {op.output.name: op.output for op in block.ops}  # the maker's axes (T), not a reader's (S)
    activations = {name: t for name, t in tensors.items() if t.kind is Kind.ACTIVATION}
    read = tuple([t.name for op in backward(block) for t in op.inputs if t.name in activations])
    return activations, read


#: Other spelling -> policy. The first are those of `jax.checkpoint_policies`, the last Megatron-LM's.
REMAT_ALIASES = {
    "everything_saveable": "none",
    "nothing_saveable": "full",
    "dots_saveable": "matmuls",
    "checkpoint_dots": "matmuls",
    "dots_with_no_batch_dims_saveable": "projections",
    "checkpoint_dots_with_no_batch_dims": "projections",
    "off": "none",
    "uniform": "full",
    "block": "full",
}

_CALLS = {
    "save_only_these_names": "save",
    "save_any_names_but_these": "recompute",
    "save_and_offload_only_these_names": "save",
}


@dataclass(frozen=True, slots=True)
class RematRequest:
    """What was asked for.

    Args:
        policy: as `remat_policy` takes it.
        layers: how many layers follow it; None where that was not said.
        of_each_stage: whether `layers` counts those of one stage, or piece of a stage, of the pipeline.
        offloads: whether what is kept goes to the host.
    """

    policy: str
    layers: int | None = None
    of_each_stage: bool = False
    offloads: bool = False


def parse_remat(text: str) -> RematRequest:
    """Read a remat policy as users write it.

    >>> parse_remat("full:40")
    RematRequest(policy='full', layers=40, of_each_stage=False, offloads=False)
    >>> parse_remat("save_only_these_names('attention', 'o')").policy
    'save:attention+o'
    >>> parse_remat("selective:core_attn+layernorm").policy, parse_remat("dots_saveable").policy
    ('recompute:core_attn+layernorm', 'matmuls')

    Args:
        text: a policy, or `save:` or `recompute:` and a list of operations, each with `:n` after it where only n
            layers follow it; JAX's names; Megatron-LM's `selective`, with a list of modules or without, `uniform` and
            `block:n` (n layers of each stage).

    Raises:
        LayoutError: what has no meaning here, and why.
        UnknownNameError: with the names there are.
    """
    found = re.fullmatch(r"\s*([a-z_0-9]+)\s*\((.*)\)\s*(?::\s*(\d+))?\s*", text.lower())
    if found is not None and found[1] in _CALLS:
        names = re.sub(r"[\s'\"\[\]]", "", found[2]).replace(",", "+").strip("+")
        return _request(f"{_CALLS[found[1]]}:{names}", found[3], offloads="offload" in found[1])
    name, *rest = re.sub(r"\s", "", text.lower()).split(":")
    name = "recompute" if name == "selective" and rest and not rest[0].isdigit() else name
    if name in ("save", "recompute"):
        name = f"{name}:{rest.pop(0).replace(',', '+') if rest else ''}"
    if len(rest) > 1:
        raise LayoutError(f"layout: expected remat=POLICY or remat=POLICY:LAYERS, found remat={text}")
    count = rest[0] if rest else None
    if count is not None and not re.fullmatch(r"[0-9]+", count):
        raise LayoutError(f"layout: expected a number of layers after remat={name}:, found {count!r}")
    if name == "uniform" and count not in (None, "1"):
        raise LayoutError(
            f"layout: remat={text} keeps one input for every {count} layers, which is not modelled; use remat=full "
            "(uniform:1), or remat=full:LAYERS for fewer layers"
        )
    if name == "block" and count is None:
        raise LayoutError("layout: remat=block needs the layers of each stage that are recomputed, as in remat=block:4")
    return _request(REMAT_ALIASES.get(name, name), None if name == "uniform" else count, of_each_stage=name == "block")


def _request(policy: str, count: str | None, **how: bool) -> RematRequest:
    remat_policy(policy)  # checks the name
    return RematRequest(policy, None if count is None else read_count("remat_layers", count), **how)
