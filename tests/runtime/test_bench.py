"""Operations measured on this machine: their rows, their words, and what cannot be measured."""

import csv
import json
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial

import jax
import numpy as np
import pytest

import meshwise
from meshwise.cli.main import COMMANDS
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.alone import AttentionShape
from meshwise.costs.local_shapes import ProductShape
from meshwise.costs.machine import ENGINE_STEPS, FEW_ROWS, PAGED, MeasuredOperation, engine_step, write_rows
from meshwise.hardware.cluster_file import read_cluster
from meshwise.runtime.bench import Bench
from meshwise.runtime.devices import machine_memory, share_of_machine
from meshwise.sharding import CollectiveKind

COLUMNS = [f.name for f in fields(MeasuredOperation)]


@pytest.mark.jax
def test_a_larger_product_takes_longer_and_its_rate_is_its_flops():
    found = meshwise.bench("matmul", dtype="fp32", sizes="64x64x64,512x512x512", seconds="20ms")
    small, large = found.rows
    assert large.measured.seconds > small.measured.seconds
    assert large.rate == pytest.approx(2 * 512**3 / large.measured.seconds)
    assert (small.measured.m, small.measured.n, small.measured.k) == (64, 64, 64)
    assert (found.chip, large.expected, large.measured.chip) == (None, None, "cpu")


@pytest.mark.jax
@pytest.mark.parametrize("kind", [k for k in CollectiveKind if k is not CollectiveKind.SLICE])
def test_every_collective_runs_over_all_devices(kind):
    sample = Bench(seconds=0.005).collective(kind, 4096, "fp32")
    assert 0 < sample.low <= sample.seconds <= sample.high
    assert sample.calls >= 5


@pytest.mark.jax
def test_causal_attention_is_that_of_whole_sequences():
    found = meshwise.bench(
        "attention", dtype="fp32", sizes="1x16x16,2x1x16", heads=4, kv_heads=2, head_dim=8, seconds="5ms"
    )
    whole, last = (row.measured for row in found.rows)
    assert (whole.category, whole.causal, last.category, last.causal) == (
        "attention prefill",
        "yes",
        "attention decode",
        "no",
    )
    assert found.rows[0].work == 4 * 4 * 8 * 16 * 17 / 2
    assert found.rows[1].work == 4 * 2 * 4 * 8 * 16


def _plan(tmp_path):
    found = meshwise.estimate_train(
        "D=64 F=128 L=2 N=4 K=2 V=128", on="h100:8", batch_tokens=1024, seq_len=128, layout="fsdp=8,remat=none"
    )
    file = tmp_path / "plan.json"
    file.write_text(found.plans[0].to_json())
    return str(file)


@pytest.mark.jax
def test_a_plan_s_own_operations_run_as_large_as_one_device_has_them(tmp_path):
    found = meshwise.bench("plan", _plan(tmp_path), seconds="2ms")
    by_name = {row.text.partition(":")[0]: row for row in found.rows}
    q, attention = by_name["q"].measured, by_name["attention"].measured
    assert (q.m, q.k, q.n, q.dtype) == (128, 64, 64, "bf16")
    assert (attention.seq_q, attention.heads, attention.kv_heads, attention.head_dim) == (128, 4, 2, 16)
    assert by_name["q"].expected is None, "this is no H100"
    assert by_name["q"].times == 2 * 4, "q and o of two layers, forward and backward"
    back = by_name["dattention (backward)"]
    assert (back.measured.category, back.work) == ("attention gradient", 2.5 * by_name["attention"].work)


@pytest.mark.jax
def test_experts_and_windows_of_a_plan_run_as_training_runs_them(tmp_path):
    """Each is held to a layer's own numbers: 128 tokens with 2 of 4 experts, and the 32 nearest of 128 keys."""
    found = meshwise.estimate_train(
        "D=64 F=128 Fe=32 E=4 top_k=2 L=2 N=4 K=2 V=128 window=32", on="h100:8", batch_tokens=1024, seq_len=128,
        layout="fsdp=8,remat=none",
    )  # fmt: skip
    file = tmp_path / "plan.json"
    file.write_text(found.plans[0].to_json())
    rows = {row.text.partition(":")[0]: row for row in meshwise.bench("plan", str(file), seconds="1ms").rows}
    gate, summed = rows["expert.gate"], rows["dexpert.up.w_expert.up (weights)"]
    assert (gate.measured.batch, gate.measured.m, gate.measured.k, gate.measured.n) == (4, 64, 64, 32)
    assert gate.work == summed.work == 2 * 4 * 64 * 64 * 32
    near = rows["attention"]
    assert near.measured.op == "attention (causal, a window of 32)"
    assert (near.measured.category, near.work) == ("attention special", 4 * 4 * 16 * (32 * 33 / 2 + 96 * 32))


@pytest.mark.jax
def test_what_is_timed_is_what_it_is_named(monkeypatch):
    """Grouped products beside plain ones, a windowed attention and its gradient beside a mask on all scores."""
    seen = []
    monkeypatch.setattr(Bench, "_time", lambda _, function, *operands: seen.append((function, operands)))
    devices, shape = Bench(), AttentionShape(2, 16, 64, 4, 2, 8, 8, causal=True, pairs=1.0, window=12)
    devices.grouped(ProductShape(4, 8, 16, 3), "fp32")
    devices.grouped(ProductShape(8, 4, 16, 3, summed=True), "fp32")
    devices.attention(shape, "fp32")
    devices.attention(replace(shape, gradient=True), "fp32")
    (many, (x, w)), (summed, (left, right)), (forward, given), (back, (*_, total, d_out, shift)) = seen

    np.testing.assert_allclose(many(x, w), np.einsum("gmk,gkn->gmn", x.reshape(3, 4, 8), w).reshape(12, 16), rtol=1e-5)
    expected = np.einsum("gkm,gkn->gmn", left.reshape(3, 4, 8), right.reshape(3, 4, 16))
    np.testing.assert_allclose(summed(left, right), expected, rtol=1e-5, atol=1e-5)

    positions, keys = np.arange(24, 40)[:, None], np.arange(64)
    mask = (keys <= positions) & (keys > positions - 12)
    plain = partial(jax.nn.dot_product_attention, mask=mask[None, None])
    np.testing.assert_allclose(forward(*given), plain(*given), rtol=1e-4, atol=1e-5)
    for found, one in zip(back(*given, total, d_out, shift), jax.vjp(plain, *given)[1](d_out), strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-3, atol=1e-5)


def test_a_plan_s_file_goes_with_plan_alone(tmp_path):
    for asked in (("plan",), ("matmul", _plan(tmp_path))):
        with pytest.raises(MeshwiseError, match="expected a plan's file"):
            meshwise.bench(*asked)
    with pytest.raises(MeshwiseError, match="leave out --dtype"):
        meshwise.bench("plan", _plan(tmp_path), dtype="bf16")


@pytest.mark.jax
def test_rows_are_written_in_the_documented_columns_and_nothing_is_overwritten(tmp_path):
    file = tmp_path / "rows.csv"
    rows = [row.measured for row in meshwise.bench("memory", sizes="64KiB,1MiB", seconds="5ms").rows]
    write_rows(file, rows)
    with file.open() as lines:
        read = list(csv.DictReader(lines))
    assert list(read[0]) == COLUMNS
    assert [float(r["measured_value"]) for r in read] == [r.measured_value for r in rows]
    assert [(r["bytes"], r["m"], r["unit"]) for r in read] == [("65536", "", "ms"), ("1048576", "", "ms")]
    with pytest.raises(MeshwiseError, match="nothing was overwritten"):
        write_rows(file, rows)
    page = (tmp_path.__class__(__file__).parents[2] / "docs" / "measurements.md").read_text()
    assert all(f"`{name}`" in page for name in COLUMNS)


@pytest.mark.jax
def test_a_machine_is_a_cluster_of_the_devices_that_share_it(monkeypatch):
    monkeypatch.setattr("meshwise.costs.machine._STREAMED", 1 << 24)  # a layer or two, which caches hold
    monkeypatch.setattr("meshwise.runtime.bench._CALLS", 1)
    monkeypatch.setattr("meshwise.engine.step_bench._STEPS", 1)
    found = meshwise.bench("machine", dtype="fp32", seconds="1ms")
    assert [row.measured.op for row in found.rows if row.measured.category != "collective"] == [
        *["GEMM (m,k)x(k,n)"] * 3, "copy", "copy", "silu_mul", "empty program",
        *[FEW_ROWS] * 14, *[PAGED] * 3, *(engine_step(*one) for one in ENGINE_STEPS),
    ]  # fmt: skip
    assert {row.measured.n_chips for row in found.rows} == {8}
    cluster = read_cluster(found.document, name="machine", where="machine.toml")
    assert cluster.num_chips == 8
    assert cluster.chip.title == share_of_machine(8)
    assert cluster.chip.hbm_capacity == pytest.approx(machine_memory() / 8, rel=1e-3)
    measured = cluster.chip.measured
    assert [rows for rows, *_ in measured.few_rows[DType.FP32]] == [1, 2, 4, 8, 16, 64, 256]


def test_files_that_cannot_be_written_are_said_before_anything_is_measured(tmp_path, monkeypatch):
    (tmp_path / "there.csv").touch()
    monkeypatch.setattr("meshwise.commands.bench.Bench", lambda *_, **__: pytest.fail("it was measured"))
    for words, message in [
        (["matmul", "--save-cluster", "m.toml"], "matmul describes no cluster"),
        (["matmul", "--save", str(tmp_path / "there.csv")], "nothing was overwritten"),
        (["machine", "--save-cluster", str(tmp_path / "none" / "m.toml")], "is no folder that can be written to"),
    ]:
        with pytest.raises(MeshwiseError, match=message):
            COMMANDS["bench"].load().main(words, standalone_mode=False)


@pytest.mark.jax
def test_fake_devices_of_a_new_process():
    words = ["collectives", "--cpu-devices", "2", "--sizes", "1KiB", "--seconds", "1ms", "--json"]
    command = [sys.executable, "-m", "meshwise", "bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    answer = json.loads(done.stdout)
    assert answer["num_devices"] == 2
    assert {row["op"] for row in answer["rows"]} == {
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"what": "matmul", "sizes": "4x4"}, "--sizes: expected sizes such as 4096x4096x4096, found '4x4'"),
        ({"what": "memory", "sizes": "many"}, "--sizes: expected sizes such as 1MiB,16MiB, found 'many'"),
        (
            {"what": "machine", "sizes": "1MiB"},
            "--sizes: a machine is measured at the sizes that its description needs",
        ),
        ({"what": "machine", "dtype": "int8"}, "--dtype int8: plans run in bf16 or fp32 on a CPU"),
        ({"what": "memory", "dtype": "int8"}, "--dtype int8: copies are of fp32"),
        ({"what": "attention", "heads": 6, "kv_heads": 4}, "--heads 6: expected a multiple of --kv-heads 4"),
        ({"what": "collectives", "on": "h100:8"}, "--on h100:8: expected the cluster that this runs on, found 8 x cpu"),
        ({"what": "matmul", "cpu_devices": 3}, "3 fake devices were asked for, but JAX has looked for devices before"),
    ],
)
def test_words_for_what_cannot_be_measured(given, message):
    Bench()  # devices have been looked for
    with pytest.raises(MeshwiseError, match="^.*" + message.split("(", maxsplit=1)[0]):
        meshwise.bench(**given)
