"""The constants of a question as the catalog has them, in place of those that the book printed.

The book uses several values for one chip; the catalog follows the vendors. Not here: the catalog (`hardware`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.errors import UnknownNameError
from meshwise.hardware import Chip, SliceRules, load_chip, networks

#: Names that the book has and the catalog has not.
_BOOK_NAMES: Mapping[str, str] = {"tpu-v4p": "v4"}


def _dcn(chip: Chip) -> float | None:
    rules = networks().get(chip.network)
    return rules.dcn_bandwidth_per_chip_one_way if isinstance(rules, SliceRules) else None


def _peak(dtype: DType) -> Callable[[Chip], float | None]:
    return lambda chip: chip.flops_per_s.get(dtype)


#: A question's constant -> a chip's number in the catalog, None where it lists none.
_LISTED: Mapping[str, Callable[[Chip], float | None]] = {
    "C_bf16": _peak(DType.BF16),
    "C_int8": _peak(DType.INT8),
    "C_fp8": _peak(DType.FP8),
    "HBM": lambda chip: chip.hbm_capacity,
    "W_hbm": lambda chip: chip.hbm_bandwidth,
    "W_pcie": lambda chip: chip.host_link_bandwidth,
    "W_ici_uni": lambda chip: chip.link_bandwidth_one_way,
    "W_ici_bidi": lambda chip: chip.link_bandwidth_one_way and 2 * chip.link_bandwidth_one_way,
    "W_gpu": lambda chip: chip.link_bandwidth_one_way,
    "W_dcn": _dcn,
}


def catalog_constants(constants: Mapping[str, Any]) -> Mapping[str, float]:
    """Those of a question's constants that the catalog lists, by its numbers.

    >>> catalog_constants({"chip": "TPU v5e", "C_bf16": 1.97e14, "W_hbm": 8.2e11})
    {'C_bf16': 197000000000000.0, 'W_hbm': 819000000000.0}
    """
    name = str(constants.get("chip", "")).lower().replace(" ", "-")
    try:
        chip = load_chip(_BOOK_NAMES.get(name, name))
    except UnknownNameError:
        return {}
    found = {key: find(chip) for key, find in _LISTED.items() if key in constants}
    return {key: value for key, value in found.items() if value}
