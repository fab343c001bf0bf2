"""The products and attentions of one device, by hand, and that they are the plan's own."""

from dataclasses import replace

import pytest

import meshwise
from meshwise.core.dtypes import DType
from meshwise.costs.alone import AttentionShape
from meshwise.costs.local_shapes import ProductShape, local_shapes


def shapes(layout, model="llama-3-8b", **asked):
    plan = meshwise.estimate_train(model, on="h100:64", batch_tokens="1Mi", seq_len=8192, layout=layout, **asked)
    (found,) = plan.plans
    return found, {one.name: one for one in local_shapes(found.problem, found.layout)}


def test_shapes_of_tensor_parallelism_by_hand():
    """Of 128 sequences 8 a replica in one microbatch; 32 heads, 14,336 columns and 8 key/value heads over 4 devices."""
    plan, found = shapes("fsdp=16,tensor=4,remat=none,micro_batch=1")
    tokens = 8192 * plan.layout.micro_batch
    assert found["q"].work == ProductShape(tokens, 4096, 1024)
    assert found["k"].work == ProductShape(tokens, 4096, 256)
    assert found["gate"].work == ProductShape(tokens, 4096, 3584)
    assert found["down"].work == ProductShape(tokens, 3584, 4096)
    attention = AttentionShape.of(plan.layout.micro_batch, 8192, 8192, 8, 2, 128, causal=True)
    assert found["attention"].work == attention
    assert found["dattention (backward)"].work == replace(attention, gradient=True)
    assert found["k"].copies == 2 * 32, "k and v of every layer"
    assert all(one.dtype is DType.BF16 for one in found.values())


def test_products_add_up_to_what_layers_take():
    """Forward and backward, products and attention are most of a step without recomputation or communication."""
    plan, found = shapes("data=64,remat=none,zero=1")
    whole = sum(one.copies * one.seconds for one in found.values())
    terms = plan.estimate.terms
    step = (terms["forward"] + terms["backward"]) / plan.layout.num_microbatches
    assert 0.75 * step < whole < step


def test_experts_are_products_of_groups_and_gradients_of_their_matrices_sum_over_rows():
    """8,192 tokens with 8 of 128 experts each are 512 rows an expert; D 2,048, F 768, in 48 layers."""
    plan, found = shapes("fsdp=64,remat=none,micro_batch=1", "qwen3-30b-a3b")
    rows = 8192 * plan.layout.micro_batch * 8 // 128
    assert found["expert.gate"].work == ProductShape(rows, 2048, 768, 128)
    assert found["expert.down"].work == ProductShape(rows, 768, 2048, 128)
    assert found["dexpert.up.w_expert.up (weights)"].work == ProductShape(768, rows, 2048, 128, summed=True)
    assert found["expert.gate"].copies == 48 * 3, "gate, up, and what goes back through down"


def test_windows_are_shapes_of_their_own():
    plan, _ = shapes("data=8,fsdp=8,remat=none,micro_batch=1", "gemma-3-4b")
    found = local_shapes(plan.problem, plan.layout)
    attentions = [one for one in found if isinstance(one.work, AttentionShape) and not one.work.gradient]
    whole, near = sorted(attentions, key=lambda one: -one.work.pairs)
    assert (whole.work.window, near.work.window) == (None, 1024)
    assert near.work.pairs == 1024 * 1025 / 2 + (8192 - 1024) * 1024
    assert whole.copies + near.copies == 34


def test_with_a_part_of_the_layers_computed_again_each_counts_by_its_share():
    _, none = shapes("fsdp=64,remat=none,micro_batch=1")
    _, full = shapes("fsdp=64,remat=full,micro_batch=1")
    _, part = shapes("fsdp=64,remat=full:8,micro_batch=1")
    assert full["attention"].copies == 2 * none["attention"].copies == 64
    assert part["attention"].copies == 40


def test_queries_over_a_context_see_as_many_keys_as_those_of_all_devices_on_average():
    _, found = shapes("fsdp=16,context=4,remat=none,micro_batch=1")
    one = found["attention"].work
    assert (one.queries, one.keys, one.start) == (2048, 8192, 3072)
    assert one.pairs == AttentionShape.of(1, 2048, 8192, 1, 1, 1, causal=True).pairs == 2048 * 8193 / 2


@pytest.mark.parametrize("precision", ["fp8"])
def test_narrow_products_say_their_format(precision):
    _, found = shapes("data=64,remat=none,zero=1", precision=precision)
    assert found["gate"].dtype is DType.FP8
    assert found["attention"].dtype is DType.BF16
