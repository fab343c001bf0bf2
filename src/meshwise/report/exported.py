"""What was handed over to another tool, in words. Not here: the text itself (`handover`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwise.exports import Exported
from meshwise.report.report import Report, listed


def handover_report(handed: Exported, inputs: Mapping[str, Any]) -> Report:
    """Report a hand-over.

    Args:
        handed: its text and notes.
        inputs: what was asked.
    """
    lines = handed.text.count("\n")
    return Report(
        command="export",
        inputs=inputs,
        answer=f"{handed.title}: {lines} lines in {inputs['output'] or handed.file_name}",
        data={
            "target": handed.target,
            "title": handed.title,
            "written_for": handed.version,
            "file_name": handed.file_name,
            "text": handed.text,
            "notes": list(handed.notes),
        },
        body=(
            listed("Written for", (f"{handed.title}, {handed.version}",)),
            *((listed("Notes", handed.notes),) if handed.notes else ()),
        ),
    )
