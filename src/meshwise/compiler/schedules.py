"""The fastest of a program's schedules, by its own least time: XLA's own, or with seconds that it is told.

XLA's scheduler for GPUs knows neither how long ragged AllToAlls take nor kernels: where rows are exchanged it takes all
collectives for equally long. A profile says it (`fdo_profile`), of times that are computed, not measured: a program is
compiled, read, and compiled again. Not here: which options go with it (`runtime.overlap`), least times (`floor`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from meshwise.compiler.floor import Floor, Rates
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.reader import Module, read_module
from meshwise.compiler.memory import CompiledMemory

#: Options of one compilation, by name.
Options = Mapping[str, bool | int | bytes]


class Program(Protocol):
    """A compiled program."""

    @property
    def module(self) -> Module:
        """As it is scheduled."""

    @property
    def memory(self) -> CompiledMemory | None:
        """Of one device, None where it does not fit."""


P = TypeVar("P", bound=Program)

#: Collectives in flight together are taken for as fast as each alone, but share the wires: they are said to take three
#: times as long (docs/verify.md has what 1, 2, 3 and 5 give).
_SHARED = 3.0

#: A program that needs at most so much more than its longest part has nothing left to hide.
_NEAR = 1.05


@dataclass(frozen=True)
class Executable:
    """A program that JAX compiled for the devices that are here."""

    loaded: Any

    @cached_property
    def module(self) -> Module:
        """As it is scheduled."""
        return read_module(self.loaded.as_text())

    @property
    def memory(self) -> CompiledMemory:
        """Of one device."""
        return CompiledMemory.of(self.loaded.memory_analysis())


def fastest(compiled: Callable[[Options], P], own: Options, told: Options, mesh: DeviceMesh, rates: Rates) -> P:
    """Compile a program, and again by the seconds that it is computed to take; keep what takes least at the least.

    Where wires are busy for longer than anything else there is nothing to win: XLA does not see that they are.

    Args:
        compiled: compiles with these options.
        own: options without such seconds; told: with them, none where they are of no use.
        mesh, rates: that it is compiled for; where the chip is not known, nothing is compared.

    Returns: the program; with other options than its own it needs no more memory than so, or than the chip has.
    """
    first = compiled(own)
    if not told or first.memory is None or rates.chip is None:
        return first
    floor = Floor(first.module, mesh, rates)
    longest, busiest = max(floor.compute, floor.memory), max(floor.network.values(), default=0.0)
    if busiest >= longest or floor.seconds <= _NEAR * longest:
        return first
    draft = compiled(told)
    if draft.memory is None:
        return first
    last = compiled({**told, "fdo_profile": profile_of(Floor(draft.module, mesh, rates))})
    room = max(first.memory.total, rates.chip.hbm_usable)
    others = (one for one in (draft, last) if one.memory is not None and one.memory.total <= room)
    return min((first, *others), key=lambda one: Floor(one.module, mesh, rates).seconds)


def profile_of(floor: Floor) -> bytes:
    """How long each instruction of a program takes, in microseconds, as XLA reads it (`ProfiledInstructionsProto`)."""
    known = floor.durations(_SHARED).items()
    return "\n".join(f'costs {{ name: "{name}" cost_us: {1e6 * seconds:.6f} }}' for name, seconds in known).encode()
