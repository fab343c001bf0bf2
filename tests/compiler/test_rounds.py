"""What pipelined programs do beyond their plans: counted out by hand, round by round."""

import pytest

import meshwise
from meshwise.compiler.comparison import STATE
from meshwise.compiler.expected import expect, runs_beyond
from meshwise.costs.schedules import Rounds
from meshwise.sharding.layout import Layout

MODEL = "D=1024 F=4096 L=8 N=8 K=8 V=32768"
WEIGHT = 2  # bytes


def expected(layout):
    plan = meshwise.estimate_train(
        MODEL, on="h100:8", batch_tokens="64Ki", seq_len=2048, layout=layout, precision="book"
    ).plans[0]
    return expect(plan.problem, plan.fabric, plan.layout, plan.estimate.memory)


def by_reason(found, kind, axes, block=None):
    amounts = {}
    for c in found.collectives:
        if (c.kind, c.axes) == (kind, axes) and block in (None, c.block):
            amounts[c.reason] = amounts.get(c.reason, 0.0) + c.received
    return amounts


def test_one_stage_has_no_rounds():
    assert Rounds.of(Layout(fsdp=8)) is None
    found = expected("fsdp=8,num_microbatches=2,remat=full")
    assert not any(c.reason for c in found.collectives)
    assert not found.more_memory
    assert not expected("fsdp=8,remat=full").more_memory


@pytest.mark.parametrize(
    ("schedule", "pieces", "forward", "backward"),
    [("gpipe", 1, 8 + 3, 8 + 3), ("1f1b", 1, 8 + 3, 8 + 3), ("interleaved", 2, 2 * 8 + 3 + 4, 2 * 8 + 3)],
)
def test_rounds_are_pieces_of_microbatches_and_those_that_fill_or_drain(schedule, pieces, forward, backward):
    rounds = Rounds(schedule, stages=4, pieces=pieces, num_microbatches=8)
    assert (rounds.forward, rounds.backward) == (forward, backward)


def test_what_each_block_runs_beyond_its_plan():
    gpipe, one = (Rounds(s, stages=4, pieces=1, num_microbatches=8) for s in ("gpipe", "1f1b"))
    for rounds in (gpipe, one):
        assert runs_beyond(rounds, "layer", "forward", 5.0) == {"idle rounds": 15.0}
        assert runs_beyond(rounds, "layer", "backward", 5.0) == {"idle rounds": 15.0}
        assert runs_beyond(rounds, "embed", "backward", 0.0) == {"every stage": 8.0, "once a step": -7.0}
        assert runs_beyond(rounds, "head", "forward", 1.0) == {}  # its weights, once a microbatch
        assert runs_beyond(rounds, "head", "forward", 1.0, dealt=4) == {"dealt": -6.0}  # a quarter of the positions
    interleaved = Rounds("interleaved", stages=4, pieces=2, num_microbatches=8)
    assert runs_beyond(interleaved, "layer", "backward", 6.0) == {"idle rounds": 6.0 * (19 / 2 - 8)}
    assert runs_beyond(interleaved, "layer", "forward", 6.0) == {"idle rounds": 6.0 * (23 / 2 - 8)}


def test_gathers_of_idle_rounds_and_of_blocks_on_every_stage():
    found = expected("stage=2,fsdp=4,num_microbatches=4,schedule=gpipe,remat=full")
    layer = 3 / 4 * WEIGHT * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024)  # of which a device receives
    table = 3 / 4 * WEIGHT * 32768 * 1024
    gathers = by_reason(found, "all-gather", ("fsdp",))
    assert gathers["idle rounds"] == pytest.approx(2 * 4 * layer, rel=1e-6)  # both passes
    assert gathers["every stage"] == pytest.approx(4 * table, rel=1e-6)
    assert gathers["once a step"] == pytest.approx(-3 * table, rel=1e-6)
    scatters = by_reason(found, "reduce-scatter", ("fsdp",), block="embed")
    assert scatters == {
        "every stage": pytest.approx(4 * table, rel=1e-6),
        "once a step": pytest.approx(-3 * table, rel=1e-6),
    }


@pytest.mark.parametrize(("schedule", "number"), [("gpipe", 5), ("1f1b", 5)])
def test_streams_between_stages(schedule, number):
    found = expected(f"stage=2,fsdp=4,num_microbatches=4,schedule={schedule},remat=full")
    stream = 2 * 2048 * 1024 * 2  # two sequences of a microbatch on a device, in bf16
    sends = by_reason(found, "permute", ("stage",))
    assert sends == {"": 4 * stream, "idle rounds": (2 * number - 4) * stream}
    times = 4 + 4 + 2  # to the head, from the embedding, and what is sent in rounds that have no microbatch
    assert by_reason(found, "all-gather", ("stage",), block="layer") == {"dealt": times * stream / 2}
    assert by_reason(found, "reduce-scatter", ("stage",), block="layer") == {"dealt": times * stream / 2}


def test_gradients_of_what_every_stage_holds_are_added_up_once():
    found = expected("stage=2,fsdp=4,num_microbatches=4,schedule=1f1b,remat=full")
    table = 32768 * 1024 / 4 * 2  # bf16
    for kind in ("reduce-scatter", "all-gather"):
        for block in ("embed", "head"):
            summed = by_reason(found, kind, ("stage",), block=block)
            assert summed == {"every stage": pytest.approx((1 - 1 / 2) * table, rel=1e-3)}


def test_matmuls_of_idle_rounds():
    found = expected("stage=2,fsdp=4,num_microbatches=4,schedule=1f1b,remat=full")
    one = 2 * 2 * 2048 * 1024 * 4096  # of one microbatch on a device
    assert found.flops["layer", "down"] == pytest.approx(4 * 4 * 3 * one)  # what follows it needs no second pass
    assert found.more_flops["layer", "down"] == {"idle rounds": pytest.approx(4 * 3 * one)}
    assert found.more_flops["head", "lm_head"] == {"dealt": pytest.approx(-found.flops["head", "lm_head"] / 2)}


def test_positions_that_do_not_divide_over_stages_are_not_dealt():
    plan = meshwise.estimate_train(
        MODEL.replace("L=8", "L=9"), on="h100:3", batch_tokens=3 * 2048, seq_len=2048,
        layout="stage=3,num_microbatches=3,micro_batch=1,schedule=1f1b,remat=full", precision="book",
    ).plans[0]  # fmt: skip
    found = expect(plan.problem, plan.fabric, plan.layout, plan.estimate.memory)
    assert not found.more_flops["head", "lm_head"]
    assert by_reason(found, "all-gather", ("stage",), block="layer") == {"dealt": 0.0}
    # Three divide neither 32,768 rows nor 1,024 columns: parameters and state of the table that the plan lacks, whole.
    assert found.more_memory["arguments"]["every stage"] == pytest.approx(32768 * 1024 * (2 + 8), rel=1e-3)


def test_memory_of_both_ends_and_of_what_is_in_flight():
    found = expected("stage=2,fsdp=4,num_microbatches=4,schedule=1f1b,remat=full")
    table = 32768 * 1024 / 4
    each = 2 * table * (2 + 8 / 2)  # two stages share what the update reads
    assert found.more_memory["arguments"]["every stage"] == pytest.approx(each - table * 10, rel=1e-3)
    state = sum(found.memory[name] for name in STATE)
    layers = 4 * (4 * 1024**2 + 3 * 1024 * 4096) / 4
    assert state + found.more_memory["arguments"]["every stage"] == pytest.approx(each + layers * 10, rel=1e-3)
    stream = 2 * 2048 * 1024 * 2
    held = found.more_memory["temporaries"]
    assert held["every stage"] == pytest.approx(table * 2, rel=1e-3)
    assert held["dealt"] == 4 * stream / 2
    # Three rounds lie between the passes of the first stage; the last, the fullest, has one microbatch by plan.
    assert held["in flight"] == pytest.approx(2 * found.memory["activations"])


def test_gpipe_holds_every_microbatch_and_the_logits_of_one():
    found = expected("stage=2,fsdp=4,num_microbatches=4,schedule=gpipe,remat=full")
    stream = 2 * 2048 * 1024 * 2
    held = found.more_memory["temporaries"]
    assert held["in flight"] == pytest.approx(found.memory["activations"] / 4 + 5 * stream)
    assert held["one head"] == pytest.approx((1 / 2 - 4) / 4 * found.memory["logits_and_loss"])
