"""Whether a reader's own answer to a problem is right: the number, and its unit.

Not here: our answer (`problems`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.book.problems import Solution

#: Kind of quantity -> unit -> how many of the first one of the kind.
_KINDS: Mapping[str, Mapping[str, float]] = {
    "a time": {
        "s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60, "h": 3600, "hours": 3600, "days": 86400,
        "d": 86400, "years": 365.25 * 86400,
    },
    "bytes": {
        "bytes": 1, "B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20,
        "GiB": 2**30, "TiB": 2**40, "MB (MiB)": 2**20, "GB (book prints GiB)": 1e9, "bytes (decimal GB as printed)": 1,
    },
    "bytes a second": {
        "bytes/s": 1, "B/s": 1, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "GiB/s": 2**30, "TiB/s": 2**40,
        "TB/s (book prints TiB/s)": 1e12,
    },
    "operations": {"FLOPs": 1, "FLOP": 1, "OPs": 1, "GFLOPs": 1e9, "TFLOPs": 1e12, "PFLOPs": 1e15},
    "operations a second": {
        "FLOPs/s": 1, "FLOP/s": 1, "OPs/s": 1, "GFLOP/s": 1e9, "TFLOPs/s": 1e12, "TFLOP/s": 1e12, "PFLOP/s": 1e15,
        "EFLOPs/s": 1e18,
    },
    "a share": {"%": 0.01, "share": 1},
    "tokens": {"tokens": 1, "token": 1, "ktokens": 1e3, "Mtokens": 1e6},
    "tokens a second": {"tokens/s": 1, "tokens/ms": 1e3},
    "chips": {"chips": 1, "chip": 1, "GPUs": 1, "GPU": 1, "TPUs": 1},
    "parameters": {"params": 1, "parameters": 1},
    "sequences": {"sequences": 1, "seqs": 1},
}  # fmt: skip

_SCALES: Mapping[str, float] = {
    "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30,
}  # fmt: skip

#: Slips that are told by their ratio.
SLIPS: Mapping[float, str] = {
    2: "bytes a value, both directions, or FLOPs and MACs",
    3: "forward and backward pass, or the axes of a torus",
    8: "bits and bytes",
    24: "hours and days",
    60: "minutes and seconds",
    3600: "hours and seconds",
    100: "a share and percent",
    1e3: "a thousand",
    1e6: "a million",
    1e9: "a billion",
    1.024: "1000 and 1024",
    1.024**2: "MB and MiB",
    1.024**3: "GB and GiB",
}

_ANSWER = re.compile(r"\s*([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*?)\s*$")


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is to be said of an answer.

    Args:
        right: whether it is ours.
        words: why not, or "".
    """

    right: bool
    words: str = ""


def judge(solution: Solution, answer: str) -> Judgement:
    """Judge a reader's answer: right within the problem's tolerance, or half a percent, in its unit or another."""
    unit = solution.problem.unit
    if isinstance(solution.value, str):
        return Judgement(solution.agrees_with(answer.strip()))
    match = _ANSWER.match(answer)
    if match is None:
        return Judgement(False, f"expected a number of {unit}")
    number, named = float(match[1].replace(",", "")), match[2]
    if named:
        factor = _factor(named, unit)
        if isinstance(factor, str):
            return Judgement(False, factor)
        number *= factor
    if math.isclose(number, solution.value, rel_tol=max(solution.problem.tolerance, 0.005)):
        return Judgement(True)
    return Judgement(False, _compared(number, solution.value, unit))


def units_like(unit: str) -> dict[str, float]:
    """Units in which an answer may be given -> how many of this one each is; counts of thousands and the like, too.

    >>> units_like("ms")["s"], units_like("FLOPs/byte")["k"], units_like("tokens")["M tokens"]
    (1000.0, 1000.0, 1000000.0)
    """
    kind = next((units for units in _KINDS.values() if unit in units), {unit: 1})
    scaled = {scale + rest: size for scale, size in _SCALES.items() for rest in ("", f" {unit}")}
    return scaled | {name: size / kind[unit] for name, size in kind.items()}


def _factor(named: str, unit: str) -> float | str:
    """How many of the problem's units one of the named is; words where it is none."""
    if named in (like := units_like(unit)):
        return like[named]
    kinds = {name: kind for kind, units in _KINDS.items() for name in units}
    if named in kinds:
        return f"{named} is {kinds[named]}, and the problem asks for {unit}"
    return f"unknown unit {named!r}; the problem's is {unit}"


def _compared(number: float, ours: float, unit: str) -> str:
    if number == 0 or ours == 0 or (number > 0) != (ours > 0):
        return f"the problem's unit is {unit}"
    ratio = number / ours
    larger = max(ratio, 1 / ratio)
    slip = next((words for factor, words in SLIPS.items() if math.isclose(larger, factor, rel_tol=0.006)), "")
    return f"{ratio:.3g} times as much, the problem's unit is {unit}" + (f" (mixed up: {slip}?)" if slip else "")
