"""What share of its data sheet a chip achieves: the few constants that turn a bound into an expectation.

The identity leaves bounds as they are. Each constant carries the measurements it came from.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["IDENTITY", "Calibration"]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Achieved shares of a chip's rates.

    Args:
        name: what users type.
        matmul_efficiency: of the dense FLOP/s, for large matmuls.
        hbm_efficiency: of the HBM bandwidth, for streaming.
        link_efficiency: of the link bandwidth, for large messages.
        collective_matmul: whether collectives over the tensor axis run as collective matmuls, hidden behind the matmul that
            needs them as far as that lasts. XLA does so on TPUs (Wang et al. 2023, "Overlap communication with dependent
            computation via decomposition"); NCCL calls on GPUs stand on the critical path.
        source: the measurements behind the numbers.
    """

    name: str
    matmul_efficiency: float
    hbm_efficiency: float
    link_efficiency: float
    collective_matmul: bool
    source: str


#: Every rate of the data sheet achieved.
IDENTITY = Calibration("none", 1.0, 1.0, 1.0, False, "data-sheet rates, nothing measured")
