"""A layout in few words, for tables. Not here: all of it (`str` of a layout)."""

from __future__ import annotations

from meshwise.sharding.layout import Layout


def layout_words(layout: Layout) -> str:
    """The mesh as `--layout` reads it: axes longer than one, outermost first."""
    return ",".join(f"{a}={layout.sizes[a]}" for a in layout.used_axes) or "data=1"


def choice_words(layout: Layout) -> str:
    """What a layout has besides its mesh, in few words."""
    return ", ".join(choice_list(layout))


def choice_list(layout: Layout) -> list[str]:
    """The same, a choice each; the microbatches are the last."""
    shared = layout.context * layout.ulysses * layout.expert > 1
    pieces = f":{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    layers = f":{layout.remat_layers}" if layout.remat_layers is not None else ""
    said = {
        f"zero={layout.zero}": layout.zero and (layout.data > 1 or not layout.fully_sharded),
        "fully_sharded=off": shared and not layout.fully_sharded,
        f"{layout.schedule}{pieces}": layout.stage > 1,
        "ring": layout.context > 1 and layout.context_method == "ring",
        "whole experts": layout.tensor > 1 and not layout.expert_tensor_parallel,
        f"offload={'+'.join(layout.offload)}": layout.offload,
        f"remat={layout.remat}{layers}": True,
    }
    number = layout.num_microbatches
    microbatches = f"{number:,} microbatch{'es' if number > 1 else ''} of {layout.micro_batch:,}"
    return [*(words for words, holds in said.items() if holds), microbatches]
