"""`simulate serve`: a load served over time by an engine, or by the engines of a plan. Not here: words (`report`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.commands.command import Screen, command, verb
from meshwise.commands.estimate_serve import Lengths, serving_plan
from meshwise.commands.plan_files import kind_of_plan, read_plan, read_text, write_file
from meshwise.commands.requests import File, Flag, Request, flag, refuse
from meshwise.commands.workers import Lost, Processes
from meshwise.core.errors import LayoutError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import Quantity, format_count, format_time, parse_count, parse_duration
from meshwise.costs.engine import EngineCosts
from meshwise.costs.problem import readable_context
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.jobs import computed_lengths, output_lengths
from meshwise.jobs.lengths import parse_lengths
from meshwise.jobs.traffic import MOST_REQUESTS, DrawnLoad, Load, SharedPrefixes, parse_arrivals, read_trace
from meshwise.report.serving import serving_report, serving_svg, serving_trace
from meshwise.search.serving import ServingPlan, ServingPlanResult, simulator_setup
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
    joined,
    part_tasks,
    simulate_part,
    simulate_serving,
)
from meshwise.simulation.serving.simulate import Part

Seconds = Annotated[float, Quantity("seconds", parse_duration, format_time, "200ms")]
Count = Annotated[int, Quantity("", parse_count, format_count, "10k")]

#: What the scheduler of a plan's engines may be told.
_SCHEDULING = ("policy", "max_batch", "max_step_tokens", "preemption", "watermark", "prefix_cache")

#: Steps that a trace shows.
_SPANS = 20_000


class SimulateServeRequest(Request):
    """What `meshwise simulate serve` is asked."""

    sections: ClassVar = {
        "Load": ("rate", "prompt", "output", "arrivals", "requests", "csv", "seed"),
        "Targets": ("max_ttft", "max_tpot", "share", "capacity"),
        "System": ("replicas", "routing", "policy", "max_batch", "max_step_tokens", "prefill_replicas", "autoscale"),
    }

    rate: float | None = Field(default=None, gt=0)
    """Mean requests per second; a CSV file has its own."""
    prompt: Lengths = "1024"
    """Tokens per prompt: a number, uniform:128-2048, or lognormal:MEAN:VARIATION[:MOST]."""
    output: Lengths = "256"
    """Output tokens per request, written as --prompt."""
    arrivals: str = "poisson"
    """How requests arrive: poisson, constant, gamma:VARIATION (clumps), on-off:10s/50s (bursts)."""
    csv: File | None = None
    """CSV file of requests (instead of --prompt and --output): arrival, prompt, output, and optionally prefix and
    keep_as."""
    requests: Count | None = Field(default=None, ge=1, le=MOST_REQUESTS)
    """How many requests; by default 10k, or all of a CSV file."""
    seed: int = Field(default=0, ge=0)
    """Seed of everything that is drawn at random."""
    prefix_tokens: int = Field(default=0, ge=0)
    """Tokens of a prefix shared between prompts, in addition to --prompt."""
    prefix_groups: int = Field(default=1, ge=1)
    """Number of distinct shared prefixes."""
    max_ttft: Seconds | None = Field(
        default=None, gt=0, validation_alias=AliasChoices("max_ttft", "ttft"), serialization_alias="ttft"
    )
    """Target: longest time to the first token."""
    max_tpot: Seconds | None = Field(
        default=None, gt=0, validation_alias=AliasChoices("max_tpot", "tpot"), serialization_alias="tpot"
    )
    """Target: longest time per output token after the first."""
    share: float = Field(default=0.99, gt=0, le=1)
    """Share of the requests that must keep the targets."""
    capacity: bool = False
    """Find the highest rate that keeps the targets."""
    replicas: int = Field(default=1, ge=1)
    """Replicas of the engine."""
    routing: Literal["round-robin", "least-loaded", "affinity"] = "least-loaded"
    """Which replica a request goes to; affinity: the one that holds its prefix."""
    policy: Literal["prefill-first", "decode-first", "chunked"] = "prefill-first"
    """What the scheduler puts into a step first."""
    max_batch: int = Field(default=256, ge=1)
    """Most requests that a replica works on at once."""
    max_step_tokens: int = Field(default=2048, ge=1)
    """Most tokens in one step."""
    preemption: Literal["recompute", "swap"] = "recompute"
    """What happens to the cache of a request that is preempted."""
    watermark: float = Field(default=0.01, ge=0, lt=1)
    """Share of the cache that must stay free when a request is admitted."""
    prefix_cache: bool = False
    """Keep prompt prefixes in the cache for later requests."""
    speculate: str | None = None
    """Speculative decoding: ACCEPTANCE:DRAFTS[:TIME of one draft step], such as 0.7:4:1ms."""
    prefill_replicas: int = Field(default=0, ge=0)
    """Replicas that only prefill; the others only decode."""
    prefill_costs: File | None = None
    """Step costs of the prefill replicas, if they differ."""
    jobs: int = Field(default=1, ge=1, le=4096, exclude=True)
    """Processes that share the replicas, with the same answer; for round-robin routing without prefill replicas or
    autoscaling, where replicas do not depend on one another."""
    autoscale: str | None = None
    """Autoscaling with the load: REQUESTS:LEAST-MOST[:INTERVAL:STARTUP], such as 50:1-8:10s:60s."""

    def load(self) -> Load:
        """The requests that arrive.

        Raises:
            MeshwiseError: neither a rate nor a file; both a file and what is drawn.
        """
        if self.csv is not None:
            drawn = {"prompt", "output", "arrivals", "prefix_tokens", "prefix_groups"} & self.model_fields_set
            if drawn:
                raise MeshwiseError(f"--csv has its own requests: leave out {flag(min(drawn))}")
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
        chosen = {field: getattr(self, field) for field in _SCHEDULING}
        speculation = None if self.speculate is None else _speculation(self.speculate)
        scheduling = Scheduling(**chosen, speculation=speculation)
        pool = None
        if self.prefill_replicas:
            own = costs if self.prefill_costs is None else read_engine_costs(self.prefill_costs)
            pool = PrefillPool(own, self.prefill_replicas, replace(scheduling, speculation=None))
        elif self.prefill_costs is not None:
            raise MeshwiseError("--prefill-costs: of which replicas? Give --prefill-replicas")
        return ServingSystem(costs, self.replicas, scheduling, self.routing, pool, self.scaling())

    def scaling(self) -> Autoscaling | None:
        """What changes the number of replicas: `50:1-8:10s:60s`."""
        if self.autoscale is None:
            return None
        parts = self.autoscale.split(":")
        try:
            target = float(parts[0])
            least, most = map(int, parts[1].split("-"))
        except (ValueError, IndexError):
            parts = []
        if len(parts) not in (2, 4):
            raise MeshwiseError(
                "--autoscale: expected REQUESTS:LEAST-MOST[:INTERVAL:STARTUP] such as 50:1-8:10s:60s, found "
                f"{self.autoscale!r}"
            )
        return Autoscaling(target, least, most, *(parse_duration(p, "--autoscale") for p in parts[2:]))


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


def read_engine_costs(file: str | os.PathLike[str]) -> EngineCosts:
    """Read what a step of an engine takes.

    Raises:
        ConfigError: there is no such file, or it holds no such numbers.
    """
    text = read_text("engine costs", file, "docs/simulation.md shows such a file")
    return EngineCosts.from_json(text, f"engine costs {str(file)!r}")


@dataclass(frozen=True, repr=False)
class ServedLoad(Answer):
    """A load and what became of it.

    Args:
        load: as it was asked for.
        targets: the latencies that requests must keep.
        result: what became of it; with a capacity, at the highest rate that keeps the targets.
        capacity: how that rate was found, None where it was not asked for.
    """

    load: Load
    targets: Targets
    result: ServingResult
    capacity: Capacity | None


def planned_requests(request: SimulateServeRequest, plan: ServingPlan, name: str) -> SimulateServeRequest:
    """The request, with the plan's lengths of prompts and outputs where it has none of its own.

    Raises:
        MeshwiseError: the plan's requests were recorded, and are not in it.
    """
    load = plan.problem.load
    if request.csv is not None:
        return request
    own: dict[str, Any] = {}
    given = request.model_fields_set
    drawn = load.mix is None or load.mix.prompt is not None
    if not drawn and not {"prompt", "output"} <= given:
        raise MeshwiseError(
            f"the requests of {name} were {load.mix.words if load.mix else ''}: give the file (--csv), or "
            "--prompt and --output"
        )
    if not {"prompt", "prefix_tokens"} & given:
        own |= {"prompt": str(computed_lengths(load)), "prefix_tokens": int(load.cached_prefix)}
    if "output" not in given:
        own["output"] = str(output_lengths(load))
    return request.model_copy(update=own)


def check_requests(load: Load, plan: ServingPlan) -> None:
    """Refuse requests longer than the plan's model was made for; unbounded lengths are not checked.

    Raises:
        LayoutError: with what the model can read.
    """
    model, longest = plan.problem.model, _longest(load)
    most = readable_context(model, plan.problem.load)
    if most is not None and longest is not None and longest > most:
        raise LayoutError(
            f"{model.name} was made for {most:,.0f} tokens, found requests of up to {longest:,}, prompt and "
            "output together; use shorter ones, or a plan of a model that reads more"
        )


def _longest(load: Load) -> int | None:
    """Tokens of the longest request; None if lengths are unbounded."""
    if not isinstance(load, DrawnLoad):
        return max(d.prompt + d.output for d in load.requests())
    shared = 0 if load.prefixes is None else load.prefixes.tokens
    prompt, output = load.prompt.most, load.output.most
    return None if prompt is None or output is None else shared + prompt + output


def planned_system(request: SimulateServeRequest, plan: ServingPlan, name: str) -> ServingSystem:
    """The plan's engines, with the number of replicas and the scheduling that the request asks for.

    Raises:
        MeshwiseError: what a plan has decided already, or a number of prefill replicas of a plan that has none.
    """
    given = request.model_fields_set
    if decided := sorted(given & {"speculate", "prefill_costs"}):
        raise MeshwiseError(f"{flag(decided[0])}: the plan {name} says it; leave it out")
    system = simulator_setup(plan.problem, plan.setup)
    changes = {field: getattr(request, field) for field in _SCHEDULING if field in given}
    system = replace(system, scheduling=replace(system.scheduling, **changes))
    if "prefill_replicas" in given:
        if system.prefill is None:
            raise MeshwiseError(
                f"--prefill-replicas: the engines of {name} prefill themselves; leave it out, or plan with "
                "--mode disaggregated"
            )
        system = replace(system, prefill=replace(system.prefill, replicas=request.prefill_replicas))
    system = replace(system, **{field: getattr(request, field) for field in ("replicas", "routing") if field in given})
    scaling = request.scaling()
    return system if scaling is None else replace(system, autoscaling=scaling)


@command(SimulateServeRequest)
def simulate_serve(
    costs: EngineCosts | ServingPlan | ServingPlanResult | ServingEstimate | str | os.PathLike[str],
    request: SimulateServeRequest,
    *,
    spans: int = 0,
    progress: Callable[[str], None] | None = None,
) -> ServedLoad:
    """Serve a load by replicas of an engine: what `meshwise simulate serve` answers, as values.

    >>> import meshwise
    >>> from meshwise.costs.engine import AttentionCosts, EngineCosts
    >>> costs = EngineCosts(0.001, ((1, 0.012), (2048, 0.08)), 4096, (AttentionCosts(1e-8, 1e-10),))
    >>> served = meshwise.simulate_serve(costs, rate=2.0, prompt="1024", output="64", requests=500, max_ttft=0.2)
    >>> served.result.requests, bool(served.result.kept(served.targets).mean() > 0.5)
    (500, True)

    Args:
        costs: what a step takes, or a plan of serving (of what a search found, the first; an estimate); or the JSON
            file of either.
        spans: steps to keep for a timeline.
        progress: told a line now and then.

    Raises:
        MeshwiseError: an argument that cannot be understood; no request fits; the targets cannot be kept.
    """
    served, name = serving_plan(costs), "given"
    if not isinstance(served, EngineCosts | ServingPlan | str | os.PathLike):
        raise MeshwiseError(f"costs: expected a plan of serving, costs of an engine, or a file, found {served!r}")
    if not isinstance(served, EngineCosts | ServingPlan):
        name = str(costs)
        served = read_engine_costs(name) if kind_of_plan(name) is None else read_plan(name, ServingPlan)
    if isinstance(served, ServingPlan):
        request = planned_requests(request, served, name)
        system = planned_system(request, served, name)
    else:
        system = request.system(served)
    load, targets, capacity = request.load(), Targets(request.max_ttft, request.max_tpot, request.share), None
    if isinstance(served, ServingPlan):
        check_requests(load, served)
    if request.jobs > 1:
        result = _in_parts(system, load, request, spans)
        return ServedLoad(load, targets, result, None)
    if request.capacity:
        capacity = find_capacity(system, load, targets, seed=request.seed, progress=progress)
        load = load.at_rate(capacity.rate)
        if not spans:
            return ServedLoad(load, targets, capacity.result, capacity)
    result = simulate_serving(system, load, seed=request.seed, spans=spans, progress=progress)
    return ServedLoad(load, targets, result, capacity)


def _in_parts(system: ServingSystem, load: Load, request: SimulateServeRequest, spans: int) -> ServingResult:
    """Serve a load by replicas that are simulated in several processes."""
    refuse(
        (
            not system.independent,
            "--jobs: replicas depend on one another unless --routing is round-robin, without prefill or autoscaling",
        ),
        (request.capacity, "--jobs: a capacity is found by simulations one after the other; leave one of them out"),
        (spans, "--jobs: the steps of a timeline are in one order; leave out --trace or --jobs"),
    )
    parts: list[Part] = []
    tasks = part_tasks(system, load, request.seed, request.jobs)
    for _, part in Processes(request.jobs).run(simulate_part, tasks):
        if isinstance(part, Lost):
            raise MeshwiseError(f"--jobs {request.jobs}: a part of the replicas was lost: {part.reason}")
        parts.append(part)
    if not any(part.rows for part in parts):
        return simulate_serving(system, load, seed=request.seed)  # which says what does not fit
    return joined(system, parts)


class _Files(Request):
    positional = ("costs",)
    sections: ClassVar = {"Output": ("svg", "trace")}

    costs: Annotated[str, Flag(name="PLAN|COSTS")]
    """A plan of serving, or the step costs of an engine: a JSON file."""
    svg: Path | None = None
    """Write the load over time to this file as SVG."""
    trace: Path | None = Field(
        default=None, description=f"Write the first {_SPANS:,} steps to this file, for Perfetto."
    )


Answer.reports[ServedLoad] = lambda served: serving_report(
    served.result, served.load, served.targets, served.capacity, {}
)


@verb(_Files, SimulateServeRequest)
def show_simulation(screen: Screen, files: _Files, request: SimulateServeRequest) -> None:
    """Serve requests over time by replicas of an engine.

    PLAN is what 'plan serve --save' wrote: its engines serve its load, except where options say otherwise. COSTS is a
    JSON file with the step costs of an engine. Requests arrive, wait, are batched, prefilled and decoded, are preempted
    when the cache is full, and find prefixes that others left; the answer is what users notice, and how busy the
    replicas are. With --capacity it is the highest rate that keeps the targets.

    \b
      meshwise simulate serve engine.json --rate 6 --prompt 1024 --output 256
      meshwise simulate serve engine.json --capacity --max-ttft 500ms --max-tpot 30ms \\
        --prompt lognormal:1024:1:8192 --replicas 4
      meshwise simulate serve plan.json --rate 40
      meshwise simulate serve engine.json --csv requests.csv --policy chunked
    """  # noqa: D301  (click's mark for lines that stay as they are)
    spans = _SPANS if files.trace else 0
    served = simulate_serve.answer(files.costs, request, spans=spans, progress=screen.terminal_progress)
    write_file("--svg", files.svg, lambda: serving_svg(served.result))
    write_file("--trace", files.trace, lambda: serving_trace(served.result))
    inputs = files.echo() | request.echo()
    screen.show(serving_report(served.result, served.load, served.targets, served.capacity, inputs))
