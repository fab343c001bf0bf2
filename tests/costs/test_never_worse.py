"""What is never worse: ZeRO stages in bytes and memory, the residual stream split, remat in memory."""

from dataclasses import replace

import numpy as np
import pytest

from meshwise.costs.calibration import CALIBRATIONS, Links
from meshwise.costs.estimate import evaluate_layout
from meshwise.costs.explain import paddings
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.lower import lowered_training
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.search import SearchSpace, search, training_limits
from meshwise.search.candidates import Choices
from meshwise.sharding import CollectiveKind
from meshwise.sharding.placed import Purpose, Transfer
from tests.costs.corpus import assume, every_case, one_of
from tests.costs.small_problems import REMATS, tiny

LESS = 1 + 1e-9


@every_case()
def test_stage_one_sends_no_more_and_holds_no_more_than_stage_zero(case):
    """The same bytes on the wires (unless switches add them up), and a share of the state."""
    problem, fabric, layout = case
    assume(not fabric.in_network_reduction)
    zero, one = (evaluate_layout(problem, fabric, layout.replace(zero=z)) for z in (0, 1))
    assert one.memory["total"] <= zero.memory["total"] * LESS
    # What is stored in uneven shards is padded, and the padding travels; whole copies have none.
    ways = {"data", "fsdp", "context"}
    assume(not any(ways & set(p.mesh_axes) for p in paddings(problem, layout.replace(zero=1))))
    # Where all replicas get the whole sum under stage 1, too, the weights' gathering comes on top. And the schedule of
    # an AllReduce, level by level, beats those of its two halves.
    if not (problem.calibration.whole_sums or fabric.flat_rings):
        # Two collectives start where one did: bytes and hops are compared, without start-ups.
        at_once = replace(problem.calibration, links=Links(problem.calibration.links.efficiency))
        bare = replace(problem, calibration=at_once)
        whole, halves = (evaluate_layout(bare, fabric, layout.replace(zero=z)).step.upper for z in (0, 1))
        assert halves <= whole * LESS
    networks = ("tensor", "context", "fsdp", "data")
    sent = [sum(c.step.resources[n] for n in networks) for c in (one, zero)]
    if layout.tensor == 1:  # else norms are summed apart, a few kilobytes
        assert sent[0] <= sent[1] * LESS
    # Scattered gradients hide behind the backward pass, gathered weights behind the forward pass, an AllReduce behind
    # the backward pass alone: stage 0 gains at most the weights' gathering that the forward pass does not cover.
    gained = one.step.expected - zero.step.expected
    assert gained <= (one.step.terms["data"] + 1e-12) * LESS


def test_stage_zero_is_looked_at_because_it_can_be_faster():
    """Over a slow network, behind a backward pass that is long because it computes the forward pass again."""
    cluster = parse_cluster("v5p:2x2x1*2")
    job = TrainingJob(batch_tokens="64Ki", seq_len="8192", batch_slack="0%", precision="book")
    problem = TrainingProblem(tiny(layers=8, width=4096, hidden=16384, heads=32), job, cluster, CALIBRATIONS["tpu"])
    fabric, limits = Fabric.of(cluster), training_limits(problem, {"data": 2, "fsdp": 4})
    found = [
        search(problem, [fabric], SearchSpace(limits, Choices(zero=zeros, remat=("full",))), top=1)
        .best[0]
        .seconds_per_token
        for zeros in ((0,), (1,), (0, 1, 2))
    ]
    assert found[0] < found[1]
    assert found[2] == found[0]


@every_case()
def test_splitting_the_residual_never_holds_more(case):
    problem, fabric, layout = case
    assume(problem.job.seq_len % (layout.context * layout.tensor) == 0)
    off, on = (evaluate_layout(problem, fabric, layout.replace(sequence_parallel=s)).memory for s in (False, True))
    assert on["activations"] <= off["activations"] * LESS
    assert on["total"] <= off["total"] * LESS


@pytest.mark.parametrize("remat", REMATS)
def test_splitting_the_residual_never_sends_more_but_for_what_it_gathers_again(remat):
    """An AllReduce is a scatter and a gather; inputs of matmuls are gathered again in the backward pass."""
    model = tiny()

    def sent(sequence_parallel):
        weight = {CollectiveKind.ALL_REDUCE: 2, CollectiveKind.ALL_GATHER: 1, CollectiveKind.REDUCE_SCATTER: 1}
        job = TrainingJob(batch_tokens="1Ki", seq_len="1Ki", precision="book")
        lowered = lowered_training(model, job.formats, job.tuning, job.optimizer_kind)
        blocks = lowered.training(LayoutChoices(1, sequence_parallel, remat))
        (layer,) = (b.placed for b in blocks if b.role == "layer")
        passes = []
        for items in (layer.forward, layer.backward):
            moves = [t for t in items if isinstance(t, Transfer) and t.purpose is Purpose.ACTIVATIONS]
            passes.append(sum(weight[t.collective.kind] for t in moves if t.collective.mesh_axes == ("tensor",)))
        return passes

    forward, backward = sent(True)
    assert forward == sent(False)[0] == 4
    # Gathered again backward: the inputs of attention and feed-forward (Korthikanti et al. 2022, section 4.2.2).
    assert backward - sent(False)[1] <= 2


@every_case(one_of(1, 2, 3))
def test_remat_trades_time_for_activations(case, i):
    """Each policy keeps no more than the one before it, and recomputes no less."""
    problem, fabric, layout = case
    less, more = (evaluate_layout(problem, fabric, layout.replace(remat=r)) for r in (REMATS[i - 1], REMATS[i]))
    assert more.memory["activations"] <= less.memory["activations"] * LESS
    assert more.step.terms["recompute"] >= less.step.terms["recompute"]
    assert np.isfinite(more.step.expected)
