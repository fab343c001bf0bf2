"""Smaller copies of a model for the compiler: fewer layers, of the same kinds in the same order.

Two sizes determine a line, and what a step needs grows evenly with layers, so that the whole model follows from both.
Not here: compiling them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.core.errors import CompilerError, ConfigError
from meshwise.models import Model
from meshwise.models.reading import first_layers
from meshwise.sharding.layout import Layout

#: The fewest layers of the larger copy.
_LEAST = 4

#: The most layers that the larger copy may have: beyond it, the whole model is compiled.
_MOST = 24


@dataclass(frozen=True)
class Reduction:
    """Two copies of a model, and how the whole follows from them.

    Args:
        small, large: number of layers of each.
        steps: what the larger has more than the smaller is added so many times to the larger.
    """

    small: int
    large: int
    steps: float

    def whole(self, small: float, large: float) -> float:
        """Extrapolate a quantity to all layers.

        >>> Reduction(2, 4, 38.0).whole(10.0, 16.0)  # 80 layers: 4 + 38 x 2
        244.0
        """
        return large + self.steps * (large - small)


def reduction_of(model: Model, layout: Layout) -> Reduction | None:
    """Choose two copies such that the kinds of layers grow evenly through both to the whole, the smallest there are.

    Args:
        model: the whole.
        layout: whose share of recomputed layers must be kept; copies have whole layers of each stage.

    Returns: None where no two copies of at most 24 layers are smaller than the whole, or layers are of several kinds.
    """
    total, wanted = model.num_layers, _kinds(model, layout)
    if len({group.layer for group in model.spec.groups}) > 1:
        return None  # short runs of several kinds are loops of another structure, and hold something else
    multiple = layout.stage * layout.virtual_stages
    sizes = [n for n in range(2, min(_MOST, total - 1) + 1) if n % multiple == 0 and _shares(layout, n, total)]
    loops = [n for n in sizes if n > multiple > 1]  # of layers in a stage, as the whole model has
    sizes = loops if len(loops) > 1 else sizes
    kinds = {n: found for n in sizes if (found := _kinds_of(model, layout, n)) is not None}
    for large in (n for n in kinds if n >= _LEAST):
        # Half as many layers first: 2 and 4, 4 and 8; a loop that runs once is compiled differently.
        for small in sorted((n for n in kinds if n < large), key=lambda n: (n != large // 2, n)):
            steps = _steps(kinds[small], kinds[large], wanted)
            if steps is not None:
                return Reduction(small, large, steps)
    return None


def _shares(layout: Layout, layers: int, total: int) -> bool:
    """Whether so many layers can have the same share of recomputed ones."""
    return layout.remat_layers is None or layers * layout.remat_layers % total == 0


def _kinds_of(model: Model, layout: Layout, layers: int) -> Mapping[object, int] | None:
    try:
        return _kinds(*reduce_layers(model, layout, layers))
    except (ConfigError, CompilerError):
        return None


def _kinds(model: Model, layout: Layout) -> dict[object, int]:
    """Count layers of each kind; where some are recomputed and others not, their number is a kind of its own."""
    kinds: dict[object, int] = {}
    for group in model.spec.groups:
        kinds[group.layer] = kinds.get(group.layer, 0) + group.repeat
    if layout.remat_layers is not None:
        kinds["remat"] = layout.remat_layers
    return kinds


def _steps(fewer: Mapping[object, int], more: Mapping[object, int], wanted: Mapping[object, int]) -> float | None:
    """How often what `more` has beyond `fewer` leads from `more` to `wanted`; None where it does not."""
    if not set(fewer) == set(more) == set(wanted):  # all kinds in both, so that they have the names of the whole
        return None
    steps: float | None = None
    for kind, number in wanted.items():
        grown, missing = more[kind] - fewer[kind], number - more[kind]
        if grown <= 0:
            if missing:
                return None
            continue
        if steps is not None and steps * grown != missing:
            return None
        steps = missing / grown
    return steps


def reduce_layers(model: Model, layout: Layout, layers: int) -> tuple[Model, Layout]:
    """Copy a model with its first `layers` layers, and the layout with the same share of them recomputed.

    Raises:
        ConfigError: a configuration that cannot be cut so.
        CompilerError: one whose number of layers is nowhere in it.
    """
    reduced = first_layers(model, layers)
    if reduced is None:
        raise CompilerError(
            f"model {model.name}: its {model.num_layers} layers are not in its configuration; leave --reduced out"
        )
    if reduced.num_layers != layers:
        raise ConfigError(f"model {model.name}: cut to {layers} layers it has {reduced.num_layers}")
    if layout.remat_layers is None:
        return reduced, layout
    return reduced, layout.replace(remat_layers=max(1, layout.remat_layers * layers // model.num_layers))
