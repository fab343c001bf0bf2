"""What the endpoint tells Prometheus: requests, tokens, latencies, steps beside predictions. Not here: the engine."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meshwise.engine.engine import StepRecord
from meshwise.engine.replicas import Replicas
from meshwise.engine.requests import EngineRequest

#: Bounds of the histograms of seconds, and of predicted over measured ones.
_SECONDS = tuple(b * 10.0**e for e in range(-3, 2) for b in (1, 2.5, 5))
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class Metrics:
    """Watches engines.

    Args:
        predict: seconds that a step was predicted to take; None where nothing predicts.
    """

    def __init__(self, predict: Callable[[StepRecord], float] | None = None) -> None:
        self._predict = predict
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests that are over, by reason.", "reason")
        self._refused = self._counter("refused", "HTTP requests that were refused, by status.", "status")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts that were prefilled.")
        self._output = self._counter("output_tokens", "Tokens that were generated.")
        self._ttft = self._histogram("ttft_seconds", "Time to the first token.")
        self._tpot = self._histogram("tpot_seconds", "Time per output token after the first.")
        self._step = self._histogram("step_seconds", "Time of a step, by its kind.", "kind")
        words = "Predicted over measured time of a step, by its kind."
        self._ratio = self._histogram("step_predicted_ratio", words, "kind", buckets=_RATIOS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"meshwise_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"meshwise_{name}", text, labels, registry=self.registry, buckets=buckets)

    def watch(self, replicas: Replicas) -> None:
        """Read what the engines have now, whenever it is asked for."""
        engines = replicas.engines
        blocks = sum(cache.blocks for engine in engines for cache in engine.caches)
        gauges = {
            "requests_running": ("Requests that decode.", lambda: sum(e.running.count for e in engines)),
            "requests_waiting": ("Requests that wait.", lambda: sum(len(e.scheduler.waiting) for e in engines)),
            "cache_share": ("Share of the cache in use.", lambda: sum(e.blocks_in_use for e in engines) / blocks),
            "prefix_hit_tokens": ("Tokens found in the cache.", lambda: replicas.hit_tokens),
            "preemptions": ("Requests that gave way.", lambda: replicas.preemptions),
        }
        for name, (text, value) in gauges.items():
            Gauge(f"meshwise_{name}", text, registry=self.registry).set_function(value)

    def refused(self, status: int) -> None:
        """Count an error that a client was told."""
        self._refused.labels(str(status)).inc()

    def step(self, record: StepRecord) -> None:
        """A step is over."""
        self._prompt.inc(sum(new for _, new in record.chunks))
        self._step.labels(record.kind).observe(record.seconds)
        if self._predict is not None and record.seconds > 0:
            self._ratio.labels(record.kind).observe(self._predict(record) / record.seconds)

    def over(self, request: EngineRequest) -> None:
        """A request is over."""
        self._requests.labels(request.reason or "error").inc()
        self._output.inc(request.made)
        if "first" in request.times:
            self._ttft.observe(request.times["first"] - request.times["arrived"])
        if request.made > 1:
            self._tpot.observe((request.times["done"] - request.times["first"]) / (request.made - 1))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)
