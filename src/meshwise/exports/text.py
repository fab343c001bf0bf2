"""Laying out the files: headers with notes, wrapped comments. Not here: what they say."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from meshwise.exports.choices import Choices

#: Where a tool stores weights otherwise than the precision `mixed` says.
ONE_COPY = "weights are stored once, in fp32; the plan counts a bf16 copy beside the fp32 master, and so holds more"

#: Of models that have such modules.
MTP_NOTE = "multi-token-prediction modules of the model are in no plan, and left out"


def header_lines(choices: Choices, title: str, version: str, notes: Iterable[str]) -> list[str]:
    """Say what a file is: the plan, the tool's version it was written for, and every note."""
    cluster = choices.plan.problem.cluster
    return [
        f"{choices.model.name} on {choices.layout.num_chips:,} x {cluster.chip.title}, a plan of meshwise",
        f"layout: {choices.layout}",
        f"batch: {choices.layout.sequences:,} sequences of {choices.seq_len:,} tokens a step",
        f"precision {choices.job.precision}, optimizer {choices.job.optimizer}",
        f"written for {title}: {version}",
        *(f"note: {note}" for note in notes),
    ]


def commented(lines: Iterable[str], mark: str = "# ", width: int = 110) -> str:
    """Write lines as comments, wrapped, with a hanging indent."""
    out: list[str] = []
    for line in lines:
        out += textwrap.wrap(
            line,
            width,
            initial_indent=mark,
            subsequent_indent=f"{mark}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(out) + "\n"
