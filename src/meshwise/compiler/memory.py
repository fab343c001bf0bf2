"""The memory that a compiled program needs on one device, by class; and what the compiler says when it does not fit.

Not here: what a plan expected (`comparison`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class CompiledMemory:
    """Bytes on one device.

    Args:
        arguments: what is passed in: the training state, and the batch; tiles padded.
        outputs: what is passed out; `aliased` of it lies where arguments lay.
        temporaries: everything between, reused as it becomes free.
        aliased: outputs that take the place of arguments.
        code: the program itself.
        peak: the most that is alive at once, as the compiler's own simulation says, arguments in the host's memory with
            it; 0 where it says nothing.
        host_arguments, host_temporaries: in the host's memory; no other class counts them.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    code: int
    peak: int
    host_arguments: int = 0
    host_temporaries: int = 0

    @classmethod
    def of(cls, analysis: Any) -> CompiledMemory:
        """Read what `compiled.memory_analysis()` gives."""
        return cls(
            arguments=int(analysis.argument_size_in_bytes),
            outputs=int(analysis.output_size_in_bytes),
            temporaries=int(analysis.temp_size_in_bytes),
            aliased=int(analysis.alias_size_in_bytes),
            code=int(analysis.generated_code_size_in_bytes),
            peak=int(getattr(analysis, "peak_memory_in_bytes", 0)),
            host_arguments=int(analysis.host_argument_size_in_bytes),
            host_temporaries=int(analysis.host_temp_size_in_bytes),
        )

    @property
    def total(self) -> int:
        """What is set aside: arguments, temporaries, and outputs that have a place of their own."""
        return self.arguments + self.temporaries + self.outputs - self.aliased

    @property
    def alive(self) -> int:
        """The most that is alive at once; where the compiler does not say, all that is set aside."""
        peak = self.peak - self.host_arguments
        return min(peak, self.total) if peak >= self.arguments else self.total

    def to_json(self) -> dict[str, int]:
        """All fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CompiledMemory:
        """Read what `to_json` wrote."""
        return cls(**{f.name: int(value[f.name]) for f in fields(cls)})


_AMOUNT = r"([\d.]+)\s*([KMGTP]?i?B?)\b"
_USED = (
    re.compile(rf"Used {_AMOUNT} of {_AMOUNT}"),
    re.compile(rf"required[^(]*\({_AMOUNT}\) exceeds available[^(]*\({_AMOUNT}\)"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A program that does not fit, in the compiler's words.

    Args:
        message: all that it said.
    """

    message: str

    @property
    def used(self) -> float | None:
        """Bytes that it needs, None where the message does not say.

        >>> OutOfMemory("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 36.5G of 15.75G hbm.").used
        39191576576.0
        """
        return self._amounts[0]

    @property
    def capacity(self) -> float | None:
        """Bytes that there are, None where the message does not say."""
        return self._amounts[1]

    @property
    def _amounts(self) -> tuple[float | None, float | None]:
        for form in _USED:
            found = form.search(self.message)
            if found is not None:
                return _bytes(found[1], found[2]), _bytes(found[3], found[4])
        return None, None

    @property
    def breakdown(self) -> tuple[str, ...]:
        """The lines that say what takes the memory."""
        lines = [line.rstrip() for line in self.message.splitlines()]
        return tuple(line for line in lines if re.search(r"\d[KMGT]?i?B?\b", line) and line.startswith((" ", "\t")))


def _bytes(number: str, unit: str) -> float:
    return float(number) * _UNITS[unit.rstrip("iB").upper()]
