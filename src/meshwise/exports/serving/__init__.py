"""Exporting a plan of serving: commands that start its engines, and the one that measures what was predicted."""

from meshwise.exports.serving.targets import (
    SERVING_TARGETS,
    SERVING_TOOLS,
    asked_serving_tools,
    check_served_by,
    check_serving_tools,
    hand_over_serving,
    parse_serving_tools,
    serving_runs_in,
    serving_tools_for,
)

__all__ = [
    "SERVING_TARGETS",
    "SERVING_TOOLS",
    "asked_serving_tools",
    "check_served_by",
    "check_serving_tools",
    "hand_over_serving",
    "parse_serving_tools",
    "serving_runs_in",
    "serving_tools_for",
]
