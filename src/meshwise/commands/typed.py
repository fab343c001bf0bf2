"""A verb's requests as they are typed: names of fields, requests made of text, values that a field may take.

The command line and the page build their options and forms with it. Not here: what a field says of itself (`requests`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwise.commands.command import Verb
from meshwise.commands.requests import Flag, Request, flag, marker, validated

#: Fields whose values can be suggested.
SUGGESTED = frozenset({"model", "on", "cluster", "chip", "precision", "tool"})


def typed_name(verb: Verb, request: type[Request], name: str) -> str:
    """What the help calls a field: its flag, or an argument in capitals."""
    typed = marker(request.model_fields[name], Flag) or Flag()
    if name in request.positional:
        return "PLAN|MODEL" if request is verb.plan_or else typed.name or name.upper()
    return typed.name or flag(name)


def build(verb: Verb, request: type[Request], typed: Mapping[str, Any]) -> Request | str:
    """Build one of a verb's requests from what was typed; the path of a plan, if that is all.

    Args:
        verb: whose request it is.
        request: its kind.
        typed: field -> text or value; None and () where nothing was typed.

    Raises:
        MeshwiseError: in the words of the command line.
    """
    kept = {name: value for name, value in typed.items() if value is not None and value != ()}
    if request is verb.plan_or and len(kept) == 1:
        return str(*kept.values())
    return validated(request, kept, {name: typed_name(verb, request, name) for name in request.model_fields})


def suggestions(request: type[Request], name: str) -> tuple[str, ...]:
    """Values that a field may take, where some are known by name."""
    from meshwise.commands.fit import FitRequest  # noqa: PLC0415  (loaded where somebody asks, as all below)
    from meshwise.exports import TOOLS  # noqa: PLC0415
    from meshwise.exports.serving import SERVING_TOOLS  # noqa: PLC0415
    from meshwise.hardware import SliceRules, aliases, chips, machines, networks  # noqa: PLC0415
    from meshwise.jobs import PRECISIONS, SERVING_PRECISIONS, ServingConditions  # noqa: PLC0415
    from meshwise.jobs.serving_precision import PUBLISHED  # noqa: PLC0415
    from meshwise.models import model_names  # noqa: PLC0415

    serves = issubclass(request, ServingConditions) or request is FitRequest
    match name:
        case "model":
            return tuple(model_names())
        case "on" | "cluster":
            slices = {name for name, rules in networks().items() if isinstance(rules, SliceRules)}
            known = dict.fromkeys((*aliases(), *chips()))
            return (*(f"{name}:4x4" if name in slices else f"{name}:8" for name in known), *machines())
        case "chip":
            return (*aliases(), *chips())
        case "precision":
            return (PUBLISHED, *SERVING_PRECISIONS) if serves else tuple(PRECISIONS)
        case "tool":
            return tuple(SERVING_TOOLS if serves else TOOLS)
        case _:
            return ()
