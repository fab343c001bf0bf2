"""What a tool hides: the cost, the options that are exported, and the words of an answer are of one row."""

import itertools
import json
import re
from dataclasses import replace

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.core.errors import MeshwiseError
from meshwise.costs.estimate import evaluate_layout
from meshwise.costs.fitted import fitted_calibration
from meshwise.costs.hidden import SENT, hidden
from meshwise.costs.problem import TrainingProblem
from meshwise.exports import TOOLS, calibration_for, tools_for
from meshwise.exports.targets import overlap_of
from meshwise.hardware import load_chip, parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import Layout
from tests.exports.test_golden import arguments

JOB = {"model": "llama-3-8b", "on": "h100:32", "batch_tokens": "1Mi", "seq_len": 8192}


def estimated(layout, **asked):
    return meshwise.estimate_train(**JOB, layout=layout, **asked).plans[0]


def exported(layout, tool, **asked):
    return meshwise.export(estimated(layout, tool=tool, **asked), to=tool).text


LAYOUTS = [
    Layout(tensor=4, data=2, zero=1), Layout(tensor=2, sequence_parallel=False, data=4), Layout(fsdp=8),
    Layout(stage=4, data=2, num_microbatches=8), Layout(stage=2, schedule="gpipe", num_microbatches=4),
    Layout(stage=2, schedule="interleaved", virtual_stages=2, num_microbatches=4, expert=2),
    Layout(context=4, context_method="ring"), Layout(ulysses=4, data=2, zero=1),
]  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_hides_has_an_option_and_its_source(tool):
    row = overlap_of(tool)
    seen = set()
    for on, layout, name in itertools.product(("h100:8", "mi300x:8", "v5p:2x2x2"), LAYOUTS, row.software):
        cluster, model = parse_cluster(on), load_model("mixtral-8x7b" if layout.expert > 1 else "llama-3-8b")
        calibration = fitted_calibration(cluster.chip, name)
        job = TrainingJob(batch_tokens=2**20, seq_len=8192, precision="mixed")
        if any(t.runs(layout) for t in tools_for(TrainingProblem(model, job, cluster, calibration), (tool,))):
            seen |= {what for what, cover in hidden(calibration, layout).items() if cover}
    assert seen
    assert seen <= set(row.options) <= set(SENT)
    assert all("(" in said or said == "likewise" for said in row.options.values()), "each with its source"


def test_megatron_is_told_what_the_cost_hides():
    read = arguments(exported("tp=4,dp=4,pp=2,zero=1,schedule=interleaved,virtual_stages=2", "megatron"))
    assert {"--tp-comm-overlap", "--overlap-grad-reduce", "--overlap-param-gather"} <= set(read)
    assert "--no-overlap-p2p-communication" not in read
    before = {"calibration": "fitted+megatron-2021"}
    read = arguments(exported("tp=4,dp=4,pp=2,zero=1,schedule=interleaved,virtual_stages=2", "megatron", **before))
    assert "--no-overlap-p2p-communication" in read
    assert not {"--tp-comm-overlap", "--overlap-grad-reduce", "--overlap-param-gather"} & set(read)


def test_collectives_in_pieces_need_sequence_parallelism():
    split, whole = (estimated(f"tp=4,dp=8,zero=1,sequence_parallel={s}", tool="megatron") for s in ("on", "off"))
    assert "--tp-comm-overlap" not in meshwise.export(whole, to="megatron").text
    exposed = estimated(whole.layout.line(experts=False), calibration="fitted+megatron-2021").estimate.terms["tensor"]
    beside = 1 - (1 - whole.problem.calibration.interference) / 2  # sums of gradients, beside those of weights
    assert whole.estimate.terms["tensor"] == pytest.approx(beside * exposed, rel=0.01)
    assert split.estimate.terms["tensor"] < exposed / 2


def test_sends_wait_in_plain_schedules_only():
    for schedule, waits in (("1f1b", True), ("interleaved,virtual_stages=2", False)):
        layout = f"pp=4,dp=8,zero=1,remat=full,micro_batch=1,schedule={schedule}"
        plan = estimated(layout, tool="megatron")
        free = replace(plan.problem, calibration=replace(plan.problem.calibration, late_sends=0))
        sends = [evaluate_layout(p, plan.fabric, plan.layout).step.terms["pipeline_send"] for p in (plan.problem, free)]
        assert (sends[0] > 2 * sends[1]) == waits == (sends[0] != sends[1])
        assert ("exposed: sends between stages" in exported(layout, "megatron")) == waits


def test_deepspeed_hides_sums_of_gradients_from_zero_2_on():
    """Stage 1 sums as training without ZeRO does, and gathers new weights besides; stage 2 hides its sums.

    Of these there is one a microbatch, here two.
    """
    data = [estimated(f"dp=32,zero={z},remat=full,micro_batch=2", tool="deepspeed").estimate for z in (0, 1, 2)]
    whole, first, second = (e.terms["data"] + e.terms.get("fsdp", 0.0) for e in data)
    assert first > whole > second
    for stage, beside in ((1, False), (2, True)):
        read = json.loads(exported(f"dp=32,zero={stage}", "deepspeed"))
        assert read["zero_optimization"]["overlap_comm"] is beside
        assert ("contiguous_gradients" in read["zero_optimization"]) is beside, "the engine turns it off for stage 1"
    read = json.loads(exported("dp=8,pp=4,zero=1,schedule=1f1b", "deepspeed"))
    assert read["zero_optimization"]["overlap_comm"] is False


def test_one_tool_prices_and_several_do_not():
    chip = load_chip("h100-sxm")
    for tools, name in (
        ((), "fitted"), (("none",), "fitted"), (("torchtitan", "deepspeed"), "fitted"), (("megatron",), "fitted"),
        (("torchtitan",), "fitted+torchtitan"), (("maxtext",), "fitted+xla"), (("deepspeed",), "fitted+deepspeed"),
    ):  # fmt: skip
        assert calibration_for(tools, "fitted", chip).name == name
    assert calibration_for(("maxtext",), "fitted", load_chip("v5p")).name == "fitted"
    assert calibration_for(("deepspeed",), "operations", chip).name == "hopper", "what is asked for stands"


def test_software_that_hides_more_than_the_tool_is_refused():
    chip = load_chip("h100-sxm")
    with pytest.raises(MeshwiseError, match=r"megatron hides what deepspeed cannot .*tensor parallelism's collectives"):
        calibration_for(("deepspeed",), "fitted+megatron", chip)
    assert calibration_for(("torchtitan",), "fitted+pytorch", chip).software == "pytorch"
    text = exported("tp=4,dp=8,zero=0", "torchtitan", calibration="fitted+pytorch")
    assert re.search(r"enable=False,\s+enable_async_tensor_parallel=False", text)


def test_the_answer_says_what_is_hidden(capsys):
    asked = ["llama-3-8b", "--on", "h100:16", "--batch-tokens", "1Mi", "--seq-len", "8192", "--layout", "tp=2,fsdp=8"]
    assert main(["estimate", "train", *asked, "--tool", "torchtitan", "--no-changes"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "overlap of torchtitan: hidden: tensor parallelism's collectives behind their matmuls, gathers" in words
