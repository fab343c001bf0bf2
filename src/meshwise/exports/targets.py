"""Which tools and engines a plan can be exported to, and the one way in. Not here: what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from meshwise.core.errors import UnknownNameError
from meshwise.exports import deepspeed, jaxcode, maxtext, megatron, torchtitan
from meshwise.exports.choices import Choices
from meshwise.exports.exported import Exported, Refusals, Rule
from meshwise.exports.serving import jetstream, sglang, tensorrt_llm, vllm
from meshwise.exports.serving.choices import Pool, ServingChoices
from meshwise.exports.serving.script import Script
from meshwise.search import Plan
from meshwise.search.serving import ServingPlan

C = TypeVar("C", Choices, ServingChoices)
R = TypeVar("R", Choices, Pool)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target(Generic[C, R, T]):
    """A tool or an engine.

    Args:
        title: its own name.
        rules: what it cannot express.
        write: a plan in its words; it refuses the models and formats that it does not know.
    """

    title: str
    rules: tuple[Rule[R], ...]
    write: Callable[[C, Refusals], T]


#: By the name that `--to` takes.
TARGETS: Mapping[str, Target[Choices, Choices, Exported]] = {
    "maxtext": Target(maxtext.TITLE, maxtext.RULES, maxtext.maxtext),
    "megatron": Target(megatron.TITLE, megatron.RULES, megatron.megatron),
    "torchtitan": Target(torchtitan.TITLE, torchtitan.RULES, torchtitan.torchtitan),
    "deepspeed": Target(deepspeed.TITLE, deepspeed.RULES, deepspeed.deepspeed),
    "jax": Target(jaxcode.TITLE, jaxcode.RULES, jaxcode.jaxcode),
}


def _write(kind: str, to: str, targets: Mapping[str, Target[C, R, T]], choices: C, read: Iterable[R]) -> T:
    """Write for one of `targets`; raise what it cannot express."""
    if to not in targets:
        raise UnknownNameError(kind, to, targets, list_all=True)
    refusals = Refusals(targets[to].title)
    choices.check_known(refusals)
    for part in read:
        refusals.apply(targets[to].rules, part)
    written = targets[to].write(choices, refusals)
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
    choices = Choices(plan)
    return _write("tool", to, TARGETS, choices, [choices])


#: By the name that `--to` takes.
SERVING_TARGETS: Mapping[str, Target[ServingChoices, Pool, Script]] = {
    "vllm": Target("vLLM", vllm.RULES, vllm.vllm),
    "sglang": Target("SGLang", sglang.RULES, sglang.sglang),
    "tensorrt-llm": Target("TensorRT-LLM", tensorrt_llm.RULES, tensorrt_llm.tensorrt_llm),
    "jetstream": Target("JetStream with MaxText", jetstream.RULES, jetstream.jetstream),
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
    script, title = _write("engine", to, SERVING_TARGETS, choices, choices.pools), SERVING_TARGETS[to].title
    return Exported(to, title, script.version, f"serve-{to}.sh", script.text(choices, title), tuple(script.notes))
