"""`meshwise.book`: every problem is answered, rightly where the answer is known, with other numbers at least in words.

The tables of the other files hold the engine to the same rows, so that it and these workings agree.
"""

import ast
import importlib
import json
import math
import re
from collections import Counter

import pytest

import meshwise
from meshwise.book import CHAPTERS, UNITS, VERDICTS, judge, problems, solve
from meshwise.cli.main import main
from meshwise.core.errors import MeshwiseError
from meshwise.core.formula import Formula
from meshwise.costs.rules import RULES, PutText
from meshwise.report.book import solution_report
from tests.book.book_rows import EXACT

KNOWN = [p for p in problems().values() if p.recomputed is not None]


def test_every_problem_has_one_answer_and_a_working():
    assert len(problems()) == 740
    assert len(KNOWN) == 355
    for problem in problems().values():
        solution = solve(problem)
        assert solution.verdict in VERDICTS
        assert solution.explanation.formula
        assert solution.explanation.substitution
        assert solution_report(solution, None, {}).envelope(explain=True)["explanations"][0]["formula"]
        assert isinstance(solution.value, str) == (problem.unit in ("verdict", "shape", "slice", "XxY"))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_known_answers_are_right(chapter):
    for problem in (p for p in KNOWN if p.chapter == chapter):
        value = solve(problem).value
        if isinstance(problem.recomputed, str):
            assert value == problem.recomputed, problem.id
        else:
            # A year has 365 days where the book divides by them.
            exact = problem.tolerance if problem.id.endswith("min_chips_years") else EXACT
            assert value == pytest.approx(problem.recomputed, rel=max(exact, 1e-9)), problem.id


def test_verdicts_are_those_on_record():
    verdict = {
        "agrees": "agrees", "rounding": "rounding", "superseded": "corrected", "book_inconsistent": "inconsistent",
        "no_published_answer": "ours",
    }  # fmt: skip
    assert Counter(verdict[p.status] for p in KNOWN) == Counter(solve(p).verdict for p in KNOWN)


def test_any_number_of_a_question_may_be_another():
    """Doubled one at a time, each gives another answer, the same one, or a refusal in words."""
    answered = refused = 0
    for problem in problems().values():
        for name in problem.variable:
            was = problem.values[name]
            text = "x".join(str(2 * n) for n in was) if isinstance(was, list) else str(2 * was)
            try:
                value = solve(problem, {name: text}).value
            except MeshwiseError:
                refused += 1
                continue
            answered += 1
            assert isinstance(value, str) or math.isfinite(value)
    assert answered > 1500
    assert refused < 0.05 * answered


def test_a_changed_number_changes_the_working():
    one = solve(problems()["roofline.q2.Bcrit"], {"W_hbm": "1.64e12"})
    assert one.value == pytest.approx(60.061, rel=1e-4)
    assert one.verdict == "varied"
    assert one.explanation.substitution == "1.97e+14 / 1.64e+12 * 1 / 2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"W_hmb": "1"}, "unknown input 'W_hmb'. Nearest: W_hbm"),
        ({"W_hbm": "-1"}, "W_hbm: expected a number"),
        ({"W_hbm": "many"}, "W_hbm: expected a number such as 8.2e+11, found 'many'"),
        ({"chip": "h100"}, "chip: TPU v5e is fixed by the question; these may vary: C_bf16, W_hbm, bytes_per_weight"),
        ({"W_hbm": "0"}, "W_hbm: expected a number"),
    ],
)
def test_numbers_that_cannot_be_are_refused_in_words(changes, words):
    with pytest.raises(MeshwiseError, match=re.escape(words)):
        solve(problems()["roofline.q2.Bcrit"], changes)


def test_the_command_answers_one_several_and_all(capsys):
    assert main(["book", "roofline.q2", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["id"], one["verdict"], one["printed"]) == ("roofline.q2.Bcrit", "agrees", 120)
    assert [meshwise.answer_book(name)[0].problem.id for name in problems()] == list(problems())
    assert all(len(meshwise.answer_book(name)) == 1 for name in problems())
    assert main(["book", "tpus.q6", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["answers"]) == 11
    assert main(["book", "--all", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [set(a) for a in answers] == [{"id", "value", "unit", "verdict"}] * 740
    assert main(["book"]) == 0
    assert "applied-inference" in capsys.readouterr().out


@pytest.mark.parametrize(("problem", "answer", "code", "words"), [
    ("roofline.q2", "120", 0, "120 is right"),
    ("roofline.q2", "120 tokens", 0, "120 tokens is right"),
    ("roofline.q2", "0.12 ktokens", 0, "is right"),
    ("roofline.q2", "60", 3, "0.499 times as much"),
    ("roofline.q2", "60", 3, "mixed up: bytes a value"),
    ("roofline.q2", "many", 3, "many is not right: expected a number of tokens"),
    ("roofline.q2", "120 ms", 3, "ms is a time, and the problem asks for tokens"),
    ("roofline.q2", "120 furlongs", 3, "unknown unit 'furlongs'; the problem's is tokens"),
    ("tpus.q1.load_time", "10.16", 0, "is right"),
    ("tpus.q1.load_time", "10.16 ms", 0, "is right"),
    ("tpus.q1.load_time", "0.01016 s", 0, "is right"),
    ("tpus.q1.load_time", "10160 us", 0, "is right"),
    ("tpus.q1.load_time", "10.16 s", 3, "(mixed up: a thousand?)"),
    ("tpus.q1.load_time", "10.16 GB", 3, "GB is bytes, and the problem asks for ms"),
    ("sharding.cases.case1", "none", 0, "is right"),
    ("sharding.cases.case1", "AllGather_X(lhs)", 3, "is not right"),
])  # fmt: skip
def test_a_readers_answer_is_judged(capsys, problem, answer, code, words):
    assert main(["book", problem, "--answer", answer]) == code
    assert words in " ".join(capsys.readouterr().out.split())


def test_every_answer_of_ours_is_right_and_no_other():
    """As it is shown, in its own unit; not twice it, not with the unit of something else."""
    for problem in problems().values():
        solution = solve(problem)
        if isinstance(solution.value, str):
            assert judge(solution, solution.value.upper()).right
            assert not judge(solution, f"{solution.value}?").right
            continue
        assert judge(solution, f"{solution.value:.6g}").right
        assert judge(solution, f"{solution.value:.6g} {problem.unit}").right
        assert not judge(solution, f"{2 * solution.value + 1:.6g}").right
        wrong = "ms" if "bytes" in problem.unit else "GB/s" if problem.unit != "GB/s" else "ms"
        if UNITS.get(problem.unit, 1) != UNITS["GB/s"] or "/s" not in problem.unit:
            assert not judge(solution, f"{solution.value:.6g} {wrong}").right or "/s" in problem.unit


@pytest.mark.parametrize(("words", "said"), [
    (["book", "roofline.q9"], "no problem 'roofline.q9'; nearest: roofline.q"),
    (["book", "tpus.q6", "--answer", "3"], "--answer is of one problem"),
    (["book", "tpus.q6", "--set", "nothing=3"], "none of 11 problems has nothing"),
    (["book", "roofline.q2", "--set", "W_hbm"], "expected NAME=NUMBER"),
])  # fmt: skip
def test_mistakes_are_answered_in_words(capsys, words, said):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_in_python():
    (solution,) = meshwise.answer_book("gpus.k5.bound")
    assert (solution.value, judge(solution, "Node").right, judge(solution, "leaf").right) == ("node", True, False)


def test_a_formula_is_worked_out_shown_and_solved():
    formula = Formula("T = 2*B*D/C; 'slow' if T > limit else 'fast'")
    assert formula.names == ("B", "D", "C", "limit")
    assert formula.value({"B": 3, "D": 2, "C": 4, "limit": 1}) == "slow"
    assert Formula("max(B, 2)*shape[0]").substituted({"B": 3, "shape": [4, 5]}) == "max(3, 2)*[4, 5][0]"
    ((low, high),) = Formula("C/W * b/2").solutions("W", 120.0, {"C": 1.97e14, "b": 1})
    assert low == high == pytest.approx(1.97e14 / 240)


@pytest.mark.parametrize("result", [-1.0, 1e300])
def test_a_formula_without_a_solution_says_so(result):
    with pytest.raises(MeshwiseError, match="no W gives"):
        Formula("C/W").solutions("W", result, {"C": 1.0})


def test_a_formula_without_a_value_says_so():
    with pytest.raises(MeshwiseError, match="has no value with these numbers"):
        Formula("1/(a - b)").value({"a": 1, "b": 1})


def names_replaced(text):
    """A formula with its letters numbered; None where it is a product of powers only, which says little."""
    tree, numbered = ast.parse(Formula(text).put({}).replace("; ", "\n")), {}
    plain = (ast.Module, ast.Expr, ast.BinOp, ast.Mult, ast.Div, ast.Name, ast.Load, ast.Constant)
    if all(isinstance(node, plain) for node in ast.walk(tree)):
        return None
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in called:
            node.id = numbered.setdefault(node.id, f"x{len(numbered)}")
    return ast.unparse(tree)


def test_no_chapter_writes_a_rule_again():
    rules = {names_replaced(text) for rule in RULES.values() for text in (rule.formula.text, rule.put())} - {None}
    own = used = 0
    for chapter in CHAPTERS:
        methods = importlib.import_module(f"meshwise.book.{chapter.replace('-', '_')}").METHODS
        for name, method in methods.items():
            if isinstance(method, PutText):
                used += 1
            elif isinstance(method, str):
                own += 1
                assert names_replaced(method) not in rules, f"{chapter}.{name}: {method} is a rule"
    assert used > 80
    assert own > 200
