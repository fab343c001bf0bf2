"""All rules over a profile, ranked by what they cost.

Not here: the rules themselves (`compute`, `network`, `stragglers`, `host`).
"""

from __future__ import annotations

from dataclasses import replace

from meshwise.profile.beside import Beside
from meshwise.profile.causes.cause import Cause
from meshwise.profile.causes.compute import compute_causes
from meshwise.profile.causes.host import host_causes
from meshwise.profile.causes.network import network_causes
from meshwise.profile.causes.plan import plan_causes
from meshwise.profile.causes.stragglers import straggler_causes
from meshwise.profile.profile import Profile

#: Causes below this share of the step are left out.
LEAST = 0.003


def find_causes(profile: Profile, beside: Beside | None = None) -> tuple[Cause, ...]:
    """What makes a step slow, the costliest first; what is under 0.3 % of the step is left out.

    A straggler comes before all others: no change to the program mends a device that is slower than its peers, and
    what the others take is measured while they wait for it.

    Args:
        profile: of one job.
        beside: the same beside a plan, which tells more.
    """
    found = [*compute_causes(profile), *network_causes(profile), *straggler_causes(profile), *host_causes(profile)]
    if beside is not None:
        found = [c for c in found if c.name != "recompute"]  # the plan says whether it is meant
        found += plan_causes(beside, found)
    bounded = [replace(c, seconds=min(c.seconds, profile.step_s)) for c in found]
    kept = [c for c in bounded if c.seconds >= LEAST * profile.step_s]
    return tuple(sorted(kept, key=lambda c: (c.name != "straggler", -c.seconds, c.name, c.evidence)))
