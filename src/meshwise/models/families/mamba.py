"""Mamba and Mamba-2: their mixers by the keys of every family that has them, and models that are nothing else.

Rows spell these keys in their own way, so that one reading serves all. Not here: what mixers are made of (`recurrent`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.models.families.features import RMS_NORM, family
from meshwise.models.families.keys import INDEX, REQUIRED, SIZE, Held, Inside, Keys, Listed, divide, only, schema
from meshwise.models.recurrences import Recurrence, SelectiveStateSpace, StateSpace
from meshwise.models.spec import Architecture, Head, Layer, Norm, group_layers

#: Initial values of time steps, and which kernels compute the recurrence.
STEPS = (
    "time_step_limit time_step_min time_step_max time_step_floor time_step_scale time_step_init_scheme "
    "rescale_prenorm_residual residual_in_fp32 use_mamba_kernels use_mambapy use_falcon_mambapy use_associative_scan "
    "num_logits_to_keep mamba_ssm_cache_dtype mixer_rms_eps d_inner "
)


#: Keys of Mamba's mixer, by the names of Jamba; and of Mamba-2's, by those of Bamba and Granite 4.
MAMBA1_KEYS: dict[str, object] = {
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}  # fmt: skip
MAMBA2_KEYS: dict[str, object] = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip


def mamba1(k: Keys, channels: int, width: int, **further: Any) -> SelectiveStateSpace:
    """Mamba's mixer of so many channels, beside a residual stream of this width."""
    rank = k.mamba_dt_rank
    return SelectiveStateSpace(
        channels,
        k.mamba_d_state or 16,
        math.ceil(width / 16) if rank == "auto" else rank,
        k.mamba_d_conv,
        conv_bias=k.mamba_conv_bias,
        bias=k.mamba_proj_bias,
        **further,
    )


def mamba2(k: Keys, heads: int, head_dim: int, key: str = "", **further: Any) -> StateSpace:
    """Mamba-2's mixer; `key` names the number of heads where no key holds it."""
    divide(heads, k.mamba_n_groups, key or k.spelling("mamba_n_heads"), k.spelling("mamba_n_groups"))
    return StateSpace(
        heads,
        head_dim,
        k.mamba_n_groups,
        k.mamba_d_state or 128,
        k.mamba_d_conv,
        k.mamba_chunk_size,
        conv_bias=k.mamba_conv_bias,
        bias=k.mamba_proj_bias,
        bias_out=k.mamba_proj_bias,
        **further,
    )


def _alone(k: Keys, mixer: Recurrence, norm: Norm = RMS_NORM) -> Architecture:
    """A model of one mixer a layer, and nothing else."""
    return Architecture(
        d_model=k.hidden_size,
        vocab=k.vocab_size,
        groups=group_layers([Layer(mixer, None, pre_attn=norm)] * k.num_hidden_layers),
        head=Head(norm, tied=k.tie_word_embeddings),
    )


def _mamba(k: Keys) -> Architecture:
    falcon, channels = k.model_type == "falcon_mamba", k.intermediate_size or k.mamba_expand * k.hidden_size
    return _alone(k, mamba1(k, channels, k.hidden_size, inner_norms=falcon, weightless=falcon))


_SPELLED = {
    "hidden_size": "hidden_size d_model", "num_hidden_layers": "num_hidden_layers n_layer",
    "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand",
    "mamba_dt_rank": "time_step_rank", "mamba_conv_bias": "use_conv_bias", "mamba_proj_bias": "use_bias",
}  # fmt: skip
MAMBA = family(
    "mamba falcon_mamba", "MambaForCausalLM FalconMambaForCausalLM", None, {
        "vocab_size": REQUIRED, "hidden_size": REQUIRED, "num_hidden_layers": REQUIRED, **MAMBA1_KEYS,
        "intermediate_size": None, "ssm_cfg": only({}), "tie_word_embeddings": True,
    }, spelled=_SPELLED, ignored=STEPS + "fused_add_norm rms_norm pad_vocab_size_multiple", build=_mamba,
)  # fmt: skip


def _mamba2(k: Keys) -> Architecture:
    n, h, expand = k.mamba_n_heads, k.mamba_d_head, k.mamba_expand
    if k.intermediate_size not in (None, n * h):
        raise ConfigError(
            f"key 'intermediate_size': expected num_heads x head_dim ({n * h}), found {k.intermediate_size}"
        )
    if n * h != expand * k.hidden_size:
        raise ConfigError(
            f"key 'num_heads': expected expand x hidden_size / head_dim ({expand} x {k.hidden_size} / {h}), found {n}"
        )
    return _alone(k, mamba2(k, n, h, norm_groups=1))


MAMBA2 = family(
    "mamba2", "Mamba2ForCausalLM", MAMBA, {
        "mamba_n_heads": 128, "mamba_d_head": Held(SIZE, 64), "mamba_d_state": 128, "mamba_n_groups": 8,
        "mamba_chunk_size": 256, "mamba_dt_rank": None, "tie_word_embeddings": False,
    }, spelled=_SPELLED | {"mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_n_groups": "n_groups",
                           "mamba_chunk_size": "chunk_size"},
    ignored=STEPS + "norm_before_gate rms_norm", build=_mamba2,
)  # fmt: skip

#: `ssm_cfg` of the original implementation: arguments of its mixer, with that one's defaults.
SSM_CONFIG = schema({}, {
    "layer": only("Mamba1", "Mamba2", default="Mamba1"), "mamba_d_state": None, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_d_head": Held(SIZE, 64), "mamba_n_groups": 1, "mamba_chunk_size": 256, "mamba_dt_rank": "auto",
    "mamba_conv_bias": True, "mamba_proj_bias": False, "rmsnorm": True,
}, {
    "mamba_d_state": "d_state", "mamba_d_conv": "d_conv", "mamba_expand": "expand", "mamba_dt_rank": "dt_rank",
    "mamba_conv_bias": "conv_bias", "mamba_proj_bias": "bias", "mamba_d_head": "headdim", "mamba_n_groups": "ngroups",
    "mamba_chunk_size": "chunk_size",
})  # fmt: skip


def _mamba_ssm(k: Keys) -> Architecture:
    c, inner, step = k.ssm_cfg, k.ssm_cfg.mamba_expand * k.hidden_size, k.pad_vocab_size_multiple
    if c.layer == "Mamba1":
        mixer: Recurrence = mamba1(c, inner, k.hidden_size)
    else:
        heads = divide(inner, c.mamba_d_head, "d_model", "headdim")
        mixer = mamba2(c, heads, c.mamba_d_head, "ssm_cfg: number of heads", norm=c.rmsnorm)
    return replace(_alone(k, mixer, Norm(bias=not k.rms_norm)), vocab=-(-k.vocab_size // step) * step)


#: Mamba and Mamba-2 as first published: the keys of the `mamba_ssm` package, which has no `model_type`.
MAMBA_SSM = family(
    "mamba_ssm", "", None, {
        "model_type": "mamba_ssm", "hidden_size": REQUIRED, "num_hidden_layers": REQUIRED, "vocab_size": REQUIRED,
        "d_intermediate": only(0), "ssm_cfg": Held(Inside(SSM_CONFIG), {}), "attn_layer_idx": Held(Listed(INDEX, 0)),
        "attn_cfg": None, "rms_norm": True, "pad_vocab_size_multiple": 8, "tie_word_embeddings": True,
    }, spelled={"hidden_size": "d_model", "num_hidden_layers": "n_layer", "tie_word_embeddings": "tie_embeddings"},
    ignored="residual_in_fp32 fused_add_norm", build=_mamba_ssm,
)  # fmt: skip
