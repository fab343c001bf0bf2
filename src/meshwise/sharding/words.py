"""A layout in few words, for tables. Not here: all of it (`str` of a layout)."""

from __future__ import annotations

from meshwise.sharding.layout import Layout


def layout_words(layout: Layout) -> str:
    """The mesh as `--layout` reads it: axes longer than one, outermost first."""
    return ",".join(f"{a}={layout.sizes[a]}" for a in layout.used_axes) or "data=1"


def choice_words(layout: Layout) -> str:
    """What a layout has besides its mesh, in few words."""
    shared = layout.context * layout.ulysses * layout.expert > 1
    said = f"zero={layout.zero} " if layout.zero and (layout.data > 1 or not layout.fully_sharded) else ""
    said += "" if layout.fully_sharded or not shared else "fully_sharded=off "
    pieces = f":{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    said += f"{layout.schedule}{pieces} " if layout.stage > 1 else ""
    said += "ring " if layout.context > 1 and layout.context_method == "ring" else ""
    said += "" if layout.tensor == 1 or layout.expert_tensor_parallel else "whole experts "
    layers = f":{layout.remat_layers}" if layout.remat_layers is not None else ""
    away = f"offload={'+'.join(layout.offload)} " if layout.offload else ""
    return f"{said}{away}remat={layout.remat}{layers} {layout.num_microbatches}x{layout.micro_batch} seq"
