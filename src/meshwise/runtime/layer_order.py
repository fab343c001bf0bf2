"""Which layers a stack of weights holds, and a training state stacked anew for another layout.

Layouts stack layers differently where they recompute some of them or have stages. Not here: files (`checkpoints`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwise.runtime.params import Parameter
from meshwise.runtime.stacks import Segment
from meshwise.runtime.train import State, TrainStep

#: Run -> its block, its layers among those of the block in the order in which they are stacked, and the stack's sizes.
Order = dict[str, dict[str, Any]]


def layer_order(step: TrainStep) -> Order:
    """Say which layers each run of a program holds, as JSON values; blocks that are no layers hold number 0."""
    layout = step.layout
    return order_of(step.stack.segments, step.parameters, layout.stage, layout.virtual_stages)


def order_of(
    segments: Sequence[Segment], parameters: Mapping[str, Mapping[str, Parameter]], stages: int = 1, pieces: int = 1
) -> Order:
    """Say the same of a program whose layers are not in a `TrainStep`.

    Args:
        segments: of its layers; in a pipeline those of one piece.
        parameters: by run and name.
        stages, pieces: of a pipeline, and of each of its stages.
    """
    found: dict[str, tuple[str, dict[tuple[int, int], list[int]]]] = {}
    seen: dict[str, int] = {}
    for place in [(stage, piece) for piece in range(pieces) for stage in range(stages)]:
        for segment in segments:
            for run in [r for _ in range(segment.times) for r in segment.runs for _ in range(r.count)]:
                numbers = found.setdefault(run.key, (run.block, {}))[1]
                numbers.setdefault(place, []).append(seen.setdefault(run.block, 0))
                seen[run.block] += 1
    order: Order = {}
    for key, weights in parameters.items():
        stack = list(next(iter(weights.values())).stack)
        block, places = found.get(key, (key, {(0, 0): list(range(int(np.prod(stack, dtype=int))))}))
        layers = [n for place in sorted(places) for n in places[place]]
        order[key] = {"block": block, "layers": layers, "stack": stack}
    return order


def rearranged(state: State, order: Mapping[str, Mapping[str, Any]], step: TrainStep) -> State:
    """Stack a state anew.

    Args:
        state: arrays in the memory of the host, by run and name.
        order: in which they are.
        step: the program that is to read them.

    Returns: the same state in the order of `step`.

    Raises:
        KeyError: a layer or weight is missing.
    """

    def one(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        apart = _by_layer(tree, order)
        return {
            key: {
                name: np.stack([apart[new["block"], name, n] for n in new["layers"]]).reshape(
                    step.parameters[key][name].shape
                )
                for name in step.parameters[key]
            }
            for key, new in layer_order(step).items()
        }

    parts = {name: one(tree) for name, tree in state.items() if name in ("weights", "master")}
    moments = {name: one(tree) for name, tree in state.get("moments", {}).items()}
    return {"step": np.asarray(state["step"]), **parts, "moments": moments}


def _by_layer(
    tree: Mapping[str, Mapping[str, Any]], order: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str, int], Any]:
    """(block, name, number of the layer) -> array."""
    found = {}
    for key, weights in tree.items():
        old = order[key]
        for name, array in weights.items():
            own = np.shape(array)[len(old["stack"]) :]
            each = np.asarray(array).reshape(len(old["layers"]), *own)
            found.update({(old["block"], name, n): value for n, value in zip(old["layers"], each, strict=True)})
    return found
