"""The shape of every answer, tables and charts."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text

from meshwise.core.explanation import Explanation
from meshwise.report import SCHEMA_VERSION, Report
from meshwise.report.chart import Bars, Chart
from meshwise.report.report import listed
from meshwise.report.table import facts, table, tabulate


def shown(renderable: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False, color_system=None)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


WHOLE = Report(
    command="test",
    inputs={"a": 1},
    answer="The answer [B, D] is 42.",
    data={"value_s": 42.0},
    body=(Text("body"),),
    assumed=("a long assumption that must be wrapped under its first word because it does not fit on one line", "b"),
    not_modelled=("the weather",),
    next_steps=("ask again",),
    explanations=(Explanation("value", "a + b", "40 + 2", "42 s", "the book"),),
)


def test_the_answer_comes_first_then_body_assumptions_limits_and_next_steps():
    assert shown(WHOLE.renderable()) == (
        "The answer [B, D] is 42.\n"
        "\n"
        "body\n"
        "\n"
        "Assumed:\n"
        "  - a long assumption that must be wrapped under its first word because it does\n"
        "    not fit on one line\n"
        "  - b\n"
        "\n"
        "Not modelled:\n"
        "  - the weather\n"
        "\n"
        "Try next:\n"
        "  - ask again"
    )


def test_explain_shows_formula_substitution_result_and_source():
    text = shown(WHOLE.renderable(explain=True))
    assert "Breakdown:\n  value\n    = a + b\n    = 40 + 2\n    = 42 s\n    source: the book\n" in text


def test_the_envelope():
    envelope = WHOLE.envelope(explain=True)
    assert list(envelope) == [
        "schema_version", "command", "inputs", "answer", "value_s", "assumed", "not_modelled", "explanations",
    ]  # fmt: skip
    assert envelope["schema_version"] == SCHEMA_VERSION
    assert json.loads(json.dumps(envelope)) == envelope


def test_a_verb_may_not_use_the_names_of_the_envelope():
    with pytest.raises(AssertionError, match="belong to the envelope"):
        Report(command="test", inputs={}, answer="", data={"inputs": 1}).envelope()


def test_tables_set_numbers_flush_right_and_never_read_markup():
    text = shown(table(("!name", ">n", "words"), [("[bold]a[/]", "1", "x"), ("b", "1,000", "y")]))
    assert text.splitlines() == ["name            n  words", "[bold]a[/]      1  x", "b           1,000  y"]


def test_a_row_has_a_note_below_it_and_what_is_missing_a_sign():
    columns = {"!name": "name", ">size": ("of.size", "{:,}".format)}
    rows = [{"name": "first", "of": {"size": 1024}}, {"name": "second", "of": None}]
    assert shown(tabulate(columns, rows)).split() == ["name", "size", "first", "1,024", "second", "-"]
    noted = shown(tabulate(columns, rows, missing="none", note=lambda row: f"about {row['name']}"))
    assert [line.strip() for line in noted.split("\n")][1:5] == [
        *("first   1,024", "about first"),
        *("second   none", "about second"),
    ]


def test_a_heading_without_lines_is_not_shown():
    assert listed("Why", ()) is None
    assert "Why:" in shown(listed("Why", ("so",)))


def test_facts_have_no_header():
    assert shown(facts([("bytes", "8 MiB", "remark"), ("time", "1 us")])).splitlines() == [
        "bytes  8 MiB  remark",
        "time    1 us",
    ]


def test_a_chart_draws_a_roof_and_marks_a_point():
    chart = Chart(x=(1, 100), y=(1, 10), columns=20, rows=5)
    chart.curve(lambda x: min(x, 10))
    chart.mark(10, 10, "O")
    lines = chart.lines("{:g}".format, [(10, "ridge"), (1, "1"), (100, "100")])
    assert len(lines) == 5 + 2
    assert lines[0].startswith("10 |")
    assert lines[4].startswith(" 1 |")
    assert "O" in lines[0]
    assert lines[-1].split() == ["1", "ridge", "100"]
    roof = lines[0].split("|")[1]
    assert set(roof[11:]) == {"⠉"}  # flat at the top, right of the ridge
    assert max(map(len, lines)) <= 4 + 20


def test_labels_that_would_touch_are_left_out():
    chart = Chart(x=(1, 100), y=(1, 10), columns=20, rows=2)
    assert chart.lines("{:g}".format, [(10, "first"), (11, "second")])[-1].split() == ["first"]


def test_points_outside_are_clipped():
    chart = Chart(x=(1, 100), y=(1, 10), columns=20, rows=2)
    chart.mark(1e9, 1e9, "O")
    assert chart.lines("{:g}".format, [])[0].endswith("O")


LONG = replace(
    WHOLE,
    answer="so it is",
    brief=(Text("\n".join(f"row {n}" for n in range(30))), Bars("of it", {"a": 0.7, "b": 0.3}, 1.0, str)),
    reasons=tuple(f"reason {n} " + "and so on " * 12 for n in range(9)),
    next_steps=("first", "second", "third", "fourth"),
)


@pytest.mark.parametrize("rows", [1, 10, 20, 26, 30])
def test_the_short_form_is_one_screen_with_as_many_reasons_as_it_has_room_for(rows):
    report = replace(LONG, brief=(Text("\n".join(f"row {n}" for n in range(rows))),))
    lines = shown(report.renderable()).splitlines()
    reasons = [line for line in lines if line.startswith("  - reason")]
    assert len(lines) <= 45
    assert len(reasons) == min(4, (45 - len(lines) + 2 * len(reasons)) // 2), "no room was left for another"
    assert [line for line in lines if line in ("  - first", "  - third", "  - fourth")] == ["  - first", "  - third"]
    assert "--details" in lines[-2] + lines[-1]
    wide = [line for line in shown(report.renderable(), 160).splitlines() if line.startswith("  - reason")]
    assert len(wide) >= len(reasons), "wider terminals are used"


def test_the_whole_is_one_flag_away():
    whole = shown(LONG.renderable(whole=True))
    assert "row 0" not in whole
    assert "Assumed:" not in shown(LONG.renderable())
    assert "Assumed:" in whole
    assert shown(LONG.renderable(explain=True)).startswith("so it is")


def test_bars_are_as_long_as_their_shares_and_small_parts_are_one_row():
    parts = {"half_of_it": 50.0, "none": 0.0} | {f"part {n}": 50.0 / 2**n for n in range(1, 11)}
    title, *rows = shown(Bars("all", parts, 100.0, "{:.2f}".format), 60).splitlines()
    assert title == "all"
    assert [row[:10].strip() for row in rows] == ["half of it", "part 1", "part 2", "part 3", "part 4", "6 others"]
    assert len(rows[0]) == pytest.approx(17 + 43 / 2, abs=1), "half of the room"
    assert [row.count("█") for row in rows] == [21, 10, 5, 2, 1, 1]
