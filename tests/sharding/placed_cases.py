"""A block with numbers in it, on a random small mesh, under a random strategy: what the proofs of `place` run.

Test support. Not here: what is to be proved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from operator import or_
from typing import TypedDict

import numpy as np

from meshwise.core.tensors import Block
from meshwise.sharding import Mesh
from meshwise.sharding.place import place_block
from meshwise.sharding.placed import PlacedBlock
from meshwise.sharding.remat import REMAT_POLICIES, remat_policy
from meshwise.sharding.strategy import Strategy, context, data, expert, fsdp, tensor, ulysses
from tests.sharding.formulas import Routing
from tests.sharding.programs import Arrays, Microbatch, Results, Step
from tests.sharding.tiny_models import Shape, fixed_routing, random_values, tiny_block

MAX_DEVICES = 16

#: Gives a block, and the sizes of its axes, as a job trains it.
Change = Callable[[Block, dict[str, int]], tuple[Block, dict[str, int]]]
AXES = ("data", "fsdp", "context", "ulysses", "expert", "tensor")

#: The ways in which tensor parallelism treats experts, without and with sequence parallelism.
EXPERTS_OF_TENSOR = {False: (("Fe",), ("E",)), True: (("Fe",), ("Fe", "C"), ("E", "C"))}


class Shared(TypedDict):
    """How the devices of an axis share out the weights that they all use."""

    sharded: bool
    zero: int


@dataclass(frozen=True)
class Case:
    """A block, the numbers in it, and how it is to be placed."""

    block: Block
    sizes: Mapping[str, int]
    mesh: Mesh
    strategy: Strategy
    policy: str
    weights: Arrays
    microbatches: tuple[Microbatch, ...]
    routing: Routing | None

    def placed(self) -> PlacedBlock:
        return place_block(self.block, self.strategy, remat_policy(self.policy))

    def run(self, placed: PlacedBlock | None = None) -> Results:
        placed = placed or self.placed()
        return Step(placed, self.strategy, self.mesh, self.sizes, self.weights, self.routing).run(self.microbatches)

    def run_on_one_device(self) -> Results:
        return replace(self, mesh=Mesh(()), strategy=Strategy(), policy="none").run()


def make_case(
    name: str,
    strategy: Strategy,
    mesh: Mapping[str, int],
    policy: str,
    *,
    seed: int = 0,
    microbatches: int = 1,
    change: Change | None = None,
) -> Case:
    """The block of that name, changed if so, its sizes chosen so that every axis divides by the mesh."""
    numbers = np.random.default_rng(seed)
    n = {a: mesh.get(a, 1) for a in AXES}
    choose = random.Random(seed)  # noqa: S311 - a seed, no secret
    shape = Shape(
        stored=prod(n.values()) // n["tensor"],
        tensor=n["tensor"],
        heads=n["tensor"] * n["ulysses"],
        experts=n["expert"] * n["tensor"],
        choose=choose,
        recurrent=n["tensor"] * n["ulysses"] * n["context"],
    )
    batch, queries = n["data"] * n["fsdp"] * n["expert"] * 2, n["context"] * n["ulysses"] * n["tensor"] * 2
    block, sizes = tiny_block(name, shape, batch=batch, queries=queries)
    if change is not None:
        block, sizes = change(block, sizes)
    weights, batches = random_values(block, sizes, numbers, microbatches)
    on = Mesh.of(mesh)
    routing = fixed_routing(block, strategy, on, sizes)
    return Case(block, sizes, on, strategy, policy, weights, tuple(batches), routing)


def random_case(name: str, seed: int, change: Change | None = None) -> Case:
    """One to three devices along each of six axes; every strategy, all in any order; one or two microbatches."""
    choose = random.Random(f"{name} {seed}")  # noqa: S311 - a seed, no secret
    while True:
        mesh = {axis: choose.choice([1, 2, 2, 3]) for axis in choose.sample(AXES, len(AXES))}
        if prod(mesh.values()) <= MAX_DEVICES:
            break
    policy, microbatches = choose.choice([*REMAT_POLICIES]), choose.choice([1, 1, 2])
    return make_case(name, random_strategy(choose), mesh, policy, seed=seed, microbatches=microbatches, change=change)


def random_strategy(choose: random.Random) -> Strategy:
    """Some or all of the strategies, mostly all, joined in any order."""
    sequence = choose.random() < 0.6
    shared: Shared = {"sharded": choose.random() < 0.5, "zero": choose.randrange(3)}
    parts = [
        data(zero=shared["zero"]),
        fsdp(),
        context(**shared, ring=choose.random() < 0.5),
        ulysses(**shared),
        expert(**shared),
        tensor(sequence=sequence, experts=choose.choice(EXPERTS_OF_TENSOR[sequence])),
    ]
    return reduce(or_, choose.sample(parts, choose.choice([1, 2, 3, 4, 5, 6, 6, 6, 6])))
