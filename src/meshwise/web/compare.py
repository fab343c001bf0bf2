"""Two answers side by side: their numbers, the differences, and bars of what each takes.

Not here: finding the answers (`app`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from meshwise.core.errors import MeshwiseError
from meshwise.core.units import (
    format_bytes,
    format_count,
    format_flops_per_s,
    format_money,
    format_percent,
    format_time,
)
from meshwise.report.table import pick
from meshwise.web.answers import Answered
from meshwise.web.charts import legend
from meshwise.web.html import table
from meshwise.web.links import Pairs, options, parse_command, parse_options

_Json = Mapping[str, Any]
_Show = Callable[[float], str]

#: What two answers are compared by: words -> where it is in the JSON, and how it is shown.
_ROWS: Mapping[str, tuple[str, _Show]] = {
    "time of a step": ("plan.estimate.step_time_s.expected", format_time),
    "lower bound of it": ("plan.estimate.step_time_s.lower", format_time),
    "MFU": ("plan.estimate.mfu", format_percent),
    "tokens/s": ("plan.estimate.tokens_per_s", format_count),
    "memory of a chip": ("plan.estimate.memory_bytes.total", format_bytes),
    "time to the first token": ("plan.ttft_s", format_time),
    "time per output token": ("plan.tpot_s", format_time),
    "output tokens/s": ("plan.output_tokens_per_s", format_count),
    "output tokens/s a chip": ("plan.throughput_tokens_per_s_per_chip", format_count),
    "$ per million output tokens": ("plan.cost_usd_per_million_output_tokens", format_money),
    "memory of a chip, decode": ("plan.decode.memory_bytes.total", format_bytes),
    "chips": ("plan.num_chips", format_count),
    "lower bound": ("time_s.lower", format_time),
    "upper bound": ("time_s.upper", format_time),
    "peak": ("peak_flops_per_s", format_flops_per_s),
    "ridge, FLOPs/byte": ("ridge_flops_per_byte", "{:,.1f}".format),
    "intensity, FLOPs/byte": ("intensity_flops_per_byte", "{:,.1f}".format),
    "communication": ("communication_time_s", format_time),
    "compute": ("compute_time_s", format_time),
    "parameters": ("parameters.total", "{:,.0f}".format),
    "active parameters": ("parameters.active", "{:,.0f}".format),
    "KV cache a token": ("kv_cache.bytes_per_token", format_bytes),
    "FLOPs a token, training": ("flops.training_per_token", format_count),
    "time of the step": ("step_time_s", format_time),
    "time": ("time_s", format_time),
    "answer": ("value", "{:,.6g}".format),
}

#: Parts of a whole that are drawn: words -> where they are, and how one is shown.
_PARTS: Mapping[str, tuple[str, _Show]] = {
    "Where does the time go?": ("plan.estimate.terms", format_time),
    "What fills the memory?": ("plan.estimate.memory_bytes", format_bytes),
    "Where does the time of a decode step go?": ("plan.decode.terms", format_time),
    "Where does the time of a prefill go?": ("plan.prefill.terms", format_time),
}


def other(verb: str, layout_verb: str, pairs: Pairs, text: str) -> tuple[str, Pairs]:
    """The question that B is: A's with other options, with another layout, or a command of its own.

    Args:
        verb, layout_verb: of the view, without and with a layout.
        pairs: A's options.
        text: of `b`: `--on h200:64`, `tensor=8,data=8`, or a whole command.

    Raises:
        MeshwiseError: it can be read as none of these.
    """
    if text.startswith(("meshwise ", "$ ")):
        return parse_command(text)
    if not text.startswith("--"):
        if not layout_verb:
            raise MeshwiseError(f"b: expected options such as --on h200:8, or a command, found {text[:200]!r}")
        text = f"--layout {text}"
    layout = layout_verb and ("--layout" in text or any(key == "layout" for key, _ in pairs))
    asked = layout_verb if layout else verb
    new = parse_options(asked, text)
    known, replaced = options(asked), {key for key, _ in new}
    kept = tuple(pair for pair in pairs if pair[0] in known and pair[0] not in replaced)
    order = list(known)
    return asked, tuple(sorted((*kept, *new), key=lambda pair: order.index(pair[0])))


def comparison(a: Answered, b: Answered) -> Markup:
    """The numbers of two answers beside each other."""
    assert a.envelope is not None, "a failure is not compared"
    if b.envelope is None:
        return Markup()
    first, second = (_view(one.envelope) for one in (a, b) if one.envelope is not None)
    rows = []
    for words, (path, show) in _ROWS.items():
        mine, theirs = _number(first, path), _number(second, path)
        if mine is not None or theirs is not None:
            both = mine is not None and theirs is not None and mine != 0
            change = f"{100 * (theirs / mine - 1):+.1f} %" if both and mine and theirs is not None else "-"
            change = "same" if mine == theirs else change
            rows.append((words, *("-" if v is None else show(v) for v in (mine, theirs)), change))
    head = ("", "A", "B", "B against A")
    numbers = table(head, rows, (False, True, True, True)) if rows else Markup()
    return numbers + Markup().join(_parts(q, first, second, *where) for q, where in _PARTS.items())


def _view(data: _Json) -> dict[str, Any]:
    return {**data, "plan": (data.get("plans") or [None])[0]}


def _number(data: _Json, path: str) -> float | None:
    """A number of the JSON, None where it has none."""
    try:
        found = pick(data, path)
    except (KeyError, AttributeError):
        return None
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _parts(question: str, first: _Json, second: _Json, path: str, show: _Show) -> Markup:
    """Two bars for each part, on one scale."""
    try:
        pair = [dict(pick(data, path) or {}) for data in (first, second)]
    except (KeyError, AttributeError):
        return Markup()
    for parts in pair:
        parts.pop("total", None)
    names = sorted({n for parts in pair for n, v in parts.items() if v}, key=lambda n: -max(p.get(n, 0) for p in pair))
    if not names:
        return Markup()
    longest = max(max(parts.values(), default=0) for parts in pair)
    rows = Markup()
    for name in names:
        values = [float(parts.get(name, 0)) for parts in pair]
        bars = Markup().join(
            Markup('<rect class="{}" y="{}" width="{:.2f}%" height="10"/>').format(kind, top, 100 * value / longest)
            for kind, top, value in (("a", 0, values[0]), ("b", 12, values[1]))
        )
        rows += Markup(
            '<tr><th scope="row">{}</th><td class="num">{}</td><td class="num">{}</td><td class="wide">'
            '<svg class="bar two" aria-hidden="true">{}</svg></td></tr>'
        ).format(name.replace("_", " "), *(show(v) if v else "-" for v in values), bars)
    head = Markup('<thead><tr><td></td><th scope="col">A</th><th scope="col">B</th><td></td></tr></thead>')
    return Markup(
        '<figure><figcaption>{}</figcaption>{}<table class="bars">{}<tbody>{}</tbody></table></figure>'
    ).format(question, legend((("a", "A"), ("b", "B"))), head, rows)
