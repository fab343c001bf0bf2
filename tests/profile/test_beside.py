"""A trace beside its plan: what is joined to which term, and what a wrong plan looks like."""

import json
import subprocess
import sys

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.commands.profile import diagnose, planned_of
from tests.profile.traces import PAX, SGLANG, TRACES, traces_of

MODEL = "D=256 F=512 L=2 N=4 K=4 H=64 V=512"
FSDP, TENSOR = (str(TRACES / f"{name}.xplane.pb.gz") for name in ("own_fsdp4_remat", "own_tensor4"))


def planned(layout, model=MODEL, on="v5e:2x2", batch_tokens="4Ki", seq_len=256):
    return meshwise.estimate_train(
        model, on=on, batch_tokens=batch_tokens, seq_len=seq_len, layout=layout
    ).plans[0]  # fmt: skip


def beside(trace, layout, **job):
    found = diagnose(traces_of(trace), planned_of(planned(layout, **job)))
    return found.beside, found


@pytest.mark.parametrize(("trace", "layout"), [(FSDP, "fsdp=4,remat=full"), (TENSOR, "tensor=4,remat=none")])
def test_a_run_of_our_own_is_joined_to_its_plan(trace, layout):
    """Both were recorded here by `meshwise run --profile` on four fake CPU devices."""
    found, diagnosis = beside(trace, layout)
    assert found.joined_share > 0.95
    assert found.joined["scope"] > 0.5
    assert sum(t.predicted for t in found.terms) == pytest.approx(found.step_s)
    assert sum(t.measured for t in found.terms) == pytest.approx(diagnosis.profile.step_s)
    assert found.term("forward").measured > 0.15 * diagnosis.profile.step_s
    assert found.term("backward").measured > found.term("forward").measured


def test_recomputation_is_told_from_none():
    on, _ = beside(FSDP, "fsdp=4,remat=full")
    off, _ = beside(TENSOR, "tensor=4,remat=none")
    assert on.term("recompute").measured > 0.3 * on.term("forward").measured
    assert on.unplanned_recompute == 0
    assert off.term("recompute").measured == 0


def test_recomputation_that_is_not_planned_is_a_cause():
    found, diagnosis = beside(FSDP, "fsdp=4,remat=none")
    cause = next(c for c in diagnosis.causes if c.name == "unplanned-recompute")
    assert cause.seconds == pytest.approx(found.term("recompute").measured)
    _, planned_so = beside(FSDP, "fsdp=4,remat=full")
    assert not [c for c in planned_so.causes if "recompute" in c.name]


def test_fsdp_is_told_from_tensor_parallelism():
    right, _ = beside(TENSOR, "tensor=4,remat=none")
    wrong, _ = beside(TENSOR, "fsdp=4,remat=none")
    assert right.term("tensor").measured > 0
    assert right.joined["collective"] > 0.1
    assert wrong.joined.get("collective", 0) == 0
    assert wrong.joined_share < right.joined_share - 0.1


def test_a_foreign_program_is_joined_by_shapes_collectives_and_kinds():
    job = {"model": "D=768 F=3072 L=12 N=12 K=12 H=64 V=50304", "on": "a100-sxm-40gb:4", "batch_tokens": "32Ki"}
    found, diagnosis = beside(PAX[0], "fsdp=4,remat=none", **job, seq_len=2048)
    assert found.joined_share > 0.85
    assert found.joined["shapes"] > 0.2
    assert 1e3 * found.step_s == pytest.approx(72.5, rel=0.05)
    measured = {t.name: 1e3 * t.measured for t in found.terms}
    assert measured["forward"] == pytest.approx(43.3, rel=0.1)
    assert measured["backward"] == pytest.approx(67.7, rel=0.1)
    assert measured["fsdp"] == pytest.approx(4.07, rel=0.2)
    assert [c.name for c in diagnosis.causes[:2]] == ["attention-not-fused", "host-gap"]
    assert diagnosis.causes[-1].name == "slower-than-planned"  # what no other cause explains
    assert diagnosis.causes[-1] in diagnosis.named
    assert diagnosis.report().answer.startswith("131 ms a step, ")


def test_the_command_takes_a_plan_or_a_job(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    plan.write_text(planned("fsdp=4,remat=full").to_json(), encoding="utf-8")
    assert main(["profile", FSDP, "--plan", str(plan), "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)
    job = ["--model", MODEL, "--on", "v5e:2x2", "--layout", "fsdp=4,remat=full", "--batch-tokens", "4Ki"]
    assert main(["profile", FSDP, *job, "--seq-len", "256", "--json"]) == 0
    typed = json.loads(capsys.readouterr().out)
    assert saved["terms"] == typed["terms"]
    assert {"name", "predicted_s", "measured_s"} <= set(saved["terms"][0])
    assert saved["joined_share"] > 0.95
    assert any("do not compare times" in line for line in saved["assumed"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "fsdp=4"], "--layout: without --model"),
        (["--model", MODEL, "--layout", "fsdp=4"], "--on, --batch-tokens, --seq-len is missing"),
        (["--plan", "plan.json", "--model", MODEL], "--plan has model, job and layout in it"),
        (["--plan", "missing.json"], "missing.json"),
        (["--step", "("], "expected a regular expression"),
        (["--step", "warp"], "no marker"),
        (["--on", "h1000"], "h1000"),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, words, said):
    assert main(["profile", FSDP, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_decode_step_stands_beside_its_estimate(capsys, tmp_path):
    """SGLang, Qwen3-8B, 32 requests of 1,024 tokens on MI300X: a step replayed from a graph, without shapes."""
    job = ["--model", "qwen3-8b", "--on", "mi300x:1", "--layout", "tensor=1", "--batch", "32", "--context", "1024"]
    assert main(["profile", SGLANG, *job, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    terms = {t["name"]: (1e3 * t["predicted_s"], 1e3 * t["measured_s"]) for t in found["terms"]}
    assert terms["matmuls"] == pytest.approx((5.20, 5.74), rel=0.03)
    assert terms["attention"] == pytest.approx((1.90, 2.13), rel=0.05)
    assert sum(t["predicted_s"] for t in found["terms"]) == pytest.approx(found["plan"]["step_s"])
    assert sum(t["measured_s"] for t in found["terms"]) == pytest.approx(found["step_s"])
    assert found["joined_share"] > 0.95
    assert main(["profile", SGLANG, *job, "--seq-len", "8"]) == 2
    assert "--batch and --context are of serving" in capsys.readouterr().err
    assert main(["profile", SGLANG, *job, "--save-step", str(tmp_path / "x.csv")]) == 2


@pytest.mark.jax  # starts JAX and compiles training steps; proves that a run ends with its profile, whatever its layout
@pytest.mark.parametrize(
    ("layout", "own"),
    [
        ("fsdp=4,remat=full", ("recompute", "fsdp")),
        ("stage=2,fsdp=2,remat=none,num_microbatches=2", ("pipeline_send", "fsdp")),
        ("data=2,context=2,remat=none", ("context", "fsdp", "data")),
    ],
)
def test_a_run_ends_with_its_profile(tmp_path, layout, own):
    job = ["D=64 F=128 L=2 N=2 K=2 H=32 V=128", "--on", "v5e:2x2", "--batch-tokens", "512", "--seq-len", "64"]
    run = [*job, "--layout", layout, "--steps", "5", "--cpu-devices", "4"]
    command = [sys.executable, "-m", "meshwise", "run", *run, "--profile", str(tmp_path / "profile"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 -- devices of its own
    found = json.loads(done.stdout)["profile"]
    assert found["joined_share"] >= 0.95
    terms = {t["name"]: t["measured_s"] for t in found["terms"]}
    assert min(terms[name] for name in ("forward", "backward", "optimizer", *own)) > 0
    assert ("recompute" in terms) == ("recompute" in own)
    assert sum(terms.values()) == pytest.approx(found["step_s"])
