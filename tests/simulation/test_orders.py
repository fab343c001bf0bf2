"""The closed forms of every pipeline schedule against a simulation of its work, event by event."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.core.errors import LayoutError, UnknownNameError
from meshwise.costs.makespans import PipelineShape, PipelineTimes, StageTimes
from meshwise.costs.schedules import SCHEDULES, find_schedule
from meshwise.simulation.orders import Task, run_schedule, work_orders

ONE = StageTimes(1.0, 1.0, 1.0)
FOLDED = ("zb-v", "dualpipe", "dualpipe-v")
LINE = ("gpipe", "1f1b", "interleaved", "zb-h1")


def chunk_times(times, chunks):
    """Chunk -> its times; a lone chunk is both ends."""
    return lambda c: times.last if c == chunks - 1 else times.first if c == 0 else times.middle


def simulate(case, times, **more):
    name, shape = case
    return run_schedule(name, shape, chunk_times(times, find_schedule(name).num_chunks(shape)), **more)


def closed(case, times):
    name, shape = case
    return find_schedule(name).makespan(shape, times)


@cache
def shapes(name, stages=range(1, 7)):
    """Every small shape that the schedule can run."""
    return tuple(_shapes(name, stages))


def _shapes(name, stages):
    for p, v in itertools.product(stages, (1, 2, 3, 4)):
        for M in sorted({1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 4 * p + 2}):
            shape = PipelineShape(p, M, v)
            if M >= 1 and find_schedule(name).why_not(shape) is None:
                yield shape


@st.composite
def cases_of(draw, names):
    name = draw(st.sampled_from(names))
    return name, draw(st.sampled_from(shapes(name)))


seconds = st.floats(0.5, 10.0)
chunk = st.builds(StageTimes, seconds, seconds, seconds)
three = st.builds(PipelineTimes, chunk, chunk, chunk)


def exactly(value):
    return pytest.approx(value, rel=1e-12, abs=0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_order_does_every_task_once(name):
    cases = list(shapes(name))
    assert len(cases) >= 9
    for shape in cases:
        chunks = find_schedule(name).num_chunks(shape)
        done = [w for order in work_orders(name, shape) for run in order for w in run]
        assert len(set(done)) == len(done)
        everything = set(itertools.product(range(shape.num_microbatches), range(chunks)))
        forward, whole, apart, weights = ({(w.microbatch, w.chunk) for w in done if w.task is t} for t in Task)
        assert forward == everything
        assert apart == weights
        assert not whole & apart
        assert whole | apart == everything
        assert bool(apart) <= find_schedule(name).splits_backward
        pairs = [run for order in work_orders(name, shape) for run in order if len(run) == 2]
        assert bool(pairs) <= find_schedule(name).overlaps
        assert all((a.task, b.task) == (Task.FORWARD, Task.BACKWARD) for a, b in pairs)


@given(cases_of(list(SCHEDULES)), chunk)
@settings(max_examples=120, deadline=None)
def test_of_equal_stages_the_closed_form_is_exact(case, t):
    times = PipelineTimes(t, t, t)
    assert closed(case, times) == exactly(simulate(case, times).makespan)


@given(cases_of(["dualpipe", "dualpipe-v"]), chunk, st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_what_overlaps_is_saved_on_the_longest_path(case, t, share):
    saved = share * min(t.forward, t.backward + t.weights)
    t = StageTimes(t.forward, t.backward, t.weights, saved)
    times = PipelineTimes(t, t, t)
    assert closed(case, times) == exactly(simulate(case, times).makespan)


@given(cases_of(["gpipe", "1f1b", "interleaved"]), chunk, chunk, chunk)
@settings(max_examples=120, deadline=None)
def test_a_last_stage_that_takes_longest_is_exact(case, first, middle, more):
    last = first.longest(middle)
    last = StageTimes(last.forward + more.forward, last.backward + more.backward, last.weights + more.weights)
    times = PipelineTimes(first, middle, last)
    assert closed(case, times) == exactly(simulate(case, times).makespan)


@given(cases_of(["zb-h1"]), chunk, chunk, chunk)
@settings(max_examples=120, deadline=None)
def test_zb_h1_is_exact_where_the_ends_have_the_middle_and_more(case, middle, embedding, head):
    def more(t, by, share):
        return StageTimes(
            t.forward + share * by.forward, t.backward + share * by.backward, t.weights + share * by.weights
        )

    first = more(middle, embedding, 0.1)
    last = more(first, head, 0.5)
    times = PipelineTimes(first, middle, last)
    assert closed(case, times) == exactly(simulate(case, times).makespan)


@given(cases_of(["gpipe", "1f1b", "interleaved"]), three)
@settings(max_examples=120, deadline=None)
def test_any_stages_take_no_longer_than_the_closed_form(case, times):
    simulated = simulate(case, times).makespan
    bound = closed(case, times)
    assert simulated <= bound * (1 + 1e-12)
    assert bound <= simulated * (1 + 1e-12) + case[1].num_microbatches * _spread(case, times)


@given(cases_of([*FOLDED, "zb-h1"]), three)
@settings(max_examples=120, deadline=None)
def test_chunks_that_differ_are_off_by_their_differences_for_a_fill_and_a_drain(case, times):
    """However many microbatches there are. The longest passes everywhere bound it from above, all work from below."""
    name, shape = case
    timeline = simulate(case, times)
    simulated, found = timeline.makespan, closed(case, times)
    assert found >= max(busy(timeline, d) for d in range(shape.stages)) * (1 - 1e-12)
    top = times.slowest
    assert simulated <= closed(case, PipelineTimes(top, top, top)) * (1 + 1e-12)
    if name != "zb-h1":
        assert abs(found - simulated) <= 6 * shape.stages * _spread(case, times) + 1e-12 * found


def busy(timeline, device):
    """Seconds that a device works."""
    return sum(e.end - e.start for e in timeline.events if e.device == device)


def _spread(case, times):
    """How much the chunks differ, over their passes."""
    name, shape = case
    used = [times.first, times.last] + [times.middle] * (find_schedule(name).num_chunks(shape) > 2)
    passes = ("forward", "backward", "weights")
    return sum(max(getattr(t, n) for t in used) - min(getattr(t, n) for t in used) for n in passes)


@given(cases_of(list(SCHEDULES)), three)
@settings(max_examples=200, deadline=None)
def test_the_work_is_that_of_the_busiest_device(case, times):
    name, shape = case
    if shape.stages == 1:
        times = PipelineTimes(times.last, times.last, times.last)
    timeline = simulate(case, times)
    busiest = max(busy(timeline, d) for d in range(shape.stages))
    assert find_schedule(name).work(shape, times) == exactly(busiest)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_held_is_what_the_simulation_holds(name):
    schedule = find_schedule(name)
    for shape in shapes(name):
        p = shape.stages
        timeline = simulate((name, shape), PipelineTimes(ONE, ONE, ONE))
        chunks = schedule.chunks_of(shape)
        first, second, last = schedule.in_flight(shape)
        if p == 1:
            assert first == last == 1  # nothing to fill: gradients are accumulated one microbatch at a time
            continue
        assert first == timeline.peak_in_flight(0) / chunks
        assert last == timeline.peak_in_flight(p - 1) / chunks
        if p > 2:
            assert second == timeline.peak_in_flight(1) / chunks
        assert max(timeline.peak_in_flight(d) for d in range(p)) / chunks == max(first, last)
        device = 0 if schedule.folded else p - 1
        assert schedule.held_head(shape) == timeline.peak_in_flight(device, schedule.num_chunks(shape) - 1)


@given(cases_of(list(SCHEDULES)), three, st.sampled_from(["first", "middle", "last"]), st.integers(0, 2), st.data())
@settings(max_examples=120, deadline=None)
def test_no_step_gets_shorter_when_a_pass_gets_longer(case, times, which, longer, data):
    old = getattr(times, which)
    passes = [old.forward, old.backward, old.weights]
    passes[longer] += data.draw(st.floats(0, 3))
    slower = replace(times, **{which: StageTimes(*passes)})
    assert closed(case, slower) >= closed(case, times) * (1 - 1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_arrays_give_what_their_entries_give(name):
    schedule, shapes_of_it = find_schedule(name), list(shapes(name))
    together = PipelineShape(*(np.array([getattr(s, n) for s in shapes_of_it], float) for n in PipelineShape.__slots__))
    times = PipelineTimes(StageTimes(1.0, 2.0, 3.0), StageTimes(4.0, 5.0, 2.0), StageTimes(5.0, 6.0, 7.0))
    assert np.all(schedule.allows(together))
    for of in (schedule.makespan, schedule.work, schedule.idle):
        found = np.broadcast_to(of(together, times), len(shapes_of_it))
        assert list(found) == [pytest.approx(of(s, times), rel=1e-12, abs=1e-12) for s in shapes_of_it]
    for k, many in enumerate(schedule.in_flight(together)):
        assert list(np.broadcast_to(many, len(shapes_of_it))) == [schedule.in_flight(s)[k] for s in shapes_of_it]


def test_published_bubbles():
    """Equal stages. In DualPipe's row F&B, a pair run together, takes as long as the two."""
    f, b, w, p = 3.0, 4.0, 2.0, 8

    def idle(name, v=1, b=b):
        t = StageTimes(f, b, w)
        return find_schedule(name).idle(PipelineShape(p, 32, v), PipelineTimes(t, t, t))

    assert idle("gpipe") == idle("1f1b") == (p - 1) * (f + b + w)
    assert idle("interleaved", 2) == (p - 1) * (f + b + w)  # of a chunk, half a stage
    assert idle("zb-h1") == (p - 1) * (f + (b + w) - 2 * w)
    F, B = f, f + w
    assert idle("dualpipe", b=f) == (p / 2 - 1) * ((F + B) + B - 3 * w)
    assert idle("dualpipe-v", b=f) == (p - 1) * ((F + B) + B - 3 * w)
    assert find_schedule("dualpipe").in_flight(PipelineShape(p, 32)) == (p + 1, p + 1, p + 1)
    assert [s.copies for s in SCHEDULES.values()] == [1, 1, 1, 1, 1, 2, 1]


def test_sends():
    assert find_schedule("1f1b").hops(PipelineShape(4, 8)) == 3
    assert find_schedule("interleaved").hops(PipelineShape(4, 8, 3)) == 11
    assert find_schedule("zb-v").hops(PipelineShape(4, 8)) == 6  # the fold is inside the last device
    assert find_schedule("dualpipe").hops(PipelineShape(4, 8)) == 3
    assert find_schedule("interleaved").exchanges(PipelineShape(4, 8, 2)) == (24, 32)
    assert find_schedule("1f1b").exchanges(PipelineShape(4, 8)) == (8, 16)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_send_delays_the_step(name):
    shape = next(s for s in shapes(name) if s.stages >= 4)
    times, schedule = PipelineTimes(ONE, ONE, ONE), find_schedule(name)
    delay = simulate((name, shape), times, send=1e-6).makespan - simulate((name, shape), times).makespan
    assert delay >= 2e-6 * (shape.stages - 1) * (1 - 1e-3)
    if shape.num_microbatches == 1:  # alone, it waits at every hop
        assert delay == pytest.approx(2e-6 * schedule.hops(shape), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("interleaved", (4, 6, 2), "6 microbatches do not divide by 4 stages"),
        ("interleaved", (4, 8, 1), "two virtual stages or more: found 1"),
        ("interleaved", (1, 8, 2), "two stages or more: found 1"),
        ("1f1b", (4, 8, 2), "no virtual stages: found 2"),
        ("zb-h1", (4, 3, 1), "as many microbatches as stages: 3 are fewer than 4"),
        ("zb-v", (4, 6, 1), "twice as many microbatches as stages, less one: 6 are fewer than 8 - 1"),
        ("zb-v", (4, 8, 2), "no virtual stages: found 2"),
        ("dualpipe", (3, 8, 1), "an even number of stages: found 3"),
        ("dualpipe", (4, 9, 1), "an even number of microbatches: found 9"),
        ("dualpipe", (4, 6, 1), "twice as many microbatches as stages: 6 are fewer than 8"),
        ("dualpipe-v", (4, 6, 1), "twice as many microbatches as stages: 6 are fewer than 8"),
    ],
)
def test_what_a_schedule_cannot_do_is_said(name, sizes, words):
    shape = PipelineShape(*sizes)
    assert words in find_schedule(name).why_not(shape)
    assert not find_schedule(name).allows(shape)
    with pytest.raises(LayoutError, match=words):
        work_orders(name, shape)


def test_an_unknown_schedule_is_named():
    with pytest.raises(UnknownNameError, match="1f1b"):
        find_schedule("1f1b1")


def test_every_schedule_runs_on_four_stages():
    for name in SCHEDULES:
        assert any(s.stages >= 4 for s in shapes(name))
