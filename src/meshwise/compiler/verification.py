"""What comparing a plan with its compiled program found, as one value.

Not here: how it was found (`comparison`), and words (`report`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.compiler.lines import Line
from meshwise.compiler.memory import CompiledMemory, OutOfMemory
from meshwise.compiler.step_floor import StepFloor


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """The program that was compiled.

    Args:
        memory: of one device, None where it does not fit.
        seconds: that compiling took; cached, whether it was found compiled.
        schedules: how many were compiled, of which it is the fastest.
    """

    memory: CompiledMemory | None
    seconds: float
    cached: bool
    schedules: int = 1


@dataclass(frozen=True, slots=True)
class Verification:
    """A plan beside its compiled program.

    Args:
        target: what was compiled for.
        layers: of the model.
        program: that was compiled.
        lines: predicted beside compiled; empty where it does not fit.
        capacity: bytes of memory of one device.
        predicted_total: bytes that the estimate counts, its reserve left out.
        out_of_memory: what the compiler said of a program that does not fit, else None.
        versions: of the compiler's packages.
        unread: what of the program could not be counted, in words.
        floor: the least time of the program beside the plan's times; None where it does not fit.
        without_kernel: why attention is not a fused kernel, in words; empty where it is.
        slots: slots of experts in the program for each that tokens are routed to; 1 where there are as many.
    """

    target: str
    layers: int
    program: CompiledProgram
    lines: tuple[Line, ...]
    capacity: float
    predicted_total: float
    out_of_memory: OutOfMemory | None
    versions: Mapping[str, str]
    unread: tuple[str, ...] = ()
    without_kernel: tuple[str, ...] = ()
    floor: StepFloor | None = None
    slots: float = 1.0

    @property
    def peak(self) -> float | None:
        """Bytes that are alive at once; None where it did not fit."""
        return self._compiled("peak")

    @property
    def set_aside(self) -> float | None:
        """Bytes that the program asks for: where that is one piece, gaps too; None where it did not fit."""
        found = self._compiled("set aside")
        return self.peak if found is None else found

    def _compiled(self, name: str) -> float | None:
        return next((line.compiled for line in self.lines if line.name == name), None)

    @property
    def fits(self) -> bool:
        """Whether the compiled program fits in a device's memory."""
        return self.set_aside is not None and self.set_aside <= self.capacity

    def group(self, name: str) -> tuple[Line, ...]:
        """Lines of one group: "memory", "collectives", "flops" or "moved"."""
        return tuple(line for line in self.lines if line.group == name)

    @property
    def unexplained_share(self) -> float:
        """Bytes received that no reason explains, of all that the compiled program receives."""
        total = sum(line.compiled for line in self.group("collectives"))
        return sum(line.unexplained for line in self.group("collectives")) / total if total else 0.0
