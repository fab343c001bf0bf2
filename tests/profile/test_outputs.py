"""What a profile gives besides its report: comparisons, pictures, rows of measurements."""

import csv
import json
from pathlib import Path

import pytest

from meshwise.cli.main import main
from tests.profile.test_faults import with_gap
from tests.profile.traces import DLRM, PAX, QWEN, RESNET, load, save

JOB = ["--model", "D=768 F=3072 L=12 N=12 K=12 H=64 V=50304", "--on", "a100-sxm-40gb:4", "--layout",
       "fsdp=4,remat=none", "--batch-tokens", "32Ki", "--seq-len", "2048"]  # fmt: skip


def answered(capsys, *words):
    assert main(["profile", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_change_is_named_first(tmp_path, capsys):
    slower = save(with_gap(load(RESNET), 5.0), tmp_path / "after.json.gz")
    found = answered(capsys, slower, "--against", RESNET)
    assert found["against"]["difference_s"] == pytest.approx(5e-3, rel=0.1)
    first = found["against"]["causes"][0]
    assert (first["name"], first["difference_s"]) == ("host-gap", pytest.approx(5e-3, rel=0.1))
    assert "+5" in found["answer"]
    assert "host-gap +5" in found["answer"]


def test_ranks_and_chips_are_compared(capsys):
    found = answered(capsys, DLRM[1], "--against", DLRM[0])
    parts = {p["name"]: p["difference_s"] for p in found["against"]["parts"]}
    assert parts["compute"] > 0.02
    same = answered(capsys, QWEN, "--against", QWEN)
    assert same["against"]["difference_s"] == 0
    assert {c["difference_s"] for c in same["against"]["operations"]} == {0}


def test_pictures_show_plan_and_measurement(tmp_path, capsys):
    svg, perfetto = tmp_path / "p.svg", tmp_path / "p.json"
    found = answered(capsys, PAX[0], *JOB, "--svg", svg, "--perfetto", perfetto)
    assert svg.read_text(encoding="utf-8").count("<svg") == 1
    events = json.loads(perfetto.read_text(encoding="utf-8"))["traceEvents"]
    planned = sum(e["dur"] for e in events if e.get("cat") == "plan")
    assert planned == pytest.approx(1e6 * found["plan"]["step_s"])
    shown = [e for e in events if e["ph"] == "X" and e["cat"] != "plan"]
    assert max(e["ts"] + e["dur"] for e in shown) <= 1e6 * found["step_s"] * 1.01
    assert len(shown) > 2000
    answered(capsys, *DLRM, "--svg", tmp_path / "no_plan.svg")


def test_rows_feed_calibrate(tmp_path, capsys):
    operations, step = tmp_path / "operations.csv", tmp_path / "step.csv"
    answered(capsys, PAX[0], *JOB, "--save", operations, "--save-step", step)
    with Path(operations).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    head = next(r for r in rows if (r["m"], r["k"], r["n"]) == ("8192", "768", "50304"))
    assert float(head["measured_value"]) == pytest.approx(2463, rel=0.01)
    sent = [r for r in rows if r["category"] == "collective"]
    assert {"beside computation", "alone"} <= {part for r in sent for part in r["notes"].replace(";", ",").split(", ")}
    assert main(["calibrate", str(step), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "calibrate"
    assert main(["profile", PAX[0], *JOB, "--save", str(operations)]) == 2
    assert "nothing was overwritten" in capsys.readouterr().err
    assert main(["profile", PAX[0], "--save-step", str(tmp_path / "new.csv")]) == 2
    assert "give --plan, or --model" in capsys.readouterr().err
