"""Why a step is slow: rules over a profile, each with its evidence and the change to make."""

from meshwise.profile.causes.cause import NAMED, NAMES, Cause
from meshwise.profile.causes.rules import find_causes

__all__ = ["NAMED", "NAMES", "Cause", "find_causes"]
