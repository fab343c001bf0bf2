"""A loss in chunks has the value and the gradients of one over whole logits, however the head is split."""

import jax
import pytest

from meshwise.runtime import chunked_loss
from meshwise.sharding.layout import Layout
from tests.runtime.steps import alone, batch_of, configured, dense, loss_and_gradients, make, weights_of, worst
from tests.runtime.test_models import MODELS

LAYOUTS = {
    "one": ("dense", {}),
    "capped-tied": ("gemma3", {"fsdp": 4, "tensor": 2, "micro_batch": 2}),
    "replicas": ("dense", {"data": 4, "tensor": 2, "zero": 1, "num_microbatches": 2}),
    "whole-stream": ("dense", {"fsdp": 2, "tensor": 4, "sequence_parallel": False}),
    "positions": ("dense", {"context": 2, "ulysses": 2, "tensor": 2}),
    "whole-weights": (
        "gemma3",
        {"context": 4, "data": 2, "fully_sharded": False, "num_microbatches": 2, "micro_batch": 2},
    ),
    "stages": ("dense", {"stage": 3, "fsdp": 2, "num_microbatches": 3}),
}  # fmt: skip


def model(name):
    return dense() if name == "dense" else configured(name, MODELS[name])


@pytest.mark.parametrize("name", [n if n == "one" else pytest.param(n, marks=pytest.mark.jax) for n in LAYOUTS])
def test_loss_and_gradients_are_those_of_whole_logits(name, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK_POSITIONS", 6)  # sequences of 16, whole or split
    of, choices = LAYOUTS[name]
    layout = Layout(**choices, loss="chunked")
    expected_loss, expected = alone(model(of), layout.sequences)
    loss, found = loss_and_gradients(make(model(of), layout))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(found, expected) < 1e-5


def test_no_array_holds_logits_of_more_than_a_chunk(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK_POSITIONS", 4)
    step = make(dense("D=32 F=64 L=3 N=8 K=4 H=8 V=80"), Layout(loss="chunked"))
    program = str(jax.make_jaxpr(step.gradients)(weights_of(step), batch_of(step)))
    assert "[1,4,80]" in program
    assert "[1,16,80]" not in program
