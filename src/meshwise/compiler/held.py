"""What stages of a pipelined program hold and their plan does not count, in bytes.

Read from the holdings of the plan's fullest stage. Not here: what the program moves and computes (`expected`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwise.costs.memory import Holding
from meshwise.costs.schedules import Rounds


def held_beyond(rounds: Rounds, holdings: Iterable[Holding], stream: float, dealt: int) -> dict[str, float]:
    """Bytes within the step that the program holds and the plan does not, by reason.

    Args:
        rounds: of the program.
        holdings: of the plan's fullest stage, those of blocks that it lacks among them.
        stream: bytes of one microbatch's stream between stages on one device.
        dealt: as of `runs_beyond`.
    """
    own = list(holdings)
    planned = sum(float(h.copies * h.num_bytes) for h in own if h.name == "activations" and h.block.role == "layer")
    one = planned / _in_flight(own)
    more: dict[str, float] = {
        "every stage": ends_beyond(own, ("gradients",)),
        "dealt": rounds.num_microbatches * stream / dealt,
        "one head": _at_work(own, dealt),
        "in flight": one * sum(rounds.kept) / rounds.pieces - planned,
    }
    if rounds.schedule == "gpipe":  # what the last stage made, until the head has read it
        more["in flight"] += rounds.forward * stream
    return {reason: float(amount) for reason, amount in more.items() if amount}


def _in_flight(holdings: Iterable[Holding]) -> float:
    """Microbatches whose activations the plan holds: copies of a layer's activations over copies of its weights."""
    layers = [h for h in holdings if h.block.role == "layer" and h.copies]
    held = next(h for h in layers if h.name == "activations")
    stored = next(h for h in layers if h.name == "parameters" and h.block.name == held.block.name)
    return float(held.copies / stored.copies)


#: Classes of which a stage holds those of the block at work.
_MOMENT = ("logits_and_loss", "workspace", "gathered_weights", "communication_buffers")


def _at_work(holdings: Iterable[Holding], dealt: int) -> float:
    """What the block holds at work that needs most where all blocks are, less what is planned, waiting logits too."""
    blocks: dict[str, dict[str, float]] = {}
    planned = 0.0
    for h in holdings:
        if h.name in _MOMENT:
            blocks.setdefault(h.block.name, {})[h.name] = float(h.num_bytes) / (
                dealt if h.name == "logits_and_loss" else 1
            )
            planned += float(h.copies * h.num_bytes)
    return max((sum(one.values()) for one in blocks.values()), default=0.0) - planned


def ends_beyond(
    holdings: Iterable[Holding], names: tuple[str, ...], shares: Mapping[str, float] | None = None
) -> float:
    """What embedding and head hold where these shares of each are, less what is planned; a tied table counts once."""
    ends = [h for h in holdings if h.name in names and h.block.role != "layer"]
    whole: dict[tuple[str, str], float] = {}
    for h in ends:  # the first is the block's own, another is of what it shares
        whole.setdefault((h.name, h.block.name), float(h.num_bytes))
    stored = sum((shares or {}).get(block, 1.0) * num_bytes for (_, block), num_bytes in whole.items())
    return stored - sum(float(h.copies * h.num_bytes) for h in ends)
