"""Where an answer leads: other layouts and comparisons with them, its timeline, what to try where nothing fits.

Not here: quantities that are varied (`stops`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.book import catalog_constants, problems
from meshwise.core.errors import MeshwiseError
from meshwise.hardware import parse_cluster
from meshwise.web.answers import Answered
from meshwise.web.links import Pairs, command, options, query
from meshwise.web.views import changed, link


@dataclass(frozen=True)
class Move:
    """Another layout.

    Args:
        words: what it is.
        href: the link that shows it.
        beside: the link that compares it with the answer.
    """

    words: str
    href: str
    beside: str


def moves(answered: Answered) -> list[Move]:
    """Other layouts to look at: those of a search, or single changes of one."""
    data = answered.envelope or {}
    found = {"plan train": _planned, "estimate train": _changes, "plan serve": _served}.get(answered.verb)
    if found is None:
        return []
    here = link(answered.verb, answered.pairs)
    verb = "estimate serve" if answered.verb == "plan serve" else "estimate train"
    common = shared(answered.pairs, verb)
    out = []
    for words, layout in found(data):
        pairs = changed(verb, common, **layout, changes="no")
        b = (("b", command(verb, pairs)),)
        out.append(Move(words, link(verb, pairs), f"{here}&{query(b)}"))
    return out


def shared(pairs: Pairs, verb: str) -> Pairs:
    """The options that another verb has, too."""
    return tuple((key, text) for key, text in pairs if key in options(verb))


def _planned(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    for plan in data.get("plans", []):
        yield plan["layout_text"], {"layout": plan["layout_text"]}
    for row in data.get("clusters", []):
        if (plan := row["plan"]) is not None:
            yield f"{row['cluster']}: {plan['layout_text']}", {"layout": plan["layout_text"], "on": row["cluster"]}


def _changes(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    for change in data.get("changes", ()):  # of a question that has no answer there are none
        yield f"{change['change']}: {change['layout_text']}", {"layout": change["layout_text"]}


def _served(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    for plan in data.get("plans", []):
        decode, prefill = plan["decode"], plan["prefill"]
        layout = {"layout": decode["layout"], "batch": str(plan["batch"])}
        words = f"{decode['layout']}, batch {plan['batch']:,}"
        if "cluster" in plan:
            layout |= {"on": plan["cluster"], "precision": plan["precision"]}
            words = f"{plan['cluster']}, {plan['precision']}: {words}"
        if plan["mode"] == "disaggregated":
            layout["mode"] = "disaggregated"
        if prefill["layout"] != decode["layout"]:
            layout["prefill_layout"] = prefill["layout"]
            words += f", prefill {'apart' if 'mode' in layout else 'by'} {prefill['layout']}"
        if prefill["batch"] > 1:
            layout["prefill_batch"] = str(prefill["batch"])
        if prefill["chunk_tokens"] is not None:
            layout["chunk"] = str(prefill["chunk_tokens"])
        yield words, layout


@dataclass(frozen=True)
class Choice:
    """The ways in which an answer can be shown.

    Args:
        words: what is chosen.
        ways: text -> link.
        own: the text of the one that is shown.
    """

    words: str
    ways: Mapping[str, str]
    own: str


def choices(answered: Answered) -> list[Choice]:
    """Of problems of the book: with answers or with hints alone; with the constants of the book or the catalog."""
    data = answered.envelope
    if answered.verb != "book" or data is None or "errata" in data:
        return []
    inputs, one = data["inputs"], "id" in data
    words = ("the answer, worked", "the question, with a hint") if one else ("answers", "questions")
    shown: dict[str, str | None] = dict(zip(words, (None, "yes"), strict=True))
    found = [_choice(answered, "Show", "hint", shown, "yes" if inputs["hint"] else None)]
    if one and catalog_constants(problems()[data["id"]].constants):
        named: dict[str, str | None] = {"as the book printed them": None, "of the catalog": "catalog"}
        own = None if inputs["constants"] == "book" else inputs["constants"]
        found.append(_choice(answered, "Constants", "constants", named, own))
    return found


def _choice(answered: Answered, words: str, key: str, values: Mapping[str, str | None], own: str | None) -> Choice:
    """One option's values: words -> its text, None where it is left out."""
    verb, pairs = answered.verb, answered.pairs
    ways = {text: link(verb, changed(verb, pairs, **{key: value})) for text, value in values.items()}
    return Choice(words, ways, next(text for text, value in values.items() if value == own))


def timeline(answered: Answered) -> str | None:
    """The link that shows the step of a training plan over time."""
    plans = (answered.envelope or {}).get("plans")
    if answered.verb not in ("plan train", "estimate train") or not plans:
        return None
    verb = "simulate train"
    return link(verb, changed(verb, shared(answered.pairs, verb), layout=plans[0]["layout_text"]))


def nearest(answered: Answered) -> list[tuple[str, str]]:
    """What to look at in place of a failure: what fits there, the same on more chips; the name that was meant."""
    given = dict(answered.pairs)
    if answered.kind == "UnknownNameError":
        return _meant(answered)
    if answered.kind != "InfeasibleError" or "model" not in given or "on" not in given:
        return []
    found = [("what fits there", link("fit", (("model", given["model"]), ("on", given["on"]))))]
    counted = re.fullmatch(r"([\w.-]+?)(?::(\d+))?", given["on"])
    if counted is None:
        return found
    for times in (8, 64):
        more = f"{counted[1]}:{int(counted[2] or 1) * times}"
        try:
            parse_cluster(more)
        except MeshwiseError:
            continue
        found.append((f"the same on {more}", link(answered.verb, changed(answered.verb, answered.pairs, on=more))))
    return found


def _meant(answered: Answered) -> list[tuple[str, str]]:
    """The same question with the nearest names in place of one that is not known."""
    unknown = re.search(r"unknown [\w ]+ '([^']+)'\. Nearest: ([^ ]+(?:, [^ ]+)*)[.]", answered.message)
    if unknown is None:
        kind = re.match(r"unknown (model|chip) ", answered.message)
        return [(f"all {kind[1]}s", link(f"{kind[1]}s", ()))] if kind else []
    keys = [key for key, text in answered.pairs if unknown[1] in text.split(":")[0]]
    texts = dict(answered.pairs)
    return [
        (
            name,
            link(answered.verb, changed(answered.verb, answered.pairs, **{key: texts[key].replace(unknown[1], name)})),
        )
        for key in keys[:1]
        for name in unknown[2].split(", ")
    ]
