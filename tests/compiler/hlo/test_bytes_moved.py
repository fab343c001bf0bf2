"""Bytes that programs read and write: of single instructions by hand, of whole programs against their matmuls."""

import gzip
from functools import cache
from pathlib import Path

import pytest

from meshwise.compiler.hlo.bytes_moved import matmuls, movements
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.reader import read_module
from meshwise.compiler.hlo.traffic import emitted_collectives, unread

DATA = Path(__file__).parents[2] / "data" / "compiled"


@cache
def module(name):
    with gzip.open(DATA / f"{name}.hlo.gz", "rt", encoding="utf-8") as file:
        return read_module(file.read())


def moved(text):
    return [(m.opcode, m.read, m.written, m.execution.times) for m in movements(read_module(text))]


def entry(*lines):
    return "\n".join(("HloModule m, is_scheduled=true", "", "ENTRY %main (x: f32[8,128]) -> f32[8,128] {", *lines, "}"))


X = "  %x = f32[8,128]{1,0} parameter(0)"


def test_operands_are_read_and_results_written():
    assert moved(entry(X, "  ROOT %y = f32[8,128]{1,0} add(%x, %x)")) == [("add", 2 * 4096, 4096, 1)]


def test_renaming_moves_nothing():
    assert moved(entry(X, "  ROOT %y = f32[1024]{0} bitcast(%x)")) == []


def test_what_lies_on_the_chip_moves_nothing():
    lines = (X, "  ROOT %y = f32[8,128]{1,0:T(8,128)S(1)} negate(%x)")
    assert moved(entry(*lines)) == [("negate", 4096, 0, 1)]


def test_a_part_is_read_of_what_is_cut():
    lines = (X, "  %i = s32[] constant(0)", "  ROOT %y = f32[1,128]{1,0} dynamic-slice(%x, %i, %i)")
    assert moved(entry(*lines)) == [("dynamic-slice", 512 + 8, 512, 1)]


def test_a_part_is_written_of_what_is_updated_in_place():
    lines = (
        X,
        "  %i = s32[] constant(0)",
        "  %u = f32[1,128]{1,0} slice(%x), slice={[0:1], [0:128]}",
        "  ROOT %y = f32[8,128]{1,0} dynamic-update-slice(%x, %u, %i, %i)",
    )
    assert moved(entry(*lines)) == [("slice", 512, 512, 1), ("dynamic-update-slice", 512, 512, 1)]


def test_a_copy_to_the_chip_is_read_once():
    lines = (
        X,
        "  %s = (f32[8,128]{1,0:S(1)}, f32[8,128]{1,0}, u32[]{:S(2)}) copy-start(%x)",
        "  ROOT %y = f32[8,128]{1,0:S(1)} copy-done(%s)",
    )
    assert moved(entry(*lines)) == [("copy-start", 4096, 0, 1)]


def test_a_matmul_of_a_library_leaves_its_workspace_out():
    call = '(f32[8,8]{1,0}, s8[33554432]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"'
    assert moved(entry(X, f"  ROOT %y = {call}")) == [("custom-call", 2 * 4096, 256, 1)]


def test_a_kernel_says_what_it_moves_where_it_leaves_parts_alone():
    call = '  ROOT %y = f32[8,128]{1,0} custom-call(%x), custom_call_target="mine", metadata={op_name="'
    assert moved(entry(X, f'{call}kernel.flops.640/call"}}')) == [("custom-call", 4096, 4096, 1)]
    assert moved(entry(X, f'{call}kernel.flops.640.bytes.5000/call"}}')) == [("custom-call", 904, 4096, 1)]
    silent = entry(X, f'{call}kernel.flops.0.bytes.0/call"}}')
    assert moved(silent) == []
    assert not unread(read_module(silent))


@pytest.mark.parametrize(("said", "rows"), [("", 1024), ("kernel.rows.512/", 512)])
def test_ragged_products_of_tpus_multiply_blocks_that_groups_share_for_each_of_them(said, rows):
    call = (
        "  ROOT %m = bf16[1024,256]{1,0} custom-call(%n, %r, %w), "
        'custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="128,64,256"}, '
        f'metadata={{op_name="expert.up/{said}ragged_dot_general/ragged-dot-none"}}'
    )
    text = entry(
        "  %n = s32[4]{0} parameter(0)",
        "  %r = bf16[1024,64]{1,0} parameter(1)",
        "  %w = bf16[4,64,256]{2,1,0} parameter(2)",
        call,
    )
    (product,) = matmuls(read_module(text))
    assert (product.flops, product.dtype, product.kernel) == (2 * (rows + 3 * 128) * 64 * 256, "bf16", True)
    assert moved(text) == [("custom-call", 16 + 2 * 64 * rows + 2 * 4 * 64 * 256, 2 * 256 * rows, 1)]


def test_a_ragged_exchange_moves_what_comes_on_average():
    """Room for four times as many rows as are sent: those are neither read nor written, nor sent."""
    given = "f32[2,128]{1,0}, f32[8,128]{1,0}, s64[2]{0}, s64[2]{0}, s64[2]{0}, s64[2]{0}"
    groups = "replica_groups={{0,1}}"
    lines = (
        X,
        "  %s = f32[2,128]{1,0} slice(%x), slice={[0:2], [0:128]}",
        "  %n = s64[2]{0} constant({1, 1})",
        f"  %a = (({given}), f32[8,128]{{1,0}}) ragged-all-to-all-start(%s, %x, %n, %n, %n, %n), {groups}",
        "  ROOT %d = f32[8,128]{1,0} ragged-all-to-all-done(%a)",
    )
    text = entry(*lines).replace("is_scheduled=true", "is_scheduled=true, num_partitions=2")
    assert moved(text)[1:] == [("ragged-all-to-all-start", 1024, 0, 1), ("ragged-all-to-all-done", 0, 1024, 1)]
    (one,) = emitted_collectives(read_module(text), DeviceMesh({"expert": 2}))
    assert (one.kind, one.axes, one.received) == ("all-to-all", ("expert",), 512.0)


def fused(*inside):
    return "\n".join(
        (
            "HloModule m, is_scheduled=true",
            "",
            "%inner (p: f32[8,128], q: f32[1,128]) -> f32[8,128] {",
            "  %p = f32[8,128]{1,0} parameter(0)",
            "  %q = f32[1,128]{1,0} parameter(1)",
            "  %i = s32[] constant(0)",
            *inside,
            "}",
            "",
            "ENTRY %main (x: f32[8,128], y: f32[1,128]) -> f32[8,128] {",
            X,
            "  %y = f32[1,128]{1,0} parameter(1)",
            "  ROOT %z = f32[8,128]{1,0} fusion(%x, %y), kind=kLoop, calls=%inner",
            "}",
        )
    )


def test_within_a_fusion_nothing_is_stored():
    lines = ("  %a = f32[8,128]{1,0} negate(%p)", "  ROOT %b = f32[8,128]{1,0} add(%a, %p)")
    assert moved(fused(*lines)) == [("fusion", 4096, 4096, 1)]


def test_a_fusion_updates_in_place():
    lines = (
        "  %c = f32[1,128]{1,0} dynamic-slice(%p, %i, %i)",
        "  %a = f32[1,128]{1,0} add(%c, %q)",
        "  ROOT %b = f32[8,128]{1,0} dynamic-update-slice(%p, %a, %i, %i)",
    )
    assert moved(fused(*lines)) == [("fusion", 512 + 512, 512, 1)]


def test_a_fusion_within_a_fusion_cuts_and_updates_too():
    lines = (
        "%within (s: f32[8,128], r: f32[1,128]) -> f32[8,128] {",
        "  %s = f32[8,128]{1,0} parameter(0)",
        "  %r = f32[1,128]{1,0} parameter(1)",
        "  %n = s32[] constant(0)",
        "  %c = f32[1,128]{1,0} dynamic-slice(%s, %n, %n)",
        "  %a = f32[1,128]{1,0} add(%c, %r)",
        "  ROOT %u = f32[8,128]{1,0} dynamic-update-slice(%s, %a, %n, %n)",
        "}",
    )
    within = "\n".join(lines)
    text = fused("  ROOT %b = f32[8,128]{1,0} fusion(%p, %q), kind=kLoop, calls=%within")
    text = text.replace("%inner (p", f"{within}\n\n%inner (p")
    assert moved(text) == [("fusion", 512 + 512, 512, 1)]
    read_whole = text.replace("add(%c, %r)", "slice(%whole), slice={[0:1], [0:128]}")
    read_whole = read_whole.replace("  %a = ", "  %whole = f32[8,128]{1,0} negate(%s)\n  %a = ")
    assert moved(read_whole) == [("fusion", 4096, 512, 1)]


def test_a_fusion_that_copies_reads_all():
    assert moved(fused("  ROOT %b = f32[8,128]{1,0} copy(%p)")) == [("fusion", 4096, 4096, 1)]


@pytest.mark.parametrize("name", ["h100_64_fsdp16_tensor4", "v5p_4x4x4_fsdp16_tensor4"])
def test_a_program_moves_more_than_its_matmuls_must(name):
    """Each layer's local weights are read three times at least: forward, recomputed, backward."""
    d, f, heads, layers, tensor = 1024, 4096, 8 * 128, 2, 4
    weights = 2 * (4 * d * heads + 3 * d * f) / tensor
    found = sum(m.bytes_per_step for m in movements(module(name)))
    streams = 2 * (16 * 1024 // 64) * d
    assert found > 3 * layers * (weights + streams)
    assert found < 100 * layers * (weights + streams)


def test_loops_count_as_often_as_they_run():
    text = """HloModule m, is_scheduled=true

%body (s: (s32[], f32[256])) -> (s32[], f32[256]) {
  %s = (s32[], f32[256]{0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %v = f32[256]{0} get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %m = s32[] add(%n, %one)
  %w = f32[256]{0} negate(%v)
  ROOT %t = (s32[], f32[256]{0}) tuple(%m, %w)
}

%cond (s: (s32[], f32[256])) -> pred[] {
  %s = (s32[], f32[256]{0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %five = s32[] constant(5)
  ROOT %c = pred[] compare(%n, %five), direction=LT
}

ENTRY %main (x: f32[256]) -> (s32[], f32[256]) {
  %x = f32[256]{0} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], f32[256]{0}) tuple(%zero, %x)
  ROOT %r = (s32[], f32[256]{0}) while(%t), condition=%cond, body=%body
}
"""
    assert ("negate", 1024, 1024, 5) in moved(text)
