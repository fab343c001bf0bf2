"""How blocks are spread over the stages of a pipeline, and what that makes of the update."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwise.costs.calibration import IDENTITY
from meshwise.costs.estimate import estimate_training
from meshwise.costs.fabric import Fabric
from meshwise.costs.pipeline import Pipeline, chunk_shares, device_shares
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.schedules import SCHEDULES
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import Layout


@given(st.integers(1, 60), st.sampled_from(list(SCHEDULES)), st.data())
def test_layers_are_spread_whole_and_evenly(layers, name, data):
    stages = 2 * data.draw(st.integers(1, 8))
    virtual = data.draw(st.integers(2, 4)) if name == "interleaved" else 1
    pipeline = Pipeline.of(name, stages, 4 * stages, virtual)
    chunks = pipeline.num_chunks
    assume(chunks <= layers)
    first, middle, last = chunk_shares(layers, pipeline)
    counts = [layers * share["layer"] for share in (first, middle, last)]
    assert counts == [pytest.approx(round(n), abs=1e-9) for n in counts]
    a, k, z = map(round, counts)
    assert k - 1 <= z <= a <= k == -(-layers // chunks)
    # The others hold what is left: as many as the longest, or one layer fewer.
    left = layers - a - z
    assert (chunks - 2) * (k - 1) <= left <= (chunks - 2) * k
    assert left > (chunks - 2) * (k - 1) or chunks == 2
    assert (first["embed"], first["head"], last["embed"], last["head"]) == (1, 0, 0, 1)
    assert middle["embed"] == middle["head"] == 0


def test_126_layers_on_16_stages_as_they_were_trained():
    """LLaMA-3-405B: one layer less on the first and the last stage (Grattafiori et al. 2024, section 3.3.2)."""
    first, middle, last = chunk_shares(126, Pipeline.of("1f1b", 16, 16))
    assert [round(126 * share["layer"]) for share in (first, middle, last)] == [7, 8, 7]


def test_one_stage_has_everything():
    for shares in device_shares(7, Pipeline.of("1f1b", 1, 4)):
        assert shares == {"embed": 1, "layer": 1, "head": 1}


@pytest.mark.parametrize(("name", "chunks"), [("zb-v", 8), ("dualpipe-v", 8), ("dualpipe", 4)])
def test_folded_schedules_have_both_ends_on_one_device(name, chunks):
    """DualPipe's device stores two of four chunks where the others store two of eight: two copies of each."""
    first, middle, last = device_shares(32, Pipeline.of(name, 4, 8))
    assert first == last == {"embed": 1, "layer": 2 / chunks, "head": 1}
    assert middle == {"embed": 0, "layer": 2 / chunks, "head": 0}


@pytest.mark.parametrize("name", SCHEDULES)
def test_arrays_of_stages_give_what_their_entries_give(name):
    stages = [2.0, 4.0, 6.0] if name != "1f1b" else [1.0, 3.0, 4.0, 10.0]
    virtual = 2.0 if name == "interleaved" else 1.0
    together = device_shares(45, Pipeline.of(name, np.array(stages), 60.0, virtual))
    for i, p in enumerate(stages):
        for many, one in zip(together, device_shares(45, Pipeline.of(name, p, 60.0, virtual)), strict=True):
            for role in ("embed", "layer", "head"):
                assert np.broadcast_to(many[role], len(stages))[i] == one[role]


def test_the_update_waits_for_the_fuller_end_of_the_pipeline():
    """LLaMA-3-8B: 32 layers on 3 stages, 11 of them beside the embedding, 10 beside the head and its norm."""
    D, F, V, KH = 4096, 14336, 128256, 1024
    layer = 2 * D * D + 2 * D * KH + 3 * D * F + 2 * D
    cluster = parse_cluster("h100:3")
    job = TrainingJob(batch_tokens=str(6 * 8192), seq_len="8192", precision="book")
    layout = Layout(stage=3, num_microbatches=6, wires=(("stage", (3,)),))
    problem = TrainingProblem(load_model("llama-3-8b"), job, cluster, IDENTITY)
    seconds = estimate_training(problem, Fabric.of(cluster), layout).terms["optimizer"]
    # Two fp32 moments and bf16 weights are read and written, bf16 gradients read.
    num_bytes = (11 * layer + V * D) * (2 * 2 * 4 + 2 * 2 + 2)
    assert seconds == pytest.approx(num_bytes / cluster.chip.hbm_bandwidth, rel=1e-12)
