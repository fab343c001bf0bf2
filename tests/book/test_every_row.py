"""No row of the book is ignored: each chapter has a test file, and together they answer or put off every row."""

import importlib.util
from collections import Counter
from pathlib import Path

from tests.book.book_rows import answered_rows, rows

#: Rows that are answered, of all rows; raise when a later verb answers more.
ANSWERED, ALL = 314, 355


def tables():
    """Chapter -> its test module."""
    found = {}
    for chapter in {row.chapter for row in rows()}:
        path = Path(__file__).with_name(f"test_{chapter.replace('-', '_')}.py")
        spec = importlib.util.spec_from_file_location(f"book_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[chapter] = module
    return found


def test_every_row_is_answered_or_put_off_with_a_reason():
    modules = tables()  # each refuses to load when a row of its chapter is in neither table, or in both
    count = Counter()
    for chapter, module in modules.items():
        cases = answered_rows(chapter, module.ANSWERS, module.LATER)
        of_chapter = [row for row in rows() if row.chapter == chapter]
        count["answered"] += len(cases)
        count["all"] += len(of_chapter)
        assert all(module.LATER.values())
        assert len({row.id for row, _ in cases}) == len(cases)
    assert (count["answered"], count["all"]) == (ANSWERED, ALL)


def test_ids_are_unique():
    ids = [row.id for row in rows()]
    assert len(set(ids)) == len(ids)
