"""DeepSeek-V4: windows and compressed positions in place of latent attention, several residual streams, no dense layer.

Its routing corrections and the tables by which its first layers route tokens are no parameters in the reference
implementation, and not counted. Not here: the layers (`compressed`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, Index, Off, Positions, Size, divide
from meshwise.models.families.decoder import Decoder
from meshwise.models.families.keys import Keys
from meshwise.models.spec import Compressed, Embedding, Head, Indexer, Layer, Mixture, Streams

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}

#: What `layer_types` may say of a layer.
LayerType = Literal["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


class CompressRates(Keys):
    """The key `compress_rates`: positions that one key stands for."""

    compressed_sparse_attention: Count = 4
    heavily_compressed_attention: Count = 128


class DeepseekV4(Decoder):
    """DeepSeek-V4 Flash and Pro."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v4",)
    classes: ClassVar[tuple[str, ...]] = ("DeepseekV4ForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"hc_eps", "swiglu_limit", "compress_rope_theta", "qk_rope_head_dim"})

    num_key_value_heads: Literal[1] | None = 1
    head_dim: Size | None = 512
    max_position_embeddings: Positions | None = 1048576
    attention_bias: Off = False
    mlp_bias: Off = False
    moe_intermediate_size: Size = 2048
    n_routed_experts: Count = Field(default=256, validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    n_shared_experts: Literal[1] = 1
    num_experts_per_tok: Count = 6
    q_lora_rank: Size = 1024
    o_lora_rank: Size = 1024
    o_groups: Count = 8
    index_n_heads: Count = 64
    index_head_dim: Size = 128
    index_topk: Count = 512
    sliding_window: Positions = 128
    hc_mult: Count = 4
    hc_sinkhorn_iters: Count = 20
    compress_ratios: list[Literal[0, 4, 128]] | None = None
    compress_rates: CompressRates | None = None
    compress_rate_csa: Count | None = None
    compress_rate_hca: Count | None = None
    layer_types: list[LayerType] | None = None
    mlp_layer_types: list[Literal["hash_moe", "moe"]] | None = None
    num_hash_layers: Index | None = None
    expert_dtype: str | None = None
    num_nextn_predict_layers: Index = 1

    def kind(self, index: int) -> str:
        """Say what this layer attends to: as listed, by its ratio, or heavily compressed at first and then by turns."""
        for key, listed in (("layer_types", self.layer_types), ("compress_ratios", self.compress_ratios)):
            if listed is not None:
                if len(listed) < self.num_hidden_layers:  # multi-token-prediction modules may follow
                    raise ConfigError(
                        f"key {key!r}: expected one entry a layer ({self.num_hidden_layers}), found {len(listed)}"
                    )
                said = listed[index]
                return _BY_RATIO[said] if isinstance(said, int) else said
        return _SPARSE if index >= 2 and index % 2 else _HEAVY

    def ratio(self, kind: str) -> int:
        """Say how many positions one key stands for."""
        rates = self.compress_rates or CompressRates()
        if kind == _SPARSE:
            return self.compress_rate_csa or rates.compressed_sparse_attention
        return (self.compress_rate_hca or rates.heavily_compressed_attention) if kind == _HEAVY else 0

    def layer(self, index: int) -> Layer:
        """Attention and a mixture, between streams."""
        kind = self.kind(index)
        divide(self.num_attention_heads, self.o_groups, "num_attention_heads", "o_groups")
        attention = Compressed(
            heads=self.num_attention_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            q_rank=self.q_lora_rank,
            groups=self.o_groups,
            group_rank=self.o_lora_rank,
            window=self.sliding_window,
            ratio=self.ratio(kind),
            overlap=kind == _SPARSE,
            indexer=Indexer(self.index_n_heads, self.index_head_dim, self.index_topk) if kind == _SPARSE else None,
        )
        return Layer(attention, self.mixture(), streams=Streams(self.hc_mult, self.hc_sinkhorn_iters))

    def mixture(self) -> Mixture:
        """Experts and a shared one; layers that route by a table weigh by the router, too."""
        width = self.moe_intermediate_size
        if self.intermediate_size not in (None, width):
            raise ConfigError(
                f"key 'intermediate_size': expected that of moe_intermediate_size ({width}), as no layer is dense; "
                f"found {self.intermediate_size}"
            )
        return Mixture(self.n_routed_experts, self.num_experts_per_tok, width, shared=width)

    def embedding(self) -> Embedding:
        """Every stream begins with the token."""
        return Embedding(streams=self.hc_mult)

    def head(self) -> Head:
        """The streams are weighed together before the last norm."""
        return Head(tied=self.tie_word_embeddings, streams=self.hc_mult)

    def weight_dtype(self) -> DType | None:
        """Nearly all weights are experts', whose format has a key of its own."""
        said = self.expert_dtype or (self.quantization_config or {}).get("expert_dtype")
        return DType.FP4 if said == "fp4" else super().weight_dtype()

    def extras(self) -> dict[str, Any]:
        """Say what is not counted."""
        modules = self.num_nextn_predict_layers
        if not modules:
            return {}
        return {"notes": (f"{modules} multi-token-prediction module{'s' if modules > 1 else ''} not counted",)}


FAMILIES = (DeepseekV4,)
