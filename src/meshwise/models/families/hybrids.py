"""Recurrences beside attention: Jamba, Bamba, Granite 4, Nemotron-H, Qwen3-Next and 3.5, MiniMax-01.

Not here: what their mixers are made of (`recurrent`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.models.families.dense import BY_HEAD, DECODER, GRANITE
from meshwise.models.families.features import (
    Experts,
    Family,
    attention,
    biases,
    family,
    ffn,
    head,
    heads,
    mixture,
    mlp,
    modules_note,
)
from meshwise.models.families.ignored import check_activation
from meshwise.models.families.keys import (
    COUNT,
    INDEX,
    OFF,
    ON,
    SIZE,
    Held,
    Keys,
    Listed,
    Only,
    divide,
    only,
)
from meshwise.models.families.mamba import MAMBA1_KEYS, MAMBA2_KEYS, STEPS, mamba1, mamba2
from meshwise.models.families.mixtures import by_sparse_step
from meshwise.models.recurrences import GatedDelta, LightningAttention, Recurrence
from meshwise.models.spec import (
    Architecture,
    Layer,
    Mixture,
    Mlp,
    Router,
    SelfAttention,
    group_layers,
)


def _within(k: Keys, what: str) -> tuple[int, int]:
    """Period and offset of a pattern."""
    period, offset = getattr(k, f"{what}_layer_period"), getattr(k, f"{what}_layer_offset")
    if offset >= period:
        raise ConfigError(f"key '{what}_layer_offset': expected less than its period ({period}), found {offset}")
    return period, offset


def _jamba(k: Keys) -> Recurrence:
    """Mamba-1 with norms inside."""
    return mamba1(k, k.mamba_expand * k.hidden_size, k.hidden_size, inner_norms=True)


def _jamba_recurrent(k: Keys, index: int) -> bool:
    """All but one layer of each period."""
    period, offset = _within(k, "attn")
    return index % period != offset


def _jamba_mixtures(k: Keys, index: int) -> bool:
    """One layer of each period, unless there is only one expert."""
    period, offset = _within(k, "expert")
    return index % period == offset and k.num_experts != 1


JAMBA = family(
    "jamba", "JambaForCausalLM", DECODER, {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 262144,
        "num_experts": Held(COUNT, 16), "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 8, "attn_layer_offset": 4, **MAMBA1_KEYS,
        "mamba_inner_layernorms": ON,
    }, ignored=STEPS, rope=False, recurrent=_jamba_recurrent, recurrence=_jamba,
    experts=Experts("num_experts", layers=_jamba_mixtures, router=Router(normalised=False)),
)  # fmt: skip


def _bamba(k: Keys) -> Recurrence:
    """Mamba-2; the gated norm is over all heads."""
    width = divide(k.mamba_expand * k.hidden_size, k.mamba_n_heads, "mamba_expand x hidden_size", "mamba_n_heads")
    if k.mamba_d_head not in ("auto", width):
        raise ConfigError(
            f"key 'mamba_d_head': expected mamba_expand x hidden_size / mamba_n_heads ({width}), found {k.mamba_d_head}"
        )
    return mamba2(k, k.mamba_n_heads, width, norm_groups=1)


BAMBA = family(
    "bamba", "BambaForCausalLM", DECODER, {
        **MAMBA2_KEYS, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 262144,
        "attention_bias": False, "mlp_bias": False, "attn_layer_indices": None,
    }, ignored=STEPS + "z_loss_coefficient attn_rotary_emb", recurrence=_bamba,
    recurrent=lambda k, index: index not in (k.attn_layer_indices or ()),
)  # fmt: skip


def _granite_recurrent(k: Keys, index: int) -> bool:
    """As listed; all layers where nothing is."""
    return k.layer_types is None or k.per_layer("layer_types")[index] in ("mamba", "linear_attention")


def _granite_ffn(f: Family, k: Keys, index: int) -> Mlp | Mixture:
    """Routed experts and a shared one; the shared one alone where no experts are."""
    if not k.num_local_experts:
        return Mlp(k.shared_intermediate_size)
    if not k.num_experts_per_tok:
        raise ConfigError("key 'num_experts_per_tok': expected at least 1, as there are experts; found 0")
    return mixture(f, k)


GRANITE_HYBRID = family(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM", GRANITE, {
        **MAMBA2_KEYS, "intermediate_size": None, "max_position_embeddings": None,
        "mlp_bias": OFF, "num_local_experts": Held(INDEX, 8, null=True),
        "num_experts_per_tok": Held(INDEX, 2, null=True), "shared_intermediate_size": 1024,
        "position_embedding_type": only("rope", "nope"),
        "layer_types": Held(Listed(Only(("mamba", "attention", "linear_attention", "full_attention")))),
    }, spelled={"layer_types": "layer_types layers_block_type"},
    ignored=STEPS + " ".join(GRANITE.ignored) + " init_method normalization_function",
    recurrent=_granite_recurrent, recurrence=_bamba,
    rope=lambda k, index: k.position_embedding_type == "rope", ffn=_granite_ffn,
    experts=Experts(shared="shared_intermediate_size"),
)  # fmt: skip

#: The letters of `hybrid_override_pattern`, and the words of `layers_block_type`.
_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_OLD_WORDS = {"linear_attention": "mamba", "full_attention": "attention"}


def _nemotron_kinds(k: Keys) -> list[str]:
    """The kind of every layer."""
    pattern, listed = k.hybrid_override_pattern, k.layers_block_type
    if not listed and k.num_hidden_layers is None:
        raise ConfigError("key 'num_hidden_layers' is missing; sizes are not guessed: is the file complete?")
    if listed is not None:
        kinds = [_OLD_WORDS.get(word, word) for word in listed]
    elif pattern is not None:
        strange = sorted(set(pattern) - set(_BLOCKS))
        if strange or not pattern:
            raise ConfigError(
                f"key 'hybrid_override_pattern': expected letters of {', '.join(_BLOCKS)}; found {strange[0]!r:.40}"
                if strange
                else "key 'hybrid_override_pattern': expected one letter a layer, found none"
            )
        kinds = [_BLOCKS[letter] for letter in pattern]
    else:
        raise ConfigError(
            "key 'hybrid_override_pattern' is missing (or 'layers_block_type'); it says what each layer is"
        )
    if k.num_hidden_layers not in (None, len(kinds)):
        raise ConfigError(
            f"key 'num_hidden_layers': expected {len(kinds)}, as the pattern has, found {k.num_hidden_layers}"
        )
    return kinds


def _nemotron_branch(k: Keys, kind: str) -> Layer:
    """The layer of one kind: one branch."""
    f = NEMOTRON_H
    if kind == "mamba":
        return Layer(mamba2(k, k.mamba_n_heads, k.mamba_d_head), None)  # the gated norm is by group
    if kind == "attention":
        return Layer(attention(f, k, 0), None)
    return Layer(
        None, mlp(f, k) if kind == "mlp" else replace(mixture(f, k), shared_bias=k.mlp_bias, latent=k.moe_latent_size)
    )


def _nemotron_h(k: Keys) -> Architecture:
    check_activation("mlp_hidden_act", k.mlp_hidden_act, gated=False)
    return Architecture(
        d_model=k.hidden_size,
        vocab=k.vocab_size,
        groups=group_layers(_nemotron_branch(k, kind) for kind in _nemotron_kinds(k)),
        head=head(NEMOTRON_H, k),
        max_positions=k.max_position_embeddings,
        notes=("multi-token-prediction modules are not counted",) if k.num_nextn_predict_layers else (),
    )


NEMOTRON_H = family(
    "nemotron_h", "NemotronHForCausalLM", DECODER, {
        "num_hidden_layers": None, "intermediate_size": 21504, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 4096, "attention_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2",
        "mamba_hidden_act": only("silu", default="silu"), "mamba_proj_bias": False, "hybrid_override_pattern": None,
        "layers_block_type": Held(
            Listed(Only(("mamba", "attention", "mlp", "moe", "linear_attention", "full_attention")))
        ),
        "mamba_d_state": 128, "mamba_n_heads": 128, "mamba_d_head": Held(SIZE, 64), "mamba_n_groups": 8,
        "mamba_d_conv": 4, "mamba_chunk_size": 128, "mamba_conv_bias": True, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_shared_experts": only(1, default=1), "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None,
        "tie_word_embeddings": only(False, default=False),  # the reference implementation never ties them
        "num_nextn_predict_layers": None,
    }, spelled={"head_dim": "head_dim attention_head_dim", "layers_block_type": "layers_block_type layer_types",
                "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_chunk_size": "chunk_size",
                "mamba_conv_bias": "use_conv_bias", "mamba_d_state": "ssm_state_size", "mamba_proj_bias": "use_bias",
                "mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim"},
    # The width inside is that of the heads, whatever `expand` says.
    ignored=STEPS + "time_step_rank expand mamba_expand moe_shared_expert_overlap sliding_window "
            "mtp_hybrid_override_pattern mtp_layers_block_type",
    rope=False, bias=False, gated=False, build=_nemotron_h,
    experts=Experts(
        "n_routed_experts", hidden="moe_intermediate_size", shared="moe_shared_expert_intermediate_size",
        router=Router("sigmoid"), options={"gated": False, "correction_bias": True},
    ),
)  # fmt: skip

_KINDS = Held(Listed(Only(("linear_attention", "full_attention"))))


def _is_linear(k: Keys, index: int) -> bool:
    """As listed, else all but the last of each interval."""
    if k.layer_types is None:
        return bool((index + 1) % k.full_attention_interval)
    return bool(k.per_layer("layer_types")[index] == "linear_attention")


def _full_attention(f: Family, k: Keys, index: int) -> SelfAttention:
    """Grouped queries, normalised by head, and a gate."""
    return SelfAttention(*heads(f, k), **biases(f, k), qk_norm=BY_HEAD, gated=True)


def _delta_net(k: Keys) -> Recurrence:
    """Gated DeltaNet."""
    divide(k.linear_num_value_heads, k.linear_num_key_heads, "linear_num_value_heads", "linear_num_key_heads")
    return GatedDelta(
        heads=k.linear_num_value_heads,
        head_dim=k.linear_value_head_dim,
        key_heads=k.linear_num_key_heads,
        key_dim=k.linear_key_head_dim,
        taps=k.linear_conv_kernel_dim,
    )


#: Gated DeltaNet and gated attention.
DELTA_NET = family("", "", DECODER, {
    "full_attention_interval": 4, "layer_types": _KINDS, "max_position_embeddings": 32768, "head_dim": 256,
    "attention_bias": False, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}, ignored="mamba_ssm_dtype mtp_use_dedicated_embeddings",
    attention=_full_attention, recurrent=_is_linear, recurrence=_delta_net)  # fmt: skip
DELTA_EXPERTS: dict[str, object] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}
GATED_EXPERTS = Experts(
    "num_experts", hidden="moe_intermediate_size", shared="shared_expert_intermediate_size",
    options={"shared_gate": True},
)  # fmt: skip
QWEN3_NEXT = family(
    "qwen3_next", "Qwen3NextForCausalLM", DELTA_NET, {
        **DELTA_EXPERTS, "intermediate_size": 5632, "num_key_value_heads": 2, "decoder_sparse_step": 1,
        "mlp_only_layers": None, "use_sliding_window": OFF,
    }, experts=replace(GATED_EXPERTS, layers=by_sparse_step),
)  # fmt: skip


def _qwen35_extras(f: Family, k: Keys) -> dict[str, Any]:
    """Prediction modules of the plan of a full layer, counted apart."""
    modules = k.mtp_num_hidden_layers
    if not modules:
        return {}
    note = modules_note(modules, "counted apart (mtp), not in the total")
    return {"mtp": Layer(_full_attention(f, k, 0), ffn(f, k, 0)), "mtp_modules": modules, "notes": (note,)}


QWEN35 = family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", DELTA_NET, {
        "mtp_num_hidden_layers": 0, "attn_output_gate": ON, "intermediate_size": 12288, "num_key_value_heads": 4,
        "mlp_only_layers": Held(Listed(INDEX, 0)),
    }, extras=_qwen35_extras,
)  # fmt: skip
QWEN35_MOE = family(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", QWEN35, {
        **DELTA_EXPERTS, "intermediate_size": None, "num_key_value_heads": 2, "num_experts_per_tok": 8,
        "num_experts": Held(COUNT, 256),
    }, experts=GATED_EXPERTS,
)  # fmt: skip


def _minimax_linear(k: Keys, index: int) -> bool:
    """By either list; without them every second layer."""
    if k.attn_type_list is not None and k.layer_types is not None:
        raise ConfigError("keys 'attn_type_list' and 'layer_types' both say which layers are linear; keep one")
    if k.attn_type_list is not None:
        return bool(k.per_layer("attn_type_list")[index] == 0)
    return index % 2 == 1 if k.layer_types is None else _is_linear(k, index)


def _lightning(k: Keys) -> Recurrence:
    """Lightning attention, with as many keys as queries."""
    count, _, width = heads(MINIMAX, k)
    return LightningAttention(count, width, chunk=k.block_size)


def _minimax_pattern(k: Keys) -> list[str]:
    """The pattern that the family has when nothing is said."""
    if k.attn_type_list is not None or k.layer_types is not None:
        return []
    return ["linear_attention" if _minimax_linear(k, i) else "full_attention" for i in range(k.num_hidden_layers)]


MINIMAX = family(
    "minimax minimax_text_01 minimax_m1", "MiniMaxForCausalLM MiniMaxText01ForCausalLM MiniMaxM1ForCausalLM", DECODER, {
        "layer_types": _KINDS, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "num_local_experts": 8, "num_experts_per_tok": 2, "attn_type_list": None, "block_size": 256, "postnorm": None,
        "shared_intermediate_size": only(0), "shared_moe_mode": None, "full_attention_interval": OFF,
    }, ignored=" ".join(
        [f"{of}_{by}_factor" for of in ("full_attn", "linear_attn", "mlp") for by in ("alpha", "beta")]
        + [f"layernorm_{of}_{by}" for of in ("full_attention", "linear_attention", "mlp") for by in ("alpha", "beta")]
    ), recurrent=_minimax_linear, recurrence=_lightning, experts=Experts(), pattern=_minimax_pattern,
)  # fmt: skip
