"""Settings of an engine's scheduler: policies, limits, preemption, drafts.

Values only; `scheduler` acts on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwise.core.errors import MeshwiseError, UnknownNameError

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
        ranks: groups of chips that attend to different requests, each with an equal part of cache and batch
            (data-parallel attention); all take part in every step.
    """

    policy: str = "prefill-first"
    max_batch: int = 256
    max_step_tokens: int = 2048
    preemption: str = "recompute"
    watermark: float = 0.01
    prefix_cache: bool = False
    speculation: Speculation | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        """Check names and limits."""
        if self.policy not in POLICIES:
            raise UnknownNameError("policy", self.policy, POLICIES, list_all=True)
        if self.preemption not in PREEMPTIONS:
            raise UnknownNameError("preemption", self.preemption, PREEMPTIONS, list_all=True)
        if self.max_batch < 1 or self.max_step_tokens < 1 or self.ranks < 1:
            raise MeshwiseError("max batch, max step tokens and ranks: expected at least 1")
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
    def rank_batch(self) -> int:
        """Requests that a rank works on at once."""
        return -(-self.max_batch // self.ranks)

    @property
    def tokens_each(self) -> int:
        """Tokens of a step for each request that decodes: one, and its draft."""
        return 1 if self.speculation is None else 1 + self.speculation.draft_tokens
