"""Number formats by role: presets, changes of roles, and what is refused."""

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.core.tensors import Format
from meshwise.jobs import PRECISIONS, parse_precision

ROLES = ("weights", "activations", "gradients", "master", "moments", "compute")
ALL_ROLES = (*ROLES, "reductions", "second_moments", "other_compute")


@pytest.mark.parametrize(
    ("name", "formats", "state"),
    [
        # weights, activations, gradients, master, moments, compute; bytes a parameter with Adam's two moments
        ("bf16", ("bf16", "bf16", "bf16", None, "fp32", "bf16"), 2 + 2 + 8),
        ("mixed", ("bf16", "bf16", "fp32", "fp32", "fp32", "bf16"), 2 + 4 + 4 + 8),
        ("fp16", ("fp16", "fp16", "fp32", "fp32", "fp32", "fp16"), 2 + 4 + 4 + 8),
        ("fp32", ("fp32", "fp32", "fp32", None, "fp32", "fp32"), 4 + 4 + 8),
    ],
)
def test_presets(name, formats, state):
    p = parse_precision(name)
    assert p is PRECISIONS[name]
    assert tuple(d and d.value for d in (getattr(p, r) for r in ROLES)) == formats
    master = p.master.bytes if p.master else 0
    assert p.weights.bytes + p.gradients.bytes + master + 2 * p.moments.bytes == state


def test_every_preset_says_what_it_means():
    assert all(p.meaning and p.name == name for name, p in PRECISIONS.items())


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("bf16,master=fp32", {"master": DType.FP32}),
        ("mixed,gradients=bf16", {"gradients": DType.BF16, "reductions": DType.BF16}),
        ("mixed,master=none", {"master": None}),
        ("weights=bf16,compute=fp8", {"compute": DType.FP8}),
        ("bf16, act=fp8 , grads=fp32", {"activations": DType.FP8, "gradients": DType.FP32, "reductions": DType.FP32}),
        ("bf16,optimizer=bf16", {"moments": DType.BF16, "second_moments": DType.BF16}),
        ("mixed,second_moments=fp16", {"second_moments": DType.FP16}),
        ("mixed,moments=bf16,second_moments=fp32", {"moments": DType.BF16}),
        ("mixed,reductions=bf16", {"reductions": DType.BF16}),
        ("bf16,compute=fp32", {"compute": DType.FP32, "other_compute": DType.FP32}),
        ("bf16,other_compute=fp32", {"other_compute": DType.FP32}),
        ("fp8-block,moments=fp32", {"moments": DType.FP32, "second_moments": DType.FP32}),
        ("bf16,weight=int8", {"weights": DType.INT8}),
    ],
)
def test_roles_are_changed_after_the_preset(text, changed):
    base = PRECISIONS.get(text.partition(",")[0], PRECISIONS["bf16"])
    p = parse_precision(text)
    assert p.name == text
    for role in ALL_ROLES:
        assert getattr(p, role) == changed.get(role, getattr(base, role)), role


def test_what_it_prints_parses_back():
    p = parse_precision("mixed,gradients=bf16")
    assert parse_precision(p.name) == p


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bf8", r"unknown precision 'bf8'"),
        (
            "fp3",
            r"unknown precision 'fp3'\. .*Known: bf16, .*fp32, .*fp8, .*nvfp4\. Other formats .*: bf16,compute=fp8\.$",
        ),
        ("fp8,compute=bf16", r"fp8 decides compute itself, found 'compute=bf16'; leave it out"),
        ("", r"unknown precision ''"),
        ("master=fp32,bf16", r"unknown precision 'bf16'.*Roles are changed by role=dtype after the preset"),
        ("mixed,fp16", r"unknown precision 'fp16'.*Roles are changed"),
        ("bf16,wieghts=fp8", r"unknown precision role 'wieghts'\. Nearest: weights"),
        ("bf16,weights=fp9", r"unknown dtype 'fp9'"),
        ("bf16,weights=none", r"none"),
        ("bf16,gradients=", r"unknown dtype ''"),
        ("bf16,gradients=fp32,gradients=bf16", r"gradients is given twice"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises((UnknownNameError, MeshwiseError), match=words):
        parse_precision(text)


def test_names_of_four_bits_are_those_of_serving_too():
    assert parse_precision("fp4").recipe == parse_precision("NVFP4").recipe
    recipe = parse_precision("MXFP4").recipe
    assert recipe is not None
    assert recipe.weights == Format(DType.FP4, 1 / 32)
    assert not recipe.vendor
