"""The compiled program sends and keeps what the plan says, counted on eight devices of the CPU."""

from collections import Counter

import pytest

from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.reader import read_module
from meshwise.compiler.hlo.rewrites import meant_collectives
from meshwise.sharding.layout import Layout
from tests.runtime.steps import configured, dense, make
from tests.runtime.test_models import MODELS

pytestmark = pytest.mark.jax

LAYERS = 3


def compiled(layout, model=None):
    """What a device receives in a step by the collectives of its program: (kind, axes) -> arrays, and bytes."""
    step = make(model or dense(), Layout(**layout))
    program = step.jitted.lower(step.abstract_state, step.abstract_batch).compile()
    arrays, received = Counter(), Counter()
    for c in meant_collectives(read_module(program.as_text()), DeviceMesh(dict(step.mesh.shape))):
        arrays[c.kind, c.axes] += c.count * len(c.members[0].arrays)
        received[c.kind, c.axes] += c.count * c.received
    return arrays, received


def test_weights_are_gathered_again_where_every_activation_is_kept():
    _, received = compiled({"fsdp": 8, "remat": "none"})
    layer = 4 * (32 * 64 * 3 + 32 * 64 + 2 * 32 * 32 + 64 * 32 + 2 * 32)  # bytes: mlp, q, k and v, o, norms
    head, table = 4 * (32 * 64 + 32), 4 * 64 * 32
    assert received["all-gather", ("fsdp",)] == pytest.approx((2 * LAYERS * layer + head + table) * 7 / 8)


def test_what_is_kept_of_the_residual_stream_is_kept_in_parts():
    # A layer gathers the stream for q, k, v and the mlp, and for their gradients; and the gradients of o and down.
    arrays, _ = compiled({"tensor": 2, "remat": "none"})
    assert arrays["all-gather", ("tensor",)] >= LAYERS * 6


def test_a_ring_does_not_go_round_again_for_what_is_kept():
    def sent(policy):
        arrays, _ = compiled({"context": 4, "context_method": "ring", "remat": policy})
        return arrays["permute", ("context",)]

    forward, backward = 3 * 2, 3 * 4 + 2  # keys and values; with their gradients, and these home
    assert sent("attention") == LAYERS * (forward + backward)


@pytest.mark.parametrize(
    ("layout", "scattered", "arrays"),
    [  # of 7 matrices of a layer, the head and the table; of whole stacks, where replicas reduce once a step
        ({"data": 2, "fsdp": 4, "zero": 1}, ("fsdp", "data"), 7 * LAYERS + 2),
        ({"data": 2, "tensor": 2, "zero": 1, "num_microbatches": 2}, ("data",), 7 + 2),
    ],
)
def test_gradients_are_scattered_as_they_are_added_up(layout, scattered, arrays):
    found, received = compiled(layout)
    assert sum(n for (kind, axes), n in found.items() if kind == "reduce-scatter" and {*axes} == {*scattered}) >= arrays
    norms = 4 * 32 * (2 * LAYERS + 1)
    whole = {k: n for k, n in received.items() if k[0] == "all-reduce" and {*scattered} & {*k[1]}}
    assert sum(whole.values()) < 2 * norms, whole


@pytest.mark.parametrize("pipeline", [{}, {"stage": 2}])
def test_gradients_of_whole_weights_are_reduced_once_a_step(pipeline):
    """Over axes that split positions, too, however many microbatches there are."""
    layout = {
        "context": 2,
        "context_method": "ring",
        "tensor": 2,
        "fully_sharded": False,
        "zero": 1,
        "num_microbatches": 4,
    }
    arrays, received = compiled({**layout, **pipeline}, dense("D=32 F=64 L=4 N=8 K=4 H=8 V=64"))
    norms = 4 * 32 * (2 * 4 + 1)
    assert arrays["reduce-scatter", ("context",)] >= 7 + 2 + 3  # whole stacks of matrices and norms, head and table
    assert not received["all-reduce", ("context",)]
    assert received["all-reduce", ("context", "tensor")] < 2 * 4 * norms


def test_ulysses_exchanges_positions_for_heads_and_gathers_neither():
    arrays, received = compiled({"ulysses": 4, "fully_sharded": False, "remat": "full"})
    own = 4 * 4 * (2 * 64 + 2 * 32)  # bytes of a device's four positions: queries, what attention gives; keys, values
    # Forward, again in the backward pass, and gradients; of each, three parts of four come from others.
    assert received["all-to-all", ("ulysses",)] == LAYERS * 3 * own * 3 / 4
    assert not arrays["all-gather", ("ulysses",)]


def test_routers_choose_for_a_devices_own_tokens_and_gather_no_scores():
    arrays, _ = compiled({"data": 2, "expert": 4, "remat": "full"}, configured("gpt_oss", MODELS["gpt_oss"]))
    assert not arrays["all-gather", ("data", "expert")]  # of the whole batch's scores, where top_k is the partitioner's
