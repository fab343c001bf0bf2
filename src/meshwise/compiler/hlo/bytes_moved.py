"""Bytes that a compiled program reads from and writes to main memory: operands and results of what runs, loops counted.

An instruction reads its operands and writes its result, each once; one that looks at a part of an operand, or writes a
part of it in place, moves that part. What lies in memory on the chip (VMEM of a TPU) moves nothing. Caches of GPUs are
left out: what one instruction wrote and the next reads may never have left the L2. Matmul FLOPs are
counted likewise: dots, the convolutions that TPU programs write them as, and calls of libraries. Not here: what goes
over links (`traffic`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwise.compiler.hlo.loops import Execution, executions
from meshwise.compiler.hlo.reader import Computation, Instruction, Module
from meshwise.compiler.hlo.shapes import MEMORY_SPACES, ArrayShape

#: Names of library calls that are matrix products.
GEMM = re.compile(r"gemm|matmul", re.IGNORECASE)
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_WINDOW = re.compile(r"(\w+)=([\w.\-]+)")
#: What kernels of the runtime say of themselves, in the scopes that they stand in (`runtime.kernels.counted`).
_SAID = re.compile(r"\bkernel\.flops\.(\d+)(?:\.bytes\.(\d+))?")

#: Rows of a block of XLA's own ragged products on TPUs; and what the runtime says of rows that are expected.
_BY_GROUPS = re.compile(r'ragged_dot_tiling="(\d+),')
_ROWS = re.compile(r"\bkernel\.rows\.(\d+)")


@dataclass(frozen=True)
class Matmul:
    """One matrix product of a compiled program.

    Args:
        flops: of one run.
        execution: how often it runs.
        scope: the path of named scopes that it comes from.
        dtype: of its first operand, or of a kernel's largest.
        kernel: whether it is a kernel that says what it does.
    """

    flops: float
    execution: Execution
    scope: str
    dtype: str
    kernel: bool = False

    @property
    def flops_per_step(self) -> float:
        """FLOPs on one device in a step."""
        return self.flops * self.execution.times


def matmuls(module: Module) -> tuple[Matmul, ...]:
    """List all matrix products of a program, one for each place that runs them."""
    runs = executions(module)
    return tuple(
        matmul
        for computation in module.computations.values()
        for execution in runs.get(computation.name, ())
        for matmul in _flops_of_computation(computation, execution)
    )


def _flops_of_computation(computation: Computation, execution: Execution) -> Iterator[Matmul]:
    for i in computation.instructions:
        flops = _flops(computation, i)
        if flops:
            yield Matmul(
                flops, execution, i.op_name, _dtype(computation, i), kernel=bool(_by_groups(i) or flops_said(i))
            )


def _dtype(computation: Computation, i: Instruction) -> str:
    """Format of the operands: of a kernel, which reads tables of integers too, that of the largest."""
    operands = [_operand(computation, i, place) for place in range(len(i.operands))]
    return max(operands, key=lambda a: a.num_bytes).dtype if _by_groups(i) or flops_said(i) else operands[0].dtype


def flops_of(module: Module, computation: Computation, i: Instruction) -> tuple[float, str]:
    """FLOPs of one run of an instruction, of what is fused with it too, and the format of the largest product."""
    found = [(_flops(computation, i), i, computation)]
    if i.opcode == "fusion":
        for name in i.called:
            inside = module.computations[name]
            for inner in inside.instructions:
                if inner.opcode == "fusion":
                    found.append((flops_of(module, inside, inner)[0], inner, inside))
                elif inner.opcode in ("dot", "convolution"):
                    found.append((_flops(inside, inner), inner, inside))
    total = sum(flops for flops, _, _ in found)
    if not total:
        return 0.0, ""
    _, largest, where = max(found, key=lambda x: x[0])
    return total, (_dtype(where, largest) if largest.opcode != "fusion" else flops_of(module, where, largest)[1])


def moved_by(module: Module, computation: Computation, i: Instruction) -> float:
    """Bytes that one run of an instruction reads from and writes to main memory."""
    return 0.0 if i.opcode in _NOTHING else float(sum(_moved(module, computation, i)))


def kernel_says(i: Instruction) -> re.Match[str] | None:
    """What a kernel says of itself: FLOPs and, where it leaves parts of its arrays alone, bytes.

    Of what stands in its scope besides, to prepare it, a compiler may make calls too: of a gather, say.
    """
    return _SAID.search(i.op_name) if i.opcode == "custom-call" and i.op_name.endswith("call") else None


def flops_said(i: Instruction) -> float:
    """FLOPs that a kernel says it has; 0 where it says nothing."""
    found = kernel_says(i)
    return float(found[1]) if found else 0.0


def _flops(computation: Computation, i: Instruction) -> float:
    if i.opcode == "dot":
        return _dot(_operand(computation, i, 0), _result(i), _numbers(i.attributes.get("lhs_contracting_dims", "")))
    if i.opcode == "convolution":
        return _convolution(_operand(computation, i, 0), _operand(computation, i, 1), i)
    if i.opcode == "custom-call" and GEMM.search(i.attributes.get("custom_call_target", "")):
        contracted = _CONTRACTED.search(i.tail)
        found = _numbers(contracted[1].replace('"', "")) if contracted else ()
        return _dot(_operand(computation, i, 0), _result(i), found)
    tiling = _by_groups(i)
    if tiling is not None:
        groups, depth = _operand(computation, i, -1).dims[0], _operand(computation, i, -2).dims[1]
        rows = int(tiling[1])  # of a block; those that groups share are multiplied for each of them
        return 2.0 * rows * (-(_expected_rows(i) // -rows) + groups - 1) * depth * _result(i).dims[1]
    return flops_said(i)


def _by_groups(i: Instruction) -> re.Match[str] | None:
    """What XLA's kernel for TPUs says that multiplies rows [n, D] by the matrices [groups, D, F] of their groups."""
    return _BY_GROUPS.search(i.tail) if i.opcode == "custom-call" else None


def _expected_rows(i: Instruction) -> int:
    """Of the rows that such a kernel has room for, those that are expected; all, where the program does not say."""
    said = _ROWS.search(i.op_name)
    return min(int(said[1]) if said else _result(i).dims[0], _result(i).dims[0])


def _operand(computation: Computation, i: Instruction, place: int) -> ArrayShape:
    return computation.by_name[i.operands[place]].shape.arrays[0]


def _result(i: Instruction) -> ArrayShape:
    return i.shape.arrays[0]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _dot(left: ArrayShape, result: ArrayShape, contracted: tuple[int, ...]) -> float:
    return 2.0 * result.elements * math.prod(left.dims[d] for d in contracted)


def _convolution(image: ArrayShape, kernel: ArrayShape, i: Instruction) -> float:
    """Batch x features x what the window really meets: dimensions that are none are written as dilated windows."""
    labels, _, result_labels = i.attributes["dim_labels"].partition("->")
    image_labels, _, kernel_labels = labels.partition("_")
    result = _result(i)
    at = dict(zip(result_labels, result.dims, strict=True))
    window = dict(_WINDOW.findall(i.attributes.get("window", "")))
    met = 1.0
    for d, label in enumerate(sorted(c for c in kernel_labels if c.isdigit())):
        met *= _met(
            size=image.dims[image_labels.index(label)],
            window=int(_part(window, "size", d, "1")),
            results=at[label],
            stride=int(_part(window, "stride", d, "1")),
            pad=int(_part(window, "pad", d, "0_0").partition("_")[0]),
            dilated=int(_part(window, "lhs_dilate", d, "1")),
            window_dilated=int(_part(window, "rhs_dilate", d, "1")),
        )
    return 2.0 * at["b"] * at["f"] * kernel.dims[kernel_labels.index("i")] * met


def _part(window: dict[str, str], name: str, dimension: int, default: str) -> str:
    return window[name].split("x")[dimension] if name in window else default


@lru_cache(maxsize=4096)
def _met(*, size: int, window: int, results: int, stride: int, pad: int, dilated: int, window_dilated: int) -> int:
    """Count pairs of a result and a place of its window that meet an element, neither padding nor a hole."""
    last = (size - 1) * dilated
    pairs = 0
    for place in range(window):
        shift = place * window_dilated - pad
        # result * stride + shift must lie in [0, last] and be a multiple of `dilated`
        low = max(0, -(shift // stride))
        high = min(results - 1, (last - shift) // stride)
        if high < low:
            continue
        period = dilated // math.gcd(stride, dilated)
        first = next(
            (r for r in range(low, min(high, low + period - 1) + 1) if (r * stride + shift) % dilated == 0), None
        )
        if first is not None:
            pairs += (high - first) // period + 1
    return pairs


#: What moves nothing itself: names for arrays, and what runs computations that are counted on their own.
_NOTHING = frozenset(
    {
        *("parameter", "constant", "iota", "partition-id", "replica-id", "rng-get-and-update-state"),
        *("tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "domain", "optimization-barrier"),
        *("while", "conditional", "call", "async-start", "async-update", "async-done"),
    }
)

#: Calls of the compiler's own that set memory aside, rename what is in it, or make other cores ready.
_RENAMING = frozenset(
    {
        *("AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone", "SliceId"),
        *("PrepareAsyncCallStart", "PrepareAsyncCallDone"),
    }
)

#: What reads only as much as it results in, of its first operand.
_PARTS = frozenset({"slice", "dynamic-slice", "gather"})


@dataclass(frozen=True, slots=True)
class Movement:
    """One instruction that reads or writes main memory.

    Args:
        read, written: bytes of one run, padding of tiles left out.
        execution: how often it runs.
        scope: the path of named scopes that it comes from.
        opcode: of the instruction.
    """

    read: int
    written: int
    execution: Execution
    scope: str
    opcode: str

    @property
    def bytes_per_step(self) -> float:
        """Bytes on one device in a step."""
        return float((self.read + self.written) * self.execution.times)


def movements(module: Module) -> tuple[Movement, ...]:
    """List all instructions of a program that read or write main memory, one for each place that runs them.

    >>> from meshwise.compiler.hlo.reader import read_module
    >>> [(m.read, m.written) for m in movements(read_module('''HloModule m
    ...
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %y = f32[8]{0} negate(%x)
    ... }'''))]
    [(32, 32)]
    """
    runs = executions(module)
    inner = _within_instructions(module)
    return tuple(
        Movement(read, written, execution, i.op_name, i.opcode)
        for computation in module.computations.values()
        if computation.name not in inner
        for execution in runs.get(computation.name, ())
        for i, read, written in _of_computation(module, computation)
    )


def _within_instructions(module: Module) -> frozenset[str]:
    """Names of computations that are the inside of one instruction: what they pass on stays in registers."""
    outer = ("while", "conditional", "call", "async-start")
    found: set[str] = set()
    waiting = [
        name
        for c in module.computations.values()
        for i in c.instructions
        if i.opcode not in outer and not i.opcode.endswith(("-done", "-update"))
        for name in i.called
    ]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [n for i in module.computations[name].instructions for n in i.called]
    return frozenset(found)


def _of_computation(module: Module, computation: Computation) -> Iterator[tuple[Instruction, int, int]]:
    for i in computation.instructions:
        if i.opcode in _NOTHING:
            continue
        read, written = _moved(module, computation, i)
        if read or written:
            yield i, read, written


def _moved(module: Module, computation: Computation, i: Instruction) -> tuple[int, int]:
    """Bytes read and written by one run of an instruction."""
    known: dict[tuple[str, str], tuple[int, int]] = module.known.setdefault("moved", {})
    key = computation.name, i.name
    if key not in known:
        known[key] = _read_and_written(module, computation, i)
    return known[key]


def _read_and_written(module: Module, computation: Computation, i: Instruction) -> tuple[int, int]:
    operands = [computation.by_name[name] for name in i.operands if name in computation.by_name]
    read, written = sum(_stored(o) for o in operands), _stored(i)
    match i.opcode:
        case "fusion":
            read, written = _fused(module, module.computations[i.called[0]], operands, i)
        case "custom-call":
            read, written = _called(operands, i)
        case "slice-start":  # its shape: what it is cut from, the part, what it counts with
            read, written = min(read, _bytes(i.shape.arrays[len(operands) :][:1])), 0
        case "ragged-all-to-all-start":  # the larger side has room for more than comes on average
            read, written = min(map(_stored, operands[:2])), 0
        case "ragged-all-to-all-done":
            read, written = 0, min(written, _stored(computation.by_name[operands[0].operands[0]]))
        case start if start.endswith("-start"):  # its result is written when it is done
            written = 0
        case done if done.endswith("-done"):
            read = 0
        case "dynamic-update-slice":
            read, written = _stored(operands[1]), min(written, _size(operands[1]))
        case "scatter":
            updates = _size(operands[-1])
            read, written = read - _stored(operands[0]) + updates, min(written, updates)
        case part if part in _PARTS:
            read = read - _stored(operands[0]) + min(_stored(operands[0]), _size(i))
    return read, written


def _called(operands: Sequence[Instruction], i: Instruction) -> tuple[int, int]:
    """Bytes of a call of a library: a matrix product has its workspace beside its result."""
    target = i.attributes.get("custom_call_target", "").strip('"')
    if target in _RENAMING:
        return 0, 0
    said = kernel_says(i)
    if said and said[2]:
        written = min(int(said[2]), sum(_in_memory(a) for a in i.shape.arrays))
        return int(said[2]) - written, written
    if _by_groups(i):  # it goes over the blocks of rows that there are
        rows, share = operands[-2], _expected_rows(i) / _result(i).dims[0]
        read = sum(_stored(o) for o in operands if o is not rows) + round(share * _stored(rows))
        return read, round(share * _stored(i))
    results = i.shape.arrays[:1] if GEMM.search(target) else i.shape.arrays
    return sum(_stored(o) for o in operands), sum(_in_memory(a) for a in results)


def _fused(module: Module, inside: Computation, operands: Sequence[Instruction], i: Instruction) -> tuple[int, int]:
    """Bytes of a fusion: of operands that are only cut, the parts; of a result that is updated in place, the update.

    What it only hands on stays where it is.
    """
    read = 0
    for parameter, operand in zip(inside.parameters, operands, strict=False):
        stored = _stored(operand)
        parts = _parts_read(module, inside, parameter)
        read += stored if parts is None else min(stored, parts)
    updates = _updates_in_place(module, inside)
    results = (
        [inside.by_name[name] for name in inside.root.operands] if inside.root.opcode == "tuple" else [inside.root]
    )
    written = 0
    for result, array in zip(results, i.shape.arrays, strict=False):
        source = _source(inside, result)
        stored = _in_memory(array)
        if source.opcode != "parameter":
            written += min(stored, updates.get(source.name, stored))
    return read, written


def _users(computation: Computation) -> Mapping[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = {i.name: [] for i in computation.instructions}
    for i in computation.instructions:
        for name in dict.fromkeys(i.operands):
            if name in found:
                found[name].append(i)
    return found


def _updates_in_place(module: Module, inside: Computation) -> Mapping[str, int]:
    """Name of each dynamic-update-slice, or of a fusion within that ends with one -> bytes that it writes."""
    found = {
        i.name: _size(inside.by_name[i.operands[1]]) for i in inside.instructions if i.opcode == "dynamic-update-slice"
    }
    for i in (i for i in inside.instructions if i.opcode == "fusion"):
        within = module.computations[i.called[0]]
        update = _updates_in_place(module, within).get(_source(within, within.root).name)
        if update is not None:
            found[i.name] = update
    return found


def _source(inside: Computation, i: Instruction) -> Instruction:
    """What an instruction renames, through all renamings."""
    while i.opcode == "bitcast" and i.operands[0] in inside.by_name:
        i = inside.by_name[i.operands[0]]
    return i


def _parts_read(module: Module, inside: Computation, i: Instruction) -> int | None:
    """Bytes that are read of an operand which is only cut or updated in place; None where something reads all of it."""
    total = 0
    for user in _users(inside)[i.name]:
        if user.opcode == "tuple":
            continue  # handed on
        if user.opcode in _PARTS and user.operands[0] == i.name:
            total += _size(user)
            continue
        if user.opcode == "dynamic-update-slice" and user.operands[0] == i.name and i.name not in user.operands[1:]:
            continue  # what is not updated stays where it is
        inner = [_parts_read(module, inside, user)] if user.opcode == "bitcast" else [None]
        if user.opcode == "fusion":  # one within another: it cuts itself what it reads
            within = module.computations[user.called[0]]
            places = [n for n, name in enumerate(user.operands) if name == i.name]
            inner = [_parts_read(module, within, within.parameters[n]) for n in places]
        if None in inner:
            return None
        total += sum(n or 0 for n in inner)
    return total


def _size(i: Instruction) -> int:
    return _bytes(i.shape.arrays)


def _bytes(arrays: Sequence[ArrayShape]) -> int:
    return sum(a.num_bytes for a in arrays)


def _stored(i: Instruction) -> int:
    """Bytes of what an instruction gives, as far as it lies in main memory."""
    return sum(_in_memory(a) for a in i.shape.arrays)


def _in_memory(array: ArrayShape) -> int:
    return array.num_bytes if MEMORY_SPACES.get(array.memory_space) == "HBM" else 0
