"""The description of `/api/*` (OpenAPI 3.1), made of the fields of the requests, as the command line's options are.

Not here: the answers (`answers`).
"""

from __future__ import annotations

import inspect
from typing import Any

from meshwise import __version__
from meshwise.commands.requests import notes
from meshwise.web.links import VERBS, Option, load, options

_ENVELOPE = {
    "type": "object",
    "description": "What the command prints with --json; the verb's own fields stand beside these.",
    "required": ["schema_version", "command", "inputs", "answer"],
    "properties": {
        "schema_version": {"type": "string"},
        "command": {"type": "string"},
        "inputs": {"type": "object", "description": "What was asked, defaults included; units are in the names."},
        "answer": {"type": "string", "description": "The first line."},
        "assumed": {"type": "array", "items": {"type": "string"}},
        "not_modelled": {"type": "array", "items": {"type": "string"}},
        "explanations": {"type": "array", "items": {"type": "object"}},
    },
}
_ERROR = {
    "type": "object",
    "required": ["schema_version", "error"],
    "properties": {
        "schema_version": {"type": "string"},
        "error": {
            "type": "object",
            "required": ["kind", "message", "exit_code"],
            "properties": {
                "kind": {"type": "string"},
                "message": {"type": "string", "description": "Expected, found, and how to mend it."},
                "exit_code": {"type": "integer", "description": "Of the command: 1 a bug, 2 usage, 3 infeasible."},
            },
        },
    },
}
_EXPLAIN = {
    "name": "explain",
    "in": "query",
    "required": False,
    "description": "Add the breakdown of each number, as --explain does.",
    "schema": {"type": "string", "enum": ["yes", "no"], "default": "no"},
}


def description() -> dict[str, Any]:
    """The OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "meshwise",
            "version": __version__,
            "description": "Each path answers what `meshwise VERB --json` prints; options are those of the command.",
        },
        "paths": {f"/api/{verb.replace(' ', '/')}": {"get": _operation(verb)} for verb in VERBS},
        "components": {"schemas": {"Answer": _ENVELOPE, "Error": _ERROR}},
    }


def _operation(verb: str) -> dict[str, Any]:
    summary, _, rest = (inspect.getdoc(load(verb).function) or "").partition("\n")
    return {
        "operationId": verb.replace(" ", "_"),
        "summary": summary,
        "description": rest.strip().replace("\b\n", ""),
        "parameters": [*(_parameter(verb, option) for option in options(verb).values()), _EXPLAIN],
        "responses": {
            "200": _response("The answer, also of a layout that does not fit (X-Exit-Code 3).", "Answer"),
            "400": _response("An option that cannot be understood.", "Error"),
            "422": _response("Nothing is feasible.", "Error"),
            "500": _response("A bug of meshwise.", "Error"),
        },
    }


def _response(text: str, schema: str) -> dict[str, Any]:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _parameter(verb: str, option: Option) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if option.words:
        schema["enum"] = option.words
    if option.default is not None:
        schema["default"] = option.default
    more = "; ".join(notes(option.info))
    repeated = {"schema": {"type": "array", "items": schema}, "explode": True} if option.many else {"schema": schema}
    return {
        "name": option.key,
        "in": "query",
        "required": option.info.is_required() and (option.positional or load(verb).plan_or is not option.request),
        "description": f"{option.info.description}{f' ({more})' if more else ''}",
        **repeated,
    }
