"""The tables of docs/strategies: rules, derived collectives, schedules, remat policies; all read from the code.

Used by generate.py. Not here: the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from declared_tables import table

from meshwise.core.tensors import Block
from meshwise.costs.makespans import PipelineShape, PipelineTimes, StageTimes
from meshwise.costs.schedules import SCHEDULES
from meshwise.models import load_model
from meshwise.sharding import CollectiveKind
from meshwise.sharding.place import place_block
from meshwise.sharding.placed import LocalOp, Transfer
from meshwise.sharding.remat import FURTHER_POLICIES, REMAT_POLICIES, remat_policy, saved_activations
from meshwise.sharding.strategy import Strategy, context, data, expert, fsdp, tensor, ulysses

__all__ = ["strategy_tables"]

#: Name of a table -> the strategy, and the model whose layer it is placed on.
_PLACED: dict[str, tuple[Strategy, str]] = {
    "data": (data(), "llama-3-8b"),
    "data-1": (data(zero=1), "llama-3-8b"),
    "data-2": (data(zero=2), "llama-3-8b"),
    "fsdp": (fsdp(), "llama-3-8b"),
    "tensor": (tensor(), "llama-3-8b"),
    "tensor-unsplit": (tensor(sequence=False), "llama-3-8b"),
    "context": (context(), "llama-3-8b"),
    "context-ring": (context(ring=True), "llama-3-8b"),
    "context-whole": (context(sharded=False), "llama-3-8b"),
    "ulysses": (ulysses(), "llama-3-8b"),
    "expert": (expert(), "mixtral-8x7b"),
    "expert-width": (expert() | tensor(experts=("Fe", "C")), "mixtral-8x7b"),
    "expert-number": (expert() | tensor(experts=("E", "C")), "mixtral-8x7b"),
}

#: Field of a strategy -> what its rules split.
_TABLES = {
    "compute": "activations, and the work itself",
    "fallback": "the residual stream, where nothing else took the axis",
    "attention": "attention itself",
    "caches": "what attention keeps between steps of serving",
    "weights": "weights as stored",
    "gradients": "accumulated gradients",
    "optimizer": "optimizer state",
}


def _layer(model: str) -> Block:
    return next(b for b in load_model(model).train_program() if b.role == "layer")


def _rules(strategy: Strategy) -> str:
    """Write the rules, those of one table and mesh axis together."""
    known = {f.name for f in fields(Strategy)} - {"ring", "pieces"}
    assert known == set(_TABLES), "a table of rules has no words here"
    found: dict[tuple[str, str], list[str]] = {}
    for name, words in _TABLES.items():
        for rule in getattr(strategy, name):
            axes = ", else ".join(f"`{axis}`" for axis in rule.axes)
            found.setdefault((words, rule.mesh_axis), []).append(axes)
    rows = ((words, "; ".join(axes), f"`{over}`") for (words, over), axes in found.items())
    return table(("what is split", "its axis", "over"), rows)


def _transfers(block: Block, strategy: Strategy) -> Iterator[tuple[str, Transfer]]:
    """Every collective of a layer that keeps all its activations, and when."""
    placed = place_block(block, strategy, remat_policy("none"))
    for when, items in (("forward", placed.forward), ("backward", placed.backward), ("once a step", placed.step)):
        for item in items:
            if not isinstance(item, LocalOp) and item.collective.kind is not CollectiveKind.SLICE:
                yield when, item


def _moves(block: Block, strategy: Strategy) -> str:
    """The derived collectives, alike ones together."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for when, t in _transfers(block, strategy):
        axes = ", ".join(f"`{a}`" for a in t.collective.mesh_axes)
        purpose = "activations, beside attention" if t.purpose == "ring" else str(t.purpose)
        names = found.setdefault((when, str(t.collective.kind), axes, purpose), [])
        if t.tensor.name not in names:
            names.append(t.tensor.name)
    rows = ((when, kind, axes, purpose, _some(names)) for (when, kind, axes, purpose), names in found.items())
    return table(("when", "collective", "over", "of", "tensors"), rows)


def _some(names: list[str]) -> str:
    shown = ", ".join(f"`{n}`" for n in names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def _schedules(stages: int = 8, num_microbatches: int = 32) -> str:
    """Every schedule on one pipeline whose passes all take one second."""
    second = StageTimes(1.0, 1.0, 1.0)
    rows = []
    for name, s in SCHEDULES.items():
        shape = PipelineShape(stages, num_microbatches, 4 if s.chunks is None else 1)
        assert s.why_not(shape) is None
        each = StageTimes(*(1 / s.chunks_of(shape) for _ in range(3)))
        idle = s.idle(shape, PipelineTimes(each, each, each)) / (num_microbatches * second.total)
        first, *_, last = s.in_flight(shape)
        rows.append((f"`{name}`", s.meaning, f"{idle:.1%}", f"{first:g}, {last:g}", str(s.copies), s.source))
    head = (
        "schedule",
        "what it does",
        "idle",
        "microbatches held, first and last stage",
        "copies of weights",
        "source",
    )
    return table(head, rows)


def _policies() -> str:
    """Every policy with a name, on one layer."""
    block = _layer("llama-3-8b")
    rows = []
    for name, policy in (REMAT_POLICIES | FURTHER_POLICIES).items():
        saved = saved_activations(block, policy)
        again = [op.name for op in saved.recompute]
        rows.append((f"`{name}`", policy.meaning, _some([t.name for t in saved.kept]), _some(again) or "nothing"))
    return table(("policy", "what it does", "kept of a layer of llama-3-8b", "run again"), rows)


def strategy_tables() -> Mapping[str, str]:
    """Name -> table, for the markers in the pages."""
    out = {"schedules": _schedules(), "remat-policies": _policies()}
    for name, (strategy, model) in _PLACED.items():
        out[f"rules-{name}"] = _rules(strategy)
        out[f"moves-{name}"] = _moves(_layer(model), strategy)
    return out
