"""Matmul FLOPs of a compiled program: dots, the convolutions that TPU programs write them as, and calls of libraries.

Two per multiply-add, padding left out; loops count as often as they run. Not here: elementwise work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshwise.compiler.hlo.instructions import Computation, Instruction, Module
from meshwise.compiler.hlo.loops import Execution, executions
from meshwise.compiler.hlo.shapes import ArrayShape

#: Names of library calls that are matrix products.
GEMM = re.compile(r"gemm|matmul", re.IGNORECASE)
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_WINDOW = re.compile(r"(\w+)=([\w.\-]+)")


@dataclass(frozen=True)
class Matmul:
    """One matrix product of a compiled program.

    Args:
        flops: of one run.
        execution: how often it runs.
        scope: the path of named scopes that it comes from.
        dtype: of its first operand.
    """

    flops: float
    execution: Execution
    scope: str
    dtype: str

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
        for matmul in _of_computation(computation, execution)
    )


def _of_computation(computation: Computation, execution: Execution) -> Iterator[Matmul]:
    for i in computation.instructions:
        flops = _flops(computation, i)
        if flops:
            yield Matmul(flops, execution, i.op_name, _operand(computation, i, 0).dtype)


def _flops(computation: Computation, i: Instruction) -> float:
    if i.opcode == "dot":
        return _dot(_operand(computation, i, 0), _result(i), _numbers(i.attributes.get("lhs_contracting_dims", "")))
    if i.opcode == "convolution":
        return _convolution(_operand(computation, i, 0), _operand(computation, i, 1), i)
    if i.opcode == "custom-call" and GEMM.search(i.attributes.get("custom_call_target", "")):
        contracted = _CONTRACTED.search(i.tail)
        found = _numbers(contracted[1].replace('"', "")) if contracted else ()
        return _dot(_operand(computation, i, 0), _result(i), found)
    return 0.0


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
