"""What the public functions return, as a line, as a screen, in a notebook, for programs."""

import json

import pytest

import meshwise
from meshwise.core.errors import MeshwiseError

LOAD = {"on": "h100:2", "prompt": 512, "output": 64}
JOB = {"on": "h100:4", "batch_tokens": "64Ki", "seq_len": 2048}

ASKED = {
    "plan_train": lambda: meshwise.plan_train("llama-3-8b", **JOB),
    "estimate_train": lambda: meshwise.estimate_train("llama-3-8b", **JOB, layout="fsdp=4"),
    "scale_train": lambda: meshwise.scale_train("llama-3-8b", **JOB),
    "plan_serve": lambda: meshwise.plan_serve("llama-3-8b", **LOAD),
    "compare_serve": lambda: meshwise.compare_serve("llama-3-8b", **LOAD | {"on": ["h100:1", "h200:1"]}),
    "estimate_serve": lambda: meshwise.estimate_serve("llama-3-8b", **LOAD, layout="tensor=2", batch=8),
    "fit": lambda: meshwise.fit("llama-3-8b", on="h100:2"),
    "shard": lambda: meshwise.shard("A[I, J_X] * B[J_X, K] -> C[I, K]", mesh="X=4", sizes="I=1Ki,J=8Ki,K=8Ki"),
    "collective": lambda: meshwise.collective("all-gather", "bf16[1024, 4096_X]", mesh="X=8", on="h100:8"),
    "roofline": lambda: meshwise.roofline("bf16[B, D] * bf16[D, F] -> bf16[B, F]", on="v5e", sizes="D=8192,F=32Ki"),
}


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_is_a_line_a_screen_a_page_and_values(name):
    answer = ASKED[name]()
    data = answer.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False))["answer"] == data["answer"]
    assert repr(answer) == f"<{type(answer).__name__}: {data['answer']}>"
    text = str(answer)
    assert text.replace("\n", " ").startswith(data["answer"])
    assert max(map(len, text.splitlines())) <= 80
    page = answer._repr_html_()
    assert page.startswith("<pre>")
    assert page.count("<pre>") == page.count("</pre>") == 1


def test_a_plan_is_a_line_a_screen_a_page_and_values():
    planning = ASKED["estimate_train"]()
    plan = planning.plans[0]
    assert repr(plan).startswith("<Plan: llama-3-8b on 4 x H100 SXM, fsdp=4,")
    assert str(plan) == str(planning)
    assert plan.to_dict() == planning.to_dict()
    assert plan._repr_html_() == planning._repr_html_()


def test_what_an_answer_holds_is_a_line_each():
    plan = ASKED["plan_train"]().plans[0]
    held = [plan, plan.layout, plan.estimate, meshwise.simulate_step(plan), meshwise.export(plan, to="maxtext")]
    held += meshwise.clusters().values()
    for each in held:
        assert repr(each).startswith(f"<{type(each).__name__}: ")
        assert len(repr(each)) < 200


def test_a_timeline_is_a_screen_and_a_page_and_an_export_its_text():
    plan = ASKED["estimate_train"]().plans[0]
    timeline = meshwise.simulate_step(plan)
    assert str(timeline).startswith("One step: ")
    assert timeline.to_dict()["layout"] == str(plan.layout)
    assert timeline._repr_html_().startswith("<pre>")
    handed = meshwise.export(plan, to="maxtext")
    assert str(handed) == handed.text
    assert handed._repr_html_().startswith("<pre>")


@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (lambda: meshwise.model("llama-3-8b"), "<Model: llama-3-8b, 8.03B parameters>"),
        (lambda: meshwise.chip("h100"), "<Chip: H100 SXM>"),
        (lambda: meshwise.cluster("h100:8"), "<Cluster: h100:8 -> 8 x H100 SXM, nvlink 8, 1 host>"),
    ],
)
def test_what_is_found_by_name_is_a_line_a_screen_a_page_and_values(ask, line):
    found = ask()
    assert repr(found) == line
    assert str(found).replace("\n", " ").startswith(found.to_dict()["answer"])
    assert found._repr_html_().startswith("<pre>")


@pytest.mark.parametrize(
    ("name", "to"), [("plan_train", "maxtext"), ("plan_serve", "vllm"), ("estimate_serve", "vllm")]
)
def test_what_a_search_or_an_estimate_gives_is_exported(name, to):
    answer = ASKED[name]()
    text = meshwise.export(answer, to=to).text
    if name != "estimate_serve":
        assert meshwise.export(answer.plans[0], to=to).text == text
    assert to in text.lower()


def test_what_a_search_or_an_estimate_gives_is_simulated():
    planning = ASKED["plan_train"]()
    assert meshwise.simulate_step(planning).total == meshwise.simulate_step(planning.plans[0]).total
    served = ASKED["estimate_serve"]()
    found = meshwise.simulate_serve(served, rate=5, requests=200).result
    assert found.requests == 200
    planned = meshwise.simulate_serve(ASKED["plan_serve"](), rate=5, requests=200).result
    assert planned.requests == 200
    with pytest.raises(MeshwiseError, match=r"costs: expected a plan of serving, .*found <Chip: H100 SXM>"):
        meshwise.simulate_serve(meshwise.chip("h100"), rate=5)


def test_what_is_no_plan_is_not_exported():
    with pytest.raises(MeshwiseError, match="expected a plan or the file of one, found <Chip: H100 SXM>"):
        meshwise.export(meshwise.chip("h100"), to="megatron")
