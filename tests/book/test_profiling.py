"""Chapter "How to Profile TPU Programs": the little that is counted rather than measured."""

from tests.book.book_rows import answered, check
from tests.book.sharding_verdicts import bytes_of

ANSWERS = {"hlo.fusion3_bytes": lambda row: bytes_of(row["shape"], row["bytes"])}
LATER = {
    "tile.*": "padding of an array's layout in memory is read from compiled programs",
    "q1.*": "replica groups are read from compiled programs",
    "q2.speedup": "measured times are compared by the profiler",
}


@answered("profiling", ANSWERS, LATER)
def test_answers_of_the_book(row, answer):
    check(row, answer)
