"""What expert parallelism, Ulysses and rings move in a layer of published models, on paper."""

from collections import Counter

import pytest

from meshwise.costs.calibration import IDENTITY
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.local import whole_extents
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding import CollectiveKind
from meshwise.sharding.layout import Layout
from meshwise.sharding.placed import Purpose

T = 4096
BF16 = 2


def moved(model, block, kinds, **layout):
    """(pass, kind, mesh axes) -> bytes that a device sends of activations, in one layer's pass over one sequence."""
    chosen = Layout(**layout)
    job = TrainingJob(batch_tokens=str(chosen.sequences * T), seq_len=str(T), precision="bf16", expert_imbalance=1.0)
    problem = TrainingProblem(load_model(model), job, parse_cluster("h100:64"), IDENTITY)
    structure = LayoutChoices.of(chosen)
    sizes = {a: float(n) for a, n in chosen.sizes.items()}
    extents = whole_extents(problem, structure, Candidates(**sizes, micro_batch=1.0, num_microbatches=1.0))
    (planned,) = (b for b in problem.lowered.training(structure) if b.placed.block.name == block)
    total = Counter()
    for one in planned.collectives:
        kind, mesh_axes, _, _ = one.key
        n = extents.devices(mesh_axes)
        if n > 1 and one.purpose in (Purpose.ACTIVATIONS, Purpose.RING) and kind in kinds:
            whole = one.bytes(extents) / (n if kind is CollectiveKind.ALL_TO_ALL else 1)
            total[str(one.when), str(kind), mesh_axes] += one.count * whole * (1 - 1 / n)
    return {key: n for key, n in total.items() if n}


EXCHANGE = (CollectiveKind.ALL_TO_ALL,)
AROUND = (CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def test_mixtral_dispatches_and_combines_two_copies_of_every_token():
    """D = 4096, top 2 of 8 experts, one on each of eight GPUs: 7/8 of the copies leave, and come back.

    Their gates leave with them, and the gradients of gates come back with those of tokens.
    """
    one, gates = T * 2 * 4096 * BF16 * 7 / 8, T * 2 * BF16 * 7 / 8
    found = moved("mixtral-8x7b", "layer", EXCHANGE, expert=8, remat="none")
    both = 2 * one + gates
    assert found == {("forward", "all-to-all", ("expert",)): both, ("backward", "all-to-all", ("expert",)): both}


def test_a_layer_that_is_computed_again_is_dispatched_again():
    """Slots are made again; what experts make of them is only added up, and need not come back again."""
    one, gates = T * 2 * 4096 * BF16 * 7 / 8, T * 2 * BF16 * 7 / 8
    found = moved("mixtral-8x7b", "layer", EXCHANGE, expert=8, remat="full")
    assert found == {
        ("forward", "all-to-all", ("expert",)): 2 * one + gates,
        ("backward", "all-to-all", ("expert",)): 3 * one + 2 * gates,
    }


def test_deepseek_v3_over_64_gpus():
    """D = 7168, top 8 of 256: 8 copies of every token, 63/64 of them to other GPUs."""
    one, gates = T * 8 * 7168 * BF16 * 63 / 64, T * 8 * BF16 * 63 / 64
    found = moved("deepseek-v3", "layer.moe", EXCHANGE, expert=64, remat="none")
    both = 2 * one + gates
    assert found == {("forward", "all-to-all", ("expert",)): both, ("backward", "all-to-all", ("expert",)): both}


def test_llama_4_weighs_tokens_before_they_leave():
    """D = 5120, one of 16 experts: no gate travels."""
    one = T * 5120 * BF16 * 15 / 16
    found = moved("llama-4-scout", "layer.global", EXCHANGE, expert=16, remat="none")
    assert found == {("forward", "all-to-all", ("expert",)): 2 * one, ("backward", "all-to-all", ("expert",)): 2 * one}


def test_gates_travel_with_their_tokens():
    """A dispatch starts one collective, not two; so does what brings gradients back."""
    job = TrainingJob(batch_tokens=str(T * 8), seq_len=str(T), precision="bf16")
    problem = TrainingProblem(load_model("mixtral-8x7b"), job, parse_cluster("h100:64"), IDENTITY)
    blocks = problem.lowered.training(LayoutChoices.of(Layout(expert=8, remat="full")))
    (planned,) = (b for b in blocks if b.placed.block.name == "layer")
    exchanges = [p for p in planned.collectives if p.key.mesh_axes == ("expert",) and p.key.kind in EXCHANGE]
    counts = Counter()
    for plan in exchanges:
        counts[plan.when] += plan.count
    assert counts == {"forward": 2, "backward": 3}  # out and back; out again, gradients out and back
    tensors = {tuple(t.tensor.name for t in p.transfers) for p in exchanges if len(p.transfers) == 2 * p.count}
    assert tensors == {("slots", "slot_gates"), ("d_slots", "d_slot_gates")}


def test_experts_divided_by_tensor_parallelism_exchange_a_share_and_gather_it():
    """Tensor 2 x expert 8: a GPU sends the copies of half the positions, and gathers the other half on arrival."""
    slots, gates = T * 2 * 4096 * BF16, T * 2 * BF16
    found = moved("mixtral-8x7b", "layer", AROUND, expert=8, tensor=2, remat="none")
    stream = T * 4096 * BF16 / 2  # of the residual stream around attention, gathered and scattered over tensor
    assert found["forward", "all-to-all", ("expert",)] == (2 * slots + gates) / 2 * 7 / 8
    assert found["backward", "all-to-all", ("expert",)] == (2 * slots + gates) / 2 * 7 / 8
    assert found["forward", "all-gather", ("tensor",)] == slots / 2 + gates / 2 + stream
    assert found["forward", "reduce-scatter", ("tensor",)] == slots / 2 + stream


def test_whole_experts_over_both_axes_exchange_a_share_and_gather_nothing():
    slots, gates = T * 2 * 4096 * BF16, T * 2 * BF16
    found = moved("mixtral-8x7b", "layer", AROUND, expert=4, tensor=2, expert_tensor_parallel=False, remat="none")
    stream = T * 4096 * BF16 / 2
    assert found["forward", "all-to-all", ("expert", "tensor")] == (2 * slots + gates) / 2 * 7 / 8
    assert found["forward", "all-gather", ("tensor",)] == stream
    assert found["forward", "reduce-scatter", ("tensor",)] == stream


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_llama_keys_and_values_of_all_other_positions(method):
    """Eight key/value heads of 128: k and v of 7/8 of the positions; in the backward pass their gradients too."""
    kv = 2 * T * 8 * 128 * BF16 * 7 / 8
    found = moved("llama-3-8b", "layer", AROUND, context=8, context_method=method, remat="none")
    assert found == {
        ("forward", "all-gather", ("context",)): kv,
        ("backward", "all-gather", ("context",)): kv,
        ("backward", "reduce-scatter", ("context",)): kv,
    }


def test_llama_ulysses_moves_shares_of_heads():
    """q and attention's output of 32 heads, k and v of 8: each GPU's eighth of the positions, 7/8 of which leaves."""
    share = T / 8 * 128 * BF16 * 7 / 8
    found = moved("llama-3-8b", "layer", AROUND, ulysses=8, remat="none")
    forward = (32 + 8 + 8 + 32) * share
    assert found == {
        ("forward", "all-to-all", ("ulysses",)): forward,
        ("backward", "all-to-all", ("ulysses",)): forward + 32 * share,  # and attention's output, for w_o's gradient
    }
