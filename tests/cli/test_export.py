"""`meshwise export`: the file on stdout, in a file, as JSON; and what is wrong with what it was given."""

import json
from pathlib import Path

import pytest

import meshwise
from meshwise.commands.plan_files import read_plan
from meshwise.search.plan import ServingPlan

PLAN = Path(__file__).parents[1] / "data" / "export" / "plan.json"


def test_the_file_itself_is_printed(run):
    done = run("export", str(PLAN), "--to", "megatron")
    assert (done.code, done.err) == (0, "")
    assert done.out == meshwise.export(PLAN, to="megatron").text
    assert done.out.startswith("# llama-3-8b on 64 x H100 SXM, a plan of meshwise")


def test_the_plan_of_a_file_is_the_plan_itself():
    plan = meshwise.Plan.from_json(PLAN.read_text(encoding="utf-8"))
    assert meshwise.export(plan, to="megatron") == meshwise.export(str(PLAN), to="megatron")


def test_a_file_is_written_and_named(run, tmp_path):
    file = tmp_path / "args.sh"
    done = run("export", str(PLAN), "--to", "megatron", "--output", str(file))
    assert done.code == 0
    assert done.first_line.startswith(f"Megatron-LM: {file.read_text().count(chr(10))} lines in")
    assert "args.sh" in done.out.replace("\n", "")
    assert file.read_text(encoding="utf-8") == meshwise.export(PLAN, to="megatron").text


def test_json_carries_text_version_and_notes(run):
    told = run("export", str(PLAN), "--to", "megatron", "--json").json
    handed = meshwise.export(PLAN, to="megatron")
    assert told["text"] == handed.text
    assert told["written_for"] == handed.version
    assert told["notes"] == list(handed.notes)
    assert told["inputs"] == {"plan": str(PLAN), "to": "megatron", "output": None}


def test_a_refusal_is_an_error_of_usage(run, tmp_path):
    file = tmp_path / "planned.py"
    done = run("export", str(PLAN), "--to", "torchtitan", "--output", str(file))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: torchtitan cannot express a choice of this plan:\n  - zero=1: ")
    assert not file.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.json", None, "No such file or directory; 'meshwise plan train ... --save plan.json' writes one"),
        (
            "text.json",
            b"no plan",
            "text.json': not valid JSON: Expecting value at line 1, column 1; is the file complete?",
        ),
        ("other.json", b"{}", "other.json': expected the keys"),
        ("image.json", b"\xff\xfe\x00", "expected JSON as --save writes it, found no text"),
    ],
)
def test_what_is_no_plan_is_said(run, tmp_path, name, content, message):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    done = run("export", str(file), "--to", "jax")
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_file_that_cannot_be_written_is_said(run, tmp_path):
    done = run("export", str(PLAN), "--to", "megatron", "--output", str(tmp_path / "none" / "args.sh"))
    assert done.code == 2
    assert "--output" in done.err
    assert "No such file or directory" in done.err


def test_an_unknown_tool_is_refused_with_the_tools_there_are(run):
    done = run("export", str(PLAN), "--to", "megatrn")
    assert done.code == 2
    for tool in ("maxtext", "megatron", "torchtitan", "deepspeed", "jax"):
        assert tool in done.err


@pytest.mark.parametrize(
    ("plan", "to", "message"),
    [(3, "jax", "plan: expected a plan or the file of one"), (PLAN, 3, "to: expected the name of a tool")],
)
def test_python_arguments_of_another_kind_are_refused(plan, to, message):
    with pytest.raises(meshwise.MeshwiseError, match=message):
        meshwise.export(plan, to=to)


def test_a_plan_that_was_changed_by_hand_is_refused(run, tmp_path):
    plan = json.loads(PLAN.read_text(encoding="utf-8"))
    plan["layout"]["data"] = 5
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan), encoding="utf-8")
    done = run("export", str(file), "--to", "megatron")
    assert (done.code, done.out) == (2, "")
    assert "wires of data multiply to 16, but data is 5" in done.err


@pytest.fixture
def saved(run, tmp_path):
    """A plan of serving."""
    file = tmp_path / "serving.json"
    asked = ("llama-3-8b", "--on", "h100:4", "--prompt", "1024", "--output", "128", "--batch", "32")
    assert run("estimate", "serve", *asked, "--layout", "tensor=4", "--save", str(file)).code == 0
    return file


def test_a_plan_of_serving_is_a_script(run, saved):
    done = run("export", str(saved), "--to", "vllm")
    assert (done.code, done.err) == (0, "")
    assert done.out == meshwise.export(saved, to="vllm").text
    assert done.out.startswith("#!/bin/bash\n# llama-3-8b on 4 x H100 SXM, a plan of meshwise")
    assert "--tensor-parallel-size 4 " in done.out
    assert meshwise.export(read_plan(saved, ServingPlan), to="vllm").text == done.out


def test_what_is_written_for_serving_is_explained(run, saved, tmp_path):
    told = run("export", str(saved), "--to", "sglang", "--output", str(tmp_path / "serve.sh"), "--json").json
    handed = meshwise.export(saved, to="sglang")
    assert (tmp_path / "serve.sh").read_text(encoding="utf-8") == told["text"] == handed.text
    assert told["notes"] == list(handed.notes)
    assert told["file_name"] == "serve-sglang.sh"


def test_tools_for_another_kind_of_plan_are_refused(run, saved):
    done = run("export", str(saved), "--to", "megatron")
    assert (done.code, done.out) == (2, "")
    assert "to: megatron does no serving, and this is a plan of serving: use vllm, sglang, tensorrt-llm" in done.err
    done = run("export", str(PLAN), "--to", "vllm")
    assert "to: vllm does no training, and this is a plan of training: use maxtext, megatron" in done.err


def test_a_refusal_of_an_engine_names_chip_and_way_out(run, saved):
    done = run("export", str(saved), "--to", "jetstream")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: JetStream with MaxText cannot express")
    assert "chip H100 SXM" in done.err
    assert "nearest: --to vllm on GPUs" in done.err
