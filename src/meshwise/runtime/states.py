"""Training states from elsewhere: begun with published weights, or stacked anew for another layout.

Layouts stack layers differently where they recompute some of them or have stages. Not here: files (`checkpoints`,
`weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshwise.runtime.params import by_layer, zeros
from meshwise.runtime.train import State, TrainStep
from meshwise.runtime.weights.loading import LoadableWeights


def starting_state(step: TrainStep, published: LoadableWeights) -> State:
    """The state before the first step: weights and their master copy from the file, moments of zero.

    Args:
        step: the program.
        published: weights of its model, of files or of a saved step.
    """
    abstract = step.abstract_state
    held = {
        part: published.load(step.parameters, step.layer_order, abstract[part])
        for part in ("weights", "master")
        if part in abstract
    }
    return {**zeros({name: abstract[name] for name in ("step", "moments")}), **held}


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
        apart = by_layer(tree, order)
        return {
            key: {
                name: np.stack([apart[new["block"], name, n] for n in new["layers"]]).reshape(
                    step.parameters[key][name].shape
                )
                for name in step.parameters[key]
            }
            for key, new in step.layer_order.items()
        }

    parts = {name: one(tree) for name, tree in state.items() if name in ("weights", "master")}
    moments = {name: one(tree) for name, tree in state.get("moments", {}).items()}
    return {"step": np.asarray(state["step"]), **parts, "moments": moments}
