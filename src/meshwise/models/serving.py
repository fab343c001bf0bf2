"""From an `Architecture` to the `Program` of a serving step: layers as in training, that read caches.

Not here: how layers are made (`build`), and what reads caches (`cached`).
"""

from __future__ import annotations

from meshwise.core.tensors import Block, Kind, Program, Tensor
from meshwise.models.build import embed_block, layer_block, logits_of, tower_blocks
from meshwise.models.cached import CachedOps
from meshwise.models.compressed import stream_axes
from meshwise.models.operations import SOFTMAX_FLOPS, Axes, Ops
from meshwise.models.spec import Architecture, Head


def _sampling_head(spec: Head, axes: Axes, ops: Ops) -> Block:
    """From the residual stream to the next token, of the positions that need one: the last of each sequence.

    Devices that hold parts of the vocabulary choose the best of their own, and then of these.
    """
    stream = Tensor("x", stream_axes(spec.streams, axes))
    last = ("B", "Tl", *stream.axes[2:])
    x = ops.lookup("last", Tensor("positions", last[:2], Kind.INDEX), stream, Tensor("x.last", last))
    scores = logits_of(spec, x, axes, ops)
    ops.elementwise("sample", scores, output="next", flops=SOFTMAX_FLOPS, axes=last[:2], counted=scores.axes)
    tied = frozenset({"w_embed"}) if spec.tied else frozenset()
    return Block(name="head", ops=tuple(ops.ops), role="head", tied=tied, inputs=("x",), outputs=("next",))


def build_serving(spec: Architecture, *, name: str, absorbs: bool, spread_norms: bool) -> Program:
    """Give a serving step: the same layers as in training, reading caches, and a head for the last positions.

    Args:
        spec: the architecture, without an encoder.
        name: of the step.
        absorbs, spread_norms: see `CachedOps`.
    """
    assert spec.encoder is None, "encoder-decoders are refused at the door"
    axes = Axes({"D": spec.d_model, "V": spec.vocab})

    def ops() -> CachedOps:
        return CachedOps(axes=axes, absorbs=absorbs, spread_norms=spread_norms)

    embed = embed_block(spec.embedding, spec.groups, axes)
    layers = [layer_block(g.name, g.layer, g.repeat, axes, ops()) for g in spec.groups]
    towers = [block for tower in spec.towers for block in tower_blocks(tower, axes)]
    blocks = (embed, *towers, *layers, _sampling_head(spec.head, axes, ops()))
    return Program(name=name, blocks=blocks, sizes={**axes.sizes, "L": spec.num_layers})
