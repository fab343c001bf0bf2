"""`export`: a saved plan as the configuration of another tool. Not here: what the tools say (`exports`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from meshwise.commands.command import Screen, verb
from meshwise.commands.plan_files import kind_of_plan, read_plan, write_file
from meshwise.commands.requests import File, Request
from meshwise.core.errors import MeshwiseError
from meshwise.exports import TARGETS, Exported, hand_over
from meshwise.exports.serving import SERVING_TARGETS, hand_over_serving
from meshwise.report.export import export_report
from meshwise.search import Plan
from meshwise.search.serving import ServingPlan


def export(plan: Plan | ServingPlan | str | os.PathLike[str], *, to: str) -> Exported:
    """Write a plan as the configuration of another tool: what `meshwise export` answers, as values.

    `estimate_train` shows an example.

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
        plan = read_plan(plan, ServingPlan) if kind_of_plan(plan) == "serving" else read_plan(plan, Plan)
    kinds = {"training": TARGETS, "serving": SERVING_TARGETS}
    kind, other = ("serving", "training") if isinstance(plan, ServingPlan) else ("training", "serving")
    if to in kinds[other]:
        raise MeshwiseError(f"to: {to} does no {kind}, and this is a plan of {kind}: use {', '.join(kinds[kind])}")
    return hand_over_serving(plan, to) if isinstance(plan, ServingPlan) else hand_over(plan, to)


class _ExportRequest(Request):
    positional = ("plan",)

    plan: File
    """A saved plan."""
    to: Literal[(*TARGETS, *SERVING_TARGETS)]  # type: ignore[valid-type]
    """Tool that will run the plan."""
    output: Path | None = None
    """Write to this file."""


@verb(_ExportRequest)
def show_export(screen: Screen, request: _ExportRequest) -> None:
    """Write a saved plan as the configuration of another tool.

    PLAN is a file that --save wrote, of training (maxtext to jax) or of serving (vllm to jetstream). Without
    --output the configuration is printed; --explain lists what it leaves to you. A choice that the tool cannot
    express is an error that names it and the nearest possible choice.

    \b
      meshwise plan train llama-3-70b --on h100:512 --batch-tokens 4Mi \\
        --seq-len 4096 --precision mixed --save plan.json
      meshwise export plan.json --to megatron --output megatron-args.sh
      meshwise plan serve llama-3-8b --on h100:8 --prompt 1024 \\
        --output 256 --save plan.json
      meshwise export plan.json --to vllm --output serve.sh
    """  # noqa: D301  (click's mark for lines that stay as they are)
    handed = export(request.plan, to=request.to)
    write_file("--output", request.output, lambda: handed.text)
    if request.output is None and not screen.as_json and not screen.explain:
        screen.write(handed.text)
    else:
        screen.show(export_report(handed, request.echo()))
