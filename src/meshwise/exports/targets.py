"""Which tools a plan of training can be exported to, and the one way in. Not here: what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from meshwise.core.errors import HandoverError, MeshwiseError, UnknownNameError
from meshwise.costs.calibration import Calibration
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.exports import deepspeed, jaxcode, maxtext, megatron, own_runtime, torchtitan
from meshwise.exports.choices import Choices, unknown_choices
from meshwise.exports.exported import Exported, Refusals, Rule
from meshwise.exports.overlapping import Overlap, check_overlap
from meshwise.hardware import Chip
from meshwise.search import Plan
from meshwise.search.tools import Tool, refuses_all
from meshwise.sharding.layout import Layout, LayoutRequest


@dataclass(frozen=True, slots=True)
class Target:
    """A tool that trains.

    Args:
        title: its own name.
        vendors: of chips that it runs on; empty for any.
        rules: what it cannot express.
        overlap: what it can hide.
        write: a plan in its words; it refuses the models and formats that it does not know.
    """

    title: str
    vendors: tuple[str, ...]
    rules: tuple[Rule[Choices], ...]
    overlap: Overlap
    write: Callable[[Choices, Refusals], Exported]


#: By the name that `--to` takes.
TARGETS: Mapping[str, Target] = {
    "maxtext": Target(
        maxtext.TITLE, ("google", "nvidia", "amd", "cpu"), maxtext.RULES, maxtext.OVERLAP, maxtext.maxtext
    ),
    "megatron": Target(megatron.TITLE, ("nvidia",), megatron.RULES, megatron.OVERLAP, megatron.megatron),
    "torchtitan": Target(
        torchtitan.TITLE, ("nvidia", "amd"), torchtitan.RULES, torchtitan.OVERLAP, torchtitan.torchtitan
    ),
    "deepspeed": Target(deepspeed.TITLE, ("nvidia", "amd"), deepspeed.RULES, deepspeed.OVERLAP, deepspeed.deepspeed),
    "jax": Target(jaxcode.TITLE, (), jaxcode.RULES, jaxcode.OVERLAP, jaxcode.jaxcode),
}


#: Tools that run plans, by the name that `--tool` takes: those that plans are exported to, and meshwise's own runtime.
TOOLS = (*TARGETS, "meshwise")


#: Those that take ring attention wherever they take keys and values that are gathered over `context`.
_TAKE_RINGS = ("megatron", "meshwise")


def _rules_of(name: str) -> tuple[Rule[Choices], ...]:
    return own_runtime.RULES if name == "meshwise" else TARGETS[name].rules


def overlap_of(name: str) -> Overlap:
    """What a tool can hide."""
    return own_runtime.OVERLAP if name == "meshwise" else TARGETS[name].overlap


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
    choices = Choices(plan.problem, plan.layout, plan.fabric, overlap=TARGETS[to].overlap)
    refusals = Refusals(TARGETS[to].title)
    _check_chip(TARGETS[to], choices, refusals, "--to")
    choices.check_known(refusals)
    refusals.apply(TARGETS[to].rules, choices)
    written = TARGETS[to].write(choices, refusals)
    refusals.check()
    return written


def _check_chip(target: Target, choices: Choices, refusals: Refusals, flag: str) -> None:
    chip = choices.chip
    if target.vendors and chip.vendor not in target.vendors:
        others = ", ".join(n for n, t in TARGETS.items() if not t.vendors or chip.vendor in t.vendors)
        refusals.add(f"chip {chip.title}", f"it runs on chips of {' and '.join(target.vendors)}", f"{flag} {others}")


def _tool(name: str, problem: TrainingProblem) -> Tool:
    """A tool's conditions on layouts of a job."""
    known: dict[Any, Any] = {}
    refusals = (_condition(rule, problem, known) for rule in _rules_of(name))
    every = tuple(refusals) if name == "meshwise" else (unknown_choices, *refusals)
    return Tool(name, every, takes_rings=name in _TAKE_RINGS)


def _condition(rule: Rule[Choices], problem: TrainingProblem, known: dict[Any, Any]) -> Callable[[Layout], Any]:
    network = problem.network
    return lambda layout: rule.refused(Choices(problem, layout, network, known))


@lru_cache(maxsize=64)
def refusals_of(name: str, problem: TrainingProblem) -> Refusals:
    """What a tool cannot express of a job, whatever the layout: the model, formats, the optimizer, the chip.

    It is asked of each of many layouts of a job.
    """
    choices, rules = Choices(problem, Layout(), problem.network, overlap=overlap_of(name)), _rules_of(name)
    if name == "meshwise":
        refusals = Refusals(own_runtime.TITLE)
        refusals.apply((r for r in rules if refuses_all(_condition(r, problem, {}))), choices)
        return refusals
    target = TARGETS[name]
    refusals = Refusals(target.title)
    _check_chip(target, choices, refusals, "--tool")
    choices.check_known(refusals)
    with suppress(HandoverError):  # what writes may stop at the first
        target.write(choices, refusals)  # a layout of one chip: what is refused is not the layout
    refusals.apply((r for r in rules if refuses_all(_condition(r, problem, {}))), choices)
    return refusals


def tools_for(problem: TrainingProblem, names: Iterable[str] = TOOLS) -> tuple[Tool, ...]:
    """Those of some tools that take the job in some layout."""
    return tuple(_tool(name, problem) for name in names if not refusals_of(name, problem).lines)


def runs_in(plan: Plan) -> tuple[str, ...]:
    """Tools that take a plan, by name."""
    return _run(plan.problem, plan.layout)


@lru_cache(maxsize=64)
def _run(problem: TrainingProblem, layout: Layout) -> tuple[str, ...]:
    """The same; a report asks more than once."""
    return tuple(tool.name for tool in _every_tool(problem) if tool.runs(layout))


@lru_cache(maxsize=16)
def _every_tool(problem: TrainingProblem) -> tuple[Tool, ...]:
    """All tools that take the job; what their conditions worked out of it holds for all its layouts."""
    return tools_for(problem)


#: Tools that plans are made for unless others are asked for.
USUAL = ("megatron", "torchtitan", "maxtext", "deepspeed")


def calibration_for(tools: tuple[str, ...], asked: str, chip: Chip) -> Calibration:
    """The calibration that prices what is planned: where one tool is named, with what that tool hides.

    Without a tool, or with several, "fitted" is the usual software of such chips (`costs.fitted`).

    Args:
        tools: by name, as asked for.
        asked: a calibration's name; any but "fitted" stands as it is.
        chip: of the cluster.

    Raises:
        MeshwiseError: a software that hides what the tool cannot; UnknownNameError: a calibration that is not known.
    """
    if len(tools) != 1 or tools == ("none",):
        return find_calibration(asked, chip)
    overlap = overlap_of(tools[0])
    found = find_calibration(overlap.calibration(chip) if asked == "fitted" else asked, chip)
    check_overlap(tools[0], overlap, asked, found, chip)
    return found


def parse_tools(value: str | Iterable[str]) -> tuple[str, ...]:
    """Read names of tools: "megatron,maxtext", or several names; "none" stands alone.

    Raises:
        UnknownNameError: a tool that is not known.
        MeshwiseError: none beside others.
    """
    return parse_names(value, TOOLS, "These train models; 'plan serve' and 'estimate serve' take what serves them.")


def parse_names(value: str | Iterable[str], known: Iterable[str], hint: str) -> tuple[str, ...]:
    """Read names among `known`; see `parse_tools`. The hint says where others are known."""
    listed = [value] if isinstance(value, str) else value
    names = tuple(n.strip().lower() for words in listed for n in words.split(","))
    for name in names:
        if name not in (*known, "none"):
            raise UnknownNameError("tool", name, (*known, "none"), hint, list_all=True)
    if "none" in names and len(set(names)) > 1:
        raise MeshwiseError(
            f"tool: none leaves the choice to no tool, found {', '.join(names)}; leave out one or the other"
        )
    return tuple(dict.fromkeys(names))


def asked_tools(problem: TrainingProblem, names: tuple[str, ...], usual: tuple[str, ...] = USUAL) -> tuple[Tool, ...]:
    """The tools by name, or no tool at all for "none". Where none is named: the usual ones that take the job, or JAX.

    Raises:
        HandoverError: a tool that is named takes the job in no layout, with its reasons.
    """
    for name in names if names != ("none",) else ():
        refusals_of(name, problem).check()
    if names == ("none",):
        return ()
    return tools_for(problem, names or usual) or tools_for(problem, ("jax",))


def check_written(plan: Plan, written: LayoutRequest, tools: Iterable[Tool]) -> None:
    """Refuse a plan that none of some tools takes: with what was written in its layout, else with all that it chooses.

    Raises:
        HandoverError: what the first of the tools cannot express.
    """
    tools = tuple(tools)
    if not tools or any(tool.runs(plan.layout) for tool in tools):
        return
    name, choices = tools[0].name, Choices(plan.problem, plan.layout, plan.fabric)
    refusals = Refusals(own_runtime.TITLE if name == "meshwise" else TARGETS[name].title)
    conditions = [(rule, _condition(rule, plan.problem, {})) for rule in _rules_of(name)]
    refusals.apply((r for r, c in conditions if refuses_all(c, written.choices, written.sizes)), choices)
    refusals.check()
    refusals.apply(_rules_of(name), choices)
    refusals.check()
