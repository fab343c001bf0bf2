"""Which tools and engines a plan can be exported to, and the one way in. Not here: what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from meshwise.core.errors import UnknownNameError
from meshwise.exports.choices import Choices
from meshwise.exports.deepspeed import deepspeed
from meshwise.exports.exported import Exported, Refusals
from meshwise.exports.jaxcode import jaxcode
from meshwise.exports.maxtext import maxtext
from meshwise.exports.megatron import megatron
from meshwise.exports.serving.choices import ServingChoices
from meshwise.exports.serving.jetstream import jetstream
from meshwise.exports.serving.script import Script
from meshwise.exports.serving.sglang import sglang
from meshwise.exports.serving.tensorrt_llm import tensorrt_llm
from meshwise.exports.serving.vllm import vllm
from meshwise.exports.torchtitan import torchtitan
from meshwise.search import Plan
from meshwise.search.serving import ServingPlan

C = TypeVar("C", Choices, ServingChoices)
T = TypeVar("T")

#: Name as `--to` takes it -> the tool's own name, and what writes for it.
TARGETS: Mapping[str, tuple[str, Callable[[Choices, Refusals], Exported]]] = {
    "maxtext": ("MaxText", maxtext),
    "megatron": ("Megatron-LM", megatron),
    "torchtitan": ("torchtitan", torchtitan),
    "deepspeed": ("DeepSpeed", deepspeed),
    "jax": ("JAX", jaxcode),
}


def _write(kind: str, to: str, targets: Mapping[str, tuple[str, Callable[[C, Refusals], T]]], choices: C) -> T:
    """Write for one of `targets`; raise what it cannot express."""
    if to not in targets:
        raise UnknownNameError(kind, to, targets, list_all=True)
    title, write = targets[to]
    refusals = Refusals(title)
    choices.check_known(refusals)
    written = write(choices, refusals)
    refusals.check()
    return written


def hand_over(plan: Plan, to: str) -> Exported:
    """Write `plan` as the configuration of another tool.

    Args:
        plan: a complete plan.
        to: one of TARGETS.

    Raises:
        UnknownNameError: for a tool that is not known.
        HandoverError: for choices that the tool cannot express, each with its reason and the nearest that it can.
    """
    return _write("tool", to, TARGETS, Choices(plan))


#: Name as `--to` takes it -> the engine's own name, and what writes for it.
SERVING_TARGETS: Mapping[str, tuple[str, Callable[[ServingChoices, Refusals], Script]]] = {
    "vllm": ("vLLM", vllm),
    "sglang": ("SGLang", sglang),
    "tensorrt-llm": ("TensorRT-LLM", tensorrt_llm),
    "jetstream": ("JetStream with MaxText", jetstream),
}


def hand_over_serving(plan: ServingPlan, to: str) -> Exported:
    """Write a serving plan as the configuration of an engine.

    Args:
        plan: model, load, cluster, layouts and batches.
        to: one of SERVING_TARGETS.

    Raises:
        UnknownNameError: for an engine that is not known.
        HandoverError: for choices that the engine cannot express, each with its reason and the nearest that it can.
    """
    choices = ServingChoices(plan)
    script, title = _write("engine", to, SERVING_TARGETS, choices), SERVING_TARGETS[to][0]
    return Exported(to, title, script.version, f"serve-{to}.sh", script.text(choices, title), tuple(script.notes))
