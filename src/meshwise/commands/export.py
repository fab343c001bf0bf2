"""`export`: a saved plan as the configuration of another tool, or a trained model's weights as they are published.

Not here: what the tools say (`exports`), how weights are written (`runtime.weights`).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Literal

from meshwise.commands.command import Screen, verb
from meshwise.commands.estimate_serve import serving_plan
from meshwise.commands.plan_files import kind_of_plan, read_plan, write_file
from meshwise.commands.requests import File, Request, attributes
from meshwise.core.errors import MeshwiseError, MissingDependencyError
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.exports import TARGETS, Exported, hand_over
from meshwise.exports.serving import SERVING_TARGETS, hand_over_serving
from meshwise.report.export import ExportedWeights, export_report, weights_report
from meshwise.runtime.devices import find_devices
from meshwise.search import Plan, PlanResult
from meshwise.search.serving import ServingPlan, ServingPlanResult

#: What takes the weights of a saved step, not a plan.
_OF_WEIGHTS = ("transformers", "peft")

#: What is exported: a plan, the file of one, and what searches and estimates give.
Exportable = Plan | ServingPlan | PlanResult | ServingPlanResult | ServingEstimate | str | os.PathLike[str]


def export(plan: Exportable, *, to: str) -> Exported:
    """Write a plan as the configuration of another tool: what `meshwise export` answers, as values.

    `estimate_train` shows an example.

    Args:
        plan: a plan of training or of serving, or the file that one was saved in; of what a search found, the first;
            an estimate of serving.
        to: for training "maxtext", "megatron", "torchtitan", "deepspeed" or "jax"; for serving "vllm", "sglang",
            "tensorrt-llm" or "jetstream".

    Returns: the text of a file for that tool, and what it could only say in notes.

    Raises:
        HandoverError: choices that the tool cannot express, each with its reason and the nearest that it can.
        MeshwiseError: a file that holds no plan, a tool that is not known, or that does something else.
    """
    if not isinstance(to, str):
        raise MeshwiseError(f"to: expected the name of a tool, found {to!r}")
    given = plan.plans[0] if isinstance(plan, PlanResult) else serving_plan(plan)
    if not isinstance(given, Plan | ServingPlan | str | os.PathLike):
        raise MeshwiseError(f"plan: expected a plan or the file of one, found {given!r}")
    if not isinstance(given, Plan | ServingPlan):
        given = read_plan(given, ServingPlan) if kind_of_plan(given) == "serving" else read_plan(given, Plan)
    kinds = {"training": TARGETS, "serving": SERVING_TARGETS}
    kind, other = ("serving", "training") if isinstance(given, ServingPlan) else ("training", "serving")
    if to in _OF_WEIGHTS:
        raise MeshwiseError("to: a plan has no weights; export_weights writes those of a saved step")
    if to in kinds[other]:
        raise MeshwiseError(f"to: {to} does no {kind}, and this is a plan of {kind}: use {', '.join(kinds[kind])}")
    return hand_over_serving(given, to) if isinstance(given, ServingPlan) else hand_over(given, to)


def export_weights(
    checkpoint: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str],
    to: Literal["transformers", "peft"] = "transformers",
) -> ExportedWeights:
    """Write a trained model's weights as they are published: what `meshwise export --to transformers` answers.

    Args:
        checkpoint: the folder of a run's `checkpoint`, whose last step is taken, or that of one step.
        output: a new folder, for safetensors in the published names and config.json.
        to: "transformers" for all weights, adapters merged into theirs; "peft" for adapters by themselves, with
            adapter_config.json.

    Raises:
        MissingDependencyError: JAX, orbax or safetensors is missing.
        ConfigError: a torn step; a model whose family's names are not known; stacked experts, for PEFT.
        MeshwiseError: no saved step; no adapters, for PEFT; a folder that is there already or cannot be written.
    """
    find_devices()  # which orbax asks for; what is not there is left out in silence
    if importlib.util.find_spec("orbax") is None:
        raise MissingDependencyError("a checkpoint needs the library orbax: pip install 'meshwise[run]'")
    from meshwise.runtime.saved import export_adapters, export_step, saved_weights  # noqa: PLC0415  (an optional extra)

    saved = saved_weights(Path(checkpoint))
    if saved is None:
        raise MeshwiseError(
            f"{checkpoint}: expected the folder of 'meshwise run --checkpoint', found no saved step in it"
        )
    written = (export_adapters if to == "peft" else export_step)(saved, Path(output))
    return ExportedWeights(
        to=to,
        model=saved.model.name,
        step=saved.step.number,
        **attributes(written, "folder", "files", "tensors", "bytes", "config"),
    )


class _ExportRequest(Request):
    positional = ("plan",)

    plan: File
    """A saved plan; for transformers and peft the folder of a --checkpoint."""
    to: Literal[(*TARGETS, *SERVING_TARGETS, *_OF_WEIGHTS)]  # type: ignore[valid-type]
    """Tool that will run the plan; for transformers the weights of a saved step are written, for peft its adapters."""
    output: Path | None = None
    """Write to this file; for transformers and peft, to this new folder."""


@verb(_ExportRequest)
def show_export(screen: Screen, request: _ExportRequest) -> None:
    """Write a saved plan as the configuration of another tool.

    PLAN is a file that --save wrote, of training (maxtext to jax) or of serving (vllm to jetstream). Without
    --output the configuration is printed; --explain lists what it leaves to you. A choice that the tool cannot
    express is an error that names it and the nearest possible choice. For transformers the weights of a step that
    'run --checkpoint' saved are written to a folder: safetensors in the published names, and config.json. For peft
    its adapters are, with adapter_config.json; transformers has them merged into their weights.

    \b
      meshwise plan train llama-3-70b --on h100:512 --batch-tokens 4Mi \\
        --seq-len 4096 --precision mixed --save plan.json
      meshwise export plan.json --to megatron --output megatron-args.sh
      meshwise plan serve llama-3-8b --on h100:8 --prompt 1024 \\
        --output 256 --save plan.json
      meshwise export plan.json --to vllm --output serve.sh
      meshwise export steps --to transformers --output model
    """  # noqa: D301  (click's mark for lines that stay as they are)
    if request.to in _OF_WEIGHTS:
        if request.output is None:
            raise MeshwiseError(f"--to {request.to} needs --output, a new folder for the weights")
        written = export_weights(request.plan, output=request.output, to=request.to)
        return screen.show(weights_report(written, request.echo()))
    handed = export(request.plan, to=request.to)
    write_file("--output", request.output, lambda: handed.text)
    if request.output is None and not screen.as_json and not screen.explain:
        return screen.write(handed.text)
    return screen.show(export_report(handed, request.echo()))
