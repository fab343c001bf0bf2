"""Mamba and Mamba-2 alone.

Not here: hybrids with attention (`state_space_hybrids`), what mixers are made of (`recurrent`).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, FamilyConfig, Layers, Size, Taps, Times, divide
from meshwise.models.families.keys import Keys
from meshwise.models.recurrences import SelectiveStateSpace, StateSpace
from meshwise.models.spec import (
    Architecture,
    Head,
    Layer,
    Norm,
    group_layers,
)

#: Initial values of time steps, and which kernels compute the recurrence.
STEPS = frozenset({
    "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme",
    "rescale_prenorm_residual", "residual_in_fp32", "use_mamba_kernels", "use_mambapy", "use_falcon_mambapy",
    "use_associative_scan", "num_logits_to_keep", "mamba_ssm_cache_dtype", "mixer_rms_eps",
    "d_inner",
})  # fmt: skip


class Mamba(FamilyConfig):
    """Mamba-1, and Falcon Mamba: one mixer a layer, and nothing else."""

    model_types: ClassVar[tuple[str, ...]] = ("mamba", "falcon_mamba")
    classes: ClassVar[tuple[str, ...]] = ("MambaForCausalLM", "FalconMambaForCausalLM")
    ignored: ClassVar[frozenset[str]] = STEPS | {"fused_add_norm", "rms_norm", "pad_vocab_size_multiple"}

    vocab_size: Size
    hidden_size: Size = Field(validation_alias=AliasChoices("hidden_size", "d_model"))
    state_size: Size = 16
    num_hidden_layers: Layers = Field(validation_alias=AliasChoices("num_hidden_layers", "n_layer"))
    expand: Times = 2
    intermediate_size: Size | None = None
    ssm_cfg: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    conv_kernel: Taps = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    time_step_rank: Count | Literal["auto"] = "auto"
    tie_word_embeddings: bool = True

    def mixer(self) -> SelectiveStateSpace | StateSpace:
        """Give the mixer of every layer."""
        falcon = self.model_type == "falcon_mamba"
        rank = math.ceil(self.hidden_size / 16) if self.time_step_rank == "auto" else self.time_step_rank
        return SelectiveStateSpace(
            channels=self.intermediate_size or self.expand * self.hidden_size,
            state=self.state_size,
            step_rank=rank,
            taps=self.conv_kernel,
            conv_bias=self.use_conv_bias,
            bias=self.use_bias,
            inner_norms=falcon,
            weightless=falcon,
        )

    def architecture(self) -> Architecture:
        """Say what the keys mean."""
        return Architecture(
            d_model=self.hidden_size,
            vocab=self.vocab_size,
            groups=group_layers([Layer(self.mixer(), None)] * self.num_hidden_layers),
            head=Head(tied=self.tie_word_embeddings),
        )


class Mamba2(Mamba):
    """Mamba-2, with the keys of its port to the reference library."""

    model_types: ClassVar[tuple[str, ...]] = ("mamba2",)
    classes: ClassVar[tuple[str, ...]] = ("Mamba2ForCausalLM",)
    ignored: ClassVar[frozenset[str]] = STEPS | {"norm_before_gate", "rms_norm"}

    num_heads: Count = 128
    head_dim: Size = 64
    state_size: Size = 128
    n_groups: Count = 8
    chunk_size: Count = 256
    time_step_rank: Count | Literal["auto"] | None = None  # type: ignore[assignment]  # of Mamba-1, and unread
    tie_word_embeddings: bool = False

    def mixer(self) -> SelectiveStateSpace | StateSpace:
        """Give the mixer of every layer."""
        if self.intermediate_size not in (None, self.num_heads * self.head_dim):
            raise ConfigError(
                f"key 'intermediate_size': expected num_heads x head_dim ({self.num_heads * self.head_dim}), "
                f"found {self.intermediate_size}"
            )
        if self.num_heads * self.head_dim != self.expand * self.hidden_size:
            raise ConfigError(
                f"key 'num_heads': expected expand x hidden_size / head_dim "
                f"({self.expand} x {self.hidden_size} / {self.head_dim}), found {self.num_heads}"
            )
        divide(self.num_heads, self.n_groups, "num_heads", "n_groups")
        return StateSpace(
            heads=self.num_heads,
            head_dim=self.head_dim,
            groups=self.n_groups,
            state=self.state_size,
            taps=self.conv_kernel,
            chunk=self.chunk_size,
            conv_bias=self.use_conv_bias,
            bias=self.use_bias,
            bias_out=self.use_bias,
            norm_groups=1,
        )


class _SsmConfig(Keys):
    """`ssm_cfg` of the original implementation: arguments of its mixer, with that one's defaults."""

    model_config = ConfigDict(extra="forbid")

    layer: Literal["Mamba1", "Mamba2"] = "Mamba1"
    d_state: Size | None = None
    d_conv: Taps = 4
    expand: Times = 2
    headdim: Size = 64
    ngroups: Count = 1
    chunk_size: Count = 256
    dt_rank: Count | Literal["auto"] = "auto"
    conv_bias: bool = True
    bias: bool = False
    rmsnorm: bool = True


class MambaSsm(FamilyConfig):
    """Mamba and Mamba-2 as first published: the keys of the `mamba_ssm` package, which has no `model_type`."""

    model_types: ClassVar[tuple[str, ...]] = ("mamba_ssm",)
    ignored: ClassVar[frozenset[str]] = frozenset({"residual_in_fp32", "fused_add_norm"})

    model_type: str = "mamba_ssm"
    d_model: Size
    n_layer: Layers
    vocab_size: Size
    d_intermediate: Literal[0] | None = None
    ssm_cfg: _SsmConfig = _SsmConfig()
    attn_layer_idx: Annotated[list[int], Field(max_length=0)] | None = None
    attn_cfg: dict[str, Any] | None = None
    rms_norm: bool = True
    pad_vocab_size_multiple: Count = 8
    tie_embeddings: bool = True

    def mixer(self) -> SelectiveStateSpace | StateSpace:
        """Give the mixer of every layer."""
        c = self.ssm_cfg
        if c.layer == "Mamba1":
            rank = math.ceil(self.d_model / 16) if c.dt_rank == "auto" else c.dt_rank
            return SelectiveStateSpace(
                c.expand * self.d_model, c.d_state or 16, rank, c.d_conv, conv_bias=c.conv_bias, bias=c.bias
            )
        heads = divide(c.expand * self.d_model, c.headdim, "d_model", "headdim")
        divide(heads, c.ngroups, "ssm_cfg: number of heads", "ngroups")
        return StateSpace(
            heads=heads,
            head_dim=c.headdim,
            groups=c.ngroups,
            state=c.d_state or 128,
            taps=c.d_conv,
            chunk=c.chunk_size,
            conv_bias=c.conv_bias,
            bias=c.bias,
            bias_out=c.bias,
            norm=c.rmsnorm,
        )

    def architecture(self) -> Architecture:
        """Say what the keys mean."""
        norm = Norm(bias=not self.rms_norm)
        layer = Layer(self.mixer(), None, pre_attn=norm)
        step = self.pad_vocab_size_multiple
        return Architecture(
            d_model=self.d_model,
            vocab=-(-self.vocab_size // step) * step,
            groups=group_layers([layer] * self.n_layer),
            head=Head(norm=norm, tied=self.tie_embeddings),
        )


FAMILIES = (Mamba, Mamba2, MambaSsm)
