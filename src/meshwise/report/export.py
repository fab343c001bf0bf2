"""The export verb's answer: what was written for another tool. Not here: the text itself (`exports`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.core.units import format_bytes
from meshwise.exports import Exported
from meshwise.report.report import Report, listed
from meshwise.report.table import counted, picked, said


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """Weights of a trained model, as they are published.

    Args:
        to: "transformers", or "peft" for adapters alone.
        model, step: whose they are.
        folder: that holds them.
        files: in it.
        tensors, bytes: how many, and of all of them.
        config: what `config.json` says.
    """

    to: str
    model: str
    step: int
    folder: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int
    config: Mapping[str, Any]


def weights_report(written: ExportedWeights, inputs: Mapping[str, Any]) -> Report:
    """Report weights that were written."""
    is_whole = written.to == "transformers"
    size, folder = f"{counted(written.tensors, 'tensor')}, {format_bytes(written.bytes)}", str(written.folder)
    return Report(
        command="export",
        inputs=inputs,
        answer=f"{'' if is_whole else 'adapters of '}step {written.step:,} of {written.model}: {size} in {folder}",
        data=picked(written, "model step files tensors bytes config") | {"folder": folder},
        body=said(listed("Files", written.files)),
        next_steps=(
            f"in Python: transformers.AutoModelForCausalLM.from_pretrained({folder!r})",
            f"meshwise serve {folder} --weights {folder}",
        )
        if is_whole
        else (f"in Python: peft.PeftModel.from_pretrained(model, {folder!r})",),
    )


def export_report(exported: Exported, inputs: Mapping[str, Any]) -> Report:
    """Report an export."""
    lines = exported.text.count("\n")
    return Report(
        command="export",
        inputs=inputs,
        answer=f"{exported.title}: {lines} lines in {inputs['output'] or exported.file_name}",
        data=picked(exported, "target title file_name text notes written_for=version"),
        body=said(listed("Written for", (f"{exported.title}, {exported.version}",)), listed("Notes", exported.notes)),
    )
