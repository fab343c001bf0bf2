"""A model given by its dimensions in the book's letters, for those that are published without a configuration.

Not here: the text in which they are written (`models.dimensions`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, FamilyConfig, Index, Layers, Positions, Size, divide
from meshwise.models.families.decoder import LAYER_NORM, RMS_NORM
from meshwise.models.spec import Architecture, Embedding, Head, Layer, Mixture, Mlp, Norm, SelfAttention, group_layers


class Dimensions(FamilyConfig):
    """Sizes by letter, and switches that say what stands around them. A mixture has `E`, `top_k` and `Fe`."""

    model_types: ClassVar[tuple[str, ...]] = ("dimensions",)

    D: Size = Field(description="residual width")
    F: Size | None = Field(default=None, description="feed-forward width, of dense layers")
    L: Layers = Field(description="layers")
    N: Count = Field(description="query heads")
    K: Count | None = Field(default=None, description="key/value heads (default: N)")
    H: Size | None = Field(default=None, description="width of a head (default: D / N)")
    V: Size = Field(description="vocabulary")
    E: Count | None = Field(default=None, description="routed experts of a mixture")
    top_k: Count | None = Field(default=None, description="experts that a token visits")
    Fe: Size | None = Field(default=None, description="feed-forward width of an expert")
    Fs: Index = Field(default=0, description="total width of the experts that every token visits")
    dense: Index = Field(default=0, description="layers before the first mixture")
    window: Positions | None = Field(default=None, description="latest positions that a query sees")
    positions: Positions | None = Field(default=None, description="learned positions (default: rotary)")
    gated: bool = Field(default=True, description="three feed-forward matrices, not two")
    tied: bool = Field(default=False, description="the head is the embedding table")
    bias: bool = Field(default=False, description="biases on every projection")
    parallel: bool = Field(default=False, description="both branches read one norm of the layer's input")
    norm: Literal["rms", "layer"] = Field(default="rms", description="norms with a weight, or with a bias too")

    @model_validator(mode="after")
    def _fit(self) -> Dimensions:
        """Refuse a mixture that is half said, and a model without a feed-forward part."""
        mixture = {"E": self.E, "top_k": self.top_k, "Fe": self.Fe}
        said = [key for key, value in mixture.items() if value is not None]
        missing = [key for key, value in mixture.items() if value is None]
        if said and missing:
            raise ValueError(f"dimensions: {', '.join(missing)} missing; a mixture has E, top_k and Fe")
        if not said and (self.Fs or self.dense):
            raise ValueError("dimensions: Fs and dense are of mixtures, and E, top_k and Fe are missing")
        if self.F is None and (not said or self.dense):
            raise ValueError("dimensions: F is missing; it is the feed-forward width of dense layers")
        return self

    def _norm(self) -> Norm:
        return LAYER_NORM if self.norm == "layer" else RMS_NORM

    def layer(self, index: int) -> Layer:
        """Give this layer."""
        k = self.N if self.K is None else self.K
        divide(self.N, k, "N", "K")
        h = divide(self.D, self.N, "D", "N") if self.H is None else self.H
        heads = SelfAttention(
            self.N, k, h, bias=self.bias, bias_out=self.bias, rope=self.positions is None, window=self.window
        )
        norm = self._norm()
        return Layer(heads, self._ffn(index), norm, None, None if self.parallel else norm, parallel=self.parallel)

    def _ffn(self, index: int) -> Mlp | Mixture:
        if self.E is None or self.top_k is None or self.Fe is None or index < self.dense:
            assert self.F is not None, "checked at the door"
            return Mlp(self.F, gated=self.gated, bias=self.bias, bias_out=self.bias)
        if self.top_k > self.E:
            raise ConfigError(f"key 'top_k': expected at most {self.E}, the experts there are; found {self.top_k}")
        shared = {"shared": self.Fs, "shared_bias": self.bias}
        return Mixture(self.E, self.top_k, self.Fe, gated=self.gated, expert_bias=self.bias, **shared)  # type: ignore[arg-type]

    def architecture(self) -> Architecture:
        """Say what the letters mean."""
        return Architecture(
            d_model=self.D,
            vocab=self.V,
            groups=group_layers(self.layer(i) for i in range(self.L)),
            embedding=Embedding(positions=self.positions),
            head=Head(norm=self._norm(), tied=self.tied),
            max_positions=self.positions,
        )


FAMILIES = (Dimensions,)
