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
    assert runs_beyond(gpipe, "layer", "forward", 5.0) == {"idle rounds": 15.0}
    assert runs_beyond(one, "layer", "backward", 5.0) == {"idle rounds": 15.0}
    assert runs_beyond(one, "layer", "forward", 5.0) == {"idle rounds": 15.0, "forward again": 55.0}
    assert runs_beyond(gpipe, "embed", "backward", 0.0) == {"every stage": 8.0, "idle rounds": 3.0}
    assert runs_beyond(one, "embed", "backward", 0.0) == {"every stage": 8.0, "idle rounds": 4.0}
    for rounds in (gpipe, one):
        assert runs_beyond(rounds, "head", "forward", 1.0) == {}  # once a microbatch
    interleaved = Rounds("interleaved", stages=4, pieces=2, num_microbatches=8)
    assert runs_beyond(interleaved, "layer", "backward", 6.0) == {"idle rounds": 6.0 * (19 / 2 - 8)}
    again = {"idle rounds": 6.0 * (23 / 2 - 8), "forward again": 6.0 * 19 / 2}
    assert runs_beyond(interleaved, "layer", "forward", 6.0) == again


def test_gathers_of_idle_rounds_and_of_blocks_on_every_stage():
    found = expected("stage=2,fsdp=4,num_microbatches=4,schedule=gpipe,remat=full")
    layer = 3 / 4 * WEIGHT * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024)  # of which a device receives
    table = 3 / 4 * WEIGHT * 32768 * 1024
    gathers = by_reason(found, "all-gather", ("fsdp",))
    assert gathers["idle rounds"] == pytest.approx(2 * 4 * layer * 1 + table, rel=1e-6)  # both passes; the table once
    assert gathers["every stage"] == pytest.approx(4 * table, rel=1e-6)
    scatters = by_reason(found, "reduce-scatter", ("fsdp",), block="embed")
    assert scatters == {
        "every stage": pytest.approx(4 * table, rel=1e-6),
        "idle rounds": pytest.approx(table, rel=1e-6),
    }


@pytest.mark.parametrize(("schedule", "number"), [("gpipe", 5), ("1f1b", 5)])
def test_streams_between_stages(schedule, number):
    found = expected(f"stage=2,fsdp=4,num_microbatches=4,schedule={schedule},remat=full")
    stream = 2 * 2048 * 1024 * 2  # two sequences of a microbatch on a device, in bf16
    sends = by_reason(found, "permute", ("stage",))
    assert sends == {"": 4 * stream, "idle rounds": (2 * number - 4) * stream}


def test_gradients_of_what_every_stage_holds_are_added_up_once():
    found = expected("stage=2,fsdp=4,num_microbatches=4,schedule=1f1b,remat=full")
    tables = 2 * 32768 * 1024 / 4 * 2  # bf16
    summed = by_reason(found, "all-reduce", ("stage",))
    assert summed == {"every stage": pytest.approx(2 * (1 - 1 / 2) * tables, rel=1e-3)}


def test_matmuls_of_idle_rounds():
    found = expected("stage=2,fsdp=4,num_microbatches=4,schedule=1f1b,remat=full")
    one = 2 * 2 * 2048 * 1024 * 4096  # of one microbatch on a device
    assert found.flops["layer", "down"] == pytest.approx(4 * 4 * 3 * one)  # what follows it needs no second pass
    assert found.more_flops["layer", "down"] == {
        "idle rounds": pytest.approx(4 * 3 * one),
        "forward again": pytest.approx(4 * 5 * one),
    }
    assert not found.more_flops["head", "lm_head"]


def test_memory_of_both_ends_and_of_what_is_in_flight():
    found = expected("stage=2,fsdp=4,num_microbatches=4,schedule=1f1b,remat=full")
    table = 32768 * 1024 / 4
    assert found.more_memory["arguments"]["every stage"] == pytest.approx(table * (2 + 8), rel=1e-3)
    state = sum(found.memory[name] for name in STATE)
    layers = 4 * (4 * 1024**2 + 3 * 1024 * 4096) / 4
    assert state + found.more_memory["arguments"]["every stage"] == pytest.approx((2 * table + layers) * 10, rel=1e-3)
    stream = 2 * 2048 * 1024 * 2
    held = found.more_memory["temporaries"]
    assert held["every stage"] == pytest.approx(table * 2, rel=1e-3)
    assert held["inputs held"] == 3 * stream  # the last stage, the fullest, has one microbatch in flight by plan, too


def test_gpipe_holds_every_round_and_the_logits_of_one_microbatch():
    found = expected("stage=2,fsdp=4,num_microbatches=4,schedule=gpipe,remat=full")
    stream = 2 * 2048 * 1024 * 2
    held = found.more_memory["temporaries"]
    assert held["rounds held"] == pytest.approx(found.memory["activations"] / 4 + 5 * stream)
    assert held["one head"] == pytest.approx(-3 / 4 * found.memory["logits_and_loss"])
