"""Weights over more ways than the model is wide: a second dimension is split, and nothing is padded."""

import pytest

import meshwise
from meshwise.costs.explain import paddings


@pytest.mark.parametrize(
    ("layout", "chips"), [("fsdp=8192,data=2", 16384), ("fsdp=16384", 16384), ("fsdp=32768", 32768)]
)
def test_weights_are_stored_once_in_the_cluster(layout, chips):
    (plan,) = meshwise.estimate_train(
        "llama-3-70b", on=f"h100:{chips}", batch_tokens="256Mi", seq_len=8192, layout=layout
    ).plans
    ways = plan.layout.fsdp
    stored = 2 * plan.problem.model.parameters.total / ways
    assert plan.estimate.memory["parameters"] == pytest.approx(stored, rel=0.001)
    assert "D" not in {p.axis for p in paddings(plan.problem, plan.layout)}
    assert plan.estimate.memory["optimizer"] == pytest.approx(4 * stored * ways / chips, rel=0.001)


def test_more_ways_send_no_more():
    """Each chip gathers all weights, less its own part: as many bytes over 8,192 chips as over 32,768."""

    def busy(ways):
        (plan,) = meshwise.estimate_train(
            "llama-3-70b",
            on=f"h100:{ways}",
            batch_tokens=ways * 4096,
            seq_len=4096,
            layout=f"fsdp={ways},micro_batch=1,num_microbatches=1,remat=full",
        ).plans
        return plan.estimate.resources["fsdp"]

    assert busy(32768) == pytest.approx(busy(8192), rel=0.02)
