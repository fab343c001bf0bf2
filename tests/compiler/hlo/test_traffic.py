"""Collectives and FLOPs of whole programs, against what the same program needs by hand; and what XLA made of them."""

import gzip
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from meshwise.compiler.hlo.bytes_moved import matmuls
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.reader import read_module
from meshwise.compiler.hlo.rewrites import meant_collectives
from meshwise.compiler.hlo.traffic import emitted_collectives

DATA = Path(__file__).parents[2] / "data" / "compiled"

V5P = "v5p_4x4x4_fsdp16_tensor4", DeviceMesh({"fsdp": 16, "tensor": 4})
SLICES = "v5e_2x2_two_slices_fsdp2_tensor4", DeviceMesh({"fsdp": 2, "tensor": 4}, (0,) * 4 + (1,) * 4)
V5E = "v5e_4x4_fsdp4_tensor4_two_microbatches", DeviceMesh({"fsdp": 4, "tensor": 4})
H100 = "h100_64_fsdp16_tensor4", DeviceMesh({"fsdp": 16, "tensor": 4})


@cache
def module(name):
    with gzip.open(DATA / f"{name}.hlo.gz", "rt", encoding="utf-8") as file:
        return read_module(file.read())


def flops_by_hand(*, d, f, n, k, h, v, tokens, ways, seq, layers=2):
    """Forward four times over (once again, and twice backward), but for the last product; head three times."""
    projections = 2 * tokens * d * h * (2 * n + 2 * k)
    attention = 2 * 2 * tokens * seq * n * h
    mlp = 3 * 2 * tokens * d * f
    again = 2 * tokens * d * f  # the layer's last product is not needed again
    return (layers * (4 * (projections + attention + mlp) - again) + 3 * 2 * tokens * d * v) / ways


SMALL = {"d": 1024, "f": 4096, "n": 8, "k": 8, "h": 128, "v": 8192, "tokens": 16 * 1024, "seq": 1024}


@pytest.mark.parametrize(("program", "ways"), [(V5P, 64), (SLICES, 8)])
def test_flops_of_a_tpu_program_are_those_of_its_matmuls(program, ways):
    assert sum(m.flops_per_step for m in matmuls(module(program[0]))) == flops_by_hand(ways=ways, **SMALL)


def test_flops_in_nested_loops_and_with_few_key_heads():
    wanted = flops_by_hand(d=4096, f=16384, n=32, k=8, h=128, v=32768, tokens=2 * 4 * 4096, ways=16, seq=4096)
    assert sum(m.flops_per_step for m in matmuls(module(V5E[0]))) == pytest.approx(wanted, rel=2e-4)


def test_flops_of_a_gpu_program():
    wanted = flops_by_hand(ways=64, **SMALL)
    assert sum(m.flops_per_step for m in matmuls(module(H100[0]))) == pytest.approx(wanted, rel=1e-4)


def weights_of_layers(*, d=1024, f=4096, n=8, k=8, h=128, layers=2):
    return 2 * layers * (d * h * (2 * n + 2 * k) + 3 * d * f)


def test_weights_are_gathered_once_a_pass():
    """FSDP: each device's tensor part of the layers' weights, forward and backward, bf16."""
    for name, mesh in (V5P, H100):
        gathered = sum(
            c.payload * c.count
            for c in emitted_collectives(module(name), mesh)
            if c.kind == "all-gather" and c.axes == ("fsdp",) and c.execution.loops
        )
        assert gathered == 2 * weights_of_layers() / 4


@pytest.mark.parametrize("program", [V5P, H100])
def test_gradients_of_layers_are_scattered(program):
    name, mesh = program
    scattered = sum(
        c.payload * c.count
        for c in emitted_collectives(module(name), mesh)
        if c.kind == "reduce-scatter" and c.axes == ("fsdp",)
    )
    assert scattered == weights_of_layers() / 4


@pytest.mark.parametrize("program", [V5P, SLICES, V5E, H100])
def test_every_group_runs_along_axes_of_the_mesh(program):
    name, mesh = program
    found = emitted_collectives(module(name), mesh)
    assert found
    assert all(c.axes and set(c.axes) <= set(mesh.sizes) for c in found)
    assert all(c.execution.certain for c in found)


def test_a_collective_in_several_steps_counts_once():
    """The two-slice program runs AllGathers beside up to four fusions each; every one has its number in all of them."""
    name, mesh = SLICES
    text = [i for c in module(name).computations.values() for i in c.instructions if i.opcode == "all-gather"]
    found = [c for c in emitted_collectives(module(name), mesh) if c.kind == "all-gather" and c.axes == ("tensor",)]
    assert len(text) == 84
    assert len(found) == 28


def test_what_crosses_slices_is_sent_along_the_axis_that_does():
    """Weights of layers, gathered in each pass, and of embedding and head; gradients scattered, bf16."""
    name, mesh = SLICES
    found = [c for c in emitted_collectives(module(name), mesh) if c.axes == ("fsdp",)]
    gathered = sum(c.received_per_step for c in found if c.kind == "all-gather")
    ends = 2 * 2 * 8192 * 1024 / 4
    assert gathered == pytest.approx((2 * weights_of_layers() / 4 + ends) / 2, rel=1e-3)
    scattered = sum(c.received_per_step for c in found if c.kind == "reduce-scatter")
    assert scattered == weights_of_layers() / 4 / 2
    assert all(c.asynchronous for c in found)


def test_sends_round_a_ring_are_the_collective_that_they_replaced():
    """Four devices: a product's scattered sum goes round both ways in five sends of a quarter, where three suffice."""
    name, mesh = V5E
    rings = [c for c in meant_collectives(module(name), mesh) if c.rewrite == "collective matmul"]
    assert {(c.kind, c.axes, len(c.members), c.count) for c in rings} == {
        ("reduce-scatter", ("tensor",), 5, 4),
        ("reduce-scatter", ("tensor",), 5, 2),
        ("reduce-scatter", ("fsdp",), 5, 2),
    }
    down = next(c for c in rings if c.count == 4)
    assert down.payload == 4096 * 4096 * 2
    assert down.needed == 0.75 * down.payload
    assert down.received == 1.25 * down.payload


def test_nothing_is_lost_between_what_was_emitted_and_what_was_meant():
    for name, mesh in (V5P, SLICES, V5E, H100):
        emitted = emitted_collectives(module(name), mesh)
        meant = meant_collectives(module(name), mesh)
        members = [e.instruction.name for m in meant for e in m.members]
        assert Counter(members) == Counter(e.instruction.name for e in emitted)


LOOPED = """HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%step (p: bf16[1024]) -> bf16[4096] {
  %p = bf16[1024]{0} parameter(0)
  ROOT %g = bf16[4096]{0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="3"}
}

%body (t: (s32[], bf16[1024])) -> (s32[], bf16[1024]) {
  %t = (s32[], bf16[1024]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %x = bf16[1024]{0} get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %m = s32[] add(%n, %one)
  %beside = bf16[4096]{0} fusion(%x), kind=kLoop, calls=%step
  ROOT %u = (s32[], bf16[1024]{0}) tuple(%m, %x)
}

%condition (t: (s32[], bf16[1024])) -> pred[] {
  %t = (s32[], bf16[1024]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %end = s32[] constant(8)
  ROOT %less = pred[] compare(%n, %end), direction=LT
}

%put (z: bf16[4096], q: bf16[1024], at: s32[]) -> bf16[4096] {
  %z = bf16[4096]{0} parameter(0)
  %q = bf16[1024]{0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %d = bf16[4096]{0} dynamic-update-slice(%z, %q, %at)
}

ENTRY %main (w: bf16[1024], at: s32[]) -> bf16[4096] {
  %w = bf16[1024]{0} parameter(0)
  %at = s32[] parameter(1)
  %start = bf16[4096]{0} fusion(%w), kind=kLoop, calls=%step
  %zero = s32[] constant(0)
  %state = (s32[], bf16[1024]{0}) tuple(%zero, %w)
  %loop = (s32[], bf16[1024]{0}) while(%state), condition=%condition, body=%body
  %none = bf16[] constant(0)
  %zeros = bf16[4096]{0} broadcast(%none), dimensions={}
  %mine = bf16[4096]{0} fusion(%zeros, %w, %at), kind=kLoop, calls=%put
  ROOT %all = bf16[4096]{0} all-reduce(%mine), channel_id=8, replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_steps_of_a_collective_in_a_loop_beside_it_are_no_further_collectives():
    """A gather starts before a loop and goes on beside its eight rounds: one gather; and a sum of zeros is another."""
    mesh = DeviceMesh({"fsdp": 4})
    meant = meant_collectives(read_module(LOOPED), mesh)
    assert [(c.kind, c.count, c.payload) for c in meant] == [("all-gather", 1, 8192), ("all-gather", 1, 8192)]
    assert [c.rewrite for c in meant] == ["", "sum of zeros"]  # zeros that were made outside of the update


def test_a_send_after_a_loop_belongs_to_the_ring_of_the_loop():
    """Of sixteen devices gradients are scattered in a loop of sends and one after it; none is left over as a gather."""
    name, mesh = V5P
    rings = [c for c in meant_collectives(module(name), mesh) if c.rewrite == "collective matmul"]
    assert all(c.kind == "reduce-scatter" for c in rings if c.axes == ("fsdp",))
    assert all(c.received >= c.needed for c in rings)
