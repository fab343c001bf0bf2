"""Single operations refine a calibration: rates move to what rows say; rows that say something else are left out."""

import json

import pytest

import meshwise
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.alone import AttentionShape, attention_work, collective_seconds, local_seconds, product_work
from meshwise.costs.calibration_files import read_calibration_file
from meshwise.costs.fitted import find_calibration
from meshwise.costs.machine import MeasuredOperation, rows_text
from meshwise.hardware import load_chip, parse_cluster
from meshwise.sharding import CollectiveKind

CHIP = load_chip("h100-sxm")
BASE = find_calibration("fitted", CHIP)
PROMPT = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "seq_q": 8192, "seq_kv": 8192}
MANY = [(8192, 8192, 8192), (4096, 14336, 4096), (16384, 4096, 8192)]


def row(name, category, seconds, **more):
    fixed = {"chip": "h100-sxm", "n_chips": 1, "dtype": "bf16", "op": category, "measured_value": seconds, "unit": "s"}
    return MeasuredOperation(id=name, category=category, **{**fixed, **more})


def product(name, m, k, n, *, factor=1.0, dtype=DType.BF16):
    seconds = local_seconds(CHIP, dtype, *product_work(m, k, n, dtype), BASE)
    return row(name, "gemm", seconds * factor, m=m, k=k, n=n, dtype=dtype.value)


def sum_of(name, num_bytes, factor=1.0, **more):
    seconds = collective_seconds(parse_cluster("h100:8"), CollectiveKind.ALL_REDUCE, num_bytes, BASE)
    return row(name, "collective", seconds * factor, op="all_reduce", n_chips=8, bytes=num_bytes, dtype="", **more)


def calibrate(tmp_path, *rows, **asked):
    file = tmp_path / "rows.csv"
    file.write_text(rows_text(rows))
    return meshwise.calibrate(str(file), **asked)


def test_what_takes_as_long_as_expected_moves_nothing(tmp_path):
    attention = local_seconds(
        CHIP, DType.BF16, *attention_work(AttentionShape.of(*PROMPT_SIZES, causal=True), DType.BF16), BASE, attends=True
    )
    found = calibrate(
        tmp_path,
        *(product(str(i), *sizes) for i, sizes in enumerate(MANY)),
        row("attention", "attention prefill", attention, causal="yes", **PROMPT),
        row("copy", "memory", 2**32 / (CHIP.hbm_bandwidth * BASE.hbm_efficiency), bytes=2**32, dtype="fp32"),
        sum_of("sum", 2**28),
    )
    assert not found.refusals
    assert {c.name: found.fit.values[c.name] for c in found.constants} == pytest.approx(
        {c.name: c.read(BASE) for c in found.constants}
    )
    assert {c.name for c in found.constants} == {
        "matmul.hopper", "attention.hopper", "memory.hopper", "links.hopper",
    }  # fmt: skip


PROMPT_SIZES = [PROMPT[name] for name in ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim")]


def test_rates_move_towards_what_many_rows_agree_on_and_no_other_does(tmp_path):
    slow = [product(f"{i}-{n}", *sizes, factor=1.2) for n in range(4) for i, sizes in enumerate(MANY)]
    found = calibrate(tmp_path, *slow)
    assert [c.name for c in found.constants] == ["matmul.hopper"]
    assert found.calibration.matmul_efficiency == pytest.approx(BASE.matmul_efficiency / 1.2, rel=0.03)
    assert found.calibration.links == BASE.links
    assert max(map(abs, found.after)) < 0.03 < min(map(abs, found.before))
    one = calibrate(tmp_path, product("one", *MANY[0], factor=1.2))
    assert BASE.matmul_efficiency / 1.2 < one.calibration.matmul_efficiency < BASE.matmul_efficiency


def test_a_format_has_a_rate_of_its_own(tmp_path):
    found = calibrate(
        tmp_path, *(product(str(i), *sizes, factor=0.95, dtype=DType.FP8) for i, sizes in enumerate(MANY))
    )
    assert [c.name for c in found.constants] == ["fp8.hopper"]
    assert found.calibration.matmul_efficiency == BASE.matmul_efficiency


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (sum_of("x", 2**28, notes="3 runs a step, beside computation"), "it ran beside computation"),
        (sum_of("x", 2**28, notes="alone; one rank: waiting for others is in it"), "waiting for other ranks is in"),
        (product("x", 128, 128, 128), "a launch and little else; expected 20 us or more"),
        (product("x", *MANY[0], factor=0.5), "s that data sheet and network allow"),
        (row("x", "vector", 1e-3, bytes=1 << 20), "vector: no constant of a calibration"),
        (row("x", "gemm", 1e-3, m=8192, k=8192), "column n: expected a value, found a blank cell"),
        (row("x", "gemm", 1e-3, m=8192, k=8192, n=8192, dtype="fp4"), "column dtype: expected one of bf16"),
        (row("x", "gemm", 1e-3, m=8192, k=8192, n=8192, unit="min"), "column unit: expected one of s, ms, us"),
        (
            row("x", "attention prefill", 1e-2, causal="yes", **{**PROMPT, "seq_q": 1024}),
            "expected as many queries as keys",
        ),
        (row("x", "attention special", 1e-2, causal="yes", **PROMPT), "attention special: no constant of a cal"),
        (row("x", "collective", 1e-3, op="gossip", bytes=1 << 28, n_chips=8), "column op: expected one of all_gather"),
        (row("x", "collective", 1e-3, op="all_reduce", bytes=1 << 28, n_chips=11), "11 x h100-sxm is not known"),
    ],
)
def test_rows_that_say_something_else_are_left_out_with_the_reason(tmp_path, given, reason):
    found = calibrate(tmp_path, product("good", *MANY[0]), given)
    assert [p.run.id for p in found.rows] == ["good"]
    assert reason in found.refusals[0].reason
    with pytest.raises(MeshwiseError, match="no row can be used to calibrate: x: "):
        calibrate(tmp_path, given)


def test_the_network_is_the_one_that_is_named(tmp_path):
    found = calibrate(tmp_path, product("good", *MANY[0]), sum_of("x", 2**28), on="h100:16")
    assert "--on h100:16: expected the 8 x h100-sxm that took part, found 16" in found.refusals[0].reason


def test_a_file_of_single_operations_leaves_intervals_as_wide_as_they_were(tmp_path):
    file = tmp_path / "ours.json"
    calibrate(tmp_path, *(product(str(i), *sizes, factor=1.2) for i, sizes in enumerate(MANY)), save=file)
    assert json.loads(file.read_text())["measured"]["of"] == "single operations"
    applied = read_calibration_file(file).applied(BASE, "ours.json")
    assert applied.uncertainty_sources == BASE.uncertainty_sources
    assert applied.matmul_efficiency < BASE.matmul_efficiency
    asked = {"batch_tokens": "1Mi", "seq_len": 4096, "layout": "fsdp=8,remat=full"}
    before = meshwise.estimate_train("llama-3-8b", on="h100:8", **asked).plans[0].estimate.step_time.expected
    after = meshwise.estimate_train("llama-3-8b", on="h100:8", calibration=str(file), **asked)
    assert after.plans[0].estimate.step_time.expected > 1.05 * before


def test_operations_are_of_no_model(tmp_path):
    with pytest.raises(MeshwiseError, match="--model: single operations are of no model; leave it out"):
        calibrate(tmp_path, product("good", *MANY[0]), model="llama-3-8b")
