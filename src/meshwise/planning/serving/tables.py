"""All candidates of a step priced at once: time, memory and rate of each layout at each batch.

The numbers are those of `costs.serving`, whose functions work on arrays as they do on floats. Sizes of layouts are a
row and batches a column, so that what depends on one of them alone is worked out once. Not here: which is best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.costs.collectives import collective_time
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import PlacedWires
from meshwise.costs.serving.memory import cache_bytes, step_memory, weight_bytes
from meshwise.costs.serving.problem import ServingProblem, Step
from meshwise.costs.serving.step import StepSizes, price_step
from meshwise.costs.wiring import Wiring
from meshwise.jobs import ServingLoad
from meshwise.planning.serving.space import Candidates
from meshwise.sharding import CollectiveKind
from meshwise.sharding.serving import SERVING_AXES
from meshwise.sharding.serving_layout import ServingLayout

__all__ = ["Table", "make_table"]


@dataclass(frozen=True)
class Table:
    """One row for each layout and batch.

    Args:
        layouts: of all rows, each once, and its wires; `layout` is the row's index into them.
        layout, batch, chips: of the row.
        stored: how weights are stored: (parts, expert, stage) as one number, equal for those that can share a copy.
        mesh: which layouts split caches alike, as one number.
        seconds, interval: of a whole prefill, or of a generate step.
        weights, cache, activations, workspace: bytes on the fullest chip.
        prompts: generate only: numbers of prompts, and [number, layout] bytes of their cache.
        handover: prefill only: seconds in which caches change places among an engine's chips.
    """

    layouts: tuple[tuple[ServingLayout, Wiring], ...]
    layout: np.ndarray
    batch: np.ndarray
    chips: np.ndarray
    stored: np.ndarray
    mesh: np.ndarray
    seconds: np.ndarray
    interval: np.ndarray
    weights: np.ndarray
    cache: np.ndarray
    activations: np.ndarray
    workspace: np.ndarray
    prompts: tuple[np.ndarray, np.ndarray]
    handover: np.ndarray

    def layout_of(self, row: int, replicas: int = 1) -> ServingLayout:
        """Give a row's layout with its wires."""
        layout, wiring = self.layouts[int(self.layout[row])]
        return layout.replace(wires=tuple(wiring.items()), replicas=replicas)

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.batch)


def _number(of: dict[object, int], key: object) -> int:
    return of.setdefault(key, len(of))


def make_table(
    problem: ServingProblem,
    fabric: Fabric,
    step: Step,
    found: Sequence[Candidates],
    batches: Sequence[int],
    *,
    prompts: Sequence[int] = (),
    keys: tuple[dict[object, int], dict[object, int]],
) -> Table:
    """Price every candidate at every batch.

    Args:
        problem, fabric: as in `estimate_serving`.
        step: "prefill" or "generate".
        found: layouts by structure.
        batches: requests, or prompts that are prefilled together.
        prompts: numbers of prompts whose caches a generating engine may hold besides.
        keys: numbers given so far to ways of storing weights, and to meshes, shared by both steps.
    """
    load = problem.load
    batch = np.array([[float(b)] for b in batches])
    together = np.array([[float(p)] for p in prompts])
    total = len(batches) * sum(len(group.layouts) for group in found)
    columns = {name: np.empty(total, int if name in _NUMBERS else float) for name in _COLUMNS}
    held: list[np.ndarray] = []
    layouts: list[tuple[ServingLayout, Wiring]] = []
    done = 0
    for group in found:
        mesh = group.mesh
        wires = PlacedWires(fabric, group.factors, problem.routing)
        if step == "generate":
            positions = load.positions_per_step
            sizes = StepSizes(batch, positions, load.mean_context + positions - 1, mesh, last=positions)
            attending, most, kept = None, sizes, load.kept(batch) + load.draft_tokens
        else:
            sizes, attending, most = _prompts(load, batch, mesh)
            kept = load.prefilled(batch)
        costs = price_step(problem, step, group.structure, sizes, wires, attending)
        activations, workspace = step_memory(problem, step, group.structure, most)
        values = {
            "layout": np.arange(len(layouts), len(layouts) + len(group.layouts)),
            "batch": batch,
            "chips": group.chips,
            "stored": np.array([_number(keys[0], key) for key in group.stored]),
            "mesh": np.array([_number(keys[1], key) for key in group.cached]),
            "seconds": costs.expected,
            "interval": costs.interval,
            "weights": weight_bytes(problem, step, group.structure, mesh),
            "cache": cache_bytes(problem, step, group.structure, mesh, batch, kept),
            "activations": activations,
            "workspace": workspace,
            "handover": _handover(problem, wires, batch) if step == "prefill" else 0.0,
        }
        shape = len(batches), len(group.layouts)
        rows = slice(done, done + shape[0] * shape[1])
        for name in _COLUMNS:
            columns[name][rows].reshape(shape[::-1])[:] = np.broadcast_to(values[name], shape).T
        if prompts:
            own = cache_bytes(problem, step, group.structure, mesh, together, load.prefilled(together))
            held.append(np.broadcast_to(own, (len(prompts), shape[1])))
        layouts += group.layouts
        done = rows.stop
    numbers = together.ravel()
    return Table(tuple(layouts), **columns, prompts=(numbers, np.concatenate(held, axis=1) if held else _NOTHING))


#: Columns of whole numbers that others are looked up by.
_NUMBERS = ("layout", "stored", "mesh")

_COLUMNS = (
    "layout", "batch", "chips", "stored", "mesh", "seconds", "interval", "weights", "cache", "activations", "workspace",
    "handover",
)  # fmt: skip

_NOTHING = np.empty((0, 0))


def _prompts(
    load: ServingLoad, batch: np.ndarray, mesh: dict[str, np.ndarray]
) -> tuple[StepSizes, StepSizes | None, StepSizes]:
    """Sizes of a whole prefill: of the mean prompt, for attention, and of long ones for memory."""
    mean = StepSizes(batch, load.computed, load.prompt, mesh)
    if load.mix is None:
        return mean, None, mean
    attended, long = load.attended_prompt, load.prefilled(batch)
    return (
        mean,
        StepSizes(batch, attended - load.cached_prefix, attended, mesh),
        StepSizes(batch, long - load.cached_prefix, long, mesh),
    )


def _handover(problem: ServingProblem, wires: PlacedWires, prompts: np.ndarray) -> np.ndarray:
    """Seconds in which caches of so many prompts are exchanged among the chips of an engine."""
    num_bytes = prompts * problem.model.kv_cache.bytes_per_sequence(problem.load.prompt, problem.load.formats.kv)
    links = problem.calibration.in_steps.links
    seconds: np.ndarray = collective_time(CollectiveKind.ALL_TO_ALL, num_bytes, wires(SERVING_AXES), links=links)
    return seconds
