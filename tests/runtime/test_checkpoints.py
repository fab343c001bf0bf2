"""A state that was saved under one layout is loaded under others, to the last bit."""

import jax
import numpy as np
import pytest

from meshwise.runtime.checkpoints import Checkpoints
from meshwise.sharding.layout import Layout
from tests.runtime.steps import by_layer, configured, make, state_of
from tests.runtime.test_models import MODELS

IDENTITY = {"model": {"name": "small"}, "job": {}, "run": {}}
#: Each splits, stacks or numbers something that another does not.
LAYOUTS = {
    "fsdp-and-tensor": Layout(fsdp=2, tensor=2, num_microbatches=2),
    "pipeline": Layout(stage=2, fsdp=2, num_microbatches=4, schedule="1f1b"),
    "interleaved": Layout(stage=2, virtual_stages=2, tensor=2, num_microbatches=4, schedule="interleaved"),
    "experts": Layout(expert=4, tensor=2),
    "some-recomputed": Layout(data=2, zero=1, fsdp=2, remat_layers=1),
    "offloaded": Layout(fsdp=2, tensor=2, offload=("optimizer",)),
}


def split(layout):
    return make(configured("qwen3_moe", MODELS["qwen3_moe"]), layout, precision="mixed")


def kept(folder, step):
    return Checkpoints.open(folder, IDENTITY, 1, step, told=lambda _: None)


def parts(step, state):
    """Block -> name -> [layers, ...] of weights, master copy and each moment."""
    trees = {"weights": state["weights"], "master": state["master"], **state["moments"]}
    return {part: by_layer(step, tree) for part, tree in trees.items()}


@pytest.mark.jax
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_state_is_loaded_under_every_layout_bit_for_bit(name, tmp_path):
    step = split(LAYOUTS[name])
    state = state_of(step)
    rng = np.random.default_rng(1)
    state["moments"] = jax.tree.map(
        lambda a: jax.device_put(rng.normal(size=a.shape).astype(a.dtype), a.sharding), state["moments"]
    )
    saved = kept(tmp_path, step)
    saved.save(3, {**state, "step": jax.device_put(np.int32(3), state["step"].sharding)})
    saved.close()
    expected = parts(step, state)
    for layout in LAYOUTS.values():
        other = split(layout)
        reader = kept(tmp_path, other)
        number, found = reader.load(other)
        reader.close()
        assert (number, int(found["step"])) == (3, 3)
        jax.tree.map(np.testing.assert_array_equal, parts(other, found), expected)
        shardings = jax.tree.map(lambda a: a.sharding, other.abstract_state)
        assert jax.tree.all(jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), found, shardings))
