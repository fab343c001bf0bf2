"""Training states from elsewhere: begun with published weights, or stacked anew for another layout.

Layouts stack layers differently where they recompute some of them or have stages. Not here: files (`checkpoints`,
`weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshwise.jobs.fine_tuning import is_adapter
from meshwise.runtime.params import Parameter, Tree, by_layer, initial_values, zeros
from meshwise.runtime.train import State, TrainStep
from meshwise.runtime.watched import together
from meshwise.runtime.weights.loading import LoadableWeights


def starting_state(step: TrainStep, published: LoadableWeights, seed: int = 0) -> State:
    """The state before the first step: weights and their master copy from the file, moments of zero.

    Args:
        step: the program.
        published: weights of its model, of files or of a saved step.
        seed: of adapters, which are drawn.
    """
    abstract = step.abstract_state

    def loaded(part: str) -> Tree:
        """Read what the file has, and draw adapters."""
        kinds: tuple[dict[str, dict[str, Parameter]], ...] = ({}, {})
        for key, run in abstract[part].items():
            for name in run:
                p = step.parameters[key][name]
                kinds[is_adapter(p.tensor)].setdefault(key, {})[name] = p
        read, drawn = kinds
        held = published.load(read, step.layer_order, abstract[part]) if read else {}
        return together(held, initial_values(drawn, seed, abstract[part]))

    held = {part: loaded(part) for part in ("weights", "master") if part in abstract}
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

    def one(tree: Mapping[str, Mapping[str, Any]], abstract: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        apart = by_layer(tree, order)
        return {
            key: {
                name: np.stack([apart[new["block"], name, n] for n in new["layers"]]).reshape(
                    step.parameters[key][name].shape
                )
                for name in abstract[key]
            }
            for key, new in step.layer_order.items()
            if key in abstract
        }

    whole = step.abstract_state
    parts = {name: one(state[name], tree) for name, tree in whole.items() if name in ("weights", "master")}
    moments = {name: one(state["moments"][name], own) for name, own in whole["moments"].items()}
    return {"step": np.asarray(state["step"]), **parts, "moments": moments}
