"""What of a layout can affect a block, so that it is placed once for all layouts that differ elsewhere."""

from __future__ import annotations

from dataclasses import fields, replace

from meshwise.core.tensors import Attention, Block, CacheUpdate, Fused, Route
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.sharding.strategy import Strategy


def relevant_choices(choices: LayoutChoices, block: Block) -> LayoutChoices:
    """`choices` with those that cannot affect `block` set to one value, so that it is placed once."""
    kinds = {type(op) for op in block.ops}
    return choices.but(
        remat=choices.remat if block.role == "layer" else "none",
        loss=choices.loss if block.role == "head" else "whole",
        expert_tensor_parallel=choices.expert_tensor_parallel or Route not in kinds,
        context_method=choices.context_method if Attention in kinds else "gather",
    )


def relevant_rules(strategy: Strategy, block: Block) -> Strategy:
    """`strategy` reduced to the rules that can affect `block`. Routing blocks keep every rule."""
    kinds = {type(op) for op in block.ops}
    if any(issubclass(kind, Route) for kind in kinds):
        return strategy
    attends = any(issubclass(kind, Attention | CacheUpdate | Fused) for kind in kinds)
    axes = {a.partition(".")[0] for op in block.ops for a in op.axes}
    tables = {
        f.name: tuple(rule for rule in getattr(strategy, f.name) if axes & set(rule.axes))
        for f in fields(strategy)
        if f.name not in ("ring", "pieces")
    }
    own: Strategy = replace(strategy, **tables)  # type: ignore[arg-type]  # all but these two are tables
    return own if attends else replace(own, attention=(), caches=(), ring=False)
