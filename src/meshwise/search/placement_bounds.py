"""Lower bounds of candidates whose activations, weights and gradients all move, on the best mapping of their mesh.

A mapping says where the mesh axes lie on the network. Ideal links, which no placement beats, are one mapping: every
group is laid out as if it had the network to itself. On switches all placements are asked, too, as not every group can
be in the same node; on a torus they are many, and a group gets nearly what it would get alone.

What a pass moves hides behind its own compute, of which it costs a share i (`Calibration.interference`), as far as that
lasts. T seconds of weight traffic beside C that hide it expose

    T - (1 - i) min(T, C) = max(i T, T - (1 - i) C).

The sum of that over the blocks of a role is no less than the same of the sums of T and C. docs/planning.md says why the
whole is a lower bound. Not here: bounds of groups of candidates (`bounds`), or prices (`pricing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from meshwise.costs.arithmetic import Num, maximum, minimum
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.overlap import RoleSums, Sums
from meshwise.costs.pipeline import Shares, device_shares
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.routing import Routing
from meshwise.costs.step import Wires
from meshwise.costs.step_time import StepParts, passes_makespan
from meshwise.costs.weight_traffic import WeightTraffic, evaluate_weight_traffic, weight_choices
from meshwise.search.bounds import Array, Bounds, Index
from meshwise.search.rows import KnownColumns, Rows, Table, distinct
from meshwise.search.space import IdealWires, WireTable, placements
from meshwise.search.structures import Work
from meshwise.sharding.layout import MESH_AXES
from meshwise.sharding.placed import Purpose

#: Axes that move activations.
_OF_ACTIVATIONS = [MESH_AXES.index(a) for a in ("tensor", "ulysses", "context", "expert")]

#: Candidates that are bounded at a time, on each of their mappings.
_AT_A_TIME = 1 << 12


class IdealMapping:
    """The one mapping of each mesh of a table onto links that no placement beats; its number is the mesh's.

    Args:
        ideal: links of all meshes.
    """

    def __init__(self, ideal: IdealWires) -> None:
        self.ideal = ideal

    def of(self, meshes: Index) -> tuple[Index, Index]:
        """First mapping of each of `meshes`, and how many there are."""
        return meshes, np.ones(len(meshes), int)

    def meshes(self, mappings: Index) -> Index:
        """The mesh of each of `mappings`."""
        return mappings

    def links(self, mappings: Index) -> Wires:
        """Links of some mappings."""
        return self.ideal.at(mappings)


class Placements:
    """All placements of the meshes of a table, numbered as they are asked for.

    Args:
        fabric: the network.
        table: meshes and cuts of the batch.
        routing: of a mixture.
    """

    def __init__(self, fabric: Fabric, table: Table, routing: Routing | None) -> None:
        self.fabric, self.table, self.routing = fabric, table, routing
        self.mesh = np.zeros(0, int)  # of each placement
        self.factors = np.zeros((0, len(MESH_AXES), len(fabric.dimensions)))
        self.first = np.full(len(table.meshes), -1)  # placement of each mesh
        self.number = np.zeros(len(table.meshes), int)  # of its placements

    def of(self, meshes: Index) -> tuple[Index, Index]:
        """First placement of each of `meshes`, and how many there are."""
        new = np.unique(meshes[self.first[meshes] < 0])
        if len(new):
            ways = [placements(self.fabric.sizes, tuple(int(n) for n in self.table.meshes[m])) for m in new]
            self.number[new] = [len(w) for w in ways]
            self.first[new] = len(self.mesh) + np.cumsum(self.number[new]) - self.number[new]
            self.mesh = np.concatenate([self.mesh, np.repeat(new, self.number[new])])
            self.factors = np.concatenate([self.factors, *ways])
        return self.first[meshes], self.number[meshes]

    def meshes(self, mappings: Index) -> Index:
        """The mesh of each of `mappings`."""
        return self.mesh[mappings]

    def links(self, mappings: Index) -> Wires:
        """Links of some placements."""
        return WireTable(self.fabric, self.factors[mappings], self.routing)


class PlacementBounds:
    """Bounds on one network.

    Args:
        problem: model, job, cluster, calibration.
        structures: every one, with the number of its kind of work.
        works: the kinds of work.
        table: meshes and cuts of the batch.
        mappings: of its meshes.
        bounds: of groups.
    """

    def __init__(  # noqa: PLR0917 -- what bounds are made of
        self,
        problem: TrainingProblem,
        structures: tuple[tuple[int, LayoutChoices], ...],
        works: tuple[Work, ...],
        table: Table,
        mappings: IdealMapping | Placements,
        bounds: Bounds,
    ) -> None:
        self.problem, self.works, self.table, self.mappings, self.bounds = problem, works, table, mappings, bounds
        self.lost = problem.calibration.interference
        self.work = np.array([w for w, _ in structures])
        self.moving = [weight_choices(structure) for _, structure in structures]
        self.tables: dict[LayoutChoices, KnownColumns] = {}
        self.shares_of: dict[int, tuple[Shares, ...]] = {}

    def raised(self, rows: Rows) -> Rows:
        """The candidates, with tighter lower bounds."""
        out = rows.take(slice(None))
        out.bound = rows.bound.copy()
        work = self.work[rows.structure]
        for w in np.unique(work):
            mine = np.flatnonzero(work == w)
            for begin in range(0, len(mine), _AT_A_TIME):
                part = mine[begin : begin + _AT_A_TIME]
                out.bound[part] = np.maximum(rows.bound[part], self._bound(self.works[w], rows.take(part)))
        return out

    def _bound(self, work: Work, rows: Rows) -> Array:
        """Seconds per token of candidates of one kind of work, each on its best mapping."""
        first, number = self.mappings.of(self.table.mesh_id[rows.at])
        begins = np.cumsum(number) - number
        row = np.repeat(np.arange(len(rows)), number)
        mapping = np.arange(len(row)) + (first - begins)[row]
        key = self.bounds.key_of[rows.at[row]]
        parts = self._activations(work, self.bounds.size[key], mapping)
        traffic = self._traffic(rows.structure[row], mapping)
        seconds = self._seconds(rows.variant[row], key, parts, traffic)
        # Terms are added up in another order.
        return np.asarray((1 - 1e-9) * np.minimum.reduceat(seconds / self.bounds.tokens[key], begins))

    def _activations(self, work: Work, size: Index, mapping: Index) -> StepParts:
        """Sums of one microbatch without weight traffic, worked out once for what is mapped alike."""
        if isinstance(self.mappings, Placements):
            extents = self.mappings.factors[mapping][:, _OF_ACTIVATIONS].astype(int)
            ways = [distinct(extents[:, axis].T)[1] for axis in range(len(_OF_ACTIVATIONS))]
            first, index = distinct((size, *ways))
            parts = self.bounds.placed_sums(work, size[first], self.mappings.links(mapping[first]))
        else:
            parts, index = self.bounds.sums(work), self.bounds.row_of_size(work)[size]
        return replace(parts, sums={role: own.at(index) for role, own in parts.sums.items()})

    def _traffic(self, structure: Index, mapping: Index) -> dict[str, WeightTraffic]:
        """Weight traffic of candidates on mappings."""
        out: dict[str, WeightTraffic] = {}
        for s in np.unique(structure):
            mine, own = np.flatnonzero(structure == s), self.moving[int(s)]
            if own not in self.tables:
                self.tables[own] = KnownColumns(partial(self._evaluate_traffic, own))
            for role, seconds in self.tables[own](mapping[mine]).items():
                out.setdefault(role, np.zeros((4, len(structure))))[:, mine] = seconds
        return out

    def _evaluate_traffic(self, choices: LayoutChoices, mapping: Index) -> dict[str, WeightTraffic]:
        mesh = self.table.axes(self.mappings.meshes(mapping))
        return evaluate_weight_traffic(self.problem, choices, mesh, self.mappings.links(mapping))

    def _seconds(self, variant: Index, key: Index, parts: StepParts, traffic: Mapping[str, WeightTraffic]) -> Array:
        """Seconds of a step: its passes with the weight traffic that they expose, and what happens once."""
        late: dict[str, RoleSums] = {}
        busy: Num = 0.0
        for role, own in parts.sums.items():
            forward = self._exposed(traffic[role][0], own.cover[Purpose.WEIGHTS])
            backward = self._exposed(traffic[role][1], own.cover[Purpose.GRADIENTS])
            passes = own.passes
            busy = busy + sum(passes.values()) - sum(own.exchanged.values()) + forward + backward
            late[role] = replace(own, passes=Sums(passes))
            late[role].passes.add("forward", forward)
            late[role].passes.add("weights", backward)
        # No schedule is faster than all devices computing all the time.
        all_busy = busy * self.bounds.per_token[self.bounds.size[key]] * self.bounds.tokens[key]
        seconds = np.zeros(len(variant))
        for v in np.unique(variant):
            mine = np.flatnonzero(variant == v)
            pipeline = self.bounds.pipeline(int(v))[0].at(self.bounds.pipe[key[mine]])
            # Where gradients of weights wait for nothing, it matters to which pass what is exposed belongs.
            sums = parts.sums if pipeline.schedule.splits_backward else late
            there = {role: own.at(mine) for role, own in sums.items()}
            makespan = passes_makespan(replace(parts, sums=there), pipeline)
            own_traffic = {role: of[:, mine] for role, of in traffic.items()}
            once = self._once(int(v), self.bounds.pipe[key[mine]], own_traffic, there)
            seconds[mine] = maximum(makespan, all_busy[mine]) + once
        return seconds

    def _exposed(self, moved: Num, cover: Num) -> Num:
        """Seconds of traffic that stick out of `cover`, or that its compute loses."""
        exposed: Num = maximum(self.lost * moved, moved - (1 - self.lost) * cover)
        return exposed

    def _once(self, v: int, pipe: Index, traffic: Mapping[str, WeightTraffic], sums: Mapping[str, RoleSums]) -> Num:
        """Exposed seconds of what happens once a step, on the device on which that is least.

        Gradients hide behind the last backward pass, new weights behind the next forward pass.

        Args:
            v, pipe: schedule and sizes of the pipelines.
            traffic, sums: by role, what moves and what hides it.
        """
        hides = not self.problem.calibration.late_exchange
        least: Num | None = None
        for shares in self._shares(v):
            moved: list[Num] = [0.0, 0.0]
            cover: list[Num] = [0.0, 0.0]
            for role, (_, _, reduced, renewed) in traffic.items():
                share = shares[role][pipe] if isinstance(shares[role], np.ndarray) else shares[role]
                for i, seconds in enumerate((reduced, renewed)):
                    moved[i] = moved[i] + share * seconds
                for i, purpose in enumerate((Purpose.GRADIENTS, Purpose.WEIGHTS) if hides else ()):
                    cover[i] = cover[i] + share * sums[role].cover[purpose]
            there = self._exposed(moved[0], cover[0]) + self._exposed(moved[1], cover[1])
            least = there if least is None else minimum(least, there)
        assert least is not None
        return least

    def _shares(self, v: int) -> tuple[Shares, ...]:
        """What the devices of each distinct pipeline store under a schedule."""
        if v not in self.shares_of:
            with np.errstate(all="ignore"):  # where a schedule cannot run, its formula means nothing
                self.shares_of[v] = device_shares(self.bounds.layers, self.bounds.pipeline(v)[0])
        return self.shares_of[v]
