"""A training plan, executed: devices, step, tokens and saved steps brought together for the loop.

It loads JAX. Not here: the request (`run_request`), the step and the loop (`runtime`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshwise.commands.plan_devices import chip_of, plan_devices
from meshwise.commands.run_request import DEFAULT_EVERY, RunRequest
from meshwise.compiler.placement import place_devices
from meshwise.core.errors import MeshwiseError
from meshwise.report.run import RunResult
from meshwise.runtime.checkpoints import Checkpoints
from meshwise.runtime.data import SyntheticTokens, TokenSource, read_text
from meshwise.runtime.devices import software_of
from meshwise.runtime.loop import Trained, train
from meshwise.runtime.optimizer import Hyperparameters, LearningRate
from meshwise.runtime.processes import first_process
from meshwise.runtime.states import starting_state
from meshwise.runtime.train import State, TrainStep, train_step
from meshwise.runtime.weights import Weights, open_weights
from meshwise.search import Plan


def train_as_planned(
    plan: Plan,
    request: RunRequest,
    *,
    progress: Callable[[str], None],
    saved: Callable[[int], None],
    told: Callable[[str], None],
) -> RunResult:
    """Train as a plan says.

    Args: as of `execute`.

    Raises: as `run_plan`.
    """
    devices = plan_devices(plan, request.cpu_devices, told, request.processes)
    chip = chip_of(plan, devices)
    step = train_step(
        plan.problem.model,
        plan.layout,
        plan.problem.job,
        place_devices(devices, plan.layout),
        Hyperparameters(learning_rate=_learning_rate(request)),
    )
    source = _source(plan, request)
    published = None if request.weights is None else open_weights(Path(request.weights), plan.problem.model)
    run = _Run(step, source, request, progress, published)
    if request.checkpoint is None:
        trained = run.train()
    else:
        trained = run.train_kept(Path(request.checkpoint), _identity(plan, request, step, source), saved)
    compute = plan.problem.job.formats.compute
    peak = None if chip is None else chip.flops_per_s.get(compute)
    compiled = trained.compiled
    return RunResult(
        plan=plan,
        hardware=str(devices[0].device_kind),
        num_devices=len(devices),
        is_first_process=first_process(),
        software=software_of(devices[0]),
        chip=None if chip is None else chip.name,
        peak_flops_per_s=peak,
        first=trained.first,
        losses=trained.losses,
        seconds=trained.seconds,
        timed=trained.timed,
        saved=trained.saved,
        compile_seconds=trained.compile_seconds,
        state_bytes=None if compiled is None else compiled.arguments,
        temporary_bytes=None if compiled is None else compiled.temporaries,
        peak_bytes_in_use=trained.in_use,
        learning_rate=str(_learning_rate(request)),
        data="synthetic" if request.text is None else f"random windows of {request.text}",
    )


@dataclass(frozen=True)
class _Run:
    """One run of the loop, as it was asked for."""

    step: TrainStep
    source: TokenSource
    request: RunRequest
    progress: Callable[[str], None]
    published: Weights | None = None

    def train(self, kept: Checkpoints | None = None) -> Trained:
        """Train, from the last step that was saved where there is one, else from published weights if asked."""
        asked, load = self.request, None
        if kept is not None and kept.latest:
            load = kept.load
        elif self.published is not None:
            load = partial(_start, self.published)
        return train(
            self.step,
            self.source,
            last=asked.steps,
            seed=asked.seed,
            load=load,
            keeper=kept,
            profile=None if asked.profile is None else Path(asked.profile),
            progress=self.progress,
        )

    def train_kept(self, folder: Path, identity: dict[str, dict[str, Any]], saved: Callable[[int], None]) -> Trained:
        """Train with a folder of saved steps."""
        kept = Checkpoints.open(folder, identity, self.request.every or DEFAULT_EVERY, self.step, saved)
        try:
            if kept.latest >= self.request.steps:
                raise MeshwiseError(
                    f"--steps {self.request.steps}: --checkpoint {folder} holds step {kept.latest} already; "
                    "ask for a later one"
                )
            return self.train(kept)
        finally:
            kept.close()


def _start(published: Weights, step: TrainStep) -> tuple[int, State]:
    """No steps, and the state before the first."""
    return 0, starting_state(step, published)


def _source(plan: Plan, request: RunRequest) -> TokenSource:
    """Find the tokens to train on.

    Raises:
        MeshwiseError: a text or tokenizer that cannot be used.
    """
    vocabulary = plan.problem.model.vocab_size
    if request.text is None or request.tokenizer is None:
        return SyntheticTokens(vocabulary, request.seed)
    return read_text(
        Path(request.text),
        Path(request.tokenizer),
        vocabulary=vocabulary,
        shortest=int(plan.problem.job.seq_len) + 1,
        seed=request.seed,
    )


def _learning_rate(request: RunRequest) -> LearningRate:
    return LearningRate(
        request.learning_rate,
        request.warmup_steps,
        request.learning_rate_decay,
        request.decay_steps or request.steps,
        request.final_learning_rate or 0.0,
    )


def _rates(request: RunRequest) -> dict[str, Any]:
    """Say what decides the rates of all steps: what is not asked for has no part in it."""
    falls = request.learning_rate_decay != "none"
    return {
        "learning_rate": request.learning_rate,
        **({"warmup_steps": request.warmup_steps} if request.warmup_steps else {}),
        **({"learning_rate_decay": request.learning_rate_decay} if falls else {}),
        **({"decay_steps": request.decay_steps or request.steps} if falls else {}),
        **({"final_learning_rate": request.final_learning_rate} if request.final_learning_rate else {}),
    }


def _identity(plan: Plan, request: RunRequest, step: TrainStep, source: TokenSource) -> dict[str, dict[str, Any]]:
    """Say what a checkpoint is of; what only plans, such as a token budget, is left out."""
    job, model = plan.problem.job, plan.problem.model
    weights = {} if request.weights is None else {"weights": Path(request.weights).resolve().name}
    return {
        "model": {"name": model.name, **model.config},
        "job": {
            "sequences": step.layout.sequences,
            "seq_len": job.seq_len,
            "precision": job.precision,
            "optimizer": job.optimizer,
            "fine_tune": job.fine_tune,
            "capacity_factor": job.capacity_factor,
        },
        "run": {**_rates(request), **source.identity, **weights},
    }
