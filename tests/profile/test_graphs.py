"""Kernels of CUDA graphs find their instructions: on a real trace by what the chip can do, and made ones by hand."""

from dataclasses import dataclass

import meshwise
from meshwise.commands.profile import diagnose as compared
from meshwise.commands.profile import planned_of
from meshwise.profile.reading.graphs import GraphNodes
from meshwise.profile.reading.hlo import Scheduled
from meshwise.profile.trace import Activity
from tests.profile.traces import GRAPHS, diagnose, traces_of

MIB = 2**20


def test_a_real_step_is_read_through_its_graphs():
    """What is put to the wrong instruction would be faster than the chip, or slower than anything ever is."""
    diagnosis = diagnose(GRAPHS)
    ops = diagnosis.profile.ops
    products = [t for t in ops if t.kind.category == "matmul"]
    assert sum(t.seconds for t in products) > 0.5 * diagnosis.profile.step_s
    assert all(0.4 < t.flops_per_s / 989e12 < 0.9 for t in products if t.seconds > 1e-4)
    attention = {t.kind.scope.split("/")[-2]: t for t in ops if t.kind.category == "attention" and t.kind.flops > 1e9}
    assert set(attention) == {"forward", "of_queries", "of_keys"}
    assert all(0.2 < t.flops_per_s / 989e12 < 0.5 for t in attention.values())
    copies = [t for t in ops if t.kind.activity == Activity.COPY and t.kind.source == "HLO"]
    rates = [t.kind.num_bytes * t.runs / t.seconds / 3.35e12 for t in copies if t.kind.num_bytes > 8 * MIB]
    assert len(rates) > 20
    assert all(0.5 < rate < 1 for rate in rates)


def test_beside_its_plan_nearly_all_is_joined():
    asked = {"on": "h100:1", "batch_tokens": "32Ki", "seq_len": 4096, "layout": "fsdp=1"}
    plan = meshwise.estimate_train("llama-3.2-1b", **asked).plans[0]
    found = compared(traces_of(GRAPHS), planned_of(plan))
    copied = found.profile.partition_s["exposed_copy"] / found.profile.step_s
    assert found.beside.joined_share + copied > 0.99
    assert "unroll the loop" in next(c for c in found.causes if c.name == "exposed-copy").change


@dataclass
class Program:
    """What a program says of itself: instructions in order."""

    rows: list

    def schedules(self):
        yield [Scheduled(name, opcode, target, "", moved) for name, opcode, target, moved in self.rows]


def fusion(name):
    return name, "fusion", "", None


def product(name):
    return name, "custom-call", "__cublas$lt$gemm", None


def copied(name, size):
    return name, "copy", "", size


def found(rows, *graphs):
    """Instructions of nodes, graph by graph, in order of the nodes; of those that have none, None."""
    nodes = GraphNodes()
    for number, kernels in enumerate(graphs):
        for node, (kernel, details) in enumerate(kernels):
            nodes.add(("step", number, node), f"command_buffer_{number}", kernel, details)
    known = nodes.instructions({"step": Program(rows)})
    return [[known.get(("step", n, node)) for node in range(len(kernels))] for n, kernels in enumerate(graphs)]


def kernels(*names):
    return [(name, "") for name in names]


def test_kernels_that_are_reused_go_by_their_place():
    """Two fusions that compute the same have one kernel, called like the first of them."""
    rows = [fusion("loop_add_fusion.1"), fusion("loop_exp_fusion"), fusion("loop_add_fusion.2"), fusion("wrapped_add")]
    own = kernels("loop_add_fusion_1", "loop_exp_fusion", "loop_add_fusion_1")
    assert found(rows, own) == [["loop_add_fusion.1", "loop_exp_fusion", "loop_add_fusion.2"]]


def test_products_and_copies_follow_one_another_each_in_their_order():
    rows = [
        fusion("loop_add_fusion"), product("custom-call.7"), copied("copy.1", MIB), copied("copy.2", 2 * MIB),
        copied("copy.3", MIB), product("custom-call.3"), fusion("loop_exp_fusion"),
    ]  # fmt: skip
    one = "grid:256,1,1 block:256,1,1", "grid:512,1,1 block:256,1,1"
    own = [
        *kernels("loop_add_fusion", "loop_exp_fusion"), ("memcpy128", one[1]), ("memcpy128", one[0]),
        ("memcpy128", one[0]), *kernels("nvjet_tst_128", "cutlass_80_gemm", "memset"),
    ]  # fmt: skip
    expected = ["loop_add_fusion", "loop_exp_fusion", "copy.2", "copy.1", "copy.3", "custom-call.7", "custom-call.3"]
    assert found(rows, own) == [[*expected, None]]


def test_what_does_not_add_up_is_left_alone():
    """Of three products one is missing: which, nobody knows; and kernels that are none of the program's."""
    rows = [fusion("loop_add_fusion"), *map(product, ("a.1", "a.2", "a.3")), fusion("loop_exp_fusion")]
    own = kernels("loop_add_fusion", "nvjet_1", "nvjet_2", "loop_exp_fusion", "other_kernel")
    assert found(rows, own) == [["loop_add_fusion", None, None, "loop_exp_fusion", None]]
    assert found(rows, kernels("nvjet_1", "nvjet_2", "nvjet_3")) == [[None] * 3]


def test_graphs_of_one_schedule_share_it():
    """What lies between two graphs belongs to the one that lacks it."""
    rows = [
        product("a.0"), fusion("loop_add_fusion"), product("a.1"), ("while.2", "while", "", None),
        fusion("loop_exp_fusion"), product("a.2"), product("a.3"), fusion("loop_sub_fusion"),
    ]  # fmt: skip
    first = kernels("loop_add_fusion", "nvjet_1", "nvjet_1")
    second = kernels("loop_exp_fusion", "loop_sub_fusion", "nvjet_1", "nvjet_2")
    assert found(rows, first, second) == [
        ["loop_add_fusion", "a.0", "a.1"], ["loop_exp_fusion", "loop_sub_fusion", "a.2", "a.3"]
    ]  # fmt: skip


def test_command_buffers_follow_one_another():
    """A graph of one kernel could be any of those that are called so: it is the one that those before it leave."""
    rows = [
        fusion("loop_add_fusion.1"), fusion("loop_exp_fusion"), ("while.2", "while", "", None),
        fusion("loop_add_fusion.2"),
    ]  # fmt: skip
    large, small = kernels("loop_add_fusion_1", "loop_exp_fusion"), kernels("loop_add_fusion_1")
    assert found(rows, large, small) == [["loop_add_fusion.1", "loop_exp_fusion"], ["loop_add_fusion.2"]]


def test_graphs_that_were_made_again_are_of_the_same_instructions():
    rows = [fusion("loop_add_fusion.1"), product("a.1"), fusion("loop_add_fusion.2")]
    nodes = GraphNodes()
    for graph in (4, 9):
        for node, kernel in enumerate(("loop_add_fusion_1", "loop_add_fusion_1", "nvjet_1")):
            nodes.add(("step", graph, node), "command_buffer_7", kernel, "")
    known = nodes.instructions({"step": Program(rows)})
    expected = ["loop_add_fusion.1", "loop_add_fusion.2", "a.1"]
    assert [[known["step", graph, n] for n in range(3)] for graph in (4, 9)] == [expected, expected]


def test_nothing_is_two_kernels():
    """What two graphs could claim, or a copy of a size that is not said, goes by the kernel's own name."""
    rows = [fusion("loop_add_fusion"), product("a.1"), fusion("loop_exp_fusion")]
    assert found(rows, kernels("loop_add_fusion", "nvjet_1"), kernels("loop_exp_fusion", "nvjet_1")) == [
        ["loop_add_fusion", None], ["loop_exp_fusion", None]
    ]  # fmt: skip
    rows = [fusion("loop_add_fusion"), copied("copy.1", MIB), fusion("loop_exp_fusion")]
    own = [*kernels("loop_add_fusion", "loop_exp_fusion", "memcpy128"), ("memcpy128", "grid:256,1,1 block:256,1,1")]
    assert found(rows, own) == [["loop_add_fusion", "loop_exp_fusion", None, "copy.1"]]


def test_collectives_follow_one_another_by_kind():
    rows = [fusion("loop_add_fusion"), ("all-gather-start.1", "all-gather-start", "", None), fusion("loop_exp_fusion")]
    nodes = GraphNodes()
    for node, kernel in enumerate(("loop_add_fusion", "ncclDevKernel_AllGather_RING_LL", "loop_exp_fusion")):
        nodes.add(("step", 0, node), "command_buffer", kernel, "")
    sent = [Scheduled(*row[:3], "", row[3], "all-gather" if "gather" in row[0] else "") for row in rows]
    program = Program([])
    program.schedules = lambda: iter([sent])
    assert nodes.instructions({"step": program})["step", 0, 1] == "all-gather-start.1"
