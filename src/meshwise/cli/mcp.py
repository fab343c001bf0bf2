"""`meshwise mcp`: the verbs as tools of the Model Context Protocol, over stdin and stdout.

A tool's input schema is made of the same requests as the verb's options; its answer is the verb's report, as words and
as the JSON of `--json`. Not here: the protocol (the `mcp` package), and verbs that run jobs or write files.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwise import __version__
from meshwise.commands.command import Tell, Verb, silent
from meshwise.commands.requests import Request, bare_type, marker, validated
from meshwise.core.errors import MeshwiseError, MissingDependencyError, UnknownNameError
from meshwise.core.units import Quantity
from meshwise.report import Report

if TYPE_CHECKING:
    from mcp import types
    from mcp.server import Server, ServerRequestContext

#: Verbs that are no tools: they measure or occupy this machine, open the network, or write tables of files.
_LEFT_OUT = frozenset({"bench", "load", "run", "serve", "sweep"})

_ABOUT = (
    "meshwise plans how to train and serve large language models on TPUs and GPUs: layouts, step times, memory, cost. "
    "Models are names such as llama-3-70b, clusters names such as h100:64 or v5p:4x4x4. Counts may be written 4Mi, "
    "times 20ms, bandwidths 180GB/s. Every number can be explained (explain=true)."
)


def tools() -> Mapping[str, Verb]:
    """Name of a tool -> the verb."""
    from meshwise.cli.main import VERBS  # noqa: PLC0415  (`main` loads this file when it is asked for)

    found = {}
    for name, (target, _) in VERBS.items():
        module, attribute = target.split(":")
        if name not in _LEFT_OUT:
            found[name.replace(" ", "_")] = getattr(importlib.import_module(f"meshwise.commands.{module}"), attribute)
    return {name: verb for name, verb in found.items() if isinstance(verb, Verb)}


def input_schema(verb: Verb) -> dict[str, Any]:
    """The JSON schema of a verb's fields; those that name files to write are left out."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    definitions: dict[str, Any] = {}
    for request in verb.requests:
        schema = request.model_json_schema(by_alias=False)
        definitions |= schema.get("$defs", {})
        kept = [name for name in schema.get("properties", {}) if not _writes(request, name)]
        properties |= {name: _property(request, name, schema["properties"][name]) for name in kept}
        # A saved plan, by position, may stand in place of all else.
        must = request.positional if request is verb.plan_or else schema.get("required", [])
        required += [name for name in must if name in kept]
    properties["explain"] = {"type": "boolean", "default": False, "description": "Give the working of each number."}
    found = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return found | ({"$defs": definitions} if definitions else {})


def _writes(request: type[Request], name: str) -> bool:
    info = request.model_fields[name]
    return bool(info.exclude) or bare_type(info.annotation) is Path


def _property(request: type[Request], name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """One field: quantities may be text with a unit; flags in descriptions become names of fields."""
    info = request.model_fields[name]
    found = {key: value for key, value in schema.items() if key != "title"}
    quantity = marker(info, Quantity)
    if quantity is not None:
        found.pop("anyOf", None)
        null = ["null"] if found.get("default", 0) is None else []
        found |= {"type": ["number", "string", *null], "unit": quantity.unit, "examples": [quantity.example]}
    if info.description:
        text = re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda m: f"`{m[1].replace('-', '_')}`", info.description)
        found["description"] = " ".join(text.split())
    return found


class _Answers:
    """A `Screen` that keeps what a verb shows."""

    as_json = True
    terminal_progress: Tell | None = None

    def __init__(self, *, explain: bool) -> None:
        self.explain = explain
        self.reports: list[Report] = []
        self.texts: list[str] = []
        self.progress = silent

    def say(self, line: str) -> None:
        """Keep what is to be known."""
        self.texts.append(line)

    def write(self, text: str) -> None:
        """Keep text."""
        self.texts.append(text)

    def show(self, report: Report) -> None:
        """Keep a report."""
        self.reports.append(report)


def call(name: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What a tool answers: in words, and as JSON values.

    Raises:
        MeshwiseError: there is no such tool; a wrong argument; the question has no answer.
    """
    known = tools()
    if name not in known:
        raise UnknownNameError("tool", name, known)
    verb, given = known[name], dict(arguments)
    screen = _Answers(explain=bool(given.pop("explain", False)))
    unknown = set(given) - set(input_schema(verb)["properties"])
    if unknown:
        raise UnknownNameError("argument", min(unknown), input_schema(verb)["properties"], list_all=True)
    verb.function(screen, *(_asked(verb, request, given) for request in verb.requests))
    words = [*screen.texts, *(str(report) for report in screen.reports)]
    data = screen.reports[-1].envelope(explain=screen.explain) if screen.reports else {"text": "\n".join(screen.texts)}
    return "\n\n".join(words), data


def _asked(verb: Verb, request: type[Request], given: Mapping[str, Any]) -> Request | str:
    """Build one of a verb's requests; the path of a plan, if that is all."""
    own = {name: value for name, value in given.items() if name in request.model_fields and value is not None}
    if request is verb.plan_or and list(own) == list(request.positional):
        return str(*own.values())
    return validated(request, own)


def server() -> Server[Any]:
    """The server.

    Raises:
        MissingDependencyError: the `mcp` package is not installed.
    """
    try:
        import anyio  # noqa: PLC0415
        from mcp import types  # noqa: PLC0415
        from mcp.server import Server  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError("tools for agents need the library mcp: pip install 'meshwise[mcp]'") from error

    async def listed(_: ServerRequestContext[Any], __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_tool(types.Tool, name, verb) for name, verb in tools().items()])

    async def called(_: ServerRequestContext[Any], asked: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            words, data = await anyio.to_thread.run_sync(call, asked.name, asked.arguments or {})
        except MeshwiseError as error:
            return types.CallToolResult(content=[types.TextContent(type="text", text=str(error))], is_error=True)
        return types.CallToolResult(content=[types.TextContent(type="text", text=words)], structured_content=data)

    return Server("meshwise", version=__version__, instructions=_ABOUT, on_list_tools=listed, on_call_tool=called)


def _tool(kind: type[types.Tool], name: str, verb: Verb) -> types.Tool:
    text = (inspect.getdoc(verb.function) or "").split("\b")[0].strip()
    return kind(name=name, description=" ".join(text.split()), input_schema=input_schema(verb))


@click.command()
def mcp() -> None:
    """Give the verbs to agents, as tools of the Model Context Protocol on stdin and stdout.

    It answers until stdin ends. It needs pip install 'meshwise[mcp]'; an agent is told to start it:

    \b
      {"mcpServers": {"meshwise": {"command": "meshwise", "args": ["mcp"]}}}
    """  # noqa: D301  (click's mark for lines that stay as they are)
    found = server()
    import anyio  # noqa: PLC0415
    from mcp.server.stdio import stdio_server  # noqa: PLC0415

    async def serve() -> None:
        async with stdio_server() as (reading, writing):
            await found.run(reading, writing, found.create_initialization_options())

    anyio.run(serve)
