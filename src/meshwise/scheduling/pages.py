"""Blocks of the cache that requests take as they grow, in closed form over any number of steps.

Not here: prefixes that requests share (`prefixes`), who gets blocks (`scheduler`).
"""

from __future__ import annotations


class Pages:
    """Requests that grow by one token a step: a new block when the last one is full.

    A request at offset o holds o + S - 1 tokens before decode step S, and needs a block for this step where that is a
    multiple of the block size. How many do in any step follows from how many offsets leave which remainder.

    Args:
        block_tokens: tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.remainders = [0] * block_tokens

    def held(self, tokens: int) -> int:
        """Blocks of a request with so many tokens."""
        return -(-tokens // self.block_tokens)

    def most_tokens(self, blocks: int) -> int:
        """Tokens of a request that so many blocks hold."""
        return blocks * self.block_tokens

    def join(self, offset: int) -> None:
        """Count a request in."""
        self.remainders[offset % self.block_tokens] += 1

    def leave(self, offset: int) -> None:
        """Count a request out."""
        self.remainders[offset % self.block_tokens] -= 1

    def next(self, count: int, step: int) -> int:  # noqa: ARG002  (as of `FluidPages`)
        """Blocks that `count` requests take in step number `step`."""
        return self.remainders[(1 - step) % self.block_tokens]

    def grown(self, count: int, step: int, steps: int) -> int:
        """Blocks that `count` requests take in `steps` steps from step number `step`."""
        cycles, rest = divmod(steps, self.block_tokens)
        blocks = cycles * count
        if rest:
            top = (1 - step) % self.block_tokens
            bottom = top - rest + 1
            if bottom >= 0:
                return blocks + sum(self.remainders[bottom : top + 1])
            return blocks + sum(self.remainders[: top + 1]) + sum(self.remainders[bottom:])
        return blocks

    def steps_within(self, count: int, step: int, blocks: int) -> int:
        """Steps from step number `step` for which so many blocks are enough."""
        cycles, left = divmod(blocks, count)
        steps = cycles * self.block_tokens
        while (needed := self.remainders[(1 - step - steps) % self.block_tokens]) <= left:
            left -= needed
            steps += 1
        return steps


class FluidPages:
    """Requests that grow by a mean number of tokens a step, which need not be whole.

    Each is taken to hold one block that is partly full beside its full ones.

    Args:
        block_tokens: tokens of a block.
        growth: tokens a step.
    """

    def __init__(self, block_tokens: int, growth: float) -> None:
        self.block_tokens = block_tokens
        self.growth = growth

    def held(self, tokens: float) -> float:
        """Blocks of a request with so many tokens."""
        return tokens / self.block_tokens + 1

    def most_tokens(self, blocks: int) -> int:
        """Tokens of a request that so many blocks hold."""
        return (blocks - 1) * self.block_tokens

    def join(self, offset: float) -> None:
        """Count a request in: nothing depends on where it stands."""

    def leave(self, offset: float) -> None:
        """Count a request out."""

    def next(self, count: int, step: int) -> float:
        """Blocks that `count` requests take in a step."""
        return self.grown(count, step, 1)

    def grown(self, count: int, step: int, steps: int) -> float:  # noqa: ARG002  (the same in every step)
        """Blocks that `count` requests take in `steps` steps."""
        return count * steps * self.growth / self.block_tokens

    def steps_within(self, count: int, step: int, blocks: float) -> int:  # noqa: ARG002
        """Steps for which so many blocks are enough."""
        return int(blocks * self.block_tokens / (count * self.growth))
