"""`export`: a saved plan in the words of another tool. Not here: flags (`cli`), and what the tools say (`handover`)."""

from __future__ import annotations

import os
from pathlib import Path

from meshwise.errors import ConfigError, MeshwiseError
from meshwise.handover import HandedOver, hand_over
from meshwise.planning import Plan

__all__ = ["export", "read_plan", "write_text"]


def read_plan(file: str | os.PathLike[str]) -> Plan:
    """Read the plan that `--save` wrote.

    Raises:
        MeshwiseError: there is no such file, or it holds no plan.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "; 'meshwise plan train ... --save plan.json' writes one" if not path.exists() else ""
        raise MeshwiseError(f"plan {str(file)!r}: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"plan {str(file)!r}: expected JSON as --save writes it, found no text") from None
    try:
        return Plan.from_json(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("plan JSON", f"plan {str(file)!r}", 1)) from None


def write_text(handed: HandedOver, file: Path) -> None:
    """Write what was handed over.

    Raises:
        MeshwiseError: the file cannot be written.
    """
    try:
        file.write_text(handed.text, encoding="utf-8")
    except OSError as error:
        raise MeshwiseError(f"--output {file}: {error.strerror}") from None


def export(plan: Plan | str | os.PathLike[str], *, to: str) -> HandedOver:
    """Say a plan in the words of another tool: what `meshwise export` answers, as values.

    >>> import meshwise
    >>> planning = meshwise.estimate_train(
    ...     "llama-3-8b", on="v5p:4x4x4", batch_tokens="1Mi", seq_len=4096, layout="fsdp=16,tensor=4,remat=full"
    ... )
    >>> handed = meshwise.export(planning.plans[0], to="jax")
    >>> handed.file_name, "P('fsdp', 'tensor'" in handed.text
    ('planned.py', True)

    Args:
        plan: a plan, or the file that one was saved in.
        to: "maxtext", "megatron", "torchtitan", "deepspeed" or "jax".

    Returns: the text of a file for that tool, and what it could only say in notes.

    Raises:
        HandoverError: choices that the tool cannot express, each with its reason and the nearest that it can.
        MeshwiseError: a file that holds no plan, a tool that is not known.
    """
    if not isinstance(to, str):
        raise MeshwiseError(f"to: expected the name of a tool, found {to!r}")
    if not isinstance(plan, Plan | str | os.PathLike):
        raise MeshwiseError(f"plan: expected a plan or the file of one, found {plan!r}")
    return hand_over(plan if isinstance(plan, Plan) else read_plan(plan), to)
