"""What software achieves of a link's bandwidth, by size of message: the curve between a start-up time and a share.

Not here: what the links offer (`network`), and which chip's software achieves what (`calibration`).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.costs.arithmetic import Condition, Num, maximum, minimum


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds of a collective from the seconds of its hops and of its bytes at full bandwidth.

    Ideal links overlap hops and bytes: the longer decides. Real ones add them to a start-up, and pass the bytes by one
    of two protocols: one that reaches `efficiency` of the bandwidth and takes `bulk_startup` longer to begin, and for
    small messages one that begins at once but reaches less. Half of `efficiency` is reached at about `half_size` bytes.

    Args:
        efficiency: share of the bandwidth that large messages reach.
        startup: seconds before the first byte; counted where a group has more than one member.
        bulk_startup: seconds that the protocol for large messages takes besides.
        small_efficiency: share that the protocol for small messages reaches; None where there is but one.
        overlapped: whether hops and bytes overlap (and nothing else takes time).
    """

    efficiency: float
    startup: float = 0.0
    bulk_startup: float = 0.0
    small_efficiency: float | None = None
    overlapped: bool = False

    def __post_init__(self) -> None:
        """Check that the shares are shares."""
        for share in (self.efficiency, self.small_efficiency or self.efficiency):
            assert 0 < share <= 1, f"{share} is no share of a bandwidth"
        assert not (self.overlapped and (self.startup or self.bulk_startup or self.small_efficiency))

    def seconds(self, hops: Num, transfer: Num, busy: Num | Condition) -> Num:
        """Time of one collective.

        Args:
            hops: seconds of hops.
            transfer: seconds of the bytes at full bandwidth.
            busy: whether anything moves.
        """
        return self.seconds_after(self.start(hops, busy), transfer)

    def start(self, hops: Num, busy: Num | Condition) -> Num:
        """Seconds that a collective takes however small; arguments as in `seconds`."""
        return hops if self.overlapped else hops + self.startup * busy

    def seconds_after(self, start: Num, transfer: Num) -> Num:
        """The same as `seconds`, once `start` is known."""
        moving = transfer / self.efficiency
        if self.overlapped:
            return maximum(start, moving)
        if self.small_efficiency is not None:
            moving = minimum(transfer / self.small_efficiency, self.bulk_startup + moving)
        return start + moving

    def half_size(self, bandwidth: float) -> float:
        """Bytes that a chip sends at which it reaches half of what it reaches with large messages, hops aside.

        >>> round(Links(0.5, startup=1e-5).half_size(4e11))
        2000000
        """
        full = self.efficiency * bandwidth
        if self.small_efficiency is None:
            return full * self.startup
        small = self.small_efficiency * bandwidth
        by_small = self.startup / (2 / full - 1 / small) if small > full / 2 else float("inf")
        return min(by_small, full * (self.startup + self.bulk_startup))


#: Every link at its data-sheet rate, hops hidden behind bytes or bytes behind hops (book, Sharded matrices).
IDEAL_LINKS = Links(1.0, overlapped=True)
