"""GPT-2 and its relatives: layer norms with biases, a plain and wide feed-forward, learned or rotary positions."""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, Layers, Positions, Size
from meshwise.models.families.decoder import LAYER_NORM, Decoder
from meshwise.models.spec import Embedding, Head, Layer, Mlp, Norm


class PlainDecoder(Decoder):
    """What the relatives of GPT-2 share: layer norms, and a plain feed-forward with biases."""

    norm: ClassVar[Norm] = LAYER_NORM

    def bias(self) -> bool:
        """Give always, unless a family says otherwise."""
        return True

    def ffn(self, index: int) -> Mlp:
        """Plain, with biases."""
        return Mlp(self.width, gated=False, bias=True, bias_out=True)


class Gpt2(PlainDecoder):
    """GPT-2: learned positions, tied head."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    classes: ClassVar[tuple[str, ...]] = ("GPT2LMHeadModel",)

    hidden_size: Size = Field(validation_alias=AliasChoices("n_embd", "hidden_size"))
    intermediate_size: Size | None = Field(default=None, validation_alias=AliasChoices("n_inner"))
    num_hidden_layers: Layers = Field(validation_alias=AliasChoices("n_layer", "num_hidden_layers"))
    num_attention_heads: Count = Field(validation_alias=AliasChoices("n_head", "num_attention_heads"))
    max_position_embeddings: Positions = Field(
        default=1024, validation_alias=AliasChoices("n_positions", "max_position_embeddings")
    )
    n_ctx: Positions | None = None
    tie_word_embeddings: bool = True

    def rope(self, index: int) -> bool:
        """Never: positions are learned."""
        return False

    def embedding(self) -> Embedding:
        """With learned positions."""
        return Embedding(positions=self.max_position_embeddings)


class GptBigCode(Gpt2):
    """StarCoder and SantaCoder: GPT-2 with one key/value head."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt_bigcode",)
    classes: ClassVar[tuple[str, ...]] = ("GPTBigCodeForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        [
            "attention_softmax_in_fp32",
            "inference_runner",
            "pad_key_length",
            "max_sequence_length",
            "pre_allocate_kv_cache",
            "validate_runner_input",
            "max_batch_size",
        ]
    )

    multi_query: bool = True

    def heads(self) -> tuple[int, int, int]:
        """One key/value head, unless configured otherwise."""
        n, _, h = super().heads()
        return n, 1 if self.multi_query else n, h


class GptJ(Gpt2):
    """GPT-J: rotary positions, parallel branches behind one norm, no biases in attention."""

    model_types: ClassVar[tuple[str, ...]] = ("gptj",)
    classes: ClassVar[tuple[str, ...]] = ("GPTJForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"rotary"})

    max_position_embeddings: Positions = Field(
        default=2048, validation_alias=AliasChoices("n_positions", "max_position_embeddings")
    )
    tie_word_embeddings: bool = False

    def bias(self) -> bool:
        """Never in attention."""
        return False

    def rope(self, index: int) -> bool:
        """Say yes, always."""
        return True

    def embedding(self) -> Embedding:
        """Without positions."""
        return Embedding()

    def layer(self, index: int) -> Layer:
        """One norm for both branches."""
        return Layer(self.attention(index), self.ffn(index), pre_attn=self.norm, pre_mlp=None, parallel=True)

    def head(self) -> Head:
        """With a bias."""
        return Head(norm=self.norm, tied=self.tie_word_embeddings, bias=True)


class GptNeo(PlainDecoder):
    """GPT-Neo: learned positions, local layers, a bias on attention's output only."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt_neo",)
    classes: ClassVar[tuple[str, ...]] = ("GPTNeoForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"resid_dropout", "embed_dropout"})

    num_hidden_layers: Layers = Field(validation_alias=AliasChoices("num_layers", "num_hidden_layers"))
    num_attention_heads: Count = Field(validation_alias=AliasChoices("num_heads", "num_attention_heads"))
    max_position_embeddings: Positions = 2048
    tie_word_embeddings: bool = True
    window_size: Positions = 256
    attention_types: list[Any] = Field(default_factory=lambda: [[["global", "local"], 12]])
    attention_layers: list[Literal["global", "local"]] | None = None

    def bias(self) -> bool:
        """Never on queries, keys, values."""
        return False

    def bias_out(self) -> bool:
        """Say yes, always."""
        return True

    def rope(self, index: int) -> bool:
        """Never: positions are learned."""
        return False

    def window(self, index: int) -> int | None:
        """Local layers see `window_size` positions."""
        kinds = self._kinds()
        if self.attention_layers is not None and self.attention_layers != kinds:
            raise ConfigError("keys 'attention_layers' and 'attention_types' disagree; keep one")
        return self.window_size if self.per_layer("attention_types", kinds)[index] == "local" else None

    def _kinds(self) -> list[Any]:
        """Expand `[[["global", "local"], 12]]`, which means that the pattern comes twelve times."""
        try:
            kinds = [kind for pattern, times in self.attention_types for kind in pattern * times]
        except (TypeError, ValueError):
            kinds = [None]
        if not set(kinds) <= {"global", "local"}:
            raise ConfigError(
                "key 'attention_types': expected such as [[['global', 'local'], 12]], "
                f"found {self.attention_types!r:.80}"
            )
        return kinds

    def embedding(self) -> Embedding:
        """With learned positions."""
        return Embedding(positions=self.max_position_embeddings)


class GptNeoX(PlainDecoder):
    """GPT-NeoX and Pythia: rotary positions, parallel branches with a norm each."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt_neox",)
    classes: ClassVar[tuple[str, ...]] = ("GPTNeoXForCausalLM",)

    intermediate_size: Size = 24576
    max_position_embeddings: Positions | None = 2048
    attention_bias: bool = True
    use_parallel_residual: bool = True

    def bias(self) -> bool:
        """As configured."""
        return self.attention_bias

    def layer(self, index: int) -> Layer:
        """Parallel, as configured."""
        return Layer(
            self.attention(index), self.ffn(index), self.norm, pre_mlp=self.norm, parallel=self.use_parallel_residual
        )


class Opt(PlainDecoder):
    """OPT: learned positions with two spare rows, and in the 350M a narrower embedding and norms after the sums."""

    model_types: ClassVar[tuple[str, ...]] = ("opt",)
    classes: ClassVar[tuple[str, ...]] = ("OPTForCausalLM",)

    intermediate_size: Size = Field(default=3072, validation_alias=AliasChoices("ffn_dim"))
    max_position_embeddings: Positions = 2048
    tie_word_embeddings: bool = True
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = Field(default=False, validation_alias=AliasChoices("_remove_final_layer_norm"))
    word_embed_proj_dim: Size | None = None
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True

    def bias(self) -> bool:
        """As configured."""
        return self.enable_bias

    def rope(self, index: int) -> bool:
        """Never: positions are learned."""
        return False

    def ffn(self, index: int) -> Mlp:
        """Plain."""
        return Mlp(self.width, gated=False, bias=self.enable_bias, bias_out=self.enable_bias)

    def _norm(self) -> Norm:
        affine = self.layer_norm_elementwise_affine
        return Norm(weight=affine, bias=affine)

    def _word_width(self) -> int | None:
        """Width of the token table, where it differs."""
        width = self.word_embed_proj_dim or self.hidden_size
        return None if width == self.hidden_size else width

    def layer(self, index: int) -> Layer:
        """Norms before the branches, or after the sums."""
        before, after = (self._norm(), None) if self.do_layer_norm_before else (None, self._norm())
        return Layer(self.attention(index), self.ffn(index), pre_attn=before, pre_mlp=before, residual_norm=after)

    def embedding(self) -> Embedding:
        """With learned positions; the first two rows stand for padding."""
        return Embedding(positions=self.max_position_embeddings + 2, width=self._word_width())

    def head(self) -> Head:
        """Without a final norm when norms come after the sums."""
        final = self.do_layer_norm_before and not self.remove_final_layer_norm
        return Head(self._norm() if final else None, tied=self.tie_word_embeddings, width=self._word_width())


FAMILIES = (Gpt2, GptBigCode, GptJ, GptNeo, GptNeoX, Opt)
