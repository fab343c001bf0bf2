"""Sharded tensors, products and meshes as written on paper: reading, with a caret under errors, and printing.

    expression = tensor { ("*" | "·" | "×" | "@" | ",") tensor } ("->" | "→") tensor ;
    tensor     = [ head ] "[" [ dimension { "," dimension } ] "]" [ pending ] ;
    head       = dtype | name [ ":" dtype ] ;              (* bf16[..], A[..], A:bf16[..] *)
    dimension  = ( name | size ) [ subscript ] ;           (* name: letters and digits; size: 4096 or 4Ki *)
    subscript  = "_" ( letters | word | list ) | marks ;   (* I_XY, I_data, I_(data,tensor), Iₓ *)
    letters    = uppercase letters, each one mesh axis ;
    word       = letters and digits, not all uppercase: one mesh axis ;
    list       = ( "(" | "{" ) axis { "," axis } ( ")" | "}" ) | "{" ( letters | word ) "}" ;
    marks      = Unicode subscript letters, each one uppercase mesh axis: ₓ is X, ᵧ is Y ;
    pending    = "{" "U" subscript "}" ;                   (* still to be summed over these mesh axes *)
    mesh       = [ "{" ] axis ("=" | ":") size { "," axis ("=" | ":") size } [ "}" ] ;   (* axes may be quoted *)

Mesh axes in a subscript stand major to minor. Spaces may stand between any two symbols.
Not here: how an einsum is computed on a mesh (`matmul`), or what it costs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from meshwise.core.dtypes import DType, parse_dtype
from meshwise.core.errors import NotationError, ShardingError, UnknownNameError
from meshwise.core.units import parse_count
from meshwise.sharding.mesh import Mesh, Sharding

#: Unicode subscript -> mesh axis. There is no subscript Y (the Greek gamma stands in, as people write it) and no Z.
SUBSCRIPTS = dict(zip("ₐₑₕⱼₖₗₘₙₒₚₛₜₓᵢᵣᵤᵥᵧ", "AEHJKLMNOPSTXIRUVY", strict=True))

_TO_SUBSCRIPT = {axis: mark for mark, axis in SUBSCRIPTS.items()}


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor with its sharding: `A[I_X, J]` or `bf16[1024, 4096_X]`.

    >>> print(ShardedTensor(("I", "J"), Sharding((("X",), ()), frozenset("Y")), name="A"))
    A[I_X, J]{U_Y}

    Args:
        axes: per dimension its index name, or its size where it has no name.
        sharding: of as many dimensions.
        name: "" when it was written without one.
        dtype: None when none was written.
    """

    axes: tuple[str | int, ...]
    sharding: Sharding
    name: str = ""
    dtype: DType | None = None

    def __str__(self) -> str:
        return self.format()

    def format(self, *, unicode: bool = False) -> str:
        """Print in ASCII, or with Unicode subscripts wherever they exist.

        >>> print(ShardedTensor(("I", "J"), Sharding((("X",), ("Z",))), name="A").format(unicode=True))
        A[Iₓ, J_Z]
        """
        head = ":".join(part for part in (self.name, self.dtype.value if self.dtype else "") if part)
        pairs = zip(self.axes, self.sharding.splits, strict=True)
        inside = ", ".join(f"{axis}{format_subscript(split, unicode=unicode)}" for axis, split in pairs)
        pending = format_subscript(sorted(self.sharding.unreduced), unicode=unicode)
        return f"{head}[{inside}]" + (f"{{U{pending}}}" if pending else "")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Global shape, with the sizes of the named indices.

        Raises:
            ShardingError: for an index without a size.
        """
        missing = [a for a in self.axes if isinstance(a, str) and a not in sizes]
        if missing:
            raise ShardingError(f"{self}: no size is known for {', '.join(missing)}; set it, as in {missing[0]}=4096")
        return tuple(a if isinstance(a, int) else sizes[a] for a in self.axes)

    def local_shape(self, mesh: Mesh, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one device's block.

        >>> ShardedTensor((1024, 4096), Sharding(((), ("X",)))).local_shape(Mesh.of(X=16), {})
        (1024, 256)
        """
        return self.sharding.local_shape(self.shape(sizes), mesh)


@dataclass(frozen=True, slots=True)
class Expression:
    """A product of sharded tensors summed over the indices that the output lacks: `A[I_X, J] * B[J, K] -> C[I_X, K]`.

    With one input and the same indices on both sides it is a plain reshard.
    """

    inputs: tuple[ShardedTensor, ...]
    output: ShardedTensor

    def __str__(self) -> str:
        return self.format()

    def format(self, *, unicode: bool = False) -> str:
        """Print in ASCII, or with Unicode subscripts, a middle dot and an arrow."""
        dot, arrow = ("·", "→") if unicode else ("*", "->")
        left = f" {dot} ".join(t.format(unicode=unicode) for t in self.inputs)
        return f"{left} {arrow} {self.output.format(unicode=unicode)}"

    @property
    def tensors(self) -> tuple[ShardedTensor, ...]:
        """Inputs, then the output."""
        return (*self.inputs, self.output)

    @property
    def is_reshard(self) -> bool:
        """Whether nothing is computed: one input, the same indices in the same order."""
        return len(self.inputs) == 1 and self.inputs[0].axes == self.output.axes


def format_subscript(mesh_axes: Iterable[str], *, unicode: bool = False) -> str:
    """Print the mesh axes that split an index, "" for none.

    >>> format_subscript(["X", "Y"]), format_subscript(["data"]), format_subscript(["data", "X"])
    ('_XY', '_data', '_(data,X)')
    """
    axes = tuple(mesh_axes)
    if not axes:
        return ""
    if unicode and all(a in _TO_SUBSCRIPT for a in axes):
        return "".join(_TO_SUBSCRIPT[a] for a in axes)
    if all(len(a) == 1 and a.isupper() for a in axes):
        return "_" + "".join(axes)
    if len(axes) == 1 and axes[0].isalnum() and not axes[0].isupper():
        return f"_{axes[0]}"
    return f"_({','.join(axes)})"


_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_AXIS = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_SIZE = re.compile(r"[0-9]+[A-Za-z]*")
_INTEGER = re.compile(r"[0-9]{1,9}(?![0-9])")
_MARKS = re.compile(f"[{''.join(SUBSCRIPTS)}]+")
_TIMES = re.compile(r"[*·⋅×@,]")
_ARROW = re.compile(r"->|→|⟶")
_CLOSING = {"(": ")", "{": "}"}

_T = TypeVar("_T")
_Placed = tuple[str, int]  # a mesh axis and where it was written


def parse_tensor(text: str, mesh: Mesh | None = None) -> ShardedTensor:
    """Read one tensor.

    >>> parse_tensor("A[I_XY, J]").sharding.splits
    (('X', 'Y'), ())
    >>> print(parse_tensor("bf16[1024, 4096ₓ]"))
    bf16[1024, 4096_X]
    >>> parse_tensor("A[I_X, J_X]")
    Traceback (most recent call last):
    ...
    meshwise.core.errors.NotationError: mesh axis X is used twice in one tensor; it can split one dimension only
        A[I_X, J_X]
                 ^

    Args:
        text: as in the grammar above.
        mesh: when given, every mesh axis must be one of its axes.

    Raises:
        NotationError: with the place.
    """
    return _parse(text, mesh, _Reader.tensor_with_places)[0]


def parse_expression(text: str, mesh: Mesh | None = None) -> Expression:
    """Read a product of tensors, or one tensor, with an arrow to the output.

    >>> e = parse_expression("A[I_X, J] · B[J, K_Y] → C[I_X, K_Y]")
    >>> print(e)
    A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]

    Raises:
        NotationError: with the place, also for an output index that no input has.
    """
    return _parse(text, mesh, _Reader.expression)


def parse_mesh(text: str) -> Mesh:
    """Read a mesh: `X=4,Y=8`, `X:4, Y:8` or `{"X": 4, "Y": 8}`, outermost axis first.

    >>> print(parse_mesh('{"data": 4, "tensor": 8}'))
    data=4,tensor=8

    Raises:
        NotationError: with the place.
    """
    return _parse(text, None, _Reader.mesh_axes)


def _parse(text: str, mesh: Mesh | None, rule: Callable[[_Reader], _T]) -> _T:
    reader = _Reader(text, mesh)
    found = rule(reader)
    reader.end()
    return found


def _letters_or_word(word: str, place: int) -> list[_Placed]:
    """The mesh axes that a word in a subscript names: each uppercase letter one, or the word as a whole."""
    if word.isupper() and word.isalpha():
        return [(letter, place + i) for i, letter in enumerate(word)]
    return [(word, place)]


class _Reader:
    """A cursor over the text; one method for each rule of the grammar."""

    def __init__(self, text: str, mesh: Mesh | None) -> None:
        self.text = text
        self.mesh = mesh
        self.at = 0

    # Rules

    def expression(self) -> Expression:
        inputs = [self.tensor_with_places()]
        while self.take(_TIMES):
            inputs.append(self.tensor_with_places())
        if not self.take(_ARROW):
            self.fail("expected * and another tensor, or -> and the output")
        output = self.tensor_with_places()
        known = {axis for tensor, _ in inputs for axis in tensor.axes}
        for axis, place in zip(output[0].axes, output[1], strict=True):
            if axis not in known:
                self.fail(f"output index {axis} is in no input; every output index must come from an input", place)
        for tensor, places in (*inputs, output) if len(inputs) > 1 else ():
            for axis, place in zip(tensor.axes, places, strict=True):
                if isinstance(axis, int):
                    self.fail(f"a product needs names for its indices, found the size {axis}", place)
        return Expression(tuple(tensor for tensor, _ in inputs), output[0])

    def tensor_with_places(self) -> tuple[ShardedTensor, list[int]]:
        """Read a tensor, and where each of its dimensions was written."""
        name, dtype = self.head()
        self.need("[", "expected [ and the tensor's dimensions, as in A[I_X, J]")
        axes: list[str | int] = []
        places: list[int] = []
        splits: list[list[_Placed]] = []
        while not self.take("]"):
            if axes:
                self.need(",", "expected , or ] after a dimension")
            place = self.skip()
            axis = self.dimension()
            if isinstance(axis, str) and axis in axes:
                self.fail(f"index {axis} stands twice in one tensor; give each dimension an index of its own", place)
            axes.append(axis)
            places.append(place)
            splits.append(self.subscript())
        pending = self.pending()
        self.check_axes([*(axis for split in splits for axis in split), *pending])
        sharding = Sharding(tuple(tuple(a for a, _ in split) for split in splits), frozenset(a for a, _ in pending))
        return ShardedTensor(tuple(axes), sharding, name, dtype), places

    def head(self) -> tuple[str, DType | None]:
        place = self.skip()
        name, named = self.take(_AXIS), bool(self.take(":"))
        after = self.skip()
        try:
            return (name, parse_dtype(self.take(_AXIS))) if named else ("", parse_dtype(name))
        except UnknownNameError as error:
            if named:
                self.fail(str(error), after)
            if re.fullmatch(r"(bf|fp|int|float|uint)\d+\w*", name):
                self.fail(f"{name} is not a dtype that is known: {', '.join(DType)}", place)
            return name, None

    def dimension(self) -> str | int:
        place = self.skip()
        if name := self.take(_NAME):
            return name
        size = self.take(_SIZE)
        if not size:
            self.fail("expected a dimension: an index such as I, or a size such as 4096")
        try:
            value = parse_count(size)
        except ValueError:
            self.fail(f"{size} is not a size; write 4096, 4k (4,000) or 4Ki (4,096)", place)
        if value != int(value):
            self.fail(f"{size} is not a whole number", place)
        return int(value)

    def subscript(self) -> list[_Placed]:
        """Read the mesh axes of a subscript, none without a subscript."""
        place = self.skip()
        if marks := self.take(_MARKS):
            return [(SUBSCRIPTS[mark], place + i) for i, mark in enumerate(marks)]
        if not self.take("_"):
            return []
        opening = self.take("(") or self.take("{")
        place = self.skip()
        if not opening:
            word = self.take(_NAME)
            if not word:
                self.fail("expected mesh axes after _, as in I_X, I_XY or I_(data,tensor)")
            return _letters_or_word(word, place)
        axes = [self.axis()]
        while self.take(","):
            axes.append(self.axis())
        self.need(_CLOSING[opening], f"expected , or {_CLOSING[opening]} after a mesh axis")
        return _letters_or_word(*axes[0]) if opening == "{" and len(axes) == 1 else axes

    def axis(self) -> _Placed:
        place = self.skip()
        name = self.take(_AXIS)
        if not name:
            self.fail("expected the name of a mesh axis")
        return name, place

    def pending(self) -> list[_Placed]:
        if not self.take("{"):
            return []
        self.need("U", "expected {U_X}: still to be summed over mesh axis X")
        axes = self.subscript()
        if not axes:
            self.fail("expected the mesh axes that are still to be summed over, as in {U_X}")
        self.need("}", "expected } after the mesh axes")
        return axes

    def mesh_axes(self) -> Mesh:
        braces = bool(self.take("{"))
        axes: list[tuple[str, int]] = []
        while not axes or self.take(","):
            quote = self.take('"') or self.take("'")
            name, place = self.axis()
            if quote:
                self.need(quote, f"expected {quote} after the name")
            if name in dict(axes):
                self.fail(f"mesh axis {name} is given twice", place)
            if not (self.take("=") or self.take(":")):
                self.fail(f"expected = and the size of mesh axis {name}, as in {name}=4")
            place = self.skip()
            size = self.take(_INTEGER)
            if not size or int(size) == 0:
                self.fail(f"expected the size of mesh axis {name}: a whole number, at least 1", place)
            axes.append((name, int(size)))
        if braces:
            self.need("}", "expected , or } after the size of a mesh axis")
        return Mesh(tuple(axes))

    # Checks and the cursor

    def check_axes(self, axes: Iterable[_Placed]) -> None:
        """Every mesh axis exists, and is used once in one tensor."""
        seen: set[str] = set()
        for name, place in axes:
            if self.mesh is not None and name not in self.mesh.sizes:
                near = difflib.get_close_matches(name, self.mesh.names, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; the mesh is {self.mesh}"
                self.fail(f"unknown mesh axis {name}{hint}", place)
            if name in seen:
                self.fail(f"mesh axis {name} is used twice in one tensor; it can split one dimension only", place)
            seen.add(name)

    def skip(self) -> int:
        """Step over spaces; where the next symbol stands."""
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return self.at

    def take(self, symbol: str | re.Pattern[str]) -> str:
        """Step over `symbol` if it is next; what was stepped over, or ""."""
        self.skip()
        pattern = re.compile(re.escape(symbol)) if isinstance(symbol, str) else symbol
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match[0]

    def need(self, symbol: str, message: str) -> None:
        if not self.take(symbol):
            self.fail(message)

    def end(self) -> None:
        if self.skip() != len(self.text):
            self.fail("expected the end")

    def fail(self, message: str, place: int | None = None) -> NoReturn:
        raise NotationError(message, self.text, self.skip() if place is None else place)
