"""The roofline verb's answer: numbers, workings, the picture in the terminal and as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.core.explanation import Answer, Explanation
from meshwise.core.tensors import Attention, Op
from meshwise.core.units import (
    format_bandwidth,
    format_bytes,
    format_flops,
    format_flops_per_s,
    format_percent,
    format_time,
)
from meshwise.costs.operation import write_operation
from meshwise.costs.roofline import Memory, Rates, Roofline, flop_axes
from meshwise.report.chart import Chart, Drawing, new_figure, svg_of
from meshwise.report.report import Report
from meshwise.report.table import facts, picked

_BOOK = "the book, All About Rooflines"
_MEMORY_WORDS = {Memory.HBM: "HBM", Memory.VMEM: "on-chip memory", Memory.HOST: "host memory"}


@dataclass(frozen=True, slots=True)
class Critical:
    """From which size of `axis` the operation is compute-bound: `inf` never, 0 always."""

    axis: str
    size: float

    @property
    def whole(self) -> int | None:
        """The first whole size that is compute-bound; None when none is."""
        return None if math.isinf(self.size) else max(1, math.ceil(self.size - 1e-9 * self.size))

    def words(self) -> str:
        """In words."""
        if self.whole is None:
            return f"memory-bound at every {self.axis}"
        if self.whole == 1:
            return f"compute-bound at every {self.axis}"
        return f"compute-bound from {self.axis} = {self.whole:,}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RooflineCase(Answer):
    """All that was computed for one operation on one chip.

    Args:
        line: the times; None while an axis has no size.
        intensity: FLOPs per byte, the limit where an axis has no size; None when that limit is infinite.
        critical: for the axis that varies, at the given sizes; None when the operation has no axis.
        large: axes without a size.
        compute_source, memory_source: where the two rates come from.
    """

    op: Op
    chip: str
    sizes: Mapping[str, float]
    memory: Memory
    rates: Rates
    line: Roofline | None
    intensity: float | None
    critical: Critical | None
    large: tuple[str, ...]
    compute_source: str
    memory_source: str


def roofline_report(case: RooflineCase, inputs: Mapping[str, Any]) -> Report:
    """What the roofline of an operation is."""
    return Report(
        command="roofline",
        inputs=inputs,
        answer=_answer(case),
        data=_data(case),
        body=(facts(_facts(case)), Drawing("\n".join(_picture(case)))),
        assumed=_assumed(case),
        not_modelled=(
            "efficiency: a real kernel reaches 70 to 95 % of these rates; launch and pipeline fill add microseconds",
            "tiles that are read more than once because the operands do not fit in on-chip memory",
        ),
        next_steps=_next_steps(case),
        explanations=_explanations(case),
    )


def _answer(case: RooflineCase) -> str:
    critical = case.critical.words() if case.critical else ""
    if case.line is None:
        others = [a for a in case.large if case.critical is None or a != case.critical.axis]
        return f"{case.chip}: {critical}" + (f" ({', '.join(others)} large)" if others else "")
    span = f"{case.chip}: {format_time(case.line.lower)} to {format_time(case.line.upper)}, {case.line.bound}-bound"
    if not critical or case.critical is None or "every" in critical:
        return span
    return f"{span} ({critical})" if case.line.bound == "memory" else f"{span} (from {critical.split(' from ')[1]})"


def _facts(case: RooflineCase) -> list[tuple[str, str, str]]:
    unit = f"{case.rates.unit} unit" + (f", {case.rates.dtype.value}" if case.rates.dtype else "")
    intensity = case.intensity
    return [
        ("peak", format_flops_per_s(case.rates.flops_per_s), unit),
        ("bandwidth", format_bandwidth(case.rates.bandwidth), f"of {_MEMORY_WORDS[case.memory]}"),
        ("ridge", f"{case.rates.ridge:,.1f}", "FLOPs/byte from which arithmetic binds"),
        *([] if intensity is None else [("intensity", f"{intensity:,.4g}", "FLOPs/byte of this operation")]),
        *([] if case.line is None else _times(case.line, _MEMORY_WORDS[case.memory])),
    ]


def _times(line: Roofline, memory: str) -> list[tuple[str, str, str]]:
    share = format_percent(line.flops_per_s / line.rates.flops_per_s)
    capacity = ("capacity", format_bytes(line.rates.capacity or 0), f"the operands do not fit in {memory} together")
    return [
        ("FLOPs", format_flops(line.flops), _padding_words(line)),
        ("bytes", format_bytes(line.bytes_moved), "inputs once, output once"),
        ("arithmetic", format_time(line.math_time), "padding included" if line.padding > 1 else ""),
        ("memory", format_time(line.memory_time), ""),
        ("lower bound", format_time(line.lower), "perfect overlap"),
        ("upper bound", format_time(line.upper), "no overlap"),
        ("reached", format_flops_per_s(line.flops_per_s), f"{share} of peak, at the lower bound"),
        *([capacity] if line.fits is False else []),
    ]


def _padding_words(line: Roofline) -> str:
    tile = "x".join(map(str, line.rates.tile or ()))
    return "" if line.padding == 1 else f"tiles of {tile} pad them {line.padding:.3g} x"


def _picture(case: RooflineCase) -> list[str]:
    """Draw the roof, the ridge and the operation's point."""
    ridge, peak = case.rates.ridge, case.rates.flops_per_s
    here = case.intensity or ridge
    span = (min(ridge, here) / 20, max(ridge, here) * 20)
    chart = Chart(x=span, y=(span[0] * case.rates.bandwidth, peak * 2))
    chart.curve(lambda x: min(x * case.rates.bandwidth, peak))
    ticks = [(ridge, f"ridge {ridge:,.3g}")]
    if case.intensity:
        reached = case.line.flops_per_s if case.line else min(peak, case.intensity * case.rates.bandwidth)
        chart.mark(case.intensity, reached, "O")
        ticks.insert(0, (case.intensity, f"O {case.intensity:,.3g}"))
    lines = chart.lines(format_flops_per_s, [*ticks, (span[0], f"{span[0]:.2g}"), (span[1], f"{span[1]:,.0f}")])
    return ["FLOP/s over FLOPs/byte, both logarithmic", *lines]


def _assumed(case: RooflineCase) -> tuple[str, ...]:
    lines = ["each input is read once and the output written once, at the full rate of the data sheet"]
    dtypes = {t.dtype for t in case.op.inputs}
    if case.rates.dtype and len(dtypes) > 1:
        lines.append(f"mixed formats are computed in the narrowest that holds both, {case.rates.dtype.value}")
    if case.rates.unit == "vector":
        lines.append("runs on the vector unit at its fp32 rate, in which a fused multiply-add counts as two")
    if isinstance(case.op, Attention):
        lines.append("every query sees every key; scores stay on the chip. Causal attention has half the FLOPs")
    if case.large:
        lines.append(f"{', '.join(case.large)} without a size: taken as very large")
    if case.critical and case.rates.tile:
        lines.append("the size from which it is compute-bound leaves tile padding out")
    return tuple(lines)


def _next_steps(case: RooflineCase) -> tuple[str, ...]:
    if case.large:
        return (f"give sizes for a time: --set {','.join(f'{a}=8192' for a in case.large)}",)
    if case.line and case.line.bound == "memory" and case.memory is Memory.HBM:
        onchip = "operands that are on the chip already: --memory vmem"
        return (onchip, "narrower weights: int8 or fp8 move half the bytes of bf16") if case.op.matmul else (onchip,)
    return ()


def _data(case: RooflineCase) -> dict[str, Any]:
    return {
        "operation": write_operation(case.op),
        **picked(case, "peak_flops_per_s=rates.flops_per_s memory_bandwidth_bytes_per_s=rates.bandwidth"),
        **picked(case, "unit=rates.unit compute_dtype=rates.dtype ridge_flops_per_byte=rates.ridge"),
        "intensity_flops_per_byte": case.intensity,
        "critical": case.critical and picked(case.critical, "axis size compute_bound_from=whole"),
        **picked(
            case, "large_axes=large bound=line.bound flops=line.flops padding=line.padding bytes=line.bytes_moved"
        ),
        "time_s": case.line and picked(case.line, "arithmetic=math_time memory=memory_time lower upper"),
        **picked(case, "fits=line.fits"),
    }


def _explanations(case: RooflineCase) -> tuple[Explanation, ...]:
    rates, line = case.rates, case.line
    out = [
        Explanation(
            "ridge",
            "peak FLOP/s / bandwidth",
            f"{rates.flops_per_s:.4g} FLOP/s / {rates.bandwidth:.4g} bytes/s",
            f"{rates.ridge:,.1f} FLOPs/byte",
            case.compute_source
            if case.compute_source == case.memory_source
            else f"peak: {case.compute_source}; bandwidth: {case.memory_source}",
        )
    ]
    if line is not None:
        out += _time_explanations(case, line)
    if case.critical is not None:
        where = "bytes(A) / FLOPs(A) = 1 / ridge, solved for A".replace("A", case.critical.axis)
        given = ", ".join(f"{a} = {s:,.0f}" for a, s in case.sizes.items() if a != case.critical.axis)
        large = ", ".join(f"{a} -> infinity" for a in case.large if a != case.critical.axis)
        size = "none" if math.isinf(case.critical.size) else f"{case.critical.axis} = {case.critical.size:,.2f}"
        out.append(
            Explanation(
                f"critical {case.critical.axis}",
                where,
                "; ".join(part for part in (given, large, f"ridge = {rates.ridge:,.1f}") if part),
                size,
                _BOOK,
            )
        )
    return tuple(out)


def _time_explanations(case: RooflineCase, line: Roofline) -> list[Explanation]:
    axes = flop_axes(case.op)
    sizes = " x ".join(f"{case.sizes[a]:,.0f}" for a in axes)
    per_point = line.flops / math.prod(case.sizes[a] for a in axes)
    moved = " + ".join(
        f"{t.dtype.bytes if t.dtype else 2:g} x " + (" x ".join(f"{case.sizes[a]:,.0f}" for a in t.axes) or "1")
        for t in case.op.tensors
    )
    padding = f" x {line.padding:.4g}" if line.padding > 1 else ""
    math_time, memory_time = format_time(line.math_time), format_time(line.memory_time)
    flops, moved_bytes = f"{line.flops:.6g}", f"{line.bytes_moved:.6g}"
    peak, bandwidth = f"{line.rates.flops_per_s:.4g}", f"{line.rates.bandwidth:.4g}"
    total, intensity = "sum over tensors of bytes per element x elements", f"{line.intensity:,.4g} FLOPs/byte"
    math_formula = "FLOPs x padding / peak" if padding else "FLOPs / peak"
    longer, both = f"max({math_time}, {memory_time})", f"{math_time} + {memory_time}"
    rows = (
        ("FLOPs", " x ".join((f"{per_point:g}", *axes)), f"{per_point:g} x {sizes}", flops, _BOOK),
        ("bytes", total, moved, moved_bytes, _BOOK),
        ("intensity", "FLOPs / bytes", f"{flops} / {moved_bytes}", intensity, _BOOK),
        ("arithmetic", math_formula, f"{flops}{padding} / {peak}", math_time, case.compute_source),
        ("memory", "bytes / bandwidth", f"{moved_bytes} / {bandwidth}", memory_time, case.memory_source),
        ("lower bound", "max(arithmetic, memory)", longer, format_time(line.lower), _BOOK),
        ("upper bound", "arithmetic + memory", both, format_time(line.upper), _BOOK),
    )
    return [Explanation(*row) for row in rows]


def roofline_svg(case: RooflineCase) -> str:
    """Draw the roofline as SVG.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    rates = case.rates
    here = case.intensity or rates.ridge
    x = [min(rates.ridge, here) / 20, rates.ridge, max(rates.ridge, here) * 20]
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    axes.loglog(x, [min(v * rates.bandwidth, rates.flops_per_s) for v in x], color="black")
    axes.axvline(rates.ridge, color="grey", linestyle=":", label=f"ridge {rates.ridge:,.4g} FLOPs/byte")
    if case.intensity:
        reached = case.line.flops_per_s if case.line else min(rates.flops_per_s, here * rates.bandwidth)
        axes.plot([here], [reached], "o", color="tab:red", label=f"{write_operation(case.op)}: {here:,.4g} FLOPs/byte")
    axes.set(xlabel="arithmetic intensity, FLOPs/byte", ylabel="FLOP/s")
    axes.set_title(f"{case.chip}, {_MEMORY_WORDS[case.memory]} at {format_bandwidth(rates.bandwidth)}")
    axes.legend(loc="lower right", fontsize="small")
    axes.grid(visible=True, which="major", alpha=0.3)
    return svg_of(figure)
