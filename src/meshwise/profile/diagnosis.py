"""What `meshwise profile` answers: a profile and the causes of its slowness. Not here: words (`report.profile`)."""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.core.explanation import Answer
from meshwise.profile.beside import Beside
from meshwise.profile.causes import NAMED, Cause
from meshwise.profile.compare import Comparison
from meshwise.profile.profile import Profile

#: The first line names no more causes than this.
_MOST_NAMED = 3


@dataclass(frozen=True, repr=False)
class Diagnosis(Answer):
    """Where the time of a step went, and why.

    Args:
        profile: the measured side.
        causes: a straggler first, then what makes few steps longer, then the costliest by weight.
        beside: the profile beside its plan, None without one.
        comparison: with an earlier profile, None without one.
    """

    profile: Profile
    causes: tuple[Cause, ...]
    beside: Beside | None = None
    comparison: Comparison | None = None

    @property
    def named(self) -> tuple[Cause, ...]:
        """The causes that the first line names: the first, and the costliest of the others, in their order."""
        large = [c for c in self.causes[1:] if c.seconds >= NAMED * self.profile.step_s]
        costliest = sorted(large, key=lambda c: -c.seconds)[: _MOST_NAMED - 1]
        return tuple(c for place, c in enumerate(self.causes) if place == 0 or c in costliest)

    @property
    def reachable_s(self) -> float:
        """Seconds of a step without the named causes, which are taken not to overlap."""
        return max(self.profile.step_s - sum(c.average for c in self.named), 0.0)
