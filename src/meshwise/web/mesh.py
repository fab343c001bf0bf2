"""A mesh of devices with the blocks of a sharded product, and its collectives one at a time.

Not here: which collectives there are (`sharding`), what they cost (`costs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from meshwise.core.units import format_bytes, format_time
from meshwise.sharding import parse_expression, parse_mesh
from meshwise.sharding.mesh import Mesh
from meshwise.sharding.notation import ShardedTensor

#: Devices that are drawn; of larger meshes the first rows and columns.
_ROWS, _COLUMNS = 8, 16

#: Side of a tensor's square in pixels, and most blocks along it that have lines between them.
_SIDE, _LINES = 112, 32

Query = Mapping[str, str]


def mesh_pictures(data: Mapping[str, Any], base: str, page: Query) -> Markup:
    """The mesh and the blocks of one device, at one step.

    Args:
        data: the JSON of `shard`.
        base: the link that is shown.
        page: `step` and `device`, as text.
    """
    sizes = data["inputs"]["mesh"]
    if sizes is None:
        return Markup("<p>With a mesh, such as X=4,Y=2, the devices and their blocks are drawn here.</p>")
    mesh = parse_mesh(",".join(f"{axis}={size}" for axis, size in sizes.items()))
    steps = data["collectives"]
    step, device = _chosen(page, "step", len(steps)), _chosen(page, "device", mesh.num_devices - 1)
    axes = tuple(steps[step - 1]["mesh_axes"]) if step else ()
    tensors = _tensors(data, mesh, step)
    own = _coordinates(mesh, device)
    where = ", ".join(f"{axis}={at}" for axis, at in own.items())
    blocks = Markup().join(_block(name, tensor, mesh, own) for name, tensor in tensors)
    return Markup(
        '<figure><figcaption>What does each device hold, and whom does it talk to?</figcaption>'
        '<div class="sharded"><div>{}</div><div><p>Device {}: its blocks are filled.</p><div class="blocks">{}</div>'
        "</div></div>{}</figure>"
    ).format(_grid(mesh, device, axes, (base, step)), where, blocks, _steps(steps, step, (base, device)))  # fmt: skip


def _chosen(page: Query, key: str, last: int) -> int:
    """A whole number of the link, 0 where it is none; more than there are is the last."""
    text = page.get(key, "0")
    return min(int(text), last) if text.isascii() and text.isdecimal() and len(text) < 9 else 0


def _tensors(data: Mapping[str, Any], mesh: Mesh, step: int) -> list[tuple[str, ShardedTensor]]:
    """What is drawn: before any step all tensors, then the one that a collective changes, before and after."""
    if step == 0:
        return [("", tensor) for tensor in parse_expression(data["expression"], mesh).tensors]
    own = data["collectives"][step - 1]
    pair = parse_expression(f"{own['before']} -> {own['after']}", mesh)
    return [("before: ", pair.inputs[0]), ("after: ", pair.output)]


def _coordinates(mesh: Mesh, device: int) -> dict[str, int]:
    """Where a device stands on each axis; the last axis is the fastest."""
    found: dict[str, int] = {}
    for axis, size in reversed(mesh.axes):
        device, found[axis] = divmod(device, size)
    return {axis: found[axis] for axis, _ in mesh.axes}


def _grid(mesh: Mesh, device: int, axes: Sequence[str], at_step: tuple[str, int]) -> Markup:
    """Devices as links, the last axis to the right; those that talk with the chosen one are marked."""
    *outer, (last, columns) = mesh.axes
    rows = math.prod(size for _, size in outer)
    body = Markup()
    for row in range(min(rows, _ROWS)):
        at = _coordinates(mesh, row * columns)
        name = " ".join(f"{axis}{at[axis]}" for axis, _ in outer) or " "
        numbers = range(row * columns, row * columns + min(columns, _COLUMNS))
        cells = Markup().join(_device(mesh, device, number, axes, at_step) for number in numbers)
        body += Markup('<tr><th scope="row">{}</th>{}</tr>').format(name, cells)
    head = Markup().join(Markup('<th scope="col">{}{}</th>').format(last, k) for k in range(min(columns, _COLUMNS)))
    drawn = Markup('<div class="scroll" tabindex="0" role="group" aria-label="devices"><table class="mesh">')
    drawn += Markup("<thead><tr><td></td>{}</tr></thead><tbody>{}</tbody></table></div>").format(head, body)
    if rows > _ROWS or columns > _COLUMNS:
        drawn += Markup("<p>{:,} devices; the first are drawn.</p>").format(mesh.num_devices)
    return drawn


def _device(mesh: Mesh, chosen: int, number: int, axes: Sequence[str], at_step: tuple[str, int]) -> Markup:
    """One device as a link that shows its blocks."""
    own, there = _coordinates(mesh, chosen), _coordinates(mesh, number)
    talks = bool(axes) and all(there[axis] == own[axis] for axis in mesh.names if axis not in axes)
    kind, more = ("here", ", shown") if number == chosen else ("talks", ", talks with it") if talks else ("device", "")
    words = ", ".join(f"{axis}={n}" for axis, n in there.items()) + more
    cell = Markup('<td><a class="{}" href="{}" aria-label="device {}">{}</a></td>')
    return cell.format(kind, _link(at_step[0], at_step[1], number), words, number)


def _block(before: str, tensor: ShardedTensor, mesh: Mesh, own: Mapping[str, int]) -> Markup:
    """A tensor as a square with the block of one device; dimensions after the second are not drawn."""
    parts = [(math.prod(mesh.size(a) for a in split), _index(split, mesh, own)) for split in tensor.sharding.splits]
    rows, columns = (*parts, (1, 0), (1, 0))[:2] if len(parts) > 1 else ((1, 0), parts[0] if parts else (1, 0))
    lines = Markup()
    for (count, _), across in ((rows, False), (columns, True)):
        for k in range(1, count if count <= _LINES else 1):
            at = f"{_SIDE * k / count:.2f}"
            ends = (at, 0, at, _SIDE) if across else (0, at, _SIDE, at)
            lines += Markup('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(*ends)
    kind = "b" if tensor.sharding.unreduced else "a"
    held = 1 / math.prod(count for count, _ in parts) if parts else 1.0
    summed = " (still to be summed)" if tensor.sharding.unreduced else ""
    words = f"{before}{tensor}: 1/{round(1 / held):,} of it{summed}"
    whole = Markup('<svg width="{0}" height="{0}" viewBox="0 0 {0} {0}" role="img" aria-label="{1}">')
    rail = Markup('<rect class="rail" width="{0}" height="{0}"/>').format(_SIDE)
    place = [_SIDE * columns[1] / columns[0], _SIDE * rows[1] / rows[0], _SIDE / columns[0], _SIDE / rows[0]]
    block = Markup('<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/>').format(kind, *place)
    drawn = whole.format(_SIDE, words) + rail + block + lines
    return Markup('<div class="block">{}</svg><p>{}</p></div>').format(drawn, words)


def _index(split: Sequence[str], mesh: Mesh, own: Mapping[str, int]) -> int:
    """Which block of a dimension a device holds; axes stand major to minor."""
    at = 0
    for axis in split:
        at = at * mesh.size(axis) + own[axis]
    return at


def _steps(steps: Sequence[Mapping[str, Any]], step: int, of_device: tuple[str, int]) -> Markup:
    """The collectives as links, the one that is shown marked."""
    if not steps:
        return Markup("<p>No communication: every device multiplies what it holds.</p>")
    items = Markup()
    for number, one in enumerate((None, *steps)):
        words = "what each device holds at the start" if one is None else _words(one)
        mark = Markup(' aria-current="step"') if number == step else ""
        items += Markup('<li><a href="{}"{}>{}</a></li>').format(_link(of_device[0], number, of_device[1]), mark, words)
    return Markup('<ol class="steps" start="0">{}</ol>').format(items)


def _link(base: str, step: int, device: int) -> str:
    """The same answer with another step or device drawn."""
    own = "&".join(f"{key}={value}" for key, value in (("step", step), ("device", device)) if value)
    return f"{base}&{own}" if own else base


def _words(step: Mapping[str, Any]) -> str:
    sent = (
        "" if step["bytes_sent_per_device"] is None else f", each sends {format_bytes(step['bytes_sent_per_device'])}"
    )
    takes = "" if step["time_s"] is None else f" in {format_time(step['time_s'])}"
    return f"{step['kind']} of {step['tensor'] or 'the array'} over {', '.join(step['mesh_axes'])}{sent}{takes}"
