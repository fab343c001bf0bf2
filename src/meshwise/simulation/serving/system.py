"""What is simulated: how an engine's scheduler chooses its next step, replicas, and how requests are shared out.

Values only; `replica` and `fleet` act on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.costs.engine import EngineCosts

#: Policy -> what it does.
POLICIES = {
    "prefill-first": "a step takes in waiting prompts, whole, as long as there is room; it decodes when none can be",
    "decode-first": "prompts are taken in when nothing decodes any more: one batch after the other",
    "chunked": "every step decodes, and fills up its tokens with pieces of prompts",
}

#: Preemption -> what becomes of the cache of the request that gives way, the one taken in last.
PREEMPTIONS = {
    "recompute": "dropped: its prompt and what it generated are prefilled again",
    "swap": "moved to the host's memory, and back when there is room",
}


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft tokens that a step checks, all of them in one pass.

    Each draft token is accepted with the same chance as long as those before it were; a step gives the accepted ones
    and one more (Leviathan et al. 2023, equation 1).

    Args:
        acceptance: chance that a draft token is accepted.
        draft_tokens: drafted for each step.
        draft_step_s: seconds of drafting one token, for the whole batch.
    """

    acceptance: float
    draft_tokens: int
    draft_step_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 <= self.acceptance < 1:
            raise MeshwiseError(f"acceptance: expected a share from 0 to less than 1, found {self.acceptance!r}")
        if self.draft_tokens < 1:
            raise MeshwiseError(f"draft tokens: expected at least 1, found {self.draft_tokens!r}")
        if not 0 <= self.draft_step_s < math.inf:
            raise MeshwiseError(f"draft step: expected seconds, 0 or more, found {self.draft_step_s!r}")

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gives, the mean.

        >>> Speculation(0.5, 3).tokens_per_step
        1.875
        """
        return (1 - self.acceptance ** (self.draft_tokens + 1)) / (1 - self.acceptance)

    def steps(self, random: np.random.Generator, tokens: int) -> int:
        """Draw how many steps a request takes for so many tokens."""
        done = steps = 0
        while done < tokens:
            likely = max(math.ceil((tokens - done) / self.tokens_per_step), 1)
            accepted = np.minimum(random.geometric(1 - self.acceptance, likely) - 1, self.draft_tokens)
            given = done + np.cumsum(accepted + 1)
            enough = int(np.searchsorted(given, tokens))
            if enough < likely:
                return steps + enough + 1
            done, steps = int(given[-1]), steps + likely
        return steps


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What an engine's scheduler is told.

    Args:
        policy: one of `POLICIES`.
        max_batch: requests that a replica works on at once.
        max_step_tokens: tokens of a step; a prompt that is longer goes alone where prompts are taken in whole.
        preemption: one of `PREEMPTIONS`.
        watermark: share of the cache's blocks that stay free when a request is taken in, for those that decode.
        prefix_cache: whether beginnings of prompts stay in the cache for later ones, least recently used go first.
        speculation: None: every step gives each request one token.
    """

    policy: str = "prefill-first"
    max_batch: int = 256
    max_step_tokens: int = 2048
    preemption: str = "recompute"
    watermark: float = 0.01
    prefix_cache: bool = False
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        """Check names and limits."""
        if self.policy not in POLICIES:
            raise UnknownNameError("policy", self.policy, POLICIES, list_all=True)
        if self.preemption not in PREEMPTIONS:
            raise UnknownNameError("preemption", self.preemption, PREEMPTIONS, list_all=True)
        if self.max_batch < 1 or self.max_step_tokens < 1:
            raise MeshwiseError("max batch and max step tokens: expected at least 1")
        if not 0 <= self.watermark < 1:
            raise MeshwiseError(f"watermark: expected a share from 0 to less than 1, found {self.watermark!r}")
        needed = self.max_batch * self.tokens_each
        if self.policy == "chunked" and self.max_step_tokens <= needed:
            raise MeshwiseError(
                f"max step tokens: {self.max_batch} requests that decode need {needed} tokens of a step, found "
                f"{self.max_step_tokens}, which leaves none for prompts; give at least {needed + 1}, or a smaller max "
                "batch"
            )

    @property
    def tokens_each(self) -> int:
        """Tokens of a step for each request that decodes: one, and its draft."""
        return 1 if self.speculation is None else 1 + self.speculation.draft_tokens


#: Routing -> which replica a request goes to.
ROUTINGS = {
    "round-robin": "each replica in turn",
    "least-loaded": "the one with the fewest requests that are not done",
    "affinity": "the one that has most of its prefix in the cache, unless it has many more requests than others",
}


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """Replicas that only prefill, and send the cache to those that decode.

    Args:
        costs: of their steps; `transfer_bytes_per_s` is what one of them sends at.
        replicas: how many.
        scheduling: what their schedulers are told.
    """

    costs: EngineCosts
    replicas: int
    scheduling: Scheduling = field(default_factory=Scheduling)

    def __post_init__(self) -> None:
        """Check that there are some, and that they can send."""
        _check_replicas("prefill replicas", self.replicas)
        self.costs.transfer_seconds(1)


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """The number of replicas follows the number of requests that are not done.

    Every `interval_s` there are to be as many replicas as make `requests_per_replica` of them, rounded up. New ones
    take their time to begin; those to go finish what they have.

    Args:
        requests_per_replica: the target.
        least, most: replicas.
        interval_s: seconds between decisions.
        startup_s: seconds until a new replica takes requests.
    """

    requests_per_replica: float
    least: int = 1
    most: int = 64
    interval_s: float = 10.0
    startup_s: float = 60.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_replicas("autoscaling: least replicas", self.least)
        if self.most < self.least:
            raise MeshwiseError(f"autoscaling: expected at least {self.least} replicas at most, found {self.most}")
        if self.requests_per_replica <= 0 or self.interval_s <= 0 or self.startup_s < 0:
            raise MeshwiseError(
                "autoscaling: expected requests_per_replica and interval_s above 0 and startup_s of 0 or more, found "
                f"{self.requests_per_replica!r}, {self.interval_s!r} and {self.startup_s!r}"
            )


@dataclass(frozen=True, slots=True)
class ServingSystem:
    """What serves.

    Args:
        costs: of a step of a replica.
        replicas: how many; with autoscaling, at first.
        scheduling: what their schedulers are told.
        routing: one of `ROUTINGS`.
        prefill: replicas that prefill for them; None: they prefill themselves.
        autoscaling: what changes the number of replicas.
    """

    costs: EngineCosts
    replicas: int = 1
    scheduling: Scheduling = field(default_factory=Scheduling)
    routing: str = "round-robin"
    prefill: PrefillPool | None = None
    autoscaling: Autoscaling | None = None

    def __post_init__(self) -> None:
        """Check that the parts go together."""
        _check_replicas("replicas", self.replicas)
        if self.routing not in ROUTINGS:
            raise UnknownNameError("routing", self.routing, ROUTINGS, list_all=True)
        if self.scheduling.preemption == "swap":
            self.costs.swap_seconds(1)
        scaling = self.autoscaling
        if scaling is not None and not scaling.least <= self.replicas <= scaling.most:
            raise MeshwiseError(
                f"replicas: expected {scaling.least} to {scaling.most}, as autoscaling says, found {self.replicas}"
            )
        speculation = None if self.prefill is None else self.prefill.scheduling.speculation
        if speculation is not None:
            raise MeshwiseError("prefill replicas decode nothing: leave their speculation out")

    @property
    def independent(self) -> bool:
        """Whether what a replica does depends on its own requests alone, and which those are on nobody's state."""
        return self.routing == "round-robin" and self.prefill is None and self.autoscaling is None

    @property
    def num_chips(self) -> int:
        """Chips of all replicas; with autoscaling, at first."""
        others = 0 if self.prefill is None else self.prefill.replicas * self.prefill.costs.num_chips
        return self.replicas * self.costs.num_chips + others


def _check_replicas(what: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise MeshwiseError(f"{what}: expected a whole number, at least 1, found {count!r}")
