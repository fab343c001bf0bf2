"""Attention whose keys have the queries' own heads (latent attention): tensor parallelism splits the heads."""

from meshwise.core.tensors import Attention
from meshwise.models import load_model
from meshwise.sharding.place import place_block
from meshwise.sharding.remat import remat_policy
from meshwise.sharding.strategy import iteration_space, training_strategy


def test_latent_attention_is_split_by_heads_and_moves_nothing_itself():
    block = next(b for b in load_model("deepseek-v3").train_program() if b.role == "layer")
    attention = next(op for op in block.ops if isinstance(op, Attention))
    assert attention.heads_axis == attention.kv_heads_axis
    strategy = training_strategy(zero=1, sequence=True)
    space = iteration_space(strategy, attention)
    assert space[attention.heads_axis] == ("tensor", "ulysses")
    assert "tensor" not in space[attention.query_axis]
    placed = place_block(block, strategy, remat_policy("full"))
    local = {t.name for t in (*attention.inputs, attention.output)}
    moved = {
        item.tensor.name
        for item in (*placed.forward, *placed.backward)
        if hasattr(item, "collective") and "tensor" in item.collective.mesh_axes
    }
    assert moved
    assert not moved & local
