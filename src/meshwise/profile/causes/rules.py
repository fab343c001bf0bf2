"""All rules over a profile, ranked by what they cost.

Not here: the rules themselves (`compute`, `network`, `stragglers`, `gaps`, `copies`).
"""

from __future__ import annotations

from dataclasses import replace

from meshwise.profile.beside import Beside
from meshwise.profile.causes.cause import LEAST, NAMED, Cause
from meshwise.profile.causes.compute import compute_causes
from meshwise.profile.causes.copies import copy_causes
from meshwise.profile.causes.gaps import gap_causes
from meshwise.profile.causes.network import network_causes
from meshwise.profile.causes.plan import plan_causes
from meshwise.profile.causes.stragglers import LATE, straggler_causes
from meshwise.profile.profile import Profile

#: What a device is late costs as much as what makes few of its steps longer, but for this share: the two are one.
_SAME = 0.1


def find_causes(profile: Profile, beside: Beside | None = None) -> tuple[Cause, ...]:
    """What makes a step slow, the costliest first by `Cause.weight`; what is under 0.3 % of the step is left out.

    A straggler comes before the others: no change to the program mends a device that is slower than its peers, and
    what the others take is measured while they wait for it. So does what makes few steps longer by most: it is no part
    of what a step has to do. It is first if it is of the straggler alone and leaves little of that: a device that is
    late in few steps. If it leaves nothing the two are one, and the straggler is left out.

    Args:
        profile: of one job.
        beside: the same beside a plan, which tells more.
    """
    found = [*compute_causes(profile), *network_causes(profile), *straggler_causes(profile), *gap_causes(profile),
             *copy_causes(profile)]  # fmt: skip
    if beside is not None:
        found = [c for c in found if c.name != "recompute"]  # the plan says whether it is meant
        found += plan_causes(beside, found)
    longest = max(profile.steps_s)
    bounded = [replace(c, seconds=min(c.seconds, profile.step_s if c.share == 1 else longest)) for c in found]
    kept = [c for c in bounded if c.seconds >= LEAST * profile.step_s]
    kept.sort(key=lambda c: (-c.seconds * c.weight, -c.seconds, c.name, c.evidence))
    few = next((c for c in kept if c.share < 1 and c.seconds >= NAMED * profile.step_s), None)
    late = next((c for c in kept if c.name == "straggler"), None)
    same = late is not None and few is not None and late.device == few.device is not None
    if late is not None and few is not None and same and abs(few.average / late.seconds - 1) < _SAME:
        kept.remove(late)
        late = None
    alone = late is None or few is None or (same and late.seconds - few.average < LATE * profile.step_s)
    return tuple(sorted(kept, key=lambda c: 0 if c is few and alone else 1 if c is late else 2 if c is few else 3))
