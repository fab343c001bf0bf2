"""What requests of different lengths are on average, and at the long end: the numbers that closed forms need.

Not here: drawing them (`traffic`), or what they cost (`costs`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwise.core.errors import MeshwiseError
from meshwise.jobs.lengths import Lengths
from meshwise.jobs.traffic import Trace

#: Share of the requests that are not longer than what is called long.
LONG = 0.99

#: Points of each distribution that sums of two are taken of, and the share at its long end that half of them are for.
_PROMPTS, _OUTPUTS, _END = 256, 1024, 1 / 16


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Requests of different lengths, summed up.

    "Of a step" is an average over decode steps: a request counts as often as it has them, output - 1 times.

    Args:
        words: where they come from.
        prompt, output: how lengths are drawn, as users write it; None where they were recorded together.
        mean_prompt, mean_output: tokens.
        mean_square_prompt: tokens squared.
        mean_context: tokens that a decode step attends to, the new one included.
        shortest_prompt, longest: tokens of a prompt; of prompt and output together.
        mean_kept, long_kept: prompt and output together of a request of a step: the mean, and what `LONG` of them are
            not above.
        long_prompt: what `LONG` of the prompts are not above.
    """

    words: str
    prompt: str | None
    output: str | None
    mean_prompt: float
    mean_output: float
    mean_square_prompt: float
    mean_context: float
    shortest_prompt: int
    longest: int
    mean_kept: float
    long_kept: float
    long_prompt: float


def mix_lengths(prompt: Lengths, output: Lengths) -> RequestMix | None:
    """Sum up lengths that are drawn apart from each other; None where all are alike.

    >>> from meshwise.jobs.lengths import parse_lengths
    >>> mix = mix_lengths(parse_lengths("uniform:512-1536"), parse_lengths("256"))
    >>> mix.mean_prompt, mix.mean_context, mix.longest, round(mix.mean_square_prompt**0.5)
    (1024.0, 1152.0, 1792, 1066)

    Raises:
        MeshwiseError: lengths without a longest one.
    """
    for what, lengths in (("prompt", prompt), ("output", output)):
        if lengths.most is None:
            raise MeshwiseError(
                f"{what}: expected a longest length, for which memory is needed, found {lengths}; write "
                f"{lengths}:{lengths.quantile(0.999)}"
            )
    assert prompt.most is not None
    assert output.most is not None
    if prompt.least == prompt.most and output.least == output.most:
        return None
    steps = output.mean - 1
    further = (output.mean_square - output.mean) / steps if steps else output.mean
    (prompts, often), (outputs, of_output) = _points(prompt, _PROMPTS), _points(output, _OUTPUTS)
    weights = often[:, None] * (of_output * (outputs - 1) if steps else of_output)[None, :]
    return RequestMix(
        words=f"prompts {prompt}, outputs {output}",
        prompt=str(prompt),
        output=str(output),
        mean_prompt=prompt.mean,
        mean_output=output.mean,
        mean_square_prompt=prompt.mean_square,
        mean_context=prompt.mean + max(further / 2, 1.0),
        shortest_prompt=prompt.least,
        longest=prompt.most + output.most,
        mean_kept=prompt.mean + further,
        long_kept=_long((prompts[:, None] + outputs[None, :]).ravel(), weights.ravel()),
        long_prompt=float(prompt.quantile(LONG)),
    )


def _points(lengths: Lengths, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths that stand for all, ascending, and the share that each stands for."""
    if lengths.least == lengths.most:
        return np.array([float(lengths.least)]), np.ones(1)
    half = number // 2
    places = (np.arange(half) + 0.5) / half
    shares = np.concatenate([(1 - _END) * places, 1 - _END + _END * places])
    each = np.concatenate([np.full(half, (1 - _END) / half), np.full(half, _END / half)])
    return np.array([float(lengths.quantile(s)) for s in shares]), each


def mix_trace(trace: Trace) -> RequestMix | None:
    """Sum up requests that were recorded; None where all are alike."""
    prompt, output = (np.array([float(getattr(d, name)) for d in trace.demands]) for name in ("prompt", "output"))
    if np.ptp(prompt) == 0 and np.ptp(output) == 0:
        return None
    weights = output - 1 if (output > 1).any() else np.ones(len(output))
    context = float(np.average(prompt + np.maximum(output / 2, 1.0), weights=weights))
    return RequestMix(
        words=f"{len(prompt):,} requests of {trace.source}",
        prompt=None,
        output=None,
        mean_prompt=float(prompt.mean()),
        mean_output=float(output.mean()),
        mean_square_prompt=float((prompt**2).mean()),
        mean_context=context,
        shortest_prompt=int(prompt.min()),
        longest=int((prompt + output).max()),
        mean_kept=float(np.average(prompt + output, weights=weights)),
        long_kept=_long(prompt + output, weights),
        long_prompt=_long(prompt, np.ones(len(prompt))),
    )


def _long(values: np.ndarray, weights: np.ndarray) -> float:
    """What `LONG` of the values, as often as their weights say, are not above."""
    order = np.argsort(values, kind="stable")
    above = np.cumsum(weights[order]) / math.fsum(weights)
    return float(values[order][min(int(np.searchsorted(above, LONG)), len(values) - 1)])
