"""`plan serve`: the best ways to serve a load on one cluster, or on several and in several precisions.

Not here: words and pictures (`report`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, ValidationInfo, field_validator

from meshwise.commands.command import Screen, Tell, command, patience, silent, verb
from meshwise.commands.estimate_serve import EngineFiles, ServeRequest, parse_chunk
from meshwise.commands.plan_files import check_save, save_plan, write_file
from meshwise.commands.requests import Flag, TimeLimit, listed, validated
from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import Quantity, format_percent, format_time, parse_duration, parse_fraction
from meshwise.costs.engines import engine_chunk
from meshwise.costs.problem import ServingProblem
from meshwise.exports.serving import asked_serving_tools
from meshwise.jobs import ServingLoad, drawn_requests, parse_serving_precision
from meshwise.jobs.serving_precision import FORMATS, PUBLISHED
from meshwise.jobs.traffic import Load, read_trace
from meshwise.report.plan_serve import plan_serve_report, plan_serve_svg
from meshwise.report.serve_alternatives import alternatives_report, alternatives_svg
from meshwise.search.serving import ServingConstraints, ServingPlan, ServingPlanResult, plan_serving, plan_simulated
from meshwise.search.serving.alternatives import Alternative, ServingAlternatives, plan_alternatives
from meshwise.search.until import OutOfTime, Until
from meshwise.sharding.serving import SERVING_AXES
from meshwise.simulation.serving import LatencyTarget, LatencyTargets


def _target(value: Any, info: ValidationInfo) -> Any:
    """Read `50ms`, `p99:50ms` or `mean:50ms`; numbers are seconds, of the share that requests are to keep."""
    if isinstance(value, LatencyTarget) or value is None:
        return value
    simulate, text = info.data.get("simulate", True), str(value).strip()
    share = info.data.get("share", 0.99) if simulate else None
    head, colon, rest = text.partition(":")
    if colon:
        try:
            share = None if head == "mean" else float(head[1:] if head[:1] in ("p", "P") else "") / 100
        except ValueError:
            raise MeshwiseError(f"expected a time such as 50ms, p95:50ms or mean:50ms, found {text!r}") from None
        if share is not None and not simulate:
            raise MeshwiseError(f"a percentile needs simulated requests, found {text!r} beside --no-simulate")
    seconds = float(value) if isinstance(value, int | float) else parse_duration(rest if colon else text, "target")
    try:
        return LatencyTarget(seconds, share)
    except MeshwiseError as error:
        raise MeshwiseError(f"{str(error).removeprefix('target: ')} in {text!r}") from None


_Target = Annotated[LatencyTarget, Flag("TIME"), BeforeValidator(_target, json_schema_input_type=str | float)]


class PlanServeRequest(ServeRequest):
    """What `meshwise plan serve` is asked."""

    sections: ClassVar = {
        **ServeRequest.sections,
        "Targets": ("max_ttft", "max_tpot", "share", "rate", "simulate"),
        "Search": ("objective", "max_batch", "mode", "chunk", "forbid", "tool", "within", "top"),
    }

    on: Annotated[str | None, Flag("CLUSTERS")] = Field(default=None, serialization_alias="cluster")
    """The cluster: CHIP:SHAPE_OR_COUNT, v5e:4x8 or h100:64; several (h100:8,h200:8) are compared."""
    precision: str = Field(
        default=PUBLISHED,
        description=f"Number formats: {PUBLISHED} (as the checkpoint is), {FORMATS}; several (bf16,fp8 or "
        "bf16;weights=int8,kv=int8) are compared.",
    )
    objective: Literal["throughput", "tpot", "ttft"] = "throughput"
    """Most output tokens/s on all chips of the cluster, least TPOT, or least TTFT."""
    simulate: bool = True
    """Send simulated requests to plans, where there are targets or a rate; else targets are means without queues."""
    share: float = Field(default=0.99, gt=0, lt=1)
    """Share of the requests that must keep a target which does not say its own."""
    max_ttft: _Target | None = Field(default=None, exclude=True)
    """Longest time to the first token: 500ms for p99 (or --share), p95:500ms, mean:500ms for the mean."""
    max_tpot: _Target | None = Field(default=None, exclude=True)
    """Longest time per output token, written as --max-ttft."""
    rate: float | None = Field(default=None, gt=0, serialization_alias="requests_per_s")
    """Requests per second to serve, on as few chips as possible; by default as many as possible."""
    mode: Literal["aggregated", "disaggregated"] | None = None
    """Restrict the search to aggregated or disaggregated serving; default: both."""
    max_batch: int = Field(default=4096, ge=1, le=1 << 16)
    """Most requests that one engine decodes for at once."""
    forbid: Annotated[str, Flag("AXES")] = Field(
        default="", description=f"Mesh axes to exclude, separated by commas: {', '.join(SERVING_AXES)}."
    )
    chunk: Annotated[str, Flag("TOKENS")] = Field(
        default="", validation_alias=AliasChoices("chunk", "chunks"), serialization_alias="chunks"
    )
    """Chunk sizes to try for the best plans of aggregated serving, besides whole prompts: 256,512,1024 tokens of a
    prompt in one step, or none; by default, that of the engine of --tool or --calibration (vLLM, SGLang: 8192)."""
    within: Annotated[float, Quantity("share", parse_fraction, format_percent, "2%")] = Field(
        default=0.02, ge=0, le=0.5
    )
    """Share of the best plan's numbers within which plans are not told apart: the simplest of them is first (0 for the
    best alone)."""
    top: int = Field(default=5, ge=1, le=100)
    """How many plans to show."""

    @field_validator("precision")
    @classmethod
    def _precision_is_known(cls, text: str) -> str:
        for one in split_precisions(text) or (text,):
            if one != PUBLISHED:
                parse_serving_precision(one)
        return text

    @property
    def clusters(self) -> tuple[str, ...]:
        """Clusters to compare; one name if there is no comparison."""
        return listed(self.on, "--on")

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions to compare; one if there is no comparison."""
        return split_precisions(self.precision)

    @property
    def several(self) -> bool:
        """Whether clusters or precisions are compared."""
        return max(len(self.clusters), len(self.precisions)) > 1

    @property
    def constraints(self) -> ServingConstraints:
        """Targets and objective."""
        ttft, tpot = (None if target is None else target.seconds for target in (self.max_ttft, self.max_tpot))
        forbid, chunks = (
            listed(self.forbid, "--forbid"),
            tuple(parse_chunk(one) for one in listed(self.chunk, "--chunk") if self.chunk != "none"),
        )
        return ServingConstraints(self.objective, ttft, tpot, self.rate, self.mode, self.max_batch, forbid, chunks)

    def constraints_on(self, problem: ServingProblem) -> ServingConstraints:
        """The same, with the engines that have to take a plan.

        Raises:
            HandoverError: an engine that is named takes the load in no layout.
        """
        tools = asked_serving_tools(problem, self.tool)
        own = None if self.chunk else engine_chunk(self.tool, problem.calibration)
        chunks = self.constraints.chunks if own is None else (own,)  # of no effect on shorter prompts
        return replace(self.constraints, chunks=chunks, tools=tools, tools_optional=not self.tool, within=self.within)

    @property
    def simulates(self) -> bool:
        """Whether plans are simulated: a target is a percentile, or a rate is asked for without targets."""
        targets = [target for target in (self.max_ttft, self.max_tpot) if target is not None]
        return self.simulate and (any(t.share is not None for t in targets) or (self.rate is not None and not targets))

    def requests(self, load: ServingLoad) -> Callable[[float, int], Load]:
        """A function of a rate and a number that returns that many requests."""
        if self.csv is None:
            return lambda rate, count: drawn_requests(load, rate, count)
        trace = read_trace(self.csv)
        return lambda rate, count: trace.first(count).at_rate(rate)

    def echo(self) -> dict[str, Any]:
        """The inputs for JSON; targets as seconds and as they were written."""
        targets = {"max_ttft": self.max_ttft, "max_tpot": self.max_tpot}
        return {
            **super().echo(),
            **{f"{name}_s": None if target is None else target.seconds for name, target in targets.items()},
            **{f"{name}_of": None if target is None else str(target) for name, target in targets.items()},
        }


def split_precisions(text: str) -> tuple[str, ...]:
    """Split a list of precisions: presets by commas, what names roles by semicolons.

    >>> split_precisions("bf16,fp8"), split_precisions("bf16;weights=int8,kv=int8")
    (('bf16', 'fp8'), ('bf16', 'weights=int8,kv=int8'))
    """
    parts = listed(text, "--precision", ";")
    return tuple(one for part in parts for one in ((part,) if "=" in part else listed(part, "--precision")))


def find_serving_plans(
    request: PlanServeRequest,
    problem: ServingProblem,
    progress: Tell = silent,
    time_limit: float | None = None,
    *,
    spare: bool = False,
) -> ServingPlanResult:
    """Answer the request; `problem` is its own, resolved; `time_limit` in seconds, `spare` as in `Until`.

    Raises:
        InfeasibleError: nothing fits, nothing keeps the targets, or nothing was found in time.
    """
    until, constraints = Until.after(time_limit, spare=spare), request.constraints_on(problem)
    try:
        if not request.simulates:
            until = until.telling(progress)
            return plan_serving(problem, constraints=constraints, top=request.top, until=until)
        targets, requests = LatencyTargets(request.max_ttft, request.max_tpot), request.requests(problem.load)
        return plan_simulated(problem, constraints, targets, requests, request.top, progress, until)
    except OutOfTime:
        raise InfeasibleError(
            f"no plan of {problem.model.name} on {problem.cluster.name} was found in {format_time(time_limit or 0.0)}; "
            "nothing is proved, there may be one: raise --time-limit"
            + (", or give targets as means (--no-simulate)" if request.simulates else "")
        ) from None


@command(PlanServeRequest)
def plan_serve(
    request: PlanServeRequest, *, progress: Tell = silent, time_limit: float | None = None
) -> ServingPlanResult:
    """Find the best ways to serve a load: what `meshwise plan serve` answers, as values.

    >>> import meshwise
    >>> planning = meshwise.plan_serve("llama-3-8b", on="h100:1", prompt=512, output=64, max_tpot="20ms")
    >>> best = planning.plans[0]
    >>> best.fits, best.tpot.expected <= 0.02
    (True, True)

    Args:
        progress: told a line now and then.
        time_limit: seconds after which searching ends with the best so far; `search.gap` says how good that is. None
            for as long as it takes.

    Returns: the plans, best first, and why others lose.

    Raises:
        MeshwiseError: an argument that cannot be understood; InfeasibleError when nothing fits or keeps the targets.
    """
    if request.several:
        raise MeshwiseError("on, precision: several are compared by meshwise.compare_serve; give one of each")
    return find_serving_plans(request, request.problem(), progress, time_limit)


def find_alternatives(
    request: PlanServeRequest, progress: Tell = silent, time_limit: float | None = None
) -> ServingAlternatives:
    """Plan on each of the clusters that `--on a,b` names, in each of the precisions that `--precision a,b` names.

    Each gets an even share of the seconds of `time_limit` that are left.

    Raises:
        MeshwiseError: a cluster that cannot be found; one, or a precision, given twice.
        InfeasibleError: none of them has a plan.
    """
    for flag, names in (("--on", request.clusters), ("--precision", request.precisions)):
        if twice := [name for name in names if names.count(name) > 1]:
            raise MeshwiseError(f"{flag}: {twice[0]} is named twice; leave one out")
    clusters: tuple[str | None, ...] = request.clusters or (None,)
    problems = {}
    for name in clusters:
        for precision in request.precisions:
            problem = request.model_copy(update={"on": name, "precision": precision}).problem()
            problems[Alternative(name or str(request.cluster), problem.load.precision)] = problem

    found: list[ServingPlanResult] = []

    def search(problem: ServingProblem, share: float | None) -> ServingPlanResult:
        which, spare = f"{problem.cluster.name}, {problem.load.precision}", bool(found)
        found.append(
            find_serving_plans(request, problem, lambda line: progress(f"{which}: {line}"), share, spare=spare)
        )
        return found[-1]

    return plan_alternatives(problems, search, request.top, time_limit)


def compare_serve(
    model: str, *, on: Iterable[str], precisions: Iterable[str] = (PUBLISHED,), **options: Any
) -> ServingAlternatives:
    """Compare clusters and precisions for a serving load.

    >>> import meshwise
    >>> found = meshwise.compare_serve(
    ...     "llama-3-8b", on=["h100:1", "h200:1"], precisions=["bf16", "fp8"], prompt=1024, output=256, max_batch=8
    ... )
    >>> len(found.found), found.ranked[0][0].precision
    (4, 'fp8')

    Args:
        model: as `plan_serve` takes it.
        on: the clusters, by name.
        precisions: as `plan_serve` takes one.
        options: those of `plan_serve`, by the same names.

    Raises:
        MeshwiseError: as `plan_serve`; InfeasibleError where nothing has a plan.
    """
    given = {"model": model, "on": ",".join(on), "precision": ";".join(precisions), **options}
    return find_alternatives(validated(PlanServeRequest, given))


class _Further(EngineFiles):
    """What the command line adds."""

    sections: ClassVar = {
        "Search": ("time_limit",),
        "Output": ("save", "svg", "engine", "prefill_engine"),
    }

    time_limit: TimeLimit = Field(default=None, gt=0)
    """End the search after this time with the best so far, and say how far it may be from the best possible; on a
    terminal by default after a minute. Several clusters and precisions share it."""
    save: Path | None = None
    """Write the best plan to this file, as JSON."""
    svg: Path | None = None
    """Write the picture of latency against throughput to this file."""


Answer.reports[ServingPlanResult] = lambda planning: plan_serve_report(planning, {})
Answer.reports[ServingAlternatives] = lambda found: alternatives_report(found, {})


@verb(PlanServeRequest, _Further)
def show_plans(screen: Screen, request: PlanServeRequest, further: _Further) -> None:
    """Find the best layouts for a serving load, and why the others lose.

    Searches engines of every size, layouts of prefill and decode, aggregated or disaggregated, and batches. Several
    clusters (--on h100:8,h200:8) or precisions (--precision bf16,fp8) are compared. If nothing fits or meets the
    targets, the exit code is 3. Ctrl-C during a search, or the end of its time (--time-limit), shows the best so far.

    \b
      meshwise plan serve llama-3-70b --on h100:64 --prompt 1024 \\
        --output 256 --precision fp8 --max-ttft 500ms --max-tpot 30ms
      meshwise plan serve llama-3-8b --on h100:8,v5e:4x4 --precision bf16,int8 \\
        --prompt uniform:512-2048 --output 256 --svg front.svg
    """  # noqa: D301  (click's mark for lines that stay as they are)
    check_save(further.save)
    limit = patience(screen, further.time_limit)
    picture: Callable[[], str]
    if request.several:
        found = find_alternatives(request, screen.progress, limit)
        best = found.ranked[0][1]
        inputs = request.echo_load(best.problem.load)
        report, picture = alternatives_report(found, inputs), partial(alternatives_svg, found)
    else:
        problem = request.problem()
        planning = find_serving_plans(request, problem, screen.progress, limit)
        best = ServingPlan(problem, planning.plans[0])
        inputs = request.echo_problem(problem)
        report, picture = plan_serve_report(planning, inputs), partial(plan_serve_svg, planning)
    further.write_engines(best)
    write_file("--svg", further.svg, picture)
    screen.show(report)
    save_plan(best, further.save)  # last: an answer that cannot be saved is shown all the same
