"""The least time of a program by its schedule: what collectives wait for, and what compute hides of them."""

import pytest

from meshwise.compiler.floor import Floor, Rates
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.reader import read_module
from meshwise.compiler.step_floor import StepFloor
from meshwise.costs.fabric import Fabric
from meshwise.hardware import parse_cluster

CLUSTER = parse_cluster("h100:8")
RATES = Rates(CLUSTER.chip, Fabric.of(CLUSTER), {"fsdp": [8.0]})
PRODUCT = "%p{n} = bf16[8192,8192]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
START = (
    "%s = (bf16[1024,8192]{1,0}, bf16[8192,8192]{1,0}) all-gather-start(%b), replica_groups=[1,8]<=[8], dimensions={0}"
)
DONE = "%d = bf16[8192,8192]{1,0} all-gather-done(%s)"
#: Of the product, and of the gather at 450 GB/s.
PRODUCT_S = 2 * 8192**3 / CLUSTER.chip.flops_per_s["bf16"]
GATHER_S = 8192 * 8192 * 2 * 7 / 8 / 450e9


def floor_of(*lines, before=""):
    text = "\n".join(f"  {line}" for line in lines)
    module = read_module(f"""HloModule m, is_scheduled=true, num_partitions=8

{before}ENTRY %main (a: bf16[8192,8192], b: bf16[1024,8192]) -> bf16[8192,8192] {{
  %a = bf16[8192,8192]{{1,0}} parameter(0)
  %b = bf16[1024,8192]{{1,0}} parameter(1)
{text}
}}
""")
    return Floor(module, DeviceMesh({"fsdp": 8}), RATES)


def test_a_collective_is_hidden_by_what_stands_between_its_start_and_its_end():
    beside = floor_of(START, PRODUCT.format(n=1), DONE)
    assert beside.compute == pytest.approx(PRODUCT_S)
    assert beside.network["fsdp"] == pytest.approx(GATHER_S)
    assert PRODUCT_S > GATHER_S
    assert beside.exposed == 0
    after = floor_of(START, DONE, PRODUCT.format(n=1))
    assert after.exposed == pytest.approx(GATHER_S)
    assert after.seconds == pytest.approx(beside.seconds + GATHER_S)


def test_one_that_is_waited_for_at_once_hides_nothing():
    gather = "%g = bf16[8192,8192]{1,0} all-gather(%b), replica_groups=[1,8]<=[8], dimensions={0}"
    assert floor_of(gather, PRODUCT.format(n=1)).exposed == pytest.approx(GATHER_S)


def test_what_other_cores_send_is_hidden_by_what_stands_between_the_call_and_its_end():
    """As XLA writes what SparseCores do; where nothing stands between, all of it is waited for."""
    called = """%called (c: bf16[1024,8192]) -> bf16[8192,8192] {
  %c = bf16[1024,8192]{1,0} parameter(0)
  ROOT %g = bf16[8192,8192]{1,0} all-gather(%c), replica_groups=[1,8]<=[8], dimensions={0}
}

"""
    ready = '%y = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"'
    start = (
        "%s = ((bf16[1024,8192]{1,0}), bf16[8192,8192]{1,0}) call-start(%b), "
        'async_execution_thread="sparsecore", to_apply=%called'
    )
    done = DONE.replace("all-gather-done", "call-done")
    beside = floor_of(ready, start, PRODUCT.format(n=1), done, before=called)
    assert beside.network["fsdp"] == pytest.approx(GATHER_S)
    assert beside.exposed == 0
    assert floor_of(ready, start, done, PRODUCT.format(n=1), before=called).exposed == pytest.approx(GATHER_S)


def test_two_on_the_same_links_share_what_hides_them():
    starts = [START.replace("%s", f"%s{n}") for n in range(5)]
    ends = [DONE.replace("%d", f"%d{n}").replace("%s", f"%s{n}") for n in range(5)]
    found = floor_of(*starts, PRODUCT.format(n=1), *ends)
    written = 4 * 8192 * 8192 * 2 / CLUSTER.chip.hbm_bandwidth  # what came is written, while the next one comes
    assert found.exposed == pytest.approx(5 * GATHER_S - PRODUCT_S - written)


def test_waiting_for_the_last_of_several_waits_for_all():
    starts = [START.replace("%s", f"%s{n}") for n in range(5)]
    ends = [DONE.replace("%d", f"%d{n}").replace("%s", f"%s{n}") for n in (4, 0, 1, 2, 3)]
    assert floor_of(*starts, *ends).exposed == pytest.approx(5 * GATHER_S)


def test_loops_count_and_hide_each_round():
    before = f"""%body (x: (s32[], bf16[8192,8192], bf16[1024,8192])) -> (s32[], bf16[8192,8192], bf16[1024,8192]) {{
  %x = (s32[], bf16[8192,8192]{{1,0}}, bf16[1024,8192]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %a = bf16[8192,8192]{{1,0}} get-tuple-element(%x), index=1
  %b = bf16[1024,8192]{{1,0}} get-tuple-element(%x), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  {PRODUCT.format(n=1)}
  {START}
  {DONE}
  ROOT %out = (s32[], bf16[8192,8192]{{1,0}}, bf16[1024,8192]{{1,0}}) tuple(%next, %d, %b)
}}

%condition (x: (s32[], bf16[8192,8192], bf16[1024,8192])) -> pred[] {{
  %x = (s32[], bf16[8192,8192]{{1,0}}, bf16[1024,8192]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %five = s32[] constant(5)
  ROOT %c = pred[] compare(%i, %five), direction=LT
}}

"""
    found = floor_of(
        "%zero = s32[] constant(0)",
        "%t = (s32[], bf16[8192,8192]{1,0}, bf16[1024,8192]{1,0}) tuple(%zero, %a, %b)",
        "%w = (s32[], bf16[8192,8192]{1,0}, bf16[1024,8192]{1,0}) while(%t), condition=%condition, body=%body",
        "ROOT %r = bf16[8192,8192]{1,0} get-tuple-element(%w), index=1",
        before=before,
    )
    assert found.compute == pytest.approx(5 * PRODUCT_S)
    assert found.exposed == pytest.approx(5 * GATHER_S)


def test_scopes_say_where_the_time_goes():
    named = PRODUCT.format(n=1) + ', metadata={op_name="jit(f)/layer/q/dot_general"}'
    first, *_ = floor_of(named, START, DONE).by_scope()
    assert first.name.endswith("layer/q/dot_general")
    assert first.compute == pytest.approx(PRODUCT_S)


def step(**changes):
    known = {"planned_lower": 1.0, "planned_expected": 1.5, "compute": 0.9, "memory": 0.5, "communication": 0.4}
    sent = {"exposed": 0.0, "busiest": 0.4, "planned_communication": 0.5, "planned_hidden": 0.4}
    return StepFloor(**known | sent | changes)


def test_the_verdict_says_whether_a_plan_can_be_reached():
    assert step().verdict == "reached"
    assert step(exposed=0.4).verdict == "possible"
    assert step(memory=1.6).verdict == "impossible"
    assert step(exposed=0.2).hidden_share == pytest.approx(0.5 * 0.5 / 0.4)
    assert step(exposed=0.0).hidden_share == 1.0
