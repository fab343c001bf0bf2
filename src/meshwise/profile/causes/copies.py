"""Causes in copies: between host and device, or on the device, that no computation hides.

Not here: gaps (`gaps`), collectives (`network`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwise.core.units import format_bytes, format_time
from meshwise.profile.causes.cause import Cause
from meshwise.profile.kinds import IN_FLIGHT, is_end, short_name
from meshwise.profile.profile import Profile
from meshwise.profile.trace import Activity, OpKind


def copy_causes(profile: Profile) -> Iterator[Cause]:
    """One of them: offloading, or other copies."""
    exposed = profile.partition_s["exposed_copy"]
    copies = [t for t in profile.ops if t.kind.activity == Activity.COPY]
    total = sum(t.exposed for t in copies)
    if not exposed or not total:
        return
    host = [t for t in copies if re.search(r"HtoD|DtoH|H2D|D2H|infeed|outfeed|host", t.kind.name)]
    names = {t.kind.name for t in copies}
    whole = [t for t in copies if not is_end(t.kind.name) and t.kind.name + IN_FLIGHT not in names] or copies
    moved = sum((t.kind.num_bytes or 0.0) * t.runs for t in whole)
    first = max(copies, key=lambda t: (t.exposed, t.kind.key)).kind
    size = f", {format_bytes(moved)}" if moved else ""
    evidence = (
        f"{sum(t.runs for t in whole):,.0f} copies a step{size}, {format_time(exposed)} of them not hidden, most in "
        f"{short_name(first.name)[:60]}{f' of {first.parent}' if first.parent else ''}"
    )
    both = [any(re.search(way, t.kind.name) for t in host) for way in ("HtoD|H2D", "DtoH|D2H")]
    if all(both) and sum(t.seconds for t in host) > 0.1 * profile.step_s:
        change = "prefetch what is offloaded one layer ahead, or offload less"
        yield Cause("offload-bound", exposed, evidence, change, "offloading is not hidden")
        return
    looped = sum(t.exposed for t in copies if _of_a_stack(t.kind))
    if looped > 0.5 * total:
        change = (
            "they move parts of arrays that a loop over layers stacks: unroll the loop (run --unroll-layers), or save "
            "less for the backward pass"
        )
    elif any("Pageable" in t.kind.name for t in host):
        change = "copy from pinned memory with non_blocking=True"
    else:
        change = "copy on a stream of its own, ahead of need"
    yield Cause("exposed-copy", exposed, evidence, change, "copies are not hidden")


def _of_a_stack(op: OpKind) -> bool:
    """Whether it copies a part of what a loop that JAX differentiates stacks, as that over layers."""
    return re.search(r"jvp\(.*/while\b", op.scope) is not None
