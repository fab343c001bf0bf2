"""Which tools and engines a plan can be exported to, and the one way in. Not here: what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

#: Name as `--to` takes it -> the tool's own name, and what writes for it.
TARGETS: Mapping[str, tuple[str, Callable[[Choices, Refusals], Exported]]] = {
    "maxtext": ("MaxText", maxtext),
    "megatron": ("Megatron-LM", megatron),
    "torchtitan": ("torchtitan", torchtitan),
    "deepspeed": ("DeepSpeed", deepspeed),
    "jax": ("JAX", jaxcode),
}


def hand_over(plan: Plan, to: str) -> Exported:
    """Write `plan` as the configuration of another tool.

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
    if to not in SERVING_TARGETS:
        raise UnknownNameError("engine", to, SERVING_TARGETS, list_all=True)
    title, write = SERVING_TARGETS[to]
    choices, refusals = ServingChoices(plan), Refusals(title)
    choices.check_known(refusals)
    script = write(choices, refusals)
    refusals.check()
    return Exported(to, title, script.version, f"serve-{to}.sh", script.text(choices, title), tuple(script.notes))
