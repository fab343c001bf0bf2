"""`plan serve`: the request, and the planner's answer to it. Not here: flags (`cli`) and words (`report`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic.config import JsonDict

from meshwise.commands.requests import PARAMETERS, listed, validated
from meshwise.commands.serve import ServeRequest
from meshwise.core.errors import MeshwiseError
from meshwise.core.units import parse_count, parse_duration
from meshwise.costs.problem import ServingProblem
from meshwise.jobs import SERVING_PRECISIONS, ServingLoad, drawn_requests, parse_serving_precision
from meshwise.jobs.traffic import Load, read_trace
from meshwise.search.serving import ServingConstraints, ServingPlanResult, plan_serving, plan_simulated
from meshwise.sharding.serving import SERVING_AXES
from meshwise.simulation.serving import Aims, LatencyTarget


def _target(value: Any) -> Any:
    """Read `50ms` or `p99:50ms`; numbers are seconds."""
    if isinstance(value, LatencyTarget) or value is None:
        return value
    text = str(value).strip()
    head, colon, rest = text.partition(":")
    if not colon:
        seconds = float(value) if isinstance(value, int | float) else parse_duration(text, "target")
        return _aim(seconds, None, text)
    number = head[1:] if head[:1] in ("p", "P") else ""
    try:
        percentile = float(number)
    except ValueError:
        raise MeshwiseError(f"expected a time such as 50ms, of the mean, or p99:50ms, found {text!r}") from None
    return _aim(parse_duration(rest, "target"), percentile / 100, text)


def _tokens(text: str) -> int:
    """A whole number of tokens of a chunk."""
    value = parse_count(text, "--chunks")
    if value != int(value) or value < 1:
        raise MeshwiseError(f"--chunks: expected whole numbers of tokens, at least 1, found {text!r}")
    return int(value)


def _aim(seconds: float, share: float | None, text: str) -> LatencyTarget:
    try:
        return LatencyTarget(seconds, share)
    except MeshwiseError as error:
        raise MeshwiseError(f"{str(error).removeprefix('target: ')} in {text!r}") from None


_Target = Annotated[LatencyTarget, BeforeValidator(_target)]
_TIME: JsonDict = {"metavar": "TIME"}


class PlanServeRequest(ServeRequest):
    """What `meshwise plan serve` is asked."""

    cluster: str | None = Field(
        default=None,
        description="The cluster: CHIP:SHAPE_OR_COUNT, v5e:4x8 or h100:64; several, h100:8,h200:8, are compared.",
        json_schema_extra={"metavar": "CLUSTERS"},
    )
    precision: str = Field(
        default="bf16",
        description=f"Number formats: {', '.join(SERVING_PRECISIONS)}, or roles such as weights=int8,kv=int8 "
        "(weights, activations, kv, compute, head); several, bf16,fp8 or bf16;weights=int8,kv=int8, are compared.",
    )
    objective: Literal["throughput", "tpot", "ttft"] = Field(
        default="throughput",
        description="Most output tokens a second and chip (least cost), least time per output token, or to the first.",
    )
    max_ttft: _Target | None = Field(
        default=None,
        description="Time to first token that no plan may exceed: 500ms of the mean without queues, or p99:500ms of "
        "simulated requests.",
        json_schema_extra=_TIME,
    )
    max_tpot: _Target | None = Field(
        default=None,
        description="Time per output token that no plan may exceed, written as --max-ttft is.",
        json_schema_extra=_TIME,
    )
    rate: float | None = Field(
        default=None,
        gt=0,
        description="Requests per second to be served, on as few chips as that takes; else as many as can be.",
    )
    mode: Literal["aggregated", "disaggregated"] | None = Field(
        default=None, description="Only engines that do both, or only engines apart; both kinds compete unless given."
    )
    max_batch: int = Field(
        default=4096, ge=1, le=1 << 16, description="Requests that one engine decodes for at once, at most."
    )
    forbid: str = Field(
        default="",
        description=f"Mesh axes that no plan may use, separated by commas: {', '.join(SERVING_AXES)}.",
        json_schema_extra={"metavar": "AXES"},
    )
    chunks: str = Field(
        default="",
        description="Tokens of a prompt in one step, separated by commas (256,512,1024), that are tried besides whole "
        "prompts on the best plans whose engines do both.",
        json_schema_extra={"metavar": "TOKENS"},
    )
    top: int = Field(default=5, ge=1, le=100, description="How many plans to show.")

    @field_validator("precision")
    @classmethod
    def _precision_is_known(cls, text: str) -> str:
        for one in split_precisions(text):
            parse_serving_precision(one)
        return text

    @property
    def clusters(self) -> tuple[str, ...]:
        """Names of the clusters that are compared; one where nothing is."""
        return listed(self.cluster, "--on")

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that are compared; one where nothing is."""
        return split_precisions(self.precision)

    @property
    def several(self) -> bool:
        """Whether clusters or precisions are compared."""
        return max(len(self.clusters), len(self.precisions)) > 1

    def load(self) -> ServingLoad:
        """Give the serving load alone; of several precisions, in the first."""
        if len(self.precisions) > 1:
            return self.model_copy(update={"precision": self.precisions[0]}).load()
        return super().load()

    @property
    def constraints(self) -> ServingConstraints:
        """Targets and objective."""
        ttft, tpot = (None if aim is None else aim.seconds for aim in (self.max_ttft, self.max_tpot))
        forbid, chunks = listed(self.forbid, "--forbid"), tuple(map(_tokens, listed(self.chunks, "--chunks")))
        return ServingConstraints(self.objective, ttft, tpot, self.rate, self.mode, self.max_batch, forbid, chunks)

    @property
    def simulates(self) -> bool:
        """Whether a target is a percentile, so that plans are simulated."""
        return any(aim is not None and aim.share is not None for aim in (self.max_ttft, self.max_tpot))

    def requests(self, load: ServingLoad) -> Callable[[float, int], Load]:
        """Give a function that gives so many requests at a rate."""
        if self.csv is None:
            return lambda rate, count: drawn_requests(load, rate, count)
        trace = read_trace(self.csv)
        return lambda rate, count: trace.first(count).at_rate(rate)

    def echo_search(self) -> dict[str, Any]:
        """Give the inputs of this part with defaults, for JSON."""
        return {
            "objective": self.objective,
            "max_ttft_s": None if self.max_ttft is None else self.max_ttft.seconds,
            "max_ttft_of": None if self.max_ttft is None else str(self.max_ttft),
            "max_tpot_s": None if self.max_tpot is None else self.max_tpot.seconds,
            "max_tpot_of": None if self.max_tpot is None else str(self.max_tpot),
            "requests_per_s": self.rate,
            "mode": self.mode,
            "max_batch": self.max_batch,
            "forbid": self.forbid,
            "chunks": self.chunks,
            "top": self.top,
        }


def split_precisions(text: str) -> tuple[str, ...]:
    """Split a list of precisions: presets by commas, what names roles by semicolons.

    >>> split_precisions("bf16,fp8"), split_precisions("bf16;weights=int8,kv=int8")
    (('bf16', 'fp8'), ('bf16', 'weights=int8,kv=int8'))
    """
    parts = listed(text, "--precision", ";")
    return tuple(one for part in parts for one in ((part,) if "=" in part else listed(part, "--precision")))


def find_serving_plans(request: PlanServeRequest, problem: ServingProblem) -> ServingPlanResult:
    """Answer the request; `problem` is its own, resolved.

    Raises:
        InfeasibleError: nothing fits, or nothing keeps the targets.
    """
    if not request.simulates:
        return plan_serving(problem, constraints=request.constraints, top=request.top)
    if request.objective != "throughput":
        raise MeshwiseError(
            f"--objective {request.objective}: plans under percentiles are chosen by throughput, or by chips for "
            "--rate; leave it out"
        )
    aims = Aims(request.max_ttft, request.max_tpot)
    return plan_simulated(problem, request.constraints, aims, request.requests(problem.load), request.top)


def plan_serve(
    model: str,
    *,
    on: str | None = None,
    prompt: str | float | None = None,
    output: str | float | None = None,
    csv: str | None = None,
    objective: Literal["throughput", "tpot", "ttft"] = "throughput",
    max_ttft: str | float | None = None,
    max_tpot: str | float | None = None,
    rate: float | None = None,
    mode: Literal["aggregated", "disaggregated"] | None = None,
    max_batch: int = 4096,
    forbid: str = "",
    chunks: str = "",
    top: int = 5,
    cached_prefix: str | float = 0,
    precision: str = "bf16",
    block_tokens: int = 16,
    reserve: str | float = 0.1,
    draft_tokens: int = 0,
    acceptance: float = 0.7,
    expert_imbalance: float | None = None,
    cluster: str | None = None,
    price: str | float | None = None,
    calibration: str = "fitted",
) -> ServingPlanResult:
    """Find the best ways to serve a load: what `meshwise plan serve` answers, as values.

    >>> import meshwise
    >>> planning = meshwise.plan_serve("llama-3-8b", on="h100:8", prompt=1024, output=256, max_tpot="20ms")
    >>> best = planning.plans[0]
    >>> best.fits, best.tpot.expected <= 0.02
    (True, True)

    Args:
        model: a built-in name, a hub name, a config.json or its folder.
        on: the cluster by name, `v5e:4x4` or `h100:8`.
        prompt, output: tokens of a request: numbers, "uniform:128-2048" or "lognormal:1024:0.8:8192".
        csv: a file of requests instead.
        objective: most "throughput" a chip, least "tpot", or least "ttft".
        max_ttft, max_tpot: targets, "50ms" or seconds of the mean, "p99:50ms" of simulated requests.
        rate: requests per second to be served, with as few chips as that takes.
        mode: only "aggregated" or only "disaggregated" engines.
        max_batch: requests that one engine decodes for at once, at most.
        forbid: mesh axes that no plan may use, "stage,width".
        chunks: tokens of a prompt in one step that are tried besides whole prompts, "256,512".
        top: how many plans to give.
        cached_prefix: tokens of the prompt whose cache is there already.
        precision: number formats, "bf16", "fp8", "int4-weights", ..., or by role "weights=int8,kv=int8".
        block_tokens: tokens of a block of the paged cache.
        reserve: share of HBM that the engine leaves alone.
        draft_tokens: tokens that a draft proposes for each step.
        acceptance: chance that a proposed token is accepted, given those before it were.
        expert_imbalance: load of the busiest device's experts over the mean, instead of random routing's.
        cluster: a TOML file with own numbers, instead of `on`.
        price: dollars for a chip-hour, instead of the catalog's.
        calibration: achieved rates: "fitted", "fitted+ENGINE", "operations", "none", a family by name, or a file.

    Returns: the plans, best first, and why others lose.

    Raises:
        MeshwiseError: an argument that cannot be understood; InfeasibleError when nothing fits or keeps the targets.
    """
    given = {
        "model": model,
        "cluster": on,
        "prompt": prompt,
        "output": output,
        "csv": csv,
        "objective": objective,
        "max_ttft": max_ttft,
        "max_tpot": max_tpot,
        "rate": rate,
        "mode": mode,
        "max_batch": max_batch,
        "forbid": forbid,
        "chunks": chunks,
        "top": top,
        "cached_prefix": cached_prefix,
        "precision": precision,
        "block_tokens": block_tokens,
        "reserve": reserve,
        "draft_tokens": draft_tokens,
        "acceptance": acceptance,
        "expert_imbalance": expert_imbalance,
        "cluster_file": cluster,
        "price": price,
        "calibration": calibration,
    }
    request = validated(PlanServeRequest, given, PARAMETERS)
    if request.several:
        raise MeshwiseError("on, precision: several are compared by meshwise.compare_serve; give one of each")
    return find_serving_plans(request, request.problem())
