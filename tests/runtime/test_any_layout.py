"""Random small models on random layouts of the search's own space: all give the loss and gradients of one device."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwise.core.errors import LayoutError
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.search.space import Limits, meshes
from meshwise.sharding.layout import COLLECTIVE_MATMULS, MESH_AXES, Layout
from tests.runtime.steps import alone, dense, loss_and_gradients, make, worst

#: Sizes that every mesh of 8 divides, so that few draws are refused.
DENSE = "D=32 F=64 L=4 N=8 K=8 H=8 V=64"
MIXTURE = "D=32 L=4 N=8 K=8 H=8 V=64 E=8 top_k=2 Fe=32 Fs=32"
EXTRAS = ("", " window=5", " bias=yes norm=layer", " tied=yes positions=16", " parallel=yes gated=no")
LARGEST = {"tensor": 8, "ulysses": 8, "context": 8, "fsdp": 8, "data": 8, "stage": 4}


@st.composite
def plans(draw):
    mixture = draw(st.booleans())
    limits = Limits({**LARGEST, "expert": 8 if mixture else 1}, max_replicas=8)
    model = dense((MIXTURE if mixture else DENSE) + draw(st.sampled_from(EXTRAS)))
    rows = meshes(8, limits)
    row = rows[draw(st.integers(0, len(rows) - 1))]
    sizes = {axis: int(n) for axis, n in zip(MESH_AXES, row, strict=True)}
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"])) if sizes["stage"] > 1 else "1f1b"
    pieces = 2 if schedule == "interleaved" and sizes["stage"] == 2 else 1
    sequence_parallel = draw(st.booleans())
    return model, Layout(
        **sizes,
        zero=draw(st.sampled_from([0, 1, 2])),
        fully_sharded=draw(st.booleans()),
        sequence_parallel=sequence_parallel,
        expert_tensor_parallel=not sequence_parallel or draw(st.booleans()),
        context_method=draw(st.sampled_from(["gather", "ring"])),
        collective_matmul=draw(st.sampled_from(COLLECTIVE_MATMULS)),
        schedule=schedule,
        virtual_stages=pieces,
        remat=draw(st.sampled_from(["none", "matmuls", "attention", "full"])),
        num_microbatches=draw(st.sampled_from([1, 2, 4])) * sizes["stage"],
    )


@pytest.mark.slow  # each plan is a program that is compiled; it proves that choices compose
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plans())
def test_any_plan_gives_the_gradients_of_one_device(plan):
    model, layout = plan
    try:
        step = make(model, layout)
    except LayoutError as refusal:
        assert "equal" in str(refusal)  # noqa: PT017 -- the only reason that such a layout may be refused for
        return
    expected_loss, expected = alone(model, layout.sequences)
    loss, found = loss_and_gradients(step)
    assert np.isfinite(loss)
    assert loss == pytest.approx(expected_loss, rel=1e-5), LayoutChoices.of(layout)
    assert worst(found, expected) < 1e-5
