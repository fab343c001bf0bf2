"""The products and attentions of one device, by hand, and that they are the plan's own."""

import pytest

import meshwise
from meshwise.core.dtypes import DType
from meshwise.costs.local_shapes import local_shapes


def shapes(layout, **asked):
    plan = meshwise.estimate_train("llama-3-8b", on="h100:64", batch_tokens="1Mi", seq_len=8192, layout=layout, **asked)
    (found,) = plan.plans
    return found, {one.name: one for one in local_shapes(found.problem, found.layout)}


def test_shapes_of_tensor_parallelism_by_hand():
    """Of 128 sequences 8 a replica in one microbatch; 32 heads, 14,336 columns and 8 key/value heads over 4 devices."""
    plan, found = shapes("fsdp=16,tensor=4,remat=none,micro_batch=1")
    tokens = 8192 * plan.layout.micro_batch
    assert found["q"].sizes == (tokens, 4096, 1024)
    assert found["k"].sizes == (tokens, 4096, 256)
    assert found["gate"].sizes == (tokens, 4096, 3584)
    assert found["down"].sizes == (tokens, 3584, 4096)
    assert found["attention"].sizes == (plan.layout.micro_batch, 8192, 8192, 8, 2, 128)
    assert found["k"].copies == 2 * 32, "k and v of every layer"
    assert all(one.dtype is DType.BF16 for one in found.values())


def test_products_add_up_to_what_layers_take():
    """Forward and backward, products and attention are most of a step without recomputation or communication."""
    plan, found = shapes("data=64,remat=none,zero=1")
    whole = sum(one.copies * one.seconds for one in found.values())
    terms = plan.estimate.terms
    step = (terms["forward"] + terms["backward"]) / plan.layout.num_microbatches
    assert 0.6 * step < whole < step


@pytest.mark.parametrize("precision", ["fp8"])
def test_narrow_products_say_their_format(precision):
    _, found = shapes("data=64,remat=none,zero=1", precision=precision)
    assert found["gate"].dtype is DType.FP8
    assert found["attention"].dtype is DType.BF16
