"""The host's operations as trees, one a thread: which operation and phase a launch belongs to.

Not here: what was launched (`kineto`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from meshwise.profile.kinds import short_dtype
from meshwise.profile.reading.chrome import decoded
from meshwise.profile.trace import Array, HostThread, OpKind, OpTable, Stream, StreamBuilder

_OPTIMIZER = re.compile(r"optimizer\.step|_fused_adam|::_foreach_(?!copy)|fused_adam", re.IGNORECASE)
#: Annotations that communication libraries make for themselves.
LIBRARIES = ("nccl:", "gloo:", "mpi:", "c10d::", "rccl:")
_BACKWARD = "autograd::engine::evaluate_function"


class HostArguments(msgspec.Struct, gc=False):
    """What is read of an operation's arguments."""

    external: int | None = msgspec.field(name="External id", default=None)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b"[]"))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b"[]"))
    sequence: int | None = msgspec.field(name="Sequence number", default=None)
    forward_thread: int | None = msgspec.field(name="Fwd thread id", default=None)


@dataclass(slots=True)
class HostOp:
    """One operation or annotation of the host; scope and phase are known once its tree is built."""

    name: str
    start: int
    duration: int
    args: msgspec.Raw
    annotation: bool = False
    parent: HostOp | None = field(default=None, repr=False)
    phase: str = ""
    scope: str = ""
    _operands: tuple[Array, ...] | None = None

    @property
    def end(self) -> int:
        """When it ends."""
        return self.start + self.duration

    @property
    def operands(self) -> tuple[Array, ...]:
        """Its inputs by position, decoded when first asked for; () where shapes were not recorded."""
        if self._operands is None:
            args = decoded(self.args, HostArguments, HostArguments())
            dims = decoded(args.dims, list[list[int | list[int]] | None], [])
            types = decoded(args.types, list[str], [])
            pairs = zip(dims, [*types, *([""] * len(dims))], strict=False)
            self._operands = tuple(Array(_sizes(d), short_dtype(t)) for d, t in pairs)
            if not any(a.dims for a in self._operands):
                self._operands = ()
        return self._operands


def _sizes(dims: list[int | list[int]] | None) -> tuple[int, ...]:
    """Sizes of an array; of a list of arrays none."""
    return tuple(d for d in dims if isinstance(d, int)) if dims else ()


class HostTree:
    """Operations of all threads."""

    def __init__(self) -> None:
        self._ops: dict[object, list[HostOp]] = {}
        self._starts: dict[object, list[int]] = {}
        self._calls: dict[object, list[tuple[int, int, str]]] = {}
        self._external: dict[int, HostOp] | None = None

    def add(self, thread: object, op: HostOp) -> None:
        """Add an operation."""
        self._ops.setdefault(thread, []).append(op)

    def add_call(self, thread: object, start: int, duration: int, name: str) -> None:
        """Add a call of the runtime, which is part of no tree."""
        self._calls.setdefault(thread, []).append((start, duration, name))

    def build(self) -> None:
        """Find each operation's parent, phase and scope."""
        for thread, ops in self._ops.items():
            ops.sort(key=lambda op: (op.start, -op.duration, op.annotation, op.name))
            self._starts[thread] = [op.start for op in ops]
            stack: list[HostOp] = []
            for op in ops:
                while stack and stack[-1].end <= op.start:
                    stack.pop()
                op.parent = stack[-1] if stack else None
                _place(op)
                stack.append(op)

    def find(self, thread: object, time: int) -> HostOp | None:
        """The innermost operation of a thread at a time, or what a communication library noted."""
        starts = self._starts.get(thread)
        if not starts:
            return None
        place = bisect_right(starts, time) - 1
        op: HostOp | None = self._ops[thread][place] if place >= 0 else None
        while op is not None and (op.end < time or (op.annotation and not op.name.startswith(LIBRARIES))):
            op = op.parent
        return op

    def by_external(self, number: int) -> HostOp | None:
        """The operation of an external id."""
        if self._external is None:
            self._external = {}
            for op in (op for ops in self._ops.values() for op in ops):
                external = decoded(op.args, HostArguments, HostArguments()).external
                if external is not None:
                    self._external[external] = op
        return self._external.get(number)

    def threads(self) -> tuple[tuple[HostThread, ...], tuple[str, ...]]:
        """Columns of operations and calls, a thread each, and the names."""
        texts: dict[str, int] = {}
        threads = []
        for thread in sorted({*self._ops, *self._calls}, key=str):
            rows = [(o.start, o.duration, texts.setdefault(o.name, len(texts))) for o in self._ops.get(thread, ())]
            rows += [(s, d, texts.setdefault(name, len(texts))) for s, d, name in self._calls.get(thread, ())]
            columns = np.array(sorted(rows), dtype=np.int64).reshape(-1, 3)
            threads.append(HostThread(str(thread), columns[:, 0], columns[:, 1], columns[:, 2].astype(np.int32)))
        return tuple(threads), tuple(texts)

    def streams(self, table: OpTable, kind: Callable[[HostOp], OpKind]) -> tuple[Stream, ...]:
        """Operations as streams of a device, for traces without an accelerator."""
        self.build()
        found = []
        for thread, ops in sorted(self._ops.items(), key=lambda item: str(item[0])):
            builder = StreamBuilder(str(thread), nested=True)
            for op in ops:
                if not op.annotation or op.name.startswith(LIBRARIES):
                    builder.add(op.start, op.duration, table.index(kind(op)), op.start)
            if builder.op:
                found.append(builder.build())
        return tuple(found)


def _place(op: HostOp) -> None:
    """Phase and scope, from the parent's."""
    above = op.parent
    op.phase, op.scope = (above.phase, above.scope) if above else ("", "")
    if op.annotation:
        if _OPTIMIZER.search(op.name):
            op.phase = "optimizer"
        elif not op.name.startswith(("ProfilerStep", *LIBRARIES)):
            op.scope = op.name
        return
    if _OPTIMIZER.search(op.name):
        op.phase = "optimizer"
    elif op.name.startswith(_BACKWARD):
        op.phase = "backward"
    elif op.phase == "backward" and above is not None and not above.name.startswith(_BACKWARD) and _recomputes(op):
        op.phase = "recompute"


def _recomputes(op: HostOp) -> bool:
    """Whether an operation within a backward one belongs to a forward pass of its own: it is recorded by autograd."""
    if op.name.startswith(("autograd::", "torch::autograd")) or op.name.endswith(("Backward", "Backward0")):
        return False
    args = decoded(op.args, HostArguments, HostArguments())
    return args.sequence is not None and not args.forward_thread
