"""How long a pipeline takes from its first forward pass to its last gradient, in closed form, for every schedule.

Each is the longest path through the schedule's work, written out; they take floats or arrays, never fall when a stage
gets slower, and are compared with a simulation of the work itself. Not here: what the schedules are (`schedules`).

Letters: p stages (devices), M microbatches, v chunks a device; f, b, w the seconds of a chunk's forward pass, its
gradients of activations (what it recomputes first included), and its gradients of weights; t = f + b + w.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwise.costs.arithmetic import Num, maximum, where


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one chunk of the model on one device, for one microbatch (floats or arrays).

    Args:
        forward: forward pass.
        backward: gradients of activations, and what is computed again for them.
        weights: gradients of weights.
        saved: what running a forward pass together with another microbatch's backward pass saves, because each
            computes while the other communicates; at most the shorter of the two.
    """

    forward: Num
    backward: Num
    weights: Num
    saved: Num = 0.0

    @property
    def total(self) -> Num:
        """All three passes, one after another."""
        return self.forward + (self.backward + self.weights)

    def longest(self, *others: StageTimes) -> StageTimes:
        """The longest of each pass; what is saved is the least."""
        everyone = (self, *others)
        return StageTimes(
            maximum(*(s.forward for s in everyone)),
            maximum(*(s.backward for s in everyone)),
            maximum(*(s.weights for s in everyone)),
            -maximum(*(-s.saved for s in everyone)),
        )


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Sizes of a pipeline (floats or arrays).

    Args:
        stages: devices in a row.
        num_microbatches: microbatches of a step.
        virtual_stages: chunks of the model a device.
    """

    stages: Any
    num_microbatches: Any
    virtual_stages: Any = 1


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds of the chunks of a model.

    Args:
        first: of the chunk that has the embedding.
        middle: of every chunk between; does not count where there are only two.
        last: of the chunk that has the head; a lone chunk is all three.
    """

    first: StageTimes
    middle: StageTimes
    last: StageTimes

    @cached_property
    def ends(self) -> StageTimes:
        """A pass of the first or the last chunk, on average: what a device does that has both."""
        return StageTimes(*((getattr(self.first, n) + getattr(self.last, n)) / 2 for n in StageTimes.__slots__))

    def used(self, chunks: Num, otherwise: StageTimes) -> PipelineTimes:
        """The same, with `otherwise` for the middle where there are only two chunks."""
        some = chunks > 2
        middle = StageTimes(
            *(where(some, getattr(self.middle, n), getattr(otherwise, n)) for n in StageTimes.__slots__)
        )
        return PipelineTimes(self.first, middle, self.last)

    @property
    def slowest(self) -> StageTimes:
        """The longest of each pass."""
        return self.last.longest(self.first, self.middle)

    @property
    def slowest_whole(self) -> Num:
        """Seconds of the longest forward and the longest whole backward pass, gradients of weights included."""
        everyone = (self.last, self.first, self.middle)
        return maximum(*(s.forward for s in everyone)) + maximum(*(s.backward + s.weights for s in everyone))


def one_after_another(shape: PipelineShape, times: PipelineTimes) -> Num:
    """GPipe and 1F1B: the last stage works without a pause; the others fill before it and drain after it.

    M t_last + sum of t of the other stages. Exact where no stage takes longer than the last. Elsewhere the longest
    passes of any stage stand in for the last's, which is an upper bound.

    >>> t = StageTimes(1.0, 1.0, 1.0)
    >>> one_after_another(PipelineShape(4, 8), PipelineTimes(t, t, t))  # (M + p - 1) (f + b + w)
    33.0

    Source: Huang et al. 2019 (GPipe); Narayanan et al. 2019, 2021 (1F1B): equal stages idle for (p - 1) t.
    """
    p, M = shape.stages, shape.num_microbatches
    times = times.used(p, times.first)
    return M * times.slowest_whole + (p > 1) * (times.first.total + (p - 2) * times.middle.total)


def interleaved(shape: PipelineShape, times: PipelineTimes) -> Num:
    """Interleaved 1F1B, v > 1: the last device works without a pause; filling and draining take one chunk a device.

    M t_last + (M (v - 1) - 1) t_middle + t_first + (p - 1) max(t_first, t_middle). Exact where no chunk takes longer
    than the last; elsewhere the longest passes stand in for the last's, which is an upper bound.

    >>> t = StageTimes(1.0, 1.0, 1.0)
    >>> interleaved(PipelineShape(4, 8, 2), PipelineTimes(t, t, t))  # (M v + p - 1) t, where a chunk is half a stage
    57.0

    Source: Narayanan et al. 2021, section 2.2.2: equal chunks idle for (p - 1) t.
    """
    p, M, v = shape.stages, shape.num_microbatches, shape.virtual_stages
    first, middle = times.first, times.middle
    filling = maximum(first.forward, middle.forward) + maximum(
        first.backward + first.weights, middle.backward + middle.weights
    )
    return M * times.slowest_whole + (M * (v - 1) - 1) * middle.total + first.total + (p - 1) * filling


def zb_h1(shape: PipelineShape, times: PipelineTimes) -> Num:
    """ZB-H1: as 1F1B, but gradients of weights wait, and fill what would be idle while the pipeline drains.

    The longest of six paths: through the last stage, through its delayed gradients and back to the first or second
    stage, and, where forward passes are short, through the backward passes of the second or first stage. Exact where
    middle <= first <= last in every pass.

    >>> t = StageTimes(1.0, 1.0, 1.0)
    >>> zb_h1(PipelineShape(4, 8), PipelineTimes(t, t, t))  # M t + (p - 1) (f + b - w)
    27.0

    Source: Qi et al. 2023, table 2: equal stages idle for (p - 1) (f + b - w).
    """
    p, M = shape.stages, shape.num_microbatches
    times = times.used(p, times.first)
    first, middle, slowest = times.first, times.middle, times.slowest
    forward = first.forward + (p - 2) * middle.forward
    back = slowest.forward + slowest.backward
    delayed = forward + M * back + (M - p) * slowest.weights
    several = p > 2
    second = first.forward + (M - 2) * middle.forward + 2 * back + (p + M - 4) * middle.backward + M * middle.weights
    return maximum(
        forward + M * slowest.total,
        delayed + first.backward + (p - 2) * middle.backward + first.weights,
        where(several, delayed + (p - 2) * middle.backward + 2 * middle.weights, 0.0),
        where(several, second, 0.0),
        where(several, second - 2 * middle.weights + first.backward + first.weights, 0.0),
        M * first.total - (p - 1) * first.forward + (p - 2) * (middle.forward + middle.backward) + back,
    )


def zb_v(shape: PipelineShape, times: PipelineTimes) -> Num:
    """ZB-V: two chunks a device, laid out as a V, so that the first device has the first and the last chunk.

    The busiest device's work and what it idles for. Exact for equal chunks. Else off by at most 6 p times the
    chunks' differences (while it fills and drains), however many microbatches there are.

    >>> t = StageTimes(1.0, 1.0, 1.0)
    >>> zb_v(PipelineShape(4, 8), PipelineTimes(t, t, t))  # 2 M t + (p - 1) b where the three are equal
    51.0

    Source: Qi et al. 2023, section 4 (the order of work); the idle time of any f, b, w is derived here.
    """
    p, M = shape.stages, shape.num_microbatches
    times = times.used(2 * p, times.ends)
    return maximum(
        2 * M * times.ends.total + _zb_v_idle(p, times.middle, times.ends),
        2 * M * times.middle.total + _zb_v_idle(p, times.middle, times.middle),
    )


def _zb_v_idle(p: Num, t: StageTimes, less: StageTimes) -> Num:
    """What a device idles for: the longest of eight ways through filling and draining.

    What shortens it (`less`) is taken from the device's own chunks, so that it with their work never falls when one of
    them gets slower.
    """
    f, b, w = t.forward, t.backward, t.weights
    return maximum(
        (p - 1) * b,
        2 * (p - 1) * (b - less.weights),
        (2 * p - 3) * f - (p - 2) * less.backward,
        b + (p - 2) * w,
        f + (p - 2) * w,
        2 * (p - 1) * f - (p - 1) * less.backward - less.weights,
        (2 * p - 3) * f + b - 2 * (p - 1) * less.weights,
        2 * (p - 1) * f - (2 * p - 1) * less.weights,
    )


def dualpipe(shape: PipelineShape, times: PipelineTimes) -> Num:
    """DualPipe: microbatches enter at both ends; each device has a stage of either direction.

    >>> t = StageTimes(1.0, 1.0, 1.0)
    >>> dualpipe(PipelineShape(4, 8), PipelineTimes(t, t, t))  # M t + (p / 2 - 1) (f + 2 b - w) where f = b
    26.0

    Exact for equal stages; else as `zb_v`. Source: DeepSeek-V3 report, table 2, and its repository: (p / 2 - 1) times
    (F&B + B - 3 W), which this is where f = b.
    """
    return _bidirectional(shape.stages / 2, shape.num_microbatches, times.used(shape.stages, times.ends))


def dualpipe_v(shape: PipelineShape, times: PipelineTimes) -> Num:
    """DualPipeV: DualPipe cut in half: two chunks a device, laid out as a V, and no second copy of the parameters.

    >>> t = StageTimes(1.0, 1.0, 1.0)
    >>> dualpipe_v(PipelineShape(4, 8), PipelineTimes(t, t, t))  # 2 M t + (p - 1) (f + 2 b - w) where f = b
    54.0

    Exact for equal chunks; else as `zb_v`. Source: DualPipe repository; Sea AI Lab, "cut-in-half".
    """
    return _bidirectional(shape.stages, 2 * shape.num_microbatches, times.used(2 * shape.stages, times.ends))


def together(passes: Num, half: Num) -> Num:
    """Forward passes that run together with a backward pass, on the longest path of a bidirectional schedule."""
    return passes - half - 2


def _bidirectional(half: Num, passes: Num, times: PipelineTimes) -> Num:
    """The longer of the first device, which has the first and the last chunk, and of one that has two middle chunks."""
    pairs = together(passes, half)
    return maximum(
        passes * times.ends.total - pairs * times.ends.saved + _bidirectional_idle(half, times.middle, times.ends),
        passes * times.middle.total
        - pairs * times.middle.saved
        + _bidirectional_idle(half, times.middle, times.middle),
    )


def _bidirectional_idle(half: Num, t: StageTimes, less: StageTimes) -> Num:
    """What a device idles for; `less` as in `_zb_v_idle`."""
    f, b = t.forward, t.backward
    return maximum(
        (half - 1) * (2 * f + b - less.weights),
        2 * (half - 1) * f,
        (half - 2) * f + (half - 1) * (2 * b - less.weights),
        (half - 2) * f + (half - 1) * b,
    )
