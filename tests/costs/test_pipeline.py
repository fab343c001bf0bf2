"""How blocks are spread over the stages of a pipeline, and what that makes of the update."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.costs.calibration import IDENTITY
from meshwise.costs.estimate import estimate_training
from meshwise.costs.evaluate import TrainingProblem
from meshwise.costs.network import Fabric
from meshwise.costs.pipeline import num_layers, stage_shares
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import Layout
from meshwise.tensors import Block


@given(st.lists(st.integers(1, 60), min_size=1, max_size=3), st.data())
def test_the_fullest_stage_has_whole_layers_and_no_more_than_it_must(repeats, data):
    blocks = [Block("layer", (), repeat=n) for n in repeats]
    layers = num_layers(blocks)
    stages = data.draw(st.integers(1, layers))
    first, last = stage_shares([Block("embed", (), role="embed"), *blocks, Block("head", (), role="head")], stages)
    assert first["layer"] == last["layer"]
    assert first["layer"] * layers == pytest.approx(-(-layers // stages))
    assert (first["embed"], last["head"]) == (1, 1)
    assert first["head"] == last["embed"] == (stages == 1)


def test_arrays_of_stages_give_what_their_entries_give():
    blocks = [Block("layer", (), repeat=10)]
    stages = np.array([1.0, 3.0, 4.0, 10.0])
    for many, *alone in zip(stage_shares(blocks, stages), *(stage_shares(blocks, s) for s in stages), strict=True):
        for role in ("embed", "layer", "head"):
            assert list(np.broadcast_to(many[role], 4)) == [one[role] for one in alone]


def test_the_update_waits_for_the_fuller_end_of_the_pipeline():
    """LLaMA-3-8B: 32 layers on 3 stages, 11 of them beside the head and its norm."""
    D, F, V, KH = 4096, 14336, 128256, 1024
    layer = 2 * D * D + 2 * D * KH + 3 * D * F + 2 * D
    cluster = parse_cluster("h100:3")
    job = TrainingJob(batch_tokens=str(6 * 8192), seq_len="8192")
    layout = Layout(stage=3, num_microbatches=6, wires=(("stage", (3,)),))
    problem = TrainingProblem(load_model("llama-3-8b"), job, cluster, IDENTITY)
    seconds = estimate_training(problem, Fabric.of(cluster), layout).terms["optimizer"]
    # Two fp32 moments and bf16 weights are read and written, bf16 gradients read.
    num_bytes = (11 * layer + V * D + D) * (2 * 2 * 4 + 2 * 2 + 2)
    assert seconds == pytest.approx(num_bytes / cluster.chip.hbm_bandwidth, rel=1e-12)
