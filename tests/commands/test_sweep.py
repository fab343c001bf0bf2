"""Sweeps: questions are read and refused with their place, each is answered once, and what stopped goes on."""

import csv
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.commands import sweep as sweeping
from meshwise.commands.sweep_questions import KINDS, Question, read_questions
from meshwise.commands.sweep_table import Table
from meshwise.commands.workers import Lost, call
from meshwise.core.errors import MeshwiseError
from meshwise.report.sweep import choose_axes, sweep_svg

SERVE = """command = "estimate serve"
model = ["llama-3-8b", "llama-3-70b"]
batch = [8, 16]
prompt = 1024
output = 256
layout = "tensor=1"
[[case]]
on = "h100:1"
price = 2.5
[[case]]
on = "h200:1"
"""


class Here:
    """Workers in this process: `stop` of them are asked, then Ctrl-C is pressed; what is in `lose` is lost."""

    def __init__(self, stop=None, lose=()):
        self.stop, self.lose, self.asked = stop, lose, []

    def run(self, function, tasks):
        for place in reversed(range(len(tasks))):
            if len(self.asked) == self.stop:
                raise KeyboardInterrupt
            self.asked.append(tasks[place])
            yield place, Lost("its process died") if place in self.lose else call(function, tasks[place])


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Sweep in an empty folder and in this process."""
    monkeypatch.chdir(tmp_path)

    def use(**options):
        workers = Here(**options)
        monkeypatch.setattr(sweeping, "choose_workers", lambda *_: workers)
        return workers

    return use


def written(text, name="sweep.toml"):
    Path(name).write_text(text, encoding="utf-8")
    return name


def rows_of(file):
    with Path(file).open(newline="") as stream:
        return [{k: v for k, v in row.items() if k != "cpu_s"} for row in csv.DictReader(stream)]


def test_lists_are_crossed_and_cases_go_together(here):
    asked = [q.options for q in read_questions(Path(written(SERVE)))]
    assert len(asked) == 8
    assert {(q["on"], q.get("price")) for q in asked} == {("h100:1", 2.5), ("h200:1", None)}
    assert [(q["model"], q["batch"]) for q in asked[:4]] == [
        ("llama-3-8b", 8), ("llama-3-8b", 16), ("llama-3-70b", 8), ("llama-3-70b", 16)
    ]  # fmt: skip


def test_a_line_of_csv_is_a_question_and_empty_cells_are_left_out(here):
    text = '\ufeffmodel,--on,batch-tokens,layout\nllama-3-8b,h100:8,1Mi,"fsdp=4,tensor=2"\n\nllama-3-8b,h100:8,,\n'
    first, second = read_questions(Path(written(text, "q.csv")), "estimate train")
    assert first.options == {"model": "llama-3-8b", "on": "h100:8", "batch_tokens": "1Mi", "layout": "fsdp=4,tensor=2"}
    assert second.options == {"model": "llama-3-8b", "on": "h100:8"}
    assert second.place == "q.csv, line 4"


BAD = [
    ("a.toml", "command = 'fit'\nmodel = 'llama-3-8b'\non = ['h100:1', 3]\n", "a.toml, line 3, on: "),
    ("a.toml", "command = 'fit'\nmodel = 'llama-3-8b'\non = []\n", "line 3, on: expected at least one value"),
    ("a.toml", "command = 'fit'\nmodel = ['x', 'x']\n", "line 2, model: 'x' is listed twice"),
    ("a.toml", "command = 'fit'\nmodel = {a = 1}\n", "line 2, model: expected text, a number"),
    ("a.toml", "command = 'fit'\ncase = 3\n", "case: expected tables of options that go together"),
    ("a.toml", "command = 'fit'\non = 'h100:1'\n[[case]]\non = 'h200:1'\n", "on is given for all questions and in"),
    ("a.toml", "command = 'fit'\n[[case]]\non = 'm'\n[[case]]\n\ncontxt = 1\n", "context, on. In a.toml, line 6"),
    ("a.toml", "command = 'fit'\nmodel = 'lama-3-8b'\non = ['h100:1', 'h200:1']\n", "unknown model 'lama-3-8b'"),
    ("a.toml", "command = 'fit'\non = ['h100:1', 'h200:1']\nmodel = 'm'\ncontext = 0\n", "line 4, context: expected "),
    ("a.toml", "command = 'train'\n", "unknown command of a sweep 'train'"),
    ("a.toml", "model = 'm'\n", "command is missing: plan train"),
    ("a.toml", "command = \n", "a.toml is not TOML: "),
    ("a.csv", "command,model,on\nfit,llama-3-8b,h100:1,4\n", "a.csv, line 2: expected 3 cells, found 4"),
    ("a.csv", "command,on\nfit,h100:1\n", "a.csv, line 2, model is missing"),
    ("a.csv", "command,model,on,context\nfit,llama-3-8b,h100:1,0\n", "line 2, column context: expected more than"),
    ("a.csv", "command,model,on,batch_tokens,batch-tokens\nplan train,m,h100:1,4,4\n", "batch-tokens: given twice"),
    ("a.csv", "command,model,model\n", "a.csv, line 1: expected the name of an option in each column, once"),
    ("a.csv", "command\n", "expected at least one question, found none"),
    ("a.json", "{}", "a.json: expected TOML (sweep.toml) or CSV (sweep.csv)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_what_cannot_be_asked_is_refused_with_its_place_before_anything_runs(here, capsys, name, text, message):
    workers = here()
    assert main(["sweep", written(text, name)]) == 2
    assert message in capsys.readouterr().err
    assert workers.asked == []
    assert not Path("a.results.csv").exists()


def test_rows_are_the_answers_of_the_commands(here):
    here()
    found = meshwise.sweep(written(SERVE))
    assert repr(found) == "<Sweep: 8 questions: 4 ok, 4 infeasible; rows in sweep.results.csv>"
    row = found.rows[1]
    estimate = meshwise.estimate_serve(
        "llama-3-8b", on="h100:1", price=2.5, batch=16, prompt=1024, output=256, layout="tensor=1"
    )
    assert row["tpot_s"] == estimate.tpot.expected
    assert row["cost_usd_per_million_output_tokens"] == estimate.usd_per_million_output_tokens
    assert row["memory_bytes"] == sum(v for k, v in estimate.memory.items() if k != "total")
    assert found.rows[2]["reason"].startswith("needs 143 GiB of ")
    assert [r["model"] for r in rows_of("sweep.results.csv")] == [r["model"] for r in found.rows]


def test_a_sweep_that_was_stopped_goes_on_and_asks_nothing_twice(here, capsys):
    here()
    whole = rows_of(meshwise.sweep(written(SERVE)).file)
    Path("sweep.results.csv").unlink()
    first = here(stop=3)
    assert main(["sweep", "sweep.toml"]) == 130
    assert "interrupted: 3 of 8 questions are answered in sweep.results.csv" in capsys.readouterr().err
    assert len(rows_of("sweep.results.csv")) == 3
    with Path("sweep.results.csv").open("a") as stream:
        stream.write("0123456789abcdef,ok,estimate se")  # the disk was full, or the power went
    second = here()
    assert main(["sweep", "sweep.toml"]) == 0
    assert "3 of them were answered before" in capsys.readouterr().out
    assert len(first.asked) == 3
    assert len(second.asked) == 5
    assert rows_of("sweep.results.csv") == whole
    third = here()
    assert main(["sweep", "sweep.toml"]) == 0
    assert third.asked == []


def test_what_failed_is_asked_again_and_answers_to_other_questions_stay(here, capsys):
    here(lose=(0, 1))
    assert main(["sweep", written(SERVE)]) == 3
    assert "its process died" in capsys.readouterr().out
    again = here()
    assert main(["sweep", written(SERVE.replace("[8, 16]", "[8, 32]"))]) == 0
    assert len(again.asked) == 5  # two models with 32 in two cases; of those that failed, the one with 8
    assert "also keeps 1 answer of other questions" in capsys.readouterr().out
    assert len(rows_of("sweep.results.csv")) == 9


def test_questions_that_cannot_be_asked_are_rows_where_that_is_wanted(here):
    here()
    found = meshwise.sweep(written(SERVE.replace("llama-3-70b", "lama")), keep_going=True)
    assert [row["status"] for row in found.rows] == ["ok", "ok", "refused", "refused"] * 2
    assert "unknown model 'lama'" in found.rows[2]["reason"]


def test_a_file_that_changed_makes_another_question(here):
    def key():
        question = Question("simulate serve", {"costs": "engine.json", "rate": 1.0}, {}, "sweep.csv, line 2")
        return question.key(question.request())

    Path("engine.json").write_text("{}")
    before = key()
    assert key() == before
    Path("engine.json").write_text("{ }")
    assert key() != before


def test_one_sweep_writes_a_table(here):
    one, other = Table(Path("a.csv")), Table(Path("a.csv"))
    one.open(["key", "status"], [])
    with pytest.raises(MeshwiseError, match="another sweep is writing it"):
        other.open(["key", "status"], [])
    one.add({"key": "1", "status": "ok"})
    one.close(["1"])
    assert Table(Path("a.csv")).rows == {"1": {"key": "1", "status": "ok"}}


def test_a_full_disk_keeps_the_table_that_was_there(here, monkeypatch):
    table = Table(Path("a.csv"))
    table.open(["key", "status"], [])
    table.add({"key": "1", "status": "ok"})
    table.close(["1"])
    before = Path("a.csv").read_text()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MeshwiseError, match="No space left"):
        Table(Path("a.csv")).open(["key", "status"], [])
    assert Path("a.csv").read_text() == before
    assert [p.name for p in Path().iterdir()] == ["a.csv"]


def test_tables_that_cannot_be_written(here, capsys, monkeypatch):
    here()
    file = written(SERVE)
    Path("other.csv").write_text("a,b\n1,2\n")
    for out, code, message in (
        ("other.csv", 2, "expected rows of a sweep, found another table"),
        ("a.json", 2, "expected a name that ends in .csv or .parquet"),
        ("no/a.csv", 2, "there is no folder 'no'"),
        ("a.parquet", 4, "pip install 'meshwise[parquet]'"),
    ):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        assert main(["sweep", file, "--out", out]) == code
        assert message in capsys.readouterr().err


def test_the_picture_has_chips_to_the_right_and_a_line_for_each_model(here):
    here()
    text = 'command = "estimate serve"\nmodel = ["llama-3-8b", "qwen3-8b"]\nprompt = 64\noutput = 64\nbatch = 4\n'
    found = meshwise.sweep(written(f'{text}layout = "replicas=-1"\non = ["h100:1", "h100:2"]\n'))
    assert choose_axes(found, None, None) == ("num_chips", "output_tokens_per_s")
    assert choose_axes(found, "model", "tpot_s") == ("model", "tpot_s")
    drawn = sweep_svg(found, ("num_chips", "output_tokens_per_s"))
    assert drawn.count("llama-3-8b, h100") == 1
    with pytest.raises(MeshwiseError, match=r"unknown column \(--y\) 'tpot'. Nearest: tpot_s"):
        choose_axes(found, None, "tpot")
    with pytest.raises(MeshwiseError, match="--y bound: expected a column of numbers"):
        choose_axes(found, None, "bound")


def test_lines_beyond_ten_are_told_apart_by_marks_and_dashes(here):
    here()
    text = f'command = "estimate serve"\nmodel = "qwen3-8b"\nprompt = 64\noutput = 64\nbatch = {[*range(1, 13)]}\n'
    found = meshwise.sweep(written(f'{text}layout = "replicas=-1"\non = ["h100:1", "h100:2"]\n'))
    assert "stroke-dasharray" in sweep_svg(found, ("num_chips", "output_tokens_per_s"))


def test_columns_of_options_and_answers_are_apart():
    for kind in KINDS.values():
        assert not set(kind.columns) & set(kind.request.model_fields)


def questions(number):
    """So many questions that take a while."""
    lists = ", ".join(str(256 * k) for k in range(1, number + 1))
    return f'command = "plan serve"\nmodel = "llama-3-8b"\non = "h100:8"\nprompt = [{lists}]\noutput = 256\n'


def complete(number):
    """The rows of `questions`, after checking that each is there once."""
    rows = rows_of("sweep.results.csv")
    assert [row["prompt"] for row in rows] == [str(256 * k) for k in range(1, number + 1)]
    assert {row["status"] for row in rows} == {"ok"}
    return rows


@pytest.mark.slow
def test_killed_sweeps_lose_nothing(tmp_path, monkeypatch):
    """Slow: it starts processes and kills them, workers first, then the sweep itself."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "meshwise", "sweep", written(questions(24)), "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: rows_so_far() >= 3)
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    wait_for(lambda: rows_so_far() >= 8)
    process.kill()
    process.wait()
    before = rows_so_far()
    assert 8 <= before < 24
    assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == 0  # noqa: S603
    complete(24)


def rows_so_far():
    file = Path("sweep.results.csv")
    return file.read_text().count("\n") - 1 if file.exists() else 0


def wait_for(holds):
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_parquet_holds_what_csv_holds(tmp_path, monkeypatch):
    """Slow: it loads PyArrow. Numbers are numbers, and a table that is there is gone on with."""
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeping, "choose_workers", lambda *_: Here())
    found = meshwise.sweep(written(SERVE), out="a.parquet")
    held = parquet.read_table("a.parquet")
    assert held["tpot_s"].to_pylist() == [row.get("tpot_s") for row in found.rows]
    assert str(held.schema.field("tpot_s").type) == "double"
    assert not Path("a.parquet.csv").exists()
    again = meshwise.sweep("sweep.toml", out="a.parquet")
    assert again.asked == 0
    assert again.rows[0]["tpot_s"] == found.rows[0]["tpot_s"]


@pytest.mark.slow
def test_a_ray_cluster_that_loses_workers_loses_no_question(tmp_path, monkeypatch):
    """Slow: it starts Ray with two workers and kills the process of one in the middle."""
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = Path(sys.executable).parent / "ray"
    start = "start --head --port 6399 --num-cpus 2 --node-ip-address 127.0.0.1 --include-dashboard=false"
    subprocess.run([ray, *start.split()], check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    try:
        command = [sys.executable, "-m", "meshwise", "sweep", written(questions(24)), "--ray", "127.0.0.1:6399"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603
        wait_for(lambda: rows_so_far() >= 4)
        os.kill(answering(), signal.SIGKILL)
        assert process.wait() == 0
    finally:
        subprocess.run([ray, "stop", "--force"], check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    complete(24)


def answering():
    """A process of Ray that answers a question."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and b"ray::_call_in" in (folder / "cmdline").read_bytes():
            return int(folder.name)
    raise AssertionError("no worker of Ray is busy")
