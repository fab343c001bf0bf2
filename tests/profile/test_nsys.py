"""Databases of Nsight Systems, written here with the tables and columns that it exports."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from meshwise.core.errors import ConfigError
from meshwise.profile import read_trace
from tests.profile.traces import diagnose, milliseconds

COMMON = "start INT, end INT, deviceId INT, streamId INT, correlationId INT"
KERNELS = f"{COMMON}, demangledName INT, shortName INT"
TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": KERNELS,
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{COMMON}, bytes INT, copyKind INT",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INT, end INT, globalTid INT, correlationId INT, nameId INT",
    "NVTX_EVENTS": "start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT",
    "TARGET_INFO_GPU": "id INT, name TEXT",
}
NAMES = ["sm90_xmma_gemm_bf16", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "cudaLaunchKernel", "elementwise_kernel"]
MS = 1_000_000


def database(path, steps=3, gap=0.0, tables=TABLES):
    """Steps of 10 ms: a product of 6 ms, a copy of 1 ms, an all-reduce of 2 ms, half of it beside the copy, a gap."""
    with closing(sqlite3.connect(path)) as db, db:
        for name, columns in tables.items():
            db.execute(f"CREATE TABLE {name} ({columns})")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(NAMES, 1)))
        db.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H100 80GB HBM3')")
        rows = {name: [] for name in ("KERNEL", "MEMCPY", "RUNTIME")}
        start = 1_000_000_000
        for step in range(steps):
            number, host = 10 * step, start - 2 * MS
            rows["KERNEL"].append((start, start + 6 * MS, 0, 7, number, 1, 1))
            rows["MEMCPY"].append((start + 6 * MS, start + 7 * MS, 0, 8, number + 1, 4096, 1))
            begin = start + 6.5 * MS
            rows["KERNEL"].append((begin, begin + 2 * MS, 0, 9, number + 2, 2, 2))
            rows["RUNTIME"] += [(host + k, host + k + 5, 1, number + k, 3) for k in range(3)]
            db.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, 1)", (host - 10, host + 100, f"step {step}"))
            sized = "aten::mm, op_id = 7, sizes = [[128, 64], [64, 32]]"
            db.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, 1)", (host - 1, host + 1, sized))
            start += round((10 + gap) * MS)
        for name, found in rows.items():
            marks = ", ".join("?" * len(found[0]))
            db.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_{name} VALUES ({marks})", found)  # noqa: S608
    return str(path)


def test_kernels_copies_ranges_and_shapes_are_read(tmp_path):
    trace = read_trace(database(tmp_path / "report.sqlite"))
    assert (trace.format, trace.devices[0].chip, trace.num_events) == ("nsys", "NVIDIA H100 80GB HBM3", 9)
    product = next(op for op in trace.ops if op.category == "matmul")
    assert (product.parent, product.matmul, product.flops) == ("aten::mm", (1, 128, 64, 32), 2 * 128 * 64 * 32)
    assert next(op for op in trace.ops if op.collective).collective.kind == "all-reduce"


def test_its_steps_are_divided(tmp_path):
    profile = diagnose(database(tmp_path / "report.sqlite")).profile
    assert profile.steps_found == "by 3 markers step #"
    parts = {name: round(1e3 * seconds, 2) for name, seconds in profile.partition_s.items()}
    assert (parts["compute"], parts["exposed_copy"]) == (6, 0.5)
    assert parts["exposed_collective"] == 2
    assert parts["idle"] == pytest.approx(1.5 * 2 / 3)  # the last step ends with its last operation


def test_a_gap_is_seen(tmp_path):
    found = diagnose(database(tmp_path / "report.sqlite", steps=6, gap=5.0))
    assert found.causes[0].name == "host-gap"
    assert milliseconds(found, "host-gap") == pytest.approx(6.5, rel=0.01)


def test_other_databases_and_damaged_ones_are_refused(tmp_path):
    whole = Path(database(tmp_path / "a.sqlite")).read_bytes()
    (tmp_path / "cut.sqlite").write_bytes(whole[:5000])
    with pytest.raises(ConfigError, match="cannot be read as a database"):
        read_trace(tmp_path / "cut.sqlite")
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as db, db:
        db.execute("CREATE TABLE users (id INT)")
    with pytest.raises(ConfigError, match="CUPTI_ACTIVITY_KIND_KERNEL, found none"):
        read_trace(tmp_path / "other.sqlite")


@pytest.mark.parametrize(
    ("at", "put"),
    [(b"CUPTI_ACTIVITY_KIND_KERNEL (", b"\xc4UPTI"), (b"sm90_xmma", b"\xee\xff\xa0"), (b"step 1", b"\xc4")],
)
def test_damaged_text_is_an_error_in_words(tmp_path, at, put):
    whole = Path(database(tmp_path / "a.sqlite")).read_bytes()
    place = whole.index(at)
    (tmp_path / "hurt.sqlite").write_bytes(whole[:place] + put + whole[place + len(put) :])
    with pytest.raises(ConfigError, match="cannot be read as a database"):
        read_trace(tmp_path / "hurt.sqlite")


def test_words_for_numbers_are_an_error_in_words(tmp_path):
    path = database(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'")
    with pytest.raises(ConfigError, match="cannot be read as a database"):
        read_trace(path)
