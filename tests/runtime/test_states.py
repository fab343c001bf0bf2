"""States stacked anew for another layout: every weight of every layer arrives where it belongs."""

import jax
import numpy as np
import pytest

from meshwise.runtime.states import rearranged
from meshwise.sharding.layout import Layout
from tests.runtime.steps import configured, dense, make, weights_of

FOUR = "D=32 F=64 L=4 N=8 K=4 H=8 V=64"

#: Layers with and without a window in turn.
WINDOWS = {
    "model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "intermediate_size": 64,
    "hidden_act": "gelu_pytorch_tanh", "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip

LAYOUTS = (
    Layout(micro_batch=4, num_microbatches=4),
    Layout(fsdp=2, micro_batch=2, num_microbatches=4, remat="full", remat_layers=1),
    Layout(stage=2, micro_batch=2, num_microbatches=8, schedule="1f1b"),
    Layout(stage=2, virtual_stages=2, tensor=2, micro_batch=4, num_microbatches=4, schedule="interleaved"),
    Layout(stage=2, fsdp=2, micro_batch=2, num_microbatches=4, schedule="gpipe", remat="full", remat_layers=2),
)


def drawn(step):
    """A state whose weights and moments depend on block, layer and name alone."""
    weights, mean = (jax.tree.map(np.asarray, weights_of(step, seed)) for seed in (0, 1))
    return {"step": np.int32(3), "weights": weights, "moments": {"mean": mean, "variance": weights}}


def model(kind):
    if kind == "dense":
        return dense(FOUR)
    longer = {"num_hidden_layers": 6, "sliding_window_pattern": 3} if kind == "periods" else {}
    return configured(kind, WINDOWS | longer)


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        *(("dense", LAYOUTS[0], other) for other in LAYOUTS[1:]),
        ("dense", LAYOUTS[1], LAYOUTS[3]),
        *(("windows", LAYOUTS[0], other) for other in (LAYOUTS[1], LAYOUTS[4])),
        ("periods", Layout(micro_batch=4, remat="full"), Layout(micro_batch=4, remat="none")),
    ],
    ids=str,
)
def test_every_weight_arrives_where_it_belongs(kind, one, other):
    steps = [make(model(kind), layout) for layout in (one, other)]
    for old, new in (steps, reversed(steps)):
        moved, expected = rearranged(drawn(old), old.layer_order, new), drawn(new)
        assert jax.tree.structure(moved) == jax.tree.structure(expected)
        assert jax.tree.all(jax.tree.map(np.array_equal, moved, expected))


def test_layouts_that_stack_alike_have_one_order():
    one, two = make(dense(FOUR), Layout(fsdp=2)), make(dense(FOUR), Layout(data=2, tensor=2))
    assert one.layer_order == two.layer_order
    assert one.layer_order["layer"] == {"block": "layer", "layers": [0, 1, 2, 3], "stack": [4]}
    assert one.layer_order["embed"] == {"block": "embed", "layers": [0], "stack": []}
