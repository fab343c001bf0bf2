"""Parameters as abstract arrays with named axes: one description gives shapes, formats, shardings and initial values.

Layers are run in as few loops as possible (runs of equal layers, and periods of runs that repeat), and the weights of a
run are stacked. Not here: optimizer state (`optimizer`), checkpoints.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Block, Einsum, Lookup, Program, Tensor
from meshwise.jobs.fine_tuning import RANK, is_adapter
from meshwise.jobs.precision import is_projection
from meshwise.models.numerics import Numerics
from meshwise.runtime.scaled import Scaled, scaled_weight
from meshwise.runtime.shardings import Placement
from meshwise.runtime.watched import Frozen, Watched
from meshwise.sharding import Sharding


def dtype_of(format_: DType) -> Any:
    """JAX's dtype, of a format of `refusals.HELD`."""
    return {DType.FP32: jnp.float32, DType.BF16: jnp.bfloat16}[format_]


#: Layers of a period that may be written out; longer ones are compiled as loops, once each kind.
_WRITTEN_OUT = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Equal layers one after another.

    Args:
        block: whose operations they run.
        count: of layers.
        key: under which their weights are held.
        remat: whether they follow the layout's remat policy, else they keep everything.
    """

    block: str
    count: int
    key: str = ""
    remat: bool = True


@dataclass(frozen=True, slots=True)
class Segment:
    """Runs that are repeated `times` in this order."""

    runs: tuple[Run, ...]
    times: int = 1

    def stack(self, run: Run) -> tuple[int, ...]:
        """Sizes of the leading dimensions that stack a run's weights: over times, and within a run."""
        return tuple(n for n in (self.times, run.count) if n > 1)

    def numbers(self, run: Run) -> jax.Array:
        """Number of each layer of a run, stacked as they are."""
        return jnp.arange(self.times * run.count, dtype=jnp.int32).reshape(self.stack(run))


def plan_segments(order: Sequence[str], remat_layers: int | None = None, *, keeps: bool = False) -> tuple[Segment, ...]:
    """Write the order of layers as segments.

    >>> for s in plan_segments(["local", "local", "global"] * 3 + ["local"]):
    ...     print(s.times, [(r.block, r.count, r.key) for r in s.runs])
    3 [('local', 2, 'local.0'), ('global', 1, 'global')]
    1 [('local', 1, 'local.1')]

    Args:
        order: block of each layer.
        remat_layers: how many layers, from the first, follow the remat policy; None for all.
        keeps: whether what these make is kept for the backward pass, as it is of all others.
    """
    at = len(order) if remat_layers is None else remat_layers
    parts = [(list(order[:at]), True), (list(order[at:]), False)]
    found = [segment for part, remat in parts for segment in _segments(part, remat)]
    return _with_keys([_written_out(s) if keeps or not s.runs[0].remat else s for s in found])


def _segments(order: list[str], remat: bool) -> list[Segment]:
    """Find the period that leaves the fewest runs to write out."""
    if not order:
        return []
    best = [Segment(_runs(order, remat))]
    for period in range(2, len(order) // 2 + 1):
        times = next((n for n in range(len(order) // period, 1, -1) if order[: n * period] == order[:period] * n), 1)
        if times == 1:
            continue
        rest = order[times * period :]
        found = [Segment(_runs(order[:period], remat), times), *([Segment(_runs(rest, remat))] if rest else [])]
        if sum(len(s.runs) for s in found) < sum(len(s.runs) for s in best):
            best = found
    return best


def _written_out(segment: Segment) -> Segment:
    """Short periods layer by layer: of a loop in a loop, what the inner one stacks is copied by the outer one.

    Only where much is kept: what several layers compute again a compiler may hold all at once.
    """
    if segment.times == 1 or sum(run.count for run in segment.runs) > _WRITTEN_OUT:
        return segment
    return replace(segment, runs=tuple(replace(r, count=1) for r in segment.runs for _ in range(r.count)))


def _runs(order: list[str], remat: bool) -> tuple[Run, ...]:
    return tuple(Run(block, len(list(same)), remat=remat) for block, same in groupby(order))


def _with_keys(segments: list[Segment]) -> tuple[Segment, ...]:
    """Name each run by its block, numbered where a block has several."""
    blocks = [run.block for s in segments for run in s.runs]
    seen: dict[str, int] = {}

    def named(run: Run) -> Run:
        index = seen.setdefault(run.block, 0)
        seen[run.block] += 1
        return replace(run, key=run.block if blocks.count(run.block) == 1 else f"{run.block}.{index}")

    return tuple(replace(s, runs=tuple(named(r) for r in s.runs)) for s in segments)


def watch(weights: Any, parameters: Any, placement: Placement, dtype: Any) -> Any:
    """Put sinks of this format beside weights whose gradients have another format or shape, or turns; mark frozen."""

    def one(parameter: Parameter, w: Any) -> Any:
        if parameter.tensor.frozen:
            return Frozen(w)
        shape = parameter.sum_shape(placement)
        alike = not isinstance(w, Scaled) and (w.shape, w.dtype) == (shape, dtype) and not placement.in_turn
        return w if alike else Watched(w, jnp.zeros(shape, dtype))

    return jax.tree.map(one, parameters, weights)


#: Key of a run or block -> name of a weight -> what is held for it.
Tree = dict[str, dict[str, Any]]


def trained(parameters: Mapping[str, Mapping[str, Parameter]]) -> dict[str, dict[str, Parameter]]:
    """The weights that are trained; runs without any are left out."""
    found = {key: {n: p for n, p in run.items() if not p.tensor.frozen} for key, run in parameters.items()}
    return {key: run for key, run in found.items() if run}


def those_of(tree: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]) -> Tree:
    """What a tree holds for the weights of another tree."""
    return {key: {name: tree[key][name] for name in run} for key, run in other.items()}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight, of one layer or of a stack of equal layers.

    Args:
        tensor: of the program, with its axes.
        stack: sizes of the leading dimensions that number layers.
        staged: whether the first of these numbers stages of a pipeline, which hold their own.
        dealt: whether the second numbers the pieces of a stage, to which stages are dealt layers in turn.
        shape: of all, stack first.
        scale: standard deviation of the initial values; 0 for constants.
        constant: initial value where `scale` is 0.
        summed: of a layer's projections, the dimensions that products sum over, stack not counted.
    """

    tensor: Tensor
    stack: tuple[int, ...]
    shape: tuple[int, ...]
    scale: float
    constant: float = 0.0
    staged: bool = False
    dealt: bool = False
    summed: tuple[int, ...] = ()

    def abstract(self, placement: Placement, part: str, dtype: Any) -> jax.ShapeDtypeStruct:
        """The array that holds it, without values."""
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=self.named(placement, part))

    def abstract_scaled(self, placement: Placement, dtype: Any) -> Scaled:
        """The same of a stored weight in a narrow format, each layer with a scale of its own."""
        layers = len(self.stack)
        held = Sharding(self.stacked_sharding(placement, "weights").splits[:layers])
        scale = jax.ShapeDtypeStruct(self.stack, jnp.float32, sharding=placement.named(held))
        return Scaled(self.abstract(placement, "weights", dtype), scale)

    def stacked_sharding(self, placement: Placement, part: str) -> Sharding:
        """How it is stored: part "weights", "gradients" or "optimizer" of the rule tables, layers numbered in front."""
        stack = tuple(("stage",) if self.staged and place == 0 else () for place in range(len(self.stack)))
        own = placement.strategy.stored(self.tensor.axes, part)
        return Sharding((*stack, *(own if part == "weights" else self._over_stages(own, placement)).splits))

    def _over_stages(self, own: Sharding, placement: Placement) -> Sharding:
        """Split what stages share over them, too, along a dimension that no replicas split."""
        if self.staged or "stage" not in placement.axes:
            return own
        sizes, optimizer = self.shape[len(self.stack) :], placement.strategy.stored(self.tensor.axes, "optimizer")
        for place, (size, axes) in enumerate(zip(sizes, optimizer.splits, strict=True)):
            if {*placement.split(axes)} <= {"tensor"} and size % (placement.ways((*axes, "stage"))) == 0:
                return Sharding((*own.splits[:place], (*axes, "stage"), *own.splits[place + 1 :]))
        return own

    def named(self, placement: Placement, part: str, lead: tuple[str, ...] = ()) -> NamedSharding:
        """JAX's sharding of the array that holds it; `lead` are mesh axes of dimensions in front."""
        spec = placement.spec(self.stacked_sharding(placement, part))
        return NamedSharding(placement.mesh, PartitionSpec(*lead, *spec))

    def hold(self, x: jax.Array, placement: Placement, part: str, lead: tuple[str, ...] = ()) -> jax.Array:
        """Keep an array of its shape (weights, gradients, state) where `part` says."""
        return jax.lax.with_sharding_constraint(x, self.named(placement, part, lead))

    def gathered(self, x: jax.Array, placement: Placement) -> jax.Array:
        """Bring a new value from where the optimizer's state is to where weights are stored.

        Over stages first, which the slowest wires join: they carry a part then. XLA takes either order.
        """
        own = placement.strategy.stored(self.tensor.axes, "optimizer")
        held = Sharding((*self.stacked_sharding(placement, "optimizer").splits[: len(self.stack)], *own.splits))
        x = jax.lax.with_sharding_constraint(x, placement.named(held))
        return self.hold(x, placement, "weights")

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix or a table, not the scale of a norm or a bias."""
        return self.scale > 0 or is_adapter(self.tensor)

    # Its gradient while it is added up: what devices have of their own is numbered behind the layers

    def pending(self, placement: Placement) -> tuple[str, ...]:
        """Mesh axes over which its gradient is reduced once a step."""
        return placement.pending(placement.reduced(self.tensor.axes))

    def sum_shape(self, placement: Placement) -> tuple[int, ...]:
        """Shape of the array that adds it up."""
        pending, layers = self.pending(placement), len(self.stack)
        return (*self.stack, *[placement.ways(pending)] * bool(pending), *self.shape[layers:])

    def sum_sharding(self, placement: Placement) -> Sharding:
        """How that array is split, but for what is numbered."""
        layers = self.stacked_sharding(placement, placement.reduces).splits[: len(self.stack)]
        return Sharding((*layers, *self._over_stages(placement.reduced(self.tensor.axes), placement).splits))

    def sum_spec(self, placement: Placement) -> PartitionSpec:
        """How that array is split."""
        whole, layers = self.sum_sharding(placement), len(self.stack)
        own = placement.sum_spec(Sharding(whole.splits[layers:]))
        return PartitionSpec(*placement.spec(Sharding(whole.splits[:layers])), *own)

    def hold_sum(self, x: jax.Array, placement: Placement, lead: tuple[str, ...] = ()) -> jax.Array:
        """Keep that array where it is added up; `lead` as in `named`."""
        spec = PartitionSpec(*lead, *self.sum_spec(replace(placement, outside=placement.outside | {*lead})))
        return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, spec))


def describe_parameters(
    program: Program, segments: tuple[Segment, ...], numerics: Numerics, pipeline: tuple[int, ...] = ()
) -> dict[str, dict[str, Parameter]]:
    """Describe every weight of a program, by run and name; tied ones once, where they are counted.

    Args:
        program: of the model.
        segments: of its layers; in a pipeline those of one piece.
        numerics: of the model.
        pipeline: stages, and pieces of each where there are several; empty for none.
    """
    layers = {run.key: (run.block, (*pipeline, *segment.stack(run))) for segment in segments for run in segment.runs}
    blocks, sizes = {block.name: block for block in program}, program.sizes
    run = {name for name, _ in layers.values()}
    others = {b.name: (b.name, () if b.repeat == 1 else (b.repeat,)) for b in program if b.name not in run}

    def one(t: Tensor, key: str, block: Block, stack: tuple[int, ...]) -> Parameter:
        shape = (*stack, *(int(sizes[a]) for a in t.axes))
        scale, constant = _initial(t, block, sizes, numerics)
        staged, summed = key in layers and pipeline != (), _summed(t, block)
        dealt = staged and len(pipeline) > 1
        return Parameter(t, stack, shape, scale, constant, staged=staged, dealt=dealt, summed=summed)

    return {
        key: {t.name: one(t, key, blocks[name], stack) for t in blocks[name].weights}
        for key, (name, stack) in (others | layers).items()
        if blocks[name].weights
    }


def _initial(t: Tensor, block: Block, sizes: Mapping[str, float], numerics: Numerics) -> tuple[float, float]:
    """Standard deviation of the initial values, and their constant where that is 0."""
    reader = next((op for op in block.ops if any(i.name == t.name for i in op.inputs)), None)
    if is_adapter(t) and RANK in (reader.contracted if reader else ()):
        return 0.0, 0.0  # so that an adapter begins as none (Hu et al. 2021, 4.1)
    if isinstance(reader, Einsum):
        return 1 / math.sqrt(math.prod(sizes[a] for a in t.axes if a in reader.contracted) or 1), 0.0
    if isinstance(reader, Lookup):
        return 0.02, 0.0
    is_norm = reader is not None and reader.name.startswith("norm.") and not t.name.endswith(".bias")
    return 0.0, 1.0 - numerics.norm_offset if is_norm else 0.0


def _summed(t: Tensor, block: Block) -> tuple[int, ...]:
    """Dimensions of a layer's projection that its product sums over; none of other weights."""
    readers = [op for op in block.ops if is_projection(op) and any(i.name == t.name for i in op.inputs)]
    if block.role != "layer" or len(readers) != 1:
        return ()
    return tuple(place for place, axis in enumerate(t.axes) if axis not in readers[0].output.axes)


#: Kind of the host's memory that devices read from and write to by themselves.
HOST = "pinned_host"


def _in_host(a: Any) -> bool:
    return bool(a.sharding.memory_kind == HOST)


def cast(tree: Any, abstract: Any) -> Any:
    """Arrays in the formats of a tree of abstract ones, each where it is held; of the host's memory one by one."""

    def one(tree: Any, abstract: Any) -> Any:
        def made(w: jax.Array, a: Any) -> Any:
            return in_format(jax.device_put(w, jax.memory.Space.Device), a)

        held = jax.tree.map(lambda a: a.sharding, abstract)
        return jax.jit(lambda tree: jax.tree.map(made, tree, abstract), out_shardings=held)(tree)

    return jax.tree.map(one, tree, abstract) if any(map(_in_host, jax.tree.leaves(tree))) else one(tree, abstract)


def in_format(wide: jax.Array, abstract: Any) -> Any:
    """A weight in the format of an abstract one, narrow or not."""
    if isinstance(abstract, Scaled):
        return scaled_weight(wide, len(abstract.scale.shape), abstract.value.dtype)
    return wide.astype(abstract.dtype)


def zeros(abstract: Any) -> Any:
    """Arrays of zeros for a tree of abstract ones, each where it is held: in the host's memory not by way of a chip."""

    def put(a: jax.ShapeDtypeStruct) -> jax.Array:
        own = a.sharding.shard_shape(a.shape)
        return jax.make_array_from_callback(a.shape, a.sharding, lambda _: np.zeros(own, a.dtype))

    leaves, structure = jax.tree.flatten(abstract)
    here = [a for a in leaves if not _in_host(a)]
    held = [a.sharding for a in here]
    made = iter(jax.jit(lambda: [jnp.zeros(a.shape, a.dtype) for a in here], out_shardings=held)())
    return jax.tree.unflatten(structure, [put(a) if _in_host(a) else next(made) for a in leaves])


def initial_values(parameters: Mapping[str, Mapping[str, Parameter]], seed: int, abstract: Tree) -> Tree:
    """Draw initial values: normal by the width that is summed over, ones in norms, zeros in biases.

    They depend on seed and names alone, not on devices. Each weight is drawn where it is held, by a program that all of
    one shape share: one program of all weights takes seconds to compile.

    Args:
        parameters: by run and name.
        seed: of the random numbers.
        abstract: shapes, formats and shardings.
    """

    def draw(path: str, parameter: Parameter, held: jax.ShapeDtypeStruct) -> jax.Array:
        if parameter.scale == 0:
            constant = np.broadcast_to(np.asarray(parameter.constant, held.dtype), held.shape)
            return jax.make_array_from_callback(held.shape, held.sharding, lambda index: constant[index])
        own = np.asarray(jax.random.key_data(jax.random.fold_in(key_of_seed, zlib.crc32(path.encode()))))
        return _drawing(held.shape, held.dtype, held.sharding, parameter.dealt)(own, np.float32(parameter.scale))

    key_of_seed = jax.random.key(seed)
    return {
        key: {name: draw(f"{key}/{name}", p, abstract[key][name]) for name, p in run.items()}
        for key, run in parameters.items()
    }


@lru_cache(maxsize=256)
def _drawing(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, dealt: bool) -> Any:
    """Jitted: (data of a key, standard deviation) -> normal values, of layers in their order, `dealt` or not."""
    drawn = (shape[1], shape[0], *shape[2:]) if dealt else shape

    def draw(key: jax.Array, scale: jax.Array) -> jax.Array:
        values = (jax.random.normal(jax.random.wrap_key_data(key), drawn, jnp.float32) * scale).astype(dtype)
        return jnp.swapaxes(values, 0, 1) if dealt else values

    return jax.jit(draw, out_shardings=sharding)


#: Run -> its block, its layers among those of the block in the order in which they are stacked, and the stack's sizes.
Order = dict[str, dict[str, Any]]


def layer_order(
    segments: Sequence[Segment], parameters: Mapping[str, Mapping[str, Parameter]], stages: int = 1, pieces: int = 1
) -> Order:
    """The layers that each run of a program holds, as JSON values; blocks that are no layers hold number 0.

    Args:
        segments: of its layers; in a pipeline those of one piece.
        parameters: by run and name.
        stages, pieces: of a pipeline, and of each of its stages.
    """
    found: dict[str, tuple[str, dict[tuple[int, int], list[int]]]] = {}
    seen: dict[str, int] = {}
    for place in [(stage, piece) for piece in range(pieces) for stage in range(stages)]:
        for segment in segments:
            for run in [r for _ in range(segment.times) for r in segment.runs for _ in range(r.count)]:
                numbers = found.setdefault(run.key, (run.block, {}))[1]
                numbers.setdefault(place, []).append(seen.setdefault(run.block, 0))
                seen[run.block] += 1
    order: Order = {}
    for key, weights in parameters.items():
        stack = list(next(iter(weights.values())).stack)
        block, places = found.get(key, (key, {(0, 0): list(range(int(np.prod(stack, dtype=int))))}))
        layers = [n for place in sorted(places) for n in places[place]]
        order[key] = {"block": block, "layers": layers, "stack": stack}
    return order


def by_layer(
    tree: Mapping[str, Mapping[str, Any]], order: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str, int], Any]:
    """Weights apart: (block, name, number of the layer) -> array, or the parts of one in a narrow format."""
    found = {}
    for key, weights in tree.items():
        old = order[key]

        def each(array: Any, old: Mapping[str, Any] = old) -> np.ndarray:
            return np.asarray(array).reshape(len(old["layers"]), *np.shape(array)[len(old["stack"]) :])

        for name, held in weights.items():
            parts = jax.tree.map(each, held)
            for place, n in enumerate(old["layers"]):
                found[old["block"], name, n] = jax.tree.map(itemgetter(place), parts)
    return found
