"""How unevenly a mixture's tokens fall on the devices that share its experts: the busiest sets the pace.

Not here: where tokens travel (`network`, `traffic`).
"""

from __future__ import annotations

import math
from typing import Any

from meshwise.costs.arithmetic import log2, where
from meshwise.jobs import TrainingJob

__all__ = ["expert_load"]


def expert_load(job: TrainingJob, slots: Any, devices: Any) -> Any:
    """Slots of the busiest device over the mean: what experts are padded to, or what routing makes of them.

    With balanced random routing a device's slots scatter about their mean n by sqrt(n); the largest of d devices lies
    about sqrt(2 ln d) such deviations above it. A stated imbalance or capacity factor takes its place.

    >>> job = TrainingJob(batch_tokens=8192, seq_len=4096)
    >>> expert_load(job, 1024.0, 1.0), round(expert_load(job, 32768.0, 64.0), 4)
    (1.0, 1.0159)

    Args:
        job: with `expert_imbalance` or `capacity_factor`, or neither.
        slots: mean number of slots of a device (floats or arrays).
        devices: that share the experts.
    """
    if job.capacity_factor is not None:
        return job.capacity_factor
    if job.expert_imbalance is not None:
        return where(devices > 1, job.expert_imbalance, 1.0)
    return 1 + (2 * math.log(2) * log2(devices) / slots) ** 0.5
