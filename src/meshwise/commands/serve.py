"""`serve`: a model, or a plan of serving, behind an endpoint; at the end what was measured beside what was predicted.

JAX and the server are loaded when something is served. Not here: words (`report`), the engine (`engine`).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from meshwise.commands.command import Screen, Tell, verb
from meshwise.commands.plan_files import kind_of_plan, read_plan
from meshwise.commands.requests import File, Flag, ModelName
from meshwise.commands.run_requests import SeveralProcesses
from meshwise.commands.serve_hosts import check_one_engine, follow, lead, own_log, together
from meshwise.commands.serve_summary import summed_up
from meshwise.commands.simulate_serve import Seconds, read_engine_costs
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, MissingDependencyError
from meshwise.core.units import Quantity, format_bytes, parse_bytes
from meshwise.costs.calibration import Calibration, default_calibration
from meshwise.costs.engine import EngineCosts
from meshwise.costs.engines import find_serving_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.engine import bucketed_costs
from meshwise.exports.serving import check_served_by
from meshwise.hardware import Cluster, load_cluster_file
from meshwise.jobs import ServingLoad
from meshwise.models import Model, load_model
from meshwise.report.engine import ServeResult, serve_report
from meshwise.runtime.devices import load_jax
from meshwise.runtime.processes import position, stdout_for_the_answer
from meshwise.runtime.refusals import PAGE_TOKENS
from meshwise.scheduling import Scheduling
from meshwise.search.serving import ServingPlan, simulator_setup
from meshwise.sharding.serving import ServingLayout

if TYPE_CHECKING:
    from meshwise.engine.engine import StepRecord
    from meshwise.engine.hosts import Leading
    from meshwise.engine.http.metrics import Metrics
    from meshwise.engine.launch import Launched, Limits, Pool
    from meshwise.engine.measured import Measurements
    from meshwise.engine.replicas import Replicas
    from meshwise.engine.vocabulary import Vocabulary

_Bytes = Annotated[float, Quantity("bytes", parse_bytes, format_bytes, "8GiB")]


class ServeRequest(SeveralProcesses):
    """What `meshwise serve` is asked."""

    positional = ("model",)
    sections: ClassVar = {
        "Model": ("weights", "tokenizer", "dtype", "quantization"),
        "Layout": ("tensor", "cache", "expert", "expert_tensor_parallel", "replicas", "prefill"),
        "Endpoint": ("host", "port", "api_key", "name"),
        "Engine": ("max_batch", "max_len", "max_step_tokens", "policy", "prefix_cache", "routing", "cache_memory"),
    }

    model: Annotated[ModelName, Flag(name="MODEL|PLAN")]
    """A model, as 'meshwise plan' takes it, or a plan of serving that --save wrote."""
    weights: Annotated[File | None, Flag("PATH")] = None
    """Its weights: a .safetensors or .gguf file, or a folder of .safetensors files; without, they are drawn by --seed,
    and tokens are written as numbers."""
    tokenizer: File | None = None
    """Its tokenizer.json; by default the one beside the weights, or in the GGUF file."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Format of weights, activations and cache; by default fp32 on a CPU, else bf16."""
    quantization: Literal["int8", "fp8"] | None = None
    """Hold the weights of the layers' projections in int8 or fp8, a scale a column, made as they are read; they are
    multiplied as wide as activations are. By default as a plan says, else not."""
    tensor: int = Field(default=1, ge=1, le=512)
    """Devices that split heads and widths; a plan says it."""
    cache: int = Field(default=1, ge=1, le=16)
    """Devices that, for each of --tensor, split heads and widths further, and share out the positions of the cache; a
    plan says it."""
    expert: int = Field(default=1, ge=1, le=512)
    """Groups of these devices that share out the experts of a mixture, and the requests: each attends to its own; a
    plan says it."""
    expert_tensor_parallel: bool = True
    """Split the width of every expert over these devices; off: each has some of the experts, whole. A plan says it."""
    replicas: int | None = Field(default=None, ge=1, le=512)
    """Engines, each on devices of its own, that share the requests; by default one, or as many as a plan has."""
    prefill: int | None = Field(default=None, ge=1, le=512)
    """Engines that only prefill, each on devices of its own, and send the caches to the others, which decode; by
    default none, or as many as a plan has."""
    cpu_devices: int | None = Field(default=None, ge=1, le=512)
    """Use this many fake devices of the CPU, whatever other devices there are."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Seed of weights that are drawn."""
    host: str = "127.0.0.1"
    """Address to listen on; others than this machine's own are open to the network."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: any that is free."""
    api_key: str | None = Field(default=None, exclude=True)
    """Key that requests must bring as a bearer token; by default the environment's MESHWISE_API_KEY, if it is there."""
    name: str | None = None
    """Name of the model in requests; by default the model's own."""
    max_batch: int | None = Field(default=None, ge=1, le=4096)
    """Most requests that run at once; by default 8 on a CPU, else 64, or as the plan says."""
    max_len: int | None = Field(default=None, ge=2, le=2**24)
    """Most tokens of a request, prompt and output together; by default 2,048, or what the model was made for."""
    max_step_tokens: int | None = Field(default=None, ge=1, le=2**20)
    """Most tokens in one step; by default 512 on a CPU, else 2,048, or as the plan says."""
    policy: Literal["prefill-first", "decode-first", "chunked"] | None = None
    """What the scheduler puts into a step first; by default prefill-first, or as the plan says."""
    prefix_cache: bool = True
    """Keep beginnings of prompts in the cache for later requests."""
    lookahead: int | None = Field(default=None, ge=0, le=1)
    """Steps that are decided and started before the tokens of the last are fetched; what ends by a stop word then takes
    a step more. By default 1 on a GPU, else 0."""
    routing: Literal["round-robin", "least-loaded", "affinity"] = "least-loaded"
    """Which replica a request goes to: each in turn, the one with the fewest requests, or the one that has most of its
    prompt in the cache."""
    cache_memory: _Bytes | None = Field(default=None, gt=0)
    """Memory of the caches on all devices; by default for whole batches of the longest requests, as far as they fit."""
    max_queue: int = Field(default=256, ge=1, le=10**6)
    """Most outputs that may be asked for at once; beyond, requests are answered 429."""
    max_body: _Bytes = Field(default=4.0 * 2**20, gt=0, le=2**30)
    """Largest body of a request."""
    timeout: Seconds = Field(default=600.0, gt=0)
    """Longest time that a request may take."""
    drain: Seconds = Field(default=30.0, ge=0)
    """Time that running requests have to finish when the endpoint is told to end."""
    duration: Seconds | None = Field(default=None, gt=0)
    """End by itself after this time."""
    costs: File | None = None
    """Predict steps from these costs (JSON, as for 'simulate serve'); a plan predicts them itself."""
    cluster: File | None = None
    """Predict steps for this machine: the TOML file that 'bench machine --save-cluster' wrote here."""
    log: Annotated[Path | None, Flag("FILE")] = None
    """Write every decision of the scheduler to this file, a line of JSON each; of several replicas, each to a file with
    its number at the end."""
    compile_cache: Annotated[Path | None, Flag("DIR")] = None
    """Folder of compiled programs, from which the next start is quick; by default in the user's cache."""

    @property
    def layout(self) -> ServingLayout:
        """Of one engine, where no plan says it."""
        return ServingLayout(
            tensor=self.tensor,
            cache=self.cache,
            expert=self.expert,
            cache_split="sequence" if self.cache > 1 else "heads",
            expert_tensor_parallel=self.expert_tensor_parallel,
        )

    def key(self) -> str | None:
        """The API key that was given, or the environment's."""
        return self.api_key or os.environ.get("MESHWISE_API_KEY") or None


@dataclass(frozen=True)
class _Prefill:
    """Engines that only prefill: a layout, how many, and limits that a plan sets."""

    layout: ServingLayout
    replicas: int
    planned: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Asked:
    """What is to be served.

    Args:
        model, layout: see there.
        planned: limits that a plan sets.
        replicas: that a plan has.
        prefill: engines that only prefill, in a plan that has such; else None.
        narrow: format of the layers' projections in a plan, where it is not that of activations.
        costs: of steps, as they were given.
        cluster, calibration: for which steps are predicted otherwise; None where nothing predicts.
    """

    model: Model
    layout: ServingLayout
    planned: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1
    narrow: DType | None = None
    costs: EngineCosts | None = None
    cluster: Cluster | None = None
    calibration: Calibration | None = None
    prefill: _Prefill | None = None

    def predicted(self, made: Launched, *, prefill: bool = False) -> EngineCosts | None:
        """Costs of the steps that run, of engines that only prefill or of the others.

        They are in the format that runs, filled up to the engine's buckets. None where nothing predicts, also where
        `bench machine` measured products of wide weights alone.
        """
        from meshwise.engine.measured import rounded  # noqa: PLC0415 -- an optional extra
        from meshwise.runtime.steps import Bucket  # noqa: PLC0415 -- likewise

        layout, executor, scheduling = self.layout, made.executor, made.scheduling
        if prefill and self.prefill is not None and made.prefill is not None:
            layout, executor, scheduling = self.prefill.layout, made.prefill.executors[0], made.prefill.scheduling
        buckets = [Bucket(*(n * scheduling.ranks for n in bucket)) for bucket in executor.buckets]
        if self.costs is not None:
            sizes = [b.tokens for b in buckets]
            return rounded(self.costs.replace(block_tokens=executor.model.page_tokens), sizes)
        if self.cluster is None or self.calibration is None:
            return None
        if made.narrow is not None and default_calibration(self.cluster.chip).name == "cpu":
            return None
        prompt = max(made.longest // 2, 1)
        load = ServingLoad(prompt=prompt, output=made.longest - prompt, precision=made.precision)
        setup = ServingSetup("aggregated", layout, layout, scheduling.max_batch)
        problem = ServingProblem(self.model, load, self.cluster, self.calibration)
        from meshwise.runtime.paged import SPAN  # noqa: PLC0415 -- it loads JAX

        # Kernels read what each request has; plain JAX, blocks as far as the longest goes, which is not counted.
        placement = executor.model.stack.placement
        by_kernel = placement.is_nvidia or placement.platform == "tpu"
        return bucketed_costs(problem, setup, buckets, 0 if by_kernel else SPAN * layout.cache)


def _asked(request: ServeRequest, say: Tell) -> _Asked:
    """The model, its layout, what predicts its steps, and the limits that a plan sets.

    Raises:
        MeshwiseError: a plan of training; costs and a cluster together.
        HandoverError: a plan that the engine cannot run.
    """
    if request.costs is not None and request.cluster is not None:
        raise MeshwiseError(f"--costs {request.costs} and --cluster {request.cluster}: give one of them")
    costs = None if request.costs is None else read_engine_costs(request.costs)
    cluster = None if request.cluster is None else load_cluster_file(request.cluster)
    calibration = None if cluster is None else find_serving_calibration("operations", cluster.chip)
    if kind_of_plan(request.model) is None:
        layout = request.layout
        prefill = None if request.prefill is None else _Prefill(layout, request.prefill)
        return _Asked(
            load_model(request.model), layout, costs=costs, cluster=cluster, calibration=calibration, prefill=prefill
        )
    plan = read_plan(request.model, ServingPlan)
    check_served_by("meshwise", plan)
    system = simulator_setup(plan.problem, plan.setup)
    if request.replicas is not None and request.replicas != system.replicas:
        say(f"the plan has {system.replicas:,} engines; this process runs {request.replicas:,}, with their share")
    pool, prefill = system.prefill, None
    if pool is not None:
        replicas = request.prefill or pool.replicas
        prefill = _Prefill(plan.setup.prefill.replace(replicas=1), replicas, _planned(pool.scheduling))
    problem, layout = plan.problem, plan.setup.decode.replace(replicas=1)
    cluster, calibration = cluster or problem.cluster, calibration or problem.calibration
    formats = problem.load.formats
    narrow = None if formats.weights is formats.activations else formats.weights
    limits = _planned(system.scheduling)
    return _Asked(problem.model, layout, limits, system.replicas, narrow, costs, cluster, calibration, prefill)


def _planned(own: Scheduling) -> dict[str, Any]:
    return {"max_batch": own.max_batch, "max_step_tokens": own.max_step_tokens, "policy": own.policy}


@verb(ServeRequest)
def show_serve(screen: Screen, request: ServeRequest) -> None:
    """Serve a model, or a plan, over HTTP by OpenAI's protocol.

    The devices that are there run it, and the same scheduler decides that 'simulate serve' simulates. It ends on
    Ctrl-C or SIGTERM, when running requests are done, and then prints what was measured beside what was predicted.
    Routes: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /ready, /metrics.

    \b
      meshwise serve smollm2-135m --weights SmolLM2-135M-Instruct.Q4_1.gguf
      meshwise serve llama-3-8b --weights Llama-3-8B --tensor 4 --api-key KEY
      meshwise serve plan.json --weights Llama-3-8B
      meshwise serve plan.json --weights Llama-3-8B --coordinator host0:1234 --num-processes 2 --process-id 0
    """  # noqa: D301  (click's mark for lines that stay as they are)
    for library in ("starlette", "uvicorn", "prometheus_client", "jinja2", "tokenizers"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependencyError(f"serve needs the library {library}: pip install 'meshwise[serve]'")
    request.check_processes()
    asked = _asked(request, screen.say)
    check_one_engine(request.processes, _engines(request, asked))
    load_jax()
    with together(request.processes, screen.say):
        if request.processes is None or position()[0] == 0:
            with stdout_for_the_answer(noisy=request.processes is not None):  # gloo tells whom it is connected to
                result = _served(request, asked, screen.progress, screen.say)
            screen.show(serve_report(result, request.echo()))
            return
        vocabulary = _vocabulary(request, asked.model)
        made = _launched(request, asked, progress=screen.progress, say=screen.say)
        follow(made, vocabulary, asked.model.vocab_size, own_log(request.log, request.processes), screen.say)


def _engines(request: ServeRequest, asked: _Asked) -> int:
    return (request.replicas or asked.replicas) + (asked.prefill.replicas if asked.prefill else 0)


def _served(request: ServeRequest, asked: _Asked, progress: Tell, say: Tell) -> ServeResult:
    """Launch, serve until told to end, and sum up."""
    from meshwise.engine.http.metrics import Metrics  # noqa: PLC0415 -- as all below, an optional extra
    from meshwise.engine.http.server import LOOPBACK, bind, make_server, serve  # noqa: PLC0415
    from meshwise.engine.http.service import Service, Settings  # noqa: PLC0415
    from meshwise.engine.replay import open_logs  # noqa: PLC0415

    model = asked.model
    vocabulary = _vocabulary(request, model)
    with ExitStack() as stack:
        taken = stack.enter_context(bind(request.host, request.port))
        logs = open_logs(stack, own_log(request.log, request.processes), _engines(request, asked))
        made = _launched(request, asked, progress=progress, say=say)
        costs = asked.predicted(made)
        if costs is None and asked.cluster is not None:
            say("nothing predicts the steps: 'bench machine' measures products of wide weights alone")
        first = asked.predicted(made, prefill=True)
        predict = None if costs is None or first is None else partial(_predicted_seconds, costs, first)
        metrics = Metrics(predict)
        hosts = None if request.processes is None else lead(say, lambda: None if service.draining else _end())
        engines, kept = _replicas(request, made, metrics, logs, hosts)
        name = request.name or model.name
        bounds = (made.longest, request.max_queue, int(request.max_body), request.timeout)
        settings = Settings(name, *bounds, request.key(), model.vocab_size)
        service = Service(engines, vocabulary, settings, metrics)
        server = make_server(service, request.host, drain=request.drain, most=4 * request.max_queue)
        port = taken.getsockname()[1]
        timer = None if request.duration is None else threading.Timer(request.duration, _end)
        begun = time.monotonic()

        def ready() -> None:
            if request.host not in LOOPBACK and settings.api_key is None:
                say(f"--host {request.host} is open to the network, to everybody: --api-key asks for a key")
            say(f"{name} at http://{request.host}:{port}/v1 ({made.hardware}); Ctrl-C ends")
            if timer is not None:
                timer.start()

        serve(service, taken, server, ready)
        seconds = time.monotonic() - begun
        if timer is not None:
            timer.cancel()
    return summed_up(model, made, engines, kept, costs, predict, seconds)


def _replicas(
    request: ServeRequest, made: Launched, metrics: Metrics, logs: Sequence[Any], hosts: Leading | None
) -> tuple[Replicas, list[Measurements]]:
    """The engines, and what each is measured to do."""
    from meshwise.engine.engine import Engine  # noqa: PLC0415 -- as all below, an optional extra
    from meshwise.engine.measured import Measurements  # noqa: PLC0415
    from meshwise.engine.replicas import Replicas  # noqa: PLC0415

    kept = [Measurements((metrics,)) for _ in logs]
    own = iter(zip(logs, kept, strict=True))

    def engines(pool: Launched | Pool, hand_over: Any = None) -> list[Engine]:
        form = partial(Engine, pool.scheduling, pool.blocks, block_tokens=PAGE_TOKENS, hand_over=hand_over, hosts=hosts)
        made = zip(pool.executors, own, strict=False)
        return [form(e, log=log, watcher=watcher, ahead=e.ahead) for e, (log, watcher) in made]

    serving = Replicas(engines(made), request.routing)
    if made.prefill is not None:
        serving = Replicas(engines(made.prefill, serving.submit), request.routing, serving)
    return serving, kept


def _predicted_seconds(costs: EngineCosts, prefill: EngineCosts, step: StepRecord) -> float:
    """Of a step, whose prompts are filled up to whole rows of queries."""
    costs = prefill if step.kind == "prefill" else costs
    return costs.step_seconds(step.contexts, step.chunks, step.filled)


def _vocabulary(request: ServeRequest, model: Model) -> Vocabulary:
    """The model's own text files; numbers where its weights are drawn."""
    from meshwise.engine.vocabulary import numbers_only, read_vocabulary  # noqa: PLC0415 -- an optional extra

    if request.weights is None and request.tokenizer is None:
        return numbers_only(model.vocab_size)
    weights, tokenizer = (None if path is None else Path(path) for path in (request.weights, request.tokenizer))
    return read_vocabulary(weights, tokenizer)


def _launched(request: ServeRequest, asked: _Asked, *, progress: Tell, say: Tell) -> Launched:
    """The engine's parts, compiled."""
    from meshwise.engine.launch import Asked, compile_cache, launch  # noqa: PLC0415 -- an optional extra

    compile_cache(request.compile_cache)
    limits, first = _limits(request, asked.planned), asked.prefill
    if first is not None:  # what begins alike is found where it is prefilled
        limits = replace(limits, prefix_cache=False)
    return launch(
        asked.model,
        Asked(asked.layout, request.replicas or asked.replicas, limits),
        weights=None if request.weights is None else Path(request.weights),
        seed=request.seed,
        dtype=None if request.dtype is None else DType(request.dtype),
        cpu_devices=request.cpu_devices,
        progress=progress,
        say=say,
        prefill=None if first is None else Asked(first.layout, first.replicas, _limits(request, first.planned)),
        ahead=None if request.lookahead is None else bool(request.lookahead),
        narrow=asked.narrow if request.quantization is None else DType(request.quantization),
    )


def _end() -> None:
    """Tell this process to end, as SIGTERM from outside does."""
    os.kill(os.getpid(), signal.SIGTERM)


def _limits(request: ServeRequest, planned: Mapping[str, Any]) -> Limits:
    """What was asked for, else what the plan says."""
    from meshwise.engine.launch import Limits  # noqa: PLC0415 -- an optional extra

    def own(name: str) -> Any:
        given = getattr(request, name)
        return planned.get(name) if given is None else given

    return Limits(
        policy=own("policy") or "prefill-first",
        prefix_cache=request.prefix_cache,
        max_batch=own("max_batch"),
        max_step_tokens=own("max_step_tokens"),
        max_len=request.max_len,
        cache_bytes=request.cache_memory,
    )
