"""`run`: a training plan executed on the devices that are there, beside what it was predicted to do.

Not here: flags (`cli`), words (`report`), the step and the loop (`runtime`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from meshwise.compiler.placement import place_devices
from meshwise.errors import ClusterError, MeshwiseError
from meshwise.hardware import Chip, load_chip
from meshwise.hardware.device_kinds import chip_of_device
from meshwise.planning import Plan
from meshwise.report.run import RunResult
from meshwise.runtime.checkpoints import Checkpoints
from meshwise.runtime.data import SyntheticTokens, TokenSource, read_text
from meshwise.runtime.devices import find_devices, software_of
from meshwise.runtime.loop import Trained, train
from meshwise.runtime.optimizer import Hyperparameters
from meshwise.runtime.train import TrainStep, train_step
from meshwise.verbs.estimate_train import estimate_train
from meshwise.verbs.export import read_plan
from meshwise.verbs.requests import validated

__all__ = ["RunRequest", "execute", "run_plan"]

_EVERY = 100


class RunRequest(BaseModel):
    """How a plan is to be run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(
        default=20, ge=1, le=10**8, description="Train up to this step, those of a --checkpoint counted."
    )
    learning_rate: float = Field(default=3e-4, gt=0, le=1e3, description="Of every step.")
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Of the initial weights and of the order of tokens.")
    text: str | None = Field(
        default=None,
        description="Train on random windows of this text file, instead of on synthetic tokens.",
        json_schema_extra={"metavar": "FILE"},
    )
    tokenizer: str | None = Field(
        default=None, description="The model's tokenizer.json, for --text.", json_schema_extra={"metavar": "FILE"}
    )
    cpu_devices: int | None = Field(
        default=None, ge=1, le=512, description="Use so many fake devices of the CPU, whatever else is there."
    )
    profile: str | None = Field(
        default=None, description="Write a profile of a few steps to this folder.", json_schema_extra={"metavar": "DIR"}
    )
    checkpoint: str | None = Field(
        default=None,
        description="Save steps in this folder, and go on from the last one that is in it.",
        json_schema_extra={"metavar": "DIR"},
    )
    every: int | None = Field(
        default=None, ge=1, le=10**8, description=f"Steps from one that is saved to the next; unless given, {_EVERY}."
    )

    def check(self) -> None:
        """See that options go together.

        Raises:
            MeshwiseError: for one that means nothing without another.
        """
        if (self.text is None) != (self.tokenizer is None):
            there, missing = ("--text", "--tokenizer") if self.tokenizer is None else ("--tokenizer", "--text")
            raise MeshwiseError(f"{there} needs {missing}")
        if self.every is not None and self.checkpoint is None:
            raise MeshwiseError("--every needs --checkpoint, the folder that steps are saved in")


def run_plan(
    plan: Plan | str | os.PathLike[str],
    *,
    steps: int = 20,
    learning_rate: float = 3e-4,
    seed: int = 0,
    text: str | None = None,
    tokenizer: str | None = None,
    cpu_devices: int | None = None,
    profile: str | None = None,
    checkpoint: str | None = None,
    every: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    saved: Callable[[int], None] = lambda _: None,
    **job: Any,
) -> RunResult:
    """Train as a plan says on the devices that are there: what `meshwise run` answers, as values.

    Args:
        plan: a plan, or the file that one was saved in; with `job`, a model.
        steps: number of the last step; those that an earlier run saved in `checkpoint` count.
        learning_rate: of every step.
        seed: of the initial weights and of the order of tokens.
        text: a text file to train on, instead of synthetic tokens; tokenizer: the model's tokenizer.json.
        cpu_devices: use so many fake devices of the CPU; to be asked for before JAX is used in the process.
        profile: a folder for JAX's profile of a few steps.
        checkpoint: a folder to save steps in, and to go on from the last one in it.
        every: steps from one that is saved to the next (default 100); the last one always is.
        progress: told a line now and then.
        saved: told the number of each step that is safely on disk.
        job: cluster, batch, layout and the like: the keywords of `estimate_train`.

    Raises:
        MissingDependencyError: JAX, or a library that an option needs, is missing.
        InfeasibleError: memory does not suffice; a loss that is no number.
        MeshwiseError: a plan that cannot be executed, or not on these devices; an argument that cannot be understood;
            a checkpoint of another run, or a torn one.
    """
    given = {
        "steps": steps,
        "learning_rate": learning_rate,
        "seed": seed,
        "text": text,
        "tokenizer": tokenizer,
        "cpu_devices": cpu_devices,
        "profile": profile,
        "checkpoint": checkpoint,
        "every": every,
    }
    request = validated(RunRequest, given)
    if job and isinstance(plan, Plan):
        raise MeshwiseError(f"plan: a plan has its job in it, found {', '.join(sorted(job))} besides; leave them out")
    if not isinstance(plan, Plan | str | os.PathLike):
        raise MeshwiseError(f"plan: expected a plan or the file of one, found {plan!r}")
    if job:
        plan = estimate_train(str(plan), **job).plans[0]
    found = plan if isinstance(plan, Plan) else read_plan(plan)
    return execute(found, request, progress=progress, saved=saved)


def execute(
    plan: Plan,
    request: RunRequest,
    *,
    progress: Callable[[str], None] = lambda _: None,
    saved: Callable[[int], None] = lambda _: None,
) -> RunResult:
    """Train as a plan says.

    Raises: as `run_plan`.
    """
    request.check()
    devices = _devices(plan, request)
    chip = _chip(devices[0])
    step = train_step(
        plan.problem.model,
        plan.layout,
        plan.problem.job,
        place_devices(devices, plan.layout),
        Hyperparameters(learning_rate=request.learning_rate),
    )
    source = _source(plan, request)
    run = _Run(step, source, request, progress)
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
        data="synthetic" if request.text is None else f"random windows of {request.text}",
    )


@dataclass(frozen=True)
class _Run:
    """One run of the loop, as it was asked for."""

    step: TrainStep
    source: TokenSource
    request: RunRequest
    progress: Callable[[str], None]

    def train(self, kept: Checkpoints | None = None) -> Trained:
        """Train, from the last step that was saved where there is one."""
        asked = self.request
        return train(
            self.step,
            self.source,
            last=asked.steps,
            seed=asked.seed,
            load=kept.load if kept is not None and kept.latest else None,
            keeper=kept,
            profile=None if asked.profile is None else Path(asked.profile),
            progress=self.progress,
        )

    def train_kept(self, folder: Path, identity: dict[str, dict[str, Any]], saved: Callable[[int], None]) -> Trained:
        """Train with a folder of saved steps."""
        kept = Checkpoints.open(folder, identity, self.request.every or _EVERY, self.step, saved)
        try:
            if kept.latest >= self.request.steps:
                raise MeshwiseError(
                    f"--steps {self.request.steps}: --checkpoint {folder} holds step {kept.latest} already; "
                    "ask for a later one"
                )
            return self.train(kept)
        finally:
            kept.close()


def _devices(plan: Plan, request: RunRequest) -> list[Any]:
    """Find as many devices as the plan has chips.

    Raises:
        ClusterError: there are others.
    """
    needed = plan.layout.num_chips
    words = f"the plan runs on {needed:,} devices (layout {plan.layout})"
    if request.cpu_devices not in (None, needed):
        raise ClusterError(f"--cpu-devices {request.cpu_devices}: {words}; ask for as many")
    found = find_devices(request.cpu_devices)
    kind, on_cpu = found[0].device_kind, found[0].platform == "cpu"
    if len(found) < needed and on_cpu:
        raise ClusterError(
            f"{words}, found {len(found):,} x {kind}; --cpu-devices {needed} makes as many fake ones of the CPU"
        )
    if on_cpu:  # fake ones: any of them
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


def _chip(device: Any) -> Chip | None:
    name = chip_of_device(str(device.device_kind))
    return None if name is None else load_chip(name)


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


def _identity(plan: Plan, request: RunRequest, step: TrainStep, source: TokenSource) -> dict[str, dict[str, Any]]:
    """Say what a checkpoint is of; what only plans, such as a token budget, is left out."""
    job, model = plan.problem.job, plan.problem.model
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
        "run": {"learning_rate": request.learning_rate, **source.identity},
    }
