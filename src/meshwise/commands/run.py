"""`run`: a training plan executed on the devices that are there, beside what it was predicted to do.

JAX is loaded when something runs. Not here: flags (`cli`), words (`report`), how it is executed (`train_run`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from meshwise.commands.estimate_train import estimate_train
from meshwise.commands.export import read_plan
from meshwise.commands.requests import validated
from meshwise.commands.run_request import RunRequest
from meshwise.core.errors import MeshwiseError
from meshwise.report.run import RunResult
from meshwise.runtime.devices import load_jax
from meshwise.search import Plan


def run_plan(
    plan: Plan | str | os.PathLike[str],
    *,
    steps: int = 20,
    learning_rate: float = 3e-4,
    warmup_steps: int = 0,
    learning_rate_decay: str = "none",
    decay_steps: int | None = None,
    final_learning_rate: float | None = None,
    seed: int = 0,
    text: str | None = None,
    tokenizer: str | None = None,
    weights: str | None = None,
    cpu_devices: int | None = None,
    profile: str | None = None,
    checkpoint: str | None = None,
    every: int | None = None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    saved: Callable[[int], None] = lambda _: None,
    **job: Any,
) -> RunResult:
    """Train as a plan says on the devices that are there: what `meshwise run` answers, as values.

    Args:
        plan: a plan, or the file that one was saved in; with `job`, a model.
        steps: number of the last step; those that an earlier run saved in `checkpoint` count.
        learning_rate: of every step, or the highest.
        warmup_steps: in which it rises from zero.
        learning_rate_decay: "none", "linear" or "cosine": how it falls from there.
        decay_steps: step at which it has fallen (default: `steps`); final_learning_rate: to which (default 0).
        seed: of the initial weights and of the order of tokens.
        text: a text file to train on, instead of synthetic tokens; tokenizer: the model's tokenizer.json.
        weights: begin with these: a .safetensors or .gguf file, or a folder; without it they are drawn.
        cpu_devices: use so many fake devices of the CPU; to be asked for before JAX is used in the process.
        profile: a folder for JAX's profile of a few steps.
        checkpoint: a folder to save steps in, and to go on from the last one in it.
        every: steps from one that is saved to the next (default 100); the last one always is.
        coordinator: of several processes that run together, the address HOST:PORT of the first, or "auto".
        num_processes, process_id: how many they are, and which of them this one is.
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
        "warmup_steps": warmup_steps,
        "learning_rate_decay": learning_rate_decay,
        "decay_steps": decay_steps,
        "final_learning_rate": final_learning_rate,
        "seed": seed,
        "text": text,
        "tokenizer": tokenizer,
        "weights": weights,
        "cpu_devices": cpu_devices,
        "profile": profile,
        "checkpoint": checkpoint,
        "every": every,
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
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
    told: Callable[[str], None] = lambda _: None,
) -> RunResult:
    """Train as a plan says.

    Args:
        plan, request: what to do.
        progress: told a line now and then; saved: the number of each step that is safely on disk; told: what is to be
            known of the devices.

    Raises: as `run_plan`.
    """
    request.check()
    load_jax()
    from meshwise.commands.train_run import train_as_planned  # noqa: PLC0415  (an optional extra)

    return train_as_planned(plan, request, progress=progress, saved=saved, told=told)
