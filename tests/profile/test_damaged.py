"""Damaged traces are read or refused in words, whatever byte or number is wrong."""

import gzip
import random
import re
from contextlib import suppress
from pathlib import Path

import pytest

from meshwise.core.errors import MeshwiseError
from meshwise.profile import profile_traces, read_traces
from meshwise.profile.causes import find_causes
from tests.profile.traces import SGLANG, TE, TRACES, load, save

FILES = {"a.xplane.pb": TE, "b.json": SGLANG, "c.json": str(TRACES / "gloo_cpu_only.json.gz")}
NUMBERS = [b"null", b"-1", b"1e308", b'"x"', b"[]", b"{}", b"99999999999999999999", b"true", b"0"]


def damaged(data, chance):
    """Cut off, with bytes changed, or with other values for numbers."""
    if chance.random() < 0.2:
        return data[: chance.randrange(len(data))]
    data = bytearray(data)
    for _ in range(chance.choice([1, 2, 8])):
        at = chance.randrange(len(data))
        number = re.search(rb"(?<=[:\[,])-?\d[\d.]*", bytes(data[at : at + 300]))
        if number and data[:1] == b"{":
            data[at + number.start() : at + number.end()] = chance.choice(NUMBERS)
        else:
            data[at] = chance.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_damage_is_no_bug(tmp_path, name):
    whole = gzip.decompress(Path(FILES[name]).read_bytes())
    chance, path, refused = random.Random(name), tmp_path / name, 0  # noqa: S311
    for _ in range(25):
        path.write_bytes(damaged(whole, chance))
        refused += 1
        with suppress(MeshwiseError):
            find_causes(profile_traces(read_traces([str(path)])))
            refused -= 1
    assert refused > 2


def test_a_single_event_of_another_time_does_not_hide_the_others(tmp_path):
    document = load(SGLANG)
    document["traceEvents"].append({"ph": "X", "cat": "cpu_op", "name": "late", "pid": 1, "tid": 1, "ts": 1, "dur": 2})
    found = read_traces([save(document, tmp_path / "far.json.gz")])
    assert found[0].num_events == read_traces([SGLANG])[0].num_events
