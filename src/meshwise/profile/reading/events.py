"""The events of one line of an xplane as columns: their bytes are decoded side by side, not event by event.

Not here: what events mean (`xplane_ops`), planes and lines (`wire`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwise.profile.reading.protos import BrokenProtoError, Message, parse
from meshwise.profile.trace import Times

_Rows = npt.NDArray[np.intp]

#: What the value of a statistic is: missing, a whole number, the number of a name, of a text, or none of these.
_NONE, _NUMBER, _NAME, _TEXT, _OTHER = range(5)
#: Tags (field << 3 | wire type) of an event's metadata, offset, duration and statistics; then of a statistic's fields.
_NUMBERS, _STATISTIC = (0x08, 0x10, 0x18), 0x22
_KEY, _KINDS, _TEXTS = 0x08, {0x18: _NUMBER, 0x20: _NUMBER, 0x38: _NAME}, 0x2A
#: Wire types: bytes with their length, eight bytes and four; and which of the eight types there are.
_WITH_LENGTH, _FIXED, _IS_TYPE = 2, {1: 8, 5: 4}, np.array([1, 1, 1, 0, 0, 1, 0, 0], dtype=bool)

#: Events that are decoded at once: enough to be quick, few enough for a core's caches.
_AT_ONCE = 1 << 15
#: Zeros behind the last byte, so that a word can be read from each; a size beyond all files.
_PADDING, _ENDLESS = bytes(24), 1 << 60
_ONE, _LOW_BITS, _TOP_BITS = np.uint64(1), np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
#: Groups of 7, 14 and 28 bits move together: which stay, and by how many bits the others go down.
_SQUEEZED = tuple(
    (np.uint64(stay), np.uint64(bits))
    for stay, bits in ((0x007F007F007F007F, 1), (0x00003FFF00003FFF, 2), (0x000000000FFFFFFF, 4))
)


@dataclass(frozen=True)
class Events:
    """Events of a line, in its order.

    Args:
        encoded: each as it stands in the file.
        metadata: the number of what each is.
        start, duration: picoseconds.
        stats: values of statistics by name, and what each value is.
    """

    encoded: Sequence[bytes]
    metadata: Times
    start: Times
    duration: Times
    stats: Mapping[str, tuple[Times, Times]]

    def parsed(self, place: int) -> Message:
        """One event with all its statistics."""
        return parse("XEvent", self.encoded[place])

    def has(self, name: str) -> npt.NDArray[np.bool_]:
        """Which events have a statistic."""
        found: npt.NDArray[np.bool_] = self.stats[name][1] != _NONE
        return found

    def numbers(self, name: str) -> tuple[Times, npt.NDArray[np.bool_]]:
        """Values of a statistic, and of which events it is a whole number."""
        values, kinds = self.stats[name]
        return values, kinds == _NUMBER

    def distinct(self, rows: _Rows, *names: str) -> tuple[list[int], _Rows]:
        """Of some events the first of all that agree in metadata and statistics, and which of these each is like."""
        code = np.zeros(len(rows), dtype=np.int64)
        for column in (self.metadata, *(c for name in names for c in self.stats[name])) if len(rows) else ():
            own = column[rows]
            least, span = int(own.min()), int(own.max()) - int(own.min()) + 1
            if (int(code.max()) + 1) * span >= 1 << 62:
                own, code = (np.unique(c, return_inverse=True)[1] for c in (own, code))
                least, span = 0, int(own.max()) + 1
            code = code * span + (own - least)
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        order = np.argsort(first)
        return rows[first[order]].tolist(), np.argsort(order)[which]


def read_events(line: Message, wanted: Mapping[str, int]) -> Events:
    """Decode the events of a line, and the statistics with the wanted names and numbers.

    Raises:
        BrokenProtoError: they are damaged.
    """
    encoded, texts = list(line.events), dict[bytes, int]()
    parts = [
        _decoded(encoded[at : at + _AT_ONCE], tuple(wanted.values()), texts)
        for at in range(0, max(len(encoded), 1), _AT_ONCE)
    ]
    metadata, offset, duration, *stats = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    base = line.timestamp_ns * 1000
    if abs(base) + max(int(np.abs(t).max(initial=0)) for t in (offset, duration)) >= 1 << 62:
        raise BrokenProtoError("a time beyond all clocks")
    by_name = dict(zip(wanted, zip(stats[::2], stats[1::2], strict=True), strict=True))
    return Events(encoded, metadata, base + offset, duration, by_name)


def _decoded(encoded: Sequence[bytes], wanted: Sequence[int], texts: dict[bytes, int]) -> list[Times]:
    """Metadata, offset and duration of some events; of each wanted statistic the values, and what they are."""
    data = b"".join(encoded) + _PADDING
    ends = np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))
    starts = np.concatenate((np.zeros(1, dtype=np.int64), ends))[:-1]
    columns = [np.zeros(len(encoded), dtype=np.int64) for _ in (*_NUMBERS, *wanted, *wanted)]
    held = [(starts[:0],) * 3]
    for rows, tag, value, start in _fields(data, starts, ends):
        for column, own in zip(columns, _NUMBERS, strict=False):
            column[rows[tag == own]] = value[tag == own]
        at = tag == _STATISTIC
        held.append((rows[at], start[at], start[at] + value[at]))
    event, starts, ends = (np.concatenate(part) for part in zip(*held, strict=True))
    key, values, kinds = np.zeros((3, len(event)), dtype=np.int64)
    kinds[:] = _OTHER
    for rows, tag, value, start in _fields(data, starts, ends):
        key[rows[tag == _KEY]] = value[tag == _KEY]
        for own, kind in _KINDS.items():
            values[rows[tag == own]], kinds[rows[tag == own]] = value[tag == own], kind
        at = tag == _TEXTS
        kinds[rows[at]] = _TEXT
        for row, begin, size in zip(*(c[at].tolist() for c in (rows, start, value)), strict=True):
            values[row] = texts.setdefault(data[begin : begin + size], len(texts))
    for number, statistic in enumerate(wanted):
        at = np.flatnonzero(key == statistic)
        for column, found in zip(columns[3 + 2 * number :], (values, kinds), strict=False):
            column[event[at]] = found[at]  # if it stands twice, the last
    return columns


def _fields(data: bytes, at: Times, ends: Times) -> Iterator[tuple[_Rows, Times, Times, Times]]:
    """All first fields of some messages, all second ones, ...: whose they are, tag, value, and where the value ends.

    The value of bytes is their length, and they follow.

    Raises:
        BrokenProtoError: a field is none, or goes beyond its message.
    """
    words = np.ndarray(len(data) - 7, dtype="<u8", buffer=data, strides=(1,))
    rows = np.arange(len(at))
    while True:
        more = at < ends
        if not more.all():
            rows, at, ends = rows[more], at[more], ends[more]
        if not len(rows):
            return
        tag, begin = _varints(words, at)
        if (begin > ends).any():
            raise BrokenProtoError("a field goes beyond its event")
        value, start = _varints(words, begin)
        wire = tag & 7
        at = start + np.where(wire == _WITH_LENGTH, value, 0)
        for fixed, size in _FIXED.items():
            at = np.where(wire == fixed, begin + size, at)
        if (at > ends).any() or (at < begin).any() or not _IS_TYPE[wire].all():
            raise BrokenProtoError("a field goes beyond its event")
        yield rows, tag, value, start


def _varints(words: npt.NDArray[np.uint64], at: Times) -> tuple[Times, Times]:
    """The whole numbers that begin at some bytes, seven bits in each, and where they end."""
    word = words[at]
    last = ~word & _TOP_BITS
    last &= ~last + _ONE  # the top bit of the first byte that no other follows
    used = last | (last - _ONE)
    size = (((used & _LOW_BITS) * _LOW_BITS) >> np.uint64(56)).astype(np.int64)
    word &= used & ~_TOP_BITS
    for stay, bits in _SQUEEZED:
        word = (word & stay) | ((word & ~stay) >> bits)
    rest = np.flatnonzero(last == 0)
    for place in (8, 9) if len(rest) else ():
        byte = words[at[rest] + place] & np.uint64(0xFF)
        word[rest] |= (byte & np.uint64(0x7F)) << np.uint64(7 * place)
        size[rest] += 1
        rest = rest[byte > 0x7F]
    size[rest] = _ENDLESS
    return word.view(np.int64), at + size
