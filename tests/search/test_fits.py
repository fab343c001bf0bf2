"""What fits, against the estimates that users would ask for next: the most fits, and one more does not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwise
from meshwise.core.errors import MeshwiseError
from meshwise.costs.serving.memory import most


@given(limit=st.integers(0, 1 << 30), there=st.integers(-1, 1 << 31), near=st.integers(1, 1 << 31))
@settings(max_examples=200)
def test_the_most_is_the_last_that_fits(limit, there, near):
    assert most(lambda n: n <= there, limit, near=near) == max(0, min(there, limit))


CASES = [
    ("llama-3-8b", "h100:2", 8192),
    ("mixtral-8x7b", "h100:4", 4096),
    *(
        pytest.param(case, marks=pytest.mark.slow)  # the same of other kinds of models and chips
        for case in (("qwen3-32b", "v5e:4x4", 4096), ("deepseek-v3", "h200:8", 8192), ("gemma-3-27b", "l40s:4", 16384))
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def found(request):
    model, on, context = request.param
    return meshwise.fit(model, on=on, context=context)


def test_serving_fits_to_the_last_request_and_no_further(found):
    model, half = found.model, found.context // 2
    assert found.serving
    for fit in found.serving:
        engine = {"on": found.cluster.name, "layout": str(fit.layout), "precision": fit.precision}

        def fits(batch, prompt, output, engine=engine):
            return meshwise.estimate_serve(model.name, batch=batch, prompt=prompt, output=output, **engine).fits

        assert fit.requests == 0 or fits(fit.requests, half, half)
        assert not fits(fit.requests + 1, half, half)
        # a longer request has a longer prompt, and as much output as long as there are tokens for both
        output = min(half, max(fit.context - 1, 1))
        assert fit.context < 2 or fits(1, fit.context - output, output)
        if fit.context < (model.max_seq_len or 1e9):
            output = min(half, max(fit.context, 1))
            assert not fits(1, max(fit.context + 1 - output, 1), output)


def test_training_fits_to_the_last_sequence_and_no_further(found):
    assert {t.fine_tune for t in found.training} >= {"full", "lora"}
    for fit in found.training:
        layout = fit.plan.layout
        words = ",".join(f"{axis}={n}" for axis, n in layout.sizes.items())

        def fits(sequences, length, fit=fit, layout=layout, words=words):
            return (
                meshwise.estimate_train(
                    found.model.name,
                    on=found.cluster.name,
                    seq_len=length,
                    batch_tokens=sequences * layout.data * layout.fsdp * length,
                    precision=fit.precision,
                    fine_tune=fit.fine_tune,
                    layout=f"{words},zero={layout.zero},remat=full,micro_batch={sequences}",
                )
                .plans[0]
                .estimate.fits
            )

        assert fit.micro_batch == 0 or fits(fit.micro_batch, found.context)
        assert not fits(fit.micro_batch + 1, found.context)
        assert fit.context == 0 or fits(1, fit.context)
        assert fit.context == found.model.max_seq_len or not fits(1, fit.context + 1)


def test_a_published_size_of_engine_serves():
    """Usual engines: an 8B model in bf16 on one 24 GB card, a 70B one in four bits on two."""
    small = meshwise.fit("llama-3-8b", on="rtx-4090:1", context=4096)
    assert any(f.precision == "bf16" and f.requests for f in small.serving)
    large = meshwise.fit("llama-3-70b", on="rtx-4090:2", context=4096)
    assert {f.layout.num_chips for f in large.serving if f.requests} == {2}
    assert not any(t.micro_batch for t in small.training if t.fine_tune == "full")
    assert any(t.micro_batch for t in small.training if t.fine_tune == "qlora")


@pytest.mark.parametrize(
    ("precision", "on", "said"),
    [
        ("fp9", "h100:1", "unknown serving precision 'fp9'"),
        ("bf16,fp8", "a100:1", "A100"),
        ("fp8,", "h100:1", "both sides"),
    ],
)
def test_a_precision_that_is_named_is_known_to_us_and_to_the_chip(precision, on, said):
    with pytest.raises(MeshwiseError, match=said):
        meshwise.fit("llama-3-8b", on=on, precision=precision)


def test_what_cannot_be_asked_is_said_and_the_rest_is_answered():
    found = meshwise.fit("t5-11b", on="h100:2", context=512)
    assert "serving" in found.refused
    assert found.training


def test_more_than_a_model_was_made_for_is_asked_for_with_a_warning():
    def said(**asked):
        return " ".join(str(meshwise.fit("llama-2-13b", on="h100:1", precision="fp8", **asked)).split())

    warning = "sequences of 16,384 tokens exceed the 4,096 that llama-2-13b was trained for"
    assert warning in said(context="16Ki")
    assert warning not in said() + said(context="4Ki")
    longest = [fit.context for fit in meshwise.fit("llama-2-13b", on="h100:1", precision="fp8", context="16Ki").serving]
    assert longest == [16384]
    with pytest.raises(MeshwiseError, match="gpt2 has learned positions for 1,024 tokens"):
        meshwise.fit("gpt2", on="h100:1", context="4Ki")
