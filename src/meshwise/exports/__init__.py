"""Handing a plan over: its choices in the words of other tools, and as JAX code.

Values in, text out: nothing is written here, and nothing is left out in silence. What a tool cannot express is an
error that names the choice and the nearest that it can. Not here: running anything.
"""

from meshwise.exports.exported import Exported
from meshwise.exports.targets import SERVING_TARGETS, TARGETS, hand_over, hand_over_serving

__all__ = ["SERVING_TARGETS", "TARGETS", "Exported", "hand_over", "hand_over_serving"]
