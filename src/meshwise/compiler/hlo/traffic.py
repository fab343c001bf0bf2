"""The collectives of a compiled program: kind, mesh axes, bytes and how often, each as XLA emitted it.

Asynchronous pairs count once, at their start; what TPU programs write as an AllReduce and a slice in one fusion is the
ReduceScatter that it is. What nothing here can count is named, so that it is not ignored in silence. Not here: what XLA
made them from (`rewrites`), and what was expected (`comparison`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwise.compiler.hlo.bytes_moved import GEMM, kernel_says
from meshwise.compiler.hlo.groups import DeviceMesh, axes_of_groups, axes_of_pairs, groups_of, pairs_of
from meshwise.compiler.hlo.loops import Execution, executions, trip_count
from meshwise.compiler.hlo.reader import Computation, Instruction, Module
from meshwise.compiler.hlo.shapes import ArrayShape, Shape, TupleShape

#: Kinds of collectives, by the word that `Emitted.kind` has.
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute", "broadcast", "send")

#: Opcode, without "-start" -> kind.
OPCODES = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
    "send": "send",
}

#: Starts that write their one operand in front of their result.
_PAIRED = ("all-gather-start", "collective-permute-start")

#: Name of the computation of a fusion that is a ReduceScatter on TPUs.
_SCATTERED = re.compile(r"all-reduce-scatter|reduce-scatter")

#: Number of an asynchronous collective that TPU programs run in steps, beside several fusions.
_CHAIN = re.compile(r'chain_id="(\w+)"')


@dataclass(frozen=True)
class Emitted:
    """One collective instruction of a compiled program.

    Args:
        kind: one of `KINDS`.
        axes: mesh axes of its groups, outermost first; "?" where they are no lines along axes.
        group_size: members of a group.
        payload: bytes of one group's array on one device: gathered (AllGather), before it is reduced (ReduceScatter,
            AllReduce), as it is (AllToAll, permute).
        dtype: of the largest array.
        arrays: shapes of the results.
        execution: how often it runs.
        instruction: of the program; computation: where it stands.
        channel: its channel, None where it has none.
        asynchronous: whether it starts at one place and is waited for at another.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    payload: float
    dtype: str
    arrays: tuple[ArrayShape, ...]
    execution: Execution
    instruction: Instruction
    computation: Computation
    channel: int | None
    asynchronous: bool

    @property
    def count(self) -> int:
        """How often it runs in a step."""
        return self.execution.times

    @property
    def received(self) -> float:
        """Bytes that one device receives, each time: (n-1)/n of the payload, twice that for an AllReduce."""
        others = 1 - 1 / self.group_size
        if self.kind in ("permute", "send", "broadcast"):
            return self.payload
        return self.payload * others * (2 if self.kind == "all-reduce" else 1)

    @property
    def received_per_step(self) -> float:
        """Bytes that one device receives in a step."""
        return self.received * self.count

    @property
    def scope(self) -> str:
        """The path of named scopes that it comes from."""
        return self.instruction.op_name


def emitted_collectives(module: Module, mesh: DeviceMesh) -> tuple[Emitted, ...]:
    """List every collective of a program, in the order of its text; one row for each place that runs it.

    Args:
        module: the program.
        mesh: axes, and which devices are in which slice.
    """
    runs = executions(module)
    found: dict[object, Emitted] = {}
    for computation in module.computations.values():
        for execution in runs.get(computation.name, ()):
            for one in _of_computation(module, computation, execution, mesh):
                found.setdefault((one.instruction.name, one.computation.name, one.execution), one)
    return tuple(_once(found.values()))


def _once(found: Iterable[Emitted]) -> Iterator[Emitted]:
    """Count what is one collective in several steps once: TPU programs repeat it in each fusion that it runs beside.

    Some steps stand in loops of the computation that waits for it; it runs as often as the outermost.
    """
    chains: dict[object, list[Emitted]] = defaultdict(list)
    for number, one in enumerate(found):
        chain = _CHAIN.search(one.instruction.tail)
        chains[number if chain is None else (chain[1], one.channel)].append(one)
    for steps in chains.values():
        outermost: list[Emitted] = []
        for one in sorted(steps, key=lambda s: len(s.execution.loops)):
            loops = one.execution.loops
            if all(loops[: len(o.execution.loops)] != o.execution.loops for o in outermost):
                outermost.append(one)
        yield from outermost


def _of_computation(
    module: Module, computation: Computation, execution: Execution, mesh: DeviceMesh
) -> Iterator[Emitted]:
    for i in computation.instructions:
        kind = OPCODES.get(i.opcode.removesuffix("-start"))
        if i.opcode == "send" and "_xla_megascale_transfer_type" in i.tail:
            yield _between_slices(computation, i, execution, mesh)
        elif kind is not None:
            scattered = kind == "all-reduce" and bool(_SCATTERED.search(computation.name))
            yield _emitted(module, computation, i, execution, mesh, kind="reduce-scatter" if scattered else kind)


def _emitted(
    module: Module, computation: Computation, i: Instruction, execution: Execution, mesh: DeviceMesh, *, kind: str
) -> Emitted:
    local = mesh.partitions(module.num_partitions)
    if kind == "permute":
        pairs = [(local[a], local[b]) for a, b in pairs_of(i)]
        axes, size = axes_of_pairs(pairs, mesh.sizes), 2
    elif kind == "send":
        axes, size = (), 2
    else:
        groups = tuple(tuple(local[p] for p in group) for group in groups_of(i, module.num_partitions))
        axes, size = axes_of_groups(groups, mesh.sizes), max(map(len, groups))
    results = _results(i)
    payload = float(sum(a.num_bytes for a in results))
    if i.opcode.startswith("reduce-scatter"):
        payload *= size
    if i.opcode.startswith("ragged-all-to-all"):  # the larger side has room for more than comes on average
        payload = min(payload, float(computation.by_name[i.operands[0]].shape.arrays[0].num_bytes))
    return Emitted(
        kind=kind,
        axes=axes,
        group_size=size,
        payload=payload,
        dtype=max(results, key=lambda a: a.num_bytes).dtype if results else "",
        arrays=results,
        execution=execution,
        instruction=i,
        computation=computation,
        channel=_channel(i),
        asynchronous=i.opcode.endswith("-start") or "async" in computation.name or bool(_CHAIN.search(i.tail)),
    )


def _channel(i: Instruction) -> int | None:
    found = re.search(r"\bchannel_id=(\d+)", i.tail)
    return int(found[1]) if found else None


def _between_slices(computation: Computation, i: Instruction, execution: Execution, mesh: DeviceMesh) -> Emitted:
    """A transfer of the multi-slice runtime: what each host sends to its fellows in the other slices."""
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.tail)
    kind = found[1].lower().replace("_", "-") if found else "send"
    sent = _results(i)
    slices = mesh.num_slices
    payload = float(sum(a.num_bytes for a in sent)) * (slices if kind == "all-gather" else 1)
    return Emitted(
        kind=kind if kind in KINDS else "send",
        axes=mesh.slice_axes,
        group_size=slices,
        payload=payload,
        dtype=sent[0].dtype,
        arrays=sent,
        execution=execution,
        instruction=i,
        computation=computation,
        channel=_channel(i),
        asynchronous=True,
    )


def _results(i: Instruction) -> tuple[ArrayShape, ...]:
    """Arrays that it results in. A start has what it reads, what it results in, and what its two ends share."""
    shape: Shape = i.shape
    if isinstance(shape, TupleShape) and (i.opcode in _PAIRED or _nested(i, shape)):
        shape = shape.parts[1]
    if i.opcode == "send" and isinstance(shape, TupleShape):
        shape = shape.parts[0]
    return tuple(a for a in shape.arrays if a.dtype not in ("token", "opaque"))


def _nested(i: Instruction, shape: TupleShape) -> bool:
    """Whether a start writes its operands as a tuple in front."""
    return i.opcode.endswith("-start") and isinstance(shape.parts[0], TupleShape)


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


#: Where the runtime's attention says why it is not a fused kernel (`runtime.attention`).
_BLOCKS = re.compile(r"\bblocks, since ([^/()]+)")


def without_kernel(module: Module) -> tuple[str, ...]:
    """List, in words, why attention is not a fused kernel.

    >>> from meshwise.compiler.hlo.reader import read_module
    >>> without_kernel(read_module('''HloModule m
    ...
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %y = f32[8]{0} negate(%x), metadata={op_name="layer/attention/blocks, since it is short/neg"}
    ... }'''))
    ('it is short',)
    """
    scopes = (i.op_name for computation in module.computations.values() for i in computation.instructions)
    return tuple(dict.fromkeys(reason.strip() for scope in scopes for reason in _BLOCKS.findall(scope)))


def _of(module: Module, computation: Computation, i: Instruction, execution: Execution) -> Iterator[str]:
    opcode = i.opcode.removesuffix("-start")
    sends = opcode in OPCODES
    if i.opcode == "while" and trip_count(module, computation, i) is None:
        yield f"the loop {i.name} ({i.op_name}): its rounds depend on data, and one is counted"
    elif i.opcode == "custom-call":
        target = i.attributes.get("custom_call_target", "").strip('"')
        if not (GEMM.search(target) or _HARMLESS.search(target) or kernel_says(i)):
            yield f"calls of {target}: neither products nor bytes of them are counted"
    elif _GROUPS.search(i.tail) and not sends and not i.opcode.endswith(_ENDS):
        yield f"{i.opcode}: devices take part in it together, and what it sends is not counted"
    if sends and execution.branch:
        yield f"{i.opcode} in a branch ({i.op_name}): counted as if it were taken in every round"
