"""Handing a plan of serving over: the commands that start its engines, and the one that measures what was predicted.

Not here: plans of training (`handover.targets`).
"""

from meshwise.exports.targets import SERVING_TARGETS, hand_over_serving

__all__ = ["SERVING_TARGETS", "hand_over_serving"]
