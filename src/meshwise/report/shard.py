"""The shard verb's answer: the collectives of a sharded product, the book's case, the alternatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from meshwise.core.explanation import Explanation
from meshwise.core.units import format_bytes, format_flops, format_time
from meshwise.costs.product import PricedStep, PricedWay, Product
from meshwise.hardware import Cluster
from meshwise.report.collective import axis_mapping_words
from meshwise.report.report import Report
from meshwise.report.table import Columns, cells, or_dash, pick, picked, said, table, tabulate
from meshwise.sharding import Indices, book_case
from meshwise.sharding.notation import ShardedTensor

_SECONDS = "communication_time_s=communication_time compute_time_s=compute_time"

#: Ways that the table shows; JSON has all.
_WAYS_SHOWN = 6
_BOOK = "the book, Sharded Matrices and How to Multiply Them"
_CASES = {
    1: "no summed axis is split: every device multiplies what it holds",
    2: "one input is split on a summed axis: it is gathered, or its partner sliced and the sum taken after",
    3: "the inputs are split alike on a summed axis: multiply blocks, then add them up over devices",
    4: "one mesh axis splits two axes: one input must be gathered first",
}


def shard_report(
    product: Product, cluster: Cluster | None, sizes: Mapping[str, int], inputs: Mapping[str, Any]
) -> Report:
    """Which collectives a sharded product needs."""
    best = product.ways[0]
    case = _case(product)
    laid = (
        (cluster.describe(), f"where the mesh lies: {axis_mapping_words(product.wiring, product.fabric)}")
        if cluster is not None and product.wiring is not None and product.fabric is not None
        else ()
    )
    data = _data(product, case, sizes)
    return Report(
        command="shard",
        inputs=inputs,
        answer=_answer(best),
        data=data,
        body=said(
            tabulate(_STEPS, best.steps) if best.steps else None,
            tabulate(_TENSORS, data["tensors"]),
            _ways_table(product) if len(product.ways) > 1 else None,
        ),
        assumed=said(
            f"case {case} of the book: {_CASES[case]}" if case else None,
            *laid,
            _ranking(product),
        ),
        not_modelled=() if best.overlap else (_OVERLAP,),
        next_steps=_next_steps(product, cluster),
        explanations=_explanations(best),
    )


_OVERLAP = "overlap of communication with the product (a collective matmul hides most of it)"


def _case(product: Product) -> int | None:
    """Find the book's case; None for a plain reshard."""
    expression = product.expression
    if expression.is_reshard:
        return None
    named = [tuple(str(a) for a in t.axes) for t in expression.tensors]
    return book_case(Indices(tuple(named[:-1]), named[-1]), [t.sharding for t in expression.inputs])


def _answer(best: PricedWay) -> str:
    if not best.steps:
        words = "No communication"
    else:
        words = ", then ".join(
            f"{s.collective.kind.value} {s.tensor.name or 'the array'} over {','.join(s.collective.mesh_axes)}"
            for s in best.steps
        )
        words = words[0].upper() + words[1:]
    if best.communication_time is not None and best.steps:
        words += f": {format_time(best.communication_time)}"
    elif best.bytes_sent is not None and best.steps:
        words += f": each device sends {format_bytes(best.bytes_sent)}"
    return words


_STEPS: Columns = {
    "!collective": "collective.kind.value",
    "!over": ("collective.mesh_axes", ",".join),
    "step": lambda s: " -> ".join(_around(s)),
    ">bytes": ("num_bytes", format_bytes),
    ">time": ("time", format_time),
}

_TENSORS: Columns = {
    "!tensor": "tensor",
    "one device holds": ("local_shape", lambda shape: " x ".join(f"{n:,}" for n in shape) or "1"),
}


def _around(step: PricedStep) -> tuple[str, str]:
    """The array before and after a step, in the notation."""
    before = replace(step.tensor, sharding=step.collective.before)
    after = replace(step.tensor, sharding=step.collective.after)
    return str(before), str(after)


def _ways_table(product: Product) -> RenderableType:
    """Compare the ways; the columns are those that are known."""
    shown = product.ways[:_WAYS_SHOWN]
    known: dict[str, tuple[str, Callable[[Any], str]]] = {
        ">sent": ("bytes_sent", format_bytes),
        ">FLOPs a device": ("flops", format_flops),
        ">time": ("time", format_time),
    }
    columns: Columns = {
        "collectives": lambda way: ", ".join(_short(s) for s in way.steps) or "none",
        **{n: c for n, c in known.items() if any(way.steps and pick(way, c[0]) is not None for way in shown)},
    }
    rows = [(f"{n}{' <- cheapest' if n == 1 else ''}", *cells(columns, way)) for n, way in enumerate(shown, 1)]
    if len(product.ways) > len(shown):
        rows.append(("", f"... {len(product.ways) - len(shown)} more with --json", *[""] * (len(columns) - 1)))
    return table(("!way", *columns), rows)


def _short(step: PricedStep) -> str:
    return f"{step.collective.kind.value} {step.tensor.name} {','.join(step.collective.mesh_axes)}"


def _ranking(product: Product) -> str:
    best = product.ways[0]
    if best.time is not None:
        if best.overlap:
            return "the ways are ranked by the longer of computing at peak and communicating, as --overlap asks"
        return "the ways are ranked by computing at peak plus communicating; --overlap: by the longer of the two"
    if best.steps and best.bytes_sent is not None:
        return "the ways are ranked by the bytes that each device sends"
    return "the ways are ranked by structure alone, all axes taken as equally long"


def _next_steps(product: Product, cluster: Cluster | None) -> tuple[str, ...]:
    if product.mesh is None:
        return ("sizes of the mesh and the axes give bytes: --mesh X=4,Y=8 --set I=4096,J=8192",)
    return () if cluster is not None else ("sizes and a cluster give times: --set I=4096,J=8192 --on v5e:4x8",)


def _data(product: Product, case: int | None, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "expression": str(product.expression),
        "book_case": case,
        "collectives": [_step_data(s) for s in product.ways[0].steps],
        **picked(product.ways[0], _SECONDS),
        "tensors": [{"tensor": str(t), "local_shape": _held(t, product, sizes)} for t in product.expression.tensors],
        "alternatives": [
            {
                "cheapest": number == 0,
                "collectives": [_step_data(s) for s in way.steps],
                **picked(
                    way, "bytes_sent_per_device=bytes_sent flops_per_device=flops devices_repeating_work=repeated"
                ),
                **picked(way, _SECONDS),
            }
            for number, way in enumerate(product.ways)
        ],
        "wiring": None if product.wiring is None else {a: list(e) for a, e in product.wiring.items()},
        "dimensions": None if product.fabric is None else [d.name for d in product.fabric.dimensions],
    }


def _held(t: ShardedTensor, product: Product, sizes: Mapping[str, int]) -> list[int] | None:
    """The block of a tensor that one device holds, where its sizes are known."""
    if product.mesh is None or not all(isinstance(a, int) or a in sizes for a in t.axes):
        return None
    return list(t.local_shape(product.mesh, sizes))


def _step_data(step: PricedStep) -> dict[str, Any]:
    before, after = _around(step)
    return {
        **picked(step, "kind=collective.kind mesh_axes=collective.mesh_axes tensor=tensor.name"),
        "before": before,
        "after": after,
        **picked(step, "bytes=num_bytes bytes_sent_per_device=bytes_sent time_s=time"),
    }


def _explanations(way: PricedWay) -> tuple[Explanation, ...]:
    steps = [
        Explanation(
            f"{s.collective.kind.value} {s.tensor.name}".rstrip(),
            "max(hops x latency, bytes x seconds per byte of the wire)",
            f"{s.num_bytes:,.0f} bytes" if s.num_bytes is not None else "no sizes given",
            or_dash(s.time, format_time),
            _BOOK,
        )
        for s in way.steps
    ]
    if way.compute_time is not None and way.flops:
        steps.append(
            Explanation(
                "arithmetic",
                "2 x one device's part of the index space / peak FLOP/s",
                f"{way.flops:.6g} / {way.flops / way.compute_time:.4g}",
                format_time(way.compute_time),
                _BOOK,
            )
        )
    return tuple(steps)
