"""Which chip of the catalog a trace's device is, by the name that the driver or the runtime gives it.

Not here: what the chip can do (`hardware`).
"""

from __future__ import annotations

import re

from meshwise.hardware import Chip, load_chip

#: What a device's name has -> the chip; the first that matches.
_NAMES = (
    (r"tpu ?v6 ?lite|tpu ?v6e", "v6e"), (r"tpu ?v5 ?lite|tpu ?v5e", "v5e"), (r"tpu ?7x|tpu ?v7", "tpu7x"),
    (r"tpu ?v5p?\b", "v5p"), (r"tpu ?v4", "v4"), (r"tpu ?v3", "v3"), (r"tpu ?v2", "v2"),
    (r"gb300", "gb300-nvl72"), (r"gb200", "gb200-nvl72"), (r"b300", "b300-sxm"), (r"b200", "b200-sxm"),
    (r"gh200", "gh200"), (r"h200", "h200-sxm"), (r"h800", "h800-sxm"), (r"h20\b", "h20-sxm"),
    (r"h100.*nvl", "h100-nvl"), (r"h100.*pcie", "h100-pcie"), (r"h100", "h100-sxm"),
    (r"a100.*pcie.*80", "a100-pcie-80gb"), (r"a100.*pcie", "a100-pcie-40gb"), (r"a100.*80", "a100-sxm-80gb"),
    (r"a100", "a100-sxm-40gb"), (r"v100", "v100-sxm"), (r"l40s", "l40s"), (r"\bl4\b", "l4"), (r"a10g", "a10g"),
    (r"a6000", "rtx-a6000"), (r"5090", "rtx-5090"), (r"4090", "rtx-4090"), (r"3090", "rtx-3090"),
    (r"rtx pro 6000", "rtx-pro-6000"),
    (r"mi355", "mi355x"), (r"mi325", "mi325x"), (r"mi300x", "mi300x"), (r"mi250", "mi250x"),
)  # fmt: skip


def chip_name(device: str) -> str | None:
    """The catalog's name of a device, None if it has none.

    >>> chip_name("NVIDIA H100 80GB HBM3"), chip_name("TPU v6 Lite"), chip_name("AMD Instinct MI300X VF")
    ('h100-sxm', 'v6e', 'mi300x')
    >>> chip_name("NVIDIA A100-SXM4-80GB"), chip_name("TPU v5"), chip_name("CPU")
    ('a100-sxm-80gb', 'v5p', None)
    """
    return next((name for pattern, name in _NAMES if re.search(pattern, device.lower())), None)


def chip_of(device: str) -> Chip | None:
    """The chip of the catalog, None if it has none of this name."""
    name = chip_name(device)
    return None if name is None else load_chip(name)
