"""How long the engine takes for its steps: with next to no weights, and with those of layers that no cache holds.

Not here: single operations (`runtime.bench`), or what is made of the numbers (`costs.machine`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.costs.machine import TimedLayers
from meshwise.engine.engine import Engine
from meshwise.engine.executor import JaxExecutor
from meshwise.engine.requests import Collected, EngineRequest
from meshwise.models import Model, read_dimensions
from meshwise.runtime.bench import Sample
from meshwise.runtime.layered import LayeredModel
from meshwise.runtime.steps import ROW, Bucket, paged_model
from meshwise.scheduling import Scheduling
from meshwise.sharding.serving import ServingLayout

#: Tokens of a request that decodes.
_LENGTH = 64

#: Tokens of a page.
_PAGE = 16

#: Steps that are timed at least, however long each takes.
_STEPS = 5


def tiny_model(layers: int) -> Model:
    """A model of next to no weights."""
    return read_dimensions(f"D=16 F=16 L={layers} N=1 K=1 H=16 V=16", name="tiny")


def model_of(layers: TimedLayers) -> Model:
    """A model of layers that are timed."""
    heads = layers.hidden // layers.head_dim
    sizes = f"D={layers.hidden} F={layers.ffn} N={heads} K={heads} H={layers.head_dim}"
    return read_dimensions(f"{sizes} L={layers.number} V=16", name="layers")


class EngineSteps:
    """An engine on one device whose steps are timed, from the decision to the last token handed out.

    Args:
        device: that runs them.
        model: with weights that are drawn.
        dtype: of weights, activations and cache.
        batches: requests that decode together.
        prompts: tokens of prompts that come alone.
    """

    def __init__(
        self, device: Any, model: Model, dtype: DType, batches: Sequence[int], prompts: Sequence[int] = ()
    ) -> None:
        most, longest = max(batches), max(_LENGTH, *prompts) + 1 if prompts else _LENGTH
        scheduling = Scheduling("prefill-first", most, max(ROW, *prompts) if prompts else ROW, prefix_cache=False)
        pages = max(most * _LENGTH, longest + _PAGE) // _PAGE
        made = paged_model(model, ServingLayout(), [device], pages=pages, page_tokens=_PAGE, dtype=dtype)
        made = LayeredModel.where_faster(made)
        decoding = sorted({max(n, made.fewest_rows) for n in batches})
        buckets = [Bucket(n, 0, n) for n in decoding]
        begun = {*prompts, max(ROW * most, *prompts)} if prompts else {ROW * most}
        buckets += [Bucket(0, n, max(decoding)) for n in sorted(begun)]
        executor = JaxExecutor(made, made.initial_weights(0), scheduling, longest, buckets=buckets, sampled=False)
        self._engine = Engine(scheduling, pages, executor)

    def decoding(self, batch: int, seconds: float) -> Sample:
        """Time steps in which `batch` requests decode, for about so many seconds."""
        times: list[float] = []
        ends = time.perf_counter() + seconds
        while len(times) < _STEPS or time.perf_counter() < ends:
            for _ in range(batch):
                self._engine.submit(EngineRequest([1], _LENGTH - 1, Collected()))
            going = True
            while going:
                decoding = self._engine.running.count == batch
                begun = time.perf_counter()
                going = self._engine.step()
                if decoding and going:
                    times.append(time.perf_counter() - begun)
        return _summed(times)

    def prompts(self, tokens: int, seconds: float) -> Sample:
        """Time steps that take in a prompt of so many tokens, for about so many seconds."""
        times: list[float] = []
        ends = time.perf_counter() + seconds
        while len(times) < _STEPS or time.perf_counter() < ends:
            self._engine.submit(EngineRequest([1] * tokens, 1, Collected()))
            begun = time.perf_counter()
            self._engine.step()
            times.append(time.perf_counter() - begun)
            while self._engine.step():
                pass
        return _summed(times)


def _summed(times: Sequence[float]) -> Sample:
    return Sample(statistics.median(times), min(times), max(times), len(times))
