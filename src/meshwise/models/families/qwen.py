"""Qwen 2 to 3, dense and mixtures: biased queries in the second generation, normalised ones in the third."""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.models.families.base import Count, Index, Off, Positions, Size
from meshwise.models.families.decoder import Decoder, LayerType, PatternMixin
from meshwise.models.spec import Mixture, Mlp, QkNorm, Router


class Qwen2(PatternMixin):
    """Qwen 2 and 2.5."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"use_mrope"})

    intermediate_size: Size | None = 22016
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Positions | None = 32768
    use_sliding_window: bool = False
    sliding_window: Positions | None = 4096
    max_window_layers: Index = 28
    qkv_bias: Literal[True] | None = None

    def bias(self) -> bool:
        """Say yes, always."""
        return True

    def bias_out(self) -> bool:
        """Never."""
        return False

    def default_type(self, index: int) -> LayerType:
        """Layers from `max_window_layers` on slide, when windows are on."""
        slides = self.use_sliding_window and self.sliding_window is not None and index >= self.max_window_layers
        return "sliding_attention" if slides else "full_attention"

    def window(self, index: int) -> int | None:
        """No window at all while `use_sliding_window` is off, whatever else is said."""
        return super().window(index) if self.use_sliding_window else None


class Qwen3(Qwen2):
    """Qwen 3: queries and keys normalised by head, a head width of its own."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)

    head_dim: Size | None = 128
    attention_bias: bool = False

    def bias(self) -> bool:
        """As configured."""
        return self.attention_bias

    def bias_out(self) -> bool:
        """As configured."""
        return self.attention_bias

    def qk_norm(self) -> QkNorm | None:
        """Each head, with one weight for all."""
        return QkNorm()


class _SparseMixin(Decoder):
    """Which layers are mixtures, and of what."""

    decoder_sparse_step: Count = 1
    moe_intermediate_size: Size
    num_experts_per_tok: Count
    num_experts: Index = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))
    norm_topk_prob: bool | None = None
    mlp_only_layers: list[int] | None = None

    def shared(self) -> dict[str, int | bool]:
        """Give what every token visits."""
        return {}

    def ffn(self, index: int) -> Mlp | Mixture:
        """Every `decoder_sparse_step`-th layer is a mixture, but those listed."""
        sparse = self.num_experts > 0 and (index + 1) % self.decoder_sparse_step == 0
        if not sparse or index in (self.mlp_only_layers or ()):
            return Mlp(self.width)
        router = Router(normalised=bool(self.norm_topk_prob))
        return Mixture(
            self.num_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            router=router,
            **self.shared(),  # type: ignore[arg-type]
        )


class Qwen2Moe(Qwen2, _SparseMixin):
    """Qwen 1.5 and 2 mixtures: a shared expert with a gate of its own."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_moe",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen2MoeForCausalLM",)

    intermediate_size: Size | None = 5632
    num_key_value_heads: Count | None = 16
    moe_intermediate_size: Size = 1408
    shared_expert_intermediate_size: Size = 5632
    num_experts_per_tok: Count = 4
    num_experts: Index = Field(default=60, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    qkv_bias: bool = True  # type: ignore[assignment]

    def bias(self) -> bool:
        """As configured."""
        return self.qkv_bias

    def shared(self) -> dict[str, int | bool]:
        """One shared expert and its gate."""
        return {"shared": self.shared_expert_intermediate_size, "shared_gate": True}

    def default_type(self, index: int) -> LayerType:
        """Every second of the first `max_window_layers` layers slides, when windows are on."""
        slides = self.use_sliding_window and index % 2 == 0 and index < self.max_window_layers
        return "sliding_attention" if slides else "full_attention"


class Qwen3Moe(Qwen3, _SparseMixin):
    """Qwen 3 mixtures: no shared expert."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen3MoeForCausalLM",)

    intermediate_size: Size | None = 6144
    num_key_value_heads: Count | None = 4
    head_dim: Size | None = None
    qkv_bias: Off = None  # type: ignore[assignment]
    use_qk_norm: Literal[True] | None = None
    shared_expert_intermediate_size: Literal[0] | None = None
    moe_intermediate_size: Size = 768
    num_experts_per_tok: Count = 8
    num_experts: Index = Field(default=128, validation_alias=AliasChoices("num_experts", "num_local_experts"))

    def default_type(self, index: int) -> LayerType:
        """All layers slide, when windows are on."""
        return "sliding_attention" if self.use_sliding_window and self.sliding_window is not None else "full_attention"


FAMILIES = (Qwen2, Qwen2Moe, Qwen3, Qwen3Moe)
