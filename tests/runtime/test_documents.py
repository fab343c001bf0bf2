"""Several documents in a sequence: each has the losses it has alone, and all layouts give what one device gives."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from meshwise.core.errors import ConfigError
from meshwise.core.tensors import Attention, Program
from meshwise.runtime.refusals import check_documents
from meshwise.sharding.layout import Layout
from tests.runtime.steps import LENGTH, alone, batch_of, configured, dense, loss_and_gradients, make, weights_of, worst
from tests.runtime.test_models import MODELS

LAYOUTS = {
    "replicas": {"data": 2, "fsdp": 2, "tensor": 2, "num_microbatches": 2},
    "ring": {"context": 4, "context_method": "ring"},
    "ring-both-remat": {"context": 2, "context_method": "ring", "tensor": 2, "remat": "full"},
    "keys-gathered": {"context": 2, "fsdp": 2},
    "ulysses": {"ulysses": 2, "tensor": 2},
    "gpipe": {"stage": 2, "fsdp": 2, "num_microbatches": 4, "schedule": "gpipe"},
    "1f1b": {"stage": 2, "tensor": 2, "num_microbatches": 4, "remat": "full"},
    "interleaved": {"stage": 2, "virtual_stages": 2, "context": 2, "num_microbatches": 2, "schedule": "interleaved"},
}
FOUR = "D=32 F=64 L=4 N=8 K=4 H=8 V=64"


@pytest.mark.parametrize("name", [n if n == "ring" else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_any_layout_keeps_documents_apart(name):
    layout, model = Layout(**LAYOUTS[name]), dense(FOUR)
    expected_loss, expected = alone(model, layout.sequences, documents=True)
    loss, gradients = loss_and_gradients(make(model, layout, documents=True))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(gradients, expected) < 1e-4
    assert loss != pytest.approx(alone(model, layout.sequences)[0], rel=1e-3)


@pytest.mark.jax
@pytest.mark.parametrize("name", ["dense", "gemma3", "gpt_oss", "deepseek_v3"])
def test_a_document_has_the_losses_that_it_has_alone(name):
    """Angles between positions decide, and these are the same wherever a document begins."""
    model = dense() if name == "dense" else configured(name, MODELS[name])
    step = make(model, Layout(remat="none"), documents=True)
    weights, batch = weights_of(step), {part: x[0] for part, x in batch_of(step).items()}
    losses = jax.jit(step.stack.losses)
    found = losses(weights, batch)
    begins = np.unique(batch["documents"][0])
    assert len(begins) > 1
    for first, last in zip(begins, [*begins[1:], LENGTH], strict=True):
        own = {part: batch[part][:, first:last] for part in ("tokens", "labels")}
        np.testing.assert_allclose(found[:, first:last], losses(weights, own), rtol=2e-4)


def test_attention_that_sees_what_follows_is_refused():
    block = make(dense(), Layout()).stack.block("layer")
    ops = tuple(replace(op, causal=False) if isinstance(op, Attention) else op for op in block.ops)
    with pytest.raises(ConfigError, match="is not causal"):
        check_documents(Program("train", (replace(block, ops=ops),)))
