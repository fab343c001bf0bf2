"""What a profile gives besides its report: comparisons, pictures, rows of measurements."""

import contextlib
import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.report.profile import answer_line
from tests.profile.test_faults import with_gap
from tests.profile.traces import DLRM, PAX, RESNET, SGLANG, TRACES, diagnose, load, save

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
    same = answered(capsys, SGLANG, "--against", SGLANG)
    assert same["against"]["difference_s"] == 0
    assert {c["difference_s"] for c in same["against"]["operations"]} == {0}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Everything that one call writes, and its answer."""
    folder = tmp_path_factory.mktemp("profile")
    files = {name: folder / name for name in ("p.svg", "p.json", "operations.csv", "step.csv")}
    flags = ("--svg", "--perfetto", "--save", "--save-step")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        words = [w for pair in zip(flags, map(str, files.values()), strict=True) for w in pair]
        assert main(["profile", PAX[0], *JOB, *words, "--json"]) == 0
    return files, json.loads(out.getvalue())


def test_pictures_show_plan_and_measurement(written, tmp_path, capsys):
    files, found = written
    assert files["p.svg"].read_text(encoding="utf-8").count("<svg") == 1
    events = json.loads(files["p.json"].read_text(encoding="utf-8"))["traceEvents"]
    planned = sum(e["dur"] for e in events if e.get("cat") == "plan")
    assert planned == pytest.approx(1e6 * found["plan"]["step_s"])
    shown = [e for e in events if e["ph"] == "X" and e["cat"] != "plan"]
    assert max(e["ts"] + e["dur"] for e in shown) <= 1e6 * found["step_s"] * 1.01
    assert len(shown) > 2000
    answered(capsys, SGLANG, "--svg", tmp_path / "no_plan.svg")


def test_rows_feed_calibrate(written, tmp_path, capsys):
    operations, step = written[0]["operations.csv"], written[0]["step.csv"]
    with Path(operations).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    head = next(r for r in rows if (r["m"], r["k"], r["n"]) == ("8192", "768", "50304"))
    assert float(head["measured_value"]) == pytest.approx(2463, rel=0.01)
    sent = [r for r in rows if r["category"] == "collective"]
    assert {"beside computation", "alone"} <= {part for r in sent for part in r["notes"].replace(";", ",").split(", ")}
    assert main(["calibrate", str(step), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "calibrate"
    assert main(["profile", SGLANG, "--save", str(operations)]) == 2
    assert "nothing was overwritten" in capsys.readouterr().err
    assert main(["profile", SGLANG, "--save-step", str(tmp_path / "new.csv")]) == 2
    assert "give --plan, or --model" in capsys.readouterr().err


def test_the_step_is_explained_and_details_show_all(capsys):
    assert main(["profile", *DLRM, "--explain"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "compute + exposed collective + exposed copy + waiting + idle" in out
    assert "devices device step compute collective copy waiting idle rank 0" in out
    assert "waiting is told among 2 of 128" in out
    assert main(["profile", SGLANG]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_causes_of_one_kind_are_said_once(tmp_path):
    found = meshwise.profile_run([save(with_gap(load(RESNET), 50.0), tmp_path / "slow.json.gz")])
    gap = next(c for c in found.causes if c.name == "host-gap")
    line = answer_line(replace(found, causes=(replace(gap, seconds=30e-3), replace(gap, seconds=20e-3))))
    assert f"{gap.what} (30 ms and 20 ms); without both" in line


def test_the_first_line_says_how_much_is_idle_and_what_is_left():
    """Where one cause is all that was recorded, nothing is."""
    assert re.match(r"614 ms a step, 54% of it idle: ", answer_line(diagnose(*DLRM)))
    assert "idle:" not in answer_line(diagnose(RESNET))
    assert answer_line(diagnose(TRACES / "gloo_cpu_only.json.gz")).endswith("all-reduce is not hidden (179 ms)")
