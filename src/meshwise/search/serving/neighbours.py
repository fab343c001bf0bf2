"""Well-known alternatives to the best plan, each at its best, and why they lose, with the number that decides.

Not here: the search (`planner`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwise.core.units import format_time
from meshwise.search.candidates import Array, Mask
from meshwise.search.serving.constraints import ServingConstraints
from meshwise.search.serving.pairs import Pairs
from meshwise.search.serving.tables import Tables


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An alternative, and why it loses.

    Args:
        name: what it is.
        reason: in words, with its number.
    """

    name: str
    reason: str


def neighbours(constraints: ServingConstraints, tables: Tables, pairs: Pairs, best: int) -> tuple[Neighbour, ...]:
    """Compare the best plan with the best of each kind that it is not.

    Args:
        constraints: what was asked.
        tables: that plans are rows of.
        pairs: all plans that fit.
        best: the best of them.
    """
    within = constraints.keeping(pairs)
    compared = {
        name: _compared(constraints, pairs, mask, mask & within, best)
        for name, mask in _kinds(tables, pairs, best).items()
    }
    return tuple(Neighbour(name, reason) for name, reason in compared.items() if reason)


def _kinds(tables: Tables, pairs: Pairs, best: int) -> dict[str, Mask]:
    """Alternatives by name: which of the pairs they are."""
    decode, mine = tables.decode, pairs.setup(best, tables)
    row, layout, sizes = pairs.decode[best], mine.decode, decode.sizes
    batch, chips = decode.batch[row], decode.chips[row]
    batches, engines = decode.batch[pairs.decode], decode.chips[pairs.decode]

    def of_pairs(meshes: Mask) -> Mask:
        """Of which pairs the decoding engines have these meshes."""
        chosen: Mask = meshes[decode.kind[pairs.decode]]
        return chosen

    alike = pairs.apart == pairs.apart[best]
    axes = ("tensor", "cache", "width", "expert", "stage")
    same = alike & of_pairs(np.logical_and.reduce([sizes[axis] == getattr(layout, axis) for axis in axes]))
    kinds = {
        "engines that do both" if pairs.apart[best] else "engines apart for prefill and generation": ~alike,
        f"more than {batch:,.0f} requests at once on such engines": same & (batches > batch),
        f"fewer than {batch:,.0f}": same & (batches < batch),
        f"decoding engines of more than {chips:.0f} chip{'s' if chips > 1 else ''}": engines > chips,
        f"of fewer than {chips:.0f}": engines < chips,
    }
    if layout.tensor != layout.engine_chips:
        ways = sizes["cache"] * sizes["width"] * sizes["stage"] * sizes["expert"]
        kinds["generation by tensor parallelism alone"] = of_pairs(ways == 1)
    if layout.width == 1:
        kinds["two-dimensional weights in generation"] = of_pairs(sizes["width"] > 1)
    if layout.stage == 1:
        kinds["pipelines"] = of_pairs(sizes["stage"] > 1)
    gathers = (tables.prefill.sizes["fsdp"] > 1)[tables.prefill.kind[pairs.prefill]]
    if mine.prefill.fsdp == 1:
        return kinds | {"gathered weights in prefill": gathers}
    return kinds | {"prefill without gathered weights": ~gathers}


def _compared(constraints: ServingConstraints, pairs: Pairs, mask: Mask, kept: Mask, best: int) -> str | None:
    """Say by how much the best that is `kept` of a kind loses; None where none loses."""
    if not mask.any():
        none = "none of the tools has it, it " if constraints.tools else ""
        return f"{none}does not fit, or other layouts beat it in everything"
    if not kept.any():
        return _missed(constraints, pairs.take(mask))
    what = {"throughput": "tokens"}.get(constraints.objective, constraints.objective)
    column: Array = pairs.chips if constraints.rate is not None else getattr(pairs, what)
    own, rows = float(column[best]), np.flatnonzero(kept)
    if constraints.rate is not None:
        value = float(column[rows].min())
        return f"{value:g} chips" if value > own else None
    if what != "tokens":
        value = float(column[rows].min())
        return (
            f"{what.upper()} {format_time(value)}, {100 * (value / own - 1):.1f} % more"
            if value > 1.0005 * own
            else None
        )
    most = rows[np.argmax(column[rows])]
    value = float(column[most])
    share = 100 * (1 - value / own)
    if share < -0.05:  # as good within 1 %, and slower
        latencies = f"TTFT {format_time(float(pairs.ttft[most]))}, TPOT {format_time(float(pairs.tpot[most]))}"
        return f"{-share:.1f} % more tokens/s, {value:,.0f}, at {latencies}"
    return f"{share:.1f} % fewer tokens/s: {value:,.0f}" if share > 0.05 else None


def _missed(constraints: ServingConstraints, pairs: Pairs) -> str:
    """Which target none of them keeps."""
    for name, limit in (("tpot", constraints.max_tpot), ("ttft", constraints.max_ttft)):
        least = float(getattr(pairs, name).min())
        if limit is not None and least > limit:
            return f"{name.upper()} {format_time(least)} at least, the target is {format_time(limit)}"
    most = float(pairs.rate.max())
    if constraints.rate is not None and most < constraints.rate:
        return f"{most:.3g} requests/s at most, {constraints.rate:g} are wanted"
    return "no one of them keeps all targets"
