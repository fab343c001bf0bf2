"""FLOPs, bytes on the wires and bytes in memory of a device, counted by walking all devices of a small mesh.

Every strategy alone, and many together, on a dense model, a mixture, and one with latent attention
and shared experts: what is counted is what the closed forms say.
"""

import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from meshwise.core.tensors import Einsum
from meshwise.costs.calibration import IDENTITY
from meshwise.costs.evaluate import evaluate
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.local import evaluate_local, local_prices, whole_extents
from meshwise.costs.network import NO_WIRE
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.sharding import CollectiveKind
from meshwise.sharding.layout import MESH_AXES, Layout
from tests.costs.device_walk import Walk, local_operations, rule_splits
from tests.costs.small_problems import tiny, tiny_latent, tiny_mixture

T = 16
DENSE = tiny(layers=2, width=32, heads=8, kv_heads=4, hidden=48, vocab=64)
MIXTURE = tiny_mixture(layers=2, width=32, hidden=24, vocab=64, experts=4)
LATENT = tiny_latent(
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=6,
    num_hidden_layers=3,
    n_routed_experts=8,
    vocab_size=64,
)
MODELS = {"dense": DENSE, "mixture": MIXTURE, "latent": LATENT}

#: Each strategy alone, every pair that shares a rule table, and sets of four.
LAYOUTS = [
    "data=4",
    "data=4,zero=1",
    "data=4,zero=2",
    "fsdp=4",
    "tensor=4",
    "tensor=4,sequence_parallel=off",
    "context=4",
    "context=4,context_method=ring",
    "context=4,fully_sharded=off,zero=1",
    "ulysses=4",
    "ulysses=4,fully_sharded=off",
    "expert=4",
    "expert=4,fully_sharded=off,zero=1",
    "data=2,fsdp=2,zero=1",
    "fsdp=2,tensor=2",
    "fsdp=2,tensor=2,sequence_parallel=off",
    "context=2,ulysses=2",
    "context=2,ulysses=2,context_method=ring,fully_sharded=off,zero=2",
    "ulysses=2,tensor=2",
    "expert=2,tensor=2",
    "expert=2,tensor=2,expert_tensor_parallel=off",
    "expert=2,tensor=2,sequence_parallel=off",
    "expert=2,data=2,fully_sharded=off,zero=2",
    "tensor=2,expert_tensor_parallel=off",
    "data=2,fsdp=2,context=2,tensor=2,zero=1",
    "fsdp=2,context=2,ulysses=2,tensor=2,context_method=ring",
    "data=2,expert=2,ulysses=2,tensor=2,zero=2",
    "expert=2,context=2,fsdp=2,tensor=2,expert_tensor_parallel=off",
    "expert=2,context=2,ulysses=2,data=2,fully_sharded=off,zero=1,context_method=ring",
]


def read(text, remat):
    """A layout of these sizes and choices."""
    words = {"on": True, "off": False}
    pairs = (part.split("=") for part in text.split(","))
    values = {name: int(v) if v.isdigit() else words.get(v, v) for name, v in pairs}
    return Layout(**values, remat=remat, micro_batch=4)


class Case:
    """A model under a layout: what the costs say of it, and the walk that counts."""

    def __init__(self, model, layout):
        self.layout = layout
        self.structure = LayoutChoices.of(layout)
        job = TrainingJob(
            batch_tokens=str(layout.sequences * T), seq_len=str(T), precision="mixed", expert_imbalance=1.0
        )
        self.problem = TrainingProblem(model, job, parse_cluster("h100:64"), IDENTITY)
        sizes = {a: float(n) for a, n in layout.sizes.items()}
        self.candidates = Candidates(**sizes, micro_batch=float(layout.micro_batch), num_microbatches=1.0)
        self.blocks = self.problem.lowered.training(self.structure)
        self.local = evaluate_local(
            self.problem, self.structure, local_prices(self.problem, self.structure, self.candidates.local)
        )
        bound = model.train_program().bind(batch=layout.sequences, queries=T)
        mesh = {a: layout.sizes[a] for a in MESH_AXES if a != "stage"}
        self.walk = Walk(mesh, bound, job.formats)

    def memory(self):
        return evaluate(self.problem, self.structure, self.candidates, lambda _: NO_WIRE).memory

    def flows(self, block, local):
        """(pass, purpose, kind, mesh axes) -> bytes that each device receives, from the flows."""
        extents = whole_extents(self.problem, self.structure, self.candidates)
        total = defaultdict(float)
        for one in block.collectives:
            num_bytes = local.sent[one.cost] if one.cost in local.sent else one.bytes(extents)
            kind, mesh_axes, _, _ = one.key
            group = math.prod(self.layout.sizes[a] for a in mesh_axes)
            share = {  # of the bytes of `wire_time`'s convention, what one device receives
                CollectiveKind.ALL_REDUCE: 2 * (1 - 1 / group),
                CollectiveKind.ALL_TO_ALL: (1 - 1 / group) / group,
                CollectiveKind.PERMUTE: float(group > 1),
            }.get(kind, 1 - 1 / group)
            total[one.when, one.purpose, kind, mesh_axes] += one.count * num_bytes * share
        return {key: n for key, n in total.items() if n}


def walks():
    """Each model on each layout with a policy, in turn; with the other one, too, among the slow tests."""
    for i, (model, text) in enumerate(product(MODELS, LAYOUTS)):
        for j, remat in enumerate(("none", "full")):
            slow = [pytest.mark.slow] if (i + i // len(LAYOUTS)) % 2 != j else []
            yield pytest.param((text, model, remat), marks=slow, id=f"{model}-{text}-{remat}")


@pytest.fixture(params=walks())
def case(request):
    return made(*request.param)


@cache
def made(text, model, remat):
    """One walk for every test of it."""
    return Case(MODELS[model], read(text, remat))


def test_bytes_that_devices_receive(case):
    """Of every pass, purpose, kind of collective and set of mesh axes."""
    several = 0
    for block, local in zip(case.blocks, case.local, strict=True):
        walked = {
            (when, *key): n
            for when in ("forward", "backward", "step")
            for key, n in case.walk.traffic(getattr(block.placed, when)).items()
        }
        assert case.flows(block, local) == pytest.approx(walked, rel=1e-12)
        several += len(walked)
    assert several or case.layout.num_chips == 1


def test_flops_of_devices(case):
    """Every device does as many; all together what one alone would do."""
    for block, local in zip(case.blocks, case.local, strict=True):
        for when, computed in local.passes.items():
            total = [0.0] * len(case.walk.devices)
            for item in local_operations(block.placed, when):
                one = case.walk.flops(item)
                total = [a + b for a, b in zip(total, one, strict=True)]
                if isinstance(item.op, Einsum):
                    expected = item.op.flops(case.walk.sizes) * repeats(item.op, case)
                    assert sum(one) == pytest.approx(expected, rel=1e-12), item.op.name
            assert max(total) == min(total)
            assert computed.flops == pytest.approx(total[0], rel=1e-12)


def repeats(op, case):
    """How often all devices together do the same: what has neither heads nor widths, without sequence parallelism.

    So it is in Megatron-LM: every device of the tensor axis scores the experts, and projects to latents, for itself.
    """
    divided = {"N", "K", "F", "Fs", "Fe", "V"} & {axis.partition(".")[0] for axis in op.axes}
    return 1 if case.layout.sequence_parallel or divided else case.layout.tensor


def test_operations_are_split_as_the_rules_say(case):
    s = case.structure.strategy
    for block in case.blocks:
        for item in (i for when in ("forward", "backward") for i in local_operations(block.placed, when)):
            if isinstance(item.op, Einsum):
                said = dict(zip(item.op.axes, rule_splits(item.op.axes, s.compute, s.fallback), strict=True))
                assert {a: split for a, split in item.splits if split} == {a: x for a, x in said.items() if x}


def test_training_state_of_devices(case):
    s, walk, m = case.structure.strategy, case.walk, case.memory()
    formats = case.problem.job.formats
    weights = [t for b in case.blocks for t in b.placed.block.weights for _ in range(b.placed.block.repeat)]
    assert m["parameters"] == walk.stored(weights, s.compute, s.weights) * formats.weights.bytes
    assert m["gradients"] == walk.stored(weights, s.compute, s.gradients) * formats.gradients.bytes
    states = walk.stored(weights, s.compute, s.optimizer)
    assert m["optimizer"] == states * 2 * formats.moments.bytes
    assert m["master_copies"] == states * formats.master.bytes


def test_activations_that_devices_keep(case):
    walked = 0
    for block in case.blocks:
        if block.placed.block.role != "head":
            for held in block.placed.kept:
                (count,) = {
                    math.prod(map(len, case.walk.box(d, held.tensor.axes, held.sharding.splits)))
                    for d in case.walk.devices
                }
                walked += block.placed.block.repeat * count * case.walk.element(held.tensor)
    assert case.memory()["activations"] == pytest.approx(walked, rel=1e-12)


def test_a_walk_notices_a_byte_too_many(case):
    """The comparison is not vacuous: other sizes of the same structure are told apart."""
    other = Case(case.problem.model, replace(case.layout, micro_batch=8))
    differing = [
        case.flows(a, x) != other.flows(b, y)
        for a, x, b, y in zip(case.blocks, case.local, other.blocks, other.local, strict=True)
    ]
    assert case.local[1].passes["forward"].flops < other.local[1].passes["forward"].flops
    activations = any("activations" in key or "ring" in key for b, x in zip(case.blocks, case.local, strict=True)
                      for key in case.flows(b, x))  # fmt: skip
    assert any(differing) == activations
