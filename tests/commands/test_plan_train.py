"""Clusters compared, strong scaling, sensitivity and Ctrl-C, as users call them; on jobs that take no time."""
# ruff: noqa: E501 - one case a line

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.core.errors import LayoutError

JOB = {"batch_tokens": "512Ki", "seq_len": "4096"}
FEW = {"fix": "schedule=1f1b,remat=full", "forbid": "offload,ulysses,context,partial-remat,zero=1"}
WORDS = ["--batch-tokens", "512Ki", "--seq-len", "4096", "--fix", FEW["fix"], "--forbid", FEW["forbid"]]


def told(capsys, *words):
    assert main(["plan", "train", "llama-3-8b", *WORDS, *words]) == 0
    return capsys.readouterr().out


def test_clusters_are_compared(capsys, tmp_path):
    file = tmp_path / "cost.svg"
    names = "h100:16,v5p:2x2x4,v5e:2x2"
    out = json.loads(told(capsys, "--on", names, "--tokens", "100B", "--svg", str(file), "--json"))
    h100, v5p, v5e = out["clusters"]
    assert [c["cluster"] for c in out["clusters"]] == names.split(",")
    assert v5e["plan"] is None
    assert "does not fit on v5e:2x2" in v5e["reason"]
    days = {c["cluster"]: c["plan"]["training"]["days"] for c in (h100, v5p)}
    cost = {c["cluster"]: c["plan"]["training"]["cost_usd"] for c in (h100, v5p)}
    assert out["answer"].startswith(f"Fastest: {min(days, key=days.get)}, $")
    assert f"; cheapest: {min(cost, key=cost.get)}, $" in out["answer"]
    alone = json.loads(told(capsys, "--on", "h100:16", "--tokens", "100B", "--json"))
    assert alone["plans"][0] == h100["plan"]  # each is what it is alone
    assert file.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    text = told(capsys, "--on", names)
    assert max(map(len, text.splitlines())) <= 80
    assert "Without a plan:" in text
    assert "dollars of 1B tokens (up) against time of 1B tokens (right)" in text


def test_the_python_comparison_is_the_same():
    found = meshwise.compare_train("llama-3-8b", on=["h100:16", "v5e:2x2"], **JOB, **FEW)
    alone = meshwise.plan_train("llama-3-8b", on="h100:16", **JOB, **FEW)
    assert found["h100:16"].plans[0].layout == alone.plans[0].layout
    assert found["v5e:2x2"].startswith("llama-3-8b does not fit on v5e:2x2")


def test_strong_scaling_and_where_it_ends(capsys, tmp_path):
    file = tmp_path / "scaling.svg"
    out = json.loads(told(capsys, "--on", "h100:64", "--scaling", "--svg", str(file), "--json"))
    chips = [p["num_chips"] for p in out["scaling"]]
    assert chips == [1, 2, 4, 8, 16, 32, 64]
    planned = [p for p in out["scaling"] if p["plan"]]
    assert all(p["plan"]["num_chips"] == p["num_chips"] for p in planned)
    assert all("per chip" in p["reason"] for p in out["scaling"] if not p["plan"])
    speeds = {p["num_chips"]: p["plan"]["estimate"]["tokens_per_s"] for p in planned}
    ends = out["strong_scaling_ends_at_chips"]
    for fewer, more in zip(list(speeds), list(speeds)[1:], strict=False):
        worth = speeds[more] / speeds[fewer] >= 1.5
        assert worth == (ends is None or fewer < ends) or fewer > (ends or 0)
    assert file.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    assert max(map(len, told(capsys, "--on", "h100:8", "--scaling").splitlines())) <= 80


def test_scaling_ends_where_a_small_batch_is_used_up():
    few = {**FEW, "forbid": FEW["forbid"] + ",pipeline"}
    found = meshwise.scale_train(
        "llama-3-8b", on="h100:64", batch_tokens="32Ki", seq_len=4096, batch_slack=0, max_chips=64, **few
    )
    plans = [p.plan for p in found.points if p.plan]
    assert found.end is not None
    assert found.end < 64
    assert found.why in plans[0].estimate.terms
    at = next(i for i, p in enumerate(plans) if p.estimate.num_chips == found.end)
    assert plans[at + 1].estimate.tokens_per_s / plans[at].estimate.tokens_per_s < 1.5


def test_what_a_plan_is_sensitive_to(capsys):
    out = json.loads(told(capsys, "--on", "h100:16", "--sensitivity", "--json"))
    rows = {row["name"]: row for row in out["sensitivity"]}
    assert list(rows) == [
        "nvlink bandwidth", "leaf bandwidth", "FLOP/s", "HBM bandwidth", "HBM capacity", "batch", "sequence length",
    ]  # fmt: skip
    for row in rows.values():
        assert row["change"] == pytest.approx(-0.1, abs=0.01)
        if row["kept_slowdown"] is not None:
            assert row["slowdown"] <= row["kept_slowdown"] * (1 + 1e-9)  # a new search is never worse
        assert row["same_plan"] == (row["layout_text"] == out["plans"][0]["layout_text"])
    for name in ("nvlink bandwidth", "leaf bandwidth", "FLOP/s", "HBM bandwidth", "HBM capacity"):
        assert rows[name]["slowdown"] >= 1 - 1e-9
    compute = sum(out["plans"][0]["estimate"]["terms"][t] for t in ("forward", "backward", "recompute"))
    share = compute / out["plans"][0]["estimate"]["step_time_s"]["expected"]
    assert 1 < rows["FLOP/s"]["slowdown"] <= 1 + share / 9 + 1e-9
    text = told(capsys, "--on", "h100:16", "--sensitivity")
    assert "10 % less FLOP/s" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "h100:8,h100:16", "--scaling"], "--scaling is of one cluster"),
        (["--on", "h100:8,h100:8"], "--on h100:8,h100:8: a cluster is named twice"),
        (["--on", "h100:8,x100:8"], "unknown"),
        (["--on", "h100:8,h100:16", "--save", "a.json"], "--save writes one plan"),
        (["--on", "h100:8", "--scaling", "--objective", "cost"], "--scaling asks for the least time"),
        (["--on", "h100:8", "--scaling", "--tokens", "1T", "--deadline", "3d"], "--scaling asks for the least time; leave out --deadline"),
    ],
)  # fmt: skip
def test_flags_without_a_meaning_together(capsys, words, message):
    assert main(["plan", "train", "llama-3-8b", *WORDS, *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {message}")


def interrupted(*words, when):
    """Send SIGINT to a real search at the first line of stderr that `when` accepts."""
    command = [sys.executable, "-m", "meshwise", "plan", "train", *words]
    source = str(Path(meshwise.__file__).parents[1])
    # A shell starts its background jobs with SIGINT ignored, and a child inherits that: Ctrl-C is what it is on a terminal.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source}
    )
    signal.signal(signal.SIGINT, ignored)
    with child:
        for line in child.stderr:
            if when(line):
                child.send_signal(signal.SIGINT)
                break
        out, err = child.communicate(timeout=300)
    return child.returncode, out, err


@pytest.mark.slow  # a search that lasts long enough to be interrupted
def test_ctrl_c_gives_the_best_so_far():
    words = ("deepseek-v3", "--on", "h800:2048", "--batch-tokens", "60Mi", "--seq-len", "4096", "--top", "20")
    code, out, _ = interrupted(*words, when=lambda line: "best " in line)
    assert code == 0
    assert re.match(r"Best possible within .* %, not proved: ", out)
    assert "The search ended early, while it searched " in " ".join(out.split())


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("tp=8,pp=4", {"tensor": 8, "stage": 4, "data": 2}),
        ("fsdp=64", {"fsdp": 64}),
        ("fsdp=-1,tp=2", {"fsdp": 32, "tensor": 2}),
    ],
)
def test_replicas_fill_the_chips_that_a_layout_leaves(layout, sizes):
    planning = meshwise.estimate_train(
        "llama-3-8b", on="h100:64", batch_tokens="1Mi", seq_len=4096, layout=f"{layout},remat=full"
    )
    assert {a: n for a, n in planning.plans[0].layout.sizes.items() if n > 1} == sizes


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp=8,dp=2", "uses 16 of the 64 chips of h100:64: leave data out, or write data=-1, to fill them"),
        ("tp=3", "3 does not divide them; or give a cluster of 3 chips"),
    ],
)
def test_a_layout_is_not_priced_on_a_part_of_the_cluster(layout, words):
    with pytest.raises(LayoutError, match=words):
        meshwise.estimate_train("llama-3-8b", on="h100:64", batch_tokens="1Mi", seq_len=4096, layout=layout)


def test_what_was_changed_stands_in_the_first_lines(capsys):
    assert main(["plan", "train", "llama-3-8b", "--on", "h100:24", "--batch-tokens", "100Ki", "--seq-len", "4096"]) == 0
    first = capsys.readouterr().out.split("\n\n")[1]
    assert re.search(r"batch: 98,304 tokens, -4\.0 % of what was asked", first)


def test_the_simplest_of_plans_that_cannot_be_told_apart_is_first():
    job = {"model": "llama-3-8b", "on": "h100:16", "batch_tokens": "1Mi", "seq_len": 8192}
    simple, fastest = meshwise.plan_train(**job), meshwise.plan_train(**job, within=0)
    first, best = simple.plans[0], fastest.plans[0]
    assert len(first.layout.used_axes) < len(best.layout.used_axes)
    assert 1 < first.estimate.step_time.expected / best.estimate.step_time.expected <= 1.02
    assert simple.plans[1].layout == best.layout
    assert "the simplest is first (--within 0: the fastest)" in simple.reasons[0]
    assert not any("simplest" in reason for reason in fastest.reasons)
    # None with fewer axes is within 2 %.
    for axis in ("data", "fsdp", "tensor", "context", "ulysses"):
        if axis not in first.layout.used_axes:
            alone = meshwise.plan_train(**job, within=0, fix={axis: 16}, top=1).plans[0].estimate.step_time.expected
            assert alone >= first.estimate.step_time.expected
