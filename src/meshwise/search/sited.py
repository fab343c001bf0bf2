"""A bound of candidates for each way to lay their mesh on a network of switches, with weights and gradients moved.

Groups that are each laid out as if they had the network to themselves (`moving`) cannot all be in the same node: on
switches that is most of what a bound misses, and a mesh has few places. Activations are priced once for each size of
one device's work and place of the axes that move them, weights and gradients once for each place of a mesh. Not here:
prices of single candidates (`pricing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.arithmetic import maximum, take
from meshwise.costs.fabric import Fabric
from meshwise.costs.moves import Moves, evaluate_moves, moving_least
from meshwise.costs.overlap import RoleSums, Sums
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step_time import StepParts, passes_makespan
from meshwise.search.bounds import Bounds
from meshwise.search.moving import Covers, MovingBounds
from meshwise.search.rows import Rows, Table, distinct
from meshwise.search.space import WireTable, placements
from meshwise.search.structures import Work
from meshwise.sharding.layout import MESH_AXES
from meshwise.sharding.placed import Purpose

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Axes that move activations.
_OF_ACTIVATIONS = [MESH_AXES.index(a) for a in ("tensor", "ulysses", "context", "expert")]

#: Candidates times places that are bounded at a time.
_AT_A_TIME = 1 << 16


class SitedBounds:
    """Bounds on one network.

    Args:
        problem: model, job, cluster, calibration.
        fabric: the network.
        table: meshes and cuts of the batch.
        bounds: of groups.
        moving: of candidates, on wires that no placement beats.
    """

    def __init__(
        self, problem: TrainingProblem, fabric: Fabric, table: Table, bounds: Bounds, moving: MovingBounds
    ) -> None:
        self.problem, self.fabric, self.table, self.bounds, self.moving = problem, fabric, table, bounds, moving
        # On a torus places are many, and what a group has to itself is nearly what it gets.
        self.matter = not any(d.torus for d in fabric.dimensions)

    def raised(self, rows: Rows) -> Rows:
        """The rows with higher bounds, where places matter."""
        if not self.matter or not len(rows):
            return rows
        out = rows.take(slice(None))
        out.bound = rows.bound.copy()
        first = self.moving.first[rows.structure]
        for kind in np.unique(first):
            mine = np.flatnonzero(first == kind)
            for begin in range(0, len(mine), _AT_A_TIME >> 4):
                part = mine[begin : begin + (_AT_A_TIME >> 4)]
                out.bound[part] = self._bound(self.moving.structures[int(kind)][0], rows.take(part))
        return out

    def _bound(self, work: Work, rows: Rows) -> Array:
        """Seconds per token of rows of one kind of work, where each is placed best."""
        meshes, which = np.unique(self.table.mesh_id[rows.at], return_inverse=True)
        sizes = self.table.meshes[meshes].astype(int)
        ways = [placements(self.fabric.sizes, tuple(int(n) for n in mesh)) for mesh in sizes]
        number = np.array([len(w) for w in ways])
        factors, starts = np.concatenate(ways), np.cumsum(number) - number
        repeats = number[which]
        begins = np.cumsum(repeats) - repeats
        row = np.repeat(np.arange(len(rows)), repeats)
        place = starts[which[row]] + np.arange(len(row)) - begins[row]
        key = self.bounds.key_of[rows.at[row]]
        moves = self._moves(rows, row, place, np.repeat(meshes, number), factors)
        parts = self._sums(work, self.bounds.size[key], place, factors)
        seconds = self._seconds(rows.variant[row], key, parts, moves)
        return np.maximum(rows.bound, (1 - 1e-9) * np.minimum.reduceat(seconds / self.bounds.tokens[key], begins))

    def _moves(self, rows: Rows, row: Index, place: Index, meshes: Index, factors: Array) -> dict[str, Moves]:
        """What moves for each row and place; `meshes` and `factors` are those of the places."""
        mesh = {a: self.table.meshes[meshes, k] for k, a in enumerate(MESH_AXES)}
        wires = WireTable(self.fabric, factors, self.problem.routing)
        out: dict[str, Moves] = {}
        structure = rows.structure[row]
        for s in np.unique(rows.structure):
            mine = np.flatnonzero(structure == s)
            own, there = moving_least(self.moving.structures[int(s)][1]), place[mine]
            for role, moves in evaluate_moves(self.problem, own, mesh, wires).items():
                into = out.setdefault(role, Moves(*np.zeros((4, len(row)))))
                for name in Moves.__slots__:
                    column = np.broadcast_to(getattr(moves, name), len(factors))
                    getattr(into, name)[mine] = column[there]
        return out

    def _sums(self, work: Work, size: Index, place: Index, factors: Array) -> StepParts:
        """Sums of one microbatch for each row and place, worked out once for what is placed alike."""
        ways = [distinct(factors[:, axis].astype(int).T)[1] for axis in _OF_ACTIVATIONS]  # of each axis on its own
        _, alike = distinct(ways)
        first, index = distinct((size, alike[place]))
        wires = WireTable(self.fabric, factors[place[first]], self.problem.routing)
        parts = self.bounds.placed_sums(work, size[first], wires)
        return replace(parts, sums={role: own.at(index) for role, own in parts.sums.items()})

    def _seconds(self, variant: Index, key: Index, parts: StepParts, moves: Mapping[str, Moves]) -> Array:
        """Seconds of a step."""
        stuck = self.moving.stuck
        covers: dict[str, Covers] = {}
        late: dict[str, RoleSums] = {}
        busy: Any = 0.0
        for role, own in parts.sums.items():
            cover = own.cover[Purpose.WEIGHTS], own.cover[Purpose.GRADIENTS]
            forward, backward = stuck(moves[role].forward, cover[0]), stuck(moves[role].backward, cover[1])
            passes = own.passes
            later = {**passes, "forward": passes["forward"] + forward, "weights": passes["weights"] + backward}
            late[role] = replace(own, passes=Sums(later))
            busy = busy + (sum(passes.values()) - sum(own.exchanged.values()) + forward + backward)
            covers[role] = np.broadcast_to(cover[0], len(key)), np.broadcast_to(cover[1], len(key))
        all_busy = busy * self.bounds.per_token[self.bounds.size[key]] * self.bounds.tokens[key]
        seconds = self.moving.once(variant, self.bounds.pipe[key], moves, covers)
        for v in np.unique(variant):
            mine = np.flatnonzero(variant == v)
            pipeline = self.bounds.pipeline(int(v))[0].at(self.bounds.pipe[key[mine]])
            # Where gradients of weights wait for nothing, it matters to which pass what sticks out belongs.
            sums = parts.sums if pipeline.schedule.splits_backward else late
            there = {role: take(of, mine) for role, of in sums.items()}
            passes = passes_makespan(replace(parts, sums=there), pipeline)
            seconds[mine] += maximum(passes, all_busy[mine])
        return seconds
