"""All candidates of a step priced at once: time, memory and rate of each layout at each batch.

The numbers are those of `costs.serving`, whose functions work on arrays as they do on floats. Meshes are a row and
batches a column, so that what depends on one of them alone is worked out once; memory and operations are the same at
all places of a mesh on the network, of which the fastest is kept. Not here: which layout is best.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from meshwise.costs.arithmetic import array
from meshwise.costs.collectives import collective_time
from meshwise.costs.extents import Extents
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import PlacedWires
from meshwise.costs.problem import ServingProblem, Step
from meshwise.costs.serving.memory import cache_bytes, step_memory, weight_bytes
from meshwise.costs.serving.sizes import (
    StepSizes,
    attended_sizes,
    decode_sizes,
    part_of_sequences,
    prompt_sizes,
    step_extents,
)
from meshwise.costs.serving.step import time_step
from meshwise.jobs import ServingLoad
from meshwise.search.candidates import Array, Index, Mask
from meshwise.search.serving.space import Candidates, candidates, engine_sizes
from meshwise.search.until import OutOfTime, Until
from meshwise.sharding import CollectiveKind
from meshwise.sharding.serving import SERVING_AXES, ServingLayout

#: Prompts that are prefilled together.
_PROMPTS = tuple(2**k for k in range(10))

#: Places that are priced at a time, at each batch: some hundred arrays of them are held at once.
_PLACES = 1024

#: How often the fastest place of each mesh is asked which others it beats.
_ROUNDS = 4

#: Shares of the tables that are behind when layouts are found, and when prefill is priced.
_FOUND, _PREFILL = 0.05, 0.3

#: Chips of engines that are priced in a moment.
_SMALL = 64


def batch_grid(most: int) -> tuple[int, ...]:
    """Batches that are tried: 1, 2, 3, 4, 6, 8, 12, 16, ... and the largest allowed.

    >>> batch_grid(10)
    (1, 2, 3, 4, 6, 8, 10)
    """
    powers = (2**k for k in range(24))
    return tuple(sorted({n for p in powers for n in (p, 3 * p // 2) if n <= most} | {most}))


@dataclass(frozen=True)
class Table:
    """One row for each mesh and batch, at its fastest place on the network; several, where none is best in everything.

    Args:
        priced: layouts with a place on the network and a batch, of which these rows are left.
        places: of all meshes, by structure; `place` is the row's index into all of them.
        layouts: of each mesh, without wires; `kind` is the row's index into them.
        sizes: mesh axis -> size, of each mesh.
        place, batch, chips: of the row.
        stored: how weights are stored: (parts, expert, stage) as one number, equal for those that can share a copy.
        mesh: which layouts split caches alike, as one number.
        kind: the mesh with its choices: layouts that differ by their places on the network alone have the same.
        seconds: of a whole prefill, or of a decode step.
        weights, cache, activations, workspace: bytes on the fullest chip.
        prompts: decode only: numbers of prompts, and [number, mesh] bytes of their cache.
        interval: prefill only: seconds from one to the next where a pipeline is kept full.
        handover: prefill only: seconds in which caches change places among an engine's chips.
    """

    priced: int
    places: tuple[Candidates, ...]
    layouts: tuple[ServingLayout, ...]
    sizes: dict[str, Array]
    place: Array
    batch: Array
    chips: Array
    stored: Array
    mesh: Array
    kind: Array
    seconds: Array
    weights: Array
    cache: Array
    activations: Array
    workspace: Array
    prompts: tuple[Array, Array]
    interval: Array = field(default_factory=lambda: np.zeros(0))
    handover: Array = field(default_factory=lambda: np.zeros(0))

    def layout_of(self, row: int, replicas: int = 1) -> ServingLayout:
        """A row's layout with its wires."""
        at = int(self.place[row])
        for group in self.places:
            if at < len(group.places):
                break
            at -= len(group.places)
        layout, wiring = group.place(at)
        return layout.replace(wires=tuple(wiring.items()), replicas=replicas)

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.batch)

    def take(self, rows: Index) -> Table:
        """Some of the rows."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        own: dict[str, Any] = {
            n: c[rows] for n, c in columns.items() if isinstance(c, np.ndarray) and len(c) == self.rows
        }
        return replace(self, **own)


@dataclass(frozen=True)
class Tables:
    """Every layout and batch of both steps, priced.

    Args:
        problem, fabric: as in `estimate_serving`.
        prefill, decode: rows of each.
        taken: which layouts engines take, by engine and kind of engines; `planner` fills it.
        whole: whether engines of all sizes are there, not only small ones.
    """

    problem: ServingProblem
    fabric: Fabric
    prefill: Table
    decode: Table
    taken: dict[tuple[str, str, Step], tuple[Mask, Mask]] = field(default_factory=dict, repr=False, compare=False)
    whole: bool = True

    @classmethod
    def priced(
        cls,
        problem: ServingProblem,
        fabric: Fabric,
        *,
        max_batch: int = 4096,
        forbid: tuple[str, ...] = (),
        until: Until | None = None,
    ) -> Tables:
        """Price what is searched: batches up to `max_batch`, without the axes of `forbid`.

        Where the time is up, or the user ends that early, small engines alone are priced, which takes a second.

        Raises:
            KeyboardInterrupt: the user did, and there is another plan to give.
        """
        sizes, until = engine_sizes(fabric), until or Until()
        try:
            return cls._of(problem, fabric, sizes, max_batch, forbid, until)
        except KeyboardInterrupt as stopped:
            if until.spare and not isinstance(stopped, OutOfTime):
                raise
            small = tuple(n for n in sizes if n <= _SMALL)
            return replace(cls._of(problem, fabric, small, max_batch, forbid, Until()), whole=False)

    @classmethod
    def _of(  # noqa: PLR0917 -- as `priced`
        cls,
        problem: ServingProblem,
        fabric: Fabric,
        sizes: tuple[int, ...],
        max_batch: int,
        forbid: tuple[str, ...],
        until: Until,
    ) -> Tables:
        keys: dict[object, int] = {}
        into, out = (candidates(problem, fabric, step, sizes, forbid, until.tick) for step in ("prefill", "decode"))
        with until.behind.part(_FOUND, _PREFILL):
            prefill = make_table(problem, fabric, "prefill", into, _PROMPTS, keys=keys, until=until)
        with until.behind.part(_PREFILL, 1):
            batches = batch_grid(max_batch)
            decode = make_table(problem, fabric, "decode", out, batches, prompts=_PROMPTS, keys=keys, until=until)
        return cls(problem, fabric, prefill, decode)

    @property
    def both(self) -> tuple[Table, Table]:
        """Prefill and decode."""
        return self.prefill, self.decode

    @property
    def num_chips(self) -> int:
        """Chips of the cluster."""
        return self.problem.cluster.num_chips

    @property
    def usable(self) -> float:
        """Bytes of a chip that may be filled."""
        return self.problem.cluster.chip.hbm_usable

    @property
    def reserve(self) -> float:
        """Bytes of these that are kept free."""
        return self.problem.load.reserve * self.usable


def make_table(
    problem: ServingProblem,
    fabric: Fabric,
    step: Step,
    found: Sequence[Candidates],
    batches: Sequence[int],
    *,
    prompts: Sequence[int] = (),
    keys: dict[object, int],
    until: Until | None = None,
) -> Table:
    """Price every candidate at every batch.

    Args:
        problem, fabric: as in `estimate_serving`.
        step: "prefill" or "decode".
        found: layouts by structure.
        batches: requests, or prompts that are prefilled together.
        prompts: numbers of prompts whose caches a decoding engine may hold besides.
        keys: numbers given so far to ways of storing weights, and to meshes, shared by both steps.
        until: asked and told before each block of meshes.
    """
    batch, together = (np.array([[float(n)] for n in numbers]) for numbers in (batches, prompts))
    until = until or Until()
    columns: dict[str, _Column] = defaultdict(_Column)
    held, places, kinds = [np.zeros((len(prompts), 0))], 0, 0
    every = max(sum(len(whole.places) for whole in found), 1)
    for group in (block for whole in found for block in whole.blocks(_PLACES)):
        until.behind.at(places / every)
        until.tick()
        steps = _step_sizes(problem.load, step, batch, group.mesh)
        extents = step_extents(problem, step, group.structure, part_of_sequences(steps[0]))
        timed = _timed(problem, fabric, step, group, steps, extents)
        memory = _memory(problem, step, group, steps, extents)
        shape = len(batches), len(group.places)
        place, at = np.nonzero(_fastest([np.broadcast_to(v, shape) for v in timed.values()], group.places).T)
        of_mesh = {
            "batch": batch.astype(np.int32),
            "chips": group.chips.astype(np.int32),
            "stored": np.array([keys.setdefault(key, len(keys)) for key in group.stored], np.int32),
            "mesh": np.array([keys.setdefault(key, len(keys)) for key in group.cached], np.int32),
            "kind": np.arange(kinds, kinds + len(group.chips), dtype=np.int32),
            **memory,
        }
        columns["place"].add((place + places).astype(np.int32))
        for name, value in timed.items():
            columns[name].add(np.broadcast_to(value, shape)[at, place])
        for name, value in of_mesh.items():
            columns[name].add(np.broadcast_to(value, (len(batches), len(group.chips)))[at, group.places[place]])
        if prompts:
            held.append(_prompt_bytes(problem, step, group, together))
        places, kinds = places + len(group.places), kinds + len(group.chips)
    return Table(
        len(batches) * places,
        tuple(found),
        tuple(layout for group in found for layout in group.layouts),
        {a: np.concatenate([group.mesh[a] for group in found]) for a in SERVING_AXES},
        **{name: column.whole() for name, column in columns.items()},
        prompts=(together.ravel(), np.concatenate(held, axis=1)),
    )


class _Column:
    """Values that come in parts, in one array that grows in place: parts that wait to be joined take as much again."""

    def __init__(self) -> None:
        self._values, self._number = np.zeros(0), 0

    def add(self, part: np.ndarray) -> None:
        """Append some, of one type."""
        begin, self._number = self._number, self._number + len(part)
        if not begin:
            self._values = part
        elif self._number > len(self._values):
            self._values.resize(self._number + self._number // 8, refcheck=False)
        self._values[begin : self._number] = part

    def whole(self) -> np.ndarray:
        """All of them."""
        self._values.resize(self._number, refcheck=False)
        return self._values


#: Sizes of a step; for attention, where they differ; and of long requests, for memory.
_Steps = tuple[StepSizes, StepSizes | None, StepSizes]


def _timed(  # noqa: PLR0917 -- where, and the sizes of the step
    problem: ServingProblem, fabric: Fabric, step: Step, group: Candidates, steps: _Steps, extents: Extents
) -> dict[str, np.ndarray]:
    """What depends on the place on the network, [batch, place]: those columns in which less is better."""
    wires = PlacedWires(fabric, group.factors, problem.routing)
    sizes, attending, _ = steps
    seconds, interval = time_step(problem, step, group.structure, sizes, wires, group.places, attending, extents)
    if step == "decode":
        return {"seconds": array(seconds)}
    handover = _cache_transfer(problem, wires, array(sizes.sequences))
    return {"seconds": array(seconds), "interval": array(interval), "handover": handover}


def _memory(
    problem: ServingProblem, step: Step, group: Candidates, steps: _Steps, extents: Extents
) -> dict[str, np.ndarray]:
    """Bytes on the fullest chip, [batch, mesh] or broadcast so."""
    load, mesh, (mean, _, long) = problem.load, group.mesh, steps
    batch = mean.sequences
    kept = load.kept(batch) + load.draft_tokens if step == "decode" else load.prefilled(batch)
    known = extents if long is mean else None
    activations, workspace = step_memory(problem, step, group.structure, long, known)
    return {
        "weights": np.asarray(weight_bytes(problem, step, group.structure, mesh)),
        "cache": np.asarray(cache_bytes(problem, step, group.structure, mesh, batch, kept)),
        "activations": np.asarray(activations),
        "workspace": np.asarray(workspace),
    }


def _prompt_bytes(problem: ServingProblem, step: Step, group: Candidates, prompts: np.ndarray) -> np.ndarray:
    """Bytes of the cache of so many prompts, [prompts, mesh]."""
    own = cache_bytes(problem, step, group.structure, group.mesh, prompts, problem.load.prefilled(prompts))
    return np.broadcast_to(own, (len(prompts), len(group.chips)))


def _fastest(columns: Sequence[np.ndarray], places: np.ndarray) -> np.ndarray:
    """Of the places of each mesh, those that its fastest few, the first of equals, do not beat in all columns.

    Args:
        columns: [batch, place], the seconds first.
        places: the mesh of each place; those of a mesh follow one another.

    Returns: [batch, place] which.
    """
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    number = np.arange(len(places))
    left = np.ones(columns[0].shape, dtype=bool)
    kept = np.zeros(columns[0].shape, dtype=bool)
    for _ in range(_ROUNDS):
        seconds = np.where(left, columns[0], np.inf)
        is_least = left & (seconds == np.minimum.reduceat(seconds, starts, axis=1)[:, places])
        first = np.minimum.reduceat(np.where(is_least, number, len(places)), starts, axis=1)[:, places]
        some = np.minimum(first, len(places) - 1)  # of meshes without a place that is left any other
        kept |= number == first
        beaten = np.logical_and.reduce([c >= np.take_along_axis(c, some, axis=1) for c in columns])
        left &= ~beaten & (number != first)
        if not left.any():
            break
    return kept | left


def _step_sizes(load: ServingLoad, step: Step, batch: np.ndarray, mesh: dict[str, np.ndarray]) -> _Steps:
    """Sizes of a decode step, or of a whole prefill: of the mean prompt, for attention, and of long ones for memory."""
    if step == "decode":
        sizes = decode_sizes(load, batch, mesh)
        return sizes, None, sizes
    mean = prompt_sizes(load, batch, mesh, load.computed)
    if load.mix is None:
        return mean, None, mean
    long = prompt_sizes(load, batch, mesh, load.prefilled(batch) - load.cached_prefix)
    return mean, attended_sizes(load, mean), long


def _cache_transfer(problem: ServingProblem, wires: PlacedWires, prompts: np.ndarray) -> np.ndarray:
    """Seconds in which caches of so many prompts are exchanged among the chips of an engine."""
    num_bytes = prompts * problem.model.kv_cache.bytes_per_sequence(problem.load.prompt, problem.load.formats.kv)
    links = problem.calibration.in_steps.links
    return array(collective_time(CollectiveKind.ALL_TO_ALL, num_bytes, wires(SERVING_AXES), links=links))
