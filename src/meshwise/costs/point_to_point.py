"""One chip sends to another: how far apart they are on a torus, how long it takes. Not here: groups (`collectives`)."""

from __future__ import annotations

from collections.abc import Sequence

from meshwise.core.errors import MeshwiseError
from meshwise.costs.rules import positive_arguments


def torus_hops(shape: Sequence[int], wraps: Sequence[bool], source: Sequence[int], target: Sequence[int]) -> int:
    """Links on the shortest way between two chips of a torus: per axis the distance, the other way round if it wraps.

    Source: book, TPUs, "networking", question 5.

    >>> torus_hops((4, 4), (False, False), (0, 0), (3, 3)), torus_hops((16, 16), (True, True), (0, 0), (12, 3))
    (6, 7)

    Raises:
        MeshwiseError: coordinates that are not on the torus.
    """
    if not len(shape) == len(wraps) == len(source) == len(target):
        raise MeshwiseError(f"torus_hops: expected {len(shape)} coordinates each, found {source} and {target}")
    for chip in (source, target):
        if not all(0 <= at < size for at, size in zip(chip, shape, strict=True)):
            raise MeshwiseError(f"torus_hops: chip {tuple(chip)} is not on a torus of {'x'.join(map(str, shape))}")
    hops = 0
    for size, ring, start, end in zip(shape, wraps, source, target, strict=True):
        distance = abs(start - end)
        hops += min(distance, size - distance) if ring else distance
    return hops


@positive_arguments
def send_time(
    num_bytes: float,
    link_bandwidth_one_way: float,
    *,
    num_links: float = 1,
    hops: float = 1,
    hop_latency: float = 1e-6,
) -> float:
    """Seconds until one chip has the bytes of another: hops x latency, and the bytes through the links between them.

    On a torus the bytes are split over as many ways as the chips have links towards each other (two in the corner of a
    2D mesh). Source: book, TPUs, question 5.

    >>> round(1e6 * send_time(2 * 8 * 128 * 8192, 4.5e10, num_links=2, hops=6))  # across a TPU v5e 4x4
    192
    """
    return hops * hop_latency + num_bytes / (num_links * link_bandwidth_one_way)
