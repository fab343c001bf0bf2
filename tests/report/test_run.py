"""What a run says: measured beside predicted, and what cannot be compared."""

from dataclasses import replace

import pytest

import meshwise
from meshwise.report.run import RunResult, run_report


@pytest.fixture(scope="module")
def on_its_chip():
    layout = "fsdp=8,remat=full"
    asked = {"on": "h100:8", "batch_tokens": "512Ki", "seq_len": 4096}
    plan = meshwise.estimate_train("llama-3-8b", layout=layout, **asked).plans[0]
    return RunResult(
        plan=plan,
        hardware="NVIDIA H100 80GB HBM3",
        num_devices=8,
        software="jax",
        chip="h100-sxm",
        peak_flops_per_s=plan.problem.cluster.chip.flops_per_s[plan.problem.job.formats.compute],
        first=11,
        losses=(3.5, 3.25, 3.0),
        seconds=(90.0, 10.0, 30.0),
        timed=(1, 2),
        saved=(13,),
        compile_seconds=60.0,
        state_bytes=20 * 10**9,
        temporary_bytes=30 * 10**9,
        peak_bytes_in_use=55 * 10**9,
        learning_rate="0.0003",
        data="synthetic",
        weights="drawn by seed 0",
    )


def test_measured_numbers_are_of_the_timed_steps(on_its_chip):
    estimate = on_its_chip.plan.estimate
    data = run_report(on_its_chip, {}).data
    assert data["measured"]["step_time_s"] == 20.0
    assert data["measured"]["tokens_per_s"] == estimate.tokens / 20
    assert data["measured"]["mfu"] == pytest.approx(estimate.mfu * estimate.step_time.expected / 20)
    assert data["predicted"]["step_time_s"] == estimate.step_time.expected
    assert (data["first_step"], data["last_step"], data["saved_steps"]) == (11, 13, [13])


def test_a_rounded_batch_is_said(on_its_chip):
    problem = on_its_chip.plan.problem
    asked = replace(problem, job=problem.job.model_copy(update={"batch_tokens": 500_000}))
    other = replace(on_its_chip, plan=replace(on_its_chip.plan, problem=asked))
    assert run_report(on_its_chip, {}).assumed[:2] == ("weights: drawn by seed 0", "tokens: synthetic")
    assert run_report(other, {}).assumed[0] == "batch: 524,288 tokens, +4.9 % of what was asked, so that it divides"


def test_a_ratio_stands_beside_what_can_be_compared(on_its_chip):
    report = run_report(on_its_chip, {})
    assert report.answer == "steps 11 to 13 on 8 x NVIDIA H100 80GB HBM3: 20 s a step, loss 3.5000 to 3.0000"
    assert report.not_modelled == ()
    assert [str(column.header) for column in report.body[0].columns][-1] == "measured / predicted"


def test_another_chip_is_not_compared(on_its_chip):
    other = replace(on_its_chip, hardware="cpu", chip=None, peak_flops_per_s=None, peak_bytes_in_use=None)
    report = run_report(other, {})
    assert report.not_modelled == (
        "the prediction is for h100-sxm, but this ran on cpu: do not compare them",
        "MFU: the peak of cpu is not known",
        "memory in use: cpu does not report it",
    )
    assert [str(column.header) for column in report.body[0].columns] == ["", "measured", "predicted, h100-sxm"]
    assert (report.data["measured"]["mfu"], report.data["measured"]["peak_bytes_in_use"]) == (None, None)
