"""Faults put into traces as they were read, whatever tool wrote them: a gap, a slow collective, a slow device."""

from collections import Counter, defaultdict
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from meshwise.profile.partition import busy_times
from meshwise.profile.ranks import Lane, _collectives, _matched
from meshwise.profile.steps import Steps, find_steps
from meshwise.profile.trace import Activity, Array

MS = 10**9  # picoseconds


def lanes_of(traces):
    """(trace's place, device's place, lane) of every device with steps."""
    return [
        (owner, place, Lane(device, trace.ops, find_steps(trace, place)))
        for owner, trace in enumerate(traces)
        for place, device in enumerate(trace.devices)
    ]


def changed(traces, change):
    """Traces whose streams are `change(owner, place, stream)`, device markers moved like their streams."""
    return [
        replace(trace, devices=tuple(
            replace(device, streams=tuple(change(owner, place, s) for s in device.streams))
            for place, device in enumerate(trace.devices)
        ))
        for owner, trace in enumerate(traces)
    ]  # fmt: skip


def later(stream, cuts, lengths, longer=()):
    """A stream in which time stops at each cut; operations in `longer` that run at a cut take longer, too."""
    before = np.concatenate(([0], np.cumsum(lengths)))
    start = stream.start + before[np.searchsorted(cuts, stream.start, side="right")]
    grown = (
        before[np.searchsorted(cuts, stream.end, side="right")]
        - before[np.searchsorted(cuts, stream.start, side="right")]
    )
    holds = np.isin(stream.op, list(longer)) | np.array(stream.nested)
    return replace(stream, start=start, duration=stream.duration + np.where(holds, grown, 0))


def moved_markers(traces, cuts):
    """Markers on devices, and the host's time, moved as the devices' own streams were."""

    def moved(owner, marker):
        found = cuts.get((owner, marker.device))
        if found is None:
            return marker
        at, lengths = found
        before = np.concatenate(([0], np.cumsum(lengths)))
        begin, end = (int(t + before[np.searchsorted(at, t, side="right")]) for t in (marker.start, marker.end))
        return replace(marker, start=begin, duration=end - begin)

    return [replace(t, markers=tuple(moved(owner, m) for m in t.markers)) for owner, t in enumerate(traces)]


def stopped(traces, cuts, longer=None):
    """Time stops on devices: (owner, place) -> (cuts, lengths)."""
    longer = longer or {}

    def change(owner, place, stream):
        if (owner, place) not in cuts:
            return stream
        return later(stream, *cuts[owner, place], longer.get(owner, ()))

    return moved_markers(changed(traces, change), cuts)


def all_steps(trace, place):
    """Steps of a device, those that are not steady, too."""
    with patch("meshwise.profile.steps._steady", lambda _device, steps, _factor: steps):
        return find_steps(trace, place)


def with_gap(traces, seconds, into=0.5, once=False):
    """In each step of each trace, or once, nothing runs for a while after a share of it: the host is late, too.

    Before the same operation of each step, if nothing is open before it in all of them.
    """
    found = []
    for trace in traces:
        place = max(range(len(trace.devices)), key=lambda n: len(find_steps(trace, n)))
        steps = all_steps(trace, place)
        start, end, op = (
            np.concatenate([getattr(s, name) for d in trace.devices for s in d.streams])
            for name in ("start", "end", "op")
        )
        op, start, end = op[np.argsort(start, kind="stable")], np.sort(start), np.sort(end)
        # Where nothing is open: as many have ended as have begun.
        free = np.searchsorted(end, start, side="right") == np.searchsorted(start, start, side="left")
        runs = [_free(op, free, *np.searchsorted(start, bounds)) for bounds in zip(steps.start, steps.end, strict=True)]
        common = set.intersection(*map(set, runs))
        cuts = []
        for own in runs:
            first = runs[0] if common else own
            wanted = into * max(at for at, _ in first.values())
            _, chosen = min((abs(first[run][0] - wanted), run) for run in common or own)
            cuts.append(int(start[own[chosen][1]]))
        cuts = (cuts[-2:-1] or cuts) if once else cuts  # the last may lack its end
        found.append(_host_stopped(trace, np.array(cuts), round(seconds * 1e12)))
        cut = np.array(cuts), np.full(len(cuts), round(seconds * 1e12))
        (found[-1],) = stopped([found[-1]], {(0, place): cut for place in range(-1, len(trace.devices))})
    return found


def _free(op, free, first, last):
    """(operation, which run of it in the step) -> (place in the step, in all), where nothing is open before it."""
    seen, found = Counter(), {}
    for place in range(first, last):
        if free[place] and place > first:
            found[int(op[place]), seen[int(op[place])]] = place - first, place
        seen[int(op[place])] += 1
    return found


def _host_stopped(trace, cuts, length):
    """Threads of the host and launches, later by a length after each cut."""

    def late(times):
        return np.where(times < 0, times, times + length * np.searchsorted(cuts, times, side="right"))

    devices = tuple(
        replace(d, streams=tuple(replace(s, launch=late(s.launch)) for s in d.streams)) for d in trace.devices
    )
    host = tuple(
        replace(t, start=late(t.start), duration=late(t.start + t.duration) - late(t.start)) for t in trace.host
    )
    return replace(trace, devices=devices, host=host)


def with_longer_collective(traces, seconds, only=None):
    """One collective of each step, or of one, takes longer on every device, and all that follows is later.

    Of those that most devices run in most steps it is the longest.
    """
    steady, alike = lanes_of(traces), {}
    lanes = [(n, place, replace(one, steps=all_steps(traces[n], place))) for n, place, one in steady]
    runs = [_collectives(number, lane, alike) for number, (_, _, lane) in enumerate(lanes)]
    times = defaultdict(list)
    for found in runs:
        for (_, *run), (_, _, length) in found:
            times[tuple(run)].append(length)
    chosen = max(times, key=lambda run: (len(times[run]), sum(times[run]), run[::-1]))
    cuts, longer = {}, {}
    for (owner, place, lane), found in zip(steady, runs, strict=True):
        own = [(start, start + length - 1) for (_, *run), (_, start, length) in found if tuple(run) == chosen]
        at = lane.steps.at(np.array([start for start, _ in own], dtype=np.int64)).tolist()
        ends = sorted(end for step, (_, end) in zip(at, own, strict=True) if only is None or step == only)
        cuts[owner, place] = np.array(ends, dtype=np.int64), np.full(len(ends), round(seconds * 1e12))
        sent = (n for n, op in enumerate(lane.ops) if op.activity == Activity.COLLECTIVE)
        longer.setdefault(owner, set()).update(
            n for n in sent if _matched(lane.ops[n], lane.device.rank, alike) == chosen[0]
        )
    return stopped(traces, cuts, longer)


def _whole(lane):
    """A device with all that ran on it as one step."""
    start = np.array([min(int(s.start.min()) for s in lane.device.streams)])
    end = np.array([max(int(s.end.max()) for s in lane.device.streams)])
    return Lane(lane.device, lane.ops, Steps(start, end, ("0",), "all"))


def with_slow_device(traces, slow, factor):
    """Operations of one device take longer, and others wait for it in the collectives that they share."""
    lanes = [(owner, place, _whole(lane)) for owner, place, lane in lanes_of(traces)]
    owner, place, lane = lanes[slow]
    compute = busy_times(lane.device, lane.ops).compute

    def stretched(times):
        return times + np.rint((factor - 1) * compute.before(times)).astype(np.int64)

    alike = {}
    own = dict(_collectives(slow, lane, alike))
    cuts, longer = {}, {}
    for number, (other, at, one) in enumerate(lanes):
        if number == slow:
            continue
        shared = sorted(
            (start + length - 1, key) for key, (_, start, length) in _collectives(number, one, alike) if key in own
        )
        ends = np.array([own[key][1] + own[key][2] for _, key in shared], dtype=np.int64)
        late = np.maximum.accumulate(stretched(ends) - ends) if len(ends) else ends
        cuts[other, at] = np.array([end for end, _ in shared], dtype=np.int64), np.diff(late, prepend=0)
        longer.setdefault(other, set()).update(n for n, op in enumerate(one.ops) if op.activity == Activity.COLLECTIVE)
    found = stopped(traces, cuts, longer)

    def change(trace, device, stream):
        if (trace, device) != (owner, place):
            return stream
        start, end = stretched(stream.start), stretched(stream.end)
        return replace(stream, start=start, duration=end - start)

    found = changed(found, change)

    def moved(marker):
        begin, end = stretched(np.array([marker.start, marker.end])).tolist()
        return replace(marker, start=begin, duration=end - begin)

    markers = tuple(moved(m) if m.device == place else m for m in found[owner].markers)
    found[owner] = replace(found[owner], markers=markers)
    return found


def with_late_device(traces, late, seconds):
    """Once one device does nothing for a while, and the others wait for it in the next collective that they share."""
    lanes, alike = lanes_of(traces), {}
    runs = [dict(_collectives(number, lane, alike)) for number, (_, _, lane) in enumerate(lanes)]
    shared = sorted((run[1], key) for key, run in runs[late].items() if all(key in found for found in runs))
    _, key = shared[len(shared) // 2]
    cuts, longer = {}, {}
    for number, (owner, place, lane) in enumerate(lanes):
        _, start, length = runs[number][key]
        at = start if number == late else start + length - 1
        cuts[owner, place] = np.array([at]), np.array([round(seconds * 1e12)])
        longer.setdefault(owner, set()).update(n for n, op in enumerate(lane.ops) if op.activity == Activity.COLLECTIVE)
    return stopped(traces, cuts, longer)


def with_slow_clock(traces, slow, factor):
    """All that one trace recorded takes longer: operations, collectives, the host."""

    def stretched(times):
        return np.rint(np.asarray(times) * factor).astype(np.int64)

    def slowed(item):
        start = stretched(item.start)
        return replace(item, start=start, duration=stretched(item.start + item.duration) - start)

    trace = traces[slow]
    devices = tuple(
        replace(d, streams=tuple(
            replace(slowed(s), launch=np.where(s.launch < 0, s.launch, stretched(s.launch))) for s in d.streams
        ))
        for d in trace.devices
    )  # fmt: skip
    markers, host = (tuple(map(slowed, items)) for items in (trace.markers, trace.host))
    found = replace(trace, devices=devices, markers=markers, host=host)
    return [found if number == slow else other for number, other in enumerate(traces)]


def with_attention_not_fused(traces, seconds):
    """Each fused attention becomes a product that writes scores, and all of a step take longer by so much."""
    cuts, longer, every = {}, {}, []
    for owner, trace in enumerate(traces):
        names = {n for n, op in enumerate(trace.ops) if op.category == "attention"}
        scores = {"results": (Array((4, 16, 2048, 2048), "bf16"),), "matmul": (64, 2048, 64, 2048)}
        longer[owner] = names
        every.append(replace(trace, ops=tuple(
            replace(op, category="matmul", scope="attention", **scores) if n in names else op
            for n, op in enumerate(trace.ops)
        )))  # fmt: skip
    for owner, place, lane in lanes_of(traces):
        ends = [e - 1 for s in lane.device.streams for e in s.end[np.isin(s.op, list(longer[owner]))]]
        ends = np.sort(np.array(ends, dtype=np.int64))
        inside = sum(((lane.steps.start[0] <= ends) & (ends < lane.steps.end[-1])).tolist())
        cuts[owner, place] = ends, np.full(len(ends), round(seconds * 1e12 * len(lane.steps) / inside))
    return stopped(every, cuts, longer)
