"""How often computations run: trip counts read from conditions, and multiplied through nested loops."""

import pytest

from meshwise.compiler.hlo.loops import executions, trip_count
from meshwise.compiler.hlo.reader import read_module

LOOP = """HloModule m

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{{0}} get-tuple-element(%s), index=1
  %step = s32[] constant({step})
  %next = s32[] {advance}(%i, %step)
  ROOT %t = (s32[], f32[8]{{0}}) tuple(%next, %x)
}}

%condition (s.1: (s32[], f32[8])) -> pred[] {{
  %s.1 = (s32[], f32[8]{{0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %limit = s32[] constant({limit})
  ROOT %less = pred[] compare(%i.1, %limit), direction={direction}
}}

ENTRY %main (p: f32[8], n: s32[]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant({start})
  %from = s32[] copy({begin})
  %init = (s32[], f32[8]{{0}}) tuple(%from, %p)
  %w = (s32[], f32[8]{{0}}) while(%init), condition=%condition, body=%body{tail}
  ROOT %r = f32[8]{{0}} get-tuple-element(%w), index=1
}}
"""


def loop(*, start=0, limit=10, step=1, direction="LT", advance="add", begin="%zero", tail=""):
    module = read_module(
        LOOP.format(start=start, limit=limit, step=step, direction=direction, advance=advance, begin=begin, tail=tail)
    )
    return trip_count(module, module.main, module.main.by_name["w"])


@pytest.mark.parametrize(
    ("choices", "rounds"),
    [
        ({}, 10),
        ({"limit": 1}, 1),
        ({"limit": 0}, 0),
        ({"start": 3}, 7),
        ({"step": 3}, 4),
        ({"direction": "LE"}, 11),
        ({"direction": "NE", "limit": 6, "step": 2}, 3),
        ({"start": 9, "limit": 0, "step": -1, "direction": "GE"}, 10),
        ({"start": 9, "limit": 0, "direction": "GT", "advance": "subtract"}, 9),
        ({"limit": 4096, "start": 1, "step": 2, "advance": "multiply"}, 12),
        ({"limit": 1_000_000}, 1_000_000),
        ({"begin": "%n"}, None),
        ({"begin": "%n", "tail": ', backend_config={"known_trip_count":{"n":"7"}}'}, 7),
        ({"step": 0}, None),
    ],
)
def test_trip_counts(choices, rounds):
    assert loop(**choices) == rounds


NESTED = """HloModule m

%inner_body (a: (s32[])) -> (s32[]) {
  %a = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%a), index=0
  %one = s32[] constant(1)
  %n = s32[] add(%i, %one)
  ROOT %t = (s32[]) tuple(%n)
}

%inner_condition (b: (s32[])) -> pred[] {
  %b = (s32[]) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %three = s32[] constant(3)
  ROOT %l = pred[] compare(%j, %three), direction=LT
}

%advance (q: s32[]) -> s32[] {
  %q = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %sum = s32[] add(%q, %two)
}

%outer_body (c: (s32[])) -> (s32[]) {
  %c = (s32[]) parameter(0)
  %k = s32[] get-tuple-element(%c), index=0
  %nil = s32[] constant(0)
  %begin = (s32[]) tuple(%nil)
  %w.1 = (s32[]) while(%begin), condition=%inner_condition, body=%inner_body
  %m = s32[] fusion(%k), kind=kLoop, calls=%advance
  ROOT %u = (s32[]) tuple(%m)
}

%outer_condition (d: (s32[])) -> pred[] {
  %d = (s32[]) parameter(0)
  %o = s32[] get-tuple-element(%d), index=0
  %five = s32[] constant(5)
  ROOT %p = pred[] compare(%o, %five), direction=LT
}

%branch (z: f32[]) -> f32[] {
  ROOT %z = f32[] parameter(0)
}

%other (y: f32[]) -> f32[] {
  ROOT %y = f32[] parameter(0)
}

ENTRY %main (g: pred[], h: f32[]) -> f32[] {
  %g = pred[] parameter(0)
  %h = f32[] parameter(1)
  %nought = s32[] constant(0)
  %start = (s32[]) tuple(%nought)
  %w = (s32[]) while(%start), condition=%outer_condition, body=%outer_body
  ROOT %e = f32[] conditional(%g, %h, %h), true_computation=%branch, false_computation=%other
}
"""


def test_nested_loops_multiply_and_counters_may_be_fused():
    runs = executions(read_module(NESTED))
    assert [r.times for r in runs["main"]] == [1]
    assert [r.times for r in runs["outer_body"]] == [3]  # 0, 2, 4
    assert [(r.times, r.loops, r.rounds) for r in runs["inner_body"]] == [(9, ("outer_body", "inner_body"), 3)]
    assert [r.times for r in runs["advance"]] == [3]
    assert all(r.certain for computation in runs.values() for r in computation)


def test_branches_are_marked():
    runs = executions(read_module(NESTED))
    assert [r.branch for r in (*runs["branch"], *runs["other"], *runs["outer_body"])] == [True, True, False]


def test_a_loop_that_depends_on_data_counts_once_and_says_so():
    text = LOOP.format(start=0, limit=4, step=1, direction="LT", advance="add", begin="%n", tail="")
    (run,) = executions(read_module(text))["body"]
    assert (run.times, run.certain) == (1, False)
