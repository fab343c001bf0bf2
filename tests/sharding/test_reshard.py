"""Resharding: which steps are chosen, proof by execution, and that nothing cheaper exists."""

import heapq
import random
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.core.dtypes import DType
from meshwise.core.errors import ShardingError
from meshwise.sharding import Collective, CollectiveKind, Mesh, Sharding, reshard
from meshwise.sharding.reshard import nearest, nominal_bytes_sent
from tests.each import each
from tests.sharding.devices import apply, apply_all, distribute, holds, random_array, random_sharding

MESHES = [
    Mesh.of(X=2),
    Mesh.of(X=3),
    Mesh.of(X=2, Y=2),
    Mesh.of(X=2, Y=3),
    Mesh.of(X=2, Y=3, Z=2),
    Mesh.of(Z=2, Y=2, X=2),
]


def s(text: str, unreduced: str = "") -> Sharding:
    """`s("XY|Z|")` splits dimension 0 over X, Y and dimension 1 over Z."""
    return Sharding(tuple(tuple(part) for part in text.split("|")), frozenset(unreduced))


def words(steps) -> list[str]:
    return [f"{c.kind} {''.join(c.mesh_axes)}" for c in steps]


@each(
    "source, target, steps",
    [
        (s("X|"), s("X|"), []),
        (s("X|"), s("|"), ["all-gather X"]),
        (s("|"), s("X|"), ["slice X"]),
        (s("|", "X"), s("|"), ["all-reduce X"]),
        (s("|", "X"), s("X|"), ["reduce-scatter X"]),
        (s("|", "X"), s("|X"), ["reduce-scatter X"]),
        (s("X|"), s("|X"), ["all-to-all X"]),
        # Axes of one fate go together.
        (s("XYZ|"), s("|"), ["all-gather XYZ"]),
        (s("XYZ|"), s("X|"), ["all-gather YZ"]),
        (s("XYZ|"), s("X|YZ"), ["all-to-all YZ"]),
        (s("|", "XYZ"), s("|"), ["all-reduce XYZ"]),
        (s("|", "XYZ"), s("YX|", "Z"), ["reduce-scatter YX"]),
        # Sum and split before summing everywhere: the block is smaller then.
        (s("|", "XY"), s("X|"), ["reduce-scatter X", "all-reduce Y"]),
        (s("Y|", "X"), s("|X"), ["reduce-scatter X", "all-gather Y"]),
        # Slices come first, they make everything after them cheaper.
        (s("X|"), s("|Y"), ["slice Y", "all-gather X"]),
        # Order is honoured: only the minor-most axes can be gathered or added.
        (s("XY|"), s("YX|"), ["permute XY"]),
        (s("YZX|"), s("XZY|"), ["permute YZX"]),  # Z too: X and Y may differ in size
        (s("XY|"), s("Y|"), ["permute XY", "all-gather X"]),
        (s("X|"), s("YX|"), ["slice Y", "permute XY"]),
        (s("X|"), s("Y|"), ["slice Y", "permute XY", "all-gather X"]),
        (s("Y|", "X"), s("XY|"), ["reduce-scatter X", "permute YX"]),
        (s("X|Y"), s("|YX"), ["all-to-all X"]),
        (s("X|Y"), s("|XY"), ["all-to-all X", "permute YX"]),
        # Pending sums pass through untouched.
        (s("X|", "Z"), s("|X", "Z"), ["all-to-all X"]),
    ],
)
def test_steps(source, target, steps):
    assert words(reshard(source, target)) == steps


def test_steps_are_chained_and_remembered():
    steps = reshard(s("XY|", "Z"), s("|YX"))
    assert steps[0].before == s("XY|", "Z")
    assert steps[-1].after == s("|YX")
    assert all(a.after == b.before for a, b in pairwise(steps))
    assert reshard(s("XY|", "Z"), s("|YX")) is steps


def test_a_sum_cannot_be_taken_apart():
    with pytest.raises(ShardingError, match="over X the value is not a partial sum any more"):
        reshard(s("|"), s("|", "X"))
    with pytest.raises(ShardingError, match="not a partial sum"):
        reshard(s("X|"), s("|", "X"))


def test_ranks_must_match():
    with pytest.raises(ShardingError, match="2 dimensions against 1"):
        reshard(s("X|"), s("X"))


def test_words_of_a_step():
    (move,) = reshard(s("X|"), s("|X"))
    assert str(move) == "all-to-all over X: [X, ] -> [, X]"


@pytest.mark.parametrize(
    ("source", "target", "sent"),
    [
        (s("X|"), s("|"), 0.75 * 800),
        (s("|", "X"), s("X|"), 0.75 * 800),
        (s("|", "X"), s("|"), 2 * 0.75 * 800),
        (s("X|"), s("|X"), 0.75 * 200),
        (s("|"), s("X|"), 0),
        (s("XY|"), s("YX|"), 100),
    ],
)
def test_bytes_sent(source, target, sent):
    (step,) = reshard(source, target)
    assert step.bytes_sent((16, 25), Mesh.of(X=4, Y=2), DType.BF16) == sent


def test_a_group_of_one_sends_nothing():
    for source, target in [(s("X|"), s("|")), (s("|", "X"), s("|")), (s("XY|"), s("YX|"))]:
        (step,) = reshard(source, target)
        assert step.bytes_sent((16, 25), Mesh.of(X=1, Y=1), DType.BF16) == 0


# Proof by execution


def check_by_execution(source: Sharding, target: Sharding, mesh: Mesh, seed: int) -> int:
    """Run the steps, and run them once without each; returns the number of steps."""
    numbers = np.random.default_rng(seed)
    array = random_array(numbers, [mesh.num_devices * (1 + d % 2) for d in range(source.ndim)])
    start = distribute(array, source, mesh, numbers)
    steps = reshard(source, target)
    devices = start
    for step in steps:
        devices = apply(step, devices)
        assert holds(devices, array, step.after), f"{source} -> {target} on {mesh}: {step}"
    assert holds(devices, array, target)
    for i in range(len(steps)):
        assert not reaches((*steps[:i], *steps[i + 1 :]), start, array, target), f"{steps[i]} can be dropped"
    return len(steps)


def reaches(steps: tuple[Collective, ...], start, array: np.ndarray, target: Sharding) -> bool:
    try:
        return holds(apply_all(steps, start), array, target)
    except AssertionError:  # blocks that cannot even be cut as the next step wants them
        return False


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_reshards_are_right_and_minimal(data):
    mesh = data.draw(st.sampled_from(MESHES))
    ndim = data.draw(st.integers(1, 3))
    choose = data.draw(st.randoms(use_true_random=False))
    source = random_sharding(choose, ndim, mesh, frozenset("XYZ"))
    target = random_sharding(choose, ndim, mesh, source.unreduced)
    check_by_execution(source, target, mesh, data.draw(st.integers(0, 2**32 - 1)))


@pytest.mark.parametrize("count", [500, pytest.param(3000, marks=pytest.mark.slow)])  # slow: the same of more
def test_many_reshards_are_right_and_minimal(count):
    choose = random.Random(20240229)  # noqa: S311 - a seed, no secret
    lengths = []
    for seed in range(count):
        mesh = choose.choice(MESHES)
        ndim = choose.choice([1, 2, 2, 3])
        source = random_sharding(choose, ndim, mesh, frozenset("XYZ"))
        target = random_sharding(choose, ndim, mesh, source.unreduced)
        lengths.append(check_by_execution(source, target, mesh, seed))
    assert max(lengths) >= 5
    assert sum(n > 0 for n in lengths) > count * 2 / 3


def test_the_referee_notices_wrong_steps():
    """The devices do what a step says, so a plausible wrong step (gathering a major axis) must show."""
    mesh = Mesh.of(X=2, Y=2)
    array = np.arange(16.0).reshape(4, 4)
    wrong = Collective(CollectiveKind.ALL_GATHER, ("X",), s("XY|"), s("Y|"))
    assert not holds(apply(wrong, distribute(array, s("XY|"), mesh)), array, s("Y|"))
    swapped = Collective(CollectiveKind.ALL_GATHER, ("Y", "X"), s("XY|"), s("|"))
    assert not holds(apply(swapped, distribute(array, s("XY|"), mesh)), array, s("|"))
    # Sums that are pending are random addends: taking one device's for the value is noticed.
    skipped = Collective(CollectiveKind.SLICE, ("X",), s("|", "X"), s("X|"))
    assert not holds(apply(skipped, distribute(array, s("|", "X"), mesh)), array, s("X|"))


# Nothing cheaper exists


def every_sharding(ndim: int, axes: str) -> list[Sharding]:
    """All shardings of `ndim` dimensions over `axes`, each axis somewhere, nowhere, or pending."""
    found = set()
    for places in product(range(ndim + 2), repeat=len(axes)):
        for order in permutations(range(len(axes))):
            splits = tuple(tuple(axes[i] for i in order if places[i] == d) for d in range(ndim))
            found.add(Sharding(splits, frozenset(a for a, p in zip(axes, places, strict=True) if p == ndim + 1)))
    return sorted(found, key=str)


def with_split(sharding: Sharding, d: int, split: tuple[str, ...]) -> Sharding:
    return sharding.replace(splits=(*sharding.splits[:d], split, *sharding.splits[d + 1 :]))


def every_legal_step(held: Sharding, target: Sharding):
    """All single steps that are possible and put no mesh axis where the target does not want it."""
    for d in range(held.ndim):
        yield from arrivals(held, target, d)
        yield from departures(held, target, d)
    for n in range(1, len(held.unreduced - target.unreduced) + 1):
        for gone in permutations(sorted(held.unreduced - target.unreduced), n):
            yield Collective(
                CollectiveKind.ALL_REDUCE, gone, held, held.replace(unreduced=held.unreduced.difference(gone))
            )
    for splits in product(*(permutations(split) for split in held.splits)):
        if splits != held.splits:
            yield Collective(CollectiveKind.PERMUTE, (), held, held.replace(splits=splits))


def arrivals(held: Sharding, target: Sharding, d: int):
    """Axes that come to dimension `d` from nowhere, or from a pending sum, in any number and order."""
    split = held.splits[d]
    for n in range(1, len(target.splits[d]) + 1):
        for new in permutations(target.splits[d], n):
            if not held.mesh_axes.intersection(new):
                yield Collective(CollectiveKind.SLICE, new, held, with_split(held, d, split + new))
            if held.unreduced.issuperset(new):
                rest = held.replace(unreduced=held.unreduced.difference(new))
                yield Collective(CollectiveKind.REDUCE_SCATTER, new, held, with_split(rest, d, split + new))


def departures(held: Sharding, target: Sharding, d: int):
    """Minor-most axes that leave dimension `d`, gathered or to another dimension; those that stand right too."""
    split = held.splits[d]
    for n in range(1, len(split) + 1):
        rest = with_split(held, d, split[:-n])
        yield Collective(CollectiveKind.ALL_GATHER, split[-n:], held, rest)
        for e in range(held.ndim):
            if e != d and set(split[-n:]) <= set(target.splits[e]):
                after = with_split(rest, e, rest.splits[e] + split[-n:])
                yield Collective(CollectiveKind.ALL_TO_ALL, split[-n:], held, after)


def least_merit(source: Sharding, target: Sharding) -> tuple[float, int]:
    """Bytes and collectives of the best of all sequences of legal steps."""
    done: set[Sharding] = set()
    queue = [((0.0, 0), 0, source)]
    pushed = 0
    while True:
        (sent, collectives), _, held = heapq.heappop(queue)
        if held == target:
            return sent, collectives
        if held in done:
            continue
        done.add(held)
        for step in every_legal_step(held, target):
            pushed += 1
            merit = (sent + nominal_bytes_sent(step), collectives + step.moves_data)
            heapq.heappush(queue, (merit, pushed, step.after))


@pytest.mark.parametrize(("ndim", "axes"), [(1, "XY"), (2, "XY"), (3, "XY"), (1, "XYZ")])
def test_no_sequence_of_legal_steps_is_better(ndim, axes):
    everything = every_sharding(ndim, axes)
    pairs = [(a, b) for a in everything for b in everything if b.unreduced <= a.unreduced]
    for source, target in pairs:
        steps = reshard(source, target)
        chosen = sum(map(nominal_bytes_sent, steps)), sum(step.moves_data for step in steps)
        assert chosen == least_merit(source, target), f"{source} -> {target}: {[str(c) for c in steps]}"
    assert len(pairs) > 20


def test_no_sequence_of_legal_steps_is_better_on_three_axes():
    choose = random.Random(7)  # noqa: S311 - a seed, no secret
    everything = every_sharding(2, "XYZ")
    for _ in range(150):
        source, target = choose.choice(everything), choose.choice(everything)
        target = target.replace(unreduced=target.unreduced & source.unreduced)
        steps = reshard(source, target)
        chosen = sum(map(nominal_bytes_sent, steps)), sum(step.moves_data for step in steps)
        assert chosen == least_merit(source, target), f"{source} -> {target}: {[str(c) for c in steps]}"


# Where to keep what is read again.


def test_the_nearest_is_where_least_has_to_be_moved_from() -> None:
    made, exchanged = s("|X"), s("X|")
    assert nearest([made, exchanged], [exchanged]) == exchanged
    assert nearest([made, exchanged], [made, exchanged]) == made  # a tie falls to the first
    assert nearest([made, exchanged], []) == made
    assert nearest([made, exchanged], [s("|")]) == made  # gathering takes as much from either


def test_what_was_summed_serves_who_read_it_in_parts() -> None:
    parts, summed = s("|", "X"), s("|X")
    assert nearest([parts, summed], [parts]) == parts
    assert nearest([parts, summed], [summed]) == summed
    assert nearest([parts, summed], [s("|")]) == summed
