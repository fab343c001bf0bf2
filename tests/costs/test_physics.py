"""Invariants of every estimate: never faster than physics, terms that add up exactly, more hardware never slower.

The bytes and FLOPs are counted here from the formulas of a Llama, not read from the program that the estimate reads.
"""

import math
from dataclasses import fields, replace

import pytest

from meshwise.core.dtypes import DType
from meshwise.costs.estimate import estimate_training, evaluate_layout, layout_wires
from meshwise.costs.evaluate import evaluate
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import Candidates
from meshwise.costs.memory import MEMORY_CLASSES, RESERVE_SHARE
from meshwise.costs.network import GroupLink
from meshwise.costs.step import TERMS
from meshwise.hardware import Torus, Tree
from meshwise.sharding.layout import Layout
from tests.costs.corpus import assume, between, every_case, one_of
from tests.costs.small_problems import case, structure_of

NEAR = 1 - 1e-9


class Llama:
    """What one optimizer step of a Llama must compute and move, from its formulas."""

    def __init__(self, problem, layout):
        s = problem.model.sizes
        self.d, self.f, self.h, self.v = s["D"], s["F"], s["H"], s["V"]
        self.n = s.get("N", s.get("N.0", 0))
        self.k = s.get("K", self.n)
        self.layers = problem.model.num_layers
        self.layer_weights = self.d * self.h * (2 * self.n + 2 * self.k) + 3 * self.d * self.f
        self.tokens = layout.sequences * problem.job.seq_len
        self.seq_len = problem.job.seq_len

    @property
    def matmul_flops(self):
        """6 per weight and token, and causal attention: 2 matmuls over half the pairs, five backward."""
        weights = 6 * (self.layers * self.layer_weights + self.d * self.v) * self.tokens
        pairs = self.tokens * (self.seq_len + 1) / 2
        return weights + self.layers * (1 + 2.5) * 4 * self.n * self.h * pairs


def same_weights(layout):
    """Devices that share out the weights of a dense model, `data` left out."""
    return layout.fsdp * layout.expert * layout.context * layout.ulysses


def tokens_of_a_device(m, layout):
    """Of one microbatch, where the tensor axis does not split them."""
    return m.tokens / (layout.data * same_weights(layout)) / layout.num_microbatches


def into_a_chip(fabric):
    """Bytes/s over all links into one chip."""
    return sum(
        d.bandwidth_one_way * (2 if d.torus and (d.wraps or d.size > 2) else 1) for d in fabric.dimensions if d.size > 1
    )


@every_case()
def test_a_step_is_never_faster_than_its_flops(case):
    problem, fabric, layout = case
    step = evaluate_layout(problem, fabric, layout).step
    peak = problem.cluster.chip.peak(DType.BF16)
    assert step.lower >= Llama(problem, layout).matmul_flops / layout.num_chips / peak * NEAR


@every_case()
def test_a_step_is_never_faster_than_its_matmuls_bytes(case):
    """Every matmul reads both operands and writes its result, in the forward pass and twice in the backward pass."""
    problem, fabric, layout = case
    step = evaluate_layout(problem, fabric, layout).step
    m = Llama(problem, layout)
    shards = layout.tensor
    tokens = tokens_of_a_device(m, layout)
    widths = [
        (m.d, m.n * m.h),
        (m.d, m.k * m.h),
        (m.d, m.k * m.h),
        (m.n * m.h, m.d),
        (m.d, m.f),
        (m.d, m.f),
        (m.f, m.d),
    ]
    # One of a weight's two widths is split over tensor; the whole activation stands on the other side.
    whole = {m.d}
    elements = 0.0
    for a, b in widths:
        local_a, local_b = (a, b / shards) if a in whole and b != m.d else (a / shards, b)
        local_a, local_b = (a / shards, b / shards) if a == b == m.d else (local_a, local_b)
        elements += 3 * (tokens * local_a + local_a * local_b + tokens * local_b)
    per_stage = m.layers // layout.stage  # the busiest stage has the head, or more
    num_bytes = 2 * elements * per_stage * layout.num_microbatches
    assert step.lower >= num_bytes / problem.cluster.chip.hbm_bandwidth * NEAR


@every_case()
def test_a_step_is_never_faster_than_its_bytes_on_the_wires(case):
    problem, fabric, layout = case
    assume(layout.num_chips > 1)
    step = evaluate_layout(problem, fabric, layout).step
    m = Llama(problem, layout)
    links = into_a_chip(fabric)
    layers = m.layers // layout.stage  # the busiest stage has at least these
    rounds = layout.num_microbatches
    gradient = problem.job.formats.gradients.bytes
    weights = m.layer_weights / layout.tensor
    bounds = {"tensor": 0.0, "fsdp": 0.0, "data": 0.0, "context": 0.0}
    shard = same_weights(layout)
    lacking = 1 - 1 / shard
    # Weights gathered forward and backward, gradients scattered, each microbatch.
    reduced = shard * layout.data if layout.zero == 2 else shard
    bounds["fsdp"] = (
        layers * rounds * weights * (2 * lacking * 2 + gradient * (1 - 1 / reduced) * (shard > 1 or layout.zero == 2))
    )
    # A replica's gradients once a step, and the new weights back where the optimizer is split.
    missing = 1 - 1 / layout.data
    once = {0: 2 * gradient, 1: gradient + 2, 2: 2}[layout.zero]
    if fabric.in_network_reduction and layout.zero == 0:
        once = gradient  # the switches add: out once, in once
    bounds["data"] = layers * weights / shard * once * missing
    # Activations: twice a layer and pass gathered and reduced over tensor.
    tokens = tokens_of_a_device(m, layout)
    both = (2 + 2) * 2 * tokens * m.d * 2 * (1 - 1 / layout.tensor)
    bounds["tensor"] = (
        layers * rounds * (both / 2 if fabric.in_network_reduction and not layout.sequence_parallel else both)
    )
    # Keys and values of the other positions, forward and backward, and their gradients back.
    heads = max(1, m.k / (layout.tensor * layout.ulysses))
    kv = 2 * heads * m.h * tokens * layout.context * layout.ulysses * 2
    bounds["context"] = layers * rounds * kv * 3 * (1 - 1 / layout.context)
    for name, num_bytes in bounds.items():
        assert step.lower >= num_bytes / links * NEAR, name
        replicas = ("fsdp", "context", "ulysses", "expert", "data")
        used = {"fsdp": replicas, "data": replicas}.get(name, (name,))
        assert sum(step.resources[u] for u in set(used) & set(step.resources)) >= num_bytes / links * NEAR, name


@every_case()
def test_bounds_stand_on_both_sides_and_everything_adds_up(case):
    problem, fabric, layout = case
    e = estimate_training(problem, fabric, layout)
    t = e.step_time
    assert 0 < t.lower <= t.expected * (1 + 1e-12)
    assert t.expected <= t.upper * (1 + 1e-12)
    assert t.lower == max(e.resources.values())
    assert set(e.terms) == set(TERMS)
    assert all(v >= 0 for v in e.terms.values())
    assert all(v >= 0 for v in e.hidden.values())
    assert math.fsum(e.terms.values()) == pytest.approx(t.expected, rel=1e-12)
    assert list(e.memory) == [*MEMORY_CLASSES, "total"]
    assert all(v >= 0 for v in e.memory.values())
    assert sum(e.memory[name] for name in MEMORY_CLASSES) == e.memory["total"]
    assert e.memory["reserve"] == RESERVE_SHARE * problem.cluster.chip.hbm_usable


@every_case()
def test_hidden_and_exposed_are_all_of_the_communication(case):
    """Per microbatch and step: exposed + hidden = what the collectives take, by network."""
    problem, fabric, layout = case
    costs = evaluate_layout(problem, fabric, layout)
    # With one pass of everything exposed and no idle stages, `upper` is compute + all communication + optimizer.
    step = costs.step
    networks = ("tensor", "context", "fsdp", "data")
    communication = sum(step.terms[n] + step.hidden[n] for n in networks)
    per_round = {n: step.terms[n] + step.hidden[n] for n in networks}
    assert all(per_round[n] >= step.resources[n] * NEAR for n in networks) or layout.stage > 1
    if layout.stage == 1:
        # The same calibration, compute made free of charge and of cover: all of it is exposed.
        fast = replace(
            problem.cluster.chip,
            flops_per_s={k: v * 1e9 for k, v in problem.cluster.chip.flops_per_s.items()},
            vector_flops_per_s=problem.cluster.chip.vector_flops_per_s * 1e9,
            hbm_bandwidth=problem.cluster.chip.hbm_bandwidth * 1e9,
        )
        bare = replace(problem, cluster=problem.cluster.replace(chip=fast))
        alone = evaluate_layout(bare, fabric, layout).step
        assert sum(alone.terms[n] + alone.hidden[n] for n in networks) == pytest.approx(communication, rel=1e-9)


def faster(problem, fabric, *, flops=1.0, hbm=1.0, links=1.0):
    chip = problem.cluster.chip
    chip = replace(
        chip,
        flops_per_s={k: v * flops for k, v in chip.flops_per_s.items()},
        vector_flops_per_s=chip.vector_flops_per_s * flops,
        hbm_bandwidth=chip.hbm_bandwidth * hbm,
    )
    dims = tuple(replace(d, bandwidth_one_way=d.bandwidth_one_way * links) for d in fabric.dimensions)
    return replace(problem, cluster=problem.cluster.replace(chip=chip)), replace(fabric, dimensions=dims)


#: What of its exposed weights counts as a backward pass, and what as gradients of weights, shifts with faster matmuls.
SHIFTING = case(
    "v5e 4x4 mesh",
    "blackwell",
    Layout(
        stage=2,
        ulysses=4,
        tensor=2,
        sequence_parallel=False,
        micro_batch=3,
        num_microbatches=3,
        remat="none",
        wires=(("tensor", (1, 2)), ("ulysses", (4, 1)), ("stage", (1, 2))),
    ),
    layers=6,
    width=4096,
    hidden=512,
    vocab=16384,
)


@every_case(
    one_of("flops", "hbm", "links"),
    between(1.0, 30.0),
    examples=(
        (SHIFTING, "flops", 1.15),
        (SHIFTING, "flops", 2.0),
    ),
)
def test_faster_hardware_never_slows_a_plan(case, what, factor):
    problem, fabric, layout = case
    before = evaluate_layout(problem, fabric, layout).step
    after = evaluate_layout(*faster(problem, fabric, **{what: factor}), layout).step
    for name in ("lower", "expected", "upper"):
        assert getattr(after, name) <= getattr(before, name) * (1 + 1e-9), name


@every_case(between(2, 5))
def test_a_smaller_batch_never_takes_longer(case, factor):
    problem, fabric, layout = case
    before = evaluate_layout(problem, fabric, layout.replace(micro_batch=layout.micro_batch * factor)).step
    after = evaluate_layout(problem, fabric, layout).step
    for name in ("lower", "expected", "upper"):
        assert getattr(after, name) <= getattr(before, name) * (1 + 1e-9), name
    fewer = evaluate_layout(problem, fabric, layout).step
    more = evaluate_layout(problem, fabric, layout.replace(num_microbatches=layout.num_microbatches * factor)).step
    for name in ("lower", "expected", "upper"):
        assert getattr(fewer, name) <= getattr(more, name) * (1 + 1e-9), name


@every_case(
    one_of(*[f.name for f in fields(GroupLink) if f.name != "size"]),
    one_of(("tensor",), ("context",), ("context", "fsdp"), ("data",), ("stage",)),
    between(0.0, 1.0),
)
def test_a_faster_wire_never_slows_a_step(case, field, group, factor):
    """The search relies on it: wires that no placement beats give a bound."""
    problem, fabric, layout = case
    wires = layout_wires(problem, fabric, layout)

    def quicker(axes):
        wire = wires(axes)
        return replace(wire, **{field: getattr(wire, field) * factor}) if tuple(sorted(axes)) == group else wire

    sizes = {a: float(v) for a, v in layout.sizes.items()}
    c = Candidates(**sizes, micro_batch=float(layout.micro_batch), num_microbatches=float(layout.num_microbatches))
    before = evaluate(problem, structure_of(layout), c, wires).step
    after = evaluate(problem, structure_of(layout), c, quicker).step
    for name in ("lower", "expected", "upper"):
        assert getattr(after, name) <= getattr(before, name) * (1 + 1e-9), name


@every_case()
def test_splitting_conserves_flops(case):
    """What all chips do together is what one chip would do alone, where sizes divide."""
    problem, fabric, layout = case
    m = problem.model.sizes
    assume(layout.stage == 1)
    assume(not any(m[a] % layout.tensor for a in ("F", "V")))
    assume(not any(m.get(a, m["N"]) % (layout.tensor * layout.ulysses) for a in ("N", "K")))
    assume(not problem.job.seq_len % (layout.context * layout.ulysses * layout.tensor))
    many = evaluate_layout(problem, fabric, layout).step
    one = layout.replace(
        **dict.fromkeys(layout.sizes, 1), micro_batch=layout.sequences, num_microbatches=1, wires=(), zero=0
    )
    single = Fabric.of(problem.cluster.replace(num_chips=1, num_slices=1, network=_alone(problem.cluster)))
    alone = evaluate_layout(problem, single, one).step
    assert many.flops * layout.num_chips == pytest.approx(alone.flops, rel=1e-9)


def _alone(cluster):
    net = cluster.network
    if isinstance(net, Torus):
        return replace(net, axes=tuple(replace(a, size=1) for a in net.axes))
    assert isinstance(net, Tree)
    return replace(net, levels=(replace(net.levels[0], degree=1),))


@every_case()
def test_splitting_conserves_the_training_state(case):
    """Weights over everything that shares them out hold together what one chip would hold."""
    problem, fabric, layout = case
    m = problem.model.sizes
    assume(layout.stage == 1)
    assume(not any(m[a] % layout.tensor for a in ("N", "F", "V")) and not m.get("K", m["N"]) % layout.tensor)
    assume(not m["D"] % (same_weights(layout) * layout.data))
    memory = evaluate_layout(problem, fabric, layout).memory
    formats = problem.job.formats
    norms = (2 * problem.model.num_layers + 1) * m["D"]  # not split over tensor
    total = problem.model.parameters.total
    spread = same_weights(layout)
    local = (total - norms) / layout.tensor + norms
    assert memory["parameters"] == pytest.approx(local / spread * formats.weights.bytes, rel=1e-12)
    shared = spread * (layout.data if layout.zero == 2 else 1)
    assert memory["gradients"] == pytest.approx(local / shared * formats.gradients.bytes, rel=1e-12)
    state = spread * (layout.data if layout.zero >= 1 else 1)
    assert memory["optimizer"] == pytest.approx(local / state * 2 * 4, rel=1e-12)
    master = 4 if formats.master else 0
    assert memory["master_copies"] == pytest.approx(local / state * master, rel=1e-12)
