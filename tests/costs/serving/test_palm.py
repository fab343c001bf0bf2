"""PaLM 540B on 64 TPU v4 takes as long as its makers measured: Pope et al. 2022, tables 2 and D.3, arXiv 2211.05102."""

from __future__ import annotations

import pytest

from tests.costs.serving.cases import problem, step

#: Requests, milliseconds of a prefill of 60 tokens, milliseconds of 20 decode steps after it (table D.3).
SHORT = (
    (4, 50, 640), (8, 80, 574), (16, 153, 602), (32, 270, 626), (64, 501, 717), (128, 985, 829), (256, 2041, 1114),
)  # fmt: skip
#: Step, layout, weights, requests, seconds of a prefill of 2,048 tokens or of 64 decode steps there (table 2).
LONG = (
    ("prefill", "width=4,tensor=16", "int8", 1, 0.29),
    ("decode", "width=4,cache=16,cache_split=batch", "int8", 64, 1.82),
    ("prefill", "fsdp=64", "bf16", 512, 85.2),
    ("decode", "width=4,cache=16,cache_split=batch", "bf16", 512, 6.0),
)


def palm(weights="bf16"):
    return problem("palm-540b", "v4:4x4x4", prompt=1984, output=64, precision=f"weights={weights}")


@pytest.mark.parametrize(("batch", "prefill", "decode"), SHORT)
def test_short_prompts(batch, prefill, decode):
    """Within 20 %; one constant of the TPUs' calibration, the start-up of a collective within a step, is from here."""
    took = step(palm(), "prefill", "width=4,tensor=16", batch, 60, 60).expected
    assert took == pytest.approx(prefill / 1e3, rel=0.2)
    took = step(palm(), "decode", "width=4,cache=16,cache_split=batch", batch, 1, 70).expected
    assert took == pytest.approx(decode / 20e3, rel=0.2)


@pytest.mark.parametrize(("name", "layout", "weights", "batch", "seconds"), LONG)
def test_long_prompts(name, layout, weights, batch, seconds):
    sizes = (2048, 2048) if name == "prefill" else (1, 2016)
    took = step(palm(weights), name, layout, batch, *sizes).expected
    assert took == pytest.approx(seconds / (1 if name == "prefill" else 64), rel=0.2)


def test_a_token_in_bf16():
    took = step(palm(), "decode", "width=4,cache=16,cache_split=batch", 64, 1, 2016).expected
    assert took == pytest.approx(36.9e-3, rel=0.1)


def test_one_head_for_all_is_copied_unless_sequences_are_split():
    """Section 3.3: with multi-query attention, splitting heads leaves every chip a copy of the cache."""
    heads = step(palm(), "decode", "tensor=64", 512, 1, 2016)
    batch = step(palm(), "decode", "cache=64,cache_split=batch", 512, 1, 2016)
    assert heads.terms["attention"] > 50 * batch.terms["attention"]
    assert heads.expected > 1.5 * batch.expected
