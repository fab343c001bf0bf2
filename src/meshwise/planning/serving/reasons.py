"""Why other plans lose: well-known alternatives to the best plan, each at its best, with the number that decides.

Not here: the search (`planner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.planning.serving.pairs import Pairs
from meshwise.planning.serving.tables import Table
from meshwise.planning.serving.wishes import ServingWishes
from meshwise.units import format_time


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
    wishes: ServingWishes,
    groups: Sequence[Pairs],
    best: tuple[int, int],
    prefill: Table,
    generate: Table,
) -> tuple[Neighbour, ...]:
    """Compare the best plan with the best of each kind that it is not.

    Args:
        wishes: what was asked.
        groups: all plans that fit, by mode.
        best: group and entry of the best plan.
        prefill, generate: the tables that plans are rows of.
    """
    chosen = groups[best[0]]
    winner = chosen.take(np.array([best[1]]))
    within = [_within(pairs, wishes) for pairs in groups]
    found = []
    for name, masks in _kinds(groups, chosen, best[1], prefill, generate):
        told = _compared(wishes, groups, within, masks, winner)
        if told is not None:
            found.append(Neighbour(name, told))
    return tuple(found)


def _kinds(
    groups: Sequence[Pairs], chosen: Pairs, i: int, prefill: Table, generate: Table
) -> list[tuple[str, list[np.ndarray]]]:
    """Alternatives by name: which entries of each group they are."""
    row, first = int(chosen.generate[i]), int(chosen.prefill[i])
    layout, into = generate.layout_of(row), prefill.layout_of(first)
    batch, chips = generate.batch[row], generate.chips[row]

    def of(table: Table, axis: str) -> np.ndarray:
        sizes: np.ndarray = table.sizes[axis][table.layout]
        return sizes

    def masks(mode: str | None, own: np.ndarray | None = None, ahead: np.ndarray | None = None) -> list[np.ndarray]:
        out = []
        for pairs in groups:
            ok = np.full(len(pairs), mode in (None, pairs.mode))
            if own is not None:
                ok &= own[pairs.generate]
            if ahead is not None:
                ok &= ahead[pairs.prefill]
            out.append(ok)
        return out

    same = of(generate, "tensor") == layout.tensor
    for axis in ("cache", "width", "expert", "stage"):
        same &= of(generate, axis) == getattr(layout, axis)
    kinds = [
        (
            "engines apart for prefill and generation" if chosen.mode == "aggregated" else "engines that do both",
            masks("disaggregated" if chosen.mode == "aggregated" else "aggregated"),
        ),
        (
            f"more than {batch:,.0f} requests at once on such engines",
            masks(chosen.mode, same & (generate.batch > batch)),
        ),
        (f"fewer than {batch:,.0f}", masks(chosen.mode, same & (generate.batch < batch))),
        (f"generating engines of more than {chips:.0f} chips", masks(None, generate.chips > chips)),
        (f"of fewer than {chips:.0f}", masks(None, generate.chips < chips)),
    ]
    ways = of(generate, "cache") * of(generate, "width") * of(generate, "stage") * of(generate, "expert")
    if layout.tensor != layout.engine_chips:
        kinds.append(("generation by tensor parallelism alone", masks(None, ways == 1)))
    if layout.width == 1:
        kinds.append(("two-dimensional weights in generation", masks(None, of(generate, "width") > 1)))
    if layout.stage == 1:
        kinds.append(("pipelines", masks(None, of(generate, "stage") > 1)))
    if into.fsdp == 1:
        kinds.append(("gathered weights in prefill", masks(None, None, of(prefill, "fsdp") > 1)))
    else:
        kinds.append(("prefill without gathered weights", masks(None, None, of(prefill, "fsdp") == 1)))
    return kinds


def _compared(
    wishes: ServingWishes,
    groups: Sequence[Pairs],
    within: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    winner: Pairs,
) -> str | None:
    """Say by how much the best of these loses; None where there is none, or none that loses."""
    if not any(m.any() for m in masks):
        return "does not fit, or other layouts beat it in everything"
    ok = [m & w for m, w in zip(masks, within, strict=True)]
    if not any(m.any() for m in ok):
        return _missed(wishes, groups, masks)
    what, sign = {"throughput": ("tokens", -1), "tpot": ("tpot", 1), "ttft": ("ttft", 1)}[wishes.objective]
    if wishes.rate is not None:
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


def _within(pairs: Pairs, wishes: ServingWishes) -> np.ndarray:
    ok = np.ones(len(pairs), dtype=bool)
    for name, limit in (("ttft", wishes.max_ttft), ("tpot", wishes.max_tpot)):
        if limit is not None:
            ok &= getattr(pairs, name) <= limit
    if wishes.rate is not None:
        ok &= pairs.rate >= wishes.rate
    return ok


def _missed(wishes: ServingWishes, groups: Sequence[Pairs], masks: Sequence[np.ndarray]) -> str:
    """Which target none of them keeps."""
    some = [(p, m) for p, m in zip(groups, masks, strict=True) if m.any()]
    for name, limit in (("tpot", wishes.max_tpot), ("ttft", wishes.max_ttft)):
        least = min(float(getattr(p, name)[m].min()) for p, m in some)
        if limit is not None and least > limit:
            return f"{name.upper()} {format_time(least)} at least, the target is {format_time(limit)}"
    most = max(float(p.rate[m].max()) for p, m in some)
    if wishes.rate is not None and most < wishes.rate:
        return f"{most:.3g} requests/s at most, {wishes.rate:g} are wanted"
    return "no one of them keeps all targets"
