"""Training states from elsewhere: begun with published weights, or stacked anew for another layout.

Layouts stack layers differently where they recompute some of them or have stages. Not here: files (`checkpoints`,
`weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshwise.jobs.fine_tuning import is_adapter
from meshwise.runtime.params import Parameter, Tree, by_layer, cast, initial_values, zeros
from meshwise.runtime.scaled import Scaled
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

    if step.stores_narrow:  # what is published is wide, as the master copy
        master = loaded("master")
        held = {"master": master, "weights": cast(master, abstract["weights"])}
    else:
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

        def stacked(held: Any, *each: Any) -> np.ndarray:
            return np.stack(each).reshape(held.shape)

        return {
            key: {
                name: jax.tree.map(stacked, own, *(_like(own, apart[new["block"], name, n]) for n in new["layers"]))
                for name, own in abstract[key].items()
            }
            for key, new in step.layer_order.items()
            if key in abstract
        }

    whole = step.abstract_state
    parts = {name: one(state[name], tree) for name, tree in whole.items() if name in ("weights", "master")}
    moments = {name: one(state["moments"][name], own) for name, own in whole["moments"].items()}
    return {"step": np.asarray(state["step"]), **parts, "moments": moments}


def _like(abstract: Any, read: Any) -> Any:
    """What was read of one layer's weight, whose parts files hold by name."""
    return Scaled(**read) if isinstance(abstract, Scaled) and isinstance(read, dict) else read
