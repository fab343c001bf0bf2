"""What a compiled program contains and nothing here can count: named, so that it is not ignored in silence.

Not here: what is counted (`traffic`, `flops`, `loops`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwise.compiler.hlo.flops import GEMM
from meshwise.compiler.hlo.instructions import Computation, Instruction, Module
from meshwise.compiler.hlo.loops import Execution, executions, trip_count
from meshwise.compiler.hlo.traffic import OPCODES

#: Calls of libraries and of the compiler's own that neither multiply nor send.
_HARMLESS = re.compile(
    r"AllocateBuffer|AssumeGatherIndicesInBound|AsyncCollective(Start|Done)|ConcatBitcast|Sharding|LayoutConstraint"
    r"|X64(Combine|SplitLow|SplitHigh)|MoveToHost|MoveToDevice|annotate_device_placement|TopK|ResizeDynamic|SliceId"
)
#: Attributes that only collectives have.
_GROUPS = re.compile(r"\b(replica_groups|source_target_pairs|channel_id)=")
#: Ends and halves of collectives that are counted at their start.
_ENDS = ("-done", "-update", "recv", "optimization-barrier")


def unread(module: Module) -> tuple[str, ...]:
    """List, in words, what of a program is not counted or counted by assumption.

    >>> from meshwise.compiler.hlo.reader import read_module
    >>> unread(read_module('''HloModule m
    ...
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %y = f32[8]{0} custom-call(%x), custom_call_target="mine"
    ... }'''))
    ('calls of mine: neither products nor bytes of them are counted',)
    """
    runs = executions(module)
    found: dict[str, None] = {}
    for computation in module.computations.values():
        for execution in runs.get(computation.name, ())[:1]:
            for i in computation.instructions:
                found.update(dict.fromkeys(_of(module, computation, i, execution)))
    return tuple(found)


def _of(module: Module, computation: Computation, i: Instruction, execution: Execution) -> Iterator[str]:
    opcode = i.opcode.removesuffix("-start")
    sends = opcode in OPCODES
    if i.opcode == "while" and trip_count(module, computation, i) is None:
        yield f"the loop {i.name} ({i.op_name}): its rounds depend on data, and one is counted"
    elif i.opcode == "custom-call":
        target = i.attributes.get("custom_call_target", "").strip('"')
        if not (GEMM.search(target) or _HARMLESS.search(target)):
            yield f"calls of {target}: neither products nor bytes of them are counted"
    elif _GROUPS.search(i.tail) and not sends and not i.opcode.endswith(_ENDS):
        yield f"{i.opcode}: devices take part in it together, and what it sends is not counted"
    if sends and execution.branch:
        yield f"{i.opcode} in a branch ({i.op_name}): counted as if it were taken in every round"
