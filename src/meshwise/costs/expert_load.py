"""How unevenly a mixture's tokens fall on the devices that share its experts: the busiest sets the pace.

Not here: where tokens travel (`network`, `traffic`).
"""

from __future__ import annotations

import math

from meshwise.costs.arithmetic import Num, log2, where
from meshwise.jobs import ServingLoad, TrainingJob


def expert_load(job: TrainingJob | ServingLoad, slots: Num, devices: Num, *, scatter: float = 1.0) -> Num:
    """Slots of the busiest device over the mean: what experts are padded to, or what routing makes of them.

    With balanced random routing a device's slots scatter about their mean n by sqrt(n). The largest of d devices lies
    m = `_largest_of(d)` such deviations above it, and m^2 / 6 slots more, because such counts are skewed upwards. A
    stated imbalance or capacity factor takes its place.

    >>> job = TrainingJob(batch_tokens=8192, seq_len=4096)
    >>> expert_load(job, 1024.0, 1.0), round(expert_load(job, 32768.0, 64.0), 4)
    (1.0, 1.013)

    Args:
        job: with `expert_imbalance` or `capacity_factor`, or neither.
        slots: mean number of slots of a device (floats or arrays).
        devices: that share the experts.
        scatter: variance of a device's slots over that of independent draws: (E - k) / (E - 1) where the k experts of a
            token differ.
    """
    if job.capacity_factor is not None:
        return job.capacity_factor
    if job.expert_imbalance is not None:
        return where(devices > 1, job.expert_imbalance, 1.0)
    deviations = _largest_of(devices) * scatter**0.5
    return 1 + deviations / slots**0.5 + deviations**2 / (6 * slots)


def _largest_of(devices: Num) -> Num:
    """Expected maximum of so many independent standard normal values (floats or arrays), within 1 % up to 1,024.

    The sums to which slots add up make the values dependent, but do not change it. Fitted to the exact maxima: 0.5642
    of 2, 1.4236 of 8, 2.3437 of 64; it tends to sqrt(2 ln d). Source of these: Harter 1961, Biometrika 48, table 1.
    """
    log = math.log(2) * log2(devices)
    return log * (2 * log / (log * log + 2.13 * log + 0.13)) ** 0.5
