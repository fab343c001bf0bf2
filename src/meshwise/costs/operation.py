"""How one operation is written: dtype and axes of each tensor, read into an `Op` of named axes.

`bf16[B, D] * int8[D, F] -> bf16[B, F]`, or `attention(Q, K, V) -> O`. Not here: shardings (`sharding.notation`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwise.core.dtypes import DType, parse_dtype
from meshwise.core.errors import NotationError, UnknownNameError
from meshwise.core.tensors import Attention, Einsum, Elementwise, Op, Tensor

_TOKEN = re.compile(r"\s*(?:(->|→)|([A-Za-z_][A-Za-z0-9_]*)|(.))")
_EXAMPLE = "bf16[B, D] * int8[D, F] -> bf16[B, F]"


@dataclass(frozen=True, slots=True)
class _Word:
    """A piece of the text: an arrow, a name or one character."""

    text: str
    position: int


class _Reader:
    """Walks over the words of an expression.

    expression := (term (("*" term)* | ("+" term)*) | "attention" "(" term "," term "," term ")") "->" term
    term       := DTYPE "[" [AXIS ("," AXIS)*] "]"
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = list(self._split(text))
        self.at = 0

    @staticmethod
    def _split(text: str) -> Iterator[_Word]:
        for match in _TOKEN.finditer(text.rstrip()):
            group = match.lastindex or 1
            yield _Word("->" if group == 1 else match[group], match.start(group))
        yield _Word("", len(text.rstrip()))

    @property
    def word(self) -> _Word:
        return self.words[self.at]

    def fail(self, message: str) -> NotationError:
        return NotationError(f"{message}, as in {_EXAMPLE!r}", self.text, self.word.position)

    def take(self, text: str, where: str) -> None:
        """Step over `text`, which must stand here."""
        if self.word.text != text:
            found = repr(self.word.text) if self.word.text else "the end"
            raise self.fail(f"expected {text!r} {where}, found {found}")
        self.at += 1

    def name(self, what: str) -> str:
        """Step over a name."""
        text = self.word.text
        if not re.fullmatch(r"[A-Za-z_]\w*", text):
            hint = "; sizes are given apart (--set B=1024)" if text.isdigit() else ""
            raise self.fail(f"expected {what}, found {repr(text) if text else 'the end'}{hint}")
        self.at += 1
        return text

    def dtype(self) -> DType:
        try:
            found = parse_dtype(self.word.text)
        except UnknownNameError as error:
            if re.fullmatch(r"[A-Za-z_]\w*", self.word.text):
                raise NotationError(str(error), self.text, self.word.position) from None
            self.name("a dtype")
            raise
        self.at += 1
        return found

    def term(self, number: int) -> Tensor:
        """Read `bf16[B, D]`."""
        dtype = self.dtype()
        self.take("[", "after the dtype")
        axes: list[str] = []
        while self.word.text != "]":
            if axes:
                self.take(",", "between axes")
            axis = self.name("an axis name")
            if axis in axes:
                self.at -= 1
                raise self.fail(f"axis {axis} stands twice in one tensor")
            axes.append(axis)
        self.at += 1
        return Tensor(f"in{number}" if number else "out", tuple(axes), dtype=dtype)

    def expression(self) -> tuple[str, tuple[Tensor, ...], Tensor]:
        """Read all of it: the operator ("*" or "+"), the inputs, the output."""
        if self.word.text == "attention":
            return "attention", self.attention(), self.result()
        inputs = [self.term(1)]
        operator = self.word.text if self.word.text in ("*", "+") else "*"
        while self.word.text == operator:
            self.at += 1
            inputs.append(self.term(len(inputs) + 1))
        if self.word.text in ("*", "+"):
            raise self.fail("an operation has products or sums, not both; write it as two operations")
        return operator, tuple(inputs), self.result()

    def attention(self) -> tuple[Tensor, ...]:
        """Read `attention(Q, K, V)`."""
        self.at += 1
        inputs = []
        for number, before in enumerate("(,,", 1):
            self.take(before, "of attention(Q, K, V)")
            inputs.append(self.term(number))
        self.take(")", "of attention(Q, K, V)")
        return tuple(inputs)

    def result(self) -> Tensor:
        """Read the arrow and what stands behind it, to the end."""
        self.take("->", "after the inputs")
        output = self.term(0)
        if self.word.text:
            raise self.fail(f"expected the end, found {self.word.text!r}")
        return output


def parse_operation(text: str) -> Op:
    """Read an operation whose tensors are written as dtype and axes.

    A product of two tensors that sums over an axis and keeps an axis that only one of them has runs on the matrix unit.
    All else (sums, products element by element, dot products, casts, reductions) runs on the vector unit: one operation
    per further input and one per addition of a reduction. `attention(Q, K, V)` is fused: it writes no scores, and every
    query sees every key.

    >>> parse_operation("bf16[B, D] * int8[D, F] -> bf16[B, F]").matmul
    True
    >>> parse_operation("fp32[N] + fp32[N] -> fp32[N]").flops({"N": 1000})
    1000.0

    Raises:
        NotationError: with a caret under what was not understood.
    """
    reader = _Reader(text)
    operator, inputs, output = reader.expression()
    if operator == "attention":
        return _attention(text, inputs, output)
    known = {axis for t in inputs for axis in t.axes}
    for axis in output.axes:
        if axis not in known:
            raise NotationError(f"axis {axis} of the output is in no input", text, text.rindex(axis))
    axes = tuple(dict.fromkeys(a for t in inputs for a in t.axes))
    contracted = tuple(a for a in axes if a not in output.axes)
    lone = any(sum(a in t.axes for t in inputs) == 1 for a in output.axes)
    if operator == "*" and contracted and lone and len(inputs) > 1:
        if len(inputs) > 2:
            raise NotationError("a product that sums over axes takes two inputs; write it as several", text, 0)
        return Einsum(name="matmul", inputs=inputs, output=output)
    per_point = len(inputs) - 1 + bool(contracted)
    return Elementwise(
        name="sum" if operator == "+" else "elementwise",
        inputs=inputs,
        output=output,
        flops_per_element=float(per_point),
        reduced=contracted,
    )


def _attention(text: str, inputs: tuple[Tensor, ...], output: Tensor) -> Attention:
    """Attention of [..., T, K, G, H] over [..., S, K, H]; G query heads share each of K key/value heads."""
    query, key, value = inputs
    at = len(key.axes) - 3
    expected = (*key.axes[:at], *query.axes[at : at + 1], key.axes[-2], *query.axes[at + 2 : -1], key.axes[-1])
    if at < 0 or key.axes != value.axes or query.axes != expected or output.axes != query.axes:
        raise NotationError(
            "expected attention(Q[B, T, K, G, H], K[B, S, K, H], V[B, S, K, H]) -> [B, T, K, G, H]: K key/value heads, "
            "G query heads of each, T queries and S keys, or one letter for both",
            text,
            0,
        )
    return Attention(
        name="attention",
        inputs=inputs,
        output=output,
        query_axis=query.axes[at],
        key_axis=key.axes[at],
        causal=False,
    )


def write_operation(op: Op) -> str:
    """Write an operation so that `parse_operation` reads it.

    >>> write_operation(parse_operation("bfloat16[B,D]*s8[D,F]->bf16[B,F]"))
    'bf16[B, D] * int8[D, F] -> bf16[B, F]'
    """
    if isinstance(op, Attention):
        return f"attention({', '.join(_write(t) for t in op.inputs)}) -> {_write(op.output)}"
    left = (" + " if op.name == "sum" else " * ").join(_write(t) for t in op.inputs)
    return f"{left} -> {_write(op.output)}"


def _write(tensor: Tensor) -> str:
    assert tensor.dtype is not None, f"{tensor} has no dtype"
    return f"{tensor.dtype.value}[{', '.join(tensor.axes)}]"
