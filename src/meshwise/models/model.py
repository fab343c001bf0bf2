"""A model: its architecture, its programs, and the counts that are read from them. Knows no mesh and no batch size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError, LayoutError
from meshwise.core.explanation import Answer
from meshwise.core.kernels import Scan
from meshwise.core.tensors import Attention, Program, Tensor
from meshwise.core.units import format_count
from meshwise.models.build import build_mtp, build_serving, build_train
from meshwise.models.counts import CacheKind, KVCache, ParameterCount, count_parameters
from meshwise.models.recurrences import Recurrence
from meshwise.models.spec import Architecture, Compressed, LayerGroup, Mixture


@dataclass(frozen=True, slots=True)
class Source:
    """Where a configuration comes from, and when it was read."""

    text: str
    date: str = ""


@dataclass(frozen=True, slots=True)
class Functions:
    """What a model computes around its matmuls, as far as its configuration says; "" and None where it does not.

    Args:
        activation: of the feed-forward parts, by its published name ("silu", "gelu_pytorch_tanh").
        norm_epsilon: added to variances.
        rope_base: of the rotary frequencies.
        rope_scaled: whether the frequencies are stretched.
        rope_share: share of a head's width that is rotated.
    """

    activation: str = ""
    norm_epsilon: float | None = None
    rope_base: float | None = None
    rope_scaled: bool = False
    rope_share: float = 1.0


def _cached(group: LayerGroup) -> Iterator[CacheKind]:
    """What the layers of a group keep of a sequence."""
    mixer = group.layer.attention
    if mixer is None:
        return
    if isinstance(mixer, Recurrence):
        state, convolution = mixer.state_elements, mixer.conv_elements
        yield CacheKind(group.name, group.repeat, 0, state=state, convolution=convolution)
        return
    if isinstance(mixer, Compressed):
        yield CacheKind(group.name, group.repeat, mixer.head_dim, mixer.window)
        if mixer.ratio:
            yield CacheKind(
                f"{group.name}.compressed", group.repeat, mixer.compressed_elements, index=mixer.index_elements
            )
        return
    index = 0 if mixer.indexer is None else mixer.indexer.head_dim
    yield CacheKind(group.name, group.repeat, group.layer.cached_elements, mixer.span, index=index)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The formats of a published checkpoint whose matrices are narrower than its `torch_dtype`.

    Args:
        method: `quant_method` of the configuration.
        weights: of the projections of layers; None where the method is not known here.
        attention: of those of attention, None where they are as `weights`.
        experts: of those of routed experts, likewise.
        operands: of products with them; None where these are as wide as activations.
        kv: of the cache, None where nothing is said.
        group: elements of a weight that share a scale, None where nothing is said.
    """

    method: str
    weights: DType | None
    attention: DType | None = None
    experts: DType | None = None
    operands: DType | None = None
    kv: DType | None = None
    group: int | None = None

    @property
    def most(self) -> DType | None:
        """The format of most weights: the narrower of experts' and the rest's."""
        return min((d for d in (self.weights, self.experts) if d is not None), key=lambda d: d.bits, default=None)


@dataclass(frozen=True, repr=False)
class Model(Answer):
    """What is computed: a decoder, described once.

    Args:
        name: what the user typed or the catalog says.
        family: `model_type` of the configuration.
        spec: the architecture.
        config: the configuration verbatim, from which all of this can be read again.
        source: where it comes from.
        weight_dtype: format of the published weights, when the configuration says so.
        hub_names: names it is known by elsewhere.
        functions: what is computed around its matmuls.
        quantization: how its published checkpoint is quantised; None where it is not.

    >>> from meshwise.models import load_model
    >>> model = load_model("llama-3-70b")
    >>> model.parameters.total, model.kv_cache.bytes_per_token(DType.BF16)
    (70553706496, 327680.0)
    """

    name: str
    family: str
    spec: Architecture
    config: Mapping[str, Any]
    source: Source
    weight_dtype: DType | None = None
    hub_names: tuple[str, ...] = ()
    functions: Functions = field(default_factory=Functions)
    quantization: Quantization | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.family, self.spec))

    def __repr__(self) -> str:
        return f"<Model: {self.name}, {format_count(self.parameters.total)} parameters>"

    @property
    def num_layers(self) -> int:
        """L, all layers."""
        return self.spec.num_layers

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Query heads of the layers, each number once."""
        return tuple(sorted(set(self._of_attention("heads"))))

    @cached_property
    def kv_heads(self) -> int:
        """Key/value heads of the layers that have most; 1 for latents."""
        return max(self._of_attention("kv_heads"), default=1)

    def _of_attention(self, name: str) -> list[int]:
        counts = (getattr(g.layer.attention, name, None) for g in self.spec.groups)
        return [int(n) for n in counts if n]

    @property
    def d_model(self) -> int:
        """D, the residual width."""
        return self.spec.d_model

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.spec.vocab

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence it was made for, when its configuration says so."""
        return self.spec.max_positions

    @cached_property
    def passed_along(self) -> tuple[Tensor, ...]:
        """Activations that layers read besides the residual stream: what an encoder read, keys of earlier layers.

        Stages of a pipeline hand them on, whole.
        """
        blocks = self.train_program().blocks
        made = {op.output.name: op.output for b in blocks for op in b.ops if op.output.name in b.outputs}
        layers = [b for b in blocks if b.role == "layer"]
        read = {t.name: t for b in layers for op in b.ops for t in op.inputs if t.name in b.inputs and t.name != "x"}
        return tuple(made.get(name, t) for name, t in read.items())

    @property
    def notes(self) -> tuple[str, ...]:
        """What every report of this model should say."""
        return self.spec.notes

    @property
    def sizes(self) -> Mapping[str, float]:
        """Axis sizes of the training program: D, F, N, K, H, V, L, and of a mixture E, Fe, top_k."""
        return self._train.sizes

    @cached_property
    def residual_axes(self) -> tuple[str, ...]:
        """Axes of what flows from layer to layer: one residual stream, or several."""
        embed = next(b for b in self._train if "x" in b.outputs)
        return next(op.output.axes for op in embed.ops if op.output.name == "x")

    @cached_property
    def between_stages(self) -> tuple[Tensor, ...]:
        """What stages of a pipeline send each other: the residual stream, and what layers read besides it."""
        return Tensor("x", self.residual_axes), *self.passed_along

    @property
    def mixtures(self) -> tuple[Mixture, ...]:
        """The kinds of mixtures of experts that it has, each once."""
        return tuple(dict.fromkeys(g.layer.ffn for g in self.spec.groups if isinstance(g.layer.ffn, Mixture)))

    @cached_property
    def _train(self) -> Program:
        return build_train(self.spec)

    def train_program(self) -> Program:
        """The forward pass of a training step: blocks "embed", layer groups in order, "head" with the loss."""
        return self._train

    def serving_program(self, step: Literal["prefill", "decode"], *, spread_norms: bool = False) -> Program:
        """A step of serving: new positions T that attend to S cached ones, themselves among these.

        Args:
            step: in "prefill" latents are expanded to the keys and values of all positions; to "decode" is to attend
                to latents as they are cached. For attention without latents both are the same.
            spread_norms: norms over the residual width are two operations, for layouts that split it.

        Raises:
            ConfigError: for an encoder-decoder.
        """
        if self.spec.encoder is not None:
            raise ConfigError(
                f"{self.name}: encoder-decoders cannot be served yet; serve a decoder, or see "
                f"'meshwise model {self.name}' for its counts"
            )
        known: dict[tuple[str, bool], Program] = self._serving
        if (step, spread_norms) not in known:
            known[step, spread_norms] = build_serving(
                self.spec, name=step, absorbs=step == "decode", spread_norms=spread_norms
            )
        return known[step, spread_norms]

    @cached_property
    def _serving(self) -> dict[tuple[str, bool], Program]:
        """Serving programs that were built, so that each is one and the same value."""
        return {}

    @cached_property
    def parameters(self) -> ParameterCount:
        """Parameters, in total, by part, and those active for one token."""
        return count_parameters(self._train, build_mtp(self.spec))

    @cached_property
    def kv_cache(self) -> KVCache:
        """What one token leaves in the cache, by kind of layer."""
        return KVCache(tuple(kind for g in self.spec.groups for kind in _cached(g)))

    def kv_cache_bytes_per_token(self, dtype: DType = DType.BF16) -> float:
        """Bytes that one token adds to the cache of one sequence, in all layers, while no window is full."""
        return self.kv_cache.bytes_per_token(dtype)

    def forward_flops_per_token(self, seq_len: int, attention: Literal["computed", "full"] = "computed") -> float:
        """Matrix FLOPs of one forward pass over a sequence of `seq_len` tokens, divided by its tokens.

        Args:
            seq_len: tokens of the sequence.
            attention: "computed" counts the query-key pairs that causal attention, windows and chunks leave; "full"
                lets every query attend to every key and counts recurrences as the reference implementation runs them,
                as many published counts do.
        """
        sizes = self._train.bind(batch=1, queries=seq_len)
        total = 0.0
        for block in self._train:
            for op in block.ops:
                if op.matmul:
                    full = attention == "full" and isinstance(op, Attention | Scan)
                    total += block.repeat * (
                        op.full_flops(sizes) if full and isinstance(op, Attention | Scan) else op.flops(sizes)
                    )
        return total / seq_len

    def train_flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of one training step per token: three times forward (MFU's convention, no recomputation)."""
        return 3 * self.forward_flops_per_token(seq_len)

    def to_json(self) -> str:
        """The configuration and its name: enough for `read_model_json` to read the same model."""
        value = {
            "name": self.name,
            "hub_names": list(self.hub_names),
            "source": {"text": self.source.text, "date": self.source.date},
            "config": self.config,
        }
        return json.dumps(value, indent=2)


def check_length(model: Model, seq_len: float) -> None:
    """Refuse sequences longer than the model's table of learned positions (its axis P).

    >>> import meshwise
    >>> check_length(meshwise.model("gpt2"), 1024)
    >>> check_length(meshwise.model("gpt2"), 1025)
    Traceback (most recent call last):
    ...
    meshwise.core.errors.LayoutError: seq_len: gpt2 has learned positions for 1,024 tokens, found 1,025; ...

    Raises:
        LayoutError: with the longest length that it can read.
    """
    if "P" not in model.sizes:
        return
    longest = model.max_seq_len or int(model.sizes["P"])
    if seq_len > longest:
        raise LayoutError(
            f"seq_len: {model.name} has learned positions for {longest:,} tokens, "
            f"found {seq_len:,.0f}; use {longest:,} or less"
        )
