"""In which format tokens travel to experts in serving: as docs/serving.md says, that of activations."""

import pytest

from meshwise.core.tensors import Route
from meshwise.costs.engines import find_serving_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import SERVING_PRECISIONS, ServingLoad
from meshwise.models import load_model
from meshwise.sharding.serving import ServingLayoutChoices


@pytest.mark.parametrize("precision", sorted(SERVING_PRECISIONS))
def test_tokens_are_dispatched_as_activations_are(precision):
    cluster = parse_cluster("h200:8")
    load = ServingLoad(prompt=1024, output=128, precision=precision)
    calibration = find_serving_calibration("operations", cluster.chip)
    problem = ServingProblem(load_model("mixtral-8x7b"), load, cluster, calibration)
    for step in ("prefill", "decode"):
        routes = [
            op for b in problem.lowered(step, ServingLayoutChoices()).program for op in b.ops if isinstance(op, Route)
        ]
        assert {op.name.partition(".")[0] for op in routes} == {"dispatch", "combine"}
        for op in routes:
            assert op.output.dtype is None, "None is the format of activations"
            assert op.inputs[0].dtype is None
