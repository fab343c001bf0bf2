"""Layouts: read as users write them, printed so that they read back, and refused in words that help."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from meshwise.core.errors import LayoutError, MeshwiseError, UnknownNameError
from meshwise.sharding.layout import (
    COLLECTIVE_MATMULS,
    CONTEXT_METHODS,
    EXPERT_DISPATCHES,
    LOSSES,
    MESH_AXES,
    OFFLOADABLE,
    SCHEDULES,
    Layout,
    LayoutRequest,
    parse_layout,
)
from meshwise.sharding.remat import FURTHER_POLICIES, REMAT_POLICIES
from tests.each import each


def read(text: str, num_chips: int = 64) -> LayoutRequest:
    return parse_layout(text, num_chips=num_chips)


def random_layout(choose: random.Random) -> Layout:
    """Choices that mean nothing without the axis they are about are left as usual: they are not printed."""
    sizes = {axis: choose.choice([1, 1, 2, 3, 4]) for axis in MESH_AXES}
    use_same_weights = sizes["context"] * sizes["ulysses"] * sizes["expert"] > 1
    fully_sharded = choose.random() < 0.5 or not use_same_weights
    sequence_parallel = choose.random() < 0.5 or sizes["tensor"] == 1
    schedule = choose.choice(SCHEDULES) if sizes["stage"] > 1 else "1f1b"
    offload = tuple(choose.sample(OFFLOADABLE, choose.randrange(4)))
    remat = choose.choice([*REMAT_POLICIES, *FURTHER_POLICIES, "save:q+attention", "recompute:act"])
    return Layout(
        **sizes,
        zero=choose.randrange(3) if sizes["data"] > 1 or not fully_sharded else 0,
        fully_sharded=fully_sharded,
        sequence_parallel=sequence_parallel,
        expert_tensor_parallel=choose.random() < 0.5 or sizes["tensor"] == 1 or not sequence_parallel,
        context_method=choose.choice(CONTEXT_METHODS) if sizes["context"] > 1 else "gather",
        collective_matmul=choose.choice(COLLECTIVE_MATMULS) if sizes["tensor"] > 1 else "compiler",
        expert_dispatch=choose.choice(EXPERT_DISPATCHES),
        loss=choose.choice(LOSSES),
        schedule=schedule,
        virtual_stages=choose.randint(1, 4) if schedule == "interleaved" else 1,
        remat=remat,
        remat_layers=choose.choice([None, 1, 7]) if remat != "none" else None,
        offload=offload,
        offload_layers=choose.choice([None, 5]) if "activations" in offload else None,
        micro_batch=choose.randint(1, 9),
        num_microbatches=choose.randint(1, 9),
    )


RANDOM_LAYOUTS = [random_layout(random.Random(seed)) for seed in range(200)]  # noqa: S311 - seeds, no secrets


# Round trips.


def test_what_a_layout_prints_reads_back() -> None:
    for layout in RANDOM_LAYOUTS:
        request = parse_layout(str(layout), num_chips=layout.num_chips)
        assert Layout(**request.sizes, **request.choices) == layout, str(layout)


def test_a_layout_goes_through_json() -> None:
    for layout in RANDOM_LAYOUTS:
        wired = layout.replace(wires=tuple((axis, (size, 1)) for axis, size in layout.sizes.items()))
        for value in (layout, wired):
            assert Layout.from_json(json.loads(json.dumps(value.to_json()))) == value


def test_json_has_every_field_by_name() -> None:
    layout = Layout(data=2, fsdp=4, tensor=2, zero=1, remat="none", wires=(("fsdp", (2, 2)), ("tensor", (2,))))
    assert layout.to_json() == {
        "data": 2, "fsdp": 4, "expert": 1, "context": 1, "ulysses": 1, "tensor": 2, "stage": 1,
        "zero": 1, "fully_sharded": True, "sequence_parallel": True, "expert_tensor_parallel": True,
        "context_method": "gather", "collective_matmul": "compiler", "expert_dispatch": "auto",
        "loss": "whole",
        "schedule": "1f1b", "virtual_stages": 1,
        "remat": "none", "remat_layers": None, "offload": [], "offload_layers": None,
        "micro_batch": 1, "num_microbatches": 1,
        "wires": {"fsdp": [2, 2], "tensor": [2]},
    }  # fmt: skip


def test_json_may_leave_out_what_is_as_usual() -> None:
    assert Layout.from_json({"fsdp": 8}) == Layout(fsdp=8)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(), "data=1,micro_batch=1,num_microbatches=1,remat=full"),
        (Layout(fsdp=16, tensor=4), "fsdp=16,tensor=4,micro_batch=1,num_microbatches=1,remat=full"),
        (
            Layout(stage=2, data=4, zero=1, tensor=8, sequence_parallel=False, micro_batch=2, num_microbatches=8),
            "stage=2,data=4,tensor=8,zero=1,sequence_parallel=off,schedule=1f1b,micro_batch=2,num_microbatches=8,remat=full",
        ),
        (
            Layout(
                stage=4,
                data=2,
                expert=8,
                context=2,
                ulysses=2,
                tensor=2,
                zero=1,
                fully_sharded=False,
                expert_tensor_parallel=False,
                context_method="ring",
                collective_matmul="bidirectional",
                schedule="interleaved",
                virtual_stages=2,
                remat_layers=3,
                offload=("optimizer", "activations"),
            ),
            (
                "stage=4,data=2,expert=8,context=2,ulysses=2,tensor=2,zero=1,fully_sharded=off,expert_tensor_parallel=off,"
                "context_method=ring,collective_matmul=bidirectional,schedule=interleaved,virtual_stages=2,micro_batch=1,num_microbatches=1,remat=full,"
                "remat_layers=3,offload=optimizer+activations"
            ),
        ),
    ],
)
def test_a_layout_prints_what_it_uses_outermost_first(layout: Layout, text: str) -> None:
    assert str(layout) == text


# Derived numbers.


def test_chips_and_sequences_are_products() -> None:
    mesh = {"tensor": 7, "ulysses": 23, "context": 5, "expert": 19, "fsdp": 3, "data": 2, "stage": 11}
    layout = Layout(**mesh, micro_batch=13, num_microbatches=17)
    assert layout.num_chips == 2 * 3 * 5 * 7 * 11 * 19 * 23
    assert layout.sequences == 2 * 3 * 19 * 13 * 17  # the other axes share a sequence
    assert layout.used_axes == ("stage", "data", "fsdp", "expert", "context", "ulysses", "tensor")
    assert layout.sizes == mesh
    assert list(layout.sizes) == list(mesh)  # innermost first


def test_a_layout_is_a_value() -> None:
    layout = Layout(fsdp=4)
    assert layout.replace(fsdp=8) == Layout(fsdp=8)
    assert layout == Layout(fsdp=4)
    assert len({layout, Layout(fsdp=4)}) == 1


# Reading.


@pytest.mark.parametrize(
    ("short", "axis"),
    [
        ("dp", "data"), ("replica", "data"), ("zero3", "fsdp"), ("cp", "context"), ("ep", "expert"),
        ("expert_parallel", "expert"), ("ulysses_parallel", "ulysses"), ("tp", "tensor"), ("mp", "tensor"),
        ("model", "tensor"), ("pp", "stage"), ("pipeline", "stage"),
        ("TP", "tensor"), ("Fsdp", "fsdp"),
    ],
)  # fmt: skip
def test_usual_short_names(short: str, axis: str) -> None:
    assert read(f"{short}=2").sizes == dict.fromkeys(MESH_AXES, 1) | {axis: 2}


def test_only_choices_that_were_written_are_choices() -> None:
    assert read("fsdp=8").choices == {}
    assert read("fsdp = 8 , zero: 1, mbs=2,ga=4,sp=off,recompute=Full").choices == {
        "zero": 1, "micro_batch": 2, "num_microbatches": 4, "sequence_parallel": False, "remat": "full",
    }  # fmt: skip
    assert read("pp=4,pipeline_schedule=Interleaved,vpp=2,etp=off,fully_sharded=off,offload=optimizer").choices == {
        "schedule": "interleaved", "virtual_stages": 2, "expert_tensor_parallel": False, "fully_sharded": False,
        "offload": ("optimizer",),
    }  # fmt: skip
    assert read("offload=none").choices == {"offload": ()}


@pytest.mark.parametrize(("text", "rest"), [("fsdp=-1", 64), ("tp=4,fsdp=-1", 16), ("tp=4,pp=2,dp=2,fsdp=-1", 4)])
def test_the_rest_is_filled_in(text: str, rest: int) -> None:
    request = read(text)
    assert request.sizes["fsdp"] == rest
    assert request.num_chips == 64


def test_a_layout_may_leave_chips_idle() -> None:
    assert read("fsdp=8").num_chips == 8


# Words of errors.


@each(
    "text, words",
    [
        ("", "layout: expected name=value such as fsdp=64,tensor=4, found ''"),
        (" , ", "layout: expected name=value such as fsdp=64,tensor=4, found ' , '"),
        ("fsdp", "layout: expected name=value (such as fsdp=64 or remat=full), found 'fsdp' in 'fsdp'"),
        ("tp=2,fsdp=", "layout: expected name=value (such as fsdp=64 or remat=full), found 'fsdp=' in 'tp=2,fsdp='"),
        (
            "fsdp=8 tp=2",
            "layout: expected name=value (such as fsdp=64 or remat=full), found 'fsdp=8 tp=2' in " + "'fsdp=8 tp=2'",
        ),
        ("fsdp=two", "layout: fsdp must be a whole number, found 'fsdp=two'"),
        ("tp=2.5", "layout: tensor must be a whole number, found 'tp=2.5'"),
        ("fsdp=1e3", "layout: fsdp must be a whole number, found 'fsdp=1e3'"),
        ("fsdp=\N{ARABIC-INDIC DIGIT THREE}", "layout: fsdp must be a whole number, found 'fsdp=\u0663'"),
        ("tp=0,fsdp=-1", "layout: tensor must be at least 1, or -1 for the rest, found 'tp=0'"),
        ("fsdp=-2", "layout: fsdp must be at least 1, or -1 for the rest, found 'fsdp=-2'"),
        ("fsdp=-1,tp=-1", "layout: only one axis can be -1 (the rest), found tensor and fsdp"),
        (
            "tp=3,fsdp=-1",
            "layout: fsdp=-1 cannot fill 64 chips: the other axes multiply to 3, which does not divide 64",
        ),
        ("tp=2,tensor=4", "layout: tensor is given twice in 'tp=2,tensor=4'"),
        ("fsdp=2,zero3=2", "layout: fsdp is given twice in 'fsdp=2,zero3=2'"),
        (
            "tp=8,fsdp=16",
            (
                "layout 'tp=8,fsdp=16' needs 128 chips, the cluster has 64; lower an axis, or write -1 for one "
                "to let it take the rest"
            ),
        ),
        (
            "ep=8,dp=16",
            (
                "layout 'ep=8,dp=16' needs 128 chips, the cluster has 64; lower an axis, or write -1 for one "
                "to let it take the rest; expert is an axis of its own, not a part of data"
            ),
        ),
        (
            "vpp=2",
            (
                "layout: virtual_stages=2 is for schedule=interleaved, found 1f1b; write schedule=interleaved, or "
                "leave virtual_stages out"
            ),
        ),
        (
            "tp=2,sp=off,etp=off",
            (
                "layout: expert_tensor_parallel=off deals the positions of the residual stream to whole experts, which "
                "needs sequence_parallel=on"
            ),
        ),
        (
            "etp=2",
            (
                "layout: expert_tensor_parallel is on or off, found 'etp=2'; on splits each expert over the whole "
                "tensor axis, off leaves experts whole"
            ),
        ),
        (
            "fully_sharded=8",
            "layout: fully_sharded is on or off, found 'fully_sharded=8'; the axis of that name is fsdp",
        ),
        ("remat_layers=0", "layout: remat_layers must be a whole number of at least 1, found 0"),
        ("zero=-1", "layout: zero must be 0, 1 or 2, found -1"),
        ("dp=4,zero=3", "layout: zero must be 0, 1 or 2, found 3; ZeRO-3 is the axis fsdp (fsdp=4, not data=4)"),
        ("mbs=0", "layout: micro_batch must be a whole number of at least 1, found 0"),
        ("ga=-1", "layout: num_microbatches must be a whole number of at least 1, found -1"),
        (
            "sp=8",
            (
                "layout: sequence_parallel is on or off, found 'sp=8'; to split positions "
                "over an axis of their own use context"
            ),
        ),
    ],
)
def test_words_for_a_layout_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        read(text)
    assert str(caught.value) == words


def test_zeros_before_a_number_say_nothing():
    assert parse_layout(f"fsdp={'0' * 5000}8", num_chips=8).sizes["fsdp"] == 8


@pytest.mark.parametrize("digits", [17, 400, 5000])
@pytest.mark.parametrize("text", ["mbs={}", "fsdp={}", "fsdp=-{}", "remat=full:{}", "offload=activations:{}"])
def test_numbers_of_thousands_of_digits_are_refused(text, digits):
    with pytest.raises(LayoutError, match="must be at most 9,007,199,254,740,992, found") as caught:
        parse_layout(text.format("9" * digits), num_chips=64)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsd=4", "unknown layout axis or choice 'fsd'. Nearest: fsdp."),
        (
            "wires=3",
            (
                "unknown layout axis or choice 'wires'. Known: collective_matmul, context, context_method, data, "
                "expert, expert_dispatch, expert_tensor_parallel, fsdp, fully_sharded, loss, micro_batch, "
                "num_microbatches, offload, offload_layers, remat, remat_layers, schedule, sequence_parallel, "
                "stage, tensor, ulysses, virtual_stages, zero."
            ),
        ),
        ("cp=2,context_method=rings", "unknown context method 'rings'. Nearest: ring."),
        (
            "tp=2,collective_matmul=both",
            "unknown collective matmul 'both'. Known: bidirectional, compiler, unidirectional.",
        ),
        ("pp=2,schedule=zbv", "unknown pipeline schedule 'zbv'. Nearest: zb-v, zb-h1."),
        ("offload=optimiser", "unknown part to offload 'optimiser'. Nearest: optimizer."),
        ("remat=ful", "unknown remat policy 'ful'. Nearest: full."),
        (
            "remat=everything",
            "unknown remat policy 'everything'. Known: attention, full, matmuls, none, "  # noqa: ISC004
            "projections, recompute:..., save:..., selective.",
        ),
    ],
)
def test_words_for_names_that_do_not_exist(text: str, words: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        read(text)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"fdsp": 2}, "unknown layout field 'fdsp'. Nearest: fsdp."),
        ({"fsdp": "4"}, "layout: fsdp must be a whole number of at least 1, found '4'"),
        ({"fsdp": 2.0}, "layout: fsdp must be a whole number of at least 1, found 2.0"),
        ({"fsdp": True}, "layout: fsdp must be a whole number of at least 1, found True"),
        ({"stage": 0}, "layout: stage must be a whole number of at least 1, found 0"),
        ({"zero": True}, "layout: zero must be 0, 1 or 2, found True"),
        ({"zero": "1"}, "layout: zero must be 0, 1 or 2, found '1'"),
        ({"sequence_parallel": "off"}, "layout: sequence_parallel must be true or false, found 'off'"),
        ({"remat": None}, "layout: remat must be the name of a policy, found None"),
        ({"remat": ["full"]}, "layout: remat must be the name of a policy, found ['full']"),
        (
            {"wires": {"ring": [2]}},
            "unknown mesh axis 'ring'. Known: context, data, expert, fsdp, stage, tensor, ulysses.",
        ),
        ({"fsdp": 4, "wires": {"fsdp": [2]}}, "layout: wires of fsdp multiply to 2, but fsdp is 4"),
        ({"fsdp": 2, "wires": {"fsdp": [2.0]}}, "layout: wires of fsdp must be whole numbers of at least 1, found 2.0"),
        (
            {"fsdp": 2, "wires": {"fsdp": [-1, -2]}},
            "layout: wires of fsdp must be whole numbers of at least 1, found " + "-1, -2",
        ),
        ({"wires": {"fsdp": 2}}, "layout: wires must map a mesh axis to a list of extents, found {'fsdp': 2}"),
        ({"wires": "fsdp"}, "layout: wires must map a mesh axis to a list of extents, found 'fsdp'"),
        ([], "layout: expected a mapping of fields, found []"),
        (None, "layout: expected a mapping of fields, found None"),
    ],
)
def test_words_for_json_that_is_no_layout(value: Any, words: str) -> None:
    with pytest.raises(MeshwiseError) as caught:
        Layout.from_json(value)
    assert str(caught.value) == words
