"""A model's dimensions as Megatron-LM's arguments. Not here: how it is split and trained (`megatron`)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwise.exports.choices import MTP_NOTE, Choices
from meshwise.exports.exported import Refusals
from meshwise.exports.shape import ModelShape
from meshwise.models.spec import LatentAttention, Mixture, SelfAttention

Argument = tuple[str | int, ...]

_BY_HAND = "the parallelism of this plan by hand, with a layer specification of your own (--spec)"


def model_arguments(choices: Choices, shape: ModelShape, refusals: Refusals, notes: list[str]) -> Iterator[Argument]:
    """The dimensions; refuse layers that no argument describes."""
    model = choices.model
    yield ("--num-layers", model.num_layers)
    yield ("--hidden-size", model.d_model)
    yield from _attention(choices, shape, refusals, notes)
    yield from _feed_forward(choices, shape, refusals)
    yield from _norms(shape, refusals)
    if not model.spec.head.tied:
        yield ("--untie-embeddings-and-output-weights",)
    yield from (("--vocab-size", model.vocab_size), ("--make-vocab-size-divisible-by", 1))
    yield ("--max-position-embeddings", max(model.max_seq_len or 0, choices.seq_len))
    yield from _positions(choices, shape, notes)
    yield from _biases(choices, shape, refusals)
    if model.spec.mtp_modules:
        notes.append(MTP_NOTE)


def _attention(choices: Choices, shape: ModelShape, refusals: Refusals, notes: list[str]) -> Iterator[Argument]:
    attention = shape.attention
    yield ("--num-attention-heads", attention.heads)
    if isinstance(attention, LatentAttention):
        yield ("--multi-latent-attention",)
        if attention.q_rank is not None:
            yield ("--q-lora-rank", attention.q_rank)
        yield from (("--kv-lora-rank", attention.kv_rank), ("--qk-head-dim", attention.nope_dim))
        yield from (("--qk-pos-emb-head-dim", attention.rope_dim), ("--v-head-dim", attention.v_dim))
        notes.append("queries and keys of the latent attention are normalised only with --qk-layernorm, which is given")
        yield ("--qk-layernorm",)
        return
    if attention.kv_heads != attention.heads:
        yield from (("--group-query-attention",), ("--num-query-groups", attention.kv_heads))
    yield ("--kv-channels", attention.head_dim)
    yield from _special_attention(choices, attention, refusals)


def _special_attention(choices: Choices, attention: SelfAttention, refusals: Refusals) -> Iterator[Argument]:
    if attention.window is not None:
        yield ("--window-size", f"{attention.window - 1},0")
    if attention.sinks:
        yield ("--softmax-type", "learnable")
    if attention.qk_norm is not None and (attention.qk_norm.span != "head" or not attention.qk_norm.shared):
        refusals.add(f"model {choices.model.name}", "it normalises all heads of queries and keys together", _BY_HAND)
    elif attention.qk_norm is not None:
        yield ("--qk-layernorm",)
    if attention.chunk is not None:
        refusals.add(f"model {choices.model.name}", "it attends by chunks", _BY_HAND)


def _feed_forward(choices: Choices, shape: ModelShape, refusals: Refusals) -> Iterator[Argument]:
    kinds = [f for f in (shape.dense, shape.mixture) if f is not None]
    gated = kinds[0].gated
    words: dict[tuple[bool, str], tuple[Argument, ...]] = {
        (True, "silu"): (("--swiglu",),),
        (False, "gelu"): (),
        (False, "relu2"): (("--squared-relu",),),
    }
    activation = {"swish": "silu", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu"}.get(
        shape.functions.activation, shape.functions.activation or ("silu" if gated else "gelu")
    )
    if (gated, activation) not in words:
        what = f"a {'gated' if gated else 'plain'} feed-forward part with {activation}"
        refusals.add(f"model {choices.model.name}", f"it has {what}", _BY_HAND)
    yield ("--ffn-hidden-size", shape.dense.hidden if shape.dense is not None else kinds[0].hidden)
    yield from words.get((gated, activation), ())
    if shape.mixture is not None:
        yield from _mixture(choices, shape, shape.mixture, refusals)


def _mixture(choices: Choices, shape: ModelShape, mixture: Mixture, refusals: Refusals) -> Iterator[Argument]:
    router = mixture.router
    yield from (("--num-experts", mixture.experts), ("--moe-router-topk", mixture.top_k))
    yield ("--moe-ffn-hidden-size", mixture.hidden)
    if shape.leading_dense:
        rest = choices.model.num_layers - shape.leading_dense
        yield ("--moe-layer-freq", f"([0]*{shape.leading_dense}+[1]*{rest})")
    if mixture.shared:
        yield ("--moe-shared-expert-intermediate-size", mixture.shared)
    for what, present in (
        ("a gate of its shared experts", mixture.shared_gate),
        ("biases in its experts", mixture.expert_bias),
        ("sigmoid scores that are not normalised", router.scores == "sigmoid" and not router.normalised),
    ):
        if present:
            refusals.add(f"model {choices.model.name}", f"it has {what}", _BY_HAND)
    yield from (("--moe-grouped-gemm",), ("--moe-token-dispatcher-type", "alltoall"))
    yield ("--moe-router-dtype", "fp32")  # as the published models choose
    if router.scores == "sigmoid":
        yield ("--moe-router-score-function", "sigmoid")
    elif not router.normalised:
        yield ("--moe-router-pre-softmax",)
    if mixture.correction_bias:
        yield ("--moe-router-enable-expert-bias",)
    if router.groups > 1:
        yield from (("--moe-router-num-groups", router.groups), ("--moe-router-group-topk", router.groups_limit))
    if router.scale != 1:
        yield ("--moe-router-topk-scaling-factor", f"{router.scale:g}")
    if choices.job.capacity_factor is not None:
        yield ("--moe-expert-capacity-factor", f"{choices.job.capacity_factor:g}")
        yield ("--moe-pad-expert-input-to-capacity",)


def _norms(shape: ModelShape, refusals: Refusals) -> Iterator[Argument]:
    norms = [n for n in (shape.layer.pre_attn, shape.layer.pre_mlp) if n is not None]
    if len(norms) < 2:
        refusals.add("model", "a branch of its layers starts without a norm", _BY_HAND)
    biased = any(n.bias for n in norms)
    yield ("--normalization", "LayerNorm" if biased else "RMSNorm")
    if shape.functions.norm_epsilon is not None:
        yield ("--norm-epsilon", f"{shape.functions.norm_epsilon:g}")


def _positions(choices: Choices, shape: ModelShape, notes: list[str]) -> Iterator[Argument]:
    rotary = isinstance(shape.attention, LatentAttention) or shape.attention.rope
    if rotary:
        yield ("--position-embedding-type", "rope")
        if shape.functions.rope_base is not None:
            yield ("--rotary-base", int(shape.functions.rope_base))
        if shape.functions.rope_share != 1:
            yield ("--rotary-percent", f"{shape.functions.rope_share:g}")
        if shape.functions.rope_scaled:
            notes.append("the configuration stretches its rotary positions (rope_scaling): add the arguments for it")
    else:
        learned = choices.model.spec.embedding.positions is not None
        yield ("--position-embedding-type", "learned_absolute" if learned else "none")


def _biases(choices: Choices, shape: ModelShape, refusals: Refusals) -> Iterator[Argument]:
    """Which linear layers have a bias: all, none, or those of queries, keys and values."""
    attention = shape.attention
    inner = [shape.dense.bias, shape.dense.bias_out] if shape.dense is not None else []
    inner += [attention.bias_out] if isinstance(attention, SelfAttention) else []
    if attention.bias and all(inner):
        return
    if any(inner):
        refusals.add(f"model {choices.model.name}", "some of its linear layers have a bias, others not", _BY_HAND)
    yield ("--disable-bias-linear",)
    if attention.bias:
        yield ("--add-qkv-bias",)
