"""Operations of a compiled program, read from its HLO protocol buffer: what each does, FLOPs, bytes, scope, groups.

What a fusion does is what is fused in it. Counting follows XLA's own cost analysis where it is simple: a product counts
2 m k n, arithmetic on an element 1, data movement and transcendentals 0; bytes are those of operands and results.
Not here: when the operations ran (`xplane`, `nsys_jax`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshwise.profile.kinds import collective_kind
from meshwise.profile.reading.hlo_parts import arrays_of, elements, gemm_dimensions, groups_of, window_pairs
from meshwise.profile.reading.protos import Message, parse
from meshwise.profile.trace import Activity, Array, Collective, OpKind
from meshwise.profile.work import array_bytes

_COLLECTIVES = frozenset({
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
})  # fmt: skip
_HOLDERS = frozenset({"while", "conditional", "call"})
_MOVES = frozenset({
    "copy", "transpose", "reshape", "bitcast", "broadcast", "concatenate", "slice", "dynamic-slice", "pad", "reverse",
    "dynamic-update-slice", "bitcast-convert",
})  # fmt: skip
_NO_FLOPS = _MOVES | {
    "parameter", "constant", "get-tuple-element", "tuple", "iota", "gather", "scatter", "convert", "rng-bit-generator",
    "custom-call", "fusion", "sort", "infeed", "outfeed", "after-all", "partition-id", "replica-id", "copy-start",
    "copy-done", "exponential", "log", "tanh", "logistic", "rsqrt", "sqrt", "power", "sine", "cosine", "erf", "cbrt",
    "exponential-minus-one", "log-plus-one", "atan2", "tan", "rng", "map", "opt-barrier", "domain",
}  # fmt: skip
#: What a fusion may hold that copies a part of an array: the place where it is.
_INDICES = frozenset({"parameter", "constant", "add", "subtract", "compare", "select", "multiply", "convert", "fusion"})
_COPIES = frozenset({"copy", "copy-start", "slice", "dynamic-slice"})
#: What no kernel runs for.
_NOTHING = frozenset({"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "async-done", "after-all"})
#: What a fusion is called after, the weightiest first.
_WEIGHT = (
    "dot",
    "convolution",
    "custom-call",
    "scatter",
    "reduce",
    "reduce-window",
    "sort",
    "gather",
    "rng-bit-generator",
)
#: How far the neighbour may be whose scope an instruction without one takes, and how many are looked at.
_NEAR, _MOST_NEAR = 5, 64
#: Calls of kernels that a program brings itself; our own say in their scope what they multiply, and what they move.
_KERNELS = ("tpu_custom_call", "mosaic_gpu", "__gpu$xla.gpu.triton")
_COUNTED = re.compile(r"kernel\.flops\.(\d+)(?:\.bytes\.(\d+))?")
_ATTENTION = re.compile(r"attention|attn|fmha|flash|splash|mha_|dot_product", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """An instruction in the order in which they run.

    Args:
        name, opcode: its own.
        target: the function of a library that it calls.
        scope: its path of named scopes.
        copied: bytes that it copies, None if it does anything else.
        sent: the kind of collective that it is or begins, "" for others.
    """

    name: str
    opcode: str
    target: str
    scope: str
    copied: float | None
    sent: str = ""


class HloProgram:
    """One compiled program; its operations are made when first asked for."""

    def __init__(self, data: bytes, *, wrapped: bool = True) -> None:
        module = parse("HloProto", data).hlo_module if wrapped else parse("HloModule", data)
        self.name: str = module.name
        self._computations = {c.id: c for c in module.computations}
        self._by_id: dict[int, Message] = {i.id: i for c in module.computations for i in c.instructions}
        self._by_name: dict[str, Message] = {i.name: i for c in module.computations for i in c.instructions}
        self._users: dict[int, list[Message]] = {}
        for user in self._by_id.values():
            for number in user.operand_ids:
                self._users.setdefault(number, []).append(user)
        self._made: dict[str, OpKind] = {}
        self._schedule = [tuple(entry.value.instruction_ids) for entry in module.schedule.sequences]
        rows = [tuple(c.replica_device_ids) for c in module.device_assignment.computation_devices]
        #: The device of each number that groups have: replicas one after the other, each with all its partitions.
        self.devices = tuple(row[replica] for replica in range(min(map(len, rows), default=0)) for row in rows)

    @property
    def names(self) -> Iterator[str]:
        """Names of all instructions."""
        return iter(self._by_name)

    def schedules(self) -> Iterator[list[Scheduled]]:
        """In the order in which they run, of each computation."""
        for numbers in self._schedule:
            own = [self._by_id[number] for number in numbers if number in self._by_id]
            yield [
                Scheduled(i.name, i.opcode, _target(i), i.metadata.op_name, self._copied(i), self._sent(i))
                for i in own if i.opcode not in _NOTHING and not i.opcode.endswith("-done")
            ]  # fmt: skip

    def _sent(self, instruction: Message) -> str:
        """The kind of collective that it is or begins, "" for others."""
        inside = self._inside(instruction) if instruction.opcode == "async-start" else []
        return next((_plain(i.opcode) for i in (instruction, *inside) if _plain(i.opcode) in _COLLECTIVES), "")

    def _copied(self, instruction: Message) -> float | None:
        """Bytes that it copies, if that is all that it does."""
        inside = self._inside(instruction) if instruction.opcode in ("fusion", "async-start") else [instruction]
        if any(i.opcode not in _MOVES and i.opcode not in _INDICES for i in inside if i is not instruction):
            return None
        for one in inside:
            if one.opcode == "dynamic-update-slice" and len(one.operand_ids) > 1:
                return sum(map(array_bytes, self._arrays(self._by_id.get(one.operand_ids[1]))))
        slices = [i for i in inside if i.opcode in ("dynamic-slice", "slice")] or [instruction]
        return sum(map(array_bytes, arrays_of(slices[0].shape))) if slices[0].opcode in _COPIES else None

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def op(self, name: str) -> OpKind | None:
        """The operation of an instruction, None if the program has none of this name."""
        if name not in self._made and name in self._by_name:
            self._made[name] = self._kind(self._by_name[name])
        return self._made.get(name)

    def _inside(self, instruction: Message) -> list[Message]:
        """Instructions of what it calls, through nested fusions."""
        found: list[Message] = []
        for number in instruction.called_computation_ids:
            called = self._computations.get(number)
            for inner in called.instructions if called else ():
                found.append(inner)
                if inner.opcode in ("fusion", "call", "async-start"):
                    found += self._inside(inner)
        return found

    def _kind(self, instruction: Message) -> OpKind:
        opcode: str = instruction.opcode
        inside = self._inside(instruction) if opcode in ("fusion", "async-start", "async-done", "custom-call") else []
        if opcode.endswith("-done") or opcode == "async-update":  # what it waits for says what it is
            inside = inside or self._started(instruction)
        heavy = self._heaviest(instruction, inside)
        activity, category = self._activity(instruction, inside, heavy)
        scope = self._scope(instruction, inside, heavy)
        operands = tuple(self._arrays(self._by_id.get(i)) for i in instruction.operand_ids)
        read = tuple(a for arrays in operands for a in arrays)
        written = arrays_of(instruction.shape)
        matmul = self._matmul(heavy) if heavy is not None else None
        flops = sum(self._flops(i) for i in ([instruction] if opcode != "fusion" else inside))
        waits = opcode.endswith("-done")
        said = _COUNTED.search(scope) if opcode == "custom-call" else None
        part = self._copied(instruction) if opcode == "async-start" else None
        kept = written[:-1] if _has_workspace(instruction, written) else written
        whole = sum(map(array_bytes, (*read, *kept))) if part is None else 2 * part
        moved = float(said[2]) if said and said[2] else whole
        return OpKind(
            name=instruction.name,
            activity=activity,
            category=category,
            scope=scope,
            phase=phase_of(scope),
            operands=read,
            results=written,
            matmul=matmul if category == "matmul" else None,
            flops=None if activity != Activity.COMPUTE or waits else flops,
            num_bytes=None if waits or activity == Activity.CONTROL else moved,
            collective=self._collective(instruction, inside) if activity == Activity.COLLECTIVE else None,
            program=self.name,
            label=_label(instruction, heavy),
            source="HLO",
        )

    def _started(self, instruction: Message) -> list[Message]:
        """What a `-done` waits for: its `-start`, and what that holds."""
        for number in instruction.operand_ids:
            start = self._by_id.get(number)
            if start is not None and (start.opcode.endswith("-start") or start.opcode == "async-update"):
                further = self._started(start) if start.opcode == "async-update" else []
                return [start, *self._inside(start), *further]
        return []

    def _heaviest(self, instruction: Message, inside: list[Message]) -> Message | None:
        """The instruction that says what a fusion is; itself where nothing is fused."""
        if not inside:
            return instruction
        ranked = [i for i in inside if i.opcode in _WEIGHT]
        if ranked:
            return min(ranked, key=lambda i: (_WEIGHT.index(i.opcode), -elements(i.shape)))
        root = self._root(instruction)
        return root if root is not None else inside[-1]

    def _root(self, instruction: Message) -> Message | None:
        for number in instruction.called_computation_ids:
            called = self._computations.get(number)
            if called is not None:
                return self._by_id.get(called.root_id)
        return None

    def _activity(self, own: Message, inside: list[Message], heavy: Message | None) -> tuple[Activity, str]:
        """What it keeps busy, and its category."""
        opcodes = {_plain(own.opcode), *(_plain(i.opcode) for i in inside)}
        product = heavy is not None and heavy.opcode in ("dot", "convolution")
        if opcodes & _COLLECTIVES and not (product and own.opcode == "fusion"):
            return Activity.COLLECTIVE, "collective"
        if own.opcode in ("send", "recv", "send-done", "recv-done"):
            return Activity.COLLECTIVE, "collective"
        if own.opcode in ("copy-start", "copy-done", "infeed", "outfeed"):
            return Activity.COPY, "copy"
        if own.opcode in _HOLDERS:
            return Activity.CONTROL, "control"
        return Activity.COMPUTE, self._category(own, heavy if heavy is not None else own, inside)

    def _category(self, own: Message, heavy: Message, inside: list[Message]) -> str:  # noqa: PLR0911  (one a category)
        scope = self._scope(own, inside, heavy).lower()
        if heavy.opcode == "custom-call":
            return _custom(heavy.custom_call_target, scope)
        if heavy.opcode in ("dot", "convolution"):
            return "matmul" if heavy.opcode == "dot" or _is_product(heavy) else "convolution"
        if heavy.opcode in ("gather", "scatter"):
            return "embedding"
        if heavy.opcode in ("sort", "rng-bit-generator", "rng"):
            return "sampling"
        if "softmax" in scope:
            return "softmax"
        if re.search(r"norm\b|norm[/_\d]", scope):
            return "normalization"
        if heavy.opcode in ("reduce", "reduce-window"):
            return "reduction"
        if all(i.opcode in _MOVES or i.opcode in ("parameter", "constant", "convert") for i in (inside or [heavy])):
            return "layout"
        return "elementwise"

    def _scope(self, own: Message, inside: list[Message], heavy: Message | None) -> str:
        """The op_name of the instruction, else of what is weightiest in it, else of anything in it that has one."""
        if heavy is not None and heavy is not own and heavy.metadata.op_name and heavy.opcode in _WEIGHT[:2]:
            return str(heavy.metadata.op_name)
        if own.metadata.op_name:
            return str(own.metadata.op_name)
        if heavy is not None and heavy.metadata.op_name:
            return str(heavy.metadata.op_name)
        root = self._root(own)
        if root is not None and root.metadata.op_name:
            return str(root.metadata.op_name)
        found = next((str(i.metadata.op_name) for i in reversed(inside) if i.metadata.op_name), "")
        return found or self._neighbour(own)

    def _neighbour(self, own: Message) -> str:
        """The scope of what reads an instruction that XLA made itself, else of what it reads; "" if none is near."""
        for step in (self._readers, self._operands):
            near = [own]
            for _ in range(_NEAR):
                near = [other for one in near for other in step(one)][:_MOST_NEAR]
                scopes = (self._own_scope(one) for one in near)
                if found := next(filter(None, scopes), ""):
                    return found
        return ""

    def _readers(self, instruction: Message) -> list[Message]:
        return self._users.get(instruction.id, [])

    def _operands(self, instruction: Message) -> list[Message]:
        return [self._by_id[number] for number in instruction.operand_ids if number in self._by_id]

    def _own_scope(self, instruction: Message) -> str:
        """The op_name of an instruction, or of what is fused in it."""
        if instruction.metadata.op_name or instruction.opcode != "fusion":
            return str(instruction.metadata.op_name)
        return next((str(i.metadata.op_name) for i in self._inside(instruction) if i.metadata.op_name), "")

    def _arrays(self, instruction: Message | None) -> tuple[Array, ...]:
        return arrays_of(instruction.shape) if instruction is not None else ()

    def _operand(self, instruction: Message, place: int) -> tuple[int, ...]:
        """Sizes of an operand."""
        ids = instruction.operand_ids
        operand = self._by_id.get(ids[place]) if place < len(ids) else None
        return tuple(operand.shape.dimensions) if operand is not None else ()

    def _matmul(self, heavy: Message) -> tuple[int, int, int, int] | None:
        """(batch, m, k, n) of a product, also of one that a library does."""
        if heavy.opcode == "dot":
            numbers = heavy.dot_dimension_numbers
            batches, left = list(numbers.lhs_batch_dimensions), list(numbers.lhs_contracting_dimensions)
            right = list(numbers.rhs_contracting_dimensions)
        elif heavy.opcode == "custom-call" and "gemm" in _target(heavy):
            batches, left, right = gemm_dimensions(bytes(heavy.backend_config))
        else:
            return self._convolved(heavy) if heavy.opcode == "convolution" and _is_product(heavy) else None
        one, other = self._operand(heavy, 0), self._operand(heavy, 1)
        if (
            not one
            or not other
            or max([*left, *batches], default=-1) >= len(one)
            or max(right, default=-1) >= len(other)
        ):
            return None
        batch, k = math.prod(one[d] for d in batches), math.prod(one[d] for d in left)
        m = math.prod(one) // max(batch * k, 1)
        return batch, m, k, math.prod(other) // max(batch * k, 1)

    def _flops(self, instruction: Message) -> float:
        """FLOPs of one instruction."""
        opcode = instruction.opcode
        if opcode == "custom-call" and (said := _COUNTED.search(instruction.metadata.op_name)):
            return float(said[1])
        if opcode == "dot" or (opcode == "custom-call" and "gemm" in _target(instruction)):
            product = self._matmul(instruction)
            return 2.0 * math.prod(product) if product else 0.0
        if opcode == "convolution" or (opcode == "custom-call" and "conv" in instruction.custom_call_target):
            return self._convolution(instruction)
        if opcode in ("reduce", "reduce-window"):  # for each result one less than it is made of
            results, window = elements(instruction.shape), math.prod(d.size for d in instruction.window.dimensions)
            read = sum(math.prod(self._operand(instruction, n)) for n in range(len(instruction.operand_ids) // 2))
            return float(max((read if opcode == "reduce" else results * window) - results, 0))
        if opcode in _NO_FLOPS or opcode in _HOLDERS or _plain(opcode) in _COLLECTIVES:
            return 0.0
        return float(elements(instruction.shape))

    def _convolved(self, heavy: Message) -> tuple[int, int, int, int] | None:
        """(batch, m, k, n) of a product that is a convolution on TPUs; with a window, by its results and FLOPs."""
        result = next((a.dims for a in arrays_of(heavy.shape)), ())
        flops, size = self._convolution(heavy), math.prod(result)
        if not flops or len(result) < 2:
            return None
        k = round(flops / (2 * size))
        if heavy.window.dimensions:
            return math.prod(result[:-2]), result[-2], k, result[-1]
        n = result[heavy.convolution_dimension_numbers.output_feature_dimension]
        return 1, size // n, k, n

    def _convolution(self, instruction: Message) -> float:
        """2 for each product of an input with a weight; what lies in the padding is none, as XLA counts."""
        numbers, kernel, image = (
            instruction.convolution_dimension_numbers, self._operand(instruction, 1), self._operand(instruction, 0)
        )  # fmt: skip
        results = arrays_of(instruction.shape)  # of a library also its scratch space
        windows = instruction.window.dimensions
        if not kernel or not image or not results or len(windows) != len(numbers.output_spatial_dimensions):
            return 0.0
        result = results[0].dims
        positions = zip(windows, numbers.input_spatial_dimensions, numbers.output_spatial_dimensions, strict=True)
        pairs = math.prod(window_pairs(window, image[i], result[o]) for window, i, o in positions)
        features = kernel[numbers.kernel_input_feature_dimension] * result[numbers.output_feature_dimension]
        return 2.0 * float(pairs * features * result[numbers.output_batch_dimension])

    def _collective(self, own: Message, inside: list[Message]) -> Collective:
        """What it sends, to whom."""
        every = [own, *inside]
        sender = next((i for i in every if _plain(i.opcode) in _COLLECTIVES), own)
        arrays = (*arrays_of(sender.shape), *(a for n in sender.operand_ids for a in self._arrays(self._by_id.get(n))))
        if sender.opcode.endswith("-start"):  # its result holds the operand, too
            arrays = arrays[: max(len(arrays_of(sender.shape)), 1)]
        largest = max(map(array_bytes, arrays), default=0.0)
        groups = groups_of(sender)
        numbers = len(self.devices)
        placed = numbers > 1 and all(0 <= n < numbers for group in groups for n in group)
        if placed:
            groups = tuple(tuple(self.devices[n] for n in group) for group in groups)
            if not groups and not sender.opcode.startswith("collective-permute"):
                groups = (tuple(sorted(self.devices)),)  # none is named where all take part
        kind = _plain(sender.opcode) if _plain(sender.opcode) in _COLLECTIVES else collective_kind(own.opcode)
        size = len(groups[0]) if groups else None
        return Collective(kind, largest or None, size, groups, placed=placed)


def _is_product(convolution: Message) -> bool:
    """Whether a convolution is a product of matrices, as all are on TPUs: it has no window, or JAX says so."""
    return not convolution.window.dimensions or convolution.metadata.op_name.endswith(("dot_general", "dot_general:"))


def _target(instruction: Message) -> str:
    """The library's function that a call means, in lower case; products are all called gemm."""
    return str(instruction.custom_call_target).lower().replace("matmul", "gemm")


def _plain(opcode: str) -> str:
    """An opcode without the half that it is of an asynchronous pair."""
    return opcode.removesuffix("-start").removesuffix("-done")


def _has_workspace(instruction: Message, written: tuple[Array, ...]) -> bool:
    """Whether a call of a library has its workspace as its last result: what of it is written is not known."""
    return instruction.custom_call_target.startswith("__cu") and len(written) > 1 and written[-1].dtype == "uint8"


def _custom(target: str, scope: str) -> str:
    """The category of a call of a library."""
    name = target.lower()
    if _ATTENTION.search(name) or (name in _KERNELS and _ATTENTION.search(scope)):
        return "attention"
    if "conv" in name and "convert" not in name:
        return "convolution"
    if "gemm" in name or "matmul" in name or name.startswith(("__onednn$matmul", "__ynn")):
        return "matmul"
    if "topk" in name or "sort" in name:
        return "sampling"
    return "normalization" if "norm" in name else "custom"


def _label(own: Message, heavy: Message | None) -> str:
    """The category as XLA's own profiler calls it: the opcode; of a fusion its kind."""
    if own.opcode != "fusion":
        return str(own.opcode)
    if heavy is not None and heavy.opcode == "convolution":
        return "convolution fusion"
    return f"{own.fusion_kind.removeprefix('k').lower() or 'loop'} fusion"


_RECOMPUTED = re.compile(r"rematted_computation|checkpoint/(?!.*transpose)|/remat")


@lru_cache(maxsize=65536)
def phase_of(scope: str) -> str:
    """The phase that a path of JAX's scopes tells.

    >>> phase_of("jit(step)/jvp(layer)/dot_general"), phase_of("jit(step)/transpose(jvp(layer))/dot_general")
    ('forward', 'backward')
    >>> phase_of("jit(step)/transpose(jvp())/checkpoint/rematted_computation/layer/dot_general"), phase_of("jit(f)/mul")
    ('recompute', '')
    """
    if "rematted_computation" in scope:
        return "recompute"
    if "transpose(" in scope:
        return "backward"
    if "jvp(" in scope:
        return "forward"
    return "optimizer" if re.search(r"optimi[sz]er|adam|/update", scope) else ""
