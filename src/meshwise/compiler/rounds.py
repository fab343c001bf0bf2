"""What a pipelined program does beyond its plan, from the plan's own numbers: it runs rounds, all stages in step.

In a round every stage runs one piece, whether a microbatch is there or not, and has embedding and head of its own. Not
here: the program (`meshwise.runtime.pipeline`), and what was compiled (`hlo`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwise.costs.memory import Holding
from meshwise.sharding.layout import Layout

#: Classes of memory that are passed to the step.
_STATE = ("parameters", "master_copies", "optimizer")


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of a pipelined program.

    Args:
        schedule: "gpipe", "1f1b" or "interleaved".
        stages: of the pipeline; pieces: of the model that each stage holds.
        num_microbatches: of a step.

    >>> rounds = Rounds("1f1b", stages=4, pieces=1, num_microbatches=8)
    >>> rounds.number, rounds.beyond("layer", "recompute", 6.0)
    (14, {'idle rounds': 36.0})
    """

    schedule: str
    stages: int
    pieces: int
    num_microbatches: int

    @classmethod
    def of(cls, layout: Layout) -> Rounds | None:
        """Read them from a layout; None where there is one stage."""
        if layout.stage == 1:
            return None
        return cls(layout.schedule, layout.stage, layout.virtual_stages, layout.num_microbatches)

    @property
    def number(self) -> int:
        """Rounds of a step: a piece of every microbatch each, and those in which the pipeline fills and drains.

        A round of 1F1B runs forward and backward, so that the last stage's backward pass is waited for, too.
        """
        drained = 2 if self.schedule == "1f1b" else 1
        return self.num_microbatches * self.pieces + drained * (self.stages - 1)

    def beyond(self, role: str, when: str, planned: float) -> dict[str, float]:
        """Runs of a block that the program has and the plan does not, by reason.

        Args:
            role: of the block: "embed", "layer" or "head".
            when: "forward", "recompute" or "backward".
            planned: copies of the block on the stage that the plan counts.

        Returns: reason -> copies times runs in a step.
        """
        if role == "layer":
            runs = self.number / self.pieces
            more = {"idle rounds": planned * (runs - self.num_microbatches)}
            if when == "forward" and self.schedule == "1f1b":
                more["forward again"] = planned * runs
        else:
            every_round = role == "embed" or self.schedule == "1f1b"  # else the head follows once all rounds are over
            idle = self.number - self.num_microbatches if every_round else 0
            more = {"every stage": (1 - planned) * self.num_microbatches, "idle rounds": float(idle)}
        return {reason: runs for reason, runs in more.items() if runs}

    @staticmethod
    def stored(role: str, planned: float) -> dict[str, float]:
        """Copies of a block that a device stores, beyond those of the plan; arguments as in `beyond`."""
        return {} if role == "layer" or planned == 1 else {"every stage": 1 - planned}

    @property
    def sends(self) -> int:
        """Streams that the busiest stage receives from its neighbours in a step, both directions, by the plan."""
        ends = 1 if self.stages == 2 else 0  # no stage stands between the ends: each has one neighbour's less
        return (2 * self.pieces - ends) * self.num_microbatches

    def held(self, holdings: Iterable[Holding], stream: float) -> dict[str, float]:
        """Bytes within the step that the program holds and the plan does not, by reason.

        Args:
            holdings: of the plan's fullest stage, those of blocks that it lacks among them.
            stream: bytes of one microbatch's stream between stages on one device.
        """
        own = list(holdings)
        planned = sum(float(h.copies * h.num_bytes) for h in own if h.name == "activations" and h.block.role == "layer")
        one = planned / _in_flight(own)
        more: dict[str, float] = {
            "every stage": _ends(own, ("gradients",)),
            "one head": _at_work(own),
        }
        if self.schedule == "1f1b":  # inputs of the microbatches in flight, and all of the one at work
            more["inputs held"] = one - planned + (2 * self.stages - 1) * stream
        else:  # every round's, and what the last stage made, until the head has read it
            more["rounds held"] = one * self.number / self.pieces - planned + self.number * stream
        return {reason: float(amount) for reason, amount in more.items() if amount}

    @staticmethod
    def state(holdings: Iterable[Holding]) -> float:
        """Bytes of weights and optimizer of embedding and head that the plan has on other stages."""
        return _ends(holdings, _STATE)


def _in_flight(holdings: Iterable[Holding]) -> float:
    """Microbatches whose activations the plan holds: copies of a layer's activations over copies of its weights."""
    layers = [h for h in holdings if h.block.role == "layer" and h.copies]
    held = next(h for h in layers if h.name == "activations")
    stored = next(h for h in layers if h.name == "parameters" and h.block.name == held.block.name)
    return float(held.copies / stored.copies)


#: Classes of which a stage holds those of the block at work.
_MOMENT = ("logits_and_loss", "workspace", "gathered_weights", "communication_buffers")


def _at_work(holdings: Iterable[Holding]) -> float:
    """What the block holds at work that needs most where all blocks are, less what is planned, waiting logits too."""
    blocks: dict[str, dict[str, float]] = {}
    planned = 0.0
    for h in holdings:
        if h.name in _MOMENT:
            blocks.setdefault(h.block.name, {})[h.name] = float(h.num_bytes)
            planned += float(h.copies * h.num_bytes)
    return max((sum(one.values()) for one in blocks.values()), default=0.0) - planned


def _ends(holdings: Iterable[Holding], names: tuple[str, ...]) -> float:
    """What embedding and head hold where both are, less what is planned; a tied table counts once."""
    ends = [h for h in holdings if h.name in names and h.block.role != "layer"]
    whole: dict[tuple[str, str], float] = {}
    for h in ends:  # the first is the block's own, another is of what it shares
        whole.setdefault((h.name, h.block.name), float(h.num_bytes))
    return sum(whole.values()) - sum(float(h.copies * h.num_bytes) for h in ends)
