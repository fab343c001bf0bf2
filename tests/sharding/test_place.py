"""Placed blocks, run on devices that hold only their own part: forward, backward and the step, against one device.

What is moved is moved literally; what is computed is computed from what a device itself holds. So a collective that is
missing, superfluous or over the wrong devices shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, reduce
from itertools import combinations as subsets
from itertools import product
from operator import or_
from typing import NamedTuple, TypeVar

import numpy as np
import pytest

from meshwise.core.tensors import Attention, Block, Einsum, Fused, Kind, Op, Tensor
from meshwise.models import load_model, model_names
from meshwise.sharding.place import place_block
from meshwise.sharding.placed import LocalOp, PlacedBlock, Transfer
from meshwise.sharding.remat import REMAT_POLICIES, remat_policy
from meshwise.sharding.strategy import Strategy, context, data, expert, fsdp, tensor, training_strategy, ulysses
from tests.sharding.placed_cases import AXES, EXPERTS_OF_TENSOR, Case, make_case, random_case
from tests.sharding.programs import Arrays, Results, differences
from tests.sharding.tiny_models import BLOCKS, LAYERS, MIXTURES

T = TypeVar("T")
TWO_OF_EACH = dict.fromkeys(AXES, 2)
ONE_OF_EACH = dict.fromkeys(AXES, 1)

#: Meshes of 16 devices that together have every axis, and the two around attention and the two around experts at once.
SMALL_MESHES = (
    {**ONE_OF_EACH, "data": 2, "fsdp": 2, "context": 2, "tensor": 2},
    {**ONE_OF_EACH, "fsdp": 2, "context": 2, "ulysses": 2, "tensor": 2},
    {**ONE_OF_EACH, "data": 2, "ulysses": 2, "expert": 2, "tensor": 2},
)
every_block = pytest.mark.parametrize("name", BLOCKS)


def prove(case: Case) -> None:
    wrong = differences(case.run(), case.run_on_one_device())
    assert not wrong, f"{wrong} on {case.mesh}, remat {case.policy}"


@every_block
def test_random_placements_compute_what_one_device_computes(name: str) -> None:
    prove(random_case(name, 0))


@pytest.mark.slow
@every_block
def test_many_random_placements_compute_what_one_device_computes(name: str) -> None:
    """Slow because it runs 900 placed blocks: rare meetings of mesh order, strategy order and policy."""
    for seed in range(1, 16):
        prove(random_case(name, seed))


class Choices(NamedTuple):
    """What the strategies of a combination can be told."""

    zero: int = 0
    sharded: bool = True
    ring: bool = False
    sequence: bool = True
    experts: tuple[str, ...] = ("Fe",)


#: Every value of every choice, and the pairs of them that meet in one rule table.
CHOICES = (
    Choices(),
    Choices(zero=1, experts=("E", "C")),
    Choices(zero=2, experts=("Fe", "C"), ring=True),
    Choices(zero=0, sharded=False, experts=("Fe", "C")),
    Choices(zero=1, sharded=False, sequence=False),
    Choices(zero=2, sharded=False, experts=("E", "C")),
    Choices(sequence=False, experts=("E",)),
)


def joined(axes: Iterable[str], c: Choices) -> Strategy:
    """The strategies of these axes, in the order in which training joins them where the order counts."""
    parts = {
        "fsdp": fsdp(),
        "context": context(sharded=c.sharded, zero=c.zero, ring=c.ring),
        "expert": expert(sharded=c.sharded, zero=c.zero),
        "data": data(zero=c.zero),
        "tensor": tensor(sequence=c.sequence, experts=c.experts),
        "ulysses": ulysses(sharded=c.sharded, zero=c.zero),
    }
    return reduce(or_, (part for axis, part in parts.items() if axis in axes), Strategy())


#: Every set of strategies that 16 devices can be two of each for.
SETS = [s for size in range(5) for s in subsets(AXES, size)]


@pytest.mark.parametrize("axes", SETS, ids="+".join)
def test_every_combination_of_strategies(axes: tuple[str, ...]) -> None:
    """On a mixture where there are experts to split, and with other choices for each set."""
    number = SETS.index(axes)
    name = "mixtral" if "expert" in axes else ("llama", "gpt-2", "deepseek-v3")[number % 3]
    prove(make_case(name, joined(axes, CHOICES[number % len(CHOICES)]), dict.fromkeys(axes, 2), "matmuls"))


@pytest.mark.slow
@pytest.mark.parametrize("choices", CHOICES, ids=str)
@pytest.mark.parametrize("axes", SETS, ids="+".join)
def test_every_combination_of_strategies_with_every_choice(axes: tuple[str, ...], choices: Choices) -> None:
    """Slow because it runs 370 placed blocks: every set of strategies with all choices, dense or mixed in turn."""
    name = ("llama", "gpt-2", "deepseek-v3")[(SETS.index(axes) + CHOICES.index(choices)) % 3]
    prove(make_case(name, joined(axes, choices), dict.fromkeys(axes, 2), "matmuls"))


def turn(name: str, of: Sequence[T]) -> T:
    """One of these for each block, in turn."""
    return of[list(BLOCKS).index(name) % len(of)]


@every_block
def test_a_remat_policy_gives_the_same_numbers(name: str) -> None:
    prove_policy(name, turn(name, list(REMAT_POLICIES)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", REMAT_POLICIES)
@every_block
def test_every_remat_policy_gives_the_same_numbers(name: str, policy: str) -> None:
    """Slow because each block runs with every policy; by default with one of them, in turn."""
    prove_policy(name, policy)


def prove_policy(name: str, policy: str) -> None:
    strategy = training_strategy(zero=1, experts=("Fe", "C"), ring=True)
    mesh = {**ONE_OF_EACH, "context": 2, "expert" if name in MIXTURES else "fsdp": 2, "tensor": 2}
    prove(make_case(name, strategy, mesh, policy))


# The referee itself: its numbers on one device are those of the function and its true gradient.


def total(results: Results, case: Case) -> float:
    """The outputs weighed by the gradients that are said to arrive for them."""
    return sum(
        float((results.outputs[i][name] * batch.output_gradients[f"d_{name}"]).sum())
        for i, batch in enumerate(case.microbatches)
        for name in case.block.outputs
    )


def shifted(arrays: Arrays, along: Arrays, step: float) -> Arrays:
    return {n: a + step * along[n] if n in along else a for n, a in arrays.items()}


@every_block
def test_the_derived_backward_pass_is_the_gradient(name: str) -> None:
    case = make_case(name, Strategy(), {}, "none", seed=3)
    numbers, step = np.random.default_rng(5), 1e-5
    weights = {n: numbers.normal(size=w.shape) for n, w in case.weights.items()}
    (batch,) = case.microbatches
    inputs = {n: numbers.normal(size=x.shape) for n, x in batch.inputs.items() if x.dtype == np.float64}

    def value(sign: int) -> float:
        moved = replace(batch, inputs=shifted(batch.inputs, inputs, sign * step))
        there = replace(case, weights=shifted(case.weights, weights, sign * step), microbatches=(moved,))
        return total(there.run(), there)

    slope = (value(1) - value(-1)) / (2 * step)
    found = case.run()
    gradients = {**found.gradients, **{n.removeprefix("d_"): g for n, g in found.tied_gradients.items()}}
    assert set(gradients) == set(weights)
    expected = sum(float((gradients[n] * w).sum()) for n, w in weights.items())
    expected += sum(float((found.input_gradients[0][n] * x).sum()) for n, x in inputs.items())
    assert slope == pytest.approx(expected, rel=1e-6, abs=1e-6)


# No collective is there for nothing.


def without_one_transfer(placed: PlacedBlock) -> Iterator[tuple[Transfer, PlacedBlock]]:
    for part in ("forward", "backward", "step"):
        items = getattr(placed, part)
        for i, item in enumerate(items):
            if isinstance(item, Transfer):
                yield item, replace(placed, **{part: (*items[:i], *items[i + 1 :])})


def is_missed(case: Case, placed: PlacedBlock, expected: Results) -> bool:
    """Whether devices cannot go on, hold different copies, or end with other numbers."""
    try:
        return bool(differences(case.run(placed), expected))
    except AssertionError:
        return True


def prove_none_is_useless(case: Case, sample: int | None = None) -> None:
    expected = case.run_on_one_device()
    candidates = [
        (t, rest) for t, rest in without_one_transfer(case.placed()) if t.collective.group_size(case.mesh) > 1
    ]
    assert candidates
    choose = random.Random(0)  # noqa: S311 - a seed, no secret
    chosen = choose.sample(candidates, min(sample or len(candidates), len(candidates)))
    for item, rest in chosen:
        assert is_missed(case, rest, expected), f"{item.tensor}: {item.collective} for {item.waits!r} is not needed"


@every_block
def test_no_transfer_can_be_dropped(name: str) -> None:
    """On one of three meshes each, in turn; the slow proof below is on all of them."""
    strategy = training_strategy(zero=1, experts=("Fe", "C"), ring=True)
    prove_none_is_useless(make_case(name, strategy, turn(name, SMALL_MESHES), "full"), sample=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choices", "policy"),
    [(CHOICES[0], "full"), (CHOICES[1], "full"), (CHOICES[2], "full"), (CHOICES[4], "none"), (CHOICES[5], "none")],
)
@every_block
def test_no_transfer_can_be_dropped_of_all(name: str, choices: Choices, policy: str) -> None:
    """Slow because each of 1,200 transfers is left out in a run of its own: not one of them is superfluous."""
    mesh = SMALL_MESHES[(list(BLOCKS).index(name) + CHOICES.index(choices)) % len(SMALL_MESHES)]
    prove_none_is_useless(make_case(name, joined(AXES, choices), mesh, policy), sample=4)


def test_the_referee_refuses_what_a_device_does_not_hold() -> None:
    case = make_case("llama", tensor(sequence=False), {"tensor": 2}, "none")
    placed = case.placed()
    kept = tuple(h for h in placed.kept if h.tensor.name != "gate")
    with pytest.raises(AssertionError, match=r"gate is needed as .*, held as nothing"):
        case.run(replace(placed, kept=kept))


# Work is divided, not repeated.


def is_repeated_index(op: Op, axis: str) -> bool:
    """K, where it stands beside N = K x G in attention, and groups beside their heads in a recurrence."""
    if isinstance(op, Fused):
        return axis in op.together
    return isinstance(op, Attention) and axis == op.kv_heads_axis != op.heads_axis


@pytest.mark.parametrize("experts", EXPERTS_OF_TENSOR[True], ids="+".join)
@pytest.mark.parametrize("name", [*LAYERS, "head", "head tied"])
def test_every_matmul_is_divided_among_all_devices(name: str, experts: tuple[str, ...]) -> None:
    placed = make_case(name, training_strategy(zero=0, experts=experts), TWO_OF_EACH, "full").placed()
    items = [i for i in (*placed.forward, *placed.backward) if isinstance(i, LocalOp)]
    matmuls = [i for i in items if isinstance(i.op, Einsum | Attention | Fused)]
    assert len(matmuls) > len([op for op in placed.block.ops if isinstance(op, Einsum)])
    for item in matmuls:
        splits = [s for a, s in item.splits if not is_repeated_index(item.op, a)]
        assert sorted(m for s in splits for m in s) == sorted(AXES), item.op.name


@every_block
def test_weights_that_are_used_otherwise_than_stored_are_listed(name: str) -> None:
    """An embedding table too, which the backward pass does not read."""
    placed = make_case(name, training_strategy(zero=0, sequence=True), TWO_OF_EACH, "none").placed()
    stored = {h.tensor.name: h.sharding for h in (*placed.weights, *placed.tied)}
    items = [i for i in (*placed.forward, *placed.backward) if isinstance(i, LocalOp)]
    used = {h.tensor.name: h.sharding for i in items for h in i.inputs if h.tensor.name in stored}
    assert used.keys() == stored.keys()
    assert {h.tensor.name: h.sharding for h in placed.gathered} == {n: s for n, s in used.items() if s != stored[n]}


# What real models are made of can be placed.


@pytest.mark.parametrize("name", model_names())
def test_every_model_in_the_catalog_can_be_placed(name: str) -> None:
    for block in load_model(name).train_program():
        prove_placed(replace(block, repeat=1))


@cache
def prove_placed(block: Block) -> None:
    for sequence, policy in ((False, "full"), *product((True,), REMAT_POLICIES)):
        placed = place_block(block, training_strategy(zero=1, sequence=sequence), remat_policy(policy))
        assert {h.tensor.name for h in placed.weights} == {t.name for t in block.weights}
        assert {h.tensor.name for h in placed.gradients} == {f"d_{t.name}" for t in block.weights}
        assert {h.tensor.name for h in placed.optimizer} == {t.name for t in block.weights}
        assert {h.tensor.name for h in placed.tied} == block.tied
        assert {h.tensor.name for h in placed.tied_gradients} == {f"d_{n}" for n in block.tied}


@pytest.mark.parametrize("zero", range(3))
def test_idle_weights_are_held_as_others_are_and_never_moved(zero: int) -> None:
    weight = Tensor("w", ("D", "F"), Kind.WEIGHT)
    strategy = training_strategy(zero=zero, sequence=True)
    run = Block(
        "layer",
        (Einsum(name="up", inputs=(Tensor("x", ("B", "T", "D")), weight), output=Tensor("x_out", ("B", "T", "F"))),),
    )
    idle = Block("vision", (), role="embed", inputs=(), outputs=(), idle=(weight,))
    placed, like = (place_block(b, strategy, remat_policy("none")) for b in (idle, run))
    assert (placed.weights, placed.optimizer) == (like.weights, like.optimizer)
    assert [h.tensor for h in placed.gradients] == [h.tensor for h in like.gradients]
    assert [h.sharding.splits for h in placed.gradients] == [h.sharding.splits for h in like.gradients]
    assert not any(h.sharding.unreduced for h in placed.gradients)
    assert placed.forward == placed.backward == placed.step == placed.kept == placed.gathered == ()
