"""Every verb answers what it answered: about 1,000 commands, numbers equal to 1e-9, searches with the same winners.

A change that is meant to change answers writes them anew with `python -m tests.answers.answers`, says so in the
changelog, and shows the difference in review.
"""

import pytest

from tests.answers.answers import answer, differences, kept
from tests.answers.golden_cases import GROUPS

#: One command in so many is asked in the default run: searches and simulations take longest.
ONE_IN = {
    "training": 24,
    "serving": 8,
    "searches": 13,
    "serving_searches": 7,
    "simulations": 7,
    "small": 4,
    "refusals": 2,
}


def hold(group, commands):
    was = kept(group)
    wrong = {words: found for words in commands if (found := list(differences(was[words], answer(words))))}
    shown = "\n".join(f"{words}\n    " + "\n    ".join(found[:8]) for words, found in list(wrong.items())[:20])
    assert not wrong, f"{len(wrong)} of {len(commands)} answers changed:\n{shown}"


@pytest.mark.parametrize("group", GROUPS)
def test_the_kept_commands_are_those_of_the_cases(group):
    assert list(kept(group)) == list(dict.fromkeys(GROUPS[group]()))


@pytest.mark.parametrize("group", GROUPS)
def test_quick_answers_are_as_kept(group):
    hold(group, list(kept(group))[:: ONE_IN[group]])


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_all_other_answers_are_as_kept(group):
    """Slow because it asks about 1,000 commands, some of them searches: those that the default run does not ask."""
    commands = list(kept(group))
    del commands[:: ONE_IN[group]]
    hold(group, commands)
