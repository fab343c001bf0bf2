"""Kernels that our own runtime has for a vendor's chips: what they take, so that plans know it without JAX.

Not here: the kernels (`runtime.kernels`), or what they cost (`costs.own_program`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: Vendors for whose chips programs multiply rows of experts by the matrices of these alone, as many as there are.
GROUPED_PRODUCTS = ("google", "nvidia")


class AttentionKernel(NamedTuple):
    """A fused kernel of attention.

    Args:
        sizes: rows of a block, the most first; the last divides how many queries and keys it takes.
        widest: heads that fit on the chip, None where all do.
        chunks: whether it attends within chunks.
    """

    sizes: tuple[int, ...]
    widest: int | None
    chunks: bool

    @property
    def least(self) -> int:
        """Queries and keys are multiples of it."""
        return self.sizes[-1]

    def refusal(self, queries: int, keys: int, width: int, *, chunked: bool) -> str:
        """Say why it cannot attend, "" where it can.

        >>> ATTENTION["nvidia"].refusal(1000, 1000, 128, chunked=False)
        '1000 queries and 1000 keys are not multiples of 32'

        Args:
            queries, keys: of a run of positions.
            width: of a head.
            chunked: whether within chunks.
        """
        if chunked and not self.chunks:
            return "attention within chunks is not written for TPUs"
        if queries % self.least or keys % self.least:
            return f"{queries} queries and {keys} keys are not multiples of {self.least}"
        if self.widest is not None and width > self.widest:
            return f"heads of {width} do not fit on the chip"
        return ""


_PALLAS = AttentionKernel(sizes=(128, 64, 32), widest=256, chunks=True)

#: Vendor of a chip -> its kernel. On TPUs none is below a tile's 128 lanes.
ATTENTION: Mapping[str, AttentionKernel] = {
    "google": AttentionKernel(sizes=(512, 256, 128), widest=None, chunks=False),
    "nvidia": _PALLAS,
    "amd": _PALLAS,
}
