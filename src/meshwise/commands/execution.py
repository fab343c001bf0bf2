"""Plans executed: devices, weights, data and program brought together, for training and for generation.

It loads JAX. Not here: the requests (`run_requests`), the step, the loop and the program (`runtime`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.commands.command import Tell
from meshwise.commands.compile_worker import planned_rates
from meshwise.commands.requests import attributes
from meshwise.commands.run_requests import DEFAULT_EVERY, GenerateRequest, RunRequest
from meshwise.compiler.placement import device_mesh, place_devices
from meshwise.compiler.schedules import Executable, Options, fastest
from meshwise.core.dtypes import DType
from meshwise.core.errors import ClusterError, MeshwiseError
from meshwise.hardware import Chip, load_chip
from meshwise.hardware.names import chip_of_device
from meshwise.report.run import GenerateResult, RunResult
from meshwise.runtime.checkpoints import Checkpoints
from meshwise.runtime.data import SyntheticTokens, TokenSource, map_tokens, read_text, read_tokenizer
from meshwise.runtime.devices import find_devices, machine_memory, share_of_machine, software_of
from meshwise.runtime.generate import generate_timed, generator
from meshwise.runtime.kernels.blocks import FEW_KEYS
from meshwise.runtime.layered import LayeredGenerator
from meshwise.runtime.loop import Evaluation, Trained, Watchers, train
from meshwise.runtime.metrics import Sink, json_lines, tensorboard, weights_and_biases
from meshwise.runtime.optimizer import Hyperparameters, LearningRate
from meshwise.runtime.overlap import tell_network
from meshwise.runtime.processes import Processes, first_process, join
from meshwise.runtime.saved import find_weights
from meshwise.runtime.states import starting_state
from meshwise.runtime.train import State, TrainStep, train_step
from meshwise.runtime.weights import LoadableWeights
from meshwise.search import Plan


def train_as_planned(
    plan: Plan, request: RunRequest, *, progress: Tell, saved: Callable[[int], None], say: Tell
) -> RunResult:
    """Train as a plan says.

    Args and errors: as of `run_plan`.
    """
    devices = plan_devices(plan, request.cpu_devices, say, request.processes)
    chip, job, rate = chip_of(plan, devices), plan.problem.job, _hyperparameters(request)
    placed, apart = place_devices(devices, plan.layout), request.documents is not None
    step = train_step(plan.problem.model, plan.layout, job, placed, rate, documents=apart)
    if request.unroll_layers is not None:
        step = replace(step, stack=replace(step.stack, unroll=request.unroll_layers))
    trained = _train(plan, request, step, progress=progress, saved=saved)
    compiled = trained.compiled
    return RunResult(
        **_machine(plan, devices, chip),
        **attributes(trained, "first", "losses", "seconds", "timed", "saved", "compile_seconds"),
        is_first_process=first_process(),
        peak_flops_per_s=None if chip is None else chip.flops_per_s.get(job.formats.compute),
        state_bytes=None if compiled is None else compiled.arguments,
        temporary_bytes=None if compiled is None else compiled.temporaries,
        peak_bytes_in_use=trained.in_use,
        learning_rate=str(_learning_rate(request)),
        evaluations=trained.evaluations,
        data=_data(request),
        weights=_begun_with(plan, request, trained.first),
    )


def _machine(plan: Plan, devices: Sequence[Any], chip: Chip | None) -> dict[str, Any]:
    """What every result says of the plan and of the devices that executed it."""
    return {
        "plan": plan,
        "hardware": str(devices[0].device_kind),
        "num_devices": len(devices),
        "software": software_of(devices[0]),
        "chip": None if chip is None else chip.name,
    }


def _train(
    plan: Plan, request: RunRequest, step: TrainStep, *, progress: Tell, saved: Callable[[int], None]
) -> Trained:
    """Train, from the last step that was saved if there is one, else from published weights if asked."""
    source, kept = _source(plan, request), None
    load: Callable[[TrainStep], tuple[int, State]] | None = None
    if request.weights is not None:
        load = partial(_start, find_weights(Path(request.weights), plan.problem.model), request.seed)
    with ExitStack() as stack:
        if request.checkpoint is not None:
            folder, identity = Path(request.checkpoint), _identity(plan, request, step, source)
            every = request.every or DEFAULT_EVERY
            kept = Checkpoints.open(folder, identity, every, step, told=saved, keep=request.keep)
            stack.enter_context(closing(kept))
            if kept.latest >= request.steps:
                raise MeshwiseError(
                    f"--steps {request.steps}: --checkpoint {folder} holds step {kept.latest} already; "
                    "ask for a later one"
                )
            load = kept.load if kept.latest else load
        profile, last, seed = None if request.profile is None else Path(request.profile), request.steps, request.seed
        watchers = Watchers(progress, _metrics(plan, request, stack), _evaluation(plan, request))
        return train(
            step,
            source,
            last=last,
            seed=seed,
            load=load,
            keeper=kept,
            profile=profile,
            watchers=watchers,
            compiled_by=partial(_compiled, plan),
        )


def _compiled(plan: Plan, step: TrainStep, lowered: Any) -> Any:
    """Compile a step as `verify` does: by the seconds that the plan's chips and wires take, where XLA is told them.

    All processes do so, and choose alike: they compile the same program.
    """

    def compiled(options: Options) -> Executable:
        return Executable(lowered.compile(compiler_options=dict(options) or None))

    mesh = device_mesh(step.mesh.devices, plan.layout)
    return fastest(compiled, step.compiler_options, step.profiled_options, mesh, planned_rates(plan)).loaded


def _metrics(plan: Plan, request: RunRequest, closing: ExitStack) -> Sink:
    """What takes each step's numbers, in the first process.

    Raises:
        MissingDependencyError: a library is missing.
        MeshwiseError: one of them cannot be written.
    """
    sinks: list[Sink] = []
    if first_process():
        if request.metrics is not None:
            sinks.append(json_lines(Path(request.metrics)))
        if request.tensorboard is not None:
            sinks.append(tensorboard(Path(request.tensorboard), closing))
        if request.wandb is not None:
            settings = {"model": plan.problem.model.name, "layout": plan.line, **_rates(request)}
            sinks.append(weights_and_biases(request.wandb, settings, closing))

    def add(numbers: Mapping[str, float]) -> None:
        for sink in sinks:
            sink(numbers)

    return add


def _evaluation(plan: Plan, request: RunRequest) -> Evaluation | None:
    """The held-out file, and when it is evaluated."""
    if request.evaluate is None:
        return None
    source = _read(plan, request, "--evaluate", Path(request.evaluate))
    return Evaluation(source, request.evaluate_every or 100, request.evaluate_batches or 8)


def _file(request: RunRequest) -> str | None:
    return request.text if request.token_file is None else request.token_file


def _begun_with(plan: Plan, request: RunRequest, first: int) -> str:
    """The weights before the first step, in words."""
    if first > 1:
        return f"of step {first - 1:,} in {request.checkpoint}"
    if request.weights is not None:
        return request.weights
    beside = "" if plan.problem.job.tuning.full else ", which nobody trained: adapters are for published --weights"
    return f"drawn by seed {request.seed}{beside}"


def _data(request: RunRequest) -> str:
    if not _file(request):
        return "synthetic"
    apart = "" if request.documents is None else ", documents kept apart (the plan counts whole sequences)"
    return f"random windows of {_file(request)}{apart}"


def _start(published: LoadableWeights, seed: int, step: TrainStep) -> tuple[int, State]:
    """No steps, and the state before the first."""
    return 0, starting_state(step, published, seed)


def _source(plan: Plan, request: RunRequest) -> TokenSource:
    """Find the tokens to train on.

    Raises:
        MeshwiseError: a text or tokenizer that cannot be used.
    """
    given = _file(request)
    if given is None:
        return SyntheticTokens(plan.problem.model.vocab_size, request.seed)
    return _read(plan, request, "--text" if request.token_file is None else "--token-file", Path(given))


def _read(plan: Plan, request: RunRequest, flag: str, file: Path) -> TokenSource:
    """A text, or a file of token numbers where it is one of these that is trained on."""
    needed: dict[str, Any] = {
        "vocabulary": plan.problem.model.vocab_size,
        "shortest": int(plan.problem.job.seq_len) + 1,
        "seed": request.seed,
        "documents": request.documents,
    }
    if request.token_file is not None:
        return map_tokens(flag, file, request.token_format, **needed)
    assert request.tokenizer is not None, "a text comes with its tokenizer"
    return read_text(file, Path(request.tokenizer), **needed)


def _hyperparameters(request: RunRequest) -> Hyperparameters:
    given = attributes(request, "beta1", "beta2", "epsilon", "weight_decay", "decayed")
    constants = {name: value for name, value in given.items() if value is not None}
    return Hyperparameters(learning_rate=_learning_rate(request), clip=request.clip_gradients, **constants)


def _learning_rate(request: RunRequest) -> LearningRate:
    return LearningRate(
        request.learning_rate,
        request.warmup_steps,
        request.learning_rate_decay,
        request.decay_steps or request.steps,
        request.final_learning_rate or 0.0,
    )


def _rates(request: RunRequest) -> dict[str, Any]:
    """What decides the learning rates of all steps; options that were not given do not."""
    rate, falls = _learning_rate(request), request.learning_rate_decay != "none"
    rates = {
        "learning_rate": rate.peak,
        "warmup_steps": rate.warmup_steps,
        "learning_rate_decay": falls and rate.decay,
        "decay_steps": falls and rate.decay_steps,
        "final_learning_rate": rate.final,
    }
    constants = attributes(request, "beta1", "beta2", "epsilon", "weight_decay", "decayed", "clip_gradients")
    given = {name: value for name, value in constants.items() if value is not None}
    return {name: value for name, value in rates.items() if value} | given


def _identity(plan: Plan, request: RunRequest, step: TrainStep, source: TokenSource) -> dict[str, dict[str, Any]]:
    """What a checkpoint belongs to; the inputs of planning alone, such as a token budget, are left out."""
    job, model = plan.problem.job, plan.problem.model
    weights = {} if request.weights is None else {"weights": Path(request.weights).resolve().name}
    return {
        "model": {"name": model.name, **model.config},
        "job": {
            "sequences": step.layout.sequences,
            **attributes(job, "seq_len", "precision", "optimizer", "fine_tune", "capacity_factor"),
        },
        "run": {**_rates(request), **source.identity, **weights},
    }


def generate_as_planned(plan: Plan, request: GenerateRequest, *, progress: Tell, say: Tell) -> GenerateResult:
    """Generate with a plan's layout.

    Args and errors: as of `generate`.
    """
    model, layout = plan.problem.model, plan.layout
    tokenizer = None if request.tokenizer_file is None else read_tokenizer(request.tokenizer_file)[0]
    prompt = _prompt(request, tokenizer, model.vocab_size)
    published = None if request.weights is None else find_weights(Path(request.weights), model)
    devices = plan_devices(plan, request.cpu_devices, say)
    sequences = layout.data * layout.fsdp * layout.expert
    placed = place_devices(devices, layout)
    length = -(-(len(prompt) + request.tokens) // FEW_KEYS) * FEW_KEYS  # so that keys are read in blocks
    dtype = _generated_in(plan, request, devices[0].platform)
    formed = generator(model, layout, placed, sequences=sequences, length=length, dtype=dtype)
    made = LayeredGenerator.where_faster(formed)
    progress("reading weights")
    weights = made.initial_weights(request.seed) if published is None else made.load(published)
    found = generate_timed(made, weights, np.tile(prompt, (sequences, 1)), request.tokens, progress)
    chip, new = chip_of(plan, devices), tuple(int(t) for t in found.tokens[0])
    least = (None, None) if chip is None else least_times(plan, chip, dtype, sequences, len(prompt))
    return GenerateResult(
        **_machine(plan, devices, chip),
        **attributes(found, "compile_seconds", "first_seconds", "seconds"),
        dtype=dtype,
        weights=f"drawn by seed {request.seed}" if request.weights is None else request.weights,
        prompt=tuple(int(t) for t in prompt),
        tokens=new,
        text=None if tokenizer is None else tokenizer.decode(list(new)),
        sequences=sequences,
        least_first_seconds=least[0],
        least_seconds=least[1],
    )


def _generated_in(plan: Plan, request: GenerateRequest, platform: str) -> DType:
    """Format of weights, activations and cache: a CPU is fast in fp32 alone, as far as its memory goes."""
    planned = plan.problem.job.formats.activations
    if request.dtype is not None or platform != "cpu":
        return planned if request.dtype is None else DType(request.dtype)
    most = machine_memory()
    fits = most is None or plan.problem.model.parameters.total * DType.FP32.bytes < most
    return DType.FP32 if fits else planned


def _prompt(request: GenerateRequest, tokenizer: Any, vocabulary: int) -> np.ndarray:
    """The prompt's tokens.

    Raises:
        MeshwiseError: it has none, or one that the model does not know.
    """
    if request.prompt is not None:
        flag, ids = "--prompt", tokenizer.encode(request.prompt).ids
    else:
        flag, said = "--prompt-tokens", (request.prompt_tokens or "").split(",")
        if not all(s.strip().isdecimal() for s in said):
            raise MeshwiseError(f"{flag} {request.prompt_tokens!r}: expected numbers of tokens, 1,2,3")
        ids = [int(s) for s in said]
    if not ids:
        raise MeshwiseError(f"{flag}: expected at least one token, found none")
    if max(ids) >= vocabulary:
        hint = "; give the tokenizer of this model" if request.prompt is not None else ""
        raise MeshwiseError(f"{flag}: token {max(ids):,} is not among the {vocabulary:,} of the model{hint}")
    return np.asarray(ids, np.int32)


def least_times(plan: Plan, chip: Chip, dtype: DType, sequences: int, length: int) -> tuple[float | None, float | None]:
    """Least seconds to the first token, and for each token after it; None if the peak is not known.

    A device reads the active weights that it multiplies by at least once, and computes its share of the prompt.

    Args:
        plan: whose model and layout run.
        chip: that runs them.
        dtype: of weights and activations.
        sequences: that are extended together; length: of their prompt.
    """
    model, layout = plan.problem.model, plan.layout
    table = 0 if model.spec.head.tied else model.vocab_size * model.d_model  # of which a token reads one row
    multiplied = model.parameters.active - table
    reading = multiplied * dtype.bytes / layout.sizes["tensor"] / chip.hbm_bandwidth
    peak = chip.flops_per_s.get(dtype)
    if peak is None:
        return None, reading
    head = model.vocab_size * model.d_model * (length - 1)  # of the prompt's last position alone
    flops = 2 * sequences * (multiplied * length - head)
    return max(reading, flops / (layout.num_chips * peak)), reading


def plan_devices(plan: Plan, cpu_devices: int | None, say: Tell, processes: Processes | None = None) -> list[Any]:
    """Find as many devices as the plan has chips.

    Args:
        plan: to be executed.
        cpu_devices: so many fake devices of the CPU in each process, or None.
        say: told what is to be known of the devices.
        processes: to be joined first; their devices count.

    Raises:
        ClusterError: there are others.
    """
    needed = plan.layout.num_chips
    words = f"the plan runs on {needed:,} devices (layout {plan.layout})"
    number = 1 if processes is None else processes.number
    if cpu_devices is not None and number is not None and cpu_devices * number != needed:
        among = "" if number == 1 else f" in all {number} processes together"
        raise ClusterError(f"--cpu-devices {cpu_devices}: {words}; ask for as many{among}")
    if processes is not None:
        join(processes)
    if cpu_devices is None:
        tell_network(plan.problem.cluster)
    found = find_devices(cpu_devices, say)
    kind, on_cpu = found[0].device_kind, found[0].platform == "cpu"
    if len(found) < needed and on_cpu:
        raise ClusterError(
            f"{words}, found {len(found):,} x {kind}; --cpu-devices {needed} makes as many fake ones of the CPU"
        )
    if on_cpu and processes is None:  # fake ones: any of them
        return found[:needed]
    chip = _chip(found[0])
    if chip is not None and chip.devices_per_chip > 1:
        raise ClusterError(
            f"a plan counts chips, and JAX finds {chip.devices_per_chip} devices in each {chip.title}: "
            "not yet executed there"
        )
    if len(found) != needed:
        raise ClusterError(
            f"{words}, found {len(found):,} x {kind}; plan for the devices that are there, "
            f"such as --on {'CHIP' if chip is None else chip.name}:{len(found)}"
        )
    return found


def chip_of(plan: Plan, devices: Sequence[Any]) -> Chip | None:
    """Find what each device is: a chip of the catalog, or the share of this machine that the plan is for; else None."""
    planned = plan.problem.cluster.chip
    if devices[0].platform == "cpu" and planned.vendor == "cpu" and planned.title == share_of_machine(len(devices)):
        return planned
    return _chip(devices[0])


def _chip(device: Any) -> Chip | None:
    name = chip_of_device(str(device.device_kind))
    return None if name is None else load_chip(name)
