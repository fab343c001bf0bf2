"""A test of many cases goes through all of them and names those that fail."""

import pytest

from tests.each import each


def test_all_cases_are_tried_and_those_that_fail_are_named():
    tried = []

    @each("number, word", [(1, "a"), (2, "b"), (3, "c")])
    def odd(number, word):
        tried.append(word)
        assert number % 2, word

    with pytest.raises(ExceptionGroup, match="1 of 3 cases fail") as failed:
        odd()
    assert tried == ["a", "b", "c"]
    (error,) = failed.value.exceptions
    assert error.__notes__ == ["for {'number': 2, 'word': 'b'}"]
    with pytest.raises(AssertionError, match="no case"):
        each("number", [])
    with pytest.raises(AssertionError, match="does not take"):
        each("letter", [1])(lambda number: number)
