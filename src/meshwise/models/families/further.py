"""Further dense families and mixtures of the common plan: one class each, saying only where it differs."""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from typing import ClassVar

from pydantic import AliasChoices, Field

from meshwise.models.families.base import Count, Index, Off, Positions, Size
from meshwise.models.families.decoder import LAYER_NORM, LayerType, PatternMixin
from meshwise.models.families.deepseek import LeadingDense
from meshwise.models.families.gpt import PlainDecoder
from meshwise.models.families.llama import Llama
from meshwise.models.families.olmo import Olmo2
from meshwise.models.spec import Mixture, Mlp, Norm, QkNorm


class Arcee(Llama):
    """Arcee's AFM: Llama with a plain feed-forward."""

    model_types: ClassVar[tuple[str, ...]] = ("arcee",)
    classes: ClassVar[tuple[str, ...]] = ("ArceeForCausalLM",)

    intermediate_size: Size = 18432
    max_position_embeddings: Positions | None = 4096

    def ffn(self, index: int) -> Mlp | Mixture:
        """Plain."""
        return Mlp(self.width, gated=False, bias=self.mlp_bias, bias_out=self.mlp_bias)


class Nemotron(Arcee):
    """Nemotron-4 and Minitron: layer norms, a plain feed-forward."""

    model_types: ClassVar[tuple[str, ...]] = ("nemotron",)
    classes: ClassVar[tuple[str, ...]] = ("NemotronForCausalLM",)
    norm: ClassVar[Norm] = LAYER_NORM
    ignored: ClassVar[frozenset[str]] = frozenset({"rope_percent", "partial_rotary_percent"})

    intermediate_size: Size = 24576


class Persimmon(PlainDecoder):
    """Persimmon: biases everywhere, queries and keys normalised by head."""

    model_types: ClassVar[tuple[str, ...]] = ("persimmon",)
    classes: ClassVar[tuple[str, ...]] = ("PersimmonForCausalLM",)

    intermediate_size: Size | None = 16384
    max_position_embeddings: Positions | None = 16384
    qk_layernorm: bool = True

    def qk_norm(self) -> QkNorm | None:
        """Give a layer norm of each head, with one weight for all."""
        return QkNorm(norm=LAYER_NORM) if self.qk_layernorm else None


class SeedOss(Llama):
    """Seed-OSS: biases of queries, keys and values apart from that of the output."""

    model_types: ClassVar[tuple[str, ...]] = ("seed_oss",)
    classes: ClassVar[tuple[str, ...]] = ("SeedOssForCausalLM",)

    intermediate_size: Size = 27648
    num_key_value_heads: Count | None = 8
    head_dim: Size | None = 128
    max_position_embeddings: Positions | None = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False

    def bias_out(self) -> bool:
        """As configured."""
        return self.attention_out_bias


class InternLm2(Llama):
    """InternLM 2 and 2.5: Llama's plan, without biases."""

    model_types: ClassVar[tuple[str, ...]] = ("internlm2",)
    classes: ClassVar[tuple[str, ...]] = ("InternLM2ForCausalLM",)

    vocab_size: Size
    bias_key: Off = Field(default=None, validation_alias=AliasChoices("bias"))
    attention_bias: Off = None  # type: ignore[assignment]
    mlp_bias: Off = None  # type: ignore[assignment]


class HunyuanDense(Llama):
    """Hunyuan, dense: queries and keys normalised by head."""

    model_types: ClassVar[tuple[str, ...]] = ("hunyuan_v1_dense",)
    classes: ClassVar[tuple[str, ...]] = ("HunYuanDenseV1ForCausalLM",)

    mlp_bias: Off = None  # type: ignore[assignment]

    def qk_norm(self) -> QkNorm | None:
        """Each head, with one weight for all."""
        return QkNorm()


class Exaone4(Olmo2, PatternMixin):
    """EXAONE 4: norms after the branches, queries and keys normalised by head, three local layers to a global one."""

    model_types: ClassVar[tuple[str, ...]] = ("exaone4",)
    classes: ClassVar[tuple[str, ...]] = ("Exaone4ForCausalLM",)

    intermediate_size: Size | None = 16384
    num_key_value_heads: Count | None = 32
    attention_bias: Off = None  # type: ignore[assignment]
    sliding_window: Positions | None = 4096
    sliding_window_pattern: Count | None = 4

    def qk_norm(self) -> QkNorm | None:
        """Each head, with one weight for all."""
        return QkNorm()

    def default_type(self, index: int) -> LayerType:
        """Give the last of each pattern sees everything; and all do when there is no window."""
        local = self.sliding_window is not None and (index + 1) % (self.sliding_window_pattern or 1)
        return "sliding_attention" if local else "full_attention"

    def rope(self, index: int) -> bool:
        """Global layers have no positions in models with windows."""
        return self.sliding_window is None or self.layer_type(index) == "sliding_attention"


class Dots1(LeadingDense, PatternMixin):
    """dots.llm1: grouped attention with normalised queries and keys, then DeepSeek's mixtures."""

    model_types: ClassVar[tuple[str, ...]] = ("dots1",)
    classes: ClassVar[tuple[str, ...]] = ("Dots1ForCausalLM",)

    intermediate_size: Size | None = 10944
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Positions | None = 2048
    attention_bias: bool = False
    moe_intermediate_size: Size = 1408
    first_k_dense_replace: Index = 0
    norm_topk_prob: bool | None = False
    sliding_window: Positions | None = 4096
    max_window_layers: Index = 62

    def qk_norm(self) -> QkNorm | None:
        """Each head, with one weight for all."""
        return QkNorm()

    def default_type(self, index: int) -> LayerType:
        """Layers from `max_window_layers` on slide."""
        slides = self.sliding_window is not None and index >= self.max_window_layers
        return "sliding_attention" if slides else "full_attention"


FAMILIES = (Arcee, Nemotron, Persimmon, SeedOss, InternLm2, HunyuanDense, Exaone4, Dots1)
