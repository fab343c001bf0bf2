"""Tokens a second of a measured row, of all its chips together. Not here: seconds of anything (`conventions`)."""

from __future__ import annotations

import re

from meshwise.core.errors import MeshwiseError
from meshwise.scoring.rows import Row

_UNIT = re.compile(r"tok(?:en)?s?(?:/s(?:ec|econd)?| (?:per|a) second)((?:/| per )[a-z]+)?(?=$|[\s(,;])")


def tokens_per_second(run: Row) -> float:
    """Give the rate of all chips together; metrics that end in `_per_chip` or `_per_gpu` are of each.

    Raises:
        MeshwiseError: a unit that is not tokens a second, or that is of each chip where the metric is of all.
    """
    each = run.measured_metric.endswith(("_per_chip", "_per_gpu"))
    found = _UNIT.match(run.unit.strip().lower())
    if found is None or (found[1] and not each):
        expected = "tokens/s/chip" if each else "tokens/s, of all chips together"
        raise MeshwiseError(f"unit of {run.measured_metric}: expected {expected}, found {run.unit!r}")
    return run.measured_value * (run.n_chips if each else 1)
