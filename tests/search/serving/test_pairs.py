"""How many engines of each kind serve most: a few numbers about the even ones suffice. Rows that no other beats."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.search.serving import pairs
from meshwise.search.serving.pairs import undominated

_RATE = st.one_of(st.integers(1, 5).map(float), st.floats(1e-3, 1e3))


@given(st.integers(2, 400), st.data())
def test_engines_about_even_hold_the_best_of_all_numbers(chips, data):
    size = st.integers(1, chips - 1).map(float)
    prefill = data.draw(size), data.draw(_RATE)
    others = data.draw(st.lists(st.tuples(size, _RATE), min_size=1, max_size=5))
    decode = tuple(np.array(column) for column in zip(*others, strict=True))
    every = np.arange(1, (chips - 1) // prefill[0] + 1)[:, None] * np.ones(len(others))
    n, m = pairs._best_of(chips, prefill, decode, every, None)
    found = pairs._ratios(chips, prefill, decode, None)
    there = m >= 1
    assert ((found[1] >= 1) == there).all()
    assert (found[0][there] == n[there]).all()
    assert (found[1][there] == m[there]).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [(3,), (2, 5), (40, 30)])  # the last are too many to go through one by one
def test_of_many_rows_those_are_kept_that_no_other_beats(seed, steps):
    random = np.random.default_rng(seed)
    first, second = random.integers(0, 400, size=(2, 600)).astype(float)  # with ties
    second[random.integers(0, 600, size=20)] = np.inf
    columns = [first, second, *(random.integers(0, n, size=600).astype(float) for n in steps)]
    columns = [np.concatenate([column, column[:100]]) for column in columns]  # whole rows that are equal
    rows = list(zip(*columns, strict=True))
    expected = [
        i
        for i, row in enumerate(rows)
        if not any(all(a <= b for a, b in zip(other, row, strict=True)) and (other < row or (other == row and j < i))
                   for j, other in enumerate(rows))
    ]  # fmt: skip
    assert undominated(*columns).tolist() == sorted(expected, key=lambda i: (rows[i], i))
