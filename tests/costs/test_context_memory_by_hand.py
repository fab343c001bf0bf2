"""What each way to split a long sequence holds of keys and values, on paper: LLaMA-3-8B on eight H100, 128k tokens."""

import math

import pytest

from meshwise.costs.calibration import IDENTITY
from meshwise.costs.evaluate import evaluate
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.local import evaluate_local, local_prices
from meshwise.costs.network import NO_WIRE
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import Layout

T, N = 131072, 8
D, F, HEADS, KV_HEADS, H, L = 4096, 14336, 32, 8, 128, 32
BF16 = 2
LACKING = 1 - 1 / N  # what is gathered, besides the own shard


def costs(**layout):
    """Memory of the layout, and the buffers of one layer."""
    chosen = Layout(**layout)
    job = TrainingJob(batch_tokens=str(chosen.sequences * T), seq_len=str(T), precision="bf16")
    problem = TrainingProblem(load_model("llama-3-8b"), job, parse_cluster("h100:8"), IDENTITY)
    structure = LayoutChoices.of(chosen)
    sizes = {a: float(n) for a, n in chosen.sizes.items()}
    candidates = Candidates(**sizes, micro_batch=1.0, num_microbatches=1.0)
    memory = evaluate(problem, structure, candidates, lambda _: NO_WIRE).memory
    (layer,) = (
        local.memory.buffers
        for local, block in zip(
            evaluate_local(problem, structure, local_prices(problem, structure, candidates.local)),
            problem.model.train_program(),
            strict=True,
        )
        if block.role == "layer"
    )
    return memory, layer


KEYS = T * KV_HEADS * H * BF16  # of the whole sequence; values are as many
QUERIES = T * HEADS * H * BF16


def test_gathering_holds_all_keys_or_values():
    _, buffer = costs(context=N)
    assert buffer == KEYS * LACKING


def test_a_ring_holds_two_shards():
    """One at work, one on its way: 2/N instead of all."""
    _, buffer = costs(context=N, context_method="ring")
    assert buffer == 2 * KEYS / N * LACKING


def test_ulysses_sends_its_own_share_of_the_queries():
    """It exchanges what it has: all positions of 1/N of the heads are as many bytes as 1/N of the positions."""
    _, buffer = costs(ulysses=N)
    assert buffer == QUERIES / N * LACKING


def test_the_product_of_both_gathers_the_own_heads_only():
    _, gathered = costs(context=4, ulysses=2)
    assert gathered == KEYS / 2 * (1 - 1 / 4)
    _, ring = costs(context=4, ulysses=2, context_method="ring")
    assert ring == max(2 * KEYS / 2 / 4 * (1 - 1 / 4), QUERIES / N * (1 - 1 / 2))  # a ring's, or the exchange's


@pytest.mark.parametrize(
    "layout",
    [
        {"context": N},
        {"context": N, "context_method": "ring"},
        {"ulysses": N},
        {"context": 4, "ulysses": 2},
        {"tensor": N},
    ],
    ids=str,
)
def test_all_of_them_keep_one_share_of_each_activation(layout):
    """x, its norm, q, k, v, attention's output, the middle, its norm, gate, up, their product: 1/N of the positions."""
    kept = 4 * D + 2 * HEADS * H + 2 * KV_HEADS * H + 3 * F
    memory, _ = costs(**layout, remat="none")
    assert memory["activations"] == L * kept * T / N * BF16


def test_without_them_one_gpu_keeps_the_whole_sequence():
    memory, buffer = costs(fsdp=N, remat="none")
    alone, _ = costs(context=N, remat="none")
    assert memory["activations"] == N * alone["activations"]
    assert buffer == 0


def test_ulysses_beyond_the_heads_of_keys_pads_them():
    """Sixteen ways for eight heads of keys and values: every device has one, twice its share."""
    memory, _ = costs(ulysses=16, remat="none")
    kept = 4 * D + 2 * HEADS * H + 2 * (2 * KV_HEADS) * H + 3 * F
    assert memory["activations"] == math.ceil(L * kept * T / 16 * BF16)
