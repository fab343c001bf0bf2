"""How many engines of each kind serve most: a few numbers about the even ones give what all numbers give."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwise.search.serving import pairs

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
