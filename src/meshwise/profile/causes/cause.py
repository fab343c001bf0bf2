"""One cause of a slow step: a name, what it costs, the evidence, and what to change.

Not here: the rules (`compute`, `network`, `gaps`).
"""

from __future__ import annotations

from dataclasses import dataclass

#: Causes below this share of the step are left out.
LEAST = 0.003
#: Those from this share on are named in the first line, and what few steps have goes first.
NAMED = 0.02
#: What is spread over many operations or places counts for this much in the order, against what one thing costs: a
#: change gains a part of it. What is left over, without a reason, comes last.
SPREAD, LEFT_OVER = 0.5, 0.0

#: Name of a cause -> what it means.
NAMES = {
    "attention-not-fused": "the score arrays of attention are written to memory and read again",
    "elementwise-not-fused": "elementwise operations follow one another, each reading and writing memory",
    "slow-matmul": "products run far below the roofline: small, badly shaped, or in a slow number format",
    "padding": "sizes of products do not fill the tiles of the matrix unit, which multiplies zeros for the rest",
    "layout-change": "copies, transposes and concatenations on the device",
    "unplanned-recompute": "the forward pass is computed again, and the plan does not ask for it",
    "recompute": "the forward pass is computed again in the backward pass",
    "exposed-collective": "communication that no computation hides",
    "strided-group": "a group of a collective does not lie on neighbouring links, or reaches over the slower network",
    "straggler": "one device is slower than the others, which wait for it",
    "waiting": "devices wait for each other in collectives, no one of them for the same one",
    "exposed-copy": "copies between host and device, or on the device, that no computation hides",
    "offload-bound": "the step waits for what is moved to the host's memory and back",
    "host-gap": "the device is idle because the host launches nothing",
    "launch-bound": "many short gaps: the host launches operations more slowly than the device runs them",
    "data-loading": "the device is idle while the host waits for data",
    "recompile": "programs are compiled within the step",
    "slower-than-planned": "a term of the plan takes longer, and none of the other causes explains it",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a step is slow.

    Args:
        name: a key of `NAMES`.
        seconds: what it costs in a step on an average device: in an average step, or in the few that have it.
        evidence: what the trace shows, with numbers.
        change: what to do about it.
        what: the cause in a few words, for the first line.
        share: of the steps that have it, where these are few; else 1.
        weight: of its seconds in the order of causes: 1, `SPREAD`, between these, or `LEFT_OVER`.
        device: which one is idle in few steps, or late for more than it computes longer; None for all others.
    """

    name: str
    seconds: float
    evidence: str
    change: str
    what: str
    share: float = 1.0
    weight: float = 1.0
    device: int | None = None

    @property
    def average(self) -> float:
        """Seconds of an average step."""
        return self.seconds * self.share

    def __post_init__(self) -> None:
        assert self.name in NAMES, self.name
