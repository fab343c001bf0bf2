"""The export verb's answer: what was written for another tool. Not here: the text itself (`exports`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwise.exports import Exported
from meshwise.report.report import Report, listed
from meshwise.report.table import picked, said


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
