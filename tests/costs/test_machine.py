"""From measured operations of a CPU's devices to a cluster, and what is priced on it."""

from dataclasses import replace

import pytest

import meshwise
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.machine import MeasuredOperation, machine_document
from meshwise.hardware.cluster_file import read_cluster

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
