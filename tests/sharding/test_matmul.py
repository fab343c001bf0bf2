"""The one rule of sharded matrix multiplication: the book's cases, proof by execution, choice by cost."""

import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.core.dtypes import DType
from meshwise.core.errors import ShardingError
from meshwise.sharding import (
    Indices,
    MatmulPlacement,
    Mesh,
    Sharding,
    alternatives,
    book_case,
    cheapest,
    parse_expression,
    place_einsum,
)
from meshwise.sharding.reshard import nominal_bytes_sent
from tests.sharding.devices import (
    apply_all,
    distribute,
    global_einsum,
    holds,
    local_einsum,
    random_array,
    random_sharding,
)

MESHES = [Mesh.of(X=2), Mesh.of(X=3), Mesh.of(X=2, Y=2), Mesh.of(X=2, Y=3), Mesh.of(X=2, Y=3, Z=2)]


def read(text: str) -> tuple[Indices, tuple[Sharding, ...], Sharding]:
    expression = parse_expression(text)
    return Indices.of(expression), tuple(t.sharding for t in expression.inputs), expression.output.sharding


def words(placement: MatmulPlacement) -> list[str]:
    names = "ABC"
    steps = zip(names, placement.input_steps, strict=False)
    moved = [f"{c.kind} {name} {''.join(c.mesh_axes)}" for name, cs in steps for c in cs if c.moves_data]
    return moved + [f"{c.kind} out {''.join(c.mesh_axes)}" for c in placement.output_steps if c.moves_data]


# The four cases of the book, chapter "Sharded matrices and how to multiply them".


@pytest.mark.parametrize(
    "text",
    [
        "A[I, J] * B[J, K] -> C[I, K]",
        "A[I_X, J] * B[J, K] -> C[I_X, K]",
        "A[I, J] * B[J, K_Y] -> C[I, K_Y]",
        "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]",
    ],
)
def test_case_1_needs_no_communication(text):
    indices, inputs, output = read(text)
    assert book_case(indices, inputs) == 1
    best = alternatives(indices, inputs, output)[0]
    assert words(best) == []


def test_case_2_gathers_or_sums():
    indices, inputs, output = read("A[I, J_X] * B[J, K] -> C[I, K]")
    assert book_case(indices, inputs) == 2
    options = [words(p) for p in alternatives(indices, inputs, output)]
    assert options[0] == ["all-gather A X"]
    assert ["all-reduce out X"] in options
    assert ["all-to-all A X", "all-gather out X"] in options  # an AllReduce's second half, with a cheaper first half
    assert len(options) == 4


def test_case_2_with_a_split_output_scatters_the_sum():
    indices, inputs, output = read("A[I, J_X] * B[J, K] -> C[I, K_X]")
    options = [words(p) for p in alternatives(indices, inputs, output)]
    assert ["reduce-scatter out X"] in options
    assert ["all-gather A X"] in options


def test_case_3_leaves_a_sum_to_be_taken():
    for wanted, step in [
        ("C[I, K]", ["all-reduce out X"]),
        ("C[I, K_X]", ["reduce-scatter out X"]),
        ("C[I, K]{U_X}", []),
    ]:
        indices, inputs, output = read(f"A[I, J_X] * B[J_X, K] -> {wanted}")
        assert book_case(indices, inputs) == 3
        placement = place_einsum(indices, {"J": ("X",)}, inputs, output)
        assert placement.local_output == Sharding(((), ()), frozenset("X"))
        assert words(placement) == step
    indices, inputs, output = read("A[I, J_X] * B[J_X, K] -> C[I, K_X]")
    assert words(alternatives(indices, inputs, output)[0]) == ["reduce-scatter out X"]


def test_case_4_gathers_one_of_the_two():
    indices, inputs, output = read("A[I_X, J] * B[J, K_X] -> C[I_X, K]")
    assert book_case(indices, inputs) == 4
    assert words(alternatives(indices, inputs, output)[0]) == ["all-gather B X"]
    indices, inputs, output = read("A[I_X, J] * B[J, K_X] -> C[I, K_X]")
    assert words(alternatives(indices, inputs, output)[0]) == ["all-gather A X"]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        # Book, Training: forward and backward of the feed-forward block under each parallelism.
        ("x[B_X, D] * w[D, F] -> h[B_X, F]", []),
        ("h[B_X, F] * g[B_X, D] -> dw[F, D]{U_X}", []),
        ("x[B_X, D] * w[D_X, F] -> h[B_X, F]", ["all-gather B X"]),
        ("x[B, D] * w[D, F_Y] -> h[B, F_Y]", []),
        ("h[B, F_Y] * w[F_Y, D] -> o[B, D_Y]", ["reduce-scatter out Y"]),
        ("x[B_X, D] * w[D_X, F_Y] -> h[B_X, F_Y]", ["all-gather B X"]),
        ("h[B_X, F_Y] * w[F_Y, D_X] -> o[B_X, D]{U_Y}", ["all-gather B X"]),
    ],
)
def test_strategies_of_the_book_fall_out(text, steps):
    indices, inputs, output = read(text)
    assert words(alternatives(indices, inputs, output)[0]) == steps


def test_the_choice_depends_on_the_sizes():
    """Book, Sharding, question on AllGather against AllReduce: a small A is gathered, a small C is summed."""
    indices, inputs, output = read("A[I, J_X] * B[J_X, K] -> C[I, K]")
    options = alternatives(indices, inputs, output)
    mesh = Mesh.of(X=4)

    def best(**sizes):
        return words(cheapest(options, lambda p: p.bytes_sent(sizes, mesh, DType.BF16)))

    assert best(I=8, J=65536, K=8) == ["all-reduce out X"]
    assert best(I=4096, J=8, K=4096) == ["all-gather A X", "all-gather B X"]


def test_local_work():
    indices, inputs, output = read("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]")
    best = alternatives(indices, inputs, output)[0]
    mesh = Mesh.of(X=2, Y=4)
    assert best.num_parts(mesh) == 8
    assert best.local_flops({"I": 8, "J": 16, "K": 32}, mesh) == 2 * 8 * 16 * 32 / 8
    assert best.local_flops({"I": 9, "J": 16, "K": 32}, mesh) == 2 * 5 * 16 * 8


def test_a_pending_sum_passes_through():
    indices, inputs, output = read("A[I, J]{U_X} * B[J, K] -> C[I_X, K]")
    placement = place_einsum(indices, {}, inputs, output)
    assert placement.local_inputs[0].unreduced == {"X"}
    assert words(placement) == ["reduce-scatter out X"]
    # Two pending sums over the same axis cannot both pass: the product of sums is not the sum of products.
    indices, inputs, output = read("A[I, J]{U_X} * B[J, K]{U_X} -> C[I, K]")
    assert words(place_einsum(indices, {}, inputs, output)) == ["all-reduce A X", "all-reduce B X"]


def test_what_cannot_be_is_refused():
    indices, inputs, output = read("A[I_X, J] * B[J, K] -> C[I_X, K]")
    with pytest.raises(ShardingError, match="mesh axis X is used more than once"):
        place_einsum(indices, {"I": ("X",), "K": ("X",)}, inputs, output)
    with pytest.raises(ShardingError, match="index Q is not in the einsum; its indices are I, K, J"):
        place_einsum(indices, {"Q": ("X",)}, inputs, output)
    with pytest.raises(ShardingError, match="has 2 inputs, shardings are given for 1"):
        place_einsum(indices, {}, inputs[:1], output)
    with pytest.raises(ShardingError, match="output index K is in no input"):
        Indices((("I", "J"),), ("I", "K"))
    with pytest.raises(ShardingError, match="stands twice"):
        Indices((("I", "I"),), ("I",))
    with pytest.raises(ShardingError, match=r"no way to compute.*over Z the value is not a partial sum"):
        alternatives(*read("A[I_X, J] -> C[J, I_X]{U_Z}"))


def test_mesh_axes_keep_the_order_of_the_tensors():
    for order in ("XY", "YX"):
        indices, inputs, output = read(f"A[I_{order}, J] * B[J, K] -> C[I_{order}, K]")
        best = alternatives(indices, inputs, output)[0]
        assert dict(best.space) == {"I": tuple(order)}
        assert words(best) == []


# Proof by execution

PATTERNS = [
    ((("I", "J"), ("J", "K")), ("I", "K")),
    ((("I", "J"), ("J", "K")), ("K", "I")),
    ((("B", "I", "J"), ("B", "J", "K")), ("B", "I", "K")),
    ((("B", "D"), ("B", "F")), ("D", "F")),
    ((("B", "D"), ("D", "F"), ("B",)), ("B", "F")),
    ((("I", "J"), ("J", "K"), ("K", "L")), ("I", "L")),
    ((("B", "I"), ("B", "I"), ("I",)), ("B",)),
    ((("I", "J"),), ("J", "I")),
    ((("I", "J"),), ("I",)),
    ((("I", "J"), ("J",)), ()),
    ((("E", "C", "D"), ("E", "D", "F")), ("E", "C", "F")),
]


def run(placement: MatmulPlacement, starts, mesh: Mesh, dropped: tuple[int, int] | None = None):
    """Execute a placement on devices, leaving out step `dropped[1]` of input `dropped[0]` (the output is the last)."""
    groups = [
        [c for i, c in enumerate(steps) if (g, i) != dropped]
        for g, steps in enumerate((*placement.input_steps, placement.output_steps))
    ]
    held = [apply_all(steps, start) for steps, start in zip(groups, starts, strict=False)]
    product = local_einsum(list(zip(placement.indices.inputs, held, strict=True)), placement.indices.output, mesh)
    return apply_all(groups[-1], product)


def random_case(choose: random.Random, mesh: Mesh):
    inputs_axes, output_axes = choose.choice(PATTERNS)
    indices = Indices(inputs_axes, output_axes)
    inputs = tuple(random_sharding(choose, len(axes), mesh, frozenset(mesh.names)) for axes in inputs_axes)
    output = random_sharding(choose, len(output_axes), mesh)
    space: dict[str, list[str]] = {}
    for axis in choose.sample(mesh.names, len(mesh.names)):
        if choose.random() < 0.75:
            space.setdefault(choose.choice(indices.all), []).append(axis)
    placement = place_einsum(indices, {i: tuple(a) for i, a in space.items()}, inputs, output)
    if placement.local_output.unreduced and choose.random() < 0.3:  # sums may stay pending, where the target says so
        wanted = random_sharding(choose, len(output_axes), mesh, placement.local_output.unreduced)
        placement = place_einsum(indices, dict(placement.space), inputs, wanted)
    return placement


def summed_alone(indices: Indices) -> bool:
    """Whether some index of one input alone is summed: the order of its blocks does not matter, so a permute of them is
    no error. Such sums are checked to be right, but not for steps that can be dropped."""
    return any(sum(i in axes for axes in indices.inputs) == 1 for i in indices.contracted)


def check_by_execution(placement: MatmulPlacement, mesh: Mesh, seed: int) -> int:
    numbers = np.random.default_rng(seed)
    length = 2 * mesh.num_devices  # no block is of length one, which NumPy would stretch to fit
    arrays = [random_array(numbers, [length] * len(axes)) for axes in placement.indices.inputs]
    starts = [distribute(a, s, mesh, numbers) for a, s in zip(arrays, placement.inputs, strict=True)]
    expected = global_einsum(list(zip(placement.indices.inputs, arrays, strict=True)), placement.indices.output)
    assert holds(run(placement, starts, mesh), expected, placement.output), placement
    if summed_alone(placement.indices):
        return 0
    steps = [(g, i) for g, s in enumerate((*placement.input_steps, placement.output_steps)) for i in range(len(s))]
    for dropped in steps:
        try:
            wrong = holds(run(placement, starts, mesh, dropped), expected, placement.output)
        except (AssertionError, ValueError):  # blocks whose shapes do not meet
            wrong = False
        assert not wrong, f"step {dropped} can be dropped from {placement}"
    return len(steps)


@given(st.sampled_from(MESHES), st.randoms(use_true_random=False), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_random_einsums_are_right_and_minimal(mesh, choose, seed):
    check_by_execution(random_case(choose, mesh), mesh, seed)


@pytest.mark.parametrize("count", [250, pytest.param(2000, marks=pytest.mark.slow)])  # slow: the same of more
def test_many_einsums_are_right_and_minimal(count):
    choose = random.Random(20240301)  # noqa: S311 - a seed, no secret
    steps = 0
    for seed in range(count):
        mesh = choose.choice(MESHES)
        steps += check_by_execution(random_case(choose, mesh), mesh, seed)
    assert steps > 2 * count


def test_every_alternative_is_right():
    choose = random.Random(5)  # noqa: S311 - a seed, no secret
    checked = 0
    for seed in range(60):
        mesh = choose.choice(MESHES[:4])
        inputs_axes, output_axes = choose.choice(PATTERNS)
        inputs = tuple(random_sharding(choose, len(axes), mesh, frozenset(mesh.names)) for axes in inputs_axes)
        output = random_sharding(choose, len(output_axes), mesh)
        options = alternatives(Indices(inputs_axes, output_axes), inputs, output)
        assert len({p.space for p in options}) == len(options)
        for placement in options:
            check_by_execution(placement, mesh, seed)
            checked += 1
    assert checked > 200


def nominal_bytes(placement: MatmulPlacement) -> float:
    return sum(map(nominal_bytes_sent, chain(*placement.input_steps, placement.output_steps)))


@pytest.mark.parametrize("count", [200, pytest.param(1500, marks=pytest.mark.slow)])  # slow: the same of more
def test_no_placement_over_the_axes_in_sight_sends_less(count):
    """Except where several mesh axes split one index in an order that no tensor has."""
    choose = random.Random(9)  # noqa: S311 - a seed, no secret
    checked = 0
    for _ in range(count):
        mesh = choose.choice(MESHES)
        placement = random_case(choose, mesh)
        in_sight = frozenset().union(*(s.mesh_axes for s in (*placement.inputs, placement.output)))
        if all(len(axes) == 1 and axes[0] in in_sight for _, axes in placement.space):
            best = alternatives(placement.indices, placement.inputs, placement.output)[0]
            assert nominal_bytes(best) <= nominal_bytes(placement), placement
            checked += 1
    assert checked > count / 3
