"""Every layout there is on a small network, listed from the definitions and priced by the evaluator.

It shares with the search the evaluator and the bounds of meshes that model and job give, nothing else: sizes and
placements are factorings, cuts of the batch divisors, choices a plain product. Choices that mean nothing on a mesh (the
context method without a context axis) are left out there, as one of them stands for all.
"""

import itertools
import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwise.costs.evaluate import evaluated, offloaded
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.makespans import PipelineShape
from meshwise.costs.network import PlacedWires
from meshwise.costs.pipeline import Pipeline
from meshwise.costs.schedules import find_schedule
from meshwise.sharding.layout import MESH_AXES, Layout
from tests.costs.small_problems import all_factorings, divisors

#: Pieces of the model that one device of a pipeline holds, by schedule; of "interleaved" any number from two.
PIECES = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "zb-v": 2, "dualpipe": 1, "dualpipe-v": 2}

#: The axes that tell kinds of layouts in a ranking apart.
KIND = ("tensor", "ulysses", "context", "expert", "stage")


@dataclass
class Places:
    """Meshes on the network with cuts of the batch, one row each."""

    mesh: np.ndarray  # [rows, axes]
    factors: np.ndarray  # [rows, axes, dimensions]
    micro_batch: np.ndarray
    num_microbatches: np.ndarray

    def __len__(self):
        return len(self.mesh)

    def __getattr__(self, axis):
        return self.mesh[:, MESH_AXES.index(axis)]

    def take(self, rows):
        return Places(*(getattr(self, f.name)[rows] for f in fields(self)))

    def candidates(self, **others):
        axes = {a: getattr(self, a) for a in MESH_AXES}
        return Candidates(**axes, micro_batch=self.micro_batch, num_microbatches=self.num_microbatches, **others)

    def wires(self, problem, fabric):
        dimensions = range(self.factors.shape[2])
        extents = {a: [self.factors[:, i, d] for d in dimensions] for i, a in enumerate(MESH_AXES)}
        return PlacedWires(fabric, extents, problem.routing)


class Point(NamedTuple):
    """A complete layout, priced."""

    seconds: float  # per token
    memory: float
    kind: tuple[int, ...]


@dataclass
class Points:
    """Complete layouts, one row each."""

    seconds: np.ndarray  # per token
    memory: np.ndarray
    mesh: np.ndarray
    offloads: np.ndarray  # whether the host holds anything
    fits: np.ndarray
    copies: np.ndarray  # saves more memory than another that fits

    def take(self, rows):
        return Points(*(getattr(self, f.name)[rows] for f in fields(self)))

    @property
    def fitting(self):
        return self.take(self.fits & ~self.copies)

    def best_of_each_kind(self, chips=1, top=None):
        """Fastest first."""
        kinds = self.mesh[:, [MESH_AXES.index(a) for a in KIND]].astype(int)
        order = np.lexsort((self.memory, self.seconds))
        seen = {}
        for i in order:
            key = tuple(kinds[i])
            if key not in seen:
                seen[key] = Point(float(self.seconds[i]) * chips, float(self.memory[i]), key)
        return list(seen.values())[:top]

    def front(self, span):
        """Of time against memory."""
        order = np.lexsort((self.memory, self.seconds))
        memory = self.memory[order]
        lowest = np.minimum.accumulate(memory)
        kept = order[np.r_[True, memory[1:] < lowest[:-1]]]
        points = [Point(float(self.seconds[i]), float(self.memory[i]), ()) for i in kept]
        return [p for p in points if p.seconds <= span * points[0].seconds]


@lru_cache
def all_ways(room):
    """[ways, axes, dimensions] extents of all axes on a network, every chip in use."""
    columns = [list(all_factorings(size, len(MESH_AXES))) for size in room]
    return np.array([np.transpose(c) for c in itertools.product(*columns)], float)


def all_places(problem, fabric, fixed=None):
    """Every mesh, way to lay it on the network, and exact cut of the batch, that model and job allow."""
    model, job = problem.model, problem.job
    heads, length = model.sizes["N"], int(job.seq_len)
    experts = min((m.experts for m in model.mixtures), default=1)
    positions = max(1, length // 128)
    found = []
    for way in all_ways(fabric.sizes):
        n = {a: int(math.prod(way[i])) for i, a in enumerate(MESH_AXES)}
        share, rest = divmod(job.sequences, n["data"] * n["fsdp"] * n["expert"])
        possible = (
            not rest
            and n["stage"] <= model.num_layers
            and experts % n["expert"] == 0
            and n["tensor"] <= heads
            and (n["ulysses"] == 1 or n["tensor"] * n["ulysses"] <= heads)
            and n["context"] * n["ulysses"] <= positions
            and length % n["context"] == 0
            and length % n["ulysses"] == 0
            and all(n[a] == size for a, size in (fixed or {}).items())
        )
        if possible:
            found += [(list(n.values()), way, micro, share // micro) for micro in divisors(int(share))]
    return Places(*(np.array(column, float) for column in zip(*found, strict=True)))


def everything(problem, fabric, choices, *, capacity=None, fixed=None, tools=()):
    """Price every layout; `capacity` is the HBM that it may fill, and one of `tools` has to take it."""
    places = all_places(problem, fabric, fixed)
    capacity = problem.cluster.chip.hbm_usable if capacity is None else capacity
    parts = []
    for structure, share, rows in structures_on(problem, places, choices):
        mine = places.take(rows)
        parts += price(problem, fabric, mine, structure, share, choices, capacity, tools)
    return Points(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Points)))


def structures_on(problem, places, choices):
    """Every choice that is no size, the share of layers that recompute, and the places where it is no copy."""
    layers = problem.model.num_layers
    some = {round(layers * s) for s in (0.25, 0.5, 0.75)} - {0, layers}
    partial = (None, *sorted(some)) if "none" in choices.remat else (None,)  # what the others of the layers keep
    remats = [(policy, n) for policy in choices.remat for n in (partial if policy == "full" else (None,))]
    experts = choices.expert_tensor_parallel if problem.model.mixtures else (True,)
    stored = ({0, *choices.zero}, {True, *choices.fully_sharded})
    options = (remats, *stored, experts, choices.context_method, (False, True))
    for (remat, n), zero, sharded, expert_tensor, method, exchanges in itertools.product(*options):
        shared = places.context * places.ulysses * places.expert > 1
        means = (places.expert > 1) == exchanges
        # What means nothing on a mesh is as if it had not been chosen.
        means &= np.where(shared, sharded in choices.fully_sharded, sharded)
        means &= np.where((places.data > 1) | (shared & (not sharded)), zero in choices.zero, zero == 0)
        means &= (places.tensor > 1) | (expert_tensor == experts[0])
        means &= (places.context > 1) | (method == choices.context_method[0])
        if means.any():
            structure = LayoutChoices(
                zero=zero,
                sequence_parallel=True,
                remat=remat,
                fully_sharded=sharded,
                expert_tensor_parallel=expert_tensor,
                context_method=method,
                exchanges=exchanges,
                partial_remat=n is not None,
            )
            yield structure, 1.0 if n is None else n / layers, np.flatnonzero(means)


def schedules_on(problem, places, choices):
    """Every schedule with its virtual stages, and the places where it can run with a layer for each piece."""
    layers = problem.model.num_layers
    sizes = list(zip(places.stage.astype(int), places.num_microbatches.astype(int), strict=True))
    for name in choices.schedule:
        for pieces in range(2, layers + 1) if name == "interleaved" else (PIECES[name],):
            virtual = pieces if name == "interleaved" else 1

            def can(p, m, name=name, pieces=pieces, virtual=virtual):
                if p == 1:
                    return name == choices.schedule[0]
                return p * pieces <= layers and find_schedule(name).why_not(PipelineShape(p, m, virtual)) is None

            runs = {size: can(*size) for size in set(sizes)}
            rows = np.flatnonzero([runs[size] for size in sizes])
            if len(rows):
                yield Pipeline.of(name, places.stage, places.num_microbatches, float(virtual)), rows, name, virtual


def taken(tools, places, structure, share, layers, name, pieces, offload):  # noqa: PLR0917 -- likewise
    """Which places one of some tools takes, layout by layout."""
    known = {}

    def takes(row, micro, number):
        mesh = {a: int(n) for a, n in zip(MESH_AXES, row, strict=True)}
        layout = Layout(
            **mesh,
            **{n: getattr(structure, n) for n in ("zero", "fully_sharded", "remat", "sequence_parallel", "loss")},
            expert_tensor_parallel=structure.expert_tensor_parallel,
            context_method=structure.context_method,
            schedule=name,
            virtual_stages=pieces,
            remat_layers=None if share == 1 else round(share * layers),
            offload=offload,
            micro_batch=int(micro),
            num_microbatches=int(number),
        )
        return any(tool.runs(layout) for tool in tools)

    for key in zip(map(tuple, places.mesh), places.micro_batch, places.num_microbatches, strict=True):
        if key not in known:
            known[key] = takes(*key)
        yield known[key]


def price(problem, fabric, places, structure, share, choices, capacity, tools=()):  # noqa: PLR0917 -- what a layout is made of
    """All schedules, both losses, and all that the host can hold."""
    candidates = places.candidates(remat_share=share)
    host = problem.cluster.chip.host_memory
    tokens = candidates.sequences * problem.job.seq_len
    wires = places.wires(problem, fabric)
    with np.errstate(all="ignore"):  # a formula means nothing where its schedule cannot run
        losses = {way: evaluated(problem, replace(structure, loss=way), candidates, wires) for way in choices.loss}
        for pipeline, rows, name, pieces in schedules_on(problem, places, choices):

            def column(value, rows=rows):
                return np.broadcast_to(value, len(places))[rows]

            def held(size, loss, which, rows=rows, pipe=(name, pieces)):
                of = places.take(rows), replace(structure, loss=loss), share, problem.model.num_layers, *pipe
                return np.where(list(taken(tools, *of, which)), size, math.inf) if tools else size

            plain = {loss: shared.costs(pipeline) for loss, shared in losses.items()}
            seconds = column(plain[choices.loss[0]].step.expected / tokens)
            mesh, fits = places.mesh[rows], {}
            for which, loss in itertools.product(choices.offload, choices.loss):
                smaller = [f for (o, _), f in fits.items() if set(o) <= set(which)]
                more = np.any([np.zeros(len(rows), bool), *smaller], axis=0)
                if more.all() or (which and host is None):
                    continue
                costs = offloaded(plain[loss], which) if which else plain[loss]
                slower = column(costs.step.expected / tokens)
                if not which:
                    assert (slower == seconds).all(), "a loss in chunks takes no other time"
                assert (slower >= seconds * (1 - 1e-12)).all(), "a layout without its host is never slower"
                possible = column(costs.host_memory["total"]) <= host if which else True
                size = held(np.where(possible, column(costs.memory["total"]), math.inf), loss, which)
                fits[which, loss] = size <= capacity
                yield Points(slower, size, mesh, np.full(len(rows), bool(which)), fits[which, loss], more)
