"""`simulate serve`: the request, and a load served by an engine. Not here: flags (`cli`), words (`report`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from meshwise.commands.plan_file import is_serving_plan, is_training_plan
from meshwise.commands.requests import validated
from meshwise.commands.serving_plan import read_serving_plan
from meshwise.commands.simulate_plan import check_requests, planned_requests, planned_system
from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.core.units import Quantity, format_count, format_time, parse_count, parse_duration
from meshwise.costs.engine import EngineCosts
from meshwise.jobs.traffic import DrawnLoad, Load, SharedPrefixes, parse_arrivals, parse_lengths, read_trace
from meshwise.search.serving import ServingPlan
from meshwise.simulation.serving import (
    Autoscaling,
    Capacity,
    PrefillPool,
    Scheduling,
    ServingResult,
    ServingSystem,
    Speculation,
    Targets,
    find_capacity,
    simulate_serving,
)

Seconds = Annotated[float, Quantity("seconds", parse_duration, format_time, "200ms")]
Count = Annotated[int, Quantity("", parse_count, format_count, "10k")]

_TEXT: JsonDict = {"metavar": "TEXT"}


class SimulateServeRequest(BaseModel):
    """What `meshwise simulate serve` is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    costs: str = Field(description="A plan of serving, or what a step of an engine takes: a JSON file.")
    rate: float | None = Field(default=None, gt=0, description="Requests per second, the mean; a CSV file has its own.")
    prompt: str = Field(
        default="1024",
        description="Tokens of prompts: a number, uniform:128-2048, or lognormal:MEAN:VARIATION[:MOST].",
        json_schema_extra=_TEXT,
    )
    output: str = Field(
        default="256", description="Tokens of outputs, written as --prompt is.", json_schema_extra=_TEXT
    )
    arrivals: str = Field(
        default="poisson",
        description="How requests arrive: poisson, constant, gamma:VARIATION (clumps), on-off:10s/50s (bursts).",
        json_schema_extra=_TEXT,
    )
    csv: str | None = Field(
        default=None,
        description="Or a CSV file of requests: arrival, prompt, output, and optionally prefix and keep_as.",
        json_schema_extra={"metavar": "FILE"},
    )
    requests: Count | None = Field(
        default=None, ge=1, description="How many requests; by default 10k, and of a CSV file all."
    )
    seed: int = Field(default=0, ge=0, description="Of all that is drawn.")
    prefix_tokens: int = Field(
        default=0, ge=0, description="Tokens that prompts begin with and share with others, before those of --prompt."
    )
    prefix_groups: int = Field(default=1, ge=1, description="How many different beginnings there are.")
    ttft: Seconds | None = Field(default=None, gt=0, description="Target: time to the first token.")
    tpot: Seconds | None = Field(default=None, gt=0, description="Target: time per output token after the first.")
    share: float = Field(default=0.99, gt=0, le=1, description="Share of the requests that are to keep the targets.")
    capacity: bool = Field(default=False, description="Find the highest rate that keeps the targets.")
    replicas: int = Field(default=1, ge=1, description="Replicas of the engine.")
    routing: Literal["round-robin", "least-loaded", "affinity"] = Field(
        default="least-loaded", description="Which replica a request goes to; affinity: the one that has its prefix."
    )
    policy: Literal["prefill-first", "decode-first", "chunked"] = Field(
        default="prefill-first", description="What a step does first."
    )
    max_batch: int = Field(default=256, ge=1, description="Requests that a replica works on at once.")
    max_step_tokens: int = Field(default=2048, ge=1, description="Tokens of a step.")
    preemption: Literal["recompute", "swap"] = Field(
        default="recompute", description="What becomes of the cache of a request that gives way."
    )
    watermark: float = Field(default=0.01, ge=0, lt=1, description="Share of the cache that newcomers leave free.")
    prefix_cache: bool = Field(default=False, description="Keep beginnings of prompts in the cache for later ones.")
    speculate: str | None = Field(
        default=None,
        description="Speculative decoding: ACCEPTANCE:DRAFTS[:TIME of one draft step], such as 0.7:4:1ms.",
        json_schema_extra=_TEXT,
    )
    prefill_replicas: int = Field(default=0, ge=0, description="Replicas that only prefill; the others only decode.")
    prefill_costs: str | None = Field(
        default=None,
        description="What a step of theirs takes, if not the same.",
        json_schema_extra={"metavar": "FILE"},
    )
    autoscale: str | None = Field(
        default=None,
        description="Replicas follow the load: REQUESTS:LEAST-MOST[:INTERVAL:STARTUP], such as 50:1-8:10s:60s.",
        json_schema_extra=_TEXT,
    )

    def load(self) -> Load:
        """What is asked of the system.

        Raises:
            MeshwiseError: neither a rate nor a file; both a file and what is drawn.
        """
        if self.csv is not None:
            drawn = {"prompt", "output", "arrivals", "prefix_tokens", "prefix_groups"} & self.model_fields_set
            if drawn:
                raise MeshwiseError(f"--csv has its own requests: leave out --{min(drawn).replace('_', '-')}")
            trace = read_trace(self.csv)
            trace = trace if self.requests is None else trace.first(self.requests)
            return trace if self.rate is None else trace.at_rate(self.rate)
        if self.rate is None and not self.capacity:
            raise MeshwiseError(
                "--rate is missing: requests per second, or a file of requests (--csv), or --capacity to have it found"
            )
        shared = SharedPrefixes(self.prefix_tokens, self.prefix_groups) if self.prefix_tokens else None
        arrivals = parse_arrivals(self.arrivals, self.rate or 1.0, "--arrivals")
        lengths = parse_lengths(self.prompt, "--prompt"), parse_lengths(self.output, "--output")
        return DrawnLoad(arrivals, *lengths, 10_000 if self.requests is None else self.requests, self.seed, shared)

    def system(self, costs: EngineCosts) -> ServingSystem:
        """What serves, with replicas of these costs."""
        speculation = None if self.speculate is None else _speculation(self.speculate)
        scheduling = Scheduling(
            self.policy,
            self.max_batch,
            self.max_step_tokens,
            self.preemption,
            self.watermark,
            self.prefix_cache,
            speculation,
        )
        pool = None
        if self.prefill_replicas:
            own = costs if self.prefill_costs is None else read_engine_costs(self.prefill_costs)
            pool = PrefillPool(own, self.prefill_replicas, scheduling.replace(speculation=None))
        elif self.prefill_costs is not None:
            raise MeshwiseError("--prefill-costs: of which replicas? Give --prefill-replicas")
        return ServingSystem(costs, self.replicas, scheduling, self.routing, pool, self.scaling())

    def scaling(self) -> Autoscaling | None:
        """What changes the number of replicas."""
        return None if self.autoscale is None else _autoscaling(self.autoscale)

    def targets(self) -> Targets:
        """What users are to notice at most."""
        return Targets(self.ttft, self.tpot, self.share)


def _speculation(text: str) -> Speculation:
    """Read `0.7:4:1ms`."""
    parts = text.split(":")
    try:
        acceptance, drafts = float(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        raise MeshwiseError(
            f"--speculate: expected ACCEPTANCE:DRAFTS[:TIME] such as 0.7:4:1ms, found {text!r}"
        ) from None
    return Speculation(acceptance, drafts, parse_duration(":".join(parts[2:]), "--speculate") if parts[2:] else 0.0)


def _autoscaling(text: str) -> Autoscaling:
    """Read `50:1-8:10s:60s`."""
    parts = text.split(":")
    try:
        target = float(parts[0])
        least, most = (int(p) for p in parts[1].split("-"))
    except (ValueError, IndexError):
        parts = []
    if len(parts) not in (2, 4):
        raise MeshwiseError(
            f"--autoscale: expected REQUESTS:LEAST-MOST[:INTERVAL:STARTUP] such as 50:1-8:10s:60s, found {text!r}"
        )
    times = [parse_duration(p, "--autoscale") for p in parts[2:]]
    return Autoscaling(target, least, most, *times)


def read_engine_costs(file: str | os.PathLike[str]) -> EngineCosts:
    """Read what a step of an engine takes.

    Raises:
        ConfigError: there is no such file, or it holds no such numbers.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"engine costs {str(file)!r}: {error.strerror}; docs/simulation.md shows such a file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"engine costs {str(file)!r}: expected JSON, found no text") from None
    return EngineCosts.from_json(text, f"engine costs {str(file)!r}")


def read_served(file: str | os.PathLike[str]) -> EngineCosts | ServingPlan:
    """Read what serves: a saved plan, or the costs of an engine's steps.

    Raises:
        MeshwiseError: there is no such file, or it holds neither.
    """
    if is_serving_plan(file) or is_training_plan(file):  # of the latter it says what reads it
        return read_serving_plan(file)
    return read_engine_costs(file)


@dataclass(frozen=True)
class ServedLoad:
    """A load and what became of it.

    Args:
        load: as it was asked for.
        targets: what users were to notice at most.
        result: what became of it; with a capacity, at the highest rate that keeps the targets.
        capacity: how that rate was found, None where it was not asked for.
    """

    load: Load
    targets: Targets
    result: ServingResult
    capacity: Capacity | None


def serve_load(
    request: SimulateServeRequest,
    served: EngineCosts | ServingPlan,
    *,
    spans: int = 0,
    progress: Callable[[str], None] | None = None,
) -> ServedLoad:
    """Do what a request asks; `spans` steps are kept for a timeline, `progress` is told a line now and then."""
    if isinstance(served, ServingPlan):
        request = planned_requests(request, served)
        system = planned_system(request, served)
    else:
        system = request.system(served)
    load, targets = request.load(), request.targets()
    if isinstance(served, ServingPlan):
        check_requests(load, served)
    if request.capacity:
        capacity = find_capacity(system, load, targets, seed=request.seed, progress=progress)
        load = load.at_rate(capacity.rate)
        again = partial(simulate_serving, system, load, seed=request.seed, spans=spans, progress=progress)
        return ServedLoad(load, targets, again() if spans else capacity.result, capacity)
    result = simulate_serving(system, load, seed=request.seed, spans=spans, progress=progress)
    return ServedLoad(load, targets, result, None)


def simulate_serve(costs: EngineCosts | ServingPlan | str | os.PathLike[str], **asked: Any) -> ServedLoad:
    """Serve a load by replicas of an engine: what `meshwise simulate serve` answers, as values.

    >>> import meshwise
    >>> from meshwise.costs.engine import AttentionCosts, EngineCosts
    >>> costs = EngineCosts(0.001, ((1, 0.012), (2048, 0.08)), 4096, (AttentionCosts(1e-8, 1e-10),))
    >>> served = meshwise.simulate_serve(costs, rate=2.0, prompt="1024", output="64", requests=500, ttft=0.2)
    >>> served.result.requests, bool(served.result.kept(served.targets).mean() > 0.5)
    (500, True)

    Args:
        costs: what a step takes, or a plan of serving; or the JSON file of either.
        asked: the flags of `simulate serve`, with `_` for `-`.

    Raises:
        MeshwiseError: an argument that cannot be understood; no request fits; the targets cannot be kept.
    """
    found = costs if isinstance(costs, EngineCosts | ServingPlan) else read_served(costs)
    named = "given" if found is costs else str(costs)
    return serve_load(validated(SimulateServeRequest, {"costs": named, **asked}), found)
