"""The rule verb's answer: one rule worked out or solved, one described, all listed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from meshwise.core.errors import MeshwiseError
from meshwise.core.explanation import Answer, Explanation
from meshwise.core.units import format_bandwidth, format_bytes, format_duration, format_flops, format_flops_per_s
from meshwise.costs.rules import LETTERS, TOPICS, Rule
from meshwise.report.report import Report
from meshwise.report.table import Columns, counted, said, tabulate


@dataclass(frozen=True, slots=True)
class Given:
    """A letter with its value, in its base unit, who gives it, and the document that it stands in."""

    letter: str
    value: float | list[float]
    source: str
    document: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class RuleAnswer(Answer):
    """A rule with one letter found.

    Args:
        rule: the rule.
        unknown: the letter.
        value: what it is, in its base unit; of several solutions the least. Sizes are text.
        solutions: all there are, each from one value to another; none where the value is text.
        given: the other letters.
    """

    rule: Rule
    unknown: str
    value: float | str
    solutions: tuple[tuple[float, float], ...]
    given: tuple[Given, ...]

    @property
    def explanation(self) -> Explanation:
        """Formula, substitution and result."""
        numbers = {g.letter: g.value for g in self.given}
        left = numbers.get(self.rule.result, self.rule.result)
        return Explanation(
            self.rule.name,
            f"{self.rule.result} = {self.rule.formula.text}",
            f"{left if isinstance(left, str) else f'{left:.6g}'} = {self.rule.formula.substituted(numbers)}",
            f"{self.unknown} = {shown(self.unknown, self.value)}",
            self.rule.source,
        )


def _duration(seconds: float) -> str:
    return format_duration(seconds)


def _count(value: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}" if value < 1e10 else f"{value:.5g}"


_SHOW: Mapping[str, Callable[[float], str]] = {
    "s": _duration,
    "bytes": lambda v: f"{v:g} B" if v < 1024 else f"{format_bytes(v)} ({v:.4g} bytes)",
    "bytes/s": format_bandwidth,
    "FLOPs": format_flops,
    "FLOP/s": format_flops_per_s,
    "$": lambda v: f"${v:,.2f}",
    "%": lambda v: f"{100 * v:.4g} %",
}


def shown(letter: str, value: Any) -> str:
    """A letter's value with its unit."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        sizes = [f"{n:g}" for n in value]
        return "x".join(sizes) if letter != "counts" else f"{sizes[0]}, {sizes[1]}, ... {sizes[-1]}"
    return "inf" if math.isinf(value) else _SHOW.get(LETTERS[letter].unit, _count)(value)


def _range(letter: str, low: float, high: float) -> str:
    if low == high:
        return shown(letter, low)
    if low == 0 or math.isinf(high):
        return f"at most {shown(letter, high)}" if low == 0 else f"at least {shown(letter, low)}"
    return f"{shown(letter, low)} to {shown(letter, high)}"


def _neighbours(answer: RuleAnswer) -> list[tuple[str, str]]:
    """What the whole numbers on both sides give, where a count came out between two."""
    low, high = answer.solutions[0]
    numbers = {g.letter: g.value for g in answer.given if g.letter != answer.rule.result}
    if answer.unknown == answer.rule.result or LETTERS[answer.unknown].unit or low != high or low > 100:
        return []
    if abs(low - round(low)) < 1e-9 * low:
        return []
    rows = []
    for whole in (math.floor(low), math.ceil(low)):
        try:
            result = answer.rule.formula.value({**numbers, answer.unknown: float(whole)})
        except MeshwiseError:
            continue
        rows.append((f"{answer.unknown} = {whole:,}", f"{answer.rule.result} = {shown(answer.rule.result, result)}"))
    return rows


def rule_report(answer: RuleAnswer, inputs: Mapping[str, Any]) -> Report:
    """One rule, worked out or solved."""
    rule, how = answer.rule, answer.explanation
    value = shown(answer.unknown, answer.value)
    if answer.solutions:
        value = "; or ".join(_range(answer.unknown, *one) for one in answer.solutions)
    rows = [
        ("formula", how.formula),
        ("with numbers", how.substitution),
        ("result", f"{answer.unknown} = {value}"),
        *(_neighbours(answer) if answer.solutions else []),
    ]
    letters: Columns = {
        "!letter": "letter",
        "!>value": lambda g: shown(g.letter, g.value),
        "": lambda g: f"{LETTERS[g.letter].words}; {g.source}",
    }
    return Report(
        command="rule",
        inputs=inputs,
        answer=f"{rule.name}: {answer.unknown} = {value}",
        data={
            "rule": rule.name,
            "unknown": answer.unknown,
            "value": answer.value,
            "unit": LETTERS[answer.unknown].unit,
            "solutions": [[low, None if math.isinf(high) else high] for low, high in answer.solutions],
            "formula": how.formula,
            "substitution": how.substitution,
            "source": rule.source,
            "letters": {g.letter: _letter(g) for g in answer.given},
        },
        body=said(
            Text(_sentence(rule, answer.unknown)),
            tabulate({"!working": lambda row: row[0], "": lambda row: row[1]}, rows),
            tabulate(letters, answer.given) if answer.given else None,
        ),
        assumed=said(
            rule.source,
            rule.note,
            _ACTIVE if rule.counts_active else None,
            *dict.fromkeys(g.document for g in answer.given),
        ),
        explanations=(how,),
    )


def _letter(given: Given) -> dict[str, Any]:
    value = None if isinstance(given.value, float) and math.isinf(given.value) else given.value
    return {"value": value, "unit": LETTERS[given.letter].unit, "source": given.document or given.source}


_ACTIVE = "of a mixture P are the parameters that a token uses"


def _sentence(rule: Rule, unknown: str) -> str:
    own = f"{rule.words[0].upper()}{rule.words[1:]}."
    of = "" if LETTERS[unknown].words == unknown else f", {LETTERS[unknown].words}"
    return own if unknown == rule.result else f"{own} Here {rule.result} is given, and solved for {unknown}{of}."


def described_report(rule: Rule, inputs: Mapping[str, Any]) -> Report:
    """One rule, not worked out."""
    columns: Columns = {
        "!letter": lambda name: name,
        "!unit": lambda name: LETTERS[name].unit,
        ">!default": lambda name: _default(rule, name),
        "": lambda name: LETTERS[name].words,
    }
    return Report(
        command="rule",
        inputs=inputs,
        answer=f"{rule.name}: {rule.result} = {rule.formula.text}",
        data={
            "rule": rule.name,
            "formula": f"{rule.result} = {rule.formula.text}",
            "words": rule.words,
            "source": rule.source,
            "note": rule.note,
            "letters": {n: {"words": LETTERS[n].words, "unit": LETTERS[n].unit} for n in (rule.result, *rule.letters)},
        },
        body=(Text(_sentence(rule, rule.result)), tabulate(columns, (rule.result, *rule.letters))),
        assumed=said(rule.source, rule.note, _ACTIVE if rule.counts_active else None),
        next_steps=(f"with numbers: meshwise rule {rule.name} --on v5e --set LETTER=NUMBER",),
    )


def _default(rule: Rule, name: str) -> str:
    default = rule.defaults.get(name, LETTERS[name].default)
    return "" if default is None or name == rule.result else shown(name, default)


def rules_report(inputs: Mapping[str, Any]) -> Report:
    """All rules, by topic."""
    every = [rule for rules in TOPICS.values() for rule in rules]
    return Report(
        command="rule",
        inputs=inputs,
        answer=f"{counted(len(every), 'rule')} of the book; each can be solved for any of its letters",
        data={
            "rules": [
                {
                    "name": rule.name,
                    "topic": topic,
                    "formula": f"{rule.result} = {rule.formula.text}",
                    "words": rule.words,
                    "source": rule.source,
                }
                for topic, rules in TOPICS.items()
                for rule in rules
            ]
        },
        body=tuple(
            tabulate(
                {f"!{topic}": "name", "": lambda rule: f"{rule.result} = {rule.formula.text}"},
                rules,
                note=lambda rule: rule.words,
            )
            for topic, rules in TOPICS.items()
        ),
        next_steps=("the letters of one: meshwise rule fsdp", "with numbers: meshwise rule critical-batch --on v5e"),
    )
