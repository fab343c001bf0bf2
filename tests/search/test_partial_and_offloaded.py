"""Layouts of which some layers recompute, or parts live on the host, as users write them."""

import json

import pytest

from meshwise.core.errors import LayoutError, UnknownNameError
from meshwise.costs.calibration import IDENTITY
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.search import Plan
from meshwise.search.planner import estimate_layout
from meshwise.sharding.layout import parse_layout


def planned(layout: str, *, on="h100:8", model="llama-3-8b", sequences=16) -> Plan:
    cluster = parse_cluster(on)
    job = TrainingJob(batch_tokens=str(sequences * 4096), seq_len="4096")
    problem = TrainingProblem(load_model(model), job, cluster, IDENTITY)
    return estimate_layout(problem, parse_layout(layout, num_chips=cluster.num_chips)).plans[0]


def test_what_was_written_is_what_is_estimated():
    plan = planned("fsdp=8,remat=full:20,offload=optimizer+activations:16")
    assert (plan.layout.remat, plan.layout.remat_layers) == ("full", 20)
    assert (plan.layout.offload, plan.layout.offload_layers) == (("optimizer", "activations"), 16)
    assert "remat=full,remat_layers=20,offload=optimizer+activations,offload_layers=16" in str(plan.layout)
    assert plan.estimate.host_memory["total"] > 0
    again = Plan.from_json(plan.to_json())
    assert again.layout == plan.layout
    assert again.estimate == plan.estimate
    assert json.loads(plan.to_json())["layout"]["offload"] == ["optimizer", "activations"]


def test_what_was_not_written_is_chosen():
    """With the optimizer on the host there is room to keep more, or to work on more at once."""
    at_home, away = planned("fsdp=8"), planned("fsdp=8,offload=optimizer")
    assert away.layout.offload == ("optimizer",)
    assert away.estimate.fits
    assert away.layout.remat in {"none", "matmuls", "attention", "full"}
    assert planned("fsdp=8,remat_layers=8").layout.remat != "none"
    assert at_home.layout.offload == ()


def test_a_layout_that_fits_only_with_the_host():
    """8B parameters with 12 bytes each on one GPU of 80 GB: the optimizer must go."""
    at_home = planned("data=1,remat=full", on="h100:1", sequences=1)
    away = planned("data=1,remat=full,offload=optimizer", on="h100:1", sequences=1)
    assert not at_home.estimate.fits
    assert away.estimate.fits


def test_refusals_come_before_the_search():
    with pytest.raises(UnknownNameError, match=r"unknown operation of a layer \(remat\) 'moe_act'"):
        planned("fsdp=8,remat=recompute:moe_act")
    with pytest.raises(
        LayoutError, match="offload=parameters needs the host's memory, which is not known for h800-sxm"
    ):
        planned("fsdp=8,offload=parameters", on="h800:8")
    with pytest.raises(LayoutError, match="remat_layers=40 is more than the 32 layers of llama-3-8b"):
        planned("fsdp=8,remat=full:40")
    with pytest.raises(LayoutError, match="offload_layers=8 is of activations, which stay on the chip"):
        planned("fsdp=8,offload=optimizer,offload_layers=8")
