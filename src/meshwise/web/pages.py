"""Pages put together: the answer, its form, its charts and lists, around the templates.

Not here: routes (`app`), and what an answer holds (`answers`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from meshwise.core.errors import MeshwiseError
from meshwise.exports import TARGETS
from meshwise.exports.serving import SERVING_TARGETS
from meshwise.web.answers import Answered
from meshwise.web.compare import comparison
from meshwise.web.forms import form_of
from meshwise.web.html import breakable, tied
from meshwise.web.links import Pairs, command, parse_command, parse_options, query
from meshwise.web.moves import choices, moves, nearest, shared, timeline
from meshwise.web.pictures import pictures
from meshwise.web.stops import stops_of
from meshwise.web.views import CARDS, VIEW_OF, VIEWS, View, changed, link


@cache
def _templates() -> Environment:
    """The templates; what is missing is an error, not a gap."""
    found = Environment(
        loader=PackageLoader("meshwise.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"urls": _urls, "tied": tied, "words": _words, "breakable": breakable}
    return found


def _words(text: str) -> Markup:
    """A command whose words are not parted at their hyphens, but for words longer than a line."""
    return Markup(" ").join(Markup("<span>{}</span>").format(breakable(word)) for word in text.split(" "))


def _urls(text: str) -> Markup:
    """A sentence whose addresses are links; nothing is loaded before they are followed."""
    parts = re.split(r"(https://[^\s,;]+[^\s,;.])", text)
    linked = (
        Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(p) if i % 2 else escape(p) for i, p in enumerate(parts)
    )
    return Markup().join(linked)


#: Tools that a plan is written for.
EXPORTED = (*TARGETS, *SERVING_TARGETS)

#: Options of the page alone, which no command has.
PAGE_OPTIONS = ("b", "step", "device", "at")


@dataclass(frozen=True)
class Asked:
    """What a link of a view asks.

    Args:
        view: the page.
        verb, pairs: the command.
        page: options of the page alone.
        example: whether nothing was asked, and the view's example is shown.
    """

    view: View
    verb: str
    pairs: Pairs
    page: Mapping[str, str]
    example: bool = False


def view_top(asked: Asked, job: str = "") -> str:
    """A page down to the question, which is all that is known before the answer.

    Args:
        asked: what the link asks.
        job: names the search that is running, so that it can be cancelled; "" for none.
    """
    return _render("top.html", **_frame(asked.view.title, asked.view.name)) + _render(
        "question.html", view=asked.view, job=job, here=link(asked.verb, asked.pairs)
    )


def progress(line: str) -> str:
    """A line of a search, which the next one replaces."""
    return str(Markup("<p>{}</p>\n").format(line))


def progress_end() -> str:
    """What closes the progress of a search."""
    return "</div></section>\n"


def bug_words(error: Exception) -> str:
    """What is said of an error that no error of ours explains."""
    return f"this is a bug in meshwise: {type(error).__name__}: {error} (the terminal of the server shows where)"


def bug(error: Exception) -> str:
    """The rest of a page that could not be made."""
    return _render("message.html", title="A bug", message=bug_words(error), near=())


def view_rest(asked: Asked, answered: Answered, second: Answered | None = None, *, held: bool = False) -> str:
    """A page from the answer on.

    Args:
        asked: what the link asks.
        answered: its answer.
        second: the answer of B, where there is one.
        held: whether a slider is held, so that the form and the sliders stay those that are shown.
    """
    verb, pairs = answered.verb, answered.pairs
    asking = query((("verb", verb), *pairs))
    return _render(
        "view.html",
        asked=asked,
        answered=answered,
        second=second,
        compared=comparison(answered, second) if second and answered.envelope else "",
        command=command(verb, pairs),
        second_command=command(second.verb, second.pairs) if second else "",
        link=link(verb, pairs),
        api=f"/api/{verb.replace(' ', '/')}?{query(pairs)}",
        files={name: f"/files/{name}?{asking}" for name in answered.files},
        exports={tool: f"/files/{tool}?{asking}" for tool in _tools(answered)},
        drawn=pictures(answered, asked.page) if answered.envelope else "",
        short=_after_question(answered),
        whole=Markup(answered.whole) if answered.whole != answered.short and not held else "",  # noqa: S704
        choices=choices(answered),
        stops=[] if held else stops_of(answered, asked.page),
        moves=moves(answered),
        timeline=timeline(answered),
        nearest=nearest(answered),
        steps=[linked(step, answered) for step in answered.next_steps if not _writes(step)],
        message=[linked(line, answered) for line in answered.message.split("\n")],
        data=answered.envelope or {},
        form=None if held else form_of(asked.verb, asked.pairs, answered.wrong),
        layout_field=bool(asked.view.layout_verb) and asked.verb == asked.view.verb,
    )


def _after_question(answered: Answered) -> Markup:
    """The short form without the question of a problem, which stands above the answer."""
    question = Markup("<p>{}</p>").format(tied((answered.envelope or {}).get("question", "")))
    return Markup(answered.short.replace(question, "", 1))  # noqa: S704  (made of escaped text by `html`)


def _writes(step: str) -> bool:
    """Whether a next step is about a file that only a terminal writes."""
    return any(f"--{flag} " in f"{step} " for flag in ("save", "svg", "trace", "json"))


def _render(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(**values)


def _frame(title: str, name: str) -> dict[str, Any]:
    return {"title": title, "current": name, "views": VIEWS}


def _tools(answered: Answered) -> list[str]:
    """Tools whose words the plan can be written in."""
    if answered.envelope is None or "plan.json" not in answered.files:
        return []
    return [tool for tool in answered.envelope["plans"][0]["runs_in"] if tool in EXPORTED]


_COMMAND = re.compile(r"(meshwise [a-z](?:(?!: )[^';])*[^';\s.,):])|(--[a-z][a-z-]*(?: (?!--)[\w=.:,%*/\[\]-]*[\w%])?)")


def linked(text: str, answered: Answered) -> Markup:
    """A sentence whose commands and options are links, where they say enough."""
    out, at = Markup(), 0
    for match in _COMMAND.finditer(text):
        try:
            if match[1]:
                target = _target(match[1], answered)
            else:
                new = parse_options(answered.verb, match[2])
                target = link(answered.verb, changed(answered.verb, answered.pairs, **dict(new)))
        except MeshwiseError:
            continue
        if (
            not target
            or text[match.end() :].startswith("...")
            or (answered.message and match[2] and match.start() == 0)
            or target == link(answered.verb, answered.pairs)
        ):
            continue
        out += tied(text[at : match.start()]) + Markup('<a href="{}">{}</a>').format(target, breakable(match[0]))
        at = match.end()
    return out + tied(text[at:])


def _target(words: str, answered: Answered) -> str:
    """The link of a command in a sentence; dots after its verb, and nothing at all, stand for the answer's options."""
    head, dots, rest = words.removesuffix(" with the same options").partition(" ... ")
    if "..." in head + rest:
        return ""
    verb, pairs = parse_command(head)
    if dots or (not pairs and VIEW_OF[verb] is VIEW_OF[answered.verb]):
        pairs = changed(verb, shared(answered.pairs, verb), **dict(parse_options(verb, rest)))
    return link(verb, pairs)


def start_page(cards: Mapping[str, Answered]) -> str:
    """The start page: examples with their answers.

    Args:
        cards: view -> the answer of its example.
    """
    shown = [(VIEWS[name], link(cards[name].verb, cards[name].pairs), cards[name]) for name in CARDS]
    return text_page("start", "Start", "start", cards=shown, others=[v for v in VIEWS.values() if v.name not in CARDS])


def text_page(template: str, heading: str, name: str = "", **values: Any) -> str:
    """A page without a verb of its own."""
    return _render("top.html", **_frame(heading, name)) + _render(f"{template}.html", **values)
