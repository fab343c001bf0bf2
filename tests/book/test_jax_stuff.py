"""Chapter "Programming TPUs in JAX": the shardings that it works out, and what they take."""

from meshwise.sharding import reshard
from tests.book.book_rows import answered, check
from tests.book.sharding_verdicts import NAMES, bytes_of, local_shape, mesh_of, sharding, verdict


def implied(row):
    """What brings partial sums over one mesh axis to the output's sharding."""
    held = [[axis for axis in axes if axis != row["unreduced"]] for axes in row["out"]]
    (step,) = reshard(sharding(held, row["unreduced"]), sharding(row["out"]))
    return NAMES[step.kind]


ANSWERS = {
    "auto.local_in": local_shape,
    "auto.local_w": local_shape,
    "auto.collective": verdict,
    "auto.ways": lambda row: sharding(row["spec"]).num_shards(mesh_of(row)),
    "auto.ar_bytes": lambda row: bytes_of(row["shape"], row["bytes"]),
    "explicit.rs": implied,
    "explicit.ar": implied,
}
LATER = {}


@answered("jax-stuff", ANSWERS, LATER)
def test_answers_of_the_book(row, answer):
    check(row, answer)
