"""How far a plan may be from the best one: what no pair of priced rows undercuts.

Not here: pairs (`pairs`), or what is minimised (`constraints`).
"""

from __future__ import annotations

from meshwise.search.serving.constraints import ServingConstraints
from meshwise.search.serving.tables import Tables


def least_score(tables: Tables, constraints: ServingConstraints) -> float:
    """What no pair undercuts in the first of `constraints.scores`, whole prompts being prefilled.

    Chips that prefill do not decode meanwhile: a request takes the chip-seconds of both at their least, whether one
    engine does both or two do, and all chips together make no more requests than that allows.
    """
    load, (prefill, decode) = tables.problem.load, tables.both
    into = float((prefill.interval * prefill.chips / prefill.batch).min())
    out = float((decode.seconds * decode.chips / decode.batch).min()) * (load.output - 1) / load.tokens_per_step
    if constraints.rate is not None:
        return constraints.rate * (into + out)
    if constraints.objective == "ttft":
        return float(prefill.seconds.min())
    if constraints.objective == "tpot":
        return float(decode.seconds.min()) / load.tokens_per_step
    return -tables.num_chips / (into + out) * load.output


def gap(tables: Tables, constraints: ServingConstraints, score: float) -> float:
    """Share by which a plan of a score may still be from the best; 1 where not all was priced: nothing is known.

    Args:
        tables: that its search went through; chunks of prompts are priced apart from these.
        constraints: what is minimised.
        score: the first of the plan's `constraints.scores`.
    """
    if not tables.whole or any(chunk < tables.problem.load.computed for chunk in constraints.chunks):
        return 1.0
    return share_off(least_score(tables, constraints), score)


def share_off(least: float, score: float) -> float:
    """Share by which a score, which is to be small, is off the least that it could be; both have one sign.

    >>> share_off(-100.0, -75.0), share_off(3.0, 4.0), share_off(4.0, 4.0)
    (0.25, 0.25, 0.0)
    """
    return max(0.0, 1 - (score / least if least < 0 else least / score))
