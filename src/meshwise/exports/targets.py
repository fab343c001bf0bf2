"""Which tools a plan can be handed over to, and the one way in. Not here: what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwise.core.errors import UnknownNameError
from meshwise.exports.choices import Choices
from meshwise.exports.deepspeed import deepspeed
from meshwise.exports.exported import Exported, Refusals
from meshwise.exports.jaxcode import jaxcode
from meshwise.exports.maxtext import maxtext
from meshwise.exports.megatron import megatron
from meshwise.exports.torchtitan import torchtitan
from meshwise.search import Plan

#: Name as `--to` takes it -> the tool's own name, and what writes for it.
TARGETS: Mapping[str, tuple[str, Callable[[Choices, Refusals], Exported]]] = {
    "maxtext": ("MaxText", maxtext),
    "megatron": ("Megatron-LM", megatron),
    "torchtitan": ("torchtitan", torchtitan),
    "deepspeed": ("DeepSpeed", deepspeed),
    "jax": ("JAX", jaxcode),
}


def hand_over(plan: Plan, to: str) -> Exported:
    """Say `plan` in the words of another tool.

    Args:
        plan: a complete plan.
        to: one of TARGETS.

    Raises:
        UnknownNameError: for a tool that is not known.
        HandoverError: for choices that the tool cannot express, each with its reason and the nearest that it can.
    """
    if to not in TARGETS:
        raise UnknownNameError("tool", to, TARGETS, list_all=True)
    title, write = TARGETS[to]
    choices, refusals = Choices(plan), Refusals(title)
    choices.check_known(refusals)
    handed = write(choices, refusals)
    refusals.check()
    return handed
