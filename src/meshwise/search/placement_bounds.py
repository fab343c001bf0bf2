"""Lower bounds of candidates whose activations, weights and gradients all move, on the best mapping of their mesh.

A mapping says where the mesh axes lie on the network. Ideal links, which no placement beats, are one mapping: every
group is laid out as if it had the network to itself. What that leaves is asked in all placements, as not every group
can be in the same node, or have the whole of a torus.

What a pass moves hides behind its own compute, of which it costs a share i (`Calibration.interference`), as far as that
lasts. T seconds of weight traffic beside C that hide it expose

    T - (1 - i) min(T, C) = max(i T, T - (1 - i) C).

The sum of that over the blocks of a role is no less than the same of the sums of T and C. docs/planning.md says why the
whole is a lower bound. Not here: bounds of groups of candidates (`bounds`), or prices (`pricing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.arithmetic import Condition, Num, joined, maximum, minimum, take, where
from meshwise.costs.evaluate import ActivationPrices, rates_of
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.local import local_extents
from meshwise.costs.overlap import RoleSums, Sums
from meshwise.costs.routing import Routing
from meshwise.costs.step import CollectivePrices, Wires
from meshwise.costs.step_time import free_share, passes_works, send_seconds
from meshwise.costs.weight_traffic import WeightTraffic, evaluate_weight_traffic, weight_prices
from meshwise.search.bounds import CHUNK, Bounds, expanded
from meshwise.search.candidates import Array, CandidateBatch, CandidateTable, Index, distinct
from meshwise.search.network import WeightColumns
from meshwise.search.space import IdealWires, WireTable, placements
from meshwise.search.tables import Recent
from meshwise.sharding.layout import MESH_AXES
from meshwise.sharding.placed import Purpose

#: Candidates are bounded so many at a time, with all their mappings.
_ROWS = 1 << 17

#: Placements that are kept with what weights take there, of about a kilobyte each; above that, all are made anew.
_MOST_PLACEMENTS = 1 << 18

#: Axes that move activations.
_OF_ACTIVATIONS = [MESH_AXES.index(a) for a in ("tensor", "ulysses", "context", "expert")]


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

    def __init__(self, fabric: Fabric, table: CandidateTable, routing: Routing | None) -> None:
        self.fabric, self.table, self.routing = fabric, table, routing
        # Of each placement: its mesh, its extents, and the number of where it lays the axes that move activations.
        self.mesh, self.alike = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.factors = np.zeros((0, len(MESH_AXES), len(fabric.dimensions)), np.int32)
        self._ways: dict[bytes, int] = {}
        self.first = np.full(len(table.meshes), -1)  # placement of each mesh
        self.number = np.zeros(len(table.meshes), int)  # of its placements

    def of(self, meshes: Index) -> tuple[Index, Index]:
        """First placement of each of `meshes`, and how many there are."""
        new = np.unique(meshes[self.first[meshes] < 0])
        if len(new):
            rows, room = self.table.meshes[new].astype(int).tolist(), self.fabric.sizes
            ways = [placements(room, tuple(sizes)) for sizes in rows]
            self.number[new] = [len(w) for w in ways]
            self.first[new] = len(self.mesh) + np.cumsum(self.number[new]) - self.number[new]
            self.mesh = np.concatenate([self.mesh, np.repeat(new, self.number[new]).astype(np.int32)])
            factors = np.concatenate(ways).astype(np.int32)
            self.factors = np.concatenate([self.factors, factors])
            self.alike = np.concatenate([self.alike, self._numbers_of(factors[:, _OF_ACTIVATIONS])])
        return self.first[meshes], self.number[meshes]

    def _numbers_of(self, extents: NDArray[np.int32]) -> NDArray[np.int32]:
        """Number of each of some extents; new ones get the next."""
        rows = np.ascontiguousarray(extents.reshape(len(extents), -1))
        found, which = np.unique(rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel(), return_inverse=True)
        numbers = [self._ways.setdefault(way.tobytes(), len(self._ways)) for way in found]
        return np.array(numbers, np.int32)[which]

    def meshes(self, mappings: Index) -> Index:
        """The mesh of each of `mappings`."""
        return self.mesh[mappings].astype(int)

    def links(self, mappings: Index) -> Wires:
        """Links of some placements."""
        return WireTable(self.fabric, self.factors[mappings].astype(float), self.routing)


class PlacementBounds:
    """Bounds on one network.

    Args:
        bounds: of groups.
        mappings: of the meshes of the network's table.
    """

    def __init__(self, bounds: Bounds, mappings: IdealMapping | Placements) -> None:
        self.bounds, self.network, self.mappings = bounds, bounds.network, mappings
        calibration = bounds.problem.on_slices
        # Where sums of whole gradients alone are late, it matters which choices have any.
        self.calibration = replace(calibration, late_once=tuple(w for w in calibration.late_once if w != "whole"))
        self._prices = Recent[CollectivePrices](2)
        self._traffic = self._columns()
        self._boundaries: dict[LayoutChoices, Array] = {}

    def _columns(self) -> WeightColumns:
        ideal = isinstance(self.mappings, IdealMapping)
        return WeightColumns(
            self.network, self._evaluate_traffic, lambda: np.arange(len(self.network.table.meshes) if ideal else 0)
        )

    def raised(self, batch: CandidateBatch) -> CandidateBatch:
        """The candidates, with tighter lower bounds."""
        if isinstance(self.mappings, Placements) and len(self.mappings.mesh) > _MOST_PLACEMENTS:
            self.mappings = Placements(self.mappings.fabric, self.mappings.table, self.mappings.routing)
            self._traffic = self._columns()
        out = batch.take(slice(None))
        out.bound = batch.bound.copy()
        if not len(batch):
            return out
        order = np.argsort(batch.schedule, kind="stable")
        first, number = self.mappings.of(self.network.table.mesh_id[batch.at[order]])
        go = (np.cumsum(number) - 1) // _ROWS
        for at in np.split(np.arange(len(order)), np.flatnonzero(np.diff(go)) + 1):
            part = order[at]
            seconds = self._bound(batch.take(part), first[at], number[at])
            out.bound[part] = np.maximum(batch.bound[part], seconds)
        return out

    def _bound(self, batch: CandidateBatch, first: Index, number: Index) -> Array:
        """Seconds per token of candidates, each on its best mapping; those of one schedule follow one another.

        Args:
            batch: candidates.
            first, number: of their mappings.
        """
        row, offset = expanded(number)
        mapping, key = first[row] + offset, self.bounds.key_of[batch.at[row]]
        sums, index = self._activations(self.network.variant_of[batch.choices[row]], self.bounds.size[key], mapping)
        traffic = self._traffic(batch.choices[row], mapping)
        sends = self._sends(self.network.variant_of[batch.choices[row]], key, mapping)
        seconds, schedule = np.zeros(len(row)), batch.schedule[row]
        for s in np.unique(schedule):
            begin, end = np.searchsorted(schedule, (s, s + 1))
            for at in range(int(begin), int(end), CHUNK):
                some = slice(at, min(at + CHUNK, int(end)))
                own = {role: of.at(index[some]) for role, of in sums.items()}
                moved = {role: of[:, some] for role, of in traffic.items()}
                seconds[some] = self._seconds(int(s), key[some], own, moved, sends[some])
        # Terms are added up in another order.
        begins = np.cumsum(number) - number
        return np.asarray((1 - 1e-9) * np.minimum.reduceat(seconds / self.bounds.tokens[key], begins))

    def _activations(self, variant: Index, size: Index, mapping: Index) -> tuple[Mapping[str, RoleSums], Index]:
        """Sums of one microbatch without weight traffic, worked out once for what is mapped alike; which are whose."""
        if not isinstance(self.mappings, Placements):
            rows = self.bounds.rows_of(variant, size)
            return self.bounds.activations, rows
        alike = self.mappings.alike[mapping].astype(int)
        variants, which = np.unique(variant, return_inverse=True)
        first, entry = distinct([size, alike])
        if len(first) > CHUNK and len(variants) > 1:
            mine = [np.flatnonzero(which == k) for k in range(len(variants))]
            each = [self._activations(variant[own], size[own], mapping[own]) for own in mine]
            lengths = [int(at.max()) + 1 for _, at in each]
            index = np.zeros(len(variant), int)
            for own, (_, at), begin in zip(mine, each, np.cumsum(lengths) - lengths, strict=True):
                index[own] = begin + at
            return joined([found for found, _ in each], lengths), index
        # Each variant for what any has: so those that differ in remat alone share prices, and parts of mixes.
        sizes, links = size[first], self.mappings.links(mapping[first])
        prices = dict[LayoutChoices, ActivationPrices]()
        known = dict[LayoutChoices, Mapping[str, RoleSums]]()

        def sums(choices: LayoutChoices) -> Mapping[str, RoleSums]:
            if choices not in known:
                shared = choices.but(remat="none")
                if shared not in prices:
                    prices[shared] = self.bounds.prices(choices, links)
                known[choices] = self.bounds.sums(sizes, prices[shared], choices)
            return known[choices]

        found = [self.bounds.mixed(self.network.variants[v], sums) for v in variants]
        return joined(found, [len(first)] * len(found)), which * len(first) + entry

    def _sends(self, variant: Index, key: Index, mapping: Index) -> Array:
        """Seconds of one send between neighbouring stages, 0 where there is one stage."""
        found = np.zeros(len(key))
        pipelines = np.flatnonzero(self.bounds.stages[self.bounds.pipe[key]] > 1)
        for v in np.unique(variant[pipelines]):
            mine = pipelines[variant[pipelines] == v]
            size, choices = self.bounds.size[key[mine]], self.network.variants[v].with_remat()
            rates = rates_of(self.bounds.problem, choices, self.mappings.links(mapping[mine]), bounded=False)
            scattered = rates.calibration.scattered_sends and not choices.sequence_parallel
            senders = take(self.network.table.sizes.tensor, size) if scattered else 1.0
            found[mine] = send_seconds(rates, self._boundary_bytes(choices)[size], senders)
        return found

    def _boundary_bytes(self, choices: LayoutChoices) -> Array:
        """Bytes that a device sends to the next stage per microbatch and direction, of all sizes of its own work."""
        if choices not in self._boundaries:
            problem, bounds = self.bounds.problem, self.bounds
            total = problem.lowered.between_stages(choices, problem.model.between_stages)
            num_bytes = local_extents(problem, choices, self.network.table.sizes).weighted(total)
            self._boundaries[choices] = np.broadcast_to(num_bytes, bounds.num_sizes)
        return self._boundaries[choices]

    def _evaluate_traffic(self, choices: LayoutChoices, mapping: Index) -> dict[str, WeightTraffic]:
        problem = self.bounds.problem

        def made() -> CollectivePrices:
            mesh = self.network.table.axes(self.mappings.meshes(mapping))
            return weight_prices(problem, choices, mesh, self.mappings.links(mapping))

        prices = self._prices((choices.expert_tensor_parallel, mapping.tobytes()), made)
        return evaluate_weight_traffic(problem, choices, prices)

    def _seconds(
        self, s: int, key: Index, sums: Mapping[str, RoleSums], traffic: Mapping[str, WeightTraffic], send: Array
    ) -> Num:
        """Seconds of a step: its passes with the weight traffic that they expose, what happens once, and the update."""
        late: dict[str, RoleSums] = {}
        busy: Num = 0.0
        for role, own in sums.items():
            forward = self._exposed(traffic[role][0], own.cover[Purpose.WEIGHTS])
            backward = self._exposed(traffic[role][1], own.cover[Purpose.GRADIENTS]) + traffic[role][4]
            busy = busy + sum(own.passes.values()) - sum(own.exchanged.values()) + forward + backward
            late[role] = _with(own, forward, backward)
        # No schedule is faster than all devices computing all the time.
        all_busy = busy * self.bounds.per_token[key] * self.bounds.tokens[key]
        # Where gradients of weights wait for nothing, it matters to which pass what is exposed belongs.
        pipeline, splits = self.bounds.pipeline(s)[0], self.bounds.pipeline(s)[0].schedule.splits_backward
        passes: Num = maximum(self.bounds.makespan(sums if splits else late, s, key), all_busy)
        once = self._once(s, self.bounds.pipe[key], sums, traffic, self._may_be_busiest(s, key, sums, late, traffic))
        if not send.any():
            return passes + once
        waits = self.calibration.sends_waited_for(pipeline.schedule.name)
        sent = pipeline.at(self.bounds.pipe[key]).least_sends(waits, send, in_step=self.calibration.compiled)
        return passes + once + sent

    def _may_be_busiest(
        self,
        s: int,
        key: Index,
        sums: Mapping[str, RoleSums],
        late: Mapping[str, RoleSums],
        traffic: Mapping[str, WeightTraffic],
    ) -> tuple[Condition, Condition, Condition]:
        """Whether the first device, one between and the last may be at work longest.

        With all of the weight traffic exposed none works longer. Of ideal links, and where gradients of positions are
        summed, only that is known which devices there are.
        """
        pipeline, model = self.bounds.pipeline(s)[0].at(self.bounds.pipe[key]), self.bounds.problem.model
        if isinstance(self.mappings, IdealMapping) or "P" in model.sizes or not (pipeline.shape.stages > 1).any():
            return True, pipeline.has_middle, True
        most = {role: _with(own, traffic[role][0], traffic[role][1] + traffic[role][4]) for role, own in sums.items()}
        calibration, layers = self.bounds.problem.calibration, self.bounds.layers
        busiest = (1 - 1e-9) * maximum(*passes_works(late, calibration, layers, pipeline))
        first, between, last = (work >= busiest for work in passes_works(most, calibration, layers, pipeline))
        return first, between & pipeline.has_middle, last

    def _exposed(self, moved: Num, cover: Num) -> Num:
        """Seconds of traffic that stick out of `cover`, or that its compute loses."""
        lost = self.calibration.interference
        exposed: Num = maximum(lost * moved, moved - (1 - lost) * cover)
        return exposed

    def _once(
        self,
        s: int,
        pipe: Index,
        sums: Mapping[str, RoleSums],
        traffic: Mapping[str, WeightTraffic],
        busiest: tuple[Condition, Condition, Condition],
    ) -> Num:
        """Exposed seconds of what happens once a step on the device on which that is least, and the longest update.

        Gradients hide behind the last backward pass, new weights behind the next forward pass.

        Args:
            s, pipe: schedule and sizes of the pipelines.
            sums, traffic: by role, what hides, and what moves.
            busiest: which of the devices may be the busiest.
        """
        least: Num = math.inf
        update: Num = 0.0
        pipeline, _, _, devices = self.bounds.pipeline(s)
        shape = pipeline.at(pipe).shape
        for shares, may_be in zip(devices, busiest, strict=True):
            there: Num = 0.0
            stored = {role: take(share, pipe) for role, share in shares.items()}
            for row, purpose in ((2, Purpose.GRADIENTS), (3, Purpose.WEIGHTS)):
                moved: Num = 0.0
                cover: Num = 0.0
                for role, of in traffic.items():
                    moved = moved + stored[role] * of[row]
                    if not self.calibration.late_exchange:
                        cover = cover + stored[role] * sums[role].cover[purpose]
                layers = self.bounds.layers * stored["layer"]
                there = there + self._exposed(moved, cover * free_share(purpose, self.calibration, shape, layers))
            least = minimum(least, where(may_be, there, math.inf))
            update = maximum(update, sum(stored[role] * of[5] for role, of in traffic.items()))
        return least + update


def _with(own: RoleSums, forward: Num, backward: Num) -> RoleSums:
    """The same with seconds of weight traffic in its passes."""
    found = replace(own, passes=Sums(own.passes))
    found.passes.add("forward", forward)
    found.passes.add("weights", backward)
    return found
