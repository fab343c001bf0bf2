"""Reasons of differences: each rule alone, on collectives made up for it, and what it must leave unexplained."""

from dataclasses import replace

import pytest

import meshwise
from meshwise.compiler.expected import Expected, ExpectedCollective, expect, slots_over_routed
from meshwise.compiler.hlo.loops import Execution
from meshwise.compiler.hlo.reader import Computation, Instruction
from meshwise.compiler.hlo.rewrites import Meant
from meshwise.compiler.hlo.shapes import parse_shape
from meshwise.compiler.hlo.traffic import Emitted
from meshwise.compiler.traffic_reasons import traffic_lines

MB = 1e6


def wanted(kind, axes, received, *, block="layer", when="forward", purpose="weights", tensors=("w",)):
    return ExpectedCollective(block, when, purpose, kind, axes, tensors, 1.0, received)


def found(kind, axes, received, *, size=4, dtype="bf16", scope="jit(step)/layer/x", rewrite="", sent=None):
    others = 1 - 1 / size
    factor = {"all-reduce": 2 * others, "permute": 1.0}.get(kind, others)
    payload = received / factor
    shape = parse_shape(f"{dtype}[{int(payload)}]")
    i = Instruction("c", shape, kind, (), f', metadata={{op_name="{scope}"}}')
    emitted = Emitted(
        kind, axes, size, payload, dtype, (shape,), Execution(1), i, Computation("m", (i,)), 1, asynchronous=False
    )
    return Meant(kind, axes, size, payload, 1, received if sent is None else sent, rewrite, (emitted,))


def reasons(expected, compiled):
    lines = traffic_lines(Expected(tuple(expected), {}, {}, frozenset(), {}, 0.0), compiled)
    return {line.name: {d.reason: round(d.amount / MB, 3) for d in line.differences} for line in lines}


X, Y = ("x",), ("y",)


def test_what_matches_needs_no_reason():
    assert reasons([wanted("all-gather", X, 100 * MB)], [found("all-gather", X, 100 * MB)]) == {"all-gather over x": {}}


def test_what_nothing_explains_is_unexplained():
    assert reasons([wanted("all-gather", X, 100 * MB)], [found("all-gather", X, 130 * MB)]) == {
        "all-gather over x": {"unexplained": 30.0}
    }
    assert reasons([], [found("all-to-all", X, 30 * MB)]) == {"all-to-all over x": {"unexplained": 30.0}}
    assert reasons([wanted("all-to-all", X, 30 * MB)], []) == {"all-to-all over x": {"unexplained": -30.0}}


def test_a_gather_of_both_passes_may_be_taken_once():
    both = [
        wanted("all-gather", X, 40 * MB, block="head", when=w, tensors=("w_head",)) for w in ("forward", "backward")
    ]
    assert reasons(both, [found("all-gather", X, 40 * MB)]) == {"all-gather over x": {"gathered once": -40.0}}
    assert reasons(both, []) == {"all-gather over x": {"gathered once": -40.0, "unexplained": -40.0}}
    assert reasons(both, [found("all-gather", X, 70 * MB)]) == {"all-gather over x": {"unexplained": -10.0}}


def test_an_exchange_of_both_passes_may_be_kept_though_others_are_counted_with_it():
    both = [
        wanted("all-to-all", X, 40 * MB, purpose="activations", tensors=("attention",)),
        wanted("all-to-all", X, 80 * MB, when="backward", purpose="activations", tensors=("attention", "d_q")),
    ]
    assert reasons(both, [found("all-to-all", X, 80 * MB)]) == {"all-to-all over x": {"gathered once": -40.0}}
    assert reasons(both, [found("all-to-all", X, 40 * MB)]) == {
        "all-to-all over x": {"gathered once": -40.0, "unexplained": -40.0}
    }


def test_a_tied_table_may_be_gathered_once():
    both = [
        wanted("all-gather", X, 40 * MB, block="embed", tensors=("w_embed",)),
        wanted("all-gather", X, 41 * MB, block="head", tensors=("norm.final", "w_embed")),
    ]
    assert reasons(both, [found("all-gather", X, 41 * MB)]) == {"all-gather over x": {"gathered once": -40.0}}
    layers = [wanted("all-gather", X, 20 * MB, when=when) for when in ("forward", "backward")]
    there = [found("all-gather", X, 41 * MB), found("all-gather", X, 40 * MB)]  # both passes of the layers, one table
    assert reasons([*both, *layers], there) == {"all-gather over x": {"gathered once": -40.0}}
    untied = [both[0], wanted("all-gather", X, 41 * MB, block="head", tensors=("norm.final", "w_head"))]
    assert reasons(untied, [found("all-gather", X, 41 * MB)]) == {"all-gather over x": {"unexplained": -40.0}}


def test_a_sum_may_be_taken_whole():
    assert reasons([wanted("reduce-scatter", X, 10 * MB)], [found("all-reduce", X, 20 * MB)]) == {
        "all-reduce over x": {"reduced whole": 20.0},
        "reduce-scatter over x": {"reduced whole": -10.0},
    }


def test_a_gather_may_be_a_sum_of_parts_among_zeros():
    """Of what is summed in fp32 none is: those are gradients."""
    expected = [wanted("reduce-scatter", X, 10 * MB), wanted("all-gather", X, 10 * MB)]
    assert reasons(expected, [found("all-reduce", X, 20 * MB), found("all-reduce", X, 20 * MB, dtype="f32")]) == {
        "all-gather over x": {"gathered whole": -10.0},
        "all-reduce over x": {"gathered whole": 20.0, "reduced whole": 20.0},
        "reduce-scatter over x": {"reduced whole": -10.0},
    }


def test_a_scatter_and_a_gather_may_be_joined():
    expected = [wanted("reduce-scatter", X, 10 * MB), wanted("all-gather", X, 10 * MB)]
    assert reasons(expected, [found("all-reduce", X, 20 * MB)]) == {
        "all-gather over x": {"joined": -10.0},
        "all-reduce over x": {"joined": 20.0},
        "reduce-scatter over x": {"joined": -10.0},
    }


def test_sums_over_two_axes_may_be_one():
    expected = [
        wanted("all-reduce", X, 10 * MB, when="step", purpose="gradients"),
        wanted("reduce-scatter", Y, 8 * MB, when="backward", purpose="gradients"),
    ]
    assert reasons(expected, [found("all-reduce", ("x", "y"), 16 * MB)]) == {
        "all-reduce over x": {"reduced at once": -10.0},
        "all-reduce over x,y": {"reduced at once": 16.0},
        "reduce-scatter over y": {"reduced at once": -8.0},
    }


@pytest.mark.parametrize(("sent", "explained"), [(70, True), (90, False)])
def test_scatters_over_two_axes_may_be_one(sent, explained):
    one_by_one = [
        wanted("reduce-scatter", axes, n * MB, when="backward", purpose="gradients") for axes, n in ((X, 60), (Y, 10))
    ]
    reason = "reduced at once" if explained else "unexplained"
    assert reasons(one_by_one, [found("reduce-scatter", ("x", "y"), sent * MB, size=8)]) == {
        "reduce-scatter over x": {reason: -60.0},
        "reduce-scatter over x,y": {reason: float(sent)},
        "reduce-scatter over y": {reason: -10.0},
    }


def test_a_sum_over_two_axes_may_be_taken_axis_by_axis():
    """Of 64 MB over 2 x 4 devices: halves over x, then quarters of those over y; or the other way round."""
    expected = [wanted("reduce-scatter", ("x", "y"), 56 * MB, when="backward", purpose="gradients")]
    for first, second in ((32, 24), (8, 48)):
        compiled = [
            found("reduce-scatter", X, first * MB, size=2),
            found("reduce-scatter", Y, second * MB, size=4),
        ]
        assert reasons(expected, compiled) == {
            "reduce-scatter over x": {"axis by axis": first},
            "reduce-scatter over x,y": {"axis by axis": -56.0},
            "reduce-scatter over y": {"axis by axis": second},
        }


def test_a_step_of_an_axis_by_axis_sum_may_be_taken_whole():
    expected = [wanted("reduce-scatter", ("x", "y"), 56 * MB, when="backward", purpose="gradients")]
    compiled = [
        found("reduce-scatter", X, 20 * MB, size=2),
        found("all-reduce", X, 24 * MB, size=2),
        found("reduce-scatter", Y, 24 * MB, size=4),
    ]
    assert reasons(expected, compiled) == {
        "all-reduce over x": {"reduced whole": 24.0},
        "reduce-scatter over x": {"axis by axis": 20.0},
        "reduce-scatter over x,y": {"axis by axis": -56.0},
        "reduce-scatter over y": {"axis by axis": 24.0},
    }


def test_what_is_missing_of_one_step_stays_unexplained():
    expected = [wanted("reduce-scatter", ("x", "y"), 56 * MB, when="backward", purpose="gradients")]
    compiled = [found("reduce-scatter", X, 32.5 * MB, size=2), found("reduce-scatter", Y, 20 * MB, size=4)]
    assert reasons(expected, compiled) == {
        "reduce-scatter over x": {"axis by axis": 32.0, "padding": 0.5},
        "reduce-scatter over x,y": {"axis by axis": -52.0, "unexplained": -4.0},
        "reduce-scatter over y": {"axis by axis": 20.0},
    }


def test_scatters_that_do_not_add_up_are_not_one_axis_by_axis():
    expected = [wanted("reduce-scatter", ("x", "y"), 56 * MB, when="backward", purpose="gradients")]
    compiled = [found("reduce-scatter", X, 40 * MB, size=2), found("reduce-scatter", Y, 16 * MB, size=4)]
    assert reasons(expected, compiled) == {
        "reduce-scatter over x": {"unexplained": 40.0},
        "reduce-scatter over x,y": {"unexplained": -56.0},
        "reduce-scatter over y": {"unexplained": 16.0},
    }


def test_an_exchange_may_be_a_gather():
    assert reasons([wanted("all-to-all", X, 10 * MB)], [found("all-gather", X, 40 * MB, size=4)]) == {
        "all-gather over x": {"as gather": 40.0},
        "all-to-all over x": {"as gather": -10.0},
    }


def test_a_lookup_has_ways_of_its_own():
    expected = [wanted("reduce-scatter", X, 50 * MB, block="embed", when="backward", purpose="gradients")]
    compiled = [found("all-to-all", X, 20 * MB, scope="transpose(jvp(embed))/embed/jit(_take)/scatter-add")]
    assert reasons(expected, compiled) == {
        "all-to-all over x": {"lookup": 20.0},
        "reduce-scatter over x": {"lookup": -50.0},
    }
    assert reasons(expected, []) == {"reduce-scatter over x": {"unexplained": -50.0}}


def test_integers_and_statistics_are_told_by_their_format():
    compiled = [
        found("all-gather", X, 5 * MB, dtype="s32"),
        found("all-reduce", X, 3 * MB, dtype="f32", scope="jvp(head)/loss/reduce_max"),
        found("all-gather", X, 100 * MB),
    ]
    assert reasons([wanted("all-gather", X, 100 * MB)], compiled) == {
        "all-gather over x": {"token numbers": 5.0},
        "all-reduce over x": {"statistics": 3.0},
    }


def test_operands_of_eight_bits_are_no_token_numbers():
    gathered = found("all-gather", X, 40 * MB, dtype="s8")
    assert reasons([wanted("all-gather", X, 40 * MB)], [gathered]) == {"all-gather over x": {}}


def test_wider_elements_are_told_by_their_format_up_to_twice_the_bytes():
    gates = wanted("all-to-all", X, 10 * MB, purpose="activations")
    other = found("all-to-all", X, 90 * MB)
    expected = [gates, wanted("all-to-all", X, 90 * MB)]
    assert reasons(expected, [found("all-to-all", X, 20 * MB, dtype="f32"), other]) == {
        "all-to-all over x": {"wider format": 10.0}
    }
    assert reasons(expected, [found("all-to-all", X, 30 * MB, dtype="f32"), other]) == {
        "all-to-all over x": {"wider format": 15.0, "unexplained": 5.0}
    }


def test_sums_that_are_no_part_of_the_loss_are_no_statistics():
    compiled = [found("all-reduce", X, 30 * MB, dtype="f32", scope="transpose(jvp(layer))/q/reduce_sum")]
    assert reasons([], compiled) == {"all-reduce over x": {"wider format": 15.0, "unexplained": 15.0}}


def test_a_collective_matmul_counts_what_it_stands_for_and_says_what_it_sends_more():
    compiled = [found("reduce-scatter", X, 30 * MB, rewrite="collective matmul", sent=50 * MB)]
    assert reasons([wanted("reduce-scatter", X, 30 * MB)], compiled) == {
        "reduce-scatter over x": {"collective matmul": 20.0}
    }


def test_a_little_more_is_padding_of_scatters_only():
    assert reasons([wanted("reduce-scatter", X, 100 * MB)], [found("reduce-scatter", X, 102 * MB)]) == {
        "reduce-scatter over x": {"padding": 2.0}
    }
    assert reasons([wanted("all-gather", X, 100 * MB)], [found("all-gather", X, 102 * MB)]) == {
        "all-gather over x": {"unexplained": 2.0}
    }


def test_keys_and_values_may_go_round_and_once_more_for_what_is_computed_again():
    expected = [
        wanted("all-gather", X, 60 * MB, purpose="ring"),
        wanted("all-gather", X, 60 * MB, purpose="ring", when="backward"),
        wanted("reduce-scatter", X, 60 * MB, purpose="ring", when="backward"),
    ]
    sends = [found("permute", X, 240 * MB), found("permute", X, 60 * MB, dtype="f32")]
    assert reasons(expected, sends) == {
        "all-gather over x": {"ring": -120.0},
        "reduce-scatter over x": {"ring": -60.0},
        "permute over x": {"ring": 180.0, "again": 60.0, "wider format": 30.0, "unexplained": 30.0},
    }
    assert reasons(expected, sends[:1])["permute over x"] == {"ring": 180.0, "again": 60.0}
    sized = [replace(one, size=4) for one in expected]  # sums of gradients go home, a third of three steps
    assert reasons(sized, [*sends[:1], found("permute", X, 20 * MB)])["permute over x"] == {
        "ring": 200.0,
        "again": 60.0,
    }
    assert reasons(sized, sends[:1])["permute over x"] == {"ring": 180.0, "again": 60.0}


def test_a_ring_leaves_the_scatters_of_gradients_over_its_axis_to_them():
    expected = [
        wanted("all-gather", X, 60 * MB, purpose="ring"),
        wanted("reduce-scatter", X, 60 * MB, purpose="ring", when="backward"),
        wanted("reduce-scatter", (*Y, *X), 150 * MB, purpose="gradients", when="backward"),  # of 160, over 16 devices
    ]
    compiled = [
        found("permute", X, 120 * MB),
        found("reduce-scatter", Y, 120 * MB),
        found("reduce-scatter", X, 30 * MB),
    ]
    assert reasons(expected, compiled) == {
        "all-gather over x": {"ring": -60.0},
        "permute over x": {"ring": 120.0},
        "reduce-scatter over x": {"ring": -60.0, "axis by axis": 30.0},
        "reduce-scatter over y": {"axis by axis": 120.0},
        "reduce-scatter over y,x": {"axis by axis": -150.0},
    }


def test_products_of_one_sum_may_be_scattered_apart():
    expected = [wanted("reduce-scatter", X, 30 * MB, when="backward", purpose="activations")]
    scope = "transpose(jvp())/while/body/layer/{}/dot_general"
    both = [
        found("reduce-scatter", X, 30 * MB, scope=scope.format(n), rewrite="collective matmul") for n in ("up", "gate")
    ]
    assert reasons(expected, both) == {"reduce-scatter over x": {"apart": 30.0}}
    forward = [found("reduce-scatter", X, 60 * MB, scope="jvp()/layer/down/dot_general", rewrite="collective matmul")]
    assert reasons(expected, forward) == {"reduce-scatter over x": {"unexplained": 30.0}}


def test_single_small_arrays_beside_large_ones_have_a_name():
    large = found("all-gather", X, 100 * MB)
    assert reasons([wanted("all-gather", X, 100 * MB)], [large, found("all-gather", X, 0.009 * MB)]) == {
        "all-gather over x": {"small arrays": 0.009}
    }
    assert reasons([wanted("all-gather", X, 100 * MB)], [large, found("all-gather", X, 0.02 * MB)]) == {
        "all-gather over x": {"unexplained": 0.02}
    }


def test_slots_that_no_token_is_routed_to_are_sent_too():
    (routed,) = [replace(wanted("all-to-all", X, 30 * MB, purpose="activations", tensors=("slots",)), slots=4.0)]
    assert reasons([routed], [found("all-to-all", X, 118 * MB)]) == {"all-to-all over x": {"slots": 88.0}}
    assert reasons([routed], [found("all-to-all", X, 125 * MB)]) == {
        "all-to-all over x": {"slots": 90.0, "unexplained": 5.0}
    }


@pytest.mark.parametrize(
    ("job", "layout", "slots"),
    [
        ({}, "expert=8,expert_dispatch=slots", 4.0),  # eight experts, two of a token
        ({}, "expert=8", 1.0),
        ({}, "expert=4,tensor=2,expert_tensor_parallel=off", 4.0),  # a ragged exchange is over one axis
        ({"capacity_factor": 1.5}, "expert=8", 1.0),
        ({}, "expert=8,expert_dispatch=ragged", 1.0),
    ],
)
def test_experts_have_a_slot_for_every_token_where_none_may_be_dropped(job, layout, slots):
    asked = {"on": "h100:8", "batch_tokens": "64Ki", "seq_len": 4096, "layout": f"{layout},remat=full", **job}
    plan = meshwise.estimate_train("mixtral-8x7b", **asked).plans[0]
    expected = expect(plan.problem, plan.fabric, plan.layout, plan.estimate.memory)
    assert slots_over_routed(plan.problem, plan.layout) == slots
    assert {name for _, name in expected.slots} >= ({"expert.up", "expert.down"} if slots > 1 else set())
    sent = {c.slots for c in expected.collectives if c.kind == "all-to-all"}
    assert sent == {slots}
    assert {c.slots for c in expected.collectives if c.kind != "all-to-all"} == {1.0}
