"""What is counted of a model: its parameters by part, and the cache that attention keeps. Knows no weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Program, Tensor

#: The part that is a table of which a token reads one row for each layer; large beside the layers, and no work.
LAYER_EMBEDDING = "layer embedding"


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of a model, tied ones counted once.

    Args:
        total: all of them.
        language: without vision and audio towers.
        active: of the language model, without the routed experts that a token does not visit,
            `language - routed * (1 - top_k / experts)`, nor layers that text skips.
        by_part: embedding, attention, mlp, experts, shared experts, router, norms, head, towers; they add up to
            `total`.
        mtp: of multi-token-prediction modules, which `total` does not hold.
    """

    total: int
    language: int
    active: int
    by_part: Mapping[str, int]
    mtp: int = 0

    @property
    def active_in_mfu(self) -> int:
        """Active ones by the convention of MFU, 6 FLOPs each: a table with rows for every layer is no work."""
        return self.active - self.by_part.get(LAYER_EMBEDDING, 0)


@dataclass(frozen=True, slots=True)
class CacheKind:
    """Layers whose cache grows alike.

    Args:
        name: of the group of layers.
        layers: how many there are.
        elements: cached per token and layer.
        window: latest positions that are kept, or None for all.
        state, convolution: of a recurrence, cached per sequence and layer, however long it is.
        index: further elements per token and layer, by which an indexer finds the keys to attend to.
    """

    name: str
    layers: int
    elements: int
    window: int | None = None
    state: int = 0
    convolution: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class KVCache:
    """The cache of keys and values (or of the latent they are expanded from), by kind of layer."""

    kinds: tuple[CacheKind, ...]

    def bytes_per_token(self, dtype: DType) -> float:
        """Bytes that one more token adds while no window is full."""
        return sum(k.layers * k.elements for k in self.kinds) * dtype.bytes

    def growing_bytes_per_token(self, dtype: DType) -> float:
        """Bytes that one more token adds once every window is full: the layers that keep all positions."""
        return sum(k.layers * k.elements for k in self.kinds if k.window is None) * dtype.bytes

    def windowed_bytes_per_token(self, dtype: DType) -> float:
        """Bytes that one more token adds in the windowed layers, while their windows are not full."""
        return sum(k.layers * k.elements for k in self.kinds if k.window is not None) * dtype.bytes

    def windowed_bytes_max(self, dtype: DType) -> float:
        """Bytes of one sequence in the windowed layers once their windows are full."""
        return sum(k.layers * k.elements * k.window for k in self.kinds if k.window is not None) * dtype.bytes

    def index_bytes_per_token(self, dtype: DType) -> float:
        """Bytes that one more token adds to what indexers keep, apart from keys and values."""
        return sum(k.layers * k.index for k in self.kinds) * dtype.bytes

    def state_bytes(self, state_dtype: DType, convolution_dtype: DType | None = None) -> float:
        """Bytes of the states of recurrences, of one sequence of any length.

        Args:
            state_dtype: format of the states, which many engines keep in fp32.
            convolution_dtype: of the last positions that convolutions still need; as the states if not given.
        """
        states = sum(k.layers * k.state for k in self.kinds) * state_dtype.bytes
        return states + sum(k.layers * k.convolution for k in self.kinds) * (convolution_dtype or state_dtype).bytes

    def bytes_per_sequence(self, tokens: float, dtype: DType) -> float:
        """Bytes of one sequence of `tokens` tokens, states of recurrences and keys of indexers included."""
        kept = (k.layers * k.elements * (tokens if k.window is None else min(tokens, k.window)) for k in self.kinds)
        return sum(kept) * dtype.bytes + self.state_bytes(dtype) + tokens * self.index_bytes_per_token(dtype)


#: Name of a weight, up to its first dot, without "w_" and "b_" -> the part it is reported under.
_PARTS = {
    "embed": "embedding", "positions": "embedding", "project_in": "embedding",
    "head": "head", "project_out": "head", "router": "router", "expert": "experts", "shared": "shared experts",
    "gate": "mlp", "up": "mlp", "down": "mlp", "norm": "norms", "token": "mlp", "latent": "mlp",
    "layer_embed": LAYER_EMBEDDING, "vision": "vision tower", "audio": "audio tower", "index": "indexer",
    "ssm": "state space", "hyper": "hyper-connections", "delta": "linear attention", "linear": "linear attention",
}  # fmt: skip

_TOWERS = ("vision tower", "audio tower")


def _part(tensor: Tensor) -> str:
    stem = tensor.name.split(".")[0].removeprefix("w_").removeprefix("b_")
    return _PARTS.get(stem, "attention")


def count_parameters(program: Program, mtp: Program | None = None) -> ParameterCount:
    """Count what the program's blocks hold."""
    by_part: dict[str, int] = {}
    idle = 0.0
    for block in program:
        for tensor in block.weights:
            elements = int(block.repeat * tensor.elements(program.sizes))
            part = _part(tensor)
            by_part[part] = by_part.get(part, 0) + elements
            if part == "experts":
                experts = tensor.axes[0]
                assert experts.split(".")[0] == "E", f"{tensor} should lead with its experts"
                idle += elements * (1 - program.sizes["top_k"] / program.sizes[experts])
            elif not block.ops and part not in _TOWERS:  # layers that a step on text skips
                idle += elements
    total = sum(by_part.values())
    language = total - sum(by_part.get(part, 0) for part in _TOWERS)
    return ParameterCount(
        total=total,
        language=language,
        active=round(language - idle),
        by_part=by_part,
        mtp=0 if mtp is None else mtp.parameters(),
    )
