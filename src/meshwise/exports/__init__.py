"""Exporting a plan of training: its choices in the words of other tools, and as JAX code. `serving`: of serving.

Values in, text out: nothing is written here, and nothing is left out in silence. What a tool cannot express is an
error that names the choice and the nearest that it can. Not here: running anything.
"""

from meshwise.exports.exported import Exported
from meshwise.exports.targets import (
    TARGETS,
    TOOLS,
    USUAL,
    asked_tools,
    calibration_for,
    check_written,
    hand_over,
    parse_tools,
    runs_in,
    tools_for,
)

__all__ = [
    "TARGETS",
    "TOOLS",
    "USUAL",
    "Exported",
    "asked_tools",
    "calibration_for",
    "check_written",
    "hand_over",
    "parse_tools",
    "runs_in",
    "tools_for",
]
