"""Every strategy gives the loss and the gradients of one device."""

import pytest

from meshwise.sharding.layout import Layout
from tests.runtime.steps import alone, dense, loss_and_gradients, make, worst

LAYOUTS = {
    "data": {"data": 8},
    "replicas": {"data": 2, "fsdp": 4, "zero": 1, "num_microbatches": 2, "remat": "matmuls"},
    "zero-1": {"data": 4, "tensor": 2, "zero": 1, "num_microbatches": 2},
    "zero-2": {"data": 2, "fsdp": 2, "tensor": 2, "zero": 2, "num_microbatches": 2},
    "fsdp": {"fsdp": 8, "remat": "none"},
    "fsdp-tensor": {"fsdp": 4, "tensor": 2, "num_microbatches": 2, "remat": "matmuls"},
    "whole-stream": {"fsdp": 2, "tensor": 4, "sequence_parallel": False, "remat": "attention"},
    "context": {"context": 4, "fsdp": 2, "remat_layers": 1},
    "ulysses": {"ulysses": 2, "tensor": 2, "data": 2, "fully_sharded": False, "zero": 1},
    "context-ulysses-tensor": {"context": 2, "ulysses": 2, "tensor": 2},
    "ring": {"context": 4, "tensor": 2, "context_method": "ring"},
    "ring-ulysses": {"context": 2, "ulysses": 2, "data": 2, "context_method": "ring", "num_microbatches": 2},
    "whole-context": {
        "context": 2, "ulysses": 2, "data": 2, "fully_sharded": False, "num_microbatches": 2, "remat": "none",
    },
    "whole-context-zero-1": {
        "context": 2, "fsdp": 2, "data": 2, "zero": 1, "fully_sharded": False, "num_microbatches": 2,
        "context_method": "ring",
    },
    "pieces-whole-context": {
        "context": 4, "tensor": 2, "fully_sharded": False, "zero": 1, "num_microbatches": 2, "remat": "none",
        "collective_matmul": "bidirectional",
    },
    "pieces": {"fsdp": 2, "tensor": 4, "collective_matmul": "bidirectional"},
    "pieces-whole-stream": {"fsdp": 2, "tensor": 4, "sequence_parallel": False, "collective_matmul": "unidirectional"},
    "pieces-of-replicas": {
        "data": 2, "fsdp": 2, "tensor": 2, "zero": 1, "num_microbatches": 2, "remat": "none",
        "collective_matmul": "unidirectional",
    },
    "pieces-context": {
        "context": 2, "ulysses": 2, "tensor": 2, "remat": "matmuls", "collective_matmul": "bidirectional",
    },
}  # fmt: skip


#: Slow because each is a compiled program, and proves the same of another way to split.
QUICK = ("replicas",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in LAYOUTS])
def test_loss_and_gradients_are_those_of_one_device(name):
    layout = Layout(**LAYOUTS[name])
    expected_loss, expected = alone(dense(), layout.sequences)
    loss, found = loss_and_gradients(make(dense(), layout))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(found, expected) < 1e-5
