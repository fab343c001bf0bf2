"""A bound of whole candidates that counts moving their weights and gradients, before anything else of them is priced.

What a pass moves hides behind its own compute, of which it costs a share (`Calibration.interference`), as far as that
lasts. With T seconds to move, C that hide them and a share i, what sticks out or is lost is

    T - (1 - i) min(T, C) = max(i T, T - (1 - i) C).

The sum of that over the blocks of a role is no less than the same of the sums of T and C. What all devices of a
pipeline lose together, each its part of it, bounds what the busiest one loses; what happens once a step counts as on
the device on which it takes least. Wires are such as no placement beats. Not here: bounds of groups of candidates
(`bounds`), or prices (`pricing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.arithmetic import maximum, minimum
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.moves import Moves, evaluate_moves, moving_least
from meshwise.costs.pipeline import Shares, device_shares
from meshwise.costs.problem import TrainingProblem
from meshwise.search.bounds import Bounds
from meshwise.search.rows import Rows, Table
from meshwise.search.space import IdealWires
from meshwise.search.structures import Work
from meshwise.sharding.layout import MESH_AXES
from meshwise.sharding.placed import Purpose

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Seconds that hide what moves beside a forward pass, and beside a backward pass.
Covers = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class _Compute:
    """Compute of one microbatch through all copies of the blocks of a role, for the sizes of a kind of work.

    Args:
        busy: seconds of its passes, exchanges with experts left out.
        forward, backward: seconds that hide what moves beside these passes.
    """

    busy: Any
    forward: Any
    backward: Any


class MovingBounds:
    """Bounds on one network.

    Args:
        problem: model, job, cluster, calibration.
        structures: every one, with its kind of work; those of one kind stand together.
        table: meshes and cuts of the batch.
        wires: mesh axes -> wires of all its meshes that no placement beats.
        bounds: of groups, whose sums of compute these add to.
    """

    def __init__(
        self,
        problem: TrainingProblem,
        structures: Sequence[tuple[Work, LayoutChoices]],
        table: Table,
        wires: IdealWires,
        bounds: Bounds,
    ) -> None:
        self.problem, self.structures, self.table, self.wires, self.bounds = problem, structures, table, wires, bounds
        self.lost = problem.calibration.interference
        self.tables: dict[LayoutChoices, _MovesTable] = {}
        self.compute_of: dict[int, dict[str, _Compute]] = {}  # of the first structure of a kind of work
        self.shares_of: dict[int, tuple[Shares, Shares, Shares]] = {}
        works = [id(work) for work, _ in structures]
        self.first = np.array([works.index(work) for work in works])  # structure of the same work

    def raised(self, rows: Rows) -> Rows:
        """The rows, from those of groups, with higher bounds."""
        out = rows.take(slice(None))
        out.bound = rows.bound.copy()
        first = self.first[rows.structure]
        for kind in np.unique(first):
            mine = np.flatnonzero(first == kind)
            out.bound[mine] = self._bound(int(kind), rows.take(mine))
        return out

    def _bound(self, kind: int, rows: Rows) -> Array:
        """Seconds per token of rows of one kind of work."""
        key = self.bounds.key_of[rows.at]
        size = self.bounds.size[key]
        row = self.bounds.row_of_size(self.structures[kind][0])[size]
        moves = self._moves(rows)
        busy: Any = 0.0
        covers: dict[str, Covers] = {}
        for role, own in self._compute(kind).items():
            forward, backward = own.forward[row], own.backward[row]
            busy = busy + own.busy[row] + self.stuck(moves[role].forward, forward)
            busy = busy + self.stuck(moves[role].backward, backward)
            covers[role] = forward, backward
        bound = np.maximum(rows.bound, busy * self.bounds.per_token[size])
        bound = bound + self.once(rows.variant, self.bounds.pipe[key], moves, covers) / self.bounds.tokens[key]
        return np.asarray((1 - 1e-9) * bound)  # terms are added up in another order

    def stuck(self, moved: Any, cover: Any) -> Any:
        """Seconds that stick out of `cover` ones, or that these lose."""
        return maximum(self.lost * moved, moved - (1 - self.lost) * cover)

    def once(self, variant: Index, pipe: Index, moves: Mapping[str, Moves], covers: Mapping[str, Covers]) -> Array:
        """Seconds of what happens once a step, on the device on which it takes least.

        Gradients hide behind the last backward pass, new weights behind the next forward pass.

        Args:
            variant, pipe: [rows] of the pipeline: which schedule, which of the distinct sizes.
            moves, covers: by role, what moves, and what hides it in the forward and the backward pass.
        """
        out = np.zeros(len(variant))
        never = self.problem.calibration.late_exchange
        for v in np.unique(variant):
            mine = np.flatnonzero(variant == v)
            least: Any = None
            for shares in self._shares(int(v)):
                reduced = renewed = forward = backward = np.zeros(len(mine))
                for role, moved in moves.items():
                    share = shares[role][pipe[mine]]
                    reduced = reduced + share * moved.reduced[mine]
                    renewed = renewed + share * moved.renewed[mine]
                    if not never:
                        forward = forward + share * covers[role][0][mine]
                        backward = backward + share * covers[role][1][mine]
                there = self.stuck(reduced, backward) + self.stuck(renewed, forward)
                least = there if least is None else minimum(least, there)
            out[mine] = least
        return out

    def _shares(self, v: int) -> tuple[Shares, Shares, Shares]:
        """What the devices of each distinct pipeline store under a schedule."""
        if v not in self.shares_of:
            pipeline, *_ = self.bounds.pipeline(v)
            number = len(self.bounds.stages)
            with np.errstate(all="ignore"):  # where a schedule cannot run, its formula means nothing
                devices = device_shares(self.bounds.layers, pipeline)
            first, middle, last = ({r: np.broadcast_to(s, number) for r, s in own.items()} for own in devices)
            self.shares_of[v] = first, middle, last
        return self.shares_of[v]

    def _compute(self, kind: int) -> dict[str, _Compute]:
        if kind not in self.compute_of:
            work = self.structures[kind][0]
            number = len(self.bounds.sizes_of(work))

            def whole(column: Any) -> Any:
                return np.broadcast_to(column, number)

            self.compute_of[kind] = {
                role: _Compute(
                    whole(sum(own.passes.values()) - sum(own.exchanged.values())),
                    whole(own.cover[Purpose.WEIGHTS]),
                    whole(own.cover[Purpose.GRADIENTS]),
                )
                for role, own in self.bounds.sums(work).sums.items()
            }
        return self.compute_of[kind]

    def _moves(self, rows: Rows) -> dict[str, Moves]:
        """What moves for each of the rows."""
        meshes = self.table.mesh_id[rows.at]
        out: dict[str, Moves] = {}
        for s in np.unique(rows.structure):
            mine = np.flatnonzero(rows.structure == s)
            for role, columns in self._table(self.structures[int(s)][1])(meshes[mine]).items():
                moves = out.setdefault(role, Moves(*np.zeros((4, len(rows)))))
                for name, column in zip(Moves.__slots__, columns, strict=True):
                    getattr(moves, name)[mine] = column
        return out

    def _table(self, structure: LayoutChoices) -> _MovesTable:
        own = moving_least(structure)
        if own not in self.tables:
            self.tables[own] = _MovesTable(self.problem, own, self.table, self.wires)
        return self.tables[own]


class _MovesTable:
    """What moves under a structure, worked out for the meshes that were asked for so far."""

    def __init__(self, problem: TrainingProblem, structure: LayoutChoices, table: Table, wires: IdealWires) -> None:
        self.problem, self.structure, self.table, self.wires = problem, structure, table, wires
        self.known = np.zeros(len(table.meshes), bool)
        self.columns: dict[str, Array] = {}

    def __call__(self, meshes: Index) -> dict[str, Array]:
        """By role, [4, meshes]: seconds in the order of `Moves`."""
        missing = np.unique(meshes[~self.known[meshes]])
        if len(missing):
            self._fill(missing)
        return {role: columns[:, meshes] for role, columns in self.columns.items()}

    def _fill(self, missing: Index) -> None:
        mesh = {a: self.table.meshes[missing, k] for k, a in enumerate(MESH_AXES)}
        for role, moves in evaluate_moves(self.problem, self.structure, mesh, self.wires.at(missing)).items():
            columns = self.columns.setdefault(role, np.zeros((4, len(self.known))))
            for column, name in zip(columns, Moves.__slots__, strict=True):
                column[missing] = getattr(moves, name)
        self.known[missing] = True
