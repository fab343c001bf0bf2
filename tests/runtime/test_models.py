"""Every kind of attention and of mixture: against formulas written out in NumPy, and on every way to split them."""

import jax
import numpy as np
import pytest

from meshwise.sharding.layout import Layout
from tests.runtime import reference
from tests.runtime.steps import alone, batch_of, by_layer, configured, loss_and_gradients, make, weights_of, worst

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 64, "intermediate_size": 64, "hidden_act": "silu",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 8,
}  # fmt: skip
LATENT = {
    "head_dim": None, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
CAPS = {
    "hidden_act": "gelu_pytorch_tanh", "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
ROUTED = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 5, "swiglu_limit": 1.0}
MODELS = {
    "gemma3": {"model_type": "gemma3_text", **SIZES, **CAPS},
    "gpt_oss": {"model_type": "gpt_oss", **SIZES, **ROUTED, "rope_scaling": YARN},
    "deepseek_v3": {"model_type": "deepseek_v3", **SIZES, **LATENT},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": 64},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **SIZES, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def model(name):
    return configured(name, MODELS[name])


#: The others are of the families whose logits the tests of weights hold, too.
@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(n, marks=pytest.mark.jax) for n in ("gemma3", "gpt_oss", "deepseek_v3"))]
)
def test_losses_of_tokens_are_those_of_the_formulas(name):
    step = make(model(name), Layout(micro_batch=2))
    weights, batch = weights_of(step), batch_of(step)
    tokens, labels = (np.asarray(batch[k])[0] for k in ("tokens", "labels"))
    found = jax.jit(step.stack.losses)(weights, {"tokens": tokens, "labels": labels})
    wide = {k: {n: w.astype(np.float64) for n, w in run.items()} for k, run in by_layer(step, weights).items()}
    expected = getattr(reference, name)(wide, tokens, labels)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-4, atol=2e-4)


SPLIT = {
    "windows-over-context": ("gemma3", {"fsdp": 2, "tensor": 2, "context": 2}),
    "windows-and-caps-round-a-ring": ("gemma3", {"context": 4, "fsdp": 2, "context_method": "ring"}),
    "sinks-round-a-ring": ("gpt_oss", {"context": 2, "tensor": 2, "expert": 2, "context_method": "ring"}),
    "sinks-over-ulysses": ("gpt_oss", {"ulysses": 2, "expert": 2, "fsdp": 2}),
    "experts-split-by-width-and-number": ("gpt_oss", {"expert": 2, "tensor": 2, "context": 2, "num_microbatches": 2}),
    "latent-and-whole-experts": ("deepseek_v3", {"expert": 4, "tensor": 2, "expert_tensor_parallel": False}),
    "whole-experts-alone": ("qwen3_moe", {"tensor": 2, "fsdp": 4, "expert_tensor_parallel": False}),
    "wide-experts": ("qwen3_moe", {"fsdp": 4, "tensor": 2}),
    "replicas-of-experts": (
        "qwen3_moe",
        {"data": 2, "expert": 2, "tensor": 2, "sequence_parallel": False, "fully_sharded": False,
         "num_microbatches": 2, "remat": "matmuls"},
    ),
    "experts-whole-over-context": (
        "gpt_oss",
        {"context": 2, "expert": 2, "tensor": 2, "fully_sharded": False, "zero": 1, "context_method": "ring",
         "num_microbatches": 2},
    ),
    "learned-positions-over-context": ("gpt2", {"context": 2, "tensor": 2, "fsdp": 2}),
    "learned-positions": ("gpt2", {"data": 2, "zero": 1, "tensor": 2, "fsdp": 2, "num_microbatches": 2}),
}  # fmt: skip


@pytest.mark.jax  # two compiled programs each
@pytest.mark.parametrize("name", SPLIT)
def test_split_models_give_the_gradients_of_one_device(name):
    config, choices = SPLIT[name]
    layout = Layout(**choices)
    expected_loss, expected = alone(model(config), layout.sequences)
    loss, found = loss_and_gradients(make(model(config), layout))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(found, expected) < 1e-5


@pytest.mark.jax
@pytest.mark.parametrize("layout", [{"fsdp": 2, "remat": "none"}, {"num_microbatches": 2, "remat": "matmuls"}])
def test_layers_of_a_period_are_those_of_a_loop_in_a_loop(layout):
    """Where products are kept each layer of a period has arrays of its own, else equal ones are stacked."""
    period = configured("period", {**MODELS["gemma3"], "num_hidden_layers": 8, "sliding_window_pattern": 3})
    apart, stacked = make(period, Layout(**layout)), make(period, Layout(micro_batch=2, remat="full"))
    keys = [[run.key for s in step.stack.segments for run in s.runs] for step in (apart, stacked)]
    assert [len(k) for k in keys] == [4, 3]
    expected_loss, expected = loss_and_gradients(stacked)
    loss, found = loss_and_gradients(apart)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(found, expected) < 1e-5


@pytest.mark.jax  # nothing runs
@pytest.mark.parametrize(
    ("remat", "runs"),
    [("selective", 4), ("projections", 4), ("recompute:layernorm", 4), ("attention", 3), ("save:gate+up", 3)],
)
def test_periods_are_written_out_where_all_products_are_kept(remat, runs):
    period = configured("period", {**MODELS["gemma3"], "num_hidden_layers": 8, "sliding_window_pattern": 3})
    segments = make(period, Layout(micro_batch=2, remat=remat)).stack.segments
    assert sum(len(s.runs) for s in segments) == runs


@pytest.mark.jax
def test_capacity_drops_what_is_beyond_it():
    def loss(**job):
        step = make(model("qwen3_moe"), Layout(micro_batch=2), **job)
        batch = batch_of(step)
        return jax.jit(step.stack.losses)(weights_of(step), {part: x[0] for part, x in batch.items()}).mean().item()

    exact = loss()
    assert loss(capacity_factor=4.0) == pytest.approx(exact, rel=1e-6)  # every token fits: 8 experts, 2 of a token
    assert abs(loss(capacity_factor=1.0) - exact) > 1e-4
