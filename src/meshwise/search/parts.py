"""Parts of a network that a plan may use instead of all of it: a sample, from most chips to fewest.

Not here: what is done on them (`planner`), or how one is cut out (`space`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwise.costs.fabric import Fabric
from meshwise.search.space import parts_of, shrunken

#: Boxes of one number of chips that are tried.
_BOXES = 3


def network_parts(whole: Fabric) -> Iterator[Fabric]:
    """The network, then parts of fewer and fewer chips: the largest dimension halved, with a look around."""
    seen: set[tuple[int, ...]] = set()
    fabric = whole
    while True:
        for part in (fabric, *shrunken(fabric)):
            if part.sizes not in seen and _hosts_whole(part, whole):
                seen.add(part.sizes)
                yield part
        smaller = [f for f in shrunken(fabric) if math.prod(f.sizes) <= math.prod(fabric.sizes) / 2]
        if not smaller:
            return
        # The most even shape of a torus; of switches the outermost level is cut first, so that hosts stay whole.
        torus = fabric.dimensions[0].torus
        fabric = min(
            smaller,
            key=lambda f: (
                -math.prod(f.sizes),
                (max(f.sizes[:-1], default=0),) if torus else tuple(-s for s in f.sizes),
            ),
        )


def _hosts_whole(part: Fabric, whole: Fabric) -> bool:
    """Whether a part uses all chips of its hosts (nobody rents half of each), or lies within one host."""
    torus = whole.dimensions[0].torus
    return torus or part.sizes[0] == whole.sizes[0] or math.prod(part.sizes[1:]) == 1


def parts_up_to(whole: Fabric, max_chips: int | None) -> list[Fabric]:
    """Parts of at most so many chips, most chips first: boxes of just so many, and those of `network_parts`."""
    parts = list(network_parts(whole))
    if max_chips is None or max_chips >= math.prod(whole.sizes):
        return parts
    fewer = [*whole_parts_of(whole, max_chips), *(p for p in parts if math.prod(p.sizes) <= max_chips)]
    return sorted({p.sizes: p for p in fewer}.values(), key=lambda p: -math.prod(p.sizes))


def whole_parts_of(whole: Fabric, num_chips: int) -> list[Fabric]:
    """Boxes of exactly so many chips that leave no host half used; the most even few of them."""
    boxes = [p for p in parts_of(whole, num_chips) if _hosts_whole(p, whole)]
    return sorted(boxes, key=lambda p: max(p.sizes))[:_BOXES] if whole.dimensions[0].torus else boxes[:_BOXES]
