"""Parts of an HLO instruction: arrays, groups of devices, dimensions of a library's product, windows.

Not here: what the instruction is (`hlo`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from meshwise.compiler.hlo.groups import parse_groups
from meshwise.profile.kinds import short_dtype
from meshwise.profile.reading.protos import Message
from meshwise.profile.trace import Array

#: Number of an element type -> its name: openxla/xla, xla_data.proto.
_TYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64", 10: "f16", 11: "f32",
    12: "f64", 15: "c64", 16: "bf16", 18: "c128", 19: "f8e5m2", 20: "f8e4m3fn", 21: "s4", 22: "u4", 23: "f8e4m3b11fnuz",
    24: "f8e5m2", 25: "f8e4m3fnuz", 26: "s2", 27: "u2", 28: "f8e4m3fn", 29: "f8e4m3fn", 32: "f4e2m1fn", 33: "f8e4m3fn",
}  # fmt: skip


def arrays_of(shape: Message) -> tuple[Array, ...]:
    """All arrays of a shape, those in tuples one after the other."""
    if shape.tuple_shapes:
        return tuple(a for part in shape.tuple_shapes for a in arrays_of(part))
    if shape.element_type not in _TYPES:
        return ()
    return (Array(tuple(shape.dimensions), short_dtype(_TYPES[shape.element_type])),)


def elements(shape: Message) -> int:
    """Elements of all arrays of a shape."""
    return sum(math.prod(a.dims) for a in arrays_of(shape))


def groups_of(instruction: Message) -> tuple[tuple[int, ...], ...]:
    """Devices that take part together."""
    listed = instruction.replica_groups or instruction.collective_device_list.replica_groups
    if listed:
        return tuple(tuple(g.replica_ids) for g in listed)
    iota = instruction.iota_groups
    if not iota.num_devices_per_group:
        iota = instruction.collective_device_list.iota_replica_group_list
    if iota.num_devices_per_group:
        shape = list(iota.iota_reshape_dims)
        numbers = np.arange(math.prod(shape)).reshape(shape)
        if iota.iota_transpose_perm:
            numbers = numbers.transpose(list(iota.iota_transpose_perm))
        return tuple(tuple(int(n) for n in row) for row in numbers.reshape(-1, iota.num_devices_per_group))
    if instruction.mesh_axes_groups.mesh.axes:
        return _mesh_groups(instruction.mesh_axes_groups)
    if instruction.source_target_pairs:
        return _linked([(p.source, p.target) for p in instruction.source_target_pairs])
    return ()


def _linked(pairs: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Devices that pairs of sender and receiver link: rings, chains.

    >>> _linked([(0, 1), (1, 0), (2, 3), (3, 2)]), _linked([(0, 2), (2, 4)])
    (((0, 1), (2, 3)), ((0, 2, 4),))
    """
    groups: list[set[int]] = []
    for pair in pairs:
        touched = [group for group in groups if group & {*pair}]
        groups = [group for group in groups if not group & {*pair}] + [set(pair).union(*touched)]
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _mesh_groups(message: Message) -> tuple[tuple[int, ...], ...]:
    """Groups along (parts of) axes of a mesh: the axes are brought to the end, in the order in which they are named."""
    sizes = [axis.size for axis in message.mesh.axes]
    order = list(message.mesh.device_ids) or list(range(math.prod(sizes)))
    extents: list[int] = []
    places: dict[tuple[int, int], int] = {}
    for number, size in enumerate(sizes):
        parts = sorted(
            {1, size}.union(*((r.sub_axis.pre_size, r.sub_axis.pre_size * r.sub_axis.size) for r in message.axes
                              if r.mesh_axis_index == number and r.sub_axis.size))
        )  # fmt: skip
        for low, high in itertools.pairwise(parts):
            places[number, low] = len(extents)
            extents.append(high // low)
    wanted = [
        place for r in message.axes for (number, low), place in places.items()
        if number == r.mesh_axis_index and (not r.sub_axis.size or low == r.sub_axis.pre_size)
    ]  # fmt: skip
    rest = [place for place in range(len(extents)) if place not in wanted]
    size = math.prod(extents[place] for place in wanted)
    array = np.array(order).reshape(extents or [1]).transpose([*rest, *wanted] or [0])
    return tuple(tuple(int(n) for n in row) for row in array.reshape(-1, size))


@lru_cache(maxsize=4096)
def gemm_dimensions(config: bytes) -> tuple[list[int], list[int], list[int]]:
    """Batch and contracted dimensions of a product that a library does, from its configuration."""
    try:
        value = json.loads(config)
    except ValueError:
        return [], [], []
    value = value.get("gemm_backend_config", value) if isinstance(value, Mapping) else {}
    numbers = value.get("dot_dimension_numbers", {}) if isinstance(value, Mapping) else {}
    names = ("lhs_batch_dimensions", "lhs_contracting_dimensions", "rhs_contracting_dimensions")
    batches, left, right = ([int(n) for n in numbers.get(name, ())] for name in names)
    return batches, left, right


def window_pairs(window: Message, size: int, results: int) -> int:
    """Pairs of a result and a place of the window that meet an input, along one dimension."""
    spread, gap = max(window.base_dilation, 1), max(window.window_dilation, 1)
    at = np.arange(results)[:, None] * window.stride + np.arange(window.size)[None, :] * gap - window.padding_low
    return int(((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)).sum())


_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")
_REPLICA_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")


def arrays_in(text: str) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Results and operands of an instruction as text, as TPU traces name their events.

    >>> arrays_in("%f.1 = bf16[8,128]{1,0:T(8,128)} fusion(f32[64]{0} %p.1), kind=kLoop, calls=%c")
    ((Array(dims=(8, 128), dtype='bf16'),), (Array(dims=(64,), dtype='fp32'),))
    """
    _, mark, right = text.partition(" = ")
    if not mark:
        return (), ()
    opening = re.search(r"[}\])] [a-z][\w\-]*\(", right)
    result, rest = (right[: opening.start() + 1], right[opening.end() :]) if opening else (right, "")
    return _arrays(result), _arrays(re.split(r"\), \w+=", rest, maxsplit=1)[0])


def _arrays(text: str) -> tuple[Array, ...]:
    found = _ARRAY.findall(text)
    return tuple(Array(tuple(int(d) for d in dims.split(",") if d), short_dtype(dtype)) for dtype, dims in found)


def groups_in(text: str) -> tuple[tuple[int, ...], ...]:
    """Groups of devices of an instruction as text, () where it has none.

    >>> groups_in("%r = f32[8]{0} all-reduce(f32[8]{0} %p), replica_groups=[2,2]<=[4], to_apply=%add")
    ((0, 1), (2, 3))
    >>> groups_in("%c = f32[8]{0} collective-permute(f32[8]{0} %p), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}")
    ((0, 1), (2, 3))
    """
    found = _REPLICA_GROUPS.search(text)
    if found is None and (pairs := _PAIRS.search(text)):
        return _linked([(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1])])
    return parse_groups(found[1]) if found else ()
