"""The devices that a plan is executed on, as many as it has chips. Not here: how they are arranged (`compiler`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshwise.core.errors import ClusterError
from meshwise.hardware import Chip, load_chip
from meshwise.hardware.device_kinds import chip_of_device
from meshwise.runtime.devices import find_devices, share_of_machine
from meshwise.runtime.processes import Processes, join
from meshwise.search import Plan


def plan_devices(
    plan: Plan, cpu_devices: int | None, told: Callable[[str], None], processes: Processes | None = None
) -> list[Any]:
    """Find as many devices as the plan has chips.

    Args:
        plan: to be executed.
        cpu_devices: so many fake devices of the CPU in each process, or None.
        told: hears what is to be known of the devices.
        processes: to be joined first; their devices count.

    Raises:
        ClusterError: there are others.
    """
    needed = plan.layout.num_chips
    words = f"the plan runs on {needed:,} devices (layout {plan.layout})"
    number = 1 if processes is None else processes.number
    if cpu_devices is not None and number is not None and cpu_devices * number != needed:
        among = "" if number == 1 else f" in all {number} processes together"
        raise ClusterError(f"--cpu-devices {cpu_devices}: {words}; ask for as many{among}")
    if processes is not None:
        join(processes)
    found = find_devices(cpu_devices, told)
    kind, on_cpu = found[0].device_kind, found[0].platform == "cpu"
    if len(found) < needed and on_cpu:
        raise ClusterError(
            f"{words}, found {len(found):,} x {kind}; --cpu-devices {needed} makes as many fake ones of the CPU"
        )
    if on_cpu and processes is None:  # fake ones: any of them
        return found[:needed]
    chip = _chip(found[0])
    if chip is not None and chip.devices_per_chip > 1:
        raise ClusterError(
            f"a plan counts chips, and JAX finds {chip.devices_per_chip} devices in each {chip.title}: "
            "not yet executed there"
        )
    if len(found) != needed:
        raise ClusterError(
            f"{words}, found {len(found):,} x {kind}; plan for the devices that are there, "
            f"such as --on {'CHIP' if chip is None else chip.name}:{len(found)}"
        )
    return found


def chip_of(plan: Plan, devices: Sequence[Any]) -> Chip | None:
    """Find what each device is: a chip of the catalog, or the share of this machine that the plan is for; else None."""
    planned = plan.problem.cluster.chip
    if devices[0].platform == "cpu" and planned.vendor == "cpu" and planned.title == share_of_machine(len(devices)):
        return planned
    return _chip(devices[0])


def _chip(device: Any) -> Chip | None:
    name = chip_of_device(str(device.device_kind))
    return None if name is None else load_chip(name)
