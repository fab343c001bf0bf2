"""The loop over training steps: batches in, losses and seconds out; saved, resumed and profiled on the way.

Not here: the step (`train`), where tokens come from (`data`), how a state is stored (`checkpoints`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.runtime.data import TokenSource
from meshwise.runtime.devices import machine_memory, one_at_a_time
from meshwise.runtime.processes import meet
from meshwise.runtime.train import State, TrainStep

#: Steps that are not timed, and steps of a profile.
WARM_UP, PROFILED = 2, 3


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out text, and when the loss of it is taken.

    Args:
        source: of its tokens.
        every: steps from one evaluation to the next; the last step has one, too.
        batches: that the loss is the mean of, the same each time.
    """

    source: TokenSource
    every: int
    batches: int


@dataclass(frozen=True, slots=True)
class Watchers:
    """What hears of a run.

    Args:
        progress: of what is done.
        metrics: of each step's numbers by name.
        evaluation: what is evaluated, None for nothing.
    """

    progress: Callable[[str], None] = lambda _: None
    metrics: Callable[[Mapping[str, float]], None] = lambda _: None
    evaluation: Evaluation | None = None


class Keeper(Protocol):
    """What keeps training states."""

    def is_due(self, step: int) -> bool:
        """Whether the state after a step is to be kept."""
        ...

    def save(self, step: int, state: State) -> None:
        """Keep the state after a step; it is kept when this returns."""
        ...


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of one device that the compiled step needs.

    Args:
        arguments: training state and batch.
        temporaries: everything else at once.
    """

    arguments: int
    temporaries: int

    @property
    def total(self) -> int:
        """Both."""
        return self.arguments + self.temporaries


@dataclass(frozen=True, slots=True)
class Trained:
    """Steps that were run.

    Args:
        first: number of the first, from 1.
        losses: mean over the tokens of each step.
        seconds: of each step.
        timed: indexes of those that neither warm up nor are profiled, if any.
        saved: numbers of those whose state is on disk.
        compile_seconds: that compiling took.
        evaluations: numbers of the steps that were evaluated, and the loss of the held-out text after each.
        compiled: memory that the compiled step needs, None where the backend does not tell.
        in_use: peak bytes in use on the fullest device, None where the backend does not tell.
    """

    first: int
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    timed: tuple[int, ...]
    saved: tuple[int, ...]
    compile_seconds: float
    compiled: StepMemory | None
    in_use: int | None
    evaluations: tuple[tuple[int, float], ...] = ()


def put_batch(step: TrainStep, source: TokenSource, number: int) -> dict[str, jax.Array]:
    """Put the batch of a step where the step reads it.

    Args:
        step: the program.
        source: of the tokens.
        number: of the step, from 1.

    Returns: "tokens", "labels" and perhaps "documents", as `TrainStep.abstract_batch` says.
    """
    shape = step.abstract_batch["tokens"].shape
    asked = number, shape[0] * shape[1], shape[2] + 1
    drawn = source.sequences(*asked)
    parts = {"tokens": drawn[:, :-1], "labels": drawn[:, 1:]}
    documents = source.documents(*asked) if step.documents else None
    if documents is not None:
        parts["documents"] = documents[:, :-1]
    whole = {name: part.reshape(shape) for name, part in parts.items()}
    return {
        name: jax.make_array_from_callback(shape, abstract.sharding, whole[name].__getitem__)
        for name, abstract in step.abstract_batch.items()
    }


_NOBODY = Watchers()


def compiled_as_asked(step: TrainStep, lowered: Any) -> Any:
    """Compile a step, lowered, with its own options."""
    return lowered.compile(step.compiler_options or None)


def train(
    step: TrainStep,
    source: TokenSource,
    *,
    last: int,
    seed: int = 0,
    load: Callable[[TrainStep], tuple[int, State]] | None = None,
    keeper: Keeper | None = None,
    profile: Path | None = None,
    watchers: Watchers = _NOBODY,
    compiled_by: Callable[[TrainStep, Any], Any] = compiled_as_asked,
) -> Trained:
    """Train up to a step.

    Args:
        step: the program.
        source: of the tokens.
        last: number of the last step.
        seed: of the initial weights.
        load: gives the number of steps taken and their state, to go on from there.
        keeper: keeps states.
        profile: a folder for a profile of a few steps.
        watchers: hear of what is done.
        compiled_by: compiles the step, lowered.

    Raises:
        InfeasibleError: the devices' memory does not suffice; a loss that is no number.
        MeshwiseError: the devices cannot run the program.
    """
    _check_capacity(step)
    if profile is not None:
        _make_folder(profile)
    with in_words():
        taken, state = (0, None) if load is None else load(step)
        watchers.progress("compiling")
        begun = time.perf_counter()
        compiled = compiled_by(step, step.jitted.lower(step.abstract_state, step.abstract_batch))
        compile_seconds = time.perf_counter() - begun
        meet("the compiled step")
        loop = _Loop(step, source, compiled, keeper, watchers, first=taken + 1, last=last)
        loop.run(one_at_a_time(step.initial_state(seed) if state is None else state), profile)
    return Trained(
        loop.first,
        tuple(loop.losses),
        tuple(loop.seconds),
        tuple(loop.timed()),
        tuple(loop.saved),
        compile_seconds,
        _compiled_memory(compiled),
        _in_use(step),
        tuple(loop.evaluations),
    )


@dataclass
class _Loop:
    """Steps `first` to `last`, and what they gave so far."""

    step: TrainStep
    source: TokenSource
    compiled: Any
    keeper: Keeper | None
    watchers: Watchers
    first: int
    last: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    profiled: frozenset[int] = frozenset()

    def run(self, state: State, profile: Path | None) -> None:
        """Run all; the batch of the next step is made while the devices work."""
        count = self.last - self.first + 1
        batch = put_batch(self.step, self.source, self.first)
        with ExitStack() as running:
            if profile is not None:
                begin = min(WARM_UP, count - 1)
                self.profiled = frozenset(range(begin, min(begin + PROFILED, count)))
            for index in range(count):
                number = self.first + index
                if profile is not None and index == min(self.profiled):
                    running.enter_context(jax.profiler.trace(str(profile)))
                begun = time.perf_counter()
                with jax.profiler.StepTraceAnnotation("step", step_num=number):
                    state, metrics = self.compiled(state, batch)
                    if number < self.last:
                        batch = put_batch(self.step, self.source, number + 1)
                    float(metrics["loss"])
                    jax.block_until_ready(state)
                self.seconds.append(time.perf_counter() - begun)
                if index == max(self.profiled, default=None):
                    running.close()
                self._keep(number, {name: float(value) for name, value in metrics.items()}, state)

    def _keep(self, number: int, metrics: Mapping[str, float], state: State) -> None:
        loss = metrics["loss"]
        if not math.isfinite(loss):
            raise InfeasibleError(f"step {number}: the loss is {loss}; lower --learning-rate, or choose wider formats")
        self.losses.append(loss)
        held_out = self._evaluate(number, state)
        said = "" if not held_out else f", held out {held_out['evaluation_loss']:.4f}"
        self.watchers.progress(f"step {number:,} of {self.last:,}: loss {loss:.4f}{said}, {self.seconds[-1]:.3g} s")
        tokens = math.prod(self.step.abstract_batch["tokens"].shape)
        speed = {"seconds": self.seconds[-1], "tokens_per_s": tokens / self.seconds[-1]}
        rate = float(self.step.constants.rate(number))
        self.watchers.metrics({"step": number, **metrics, "learning_rate": rate, **speed, **held_out})
        if self.keeper is not None and (self.keeper.is_due(number) or number == self.last):
            self.keeper.save(number, state)
            self.saved.append(number)

    def _evaluate(self, number: int, state: State) -> dict[str, float]:
        """The mean loss of the held-out text, where it is due."""
        asked = self.watchers.evaluation
        if asked is None or (number % asked.every and number != self.last):
            return {}
        batches = (put_batch(self.step, asked.source, n) for n in range(1, asked.batches + 1))
        loss = sum(float(self.step.loss(state["weights"], batch)) for batch in batches) / asked.batches
        self.evaluations.append((number, loss))
        return {"evaluation_loss": loss}

    def timed(self) -> Iterator[int]:
        """Indexes of the steps to time: after warm-up and outside the profile, if any are."""
        every = range(len(self.seconds))
        warm = [i for i in every if i >= WARM_UP]
        yield from [i for i in warm if i not in self.profiled] or warm or every[-1:]


@contextmanager
def in_words() -> Iterator[None]:
    """Report in words what JAX raises when devices cannot run a program.

    Raises:
        MeshwiseError: instead of it.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" in first or "out of memory" in first.lower():
            raise InfeasibleError(f"the devices' memory does not suffice: {first}") from None
        raise MeshwiseError(f"the devices cannot run this plan: {first}") from None


def _check_capacity(step: TrainStep) -> None:
    """Refuse to train on a CPU what its memory cannot hold: it would be killed without a word.

    Raises:
        InfeasibleError: with both sizes.
    """
    devices = step.mesh.local_devices
    there = machine_memory()
    if devices[0].platform != "cpu" or there is None:
        return
    arrays = jax.tree.leaves(step.abstract_state)
    needed = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays) * len(devices)
    if needed > there:
        raise InfeasibleError(
            f"the training state alone takes {needed / 2**30:,.1f} GiB, found {there / 2**30:,.1f} GiB of memory in "
            "this machine; run the plan on the chips that it is for, or a smaller model here"
        )


def _make_folder(profile: Path) -> None:
    """Make the folder of a profile before anything runs.

    Raises:
        MeshwiseError: it cannot be written to.
    """
    try:
        profile.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MeshwiseError(f"--profile {profile}: {error.strerror}") from None
    if not os.access(profile, os.W_OK):
        raise MeshwiseError(f"--profile {profile}: Permission denied")


def _compiled_memory(compiled: Any) -> StepMemory | None:
    found = compiled.memory_analysis()
    if found is None:
        return None
    return StepMemory(int(found.argument_size_in_bytes), int(found.temp_size_in_bytes))


def _in_use(step: TrainStep) -> int | None:
    """Peak bytes in use on the fullest device of this process, where the backend tells."""
    stats: list[Mapping[str, int] | None] = [d.memory_stats() for d in step.mesh.local_devices]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks, default=None)
