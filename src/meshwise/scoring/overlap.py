"""What a training row says of traffic (which hides, how tokens are sent to experts), and of graphs of kernels.

Words of its own (`overlap`, `dispatcher`), and the options of Megatron-LM and PyTorch in `software` and `notes`. Not
here: what generations of software do where a row does not say (`costs.fitted`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import LATE_ONCE, Calibration
from meshwise.costs.fitted import SOFTWARE
from meshwise.scoring.rows import TrainingRun, first_match
from meshwise.scoring.software import GRAPHS, says

#: Traffic -> its name in the column `overlap`, and what options of tools call it.
_TRAFFIC = {
    "tensor": (r"tensor\w*", r"async\w*[-_ ](?:tp\b|tensor[-_ ]parallel\w*)|tp[-_ ]comm(?:unication)?[-_ ]overlap"),
    "pipeline": (r"pipeline\w*|sends?", r"overlap[-_ ]p2p[-_ ]comm(?:unication)?"),
    "gradients": (r"gradients?|data\w*", r"overlap[-_ ]grad[-_ ]reduce"),
    "weights": (r"weights?|params?", r"overlap[-_ ]param[-_ ]gather"),
    "experts": (r"experts?", r"overlap[-_ ]moe[-_ ]expert[-_ ]parallel[-_ ]comm"),
}

_OFF = r"off|false|0|no|none|null|late|exposed|disabled"
_STATE = rf"(?P<state>on|true|1|yes|hidden|enabled|{_OFF})"

#: Traffic once a step -> what of `LATE_ONCE` is of it.
_ONCE = {"gradients": ("gradients", "whole", "pipelines", "accumulated"), "weights": ("weights",)}

#: A source's words for the dispatcher of a mixture -> whether a token is sent once to each destination.
_DEEP = r"deep-?ep|hybrid-?ep"
_DISPATCHERS = (
    (rf"{_DEEP}|\bflex\b", True),
    (r"all-?to-?all|allgather|all-gather|\ba2a\b", False),
)


#: Words for positions that are dealt out evenly over a ring, and the minor release of PyTorch 2 that surely does so:
#: `enable_load_balance` of torch.distributed.tensor.experimental, new in 2.6 and its nightly builds.
_DEALT, _DEALT_SINCE = r"zig-?zag|striped|load[- ]balanced (?:ring|cp\b|context)", 7

#: The year from which Megatron-LM sums gradients of inputs beside those of weights, and its option that denies it.
_SUMS_SINCE, _NO_SUMS = 2022, r"no-async-tensor-model-parallel-allreduce"

_DEEPSPEED = SOFTWARE["deepspeed"]

#: The release of DeepSpeed from which ZeRO-2 sums gradients on all replicas (pull request 4695), its year's end, and
#: the option that denies it; before, the sum of each part was sent to the replica that keeps it.
_WHOLE_SINCE, _WHOLE_YEAR, _WHOLE = (0, 12, 4), 2023, "use_multi_rank_bucket_allreduce"

#: Seconds between kernels of a CUDA graph: of five engines of serving, 2 us within 7 % (docs/serving-accuracy.md).
_GRAPH_GAP = 2e-6


def as_run(calibration: Calibration, run: TrainingRun) -> Calibration:
    """The calibration with the overlap, the dispatcher and the graphs of kernels that the row names.

    Raises:
        MeshwiseError: words of `overlap` or `dispatcher` without a meaning here.
    """
    words = f"{run.software} {run.notes}".lower()
    if calibration.software == "eager-2023" and "deepspeed" in words:  # its engine sends as it has done since
        own = {name: getattr(_DEEPSPEED, name) for name in ("late_sends", "late_once", "whole_sums")}
        calibration = replace(calibration, **own)
    if calibration.whole_sums == _DEEPSPEED.whole_sums and not _sums_whole(run, words):
        calibration = replace(calibration, whole_sums=1)
    for traffic, hidden in _said(run):
        calibration = _with(calibration, traffic, hidden=hidden)
    if says(GRAPHS, words):
        calibration = replace(calibration, gap=min(calibration.gap, _GRAPH_GAP), mixture_launch=0.0)
    beside = calibration.beside_sums or (calibration.software == "megatron-2021" and (run.year or 0) >= _SUMS_SINCE)
    calibration = replace(calibration, beside_sums=beside and not re.search(_NO_SUMS, words))
    torch = re.search(r"torch\w*[ =v]+2\.(\d+)", words)
    if re.search(_DEALT, words) or (torch and int(torch[1]) >= _DEALT_SINCE):
        calibration = replace(calibration, uneven_ring=False)
    once = first_match(_DISPATCHERS, run.dispatcher.lower() or _dispatcher(run))
    if once is None and run.dispatcher:
        raise MeshwiseError(f"dispatcher {run.dispatcher!r} is not understood; expected alltoall, deepep or hybridep")
    return calibration if once is None else replace(calibration, distinct_dispatch=once)


def _sums_whole(run: TrainingRun, words: str) -> bool:
    """Whether DeepSpeed as a row names it sums gradients on all replicas under ZeRO-2."""
    # Not the size of a model: "DeepSpeed 1.3B".
    release = re.search(r"deepspeed[ =:v@-]*(\d+)\.(\d+)(?:\.(\d+))?(?![\d.]*\s*[bm]\b)", words)
    if release:
        since = tuple(int(number or 0) for number in release.groups()) >= _WHOLE_SINCE
    else:
        since = (run.year or 9999) > _WHOLE_YEAR
    return since and (_WHOLE not in words or says(_WHOLE, words))


def _said(run: TrainingRun) -> Iterable[tuple[str, bool]]:
    """Traffic of which the row says whether it is hidden."""
    words = f"{run.software} {run.notes}".lower()
    for traffic, (_, option) in _TRAFFIC.items():
        found = re.search(rf"(?P<denied>\b(?:no|not|without|disabled?)[- _])?(?:{option})(?:[ =:(]+{_STATE}\b)?", words)
        if found:
            yield traffic, not (found["denied"] or re.fullmatch(_OFF, found["state"] or ""))
    for part in filter(None, (p.strip() for p in re.split(r"[,;]", run.overlap.lower()))):
        names = [t for t, (name, _) in _TRAFFIC.items() if (found := re.fullmatch(rf"(?:{name})[ =:]+{_STATE}", part))]
        if not names:
            raise MeshwiseError(
                f"overlap {part!r} is not understood; expected {', '.join(_TRAFFIC)}, each on, off or late, with commas"
            )
        yield names[0], not re.search(rf"[ =:](?:{_OFF})$", part)


def _dispatcher(run: TrainingRun) -> str:
    """What remarks call the dispatcher; "" where they do not."""
    words = f"{run.software} {run.notes}".lower()
    if re.search(_DEEP, words):
        return "deepep" if says(_DEEP, words) else "alltoall"
    found = re.search(r"dispatcher(?:[-_ ]type)?[ =:]+([\w-]+)|([\w-]+) dispatcher", words)
    return next(filter(None, found.groups())) if found else ""


def _with(c: Calibration, traffic: str, *, hidden: bool) -> Calibration:
    """The calibration where one kind of traffic is hidden, or waited for."""
    match traffic:
        case "tensor":
            return replace(c, collective_matmul=hidden)
        case "pipeline":
            return replace(c, late_sends=0 if hidden else max(c.late_sends, 1), late_schedules=())
        case "experts":
            return replace(c, beside_exchanges=hidden)
        case _:  # what waited together (`late_exchange`) is said of each by itself from here on
            before = {*c.late_once, *(("gradients", "weights") if c.late_exchange else ())}
            late = before - {*_ONCE[traffic]} if hidden else before | {traffic}
            return replace(c, late_exchange=False, late_once=tuple(name for name in LATE_ONCE if name in late))
