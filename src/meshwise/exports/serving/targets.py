"""Which engines a plan of serving can be exported to, and the one way in. Not here: what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwise.core.errors import UnknownNameError
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.exports.exported import Exported, Refusals
from meshwise.exports.serving import jetstream, own_engine, sglang, tensorrt_llm, vllm
from meshwise.exports.serving.choices import (
    Engine,
    EngineRules,
    ServingChoices,
    unknown_serving_layout,
    unknown_serving_load,
)
from meshwise.exports.serving.script import Script
from meshwise.exports.targets import parse_names
from meshwise.search.serving import ServingPlan
from meshwise.search.tools import ServingTool
from meshwise.sharding.serving import ServingLayout


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """An engine that serves.

    Args:
        title: its own name.
        rules: what it cannot express.
        write: a plan in its words.
    """

    title: str
    rules: EngineRules
    write: Callable[[ServingChoices], Script]


#: By the name that `--to` takes.
SERVING_TARGETS: Mapping[str, EngineTarget] = {
    "vllm": EngineTarget("vLLM", vllm.RULES, vllm.vllm),
    "sglang": EngineTarget("SGLang", sglang.RULES, sglang.sglang),
    "tensorrt-llm": EngineTarget("TensorRT-LLM", tensorrt_llm.RULES, tensorrt_llm.tensorrt_llm),
    "jetstream": EngineTarget("JetStream with MaxText", jetstream.RULES, jetstream.jetstream),
}


#: Engines that `--tool` may ask for: those, and our own, of which nothing is written.
SERVING_TOOLS = (*SERVING_TARGETS, "meshwise")


def _rules(name: str) -> EngineRules:
    return own_engine.RULES if name == "meshwise" else SERVING_TARGETS[name].rules


def _title(name: str) -> str:
    return own_engine.TITLE if name == "meshwise" else SERVING_TARGETS[name].title


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
    choices, title = ServingChoices(plan.problem, plan.estimate), SERVING_TARGETS[to].title
    refusals = Refusals(title)
    choices.check_fits(refusals)
    _check_taken(to, choices, refusals)
    script = SERVING_TARGETS[to].write(choices)
    return Exported(to, title, script.version, f"serve-{to}.sh", script.text(choices, title), tuple(script.notes))


def _check_taken(name: str, choices: ServingChoices, refusals: Refusals) -> None:
    choices.check_known(refusals)
    for pool in choices.pools:
        refusals.apply(_rules(name), pool)
    refusals.check()


def check_serving_tools(plan: ServingPlan, tools: Sequence[ServingTool]) -> None:
    """Refuse a plan that none of some engines takes, whether it fits or not.

    Raises:
        HandoverError: what the first of them cannot express, each with its reason and the nearest that it can.
    """
    if tools and not any(tool.runs(plan.setup) for tool in tools):
        name = tools[0].name
        check_served_by(name, plan)


def check_served_by(name: str, plan: ServingPlan) -> None:
    """Refuse a plan that an engine cannot run.

    Raises:
        HandoverError: what it cannot express, each with its reason and the nearest that it can.
    """
    _check_taken(name, ServingChoices(plan.problem, plan.estimate), Refusals(_title(name)))


@lru_cache(maxsize=64)
def serving_refusals_of(name: str, problem: ServingProblem) -> Refusals:
    """What an engine cannot express of a load, whatever the layout: the model, formats, the chip.

    It is asked of each of many layouts of a load.
    """
    refusals = Refusals(_title(name))
    refusals.apply(_rules(name), Engine(problem, "serve", ServingLayout()))
    return refusals


def serving_tools_for(problem: ServingProblem, names: Iterable[str] = SERVING_TARGETS) -> tuple[ServingTool, ...]:
    """Those of some engines that take the load in some layout."""
    return tuple(_serving_tool(name, problem) for name in names if not serving_refusals_of(name, problem).lines)


def _serving_tool(name: str, problem: ServingProblem) -> ServingTool:
    known, rules = not unknown_serving_load(problem.load), list(_rules(name))

    def takes(kind: str, layout: ServingLayout, prefill_batch: int, chunk: int | None) -> bool:
        if not known:
            return False
        engine = Engine(problem, kind, layout, prefill_batch, chunk)
        for i, rule in enumerate(rules):
            if rule.refused(engine):
                if i:
                    rules.insert(0, rules.pop(i))  # it refuses the next layouts, too, as a rule
                return False
        return not unknown_serving_layout(layout)

    return ServingTool(name, takes)


def parse_serving_tools(value: str | Iterable[str]) -> tuple[str, ...]:
    """As `parse_tools`, of engines."""
    hint = "These serve models; 'plan train' and 'estimate train' take what trains them."
    return parse_names(value, SERVING_TOOLS, hint)


def asked_serving_tools(problem: ServingProblem, names: tuple[str, ...]) -> tuple[ServingTool, ...]:
    """The engines by name; all that take the load where none is named, and no engine at all for "none".

    Raises:
        HandoverError: an engine that is named takes the load in no layout, with its reasons.
    """
    for name in names if names != ("none",) else ():
        serving_refusals_of(name, problem).check()
    return () if names == ("none",) else serving_tools_for(problem, names or SERVING_TARGETS)


def serving_runs_in(problem: ServingProblem, setup: ServingSetup) -> tuple[str, ...]:
    """Engines that take a plan of serving, by name: those that `--tool` may ask for, ours among them."""
    return tuple(tool.name for tool in serving_tools_for(problem, SERVING_TOOLS) if tool.runs(setup))
