"""The notation: what is read, what is refused and where the caret stands, and that what is printed parses back."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.dtypes import DType
from meshwise.core.errors import NotationError, ShardingError
from meshwise.sharding import Expression, Mesh, ShardedTensor, Sharding, parse_expression, parse_mesh, parse_tensor
from tests.each import each

MESH = Mesh.of(X=4, Y=8, data=2, tensor=4)


def s(*splits: str, unreduced: str = "") -> Sharding:
    return Sharding(tuple(tuple(split) for split in splits), frozenset(unreduced))


@each(
    "text, axes, sharding",
    [
        ("A[I, J]", ("I", "J"), s("", "")),
        ("A[I_X, J]", ("I", "J"), s("X", "")),
        ("A[I_XY,J]", ("I", "J"), s("XY", "")),
        ("A[I_YX, J]", ("I", "J"), s("YX", "")),
        ("A[Iₓ, J]", ("I", "J"), s("X", "")),
        ("A[Iₓᵧ, J]", ("I", "J"), s("XY", "")),
        ("A[I_{XY}, J]", ("I", "J"), s("XY", "")),
        ("A[I_{X,Y}, J]", ("I", "J"), s("XY", "")),
        ("A[I_(data,tensor), J]", ("I", "J"), Sharding((("data", "tensor"), ()))),
        ("A[I_{data, tensor}, J]", ("I", "J"), Sharding((("data", "tensor"), ()))),
        ("A[I_data, J_(X)]", ("I", "J"), Sharding((("data",), ("X",)))),
        ("A[I, J]{U_X}", ("I", "J"), s("", "", unreduced="X")),
        ("A[I_X, J] { U_YZ }", ("I", "J"), s("X", "", unreduced="YZ")),
        ("A[I, J]{Uₓ}", ("I", "J"), s("", "", unreduced="X")),
        ("A[I, J]{U_{X}}", ("I", "J"), s("", "", unreduced="X")),
        ("A[]", (), Sharding(())),
        ("[I_X]", ("I",), s("X")),
        ("bf16[1024, 4096_X]", (1024, 4096), s("", "X")),
        ("int8[4Ki, 4k_XY]", (4096, 4000), s("", "XY")),
        ("  w_up [ D_X ,F ]  ", ("D", "F"), s("X", "")),
    ],
)
def test_tensors_are_read(text, axes, sharding):
    tensor = parse_tensor(text)
    assert tensor.axes == axes
    assert tensor.sharding == sharding


def test_heads_are_names_or_dtypes_or_both():
    assert (parse_tensor("A[I]").name, parse_tensor("A[I]").dtype) == ("A", None)
    assert (parse_tensor("bf16[I]").name, parse_tensor("bf16[I]").dtype) == ("", DType.BF16)
    assert (parse_tensor("A:int8[I]").name, parse_tensor("A:int8[I]").dtype) == ("A", DType.INT8)


@pytest.mark.parametrize("times", ["*", "·", "⋅", "×", "@", ","])
@pytest.mark.parametrize("arrow", ["->", "→"])
def test_products_are_read(times, arrow):
    expression = parse_expression(f"A[I_X, J]{times} B[J, K_Y] {arrow} C[I_X, K_Y]", MESH)
    assert [t.axes for t in expression.tensors] == [("I", "J"), ("J", "K"), ("I", "K")]
    assert str(expression) == "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]"
    assert expression.format(unicode=True) == "A[Iₓ, J] · B[J, Kᵧ] → C[Iₓ, Kᵧ]"
    assert not expression.is_reshard


def test_one_input_is_a_reshard():
    assert parse_expression("A[I_X, J] -> A[I, J_X]").is_reshard
    assert parse_expression("bf16[1024, 4096_X] -> bf16[1024, 4096]").is_reshard
    assert not parse_expression("A[I, J] -> B[J, I]").is_reshard


def caret(error: NotationError) -> str:
    """What stands at the caret, as the message shows it."""
    _, text, pointer = str(error).rsplit("\n", 2)
    assert set(pointer.strip()) == {"^"}
    return text[pointer.index("^") :]


@each(
    "text, message, at",
    [
        ("A[I_X, J_X]", "mesh axis X is used twice in one tensor", "X]"),
        ("A[I_XX, J]", "mesh axis X is used twice in one tensor", "X, J]"),
        ("A[I_X]{U_X}", "mesh axis X is used twice in one tensor", "X}"),
        ("A[I_Q, J]", "unknown mesh axis Q; the mesh is X=4,Y=8,data=2,tensor=4", "Q, J]"),
        ("A[I_(data,tensr), J]", "unknown mesh axis tensr; did you mean tensor?", "tensr), J]"),
        ("A[I, Jₖ]", "unknown mesh axis K", "ₖ]"),
        ("A[I_XQ]", "unknown mesh axis Q", "Q]"),
        ("A[I, I]", "index I stands twice", "I]"),
        ("A I, J]", "expected [ and the tensor's dimensions", "I, J]"),
        ("A[I J]", "expected , or ] after a dimension", "J]"),
        ("A[I,, J]", "expected a dimension", ", J]"),
        ("A[I, ]", "expected a dimension", "]"),
        ("A[I_, J]", "expected mesh axes after _", ", J]"),
        ("A[I_(X, Y]", "expected , or ) after a mesh axis", "]"),
        ("A[I_(X", "expected , or ) after a mesh axis", ""),
        ("A[I_()]", "expected the name of a mesh axis", ")]"),
        ("A[I]{X}", "expected {U_X}", "X}"),
        ("A[I]{U}", "expected the mesh axes that are still to be summed over", "}"),
        ("A[I]{U_X", "expected } after the mesh axes", ""),
        ("A[I] junk", "expected the end", "junk"),
        ("A[4Q]", "4Q is not a size", "4Q]"),
        ("A[0]", "0 is not a size", "0]"),
        ("bf17[I]", "bf17 is not a dtype that is known", "bf17[I]"),
        ("A:bf17[I]", "unknown dtype 'bf17'. Nearest: bf16", "bf17[I]"),
        ("", "expected [", ""),
        ("A[I_ß]", "expected mesh axes after _", "ß]"),
        ("A[-4]", "expected a dimension", "-4]"),
    ],
)
def test_errors_in_tensors_point_at_the_place(text, message, at):
    with pytest.raises(NotationError, match=re.escape(message)) as caught:
        parse_tensor(text, MESH)
    assert caret(caught.value).startswith(at) if at else caret(caught.value) == ""


@pytest.mark.parametrize(
    ("text", "message", "at"),
    [
        ("A[I, J] * B[J, K] -> C[I, L]", "output index L is in no input", "L]"),
        ("A[I, J] * B[J, K]", "expected * and another tensor, or -> and the output", ""),
        ("A[I, J] + B[J, K] -> C[I, K]", "expected * and another tensor", "+ B"),
        ("A[I, J] * -> C[I, J]", "expected [", "-> C"),
        ("A[I, 64] * B[64, K] -> C[I, K]", "a product needs names for its indices, found the size 64", "64] * B"),
        ("A[I, J] -> C[I, J] -> D[I, J]", "expected the end", "-> D"),
    ],
)
def test_errors_in_expressions_point_at_the_place(text, message, at):
    with pytest.raises(NotationError, match=re.escape(message)) as caught:
        parse_expression(text)
    assert caret(caught.value).startswith(at) if at else caret(caught.value) == ""


@pytest.mark.parametrize("text", ["X=4,Y=8", "X:4, Y:8", '{"X": 4, "Y": 8}', "{'X':4,'Y':8}", " X = 4 , Y = 8 "])
def test_meshes_are_read(text):
    assert parse_mesh(text) == Mesh.of(X=4, Y=8)
    assert parse_mesh(str(parse_mesh(text))) == Mesh.of(X=4, Y=8)


@pytest.mark.parametrize(
    ("text", "message", "at"),
    [
        ("", "expected the name of a mesh axis", ""),
        ("X", "expected = and the size of mesh axis X", ""),
        ("X=", "expected the size of mesh axis X", ""),
        ("X=0", "a whole number, at least 1", "0"),
        ("X=-4", "a whole number, at least 1", "-4"),
        ("X=4.5", "expected the end", ".5"),
        ("X=nan", "a whole number", "nan"),
        ("X=4,X=8", "mesh axis X is given twice", "X=8"),
        ("X=4 Y=8", "expected the end", "Y=8"),
        ('{"X":4', "expected , or } after the size", ""),
        ('"X=4', 'expected " after the name', "=4"),
        ("4x8", "expected the name of a mesh axis", "4x8"),
        ("X=" + "9" * 5000, "a whole number", "999"),
    ],
)
def test_errors_in_meshes_point_at_the_place(text, message, at):
    with pytest.raises(NotationError, match=re.escape(message)) as caught:
        parse_mesh(text)
    assert caret(caught.value).startswith(at) if at else caret(caught.value) == ""


def test_sizes_come_by_name():
    tensor = parse_tensor("A[I_X, J, 64]")
    assert tensor.shape({"I": 16, "J": 3}) == (16, 3, 64)
    assert tensor.local_shape(Mesh.of(X=4), {"I": 16, "J": 3}) == (4, 3, 64)
    with pytest.raises(ShardingError, match="no size is known for J; set it, as in J=4096"):
        tensor.shape({"I": 16})


# What is printed parses back.

INDICES = st.sampled_from(["I", "J", "K", "D", "B", "Iq", "n2"])
NAMES = st.sampled_from(["X", "Y", "Z", "A", "data", "tensor", "tp_2", "TP", "X2", "x", "stage"])


@st.composite
def sharded_tensors(draw, indices=INDICES, sizes=True):
    axes = draw(st.lists(indices, unique=True, max_size=4))
    if sizes:
        axes = [draw(st.integers(1, 10**9)) if draw(st.booleans()) else a for a in axes]
    mesh_axes = draw(st.lists(NAMES, unique=True, max_size=5))
    places = [draw(st.integers(0, len(axes))) for _ in mesh_axes]
    splits = tuple(tuple(m for m, p in zip(mesh_axes, places, strict=True) if p == d) for d in range(len(axes)))
    pending = frozenset(m for m, p in zip(mesh_axes, places, strict=True) if p == len(axes))
    dtype = draw(st.sampled_from([None, *DType]))
    name = draw(st.sampled_from(["", "A", "w_up", "x1", "U"]))
    return ShardedTensor(tuple(axes), Sharding(splits, pending), name, dtype)


@given(sharded_tensors(), st.booleans())
def test_printed_tensors_parse_back(tensor, unicode):
    assert parse_tensor(tensor.format(unicode=unicode)) == tensor


@given(st.lists(sharded_tensors(sizes=False), min_size=1, max_size=3), st.data(), st.booleans())
def test_printed_expressions_parse_back(inputs, data, unicode):
    known = sorted({a for t in inputs for a in t.axes})
    output = data.draw(sharded_tensors(st.sampled_from(known), sizes=False)) if known else parse_tensor("C[]")
    expression = Expression(tuple(inputs), output)
    assert parse_expression(expression.format(unicode=unicode)) == expression


@given(st.text(alphabet="AIJX[]{}(),_U*->·ₓ 4:b", max_size=30))
def test_any_text_is_read_or_refused_with_a_place(text):
    for parse in (parse_tensor, parse_expression, parse_mesh):
        position = 0
        try:
            parse(text)
        except NotationError as error:
            position = error.position
        assert 0 <= position <= len(text)
