"""`meshwise mcp`, spoken to by the protocol's own client over stdin and stdout."""

import json
import os
import sys

import anyio
import pytest

import meshwise
from meshwise.cli import mcp as ours
from meshwise.cli.main import VERBS
from meshwise.core.errors import MeshwiseError

jsonschema = pytest.importorskip("jsonschema")


def test_every_verb_is_a_tool_but_those_that_run_or_write():
    assert {name.replace("_", " ") for name in ours.tools()} == set(VERBS) - {"bench", "load", "run", "serve", "sweep"}


@pytest.mark.parametrize("name", ours.tools())
def test_schemas_are_valid_and_say_what_each_field_is(name):
    schema = ours.input_schema(ours.tools()[name])
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["required"]) <= set(schema["properties"])
    for field in schema["properties"].values():
        assert field["description"]
        assert "--" not in field["description"].replace("--explain", "")


def test_no_tool_writes_a_file():
    for verb in ours.tools().values():
        for name, field in ours.input_schema(verb)["properties"].items():
            assert not field["description"].startswith(("Write", "Save")), name


def test_quantities_take_text_with_units():
    schema = ours.input_schema(ours.tools()["plan_train"])
    assert schema["properties"]["batch_tokens"]["type"] == ["number", "string"]
    assert schema["properties"]["tokens"]["type"] == ["number", "string", "null"]
    assert {"model", "batch_tokens", "seq_len"} <= set(schema["required"])


def test_answers_are_those_of_python():
    words, data = ours.call("rule", {"name": "critical-batch", "on": "v5e", "values": {"w": 1}})
    assert data["value"] == meshwise.rule("critical-batch", on="v5e", values={"w": 1}).value
    assert words.startswith("critical-batch: tokens = 120.269")
    assert "explanations" not in data
    _, data = ours.call("roofline", {"expression": "bf16[N] + bf16[N] -> bf16[N]", "on": "h100", "explain": True})
    assert data["explanations"]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("rul", {}, "unknown tool 'rul'. Nearest: rule"),
        ("rule", {"nmae": "fsdp"}, "unknown argument 'nmae'"),
        ("fit", {"on": "h100:1"}, "model is missing"),
        ("fit", {"model": "llama-3-8b", "on": "h9000:1"}, "h9000"),
        ("fit", {"model": "llama-3-8b", "on": "h100:1", "svg": "x.svg"}, "unknown argument 'svg'"),
    ],
)
def test_mistakes_are_answered_in_words(name, arguments, said):
    with pytest.raises(MeshwiseError, match=said):
        ours.call(name, arguments)


def test_a_client_lists_the_tools_and_calls_them():
    pytest.importorskip("mcp")  # here, not for whoever only collects this file
    from mcp import ClientSession, StdioServerParameters, stdio_client  # noqa: PLC0415

    async def talk():
        how = StdioServerParameters(command=sys.executable, args=["-m", "meshwise", "mcp"], env=dict(os.environ))
        async with stdio_client(how) as (reading, writing), ClientSession(reading, writing) as session:
            begun = await session.initialize()
            listed = await session.list_tools()
            fits = await session.call_tool("fit", {"model": "llama-3-8b", "on": "h100:1"})
            wrong = await session.call_tool("model", {"model": "llama-99"})
            return begun, listed, fits, wrong

    begun, listed, fits, wrong = anyio.run(talk)
    assert "meshwise plans" in begun.instructions
    assert {tool.name for tool in listed.tools} == set(ours.tools())
    assert not fits.is_error
    assert fits.structured_content["command"] == "fit"
    assert " ".join(fits.content[0].text.split()).startswith(fits.structured_content["answer"])
    assert json.dumps(fits.structured_content, allow_nan=False)
    assert wrong.is_error
    assert "llama-99" in wrong.content[0].text
