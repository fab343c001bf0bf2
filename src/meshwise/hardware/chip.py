"""One accelerator chip as its data sheet describes it: rates, memories, links, power, price, and their sources.

Not here: how many of them and how they are wired (`network`, `cluster`), and efficiencies (a calibration's job).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.errors import ClusterError, UnknownNameError
from meshwise.core.explanation import Answer
from meshwise.hardware.kernels import GROUPED_PRODUCTS
from meshwise.hardware.network import Level

# What a matmul unit does with operands that it has no rate for: it widens them. Only conversions that lose nothing.
_WIDER: dict[DType, tuple[DType, ...]] = {
    DType.FP8: (DType.BF16, DType.FP16),
    DType.FP4: (DType.FP8, DType.BF16, DType.FP16),
    DType.INT8: (DType.BF16, DType.FP16),
    DType.INT4: (DType.INT8, DType.FP8, DType.BF16, DType.FP16),
}

#: Fields of a chip that are above zero and finite.
_POSITIVE = (
    *("vector_flops_per_s", "hbm_capacity", "hbm_bandwidth", "link_bandwidth_one_way", "host_link_bandwidth"),
    *("chips_per_host", "power"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a number was read: a title, the date of the document or of reading it (YYYY-MM[-DD]), an address."""

    title: str
    date: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a chip and no data sheet says: how it serves with this runtime (`bench machine`).

    Args:
        few_rows: format -> (rows, FLOP/s with few weights, with many) of products of so many rows with weights that no
            cache holds; rows rise. How many is `costs.calibration.FEW_ROWS_SIDES`.
        attention: FLOP/s of attention of a prompt to a paged cache, causal pairs counted.
        cache_bandwidth: bytes/s at which steps that decode read a paged cache.
        cache_start: seconds that such a reading takes besides, in each layer.
        host_step, host_request: seconds that the engine adds to a step, and to it for each request that decodes.
        operation: seconds that an operation of a step takes to begin.
    """

    few_rows: Mapping[DType, tuple[tuple[int, float, float], ...]]
    attention: float
    cache_bandwidth: float
    cache_start: float
    host_step: float
    host_request: float
    operation: float


@dataclass(frozen=True, repr=False)
class Chip(Answer):
    """A *chip* is the package that is bought, placed and priced; a core is inside it; a device is what JAX sees.

    Rates are FLOP/s and bytes/s of one whole chip, dense (never the 2:4-sparse figure); capacities are bytes, latencies
    seconds, `power` watts. `hbm_reported` is what the device tells a program it has, where that is known: an "80 GB"
    GPU reports 85e9 bytes. `link_bandwidth_one_way` is one ICI link in one direction (there are `num_links`), or on
    GPUs all scale-up links of the GPU together (`num_links` = 1). `host_link_bandwidth` is the chip's share, one way;
    `host_memory` its share of the host's memory, None where no machine is known that decides it.
    `onchip_*` is VMEM or the last-level cache, None where nobody publishes it. `matmul_tile` is the (m, k, n)
    granularity of the matrix unit. `scale_up` are the levels that come with the board, innermost first (empty on
    TPUs); `network` names the default entry of the network catalog. `measured` is of chips that were described by
    measuring them. `sources` has a key per field, "*" for the rest.
    """

    name: str
    title: str
    vendor: str
    flops_per_s: Mapping[DType, float]
    vector_flops_per_s: float
    hbm_capacity: float
    hbm_bandwidth: float
    onchip_capacity: float | None
    onchip_bandwidth: float | None
    matmul_tile: tuple[int, int, int]
    link_bandwidth_one_way: float
    num_links: int
    hop_latency: float
    host_link_bandwidth: float
    chips_per_host: int
    cores_per_chip: int
    devices_per_chip: int
    power: float
    price_per_chip_hour: float | None
    price_source: Source | None
    sources: Mapping[str, Source]
    scale_up: tuple[Level, ...] = ()
    network: str = ""
    notes: tuple[str, ...] = field(default=())
    hbm_reported: float | None = None
    host_memory: float | None = None
    measured: Measured | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no chip can have."""
        positive = {name: getattr(self, name) for name in _POSITIVE}
        positive |= {f"flops_per_s.{dtype}": rate for dtype, rate in self.flops_per_s.items()}
        for name, value in positive.items():
            if not 0 < value < float("inf"):
                raise ClusterError(f"chip {self.name}: expected {name} above zero and finite, found {value}")
        if not self.flops_per_s:
            raise ClusterError(f"chip {self.name}: expected at least one rate in flops_per_s, found none")

    @property
    def hbm_usable(self) -> float:
        """Bytes against which a program's memory is checked: as the device reports them, else the data sheet's."""
        return self.hbm_reported or self.hbm_capacity

    @property
    def has_grouped_products(self) -> bool:
        """Whether our own programs multiply rows of experts by the matrices of these alone."""
        return self.vendor in GROUPED_PRODUCTS

    def __repr__(self) -> str:
        return f"<Chip: {self.title}>"

    def __hash__(self) -> int:
        return hash((self.name, self.hbm_capacity, self.hbm_bandwidth, self.price_per_chip_hour))

    def peak(self, dtype: DType) -> float:
        """FLOP/s of matmuls whose operands are `dtype`.

        A format that the chip has a rate for takes that rate. Narrow formats without one are widened first and take the
        rate of the format they are widened to (fp8 and int8 to bf16, else fp16; fp4 to fp8, int4 to int8, and so on).
        Nothing wide is ever narrowed: fp32 is never computed as tf32, bf16 never as fp16. So fp32, tf32, bf16 and fp16
        exist only where the chip has them.

        >>> from meshwise.hardware import load_chip
        >>> load_chip("v5p").peak(DType.FP8) == load_chip("v5p").peak(DType.BF16)
        True

        Raises:
            UnknownNameError: for a format that this chip cannot multiply; lists those that it can.
        """
        for candidate in (dtype, *_WIDER.get(dtype, ())):
            if candidate in self.flops_per_s:
                return self.flops_per_s[candidate]
        hint = (
            f"{self.title} has no {dtype.value} matrix unit, and meshwise does not narrow numbers by itself: "
            "choose a format that it has."
        )
        raise UnknownNameError(f"matmul dtype on {self.name}", dtype.value, [d.value for d in self.flops_per_s], hint)

    def source(self, field_name: str) -> Source:
        """Where the number in `field_name` comes from ("hbm_bandwidth", "flops_per_s.bf16")."""
        return self.sources.get(field_name) or self.sources.get(field_name.partition(".")[0]) or self.sources["*"]

    def replace(self, **changes: Any) -> Chip:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)
