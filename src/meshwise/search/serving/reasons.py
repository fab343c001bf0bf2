"""Why other plans lose: well-known alternatives to the best plan, each at its best, with the number that decides.

Not here: the search (`planner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.core.units import format_time
from meshwise.search.serving.constraints import ServingConstraints
from meshwise.search.serving.pairs import Pairs
from meshwise.search.serving.tables import Table


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An alternative, and why it loses.

    Args:
        name: what it is.
        reason: in words, with its number.
    """

    name: str
    reason: str


def neighbours(
    constraints: ServingConstraints,
    groups: Sequence[Pairs],
    best: tuple[int, int],
    prefill: Table,
    decode: Table,
) -> tuple[Neighbour, ...]:
    """Compare the best plan with the best of each kind that it is not.

    Args:
        constraints: what was asked.
        groups: all plans that fit, by mode.
        best: group and entry of the best plan.
        prefill, decode: the tables that plans are rows of.
    """
    chosen = groups[best[0]]
    winner = chosen.take(np.array([best[1]]))
    within = [pairs.keeping(constraints) for pairs in groups]
    found = []
    for name, masks in _kinds(groups, chosen, best[1], prefill, decode):
        told = _compared(constraints, groups, within, masks, winner)
        if told is not None:
            found.append(Neighbour(name, told))
    return tuple(found)


def _kinds(
    groups: Sequence[Pairs], chosen: Pairs, i: int, prefill: Table, decode: Table
) -> list[tuple[str, list[np.ndarray]]]:
    """Alternatives by name: which entries of each group they are."""
    row, first = int(chosen.decode[i]), int(chosen.prefill[i])
    layout, into = decode.layout_of(row), prefill.layout_of(first)
    batch, chips = decode.batch[row], decode.chips[row]

    def of(table: Table, axis: str) -> np.ndarray:
        sizes: np.ndarray = table.sizes[axis][table.layout]
        return sizes

    def masks(mode: str | None, own: np.ndarray | None = None, ahead: np.ndarray | None = None) -> list[np.ndarray]:
        out = []
        for pairs in groups:
            ok = np.full(len(pairs), mode in (None, pairs.mode))
            if own is not None:
                ok &= own[pairs.decode]
            if ahead is not None:
                ok &= ahead[pairs.prefill]
            out.append(ok)
        return out

    same = of(decode, "tensor") == layout.tensor
    for axis in ("cache", "width", "expert", "stage"):
        same &= of(decode, axis) == getattr(layout, axis)
    kinds = [
        (
            "engines apart for prefill and generation" if chosen.mode == "aggregated" else "engines that do both",
            masks("disaggregated" if chosen.mode == "aggregated" else "aggregated"),
        ),
        (
            f"more than {batch:,.0f} requests at once on such engines",
            masks(chosen.mode, same & (decode.batch > batch)),
        ),
        (f"fewer than {batch:,.0f}", masks(chosen.mode, same & (decode.batch < batch))),
        (f"decoding engines of more than {chips:.0f} chips", masks(None, decode.chips > chips)),
        (f"of fewer than {chips:.0f}", masks(None, decode.chips < chips)),
    ]
    ways = of(decode, "cache") * of(decode, "width") * of(decode, "stage") * of(decode, "expert")
    if layout.tensor != layout.engine_chips:
        kinds.append(("generation by tensor parallelism alone", masks(None, ways == 1)))
    if layout.width == 1:
        kinds.append(("two-dimensional weights in generation", masks(None, of(decode, "width") > 1)))
    if layout.stage == 1:
        kinds.append(("pipelines", masks(None, of(decode, "stage") > 1)))
    if into.fsdp == 1:
        kinds.append(("gathered weights in prefill", masks(None, None, of(prefill, "fsdp") > 1)))
    else:
        kinds.append(("prefill without gathered weights", masks(None, None, of(prefill, "fsdp") == 1)))
    return kinds


def _compared(
    constraints: ServingConstraints,
    groups: Sequence[Pairs],
    within: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    winner: Pairs,
) -> str | None:
    """By how much the best of these loses, in words; None if there is none, or it does not lose."""
    if not any(m.any() for m in masks):
        return "does not fit, or other layouts beat it in everything"
    ok = [m & w for m, w in zip(masks, within, strict=True)]
    if not any(m.any() for m in ok):
        return _missed(constraints, groups, masks)
    what, sign = {"throughput": ("tokens", -1), "tpot": ("tpot", 1), "ttft": ("ttft", 1)}[constraints.objective]
    if constraints.rate is not None:
        what, sign = "chips", 1
    best = [p.take(np.flatnonzero(m)[[np.argmin(sign * getattr(p, what)[m])]]) for p, m in zip(groups, ok, strict=True)
            if m.any()]  # fmt: skip
    least = min(best, key=lambda p: float(sign * getattr(p, what)[0]))
    value = float(getattr(least, what)[0])
    own = float(getattr(winner, what)[0])
    if what == "tokens":
        share = 100 * (1 - value / own)
        if share < -0.05:  # as good within 1 %, and slower
            latencies = f"TTFT {format_time(float(least.ttft[0]))}, TPOT {format_time(float(least.tpot[0]))}"
            return f"{-share:.1f} % more tokens/s per chip, {value:,.1f}, at {latencies}"
        return f"{share:.1f} % fewer tokens/s per chip: {value:,.1f}" if share > 0.05 else None
    if what == "chips":
        return f"{value:g} chips" if value > own else None
    return (
        f"{what.upper()} {format_time(value)}, {100 * (value / own - 1):.1f} % more" if value > 1.0005 * own else None
    )


def _missed(constraints: ServingConstraints, groups: Sequence[Pairs], masks: Sequence[np.ndarray]) -> str:
    """Which target none of them keeps."""
    some = [(p, m) for p, m in zip(groups, masks, strict=True) if m.any()]
    for name, limit in (("tpot", constraints.max_tpot), ("ttft", constraints.max_ttft)):
        least = min(float(getattr(p, name)[m].min()) for p, m in some)
        if limit is not None and least > limit:
            return f"{name.upper()} {format_time(least)} at least, the target is {format_time(limit)}"
    most = max(float(p.rate[m].max()) for p, m in some)
    if constraints.rate is not None and most < constraints.rate:
        return f"{most:.3g} requests/s at most, {constraints.rate:g} are wanted"
    return "no one of them keeps all targets"
