"""What devices call themselves in JAX -> the chip of our catalog. Not here: the catalog."""

from __future__ import annotations

import re

#: A pattern of `Device.device_kind`, whole, and the chip. NVIDIA's names are those that its driver gives.
_KINDS = (
    (r"TPU v2", "v2"),
    (r"TPU v3", "v3"),
    (r"TPU v4", "v4"),
    (r"TPU v5 ?(lite|e)", "v5e"),
    (r"TPU v5p?", "v5p"),
    (r"TPU v6 ?(lite|e)", "v6e"),
    (r"TPU ?(7x|v7x)", "tpu7x"),
    (r"(NVIDIA )?A100-SXM4-40GB", "a100-sxm-40gb"),
    (r"(NVIDIA )?A100-SXM4-80GB", "a100-sxm-80gb"),
    (r"(NVIDIA )?A100-PCIE-40GB", "a100-pcie-40gb"),
    (r"(NVIDIA )?A100 80GB PCIe", "a100-pcie-80gb"),
    (r"(NVIDIA )?H100 80GB HBM3", "h100-sxm"),
    (r"(NVIDIA )?H100 PCIe", "h100-pcie"),
    (r"(NVIDIA )?H100 NVL", "h100-nvl"),
    (r"(NVIDIA )?H200", "h200-sxm"),
    (r"(NVIDIA )?H800", "h800-sxm"),
    (r"(NVIDIA )?H20", "h20-sxm"),
    (r"(NVIDIA )?B200", "b200-sxm"),
    (r"(NVIDIA )?B300", "b300-sxm"),
    (r"(NVIDIA )?GB200", "gb200-nvl72"),
    (r"(NVIDIA )?GB300", "gb300-nvl72"),
    (r"(NVIDIA )?L40S", "l40s"),
    (r"(Tesla )?V100-SXM2-.*", "v100-sxm"),
)


def chip_of_device(kind: str) -> str | None:
    """Find the chip by what its devices call themselves; None where the catalog has no such one.

    >>> chip_of_device("TPU v5 lite"), chip_of_device("NVIDIA H100 80GB HBM3"), chip_of_device("cpu")
    ('v5e', 'h100-sxm', None)
    """
    return next((chip for pattern, chip in _KINDS if re.fullmatch(pattern, kind, re.IGNORECASE)), None)
