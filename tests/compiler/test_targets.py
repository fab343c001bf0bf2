"""What the compilers are told of clusters, and where devices stand in a mesh."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from meshwise.compiler.placement import device_mesh, place_devices
from meshwise.compiler.targets import Target
from meshwise.core.errors import CompilerError
from meshwise.costs.fabric import Fabric
from meshwise.hardware import parse_cluster
from meshwise.sharding.layout import Layout


@pytest.mark.parametrize(
    ("cluster", "platform", "topology", "options", "number"),
    [
        ("v5p:4x4x4", "tpu", "v5p:4x4x4", {}, 64),
        ("v5p-128", "tpu", "v5p:4x4x4", {}, 64),
        ("v5e:4x8", "tpu", "v5e:4x8", {}, 32),
        ("v6e:16x16", "tpu", "v6e:16x16", {}, 256),
        ("v5p:2x2x2*2", "tpu", "v5p:2x2x2", {"num_slices": 2}, 16),
        ("v5e:1", "tpu", "v5e:1x1", {"chips_per_host_bounds": [1, 1, 1]}, 1),
        ("v6e:1x2", "tpu", "v6e:1x2", {"chips_per_host_bounds": [1, 2, 1]}, 2),
        ("v5p:1x1x1", "tpu", "v5p:1x1x1", {"chips_per_host_bounds": [1, 1, 1]}, 1),
    ],
)
def test_tpu_slices(cluster, platform, topology, options, number):
    target = Target.of(parse_cluster(cluster))
    assert (target.platform, target.topology, target.options, target.num_devices) == (
        platform,
        topology,
        options,
        number,
    )


@pytest.mark.parametrize(
    ("cluster", "topology", "major", "memory"),
    [
        ("h100:64", "1x8x8", 9, 80),
        ("b200:64", "1x8x8", 10, 180),
        ("a100-80gb:16", "1x2x8", 8, 80),
        ("h100:4", "1x1x4", 9, 80),
        ("gb200-nvl72:144", "2x18x4", 10, 185),
    ],
)
def test_gpus_are_described_from_the_catalog(cluster, topology, major, memory):
    parsed = parse_cluster(cluster)
    target = Target.of(parsed)
    assert target.options["topology"] == topology
    text = target.options["target_config"]
    assert f"major: {major} " in text
    (said,) = [int(line.split(":")[1]) for line in text.splitlines() if "device_memory_size" in line]
    assert said == parsed.chip.hbm_usable
    assert memory * 1e9 <= said < 1.15 * memory * 1e9


@pytest.mark.parametrize(
    ("cluster", "why"),
    [
        ("tpu7x:2x2x1", "two devices"),
        ("v4:4x4x4", "two devices"),
        ("mi300x:8", "AMD"),
        ("l40s:8", "not described"),
        ("v5p:4x4x8_twisted", "twisted"),
        ("h100:24", None),
    ],
)
def test_chips_that_no_compiler_knows_are_refused_with_the_reason(cluster, why):
    if why is None:
        assert Target.of(parse_cluster(cluster)).options["topology"] == "1x3x8"
    else:
        with pytest.raises(CompilerError, match=why):
            Target.of(parse_cluster(cluster))


def test_a_part_of_a_cluster_is_a_target_of_its_own():
    cluster = parse_cluster("v5e:16x16")
    whole = Fabric.of(cluster)
    part = replace(whole, dimensions=tuple(replace(d, size=s) for d, s in zip(whole.dimensions, (4, 8), strict=True)))
    assert Target.of(cluster, part).name == "v5e:4x8"


@dataclass(frozen=True)
class Device:
    id: int
    coords: tuple[int, ...] = ()
    slice_index: int = 0
    platform: str = "tpu"


def torus(x, y, slices=1):
    return [Device(n, (n % x, n // x % y, 0), n // (x * y)) for n in range(x * y * slices)]


def test_mesh_axes_lie_as_the_wires_say():
    layout = Layout(fsdp=4, tensor=4, wires=(("tensor", (4, 1)), ("fsdp", (1, 4))))
    placed = place_devices(torus(4, 4)[::-1], layout)
    assert placed.shape == (4, 4)  # fsdp, tensor
    assert [d.coords[:2] for d in placed[1]] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    turned = layout.replace(wires=(("tensor", (1, 4)), ("fsdp", (4, 1))))
    assert [d.coords[:2] for d in place_devices(torus(4, 4), turned)[1]] == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_an_axis_may_lie_on_several_dimensions_and_share_one():
    layout = Layout(fsdp=8, tensor=2, wires=(("tensor", (2, 1)), ("fsdp", (2, 4))))
    placed = place_devices(torus(4, 4), layout)
    assert placed.shape == (8, 2)
    for f, t in np.ndindex(8, 2):  # tensor innermost on x, fsdp's inner factor next to it, its outer factor on y
        assert placed[f, t].coords[:2] == (t + 2 * (f % 2), f // 2)


def test_slices_are_outermost_and_known_to_the_mesh():
    layout = Layout(data=2, fsdp=4, tensor=2, wires=(("tensor", (2, 1, 1)), ("fsdp", (1, 4, 1)), ("data", (1, 1, 2))))
    placed = place_devices(torus(2, 4, slices=2), layout)
    mesh = device_mesh(placed, layout)
    assert placed.shape == (2, 4, 2)
    assert mesh.sizes == {"data": 2, "fsdp": 4, "tensor": 2}
    assert mesh.slice_axes == ("data",)


def test_gpus_are_ordered_by_number():
    layout = Layout(fsdp=2, tensor=8, wires=(("tensor", (8, 1)), ("fsdp", (1, 2))))
    placed = place_devices([Device(n, (0, n // 8, n % 8), platform="cuda") for n in range(16)], layout)
    assert [d.id for d in placed[1]] == list(range(8, 16))


@pytest.mark.parametrize(("layout", "why"), [(Layout(fsdp=16), "wires"), (Layout(wires=()), "16 devices")])
def test_devices_that_cannot_be_placed(layout, why):
    with pytest.raises(CompilerError, match=why):
        place_devices(torus(4, 4), layout)
