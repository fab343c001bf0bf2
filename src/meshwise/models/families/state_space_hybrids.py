"""Hybrids of Mamba or Mamba-2 with attention: Jamba, Bamba, Granite 4 and Nemotron-H.

Not here: Mamba alone (`state_space`), what mixers are made of (`recurrent`).
"""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field, model_validator

from meshwise.core.errors import ConfigError
from meshwise.models.families.activations import check_activation
from meshwise.models.families.base import Count, Index, Off, Positions, Size, Taps, Times, divide
from meshwise.models.families.decoder import Decoder
from meshwise.models.families.llama import Granite
from meshwise.models.families.state_space import STEPS
from meshwise.models.recurrences import SelectiveStateSpace, StateSpace
from meshwise.models.spec import (
    Architecture,
    Layer,
    Mixer,
    Mixture,
    Mlp,
    group_layers,
)


class _Hybrid(Decoder):
    """Decoders of which some layers mix by a recurrence."""

    def recurrent(self, index: int) -> bool:
        """Whether this layer does."""
        raise AssertionError(f"{type(self).__name__} must say which layers are recurrent; asked of {index}")

    def recurrence(self) -> Mixer:
        """Give the recurrence."""
        raise AssertionError(f"{type(self).__name__} must say its recurrence")

    def layer(self, index: int) -> Layer:
        """One mixer, one feed-forward."""
        mixer = self.recurrence() if self.recurrent(index) else self.attention(index)
        return Layer(mixer, self.ffn(index), pre_attn=self.norm, pre_mlp=self.norm)


class Jamba(_Hybrid):
    """Jamba: Mamba-1, every eighth layer attention without positions, every second a mixture."""

    model_types: ClassVar[tuple[str, ...]] = ("jamba",)
    classes: ClassVar[tuple[str, ...]] = ("JambaForCausalLM",)
    ignored: ClassVar[frozenset[str]] = STEPS

    intermediate_size: Size | None = 14336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Positions | None = 262144
    num_experts: Count = Field(default=16, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Count = 2
    expert_layer_period: Count = 2
    expert_layer_offset: Index = 1
    attn_layer_period: Count = 8
    attn_layer_offset: Index = 4
    mamba_d_state: Size = 16
    mamba_d_conv: Taps = 4
    mamba_expand: Times = 2
    mamba_dt_rank: Count | Literal["auto"] = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_inner_layernorms: Literal[True] | None = None

    def rope(self, index: int) -> bool:
        """No layer has positions."""
        return False

    def recurrent(self, index: int) -> bool:
        """All but one layer of each period."""
        self._within("attn_layer_offset", self.attn_layer_offset, self.attn_layer_period)
        return index % self.attn_layer_period != self.attn_layer_offset

    def recurrence(self) -> Mixer:
        """Mamba-1 with norms inside."""
        rank = math.ceil(self.hidden_size / 16) if self.mamba_dt_rank == "auto" else self.mamba_dt_rank
        return SelectiveStateSpace(
            channels=self.mamba_expand * self.hidden_size,
            state=self.mamba_d_state,
            step_rank=rank,
            taps=self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            bias=self.mamba_proj_bias,
            inner_norms=True,
        )

    def ffn(self, index: int) -> Mlp | Mixture:
        """Give a mixture in one layer of each period, unless there is only one expert."""
        self._within("expert_layer_offset", self.expert_layer_offset, self.expert_layer_period)
        sparse = index % self.expert_layer_period == self.expert_layer_offset
        if not sparse or self.num_experts == 1:
            return Mlp(self.width)
        return Mixture(self.num_experts, self.num_experts_per_tok, self.width)

    @staticmethod
    def _within(key: str, offset: int, period: int) -> None:
        if offset >= period:
            raise ConfigError(f"key {key!r}: expected less than its period ({period}), found {offset}")


class _Mamba2Hybrid(_Hybrid):
    """Hybrids with Mamba-2, by the keys of Bamba and Granite 4."""

    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: Size = 256
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_d_conv: Taps = 4
    mamba_expand: Times = 2
    mamba_chunk_size: Count = 256
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def recurrence(self) -> Mixer:
        """Mamba-2; the gated norm is over all heads."""
        inner = self.mamba_expand * self.hidden_size
        width = divide(inner, self.mamba_n_heads, "mamba_expand x hidden_size", "mamba_n_heads")
        if self.mamba_d_head not in ("auto", width):
            raise ConfigError(
                f"key 'mamba_d_head': expected mamba_expand x hidden_size / mamba_n_heads ({width}), "
                f"found {self.mamba_d_head}"
            )
        divide(self.mamba_n_heads, self.mamba_n_groups, "mamba_n_heads", "mamba_n_groups")
        return StateSpace(
            heads=self.mamba_n_heads,
            head_dim=width,
            groups=self.mamba_n_groups,
            state=self.mamba_d_state,
            taps=self.mamba_d_conv,
            chunk=self.mamba_chunk_size,
            conv_bias=self.mamba_conv_bias,
            bias=self.mamba_proj_bias,
            bias_out=self.mamba_proj_bias,
            norm_groups=1,
        )


class Bamba(_Mamba2Hybrid):
    """Bamba: Mamba-2, with attention in the layers that are listed."""

    model_types: ClassVar[tuple[str, ...]] = ("bamba",)
    classes: ClassVar[tuple[str, ...]] = ("BambaForCausalLM",)
    ignored: ClassVar[frozenset[str]] = STEPS | {"z_loss_coefficient", "attn_rotary_emb"}

    intermediate_size: Size | None = 14336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Positions | None = 262144
    attention_bias: bool = False
    mlp_bias: bool = False
    attn_layer_indices: list[int] | None = None

    def recurrent(self, index: int) -> bool:
        """All that are not listed."""
        return index not in (self.attn_layer_indices or ())


#: What `layer_types` calls layers, by either spelling.
_Kind = Literal["mamba", "attention", "linear_attention", "full_attention"]


class GraniteHybrid(_Mamba2Hybrid, Granite):
    """Granite 4: Mamba-2 and attention, then routed experts beside a shared one, or only the latter."""

    model_types: ClassVar[tuple[str, ...]] = ("granitemoehybrid",)
    classes: ClassVar[tuple[str, ...]] = ("GraniteMoeHybridForCausalLM",)
    ignored: ClassVar[frozenset[str]] = Granite.ignored | STEPS | {"init_method", "normalization_function"}

    mlp_bias: Off = None  # type: ignore[assignment]
    num_local_experts: Index | None = Field(
        default=8, validation_alias=AliasChoices("num_local_experts", "num_experts")
    )
    num_experts_per_tok: Index | None = 2
    shared_intermediate_size: Size = 1024
    position_embedding_type: Literal["rope", "nope"] | None = None
    layer_types: list[_Kind] | None = Field(
        default=None, validation_alias=AliasChoices("layer_types", "layers_block_type")
    )

    def rope(self, index: int) -> bool:
        """Only where the configuration asks for it."""
        return self.position_embedding_type == "rope"

    def recurrent(self, index: int) -> bool:
        """As listed; all when nothing is."""
        if self.layer_types is None:
            return True
        return self.per_layer("layer_types", self.layer_types)[index] in ("mamba", "linear_attention")

    def ffn(self, index: int) -> Mlp | Mixture:
        """Routed experts and a shared one; the shared one alone where no experts are."""
        if not self.num_local_experts:
            return Mlp(self.shared_intermediate_size)
        if not self.num_experts_per_tok:
            raise ConfigError("key 'num_experts_per_tok': expected at least 1, as there are experts; found 0")
        return Mixture(
            self.num_local_experts, self.num_experts_per_tok, self.width, shared=self.shared_intermediate_size
        )


#: The letters of `hybrid_override_pattern`, and the words of `layers_block_type`.
_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_Block = Literal["mamba", "attention", "mlp", "moe", "linear_attention", "full_attention"]
_OLD_WORDS = {"linear_attention": "mamba", "full_attention": "attention"}


class NemotronH(Decoder):
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3: every layer is one branch, of Mamba-2, attention, MLP or experts."""

    model_types: ClassVar[tuple[str, ...]] = ("nemotron_h",)
    classes: ClassVar[tuple[str, ...]] = ("NemotronHForCausalLM",)
    # The width inside is that of the heads, whatever `expand` says.
    ignored: ClassVar[frozenset[str]] = STEPS | {
        "time_step_rank", "expand", "mamba_expand", "moe_shared_expert_overlap", "sliding_window", "mamba_proj_bias",
        "mtp_hybrid_override_pattern", "mtp_layers_block_type",
    }  # fmt: skip

    intermediate_size: Size | None = 21504
    num_key_value_heads: Count | None = 8
    head_dim: Size | None = Field(default=128, validation_alias=AliasChoices("head_dim", "attention_head_dim"))
    max_position_embeddings: Positions | None = 4096
    attention_bias: bool = False
    mlp_bias: bool = False
    mlp_hidden_act: str = "relu2"
    mamba_hidden_act: Literal["silu"] = "silu"
    use_bias: bool = False
    hybrid_override_pattern: str | None = None
    layers_block_type: list[_Block] | None = Field(
        default=None, validation_alias=AliasChoices("layers_block_type", "layer_types")
    )
    ssm_state_size: Size = 128
    mamba_num_heads: Count = 128
    mamba_head_dim: Size = 64
    n_groups: Count = Field(default=8, validation_alias=AliasChoices("n_groups", "mamba_n_groups"))
    conv_kernel: Taps = Field(default=4, validation_alias=AliasChoices("conv_kernel", "mamba_d_conv"))
    chunk_size: Count = Field(default=128, validation_alias=AliasChoices("chunk_size", "mamba_chunk_size"))
    use_conv_bias: bool = Field(default=True, validation_alias=AliasChoices("use_conv_bias", "mamba_conv_bias"))
    n_routed_experts: Count = Field(
        default=8, validation_alias=AliasChoices("n_routed_experts", "num_local_experts", "num_experts")
    )
    num_experts_per_tok: Count = 2
    n_shared_experts: Literal[1] = 1
    moe_intermediate_size: Size = 7688
    moe_shared_expert_intermediate_size: Size = 7688
    moe_latent_size: Size | None = None
    tie_word_embeddings: Literal[False] = False  # the reference implementation never ties them
    num_nextn_predict_layers: Index | None = None

    @model_validator(mode="before")
    @classmethod
    def count_layers(cls, config: Any) -> Any:
        """Count what is listed, as files of later versions say no number of layers."""
        listed = config.get("layers_block_type") if isinstance(config, dict) else None
        if isinstance(listed, list) and listed and "num_hidden_layers" not in config:
            return {**config, "num_hidden_layers": len(listed)}
        return config

    def kinds(self) -> list[str]:
        """Give the kind of every layer."""
        pattern, listed = self.hybrid_override_pattern, self.layers_block_type
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
        if self.num_hidden_layers != len(kinds):
            raise ConfigError(
                f"key 'num_hidden_layers': expected {len(kinds)}, as the pattern has, found {self.num_hidden_layers}"
            )
        return kinds

    def rope(self, index: int) -> bool:
        """No layer has positions."""
        return False

    def bias(self) -> bool:
        """Attention's projections never have one."""
        return False

    def mixer(self) -> StateSpace:
        """Mamba-2; the gated norm is by group."""
        divide(self.mamba_num_heads, self.n_groups, "mamba_num_heads", "n_groups")
        return StateSpace(
            heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            groups=self.n_groups,
            state=self.ssm_state_size,
            taps=self.conv_kernel,
            chunk=self.chunk_size,
            conv_bias=self.use_conv_bias,
            bias=self.use_bias,
            bias_out=self.use_bias,
        )

    def mixture(self) -> Mixture:
        """Plain experts, with a shared one."""
        return Mixture(
            self.n_routed_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            gated=False,
            correction_bias=True,
            shared=self.moe_shared_expert_intermediate_size,
            shared_bias=self.mlp_bias,
            latent=self.moe_latent_size,
        )

    def branch(self, kind: str) -> Layer:
        """Give the layer of one kind."""
        if kind == "mamba":
            return Layer(self.mixer(), None)
        if kind == "attention":
            return Layer(self.attention(0), None)
        mlp = Mlp(self.width, gated=False, bias=self.mlp_bias, bias_out=self.mlp_bias)
        return Layer(None, mlp if kind == "mlp" else self.mixture())

    def architecture(self) -> Architecture:
        """Say what the keys mean."""
        check_activation("mlp_hidden_act", self.mlp_hidden_act, gated=False)
        return Architecture(
            d_model=self.hidden_size,
            vocab=self.vocab_size,
            groups=group_layers(self.branch(kind) for kind in self.kinds()),
            head=self.head(),
            max_positions=self.max_position_embeddings,
            notes=("multi-token-prediction modules are not counted",) if self.num_nextn_predict_layers else (),
        )


FAMILIES = (Jamba, Bamba, GraniteHybrid, NemotronH)
