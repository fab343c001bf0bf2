"""Which attention of our own programs no kernel takes: as the kernels themselves say it."""

from types import SimpleNamespace

import pytest

import meshwise
from meshwise.costs.plain_attention import plain_attentions
from meshwise.report.attention import plan_notes
from meshwise.runtime.kernels import gpu, tpu
from meshwise.runtime.kernels.masks import Masks, Pairs

SMALL = "D=1024 F=4096 L=4 N=8 K=8 V=32768"


def plan_of(seq_len, on="h100:8", layout="fsdp=8", model=SMALL, tool="meshwise"):
    job = {"batch_tokens": 32 * seq_len, "seq_len": seq_len, "tool": tool}
    return meshwise.estimate_train(model, on=on, layout=layout, **job).plans[0]


def found(**asked):
    plan = plan_of(**asked)
    return plain_attentions(plan.problem, plan.layout)


def of(module, queries, keys, width=128, chunk=None):
    """What a kernel says of arrays of these sizes."""
    q, k = (SimpleNamespace(shape=(1, n, 8, width)) for n in (queries, keys))
    return module.refusal(q, k, Pairs(Masks(True, None, chunk, 1.0)))


@pytest.mark.parametrize(
    ("module", "on", "layout", "runs", "longer"),
    [
        (gpu, "h100:8", "fsdp=8", (2000, 2000), 2016),
        (gpu, "mi300x:8", "fsdp=8", (2000, 2000), 2016),
        (tpu, "v5e:2x4", "fsdp=8", (2016, 2016), 2048),
        (gpu, "h100:8", "fsdp=4,context=2,context_method=gather", (1032, 2064), 2112),
        (gpu, "h100:8", "fsdp=4,context=2,context_method=ring", (1032, 1032), 2112),
    ],
)
def test_lengths_that_no_block_divides(module, on, layout, runs, longer):
    seq_len = runs[0] * (2 if "context" in layout else 1)
    (one,) = found(on=on, seq_len=seq_len, layout=layout)
    assert one.refusal == of(module, *runs)
    assert one.refusal.startswith(f"{runs[0]} queries and {runs[1]} keys are not multiples")
    assert one.blocks == ("layer",)
    assert one.pairs == pytest.approx(2 * seq_len / (seq_len + 1))
    assert one.seq_len == longer
    assert not found(on=on, seq_len=longer, layout=layout)


def test_two_runs_a_device_are_what_a_kernel_is_given():
    """Of 2,112 positions on two devices: four runs of 528 are no multiples of 32, two of 1,056 are."""
    assert of(gpu, 528, 528)
    assert not of(gpu, 1056, 1056)
    assert not found(seq_len=2112, layout="fsdp=4,context=2,context_method=ring")


def test_windows_multiply_all_pairs_and_each_reason_is_said_once():
    local, whole = found(model="gemma-2-2b", seq_len=6000, layout="fsdp=8,remat=full")
    assert (local.blocks, whole.blocks) == (("layer.local",), ("layer.global",))
    assert local.pairs == pytest.approx(6000**2 / (4096 * 4097 / 2 + (6000 - 4096) * 4096))


def test_heads_that_do_not_fit_have_no_longer_sequence():
    wide = "D=1024 F=4096 L=4 N=2 K=2 H=512 V=32768"
    (one,) = found(model=wide, seq_len=2048)
    assert one.refusal == of(gpu, 2048, 2048, width=512) == "heads of 512 do not fit on the chip"
    assert one.seq_len is None


def test_other_software_and_chips_without_kernels_have_none():
    assert not found(seq_len=2000, tool="megatron")
    assert not found(seq_len=2000, on="v5e:2x4", tool="jax")


def test_a_plan_says_so():
    plan = plan_of(2000)
    note, *_ = plan_notes(plan.problem, plan.layout)
    assert note == (
        "attention of layer runs in blocks of plain JAX, since 2000 queries and 2000 keys are not multiples of 32: it "
        "multiplies 2 times the pairs of a query and a key that are counted, and moves their scores through memory, "
        "which neither times nor bytes here count; --seq-len 2016 has a kernel"
    )
