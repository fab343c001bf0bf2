"""Small random models whose every axis divides by the mesh, and numbers to put in their tensors.

Test support: blocks come from the product's own builder, so that what is placed is what models are made of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

import numpy as np

from meshwise.core.tensors import Block, Kind, Route, Tensor
from meshwise.models.build import build_mtp, build_train
from meshwise.models.recurrences import GatedDelta, LightningAttention, SelectiveStateSpace, StateSpace
from meshwise.models.spec import (
    Architecture,
    Compressed,
    Embedding,
    Head,
    Indexer,
    LatentAttention,
    Layer,
    LayerGroup,
    Mixture,
    Mlp,
    Norm,
    QkNorm,
    SelfAttention,
    Streams,
)
from meshwise.sharding import Mesh
from meshwise.sharding.strategy import Strategy, iteration_space
from tests.sharding.devices import all_coordinates, part_of
from tests.sharding.formulas import Routing
from tests.sharding.programs import Arrays, Microbatch

#: Tokens of one device where there are no experts: a cut of the batch by a cut of the positions, 2 each.
TOKENS_OF_A_DEVICE = 4

LAYER_NORM = Norm(bias=True)
BARE_NORM = Norm(weight=False)


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model, each a multiple of what a layout may split it by.

    Args:
        stored: devices that share the stored weights.
        tensor: devices that share widths.
        heads: devices that share the heads of attention.
        experts: devices that share the experts.
        recurrent: devices that share the heads of recurrences, which need positions whole.
        choose: for how large the multiples are.
    """

    stored: int
    tensor: int
    heads: int
    experts: int
    choose: random.Random
    recurrent: int = 1

    def width(self) -> int:
        return self.stored * self.choose.choice([2, 2, 3])

    def split(self) -> int:
        return self.tensor * self.choose.choice([1, 2])

    def split_heads(self) -> int:
        return self.heads * self.choose.choice([1, 2])

    def groups(self) -> int:
        return self.recurrent * self.choose.choice([1, 2])


def self_attention(s: Shape, **options: object) -> SelfAttention:
    """Grouped heads, mostly."""
    kv = s.split_heads()
    return SelfAttention(heads=kv * s.choose.choice([1, 2]), kv_heads=kv, head_dim=2, **options)  # type: ignore[arg-type]


def latent_attention(s: Shape, *, low_rank_queries: bool) -> LatentAttention:
    q_rank = s.width() if low_rank_queries else None
    return LatentAttention(
        s.split_heads(), q_rank, kv_rank=s.width(), nope_dim=2, rope_dim=2, v_dim=3, bias=low_rank_queries
    )


def sparse_attention(s: Shape) -> LatentAttention:
    return replace(latent_attention(s, low_rank_queries=True), indexer=Indexer(heads=2, head_dim=3, top_k=3))


def compressed_attention(s: Shape, **options: object) -> Compressed:
    """Two heads or one to a group; heads and keys that ratios divide."""
    groups = s.split_heads()
    heads, width = groups * s.choose.choice([1, 2]), s.width()
    return Compressed(heads, 4, width, groups, group_rank=s.width(), window=3, **options)  # type: ignore[arg-type]


def mixture(s: Shape, **options: object) -> Mixture:
    experts = s.experts * s.choose.choice([1, 2] if s.experts > 1 else [2, 4])
    return Mixture(experts=experts, top_k=s.choose.choice([1, 2]), hidden=s.split(), **options)  # type: ignore[arg-type]


def selective(s: Shape, **options: object) -> SelectiveStateSpace:
    return SelectiveStateSpace(s.groups(), state=3, step_rank=s.width(), taps=3, **options)  # type: ignore[arg-type]


def state_space(s: Shape, **options: object) -> StateSpace:
    groups = s.groups()
    heads = groups * s.choose.choice([1, 2])
    return StateSpace(heads, head_dim=2, groups=groups, state=3, taps=2, chunk=4, **options)  # type: ignore[arg-type]


def gated_delta(s: Shape) -> GatedDelta:
    keys = s.groups()
    return GatedDelta(keys * s.choose.choice([1, 2]), head_dim=2, key_heads=keys, key_dim=3, taps=3, chunk=2)


#: Name -> a layer of that family's kind.
LAYERS: dict[str, Callable[[Shape], Layer]] = {
    "llama": lambda s: Layer(self_attention(s), Mlp(s.split())),
    "mistral": lambda s: Layer(self_attention(s, window=3), Mlp(s.split())),
    "llama-4 chunked": lambda s: Layer(self_attention(s, chunk=2, rope=False), Mlp(s.split())),
    "qwen-3": lambda s: Layer(self_attention(s, qk_norm=QkNorm()), Mlp(s.split())),
    "gpt-2": lambda s: Layer(
        self_attention(s, bias=True, bias_out=True, rope=False),
        Mlp(s.split(), gated=False, bias=True, bias_out=True),
        pre_attn=LAYER_NORM,
        pre_mlp=LAYER_NORM,
    ),
    "gemma-2": lambda s: Layer(self_attention(s), Mlp(s.split()), post_attn=Norm(), post_mlp=Norm()),
    "olmo": lambda s: Layer(self_attention(s), Mlp(s.split()), pre_attn=BARE_NORM, pre_mlp=BARE_NORM),
    "olmo-2": lambda s: Layer(
        self_attention(s, qk_norm=QkNorm(span="heads", shared=False)),
        Mlp(s.split()),
        pre_attn=None,
        post_attn=Norm(),
        pre_mlp=None,
        post_mlp=Norm(),
    ),
    "opt-350m (post-norm)": lambda s: Layer(
        self_attention(s, bias=True, bias_out=True),
        Mlp(s.split(), gated=False, bias=True, bias_out=True),
        pre_attn=None,
        pre_mlp=None,
        residual_norm=LAYER_NORM,
    ),
    "falcon (parallel)": lambda s: Layer(
        self_attention(s), Mlp(s.split(), gated=False), pre_attn=LAYER_NORM, pre_mlp=None, parallel=True
    ),
    "gpt-neox (parallel, biases)": lambda s: Layer(
        self_attention(s, bias=True, bias_out=True),
        Mlp(s.split(), gated=False, bias=True, bias_out=True),
        pre_attn=LAYER_NORM,
        pre_mlp=LAYER_NORM,
        parallel=True,
    ),
    "deepseek": lambda s: Layer(latent_attention(s, low_rank_queries=False), Mlp(s.split())),
    "deepseek-v2": lambda s: Layer(latent_attention(s, low_rank_queries=True), Mlp(s.split())),
    "mixtral": lambda s: Layer(self_attention(s), mixture(s)),
    "gpt-oss": lambda s: Layer(
        self_attention(s, bias=True, bias_out=True, sinks=True), mixture(s, expert_bias=True, router_bias=True)
    ),
    "deepseek-v3.2": lambda s: Layer(sparse_attention(s), Mlp(s.split())),
    "deepseek-v3": lambda s: Layer(
        latent_attention(s, low_rank_queries=True), mixture(s, correction_bias=True, shared=s.split())
    ),
    "mamba": lambda s: Layer(selective(s), None),
    "llama-4": lambda s: Layer(self_attention(s), mixture(s, shared=s.split(), weighs_inputs=True)),
    "jamba": lambda s: Layer(selective(s, inner_norms=True, bias=True), mixture(s)),
    "falcon mamba": lambda s: Layer(selective(s, inner_norms=True, weightless=True, conv_bias=False), None),
    "mamba-2": lambda s: Layer(state_space(s, norm_groups=1), None),
    "nemotron-h": lambda s: Layer(state_space(s, bias=True, bias_out=True, conv_bias=False), None),
    "nemotron-h mlp": lambda s: Layer(None, Mlp(s.split(), gated=False)),
    "falcon-h1": lambda s: Layer(state_space(s, norm=False), Mlp(s.split())),
    "nemotron-3 super": lambda s: Layer(None, mixture(s, gated=False, latent=s.width(), shared=s.split())),
    "qwen-3-next attention": lambda s: Layer(self_attention(s, qk_norm=QkNorm(), gated=True), Mlp(s.split())),
    "qwen-3-next": lambda s: Layer(gated_delta(s), mixture(s, shared=s.split(), shared_gate=True)),
    "minimax-01": lambda s: Layer(LightningAttention(s.groups(), head_dim=3), mixture(s)),
    "qwen-2 moe": lambda s: Layer(self_attention(s), mixture(s, shared=s.split(), shared_gate=True)),
    "gemma-4 (keys are values)": lambda s: Layer(self_attention(s, qk_norm=QkNorm(), kv="keys"), Mlp(s.split())),
    "gemma-4 (earlier keys)": lambda s: Layer(self_attention(s, qk_norm=QkNorm(), kv="earlier"), Mlp(s.split())),
    "gemma-4 (tokens of its own)": lambda s: Layer(
        self_attention(s), Mlp(s.split()), post_attn=Norm(), post_mlp=Norm(), token_width=s.width()
    ),
    "gemma-4 (dense beside experts)": lambda s: Layer(
        self_attention(s), mixture(s, beside=Mlp(s.split() + s.tensor)), post_attn=Norm(), post_mlp=Norm()
    ),
    "mimo-v2": lambda s: Layer(self_attention(s, value_dim=3, sinks=True, window=3), Mlp(s.split())),
    "step-3.5": lambda s: Layer(self_attention(s, head_gate=True), Mlp(s.split())),
    "minimax-m3": lambda s: Layer(self_attention(s, indexer=Indexer(2, 3, top_k=3)), Mlp(s.split())),
    "deepseek-v4 (window)": lambda s: Layer(
        compressed_attention(s), mixture(s, shared=s.split()), streams=Streams(2, 3)
    ),
    "deepseek-v4 (sparse)": lambda s: Layer(
        compressed_attention(s, ratio=2, overlap=True, indexer=Indexer(heads=2, head_dim=6, top_k=3)),
        Mlp(s.split()),
        streams=Streams(3, 2),
    ),
    "deepseek-v4 (heavily compressed)": lambda s: Layer(
        compressed_attention(s, ratio=4), Mlp(s.split()), streams=Streams(2, 1)
    ),
    "t5 (reads)": lambda s: Layer(
        self_attention(s, rope=False, causal=False, distances=5, shared_distances=True), Mlp(s.split())
    ),
    "t5 (writes)": lambda s: Layer(
        self_attention(s, rope=False, distances=5, shared_distances=True),
        Mlp(s.split(), gated=False),
        cross=self_attention(s, rope=False, causal=False),
        pre_cross=Norm(),
    ),
    "umt5 (reads)": lambda s: Layer(self_attention(s, rope=False, causal=False, distances=5), Mlp(s.split())),
    "bart (writes)": lambda s: Layer(
        self_attention(s, bias=True, bias_out=True, rope=False),
        Mlp(s.split(), gated=False, bias=True, bias_out=True),
        pre_attn=None,
        pre_mlp=None,
        residual_norm=LAYER_NORM,
        cross=self_attention(s, bias=True, bias_out=True, rope=False, causal=False),
    ),
}

#: The layers that have experts.
MIXTURES = ("mixtral", "gpt-oss", "deepseek-v3", "qwen-2 moe", "gemma-4 (dense beside experts)", "deepseek-v4 (window)")

EMBEDDINGS: dict[str, Callable[[Shape, int], Embedding]] = {
    "embed": lambda _, __: Embedding(),
    "embed gpt-2": lambda _, positions: Embedding(positions=positions),
    "embed gemma": lambda _, __: Embedding(scaled=True),
    "embed bloom": lambda _, __: Embedding(norm=LAYER_NORM),
    "embed opt-350m": lambda s, positions: Embedding(positions=positions, width=s.width() + s.stored),
    "embed gemma-4": lambda s, _: Embedding(scaled=True, layer_tokens=s.split()),
    "embed deepseek-v4": lambda _, __: Embedding(streams=3),
}

#: Ways in that depend on the layers that follow.
LAYERS_AFTER = {"embed gemma-4": "gemma-4 (tokens of its own)"}

HEADS: dict[str, Callable[[Shape], Head]] = {
    "head": lambda _: Head(),
    "head tied": lambda _: Head(norm=LAYER_NORM, tied=True),
    "head biased": lambda _: Head(norm=LAYER_NORM, bias=True),
    "head gemma": lambda _: Head(tied=True, scaled=True),
    "head deepseek-v4": lambda _: Head(streams=2),
    "head opt-350m": lambda s: Head(norm=None, tied=True, width=s.width() + s.stored),
}

BLOCKS = (*LAYERS, *EMBEDDINGS, *HEADS, "mtp")


def tiny_block(name: str, shape: Shape, *, batch: int, queries: int) -> tuple[Block, dict[str, int]]:
    """The block of that name in a model of this shape, and the sizes of all its axes.

    Args:
        name, shape: of the block.
        batch, queries: at least so many sequences and positions; more sequences where experts need more tokens.
    """
    layer = LAYERS[name if name in LAYERS else LAYERS_AFTER.get(name, "llama")](shape)
    spec = Architecture(
        d_model=shape.width(),
        vocab=shape.split(),
        groups=(LayerGroup("layer", layer, (0,)),),
        embedding=EMBEDDINGS[name](shape, queries) if name in EMBEDDINGS else Embedding(),
        head=HEADS[name](shape) if name in HEADS else Head(),
        mtp=layer if name == "mtp" else None,
        mtp_modules=1,
    )
    program = build_mtp(spec) if name == "mtp" else build_train(spec)
    assert program is not None
    role = "layer" if name in LAYERS or name == "mtp" else name.partition(" ")[0]
    block = next(b for b in program if b.role == role)
    if "E" in program.sizes:  # every device's own tokens fill a slot of every expert
        experts, chosen = int(program.sizes["E"]), int(program.sizes["top_k"])
        batch *= experts // gcd(experts, chosen * TOKENS_OF_A_DEVICE)
    return block, {a: int(n) for a, n in program.bind(batch=batch, queries=queries).items()}


def random_values(
    block: Block, sizes: Mapping[str, int], numbers: np.random.Generator, microbatches: int
) -> tuple[Arrays, list[Microbatch]]:
    """Global weights, and global arrays for each microbatch."""
    tensors = {t.name: t for op in reversed(block.ops) for t in op.inputs}
    weights = {t.name: real(t, sizes, numbers) for t in tensors.values() if t.kind is Kind.WEIGHT}
    outputs = [op.output for op in block.ops if op.output.name in block.outputs]

    def microbatch() -> Microbatch:
        entering = {}
        for name in block.inputs:
            t = tensors[name]
            entering[name] = indices(t, sizes, numbers) if t.kind is Kind.INDEX else real(t, sizes, numbers)
        return Microbatch(entering, {f"d_{t.name}": real(t, sizes, numbers) for t in outputs})

    return weights, [microbatch() for _ in range(microbatches)]


def real(t: Tensor, sizes: Mapping[str, int], numbers: np.random.Generator) -> np.ndarray:
    return numbers.normal(size=[sizes[a] for a in t.axes])


def indices(t: Tensor, sizes: Mapping[str, int], numbers: np.random.Generator) -> np.ndarray:
    """Token ids and labels of the vocabulary, or each position once in some order."""
    shape = [sizes[a] for a in t.axes]
    return numbers.permutation(shape[0]) if t.name == "position_ids" else numbers.integers(sizes["V"], size=shape)


def fixed_routing(block: Block, strategy: Strategy, mesh: Mesh, sizes: Mapping[str, int]) -> Routing | None:
    """Each token's experts and slots; a device's tokens fill that device's slots, evenly."""
    dispatch = next((op for op in block.ops if isinstance(op, Route)), None)
    if dispatch is None:
        return None
    batch, queries, experts, chosen = (sizes[a] for a in ("B", "T", "E", "top_k"))
    expert, slot = (np.full((batch, queries, chosen), -1) for _ in range(2))
    splits = iteration_space(strategy, dispatch)
    for device in all_coordinates(mesh):
        (b, nb), (t, nt), (c, nc) = (part_of(mesh, device, splits.get(a, ())) for a in ("B", "T", "C"))
        rows, columns, width = batch // nb, queries // nt, sizes["C"] // nc
        assert rows * columns * chosen == width * experts, "choose sizes for which every expert gets as many tokens"
        for number, (i, j, choice) in enumerate(product(range(rows), range(columns), range(chosen))):
            place = (b * rows + i, t * columns + j, choice)
            expert[place], slot[place] = number % experts, c * width + number // experts
    return Routing(expert, slot)
