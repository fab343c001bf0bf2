"""Plans for the tests of the hand-over, with wires laid innermost first; no search, and nothing is priced."""

import math
from pathlib import Path

from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.models.reading import read_config
from meshwise.search import Plan
from meshwise.sharding.layout import MESH_AXES, Layout

DATA = Path(__file__).parents[1] / "data" / "export"

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TINY_MIXTURE = {
    **{k: v for k, v in TINY.items() if k != "tie_word_embeddings"},
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


def tiny(config=TINY):
    return read_config(dict(config), name="tiny", where="tests")


def laid(layout, sizes):
    """Fill the dimensions of the network with the mesh axes, innermost first."""
    room, wires = list(sizes), []
    for axis in MESH_AXES:
        left, extents = layout.sizes[axis], []
        for number, free in enumerate(room):
            extent = math.gcd(left, free)
            extents.append(extent)
            left //= extent
            room[number] //= extent
        assert left == 1, f"{axis} does not fit on {sizes}"
        wires.append((axis, tuple(extents)))
    return tuple(wires)


def make_plan(model, on, *, seq_len=4096, precision="mixed", optimizer="adamw", wires=None, job=None, **layout):
    model = load_model(model) if isinstance(model, str) else model
    cluster = parse_cluster(on)
    calibration = find_calibration("operations", cluster.chip)
    fabric = Fabric.of(cluster, flat_rings=calibration.flat_rings)
    chosen = Layout(**layout)
    assert chosen.num_chips == cluster.num_chips
    chosen = chosen.replace(wires=wires or laid(chosen, fabric.sizes))
    job = TrainingJob(
        batch_tokens=chosen.sequences * seq_len,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        **(job or {}),
    )
    return Plan(TrainingProblem(model, job, cluster, calibration), chosen, fabric, None, None)


#: Name -> (the plan, the tools that it is handed over to); the texts stand in tests/data/export.
CASES = {
    "dense-tpu": (
        lambda: make_plan(
            "llama-3-8b", "v5p:4x4x4", fsdp=16, tensor=4, remat="matmuls", micro_batch=1, num_microbatches=2
        ),
        ("maxtext", "jax"),
    ),
    "dense-gpu": (
        lambda: make_plan(
            "llama-3-70b", "h100-sxm:128", data=4, tensor=8, stage=4, zero=1, remat="full", num_microbatches=16
        ),
        ("megatron",),
    ),
    "long-context": (
        lambda: make_plan(
            "llama-3.1-8b", "h100-sxm:64", seq_len=131072, context=4, ulysses=2, tensor=4, data=2,
            context_method="ring", zero=1, fully_sharded=False, remat="attention",
        ),
        ("megatron",),
    ),
    "sharded-gpu": (
        lambda: make_plan("llama-3-70b", "h100-sxm:64", data=2, fsdp=8, tensor=4, remat="full", num_microbatches=2),
        ("torchtitan", "megatron"),
    ),
    "pipeline": (
        lambda: make_plan(
            "llama-3-70b", "h100-sxm:64", fsdp=2, tensor=8, stage=4, schedule="zb-v", remat="full",
            num_microbatches=8,
        ),
        ("torchtitan",),
    ),
    "interleaved": (
        lambda: make_plan(
            "llama-3-70b", "h100-sxm:64", data=2, tensor=8, stage=4, zero=1, schedule="interleaved", virtual_stages=5,
            remat="full", remat_layers=40, num_microbatches=8,
        ),
        ("megatron",),
    ),
    "offloaded": (
        lambda: make_plan(
            "llama-3-8b", "h100-sxm:16", fsdp=8, ulysses=2, remat="full", offload=("optimizer",), num_microbatches=4
        ),
        ("deepspeed",),
    ),
    "mixture": (
        lambda: make_plan(
            "deepseek-v3", "h100-sxm:2048", data=2, expert=64, stage=16, zero=1, fully_sharded=False, remat="full",
            num_microbatches=60,
        ),
        ("megatron",),
    ),
    "slices": (
        lambda: make_plan(
            "mixtral-8x7b", "v5p:2x4x4*2", data=2, fsdp=4, expert=4, tensor=2, remat="attention",
            num_microbatches=2,
        ),
        ("maxtext", "jax"),
    ),
    "sharded-mixture": (
        lambda: make_plan("mixtral-8x7b", "h100-sxm:32", fsdp=8, expert=4, remat="full", micro_batch=2),
        ("torchtitan", "deepspeed", "megatron"),
    ),
}  # fmt: skip

HANDED = [(case, tool) for case, (_, tools) in CASES.items() for tool in tools]
