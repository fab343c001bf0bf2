"""Which engines a plan of serving can be handed over to, and the one way in. Not here: what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwise.core.errors import UnknownNameError
from meshwise.exports.exported import Exported, Refusals
from meshwise.exports.serving.choices import ServingChoices
from meshwise.exports.serving.jetstream import jetstream
from meshwise.exports.serving.script import Script
from meshwise.exports.serving.sglang import sglang
from meshwise.exports.serving.tensorrt_llm import tensorrt_llm
from meshwise.exports.serving.vllm import vllm
from meshwise.search.serving import ServingPlan

#: Name as `--to` takes it -> the engine's own name, and what writes for it.
SERVING_TARGETS: Mapping[str, tuple[str, Callable[[ServingChoices, Refusals], Script]]] = {
    "vllm": ("vLLM", vllm),
    "sglang": ("SGLang", sglang),
    "tensorrt-llm": ("TensorRT-LLM", tensorrt_llm),
    "jetstream": ("JetStream with MaxText", jetstream),
}


def hand_over_serving(plan: ServingPlan, to: str) -> Exported:
    """Say a plan of serving in the words of an engine.

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
