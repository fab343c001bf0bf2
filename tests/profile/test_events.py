"""Events of an xplane decoded side by side are those that protobuf parses one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.profile.reading.events import read_events
from meshwise.profile.reading.protos import BrokenProtoError, parse

NAMES = {"run_id": 3, "hlo_op": 300, "absent": -1}
int64 = st.integers(-(2**63), 2**63 - 1)
values = st.one_of(
    st.tuples(st.just("double_value"), st.floats(allow_nan=False)),
    st.tuples(st.sampled_from(["uint64_value", "ref_value"]), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("int64_value"), int64),
    st.tuples(st.just("str_value"), st.sampled_from(["", "dot.1", "dot.2"])),
    st.tuples(st.just("bytes_value"), st.binary(max_size=200)),
)
stats = st.lists(st.tuples(st.sampled_from([3, 7, 300]), values), max_size=5)
events = st.tuples(int64, *[st.integers(-(2**60), 2**60)] * 2, stats)


def encoded(event):
    message = parse("XEvent", b"")
    message.metadata_id, message.offset_ps, message.duration_ps, found = event
    for key, (name, value) in found:
        stat = message.stats.add(metadata_id=key)
        setattr(stat, name, value)
    return message.SerializeToString()


def line(*events, base=0):
    found = parse("XLine", b"")
    found.timestamp_ns = base
    found.events.extend(events)
    return found


def signed(value):
    return value - (1 << 64 if value >= 1 << 63 else 0)


@given(st.lists(events, max_size=6))
@settings(max_examples=150, deadline=None)
def test_columns_are_what_protobuf_parses(given_events):
    found = read_events(line(*map(encoded, given_events), base=5), NAMES)
    assert found.metadata.tolist() == [e[0] for e in given_events]
    assert found.start.tolist() == [5000 + e[1] for e in given_events]
    assert found.duration.tolist() == [e[2] for e in given_events]
    for name, number in NAMES.items():
        own = [dict(e[3]).get(number) for e in given_events]  # of one that stands twice the last
        assert found.has(name).tolist() == [value is not None for value in own]
        numbers, are = found.numbers(name)
        whole = [value is not None and value[0] in ("uint64_value", "int64_value") for value in own]
        assert are.tolist() == whole
        assert numbers[are].tolist() == [signed(v[1]) for v, is_whole in zip(own, whole, strict=True) if is_whole]


@given(st.lists(st.tuples(int64, int64, st.sampled_from(["int64_value", "ref_value"])), max_size=30))
@settings(max_examples=100, deadline=None)
def test_events_that_agree_are_alike(given_events):
    rows = [(metadata, 0, 0, [(300, (kind, abs(number) if kind == "ref_value" else number))])
            for metadata, number, kind in given_events]  # fmt: skip
    found = read_events(line(*map(encoded, rows)), NAMES)
    first, which = found.distinct(np.arange(len(rows)), "hlo_op", "absent")
    keys = [repr(row) for row in rows]
    assert first == [n for n, key in enumerate(keys) if keys.index(key) == n]
    assert [keys[first[number]] for number in which] == keys


def test_fields_that_are_not_known_are_skipped():
    own = encoded((7, 8, 9, [(3, ("int64_value", 4))]))
    unknown = b"\xa1\x06" + b"\xff" * 8 + b"\xa5\x06" + b"\xff" * 4 + b"\xaa\x06\x02\xff\xff" + b"\xa0\x06\x05"
    found = read_events(line(unknown + own, own + unknown), NAMES)
    assert (found.metadata.tolist(), found.duration.tolist()) == ([7, 7], [9, 9])
    assert found.numbers("run_id")[0].tolist() == [4, 4]


@pytest.mark.parametrize(
    "event",
    [
        b"\x08",  # no value
        b"\x08" + b"\xff" * 12,  # a number without end
        b"\x22\x05\x08\x01",  # a statistic longer than its event
        b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length below zero
        b"\x22\x02\x2a\x09",  # text longer than its statistic
        b"\x0b\x01",  # no wire type
        b"\x09\x01\x02",  # eight bytes, of which two are there
        b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # 292 years
    ],
)
def test_damaged_events_are_refused(event):
    whole = encoded((1, 2, 3, []))
    with pytest.raises(BrokenProtoError):
        read_events(line(whole, event, whole), NAMES)
