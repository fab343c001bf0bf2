"""All candidates of a step priced at once: time, memory and rate of each layout at each batch.

The numbers are those of `costs.serving`, whose functions work on arrays as they do on floats. Not here: which is best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
        prompts: generate only: number of prompts -> bytes of their cache.
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
    prompts: dict[int, np.ndarray]
    handover: np.ndarray

    def layout_of(self, row: int, replicas: int = 1) -> ServingLayout:
        """Give a row's layout with its wires."""
        layout, wiring = self.layouts[int(self.layout[row])]
        return layout.replace(wires=tuple(wiring.items()), replicas=replicas)

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.batch)

    @cached_property
    def prompt_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of `prompts`, and [numbers, rows] bytes of their cache."""
        return np.array(list(self.prompts), dtype=float), np.stack(list(self.prompts.values()))


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
    parts: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
    held: dict[int, list[np.ndarray]] = {p: [] for p in prompts}
    layouts: list[tuple[ServingLayout, Wiring]] = []
    for group in found:
        number, count = len(group.layouts), len(batches)
        rows = np.repeat(np.arange(number), count)
        batch = np.tile(np.array([float(b) for b in batches]), number)
        mesh = {a: v[rows] for a, v in group.mesh.items()}
        wires = PlacedWires(fabric, {a: [e[rows] for e in v] for a, v in group.factors.items()}, problem.routing)
        if step == "generate":
            positions = load.positions_per_step
            sizes = StepSizes(batch, positions, load.mean_context + positions - 1, mesh, last=positions)
            attending, most, kept = None, sizes, load.kept(batch) + load.draft_tokens
        else:
            sizes, attending, most = _prompts(load, batch, mesh)
            kept = load.prefilled(batch)
        costs = price_step(problem, step, group.structure, sizes, wires, attending)
        activations, workspace = step_memory(problem, step, group.structure, most)
        stored = [_number(keys[0], key) for key in group.stored]
        alike = [_number(keys[1], key) for key in group.cached]
        values = {
            "layout": rows + len(layouts),
            "batch": batch,
            "chips": group.chips[rows],
            "stored": np.array(stored)[rows],
            "mesh": np.array(alike)[rows],
            "seconds": costs.expected,
            "interval": costs.interval,
            "weights": weight_bytes(problem, step, group.structure, mesh),
            "cache": cache_bytes(problem, step, group.structure, mesh, batch, kept),
            "activations": activations,
            "workspace": workspace,
            "handover": _handover(problem, wires, batch) if step == "prefill" else 0.0,
        }
        for name in _COLUMNS:
            parts[name].append(np.broadcast_to(values[name], rows.shape))
        for p in prompts:
            own = cache_bytes(problem, step, group.structure, mesh, float(p), load.prefilled(float(p)))
            held[p].append(np.broadcast_to(own, rows.shape))
        layouts += group.layouts
    joined = {name: np.concatenate(values) for name, values in parts.items()}
    return Table(tuple(layouts), **joined, prompts={p: np.concatenate(v) for p, v in held.items()})


_COLUMNS = (
    "layout", "batch", "chips", "stored", "mesh", "seconds", "interval", "weights", "cache", "activations", "workspace",
    "handover",
)  # fmt: skip


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
