"""150 problems with a layout each, of everything at random but the same each session, and invariants over all of them.

Placing a layout's blocks takes most of its price and is kept, so that every invariant after the first is nearly free.
The slow tests draw more; others in each run with `--hypothesis-profile anew`.
"""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import assume as assume_of_hypothesis
from hypothesis import strategies as st

from tests.costs.small_problems import Case, cases

SIZE = 150

#: Gives an argument of an invariant besides its case.
Draw = Callable[[Random], Any]


@cache
def corpus() -> tuple[Case, ...]:
    found: list[Case] = []

    @settings(
        max_examples=SIZE,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return tuple(found)


class UnlikeError(Exception):
    """A case is not of the kind that an invariant is about."""


def assume(condition: object) -> None:
    """Leave out the cases where this does not hold."""
    if not condition:
        raise UnlikeError


def one_of(*values: Any) -> Draw:
    return lambda choose: choose.choice(values)


def between(least: float, most: float) -> Draw:
    """Whole if the ends are."""
    whole = isinstance(least, int)
    return lambda choose: choose.randint(int(least), int(most)) if whole else choose.uniform(least, most)


def every_case(
    *draws: Draw,
    of: Callable[[Case, Random], Case] | None = None,
    count: int = SIZE,
    anew: int = 100,
    examples: tuple[tuple[Any, ...], ...] = (),
) -> Any:
    """A test of an invariant on each case: its arguments are the case and what `draws` give.

    Args:
        draws: of further arguments.
        of: makes another case of a case.
        count: of the cases of the corpus.
        anew: cases that the slow test draws.
        examples: arguments of cases that once failed.
    """

    def decorate(invariant: Callable[..., None]) -> Callable[..., None]:
        def hold(case: Case, seed: int) -> None:
            choose = Random(seed)  # noqa: S311 - a seed, no secret
            invariant(of(case, choose) if of else case, *(draw(choose) for draw in draws))

        def hold_in_corpus() -> None:
            held = 0
            for number, case in enumerate(corpus()[:: SIZE // count]):
                try:
                    hold(case, number)
                    held += 1
                except UnlikeError:
                    continue
                except Exception as error:
                    error.add_note(f"case {number}: {case}")
                    raise
            assert held, "the invariant is about none of the cases"
            for arguments in examples:
                invariant(*arguments)

        @settings(max_examples=anew, deadline=None)
        @given(cases(), st.integers(0, 2**32))
        def hold_anew(case: Case, seed: int) -> None:
            try:
                hold(case, seed)
            except UnlikeError:
                assume_of_hypothesis(condition=False)

        @pytest.mark.parametrize("hold_all", [hold_in_corpus, pytest.param(hold_anew, marks=pytest.mark.slow)])
        def test(hold_all: Callable[[], None]) -> None:
            hold_all()

        test.__name__, test.__doc__ = invariant.__name__, invariant.__doc__
        return test

    return decorate
