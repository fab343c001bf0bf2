"""Commands that are named beside the book's answers give the same number; answers without one say why."""

import json
import math
import shlex
from collections import Counter
from fnmatch import fnmatchcase

import pytest

from meshwise.book import UNITS, problems, solve
from meshwise.book.equivalents import REASONS, SAME
from meshwise.book.problems import COUNTED
from meshwise.cli.main import main
from tests.book.book_rows import EXACT

KINDS = {"all-gather": "AllGather", "all-reduce": "AllReduce", "reduce-scatter": "ReduceScatter"}


def answers_as_the_command_does(solution, found):
    """Rules and counts give our number in base units, the engine's words say the same."""
    problem = solution.problem
    ours = solution.value if isinstance(solution.value, str) else solution.value * UNITS.get(problem.unit, 1)
    match solution.verb:
        case ("rule", "smallest-slice", *_):
            return found["value"] == math.prod(map(int, ours.split("x")))
        case ("rule", *_):
            return found["value"] == (ours if isinstance(ours, str) else pytest.approx(ours, rel=1e-6))
        case ("model", *_):
            return found["parameters"]["by_part"][COUNTED[problem.id]] == pytest.approx(ours, rel=EXACT)
        case ("shard", *_):
            steps = [f"{KINDS[c['kind']]}_{''.join(c['mesh_axes'])}" for c in found["collectives"]]
            return steps == [step.partition("(")[0] for step in ours.split() if step != "none"]
        case ("clusters", *_):
            return _rings(found, ours, problem.values.get("n"))
    return False


def _rings(found, ours, size):
    wraps = {axis["size"]: axis["wraps"] for axis in found["cluster"]["network"]["axes"]}
    rings = [length for length, ring in wraps.items() if ring]
    whole = len(rings) == len(wraps)
    said = {"yes": wraps.get(size, whole), "no": not wraps.get(size, all(wraps.values())), "all": whole}
    return said.get(ours, all(str(ring) in ours for ring in rings) if ours != "none" else not rings)


def test_every_command_that_is_named_gives_the_same_number(capsys):
    """Each is run, in process: 376 in a second."""
    for problem in problems().values():
        solution = solve(problem)
        if solution.verb:
            assert main([*shlex.split(solution.equivalent)[1:], "--json"]) == 0, solution.equivalent
            found = json.loads(capsys.readouterr().out)
            assert answers_as_the_command_does(solution, found), solution.equivalent


def test_every_answer_names_a_command_or_says_why_not():
    found = [solve(p) for p in problems().values()]
    assert Counter(s.verb[0] for s in found if s.verb) == {"rule": 356, "clusters": 7, "shard": 7, "model": 6}
    assert all(bool(s.verb) != bool(s.reason) for s in found)
    assert {s.reason for s in found if s.reason} == set(REASONS)
    assert all(s.value != "" for s in found)


def test_every_rule_that_answers_is_of_a_problem_and_gives_its_number():
    """An entry that never applies would be one that is wrong."""
    for pattern in SAME:
        of_it = [p for p in problems().values() if fnmatchcase(p.id, pattern)]
        assert of_it, pattern
        assert all(solve(p).verb for p in of_it), pattern


def test_a_command_goes_with_other_numbers_or_is_left_out():
    """A doubled batch is in the rule's command, too; a hop that outlasts its bytes is another answer."""
    doubled = solve(problems()["inference.table_mha.tput_b8"], {"batch": "16"})
    assert ",B=16," in doubled.equivalent
    small = solve(problems()["sharding.agquiz.actual"], {"E": "2"})
    assert (small.verb, small.reason) == ((), "arithmetic")
