"""The examples of docs/sharding.md are run, and its grammar is the one in the code."""

import doctest
import re
from pathlib import Path

from meshwise.sharding import notation

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"


def test_examples_give_what_the_page_shows():
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.failed == 0
    assert result.attempted > 25


def test_the_grammar_on_the_page_is_the_one_in_the_code():
    def rules(text):
        return [
            re.sub(r"\(\*.*?\*\)", "", line).strip() for line in text.splitlines() if re.match(r"\s*\w+ +=.*;", line)
        ]

    page = PAGE.read_text(encoding="utf-8").split("The grammar:")[1].split("What is printed")[0]
    assert rules(page) == rules(notation.__doc__)
    assert len(rules(page)) == 11
