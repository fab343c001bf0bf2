"""From measured operations of a CPU's devices to a cluster, and what is priced on it."""

import re
from dataclasses import replace

import pytest

import meshwise
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import FEW_ROWS_SIDES
from meshwise.costs.engines import find_serving_calibration
from meshwise.costs.machine import (
    CACHED,
    DECODING,
    ENGINE_STEPS,
    FEW_ROWS,
    PAGED,
    MeasuredOperation,
    TimedLayers,
    engine_step,
    machine_document,
)
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.engine import bucketed_costs
from meshwise.hardware.cluster_file import read_cluster
from meshwise.jobs import ServingLoad
from meshwise.models import read_dimensions
from meshwise.sharding.serving import ServingLayout

GIB = 2**30


def row(category, op, milliseconds, **columns):
    given = {"id": op, "source": "test", "chip": "cpu", "year": 2026, "hardware": "cpu", "n_chips": 4, "dtype": "fp32"}
    return MeasuredOperation(
        **{**given, "software": "jax", **columns}, category=category, op=op, measured_value=milliseconds
    )


def square(n, rate, **columns):
    return row("gemm", "GEMM", 2e3 * n**3 / rate, m=n, n=n, k=n, **columns)


#: Four devices whose links take 100 us and carry 2 GB/s each way; what every kind takes for 3 MB, worked by hand.
ROWS = [
    square(64, 1e9), square(256, 8e9), square(512, 10e9), square(1024, 12e9), square(512, 4e9, dtype="bf16"),
    row("memory", "copy", 1.0, bytes=2 * 10**6), row("memory", "copy", 10.0, bytes=3 * 10**7),
    row("vector", "silu_mul", 0.25, bytes=12 * 10**5),
    row("overhead", "empty program", 0.05),
    *(row("collective", op, 0.1, bytes=1) for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")),
    row("collective", "all_gather", 0.1 + 3 * 3 / 4 / 2, bytes=3 * 10**6),  # 3/4 of it comes from others
    row("collective", "reduce_scatter", 0.1 + 3 * 3 / 4 / 2, bytes=3 * 10**6),
    row("collective", "all_reduce", 0.1 + 2 * 3 * 3 / 4 / 2, bytes=3 * 10**6),
    row("collective", "all_to_all", 0.1 + 3 * 3 / 4 / 2, bytes=3 * 10**6),  # what each exchanges
]  # fmt: skip


def document(rows=ROWS, num_devices=4):
    return machine_document(rows, title="1/4 of a machine", num_devices=num_devices, memory=16 * GIB)


def test_the_document_is_a_cluster_with_the_measured_rates():
    cluster = read_cluster(document(), name="machine", where="machine.toml")
    chip, level = cluster.chip, cluster.network.levels[0]
    assert (cluster.num_chips, chip.name, chip.title, chip.vendor) == (4, "cpu-1of4", "1/4 of a machine", "cpu")
    assert chip.peak(DType.FP32) == pytest.approx(10e9)  # the median of large ones
    assert chip.peak(DType.BF16) == pytest.approx(4e9)
    assert chip.hbm_bandwidth == pytest.approx(3e9)
    assert chip.vector_flops_per_s == pytest.approx(5 * 1e5 / 0.25e-3, rel=1e-3)
    assert chip.hbm_capacity == 4 * GIB
    assert level.bandwidth_per_chip_one_way == pytest.approx(2e9, rel=0.01)
    assert level.latency == pytest.approx(100e-6)
    assert chip.source("hbm_bandwidth").title == "given in machine.toml"


def test_one_device_needs_no_collectives():
    alone = [replace(r, n_chips=1) for r in ROWS if r.category != "collective"]
    assert read_cluster(document(alone, 1), name="machine", where="machine.toml").num_chips == 1


@pytest.mark.parametrize("category", ["gemm", "memory", "vector", "collective"])
def test_what_is_missing_is_said(category):
    with pytest.raises(MeshwiseError, match=r"among the measurements, found none|of the category .*, found none"):
        document([r for r in ROWS if r.category != category])


def test_nothing_hides_where_the_same_cores_compute_and_move_bytes(tmp_path):
    file = tmp_path / "machine.toml"
    file.write_text(document())
    asked = {"batch_tokens": "8Ki", "seq_len": 128, "precision": "fp32", "layout": "fsdp=2,data=2,zero=1,remat=none"}
    priced = {
        name: meshwise.estimate_train(
            "D=128 F=512 L=4 N=4 K=4 H=32 V=512", cluster=str(file), calibration=name, **asked
        ).plans[0].estimate
        for name in ("operations", "fitted", "none")
    }  # fmt: skip
    assert priced["fitted"] == priced["operations"]  # its own rates are all that is known of it
    assert sum(priced["none"].hidden.values()) > 0
    assert sum(priced["operations"].hidden.values()) == 0
    assert priced["operations"].step_time.expected > priced["none"].step_time.expected
    with pytest.raises(MeshwiseError, match="its constants are of GPUs and TPUs"):
        meshwise.estimate_train(
            "D=128 F=512 L=4 N=4 K=4 H=32 V=512", cluster=str(file), calibration="fitted+xla", **asked
        )


#: One query of 8 requests reads 1 GB/s beyond 50 us; a prompt is attended to at 2 GFLOP/s; a step takes 1 ms, 50 us a
#: request and 20 us a layer.
HEADS = {"heads": 12, "kv_heads": 4, "head_dim": 64}
PROMPT_MS = 512 * 513 * 1536 / 2e9 * 1e3
FEW = [(1, 0.5e9, 1e9), (8, 3e9, 4e9), (64, 5e9, 8e9)]


def step_ms(rows, side, rate, dtype="fp32"):
    layers = TimedLayers(side, dtype)
    cached = 8 * rows * 128 * layers.hidden / 1e9
    attention = cached if rows in DECODING else 4 * layers.hidden * rows * (rows + 1) / 2 / 2e9
    besides = 1e-3 + 50e-6 * (rows if rows in DECODING else 1) + layers.number * (70e-6 + attention)
    return (besides + layers.flops(rows) / rate) * 1e3


SERVING = [
    *(
        row("overhead", FEW_ROWS, step_ms(m, n, rate), m=m, n=n, k=n)
        for m, *rates in FEW
        for n, rate in zip(FEW_ROWS_SIDES, rates, strict=True)
    ),
    *(
        row("attention decode", PAGED, 0.05 + n * 16384e-6, batch=8, seq_q=1, seq_kv=n, causal="no", **HEADS)
        for n in CACHED
    ),
    row("attention prefill", PAGED, PROMPT_MS, batch=1, seq_q=512, seq_kv=512, causal="yes", **HEADS),
    *(row("overhead", engine_step(*w), t) for w, t in zip(ENGINE_STEPS, (1.02, 1.18, 1.37), strict=True)),
]  # fmt: skip


def test_how_a_machine_serves_is_read_back():
    """Rates, starts and the engine's own time, from measurements whose answer is known."""
    text = machine_document(ROWS + SERVING, title="t", num_devices=4, memory=16 * GIB, layer_operations=10)
    measured = read_cluster(text, name="machine", where="machine.toml").chip.measured
    each = [(rows, *(rate / 4 for rate in rates)) for rows, *rates in FEW]  # four devices share them
    assert measured.few_rows[DType.FP32] == tuple(pytest.approx(point, rel=1e-2) for point in each)
    assert measured.attention == pytest.approx(2e9, rel=1e-2)
    assert measured.cache_bandwidth == pytest.approx(1e9, rel=1e-2)
    assert measured.cache_start == pytest.approx(50e-6, rel=1e-2)
    assert (measured.host_step, measured.host_request) == pytest.approx((1e-3, 50e-6), rel=1e-2)
    assert measured.operation == pytest.approx(2e-6, rel=1e-2)
    noisy = [replace(r, measured_value=1.0) for r in SERVING]  # starts that come out below nothing are next to nothing
    text = machine_document(ROWS + noisy, title="t", num_devices=4, memory=16 * GIB)
    assert read_cluster(text, name="machine", where="machine.toml").chip.measured.host_request == 1e-9
    with pytest.raises(MeshwiseError, match="expected all measurements of serving"):
        machine_document(ROWS + SERVING[:-1], title="t", num_devices=4, memory=16 * GIB)


def test_steps_are_priced_at_the_rates_of_their_own_rows():
    """A step of 8 requests takes twice that of one where its products do, and what is cached costs its bytes."""
    text = machine_document(ROWS + SERVING, title="t", num_devices=1, memory=16 * GIB)
    cluster = read_cluster(text, name="machine", where="machine.toml")
    model = read_dimensions("D=1024 F=4096 L=4 N=12 K=4 H=64 V=4096", name="some")
    load = ServingLoad(prompt=64, output=64, precision="fp32")
    calibration = find_serving_calibration("operations", cluster.chip)
    layout = ServingLayout()
    problem = ServingProblem(model, load, cluster, calibration)
    setup = ServingSetup("aggregated", layout, layout, 8)
    costs = bucketed_costs(problem, setup, [(1, 0, 1), (4, 0, 4), (8, 0, 8), (0, 16, 1)])
    one, eight = (costs.tokens_seconds(n) for n in (1, 8))
    weights = sum(model.parameters.by_part[part] for part in ("attention", "mlp", "head"))
    assert one == pytest.approx(2 * weights / 1e9, rel=0.1)
    assert eight == pytest.approx(2 * one, rel=0.1)
    assert costs.tokens_seconds(5) == eight  # filled up to the bucket
    assert (costs.overhead_s, costs.per_request_s) == (calibration.host_step, calibration.host_request)
    few = read_dimensions("D=128 F=2048 L=4 N=12 K=4 H=64 V=2048", name="few")  # weights of 512 x 512 at most
    own = bucketed_costs(replace(problem, model=few), setup, [(1, 0, 1)])
    weights = sum(few.parameters.by_part[part] for part in ("attention", "mlp", "head"))
    assert own.tokens_seconds(1) == pytest.approx(2 * weights / 0.5e9, rel=0.1)
    spans = bucketed_costs(problem, setup, [(1, 0, 1)], 128)
    assert spans.step_seconds([100]) == pytest.approx(costs.step_seconds([164]))
    read = costs.step_seconds([100]) - costs.step_seconds([50])
    assert read == pytest.approx(50 * 4 * 2 * 4 * 64 * 4 / 1e9, rel=0.01)


def test_a_file_of_one_rate_is_refused_with_what_to_do():
    text = machine_document(ROWS + SERVING, title="t", num_devices=4, memory=16 * GIB)
    old = re.sub(r'(\[\d+, "[^"]*"), "[^"]*"\]', r"\1]", text)
    assert old != text
    with pytest.raises(MeshwiseError, match="found one FLOP/s; measure again with meshwise bench machine"):
        read_cluster(old, name="machine", where="machine.toml")
