"""How long the engine itself takes for a step: one that decodes with a model so small that nothing else counts.

Not here: single operations (`runtime.bench`), or what is made of the numbers (`costs.machine`).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.engine.engine import Engine
from meshwise.engine.executor import JaxExecutor
from meshwise.engine.requests import Collected, EngineRequest
from meshwise.models import Model, read_dimensions
from meshwise.runtime.bench import Sample
from meshwise.runtime.layered import LayeredModel
from meshwise.runtime.steps import ROW, Bucket, paged_model
from meshwise.scheduling import Scheduling
from meshwise.sharding.serving import ServingLayout

#: Tokens of a request.
_LENGTH = 64


def tiny_model(layers: int) -> Model:
    """A model of next to no weights."""
    return read_dimensions(f"D=16 F=16 L={layers} N=1 K=1 H=16 V=16", name="tiny")


def time_engine_step(device: Any, layers: int, batch: int, seconds: float) -> Sample:
    """Time steps in which `batch` requests decode, from the decision to the last token handed out.

    Args:
        device: that runs them.
        layers: of the model.
        batch: requests.
        seconds: to spend, about.
    """
    scheduling = Scheduling("prefill-first", batch, ROW)
    pages = batch * _LENGTH // 16
    model = paged_model(tiny_model(layers), ServingLayout(), [device], pages=pages, page_tokens=16, dtype=DType.FP32)
    model = LayeredModel.where_faster(model)
    rows = max(batch, model.fewest_rows)
    buckets = [Bucket(rows, 0, rows), Bucket(0, ROW * batch, rows)]
    executor = JaxExecutor(model, model.initial_weights(0), scheduling, _LENGTH, buckets=buckets)
    engine = Engine(scheduling, pages, executor)
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while not times or time.perf_counter() < ends:
        for _ in range(batch):
            engine.submit(EngineRequest([1], _LENGTH - 1, Collected()))
        going = True
        while going:
            decoding = engine.running.count == batch
            begun = time.perf_counter()
            going = engine.step()
            if decoding and going:
                times.append(time.perf_counter() - begun)
    return Sample(statistics.median(times), min(times), max(times), len(times))
