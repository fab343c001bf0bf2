"""What a placed block sends: bytes by pass, purpose, kind of collective and mesh axes, before any wire is known.

Weights and gradients of one block travel together (one bucket a pass); activations one by one. Not here: seconds (`step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from meshwise.costs.extents import Extents, element_bytes
from meshwise.jobs import Precision
from meshwise.sharding import CollectiveKind, Sharding
from meshwise.sharding.place import PlacedBlock, Purpose, Transfer

__all__ = ["Flow", "Pass", "block_flows", "bucket_flows"]


class Pass(StrEnum):
    """When a transfer happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Flow:
    """Collectives of one kind that one block causes in one pass.

    Args:
        name: the tensors.
        when, purpose, kind, mesh_axes: what it is.
        num_bytes: of each collective, in the convention of `collectives.wire_time` (float or array).
        count: how many of them in a pass.
    """

    name: str
    when: Pass
    purpose: Purpose
    kind: CollectiveKind
    mesh_axes: tuple[str, ...]
    num_bytes: Any
    count: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Transfers that share a flow: the structure, before sizes."""

    when: Pass
    purpose: Purpose
    kind: CollectiveKind
    mesh_axes: tuple[str, ...]
    transfers: tuple[Transfer, ...]


def bucket_flows(placed: PlacedBlock) -> tuple[_Bucket, ...]:
    """Group the transfers of a block once per structure: weights and gradients per pass, activations each."""
    groups: dict[tuple[Any, ...], list[Transfer]] = {}
    passes = ((Pass.FORWARD, placed.forward), (Pass.BACKWARD, placed.backward), (Pass.STEP, placed.step))
    for when, items in passes:
        for i, item in enumerate(items):
            if isinstance(item, Transfer):
                c = item.collective
                alone = (i,) if item.purpose is Purpose.ACTIVATIONS else ()
                groups.setdefault((when, item.purpose, c.kind, c.mesh_axes, *alone), []).append(item)
    return tuple(_Bucket(*key[:4], tuple(items)) for key, items in groups.items())


def block_flows(buckets: tuple[_Bucket, ...], extents: Extents, precision: Precision) -> tuple[Flow, ...]:
    """Bytes of every flow.

    Args:
        buckets: from `bucket_flows`.
        extents: local sizes.
        precision: bytes per element.
    """
    sizes: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    for b in buckets:
        total: Any = 0.0
        for t in b.transfers:
            total = total + _transfer_bytes(t, extents) * element_bytes(t.tensor, precision)
        key = (b.when, b.purpose, b.kind, b.mesh_axes)
        if b.purpose is Purpose.ACTIVATIONS:
            # Equal activations (the gathered input of attention and of the feed-forward part) are one flow, counted.
            key = (*key, _signature(b.transfers[0]))
        name = b.transfers[0].tensor.name if len(b.transfers) == 1 else f"{len(b.transfers)} {b.purpose}"
        before = sizes.get(key)
        sizes[key] = (total, before[1] + 1, f"{before[2]}, {name}") if before else (total, 1, name)
    return tuple(Flow(name, *key[:4], total, count) for key, (total, count, name) in sizes.items())


@lru_cache(maxsize=65536)
def _signature(t: Transfer) -> tuple[Any, ...]:
    """What decides the bytes of a transfer: axes, splits, format."""
    pairs = zip(t.tensor.axes, _whole(t).splits, strict=True)
    return (tuple(sorted(pairs)), t.tensor.dtype, t.tensor.kind)


def _whole(t: Transfer) -> Sharding:
    """The sharding whose local block is the array that the collective is counted by."""
    c = t.collective
    return c.after if c.kind is CollectiveKind.ALL_GATHER else c.before


def _transfer_bytes(t: Transfer, extents: Extents) -> Any:
    """Elements in the convention of `wire_time`."""
    local = extents.elements(t.tensor, _whole(t))
    if t.collective.kind is CollectiveKind.ALL_TO_ALL:
        return local * extents.devices(t.collective.mesh_axes)
    return local
