"""How many times as long a matmul takes by its shape: padded tiles, waves that are not full, products of few rows.

Not here: rates of large matmuls (`calibration`), or seconds of operations (`compute`).
"""

from __future__ import annotations

import math

from meshwise.costs.arithmetic import Num, ceil, interpolated, log2, maximum, minimum
from meshwise.costs.calibration import FEW_ROWS_SIDES, Calibration
from meshwise.costs.extents import Extents, Volume

#: Binary logarithms of the few weights and the many of `Calibration.few_rows`.
_FEW, _MANY = (2 * math.log2(side) for side in FEW_ROWS_SIDES)

#: Rows and columns of a small tile of kernels of matmuls; a large one has twice as many of either. Compute units fill
#: small ones at this share of the rate of large ones.
_TILE, _SMALL = 128, 0.97

#: How many times as long as with all compute units busy a matmul takes at most: others have smaller tiles, or sums in
#: pieces.
_MOST = 2.0


def padded(tiles: tuple[Volume, Volume, Volume], extents: Extents, units: tuple[int, int, int]) -> Num:
    """Padded over real FLOPs when rows, depth and columns of the local matmul are rounded up to whole tiles."""
    rows, depth, columns = map(extents.tiled, tiles, units)
    return rows * depth * columns


def filling(tiles: tuple[Volume, Volume, Volume], flops: Num, extents: Extents, calibration: Calibration) -> Num:
    """How many times as long a matmul takes as a large one of as many FLOPs: pipelines that fill, waves partly idle."""
    rows, depth, columns = (extents.volume(t) for t in tiles)
    longer = 1 + calibration.half_depth / depth
    units = calibration.compute_units
    return longer * in_waves(rows, depth, columns, flops, units) if units else longer


def in_waves(rows: Num, depth: Num, columns: Num, flops: Num, units: float) -> Num:
    """How many times as long a matmul takes because its last wave of tiles leaves compute units idle.

    Each compute unit makes a tile of the product at a time. Kernels have tiles of 256 x 128 (either way) or 128 x 128;
    the faster are taken. Products of a batch share waves.

    >>> in_waves(4096, 1024, 3456, 2 * 4096 * 1024 * 3456, 108)  # four full waves of large tiles
    1.0
    >>> round(in_waves(4096, 1024, 3584, 2 * 4096 * 1024 * 3584, 108), 2)  # a ninth wave of small tiles, not a fifth
    1.12

    Args:
        rows, depth, columns: of one product.
        flops: of all products.
        units: compute units of the chip.

    Source: NVIDIA, "Matrix multiplication background", wave quantization. Shares: bf16 matmuls of 512 rows and more of
        NVIDIA's AIConfigurator database.
    """
    high, wide = ceil(rows / _TILE), ceil(columns / _TILE)
    outputs = maximum(flops, 1.0) / (2 * depth)
    products = outputs / (rows * columns)
    large = ceil(products * minimum(ceil(high / 2) * wide, high * ceil(wide / 2)) / units)
    small = ceil(products * high * wide / units)
    return minimum(minimum(2 * large, small / _SMALL) * (units * _TILE**2) / outputs, _MOST)


def few_rows(curve: tuple[tuple[int, float, float], ...], rows: Num, depth: Num, columns: Num) -> Num:
    """How many times as long a FLOP takes in a product of so many rows and weights as in a large one."""
    few, many = (
        interpolated(log2(maximum(rows, 1.0)), [(math.log2(point[0]), point[size]) for point in curve])
        for size in (1, 2)
    )
    more = maximum(minimum((log2(depth * columns) - _FEW) / (_MANY - _FEW), 1.0), 0.0)
    return 1 / (few + more * (many - few))
