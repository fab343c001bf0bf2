"""A question without its answer, with a hint; the catalog's constants in place of the book's."""

import json
import re
from fnmatch import fnmatchcase

import pytest

from meshwise.book import catalog_constants, judge, problems, solve
from meshwise.book.hints import thoughts
from meshwise.cli.main import main
from meshwise.costs.rules import RULES
from meshwise.hardware import load_chip

#: A problem with constants that the catalog lists otherwise.
BCRIT = "roofline.q2.Bcrit"


def test_every_problem_has_a_hint_that_is_no_answer():
    for problem in problems().values():
        solution = solve(problem)
        assert re.fullmatch(r"[A-Z].{20,}[.?]", solution.hint), problem.id
        numbers = [float(n) for n in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", solution.hint)]
        assert solution.value not in numbers, problem.id
        named = re.search(r"The rule '([^']+)'", solution.hint)
        assert (named[1] if named else None) == (solution.verb[1] if solution.verb[:1] == ("rule",) else None)
        assert named is None or named[1] in RULES


@pytest.mark.parametrize("name", [BCRIT, "sharding.q6.a_comm", "tpus.q6", "gpus"])
def test_a_question_is_shown_without_its_answer(name, capsys):
    assert main(["book", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    answers = found.get("answers", [found])
    assert main(["book", name, "--hint"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(a["id"] in shown for a in answers)
    assert main(["book", name, "--hint", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    questions = told.get("questions", [told])
    assert [q["id"] for q in questions] == [a["id"] for a in answers]
    for question in questions:
        assert question["hint"] == solve(problems()[question["id"]]).hint
        assert not {"value", "verdict", "printed", "equivalent", "explanations"} & set(question)
    if len(answers) == 1 and isinstance(answers[0]["value"], float):
        assert f"{answers[0]['value']:.6g}" not in shown


@pytest.mark.parametrize(("answer", "code", "said"), [("120", 0, "120 is right"), ("60", 3, "60 is not right")])
def test_an_answer_is_judged_beside_a_hint(answer, code, said, capsys):
    assert main(["book", BCRIT, "--hint", "--answer", answer]) == code
    shown = capsys.readouterr().out
    assert said in shown
    assert "120.122" not in shown


def test_the_constants_of_the_catalog_stand_in_place_of_the_books(capsys):
    assert main(["book", BCRIT, "--constants", "catalog", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    chip = load_chip("v5e")
    assert found["hardware"]["W_hbm"] == chip.hbm_bandwidth != problems()[BCRIT].constants["W_hbm"]
    assert found["value"] == pytest.approx(1.97e14 / chip.hbm_bandwidth / 2)
    assert (found["changed"], found["verdict"]) == (["W_hbm"], "varied")
    assert main(["book", BCRIT, "--constants", "catalog", "--set", "W_hbm=1.6e12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["W_hbm"] == 1.6e12


def test_of_a_chapter_those_that_have_constants_of_the_catalog_are_answered(capsys):
    assert main(["book", "training", "--constants", "catalog", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    listed = [p.id for p in problems().values() if p.chapter == "training" and catalog_constants(p.constants)]
    assert [a["id"] for a in answers] == listed
    assert 10 < len(listed) < 67


@pytest.mark.parametrize("name", ["sharding.q9.ratio", "sharding.q9"])
def test_a_question_without_such_constants_says_so(name, capsys):
    assert main(["book", name, "--constants", "catalog"]) == 2
    assert "the catalog lists no constant of" in capsys.readouterr().err


def test_questions_stand_in_the_books_order():
    places = [p.place for p in problems().values() if p.chapter == "gpus"]
    assert places == sorted(places)
    assert [problems()[name].heading for name in (BCRIT, "gpus.n3.time", "inference.m13.ffw")] == [
        "Question 2", "Quiz 2, question 3", "In the text",
    ]  # fmt: skip


def test_what_is_asked_for_names_the_words_of_which_one_is_the_answer():
    asked = {p.id: solve(p) for p in problems().values()}
    assert asked["sharding.agquiz.small_bound"].asks_for == "a word: latency-bound or bandwidth-bound"
    assert asked["sharding.code.localA"].asks_for == "sizes, such as 4x8"
    for solution in asked.values():
        if ": " in solution.asks_for:
            assert solution.value in solution.asks_for.partition(": ")[2].split(" or ")
        elif not isinstance(solution.value, str):
            assert solution.asks_for == f"a number of {solution.problem.unit}"


def test_every_thought_is_of_a_problem_that_has_no_earlier_one():
    found = set()
    for problem in problems().values():
        solution = solve(problem)
        rule = f"rule:{solution.verb[1]}" if solution.verb[:1] == ("rule",) else "rule:"
        found.add(next(of for name in (problem.id, rule) for of, _ in thoughts() if fnmatchcase(name, of)))
    assert found == {of for of, _ in thoughts()}


def test_a_question_stands_by_itself():
    """On its own page, and in the terminal, no other question is beside it."""
    for problem in problems().values():
        assert re.fullmatch(r"[A-Za-z0-9].{15,}[.?]", problem.question), problem.id
        assert not re.match(r"(The same|Same|That|Those|Its|And|Also|It|In days)\b", problem.question), problem.id
        assert not re.search(r"\b(that|this) (shard|array|gather|block|batch|answer|slice)\b", problem.question), (
            problem.id
        )


@pytest.mark.parametrize(
    ("name", "answer", "right"),
    [
        ("applied_inference.minslice.int8_slice", "2 x 4", True),
        ("training.q3.split", "4x1024", False),
        ("training.q3.split", "1024 × 4", True),
        ("sharding.q4.Bbase.feb25", "B<2550", True),
        ("inference.q4.kv_shard", "8 over heads,2 over batch", True),
        ("training.fsdp.dsv2_chips", "47.06 k", True),
        ("inference.q1.params", "18.4 B", True),
        ("training.mixed.fig_batch", "0.406 B", False),
        ("training.mixed.fig_batch", "0.406 M tokens", True),
        ("inference.q2.per_seq", "33.6 B", False),
    ],
)
def test_an_answer_is_judged_by_what_it_says_not_how(name, answer, right):
    assert judge(solve(problems()[name]), answer).right is right
