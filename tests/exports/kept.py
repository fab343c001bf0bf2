"""What every text that is handed over has to be: word for word as kept, under a header that says what it is."""

import re

from tests.exports.plans import DATA


def hold_kept(done, name):
    """Compare a text with the one kept under this name."""
    kept = (DATA / f"{name}.txt").read_text(encoding="utf-8")
    assert done.text == kept, "changed: python -m tests.exports.rewrite, and read the difference"


def hold_header(done, *layouts):
    """Find the layouts, what the text was written for, and every note in it."""
    words = re.sub(r"[\s#]+", " ", done.text)
    for part in (*layouts, done.title, done.version, *done.notes):
        assert re.sub(r"\s+", " ", part) in words
