"""`export`: a saved plan in the words of another tool. Not here: flags (`cli`), and what the tools say (`handover`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from meshwise.commands.plan_file import is_serving_plan, read_saved
from meshwise.commands.serving_plan import read_serving_plan
from meshwise.core.errors import MeshwiseError
from meshwise.exports import SERVING_TARGETS, TARGETS, Exported, hand_over, hand_over_serving
from meshwise.search import Plan
from meshwise.search.serving import ServingPlan


def read_plan(file: str | os.PathLike[str]) -> Plan:
    """Read the plan that `--save` wrote.

    Raises:
        MeshwiseError: there is no such file, or it holds no plan.
    """
    return read_saved(file, Plan.from_json, "plan train")


def write_text(handed: Exported, file: Path) -> None:
    """Write what was handed over.

    Raises:
        MeshwiseError: the file cannot be written.
    """
    try:
        file.write_text(handed.text, encoding="utf-8")
    except OSError as error:
        raise MeshwiseError(f"--output {file}: {error.strerror}") from None


def export(plan: Plan | ServingPlan | str | os.PathLike[str], *, to: str) -> Exported:
    """Say a plan in the words of another tool: what `meshwise export` answers, as values.

    >>> import meshwise
    >>> planning = meshwise.estimate_train(
    ...     "llama-3-8b", on="v5p:4x4x4", batch_tokens="1Mi", seq_len=4096, layout="fsdp=16,tensor=4,remat=full"
    ... )
    >>> handed = meshwise.export(planning.plans[0], to="jax")
    >>> handed.file_name, "P('fsdp', 'tensor'" in handed.text
    ('planned.py', True)

    Args:
        plan: a plan of training or of serving, or the file that one was saved in.
        to: for training "maxtext", "megatron", "torchtitan", "deepspeed" or "jax"; for serving "vllm", "sglang",
            "tensorrt-llm" or "jetstream".

    Returns: the text of a file for that tool, and what it could only say in notes.

    Raises:
        HandoverError: choices that the tool cannot express, each with its reason and the nearest that it can.
        MeshwiseError: a file that holds no plan, a tool that is not known, or that does something else.
    """
    if not isinstance(to, str):
        raise MeshwiseError(f"to: expected the name of a tool, found {to!r}")
    if not isinstance(plan, Plan | ServingPlan | str | os.PathLike):
        raise MeshwiseError(f"plan: expected a plan or the file of one, found {plan!r}")
    if not isinstance(plan, Plan | ServingPlan):
        plan = read_serving_plan(plan) if is_serving_plan(plan) else read_plan(plan)
    if isinstance(plan, ServingPlan):
        _check_tool(to, "serving", SERVING_TARGETS, TARGETS)
        return hand_over_serving(plan, to)
    _check_tool(to, "training", TARGETS, SERVING_TARGETS)
    return hand_over(plan, to)


def _check_tool(to: str, kind: str, fitting: Iterable[str], others: Iterable[str]) -> None:
    """Refuse a tool that does something else.

    Raises:
        MeshwiseError: with the tools that do it.
    """
    if to in others:
        raise MeshwiseError(f"to: {to} does no {kind}, and this is a plan of {kind}: use {', '.join(fitting)}")
