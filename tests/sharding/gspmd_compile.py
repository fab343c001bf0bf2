"""Compiles an einsum with GSPMD on eight fake CPU devices and says what XLA inserted.

In: {"mesh": [["X", 2], ...], "equation": "ij,jk->ik", "shapes": [...], "inputs": [splits...], "output": splits}
Out: {"inputs": [local shapes], "output": local shape, "dots": [shapes of their results],
      "collectives": [{"kind", "shapes", "groups" | "pairs"}]}
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
COLLECTIVE = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(?:-start)?\((.*)$", re.MULTILINE)
GROUPS = re.compile(r"replica_groups=(.*?)(?:, (?:dimensions|use_global_device_ids|to_apply|metadata)=|$)")
DOT = re.compile(r"= [a-z]\w*\[([\d,]*)\]\S* dot\(")
SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")


def compile_case(case):
    names = tuple(name for name, _ in case["mesh"])
    mesh = jax.make_mesh(tuple(size for _, size in case["mesh"]), names, axis_types=(AxisType.Auto,) * len(names))

    def sharding(splits):
        return NamedSharding(mesh, PartitionSpec(*(tuple(split) or None for split in splits)))

    def compute(*arrays):
        return jnp.einsum(case["equation"], *arrays)

    inputs = [sharding(splits) for splits in case["inputs"]]
    output = sharding(case["output"])
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case["shapes"]]
    compiled = jax.jit(compute, in_shardings=inputs, out_shardings=output).lower(*arguments).compile()
    text = compiled.as_text()
    (entry,) = re.findall(r"entry_computation_layout=\{\((.*)\)->(.*?)\}(?:, |$)", text.splitlines()[0])
    return {
        "inputs": [shape(found) for found in SHAPE.findall(entry[0])],
        "output": shape(SHAPE.search(entry[1])[1]),
        "dots": [shape(found) for found in DOT.findall(text)],
        "collectives": [collective(*found) for found in COLLECTIVE.findall(text)],
    }


def shape(text):
    return [int(n) for n in text.split(",") if n]


def collective(result, kind, rest):
    found = {"kind": kind, "shapes": [shape(s) for s in SHAPE.findall(result)]}
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?\})\}", rest)[1]
        found["pairs"] = [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)]
    else:
        found["groups"] = groups(GROUPS.search(rest)[1])
    return found


def groups(text):
    """Read the three ways in which XLA prints groups of devices."""
    if text.startswith("{"):  # {{0,1},{2,3}}
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]
    if text.startswith("mesh["):
        return mesh_groups(text)
    size, devices = text.split("<=")  # [4,2]<=[2,4]T(1,0)
    return numbered(devices).reshape(shape(size.strip("[]"))).tolist()


def mesh_groups(text):
    """Read `mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a','b':(2)2}`: the last is the middle of b cut 2 x 2 x 1."""
    chosen = [re.fullmatch(r"'(\w+)'(?::\((\d+)\)(\d+))?", c) for c in re.fullmatch(r".*\{(.*)\}", text)[1].split(",")]
    parts = {match[1]: match for match in chosen}
    assert len(parts) == len(chosen), f"two parts of one axis: {text}"
    sizes, place = [], {}
    for name, digits in re.findall(r"'(\w+)'=(\d+)", text[: text.index("]")]):
        size = int(digits)
        major = int(parts[name][2] or 1) if name in parts else 1
        middle = int(parts[name][3] or size) if name in parts else size
        place[name] = len(sizes) + 1
        sizes += [major, middle, size // (major * middle)]
    order = re.search(r"device_ids=\((.*)\) \{", text)
    devices = numbered(order[1]) if order else np.arange(math.prod(sizes))
    grid = np.moveaxis(devices.reshape(sizes), [place[name] for name in parts], range(-len(parts), 0))
    return grid.reshape(-1, math.prod(sizes[place[name]] for name in parts)).tolist()


def numbered(text):
    """Devices in the order of `[2,4]T(1,0)`: counted in the shape, then transposed."""
    sizes, _, order = text.partition("T")
    grid = np.arange(math.prod(shape(sizes.strip("[]")))).reshape(shape(sizes.strip("[]")))
    return grid.transpose(shape(order.strip("()"))).reshape(-1) if order else grid.reshape(-1)
