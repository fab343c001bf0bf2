"""What can be executed of a plan, and the refusal of the rest by name, with its reason, before anything runs.

It loads no JAX, so that plans can be made for this runtime where JAX is not. Not here: how it is executed (`forward`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError, LayoutError, MeshwiseError
from meshwise.core.tensors import Attention, Einsum, Elementwise, Kind, Lookup, Op, Program, Route, Tensor
from meshwise.jobs import TrainingJob
from meshwise.jobs.precision import PRECISIONS
from meshwise.models import Model
from meshwise.sharding import Sharding
from meshwise.sharding.layout import Layout
from meshwise.sharding.remat import check_remat
from meshwise.sharding.serving import ServingLayout
from meshwise.sharding.strategy import Strategy, iteration_space

if TYPE_CHECKING:
    from meshwise.runtime.shardings import Placement

#: Schedules that run.
PIPELINES = ("gpipe", "1f1b", "interleaved")

#: What of a layout's `offload` runs.
OFFLOADED = ("optimizer", "activations")

#: Formats in which arrays are held and multiplied.
HELD = (DType.FP32, DType.BF16)

#: Precisions with a recipe that run.
RECIPES = ("fp8-current", "int8")

#: Optimizers that run -> names of the moments that they keep.
RUNNABLE: dict[str, tuple[str, ...]] = {
    "adamw": ("mean", "variance"),
    "lion": ("mean",),
    "momentum": ("mean",),
    "sgd": (),
}

#: Elementwise functions that run -> names of the operations that each computes; those that end in "." are beginnings,
#: those that begin with it ends.
ELEMENTWISE: dict[str, tuple[str, ...]] = {
    "act": ("act", "shared.act", "expert.act"),
    "add": ("shared.add", "residual", "residual.attn", "residual.mlp", "add.positions", "bias."),
    "join": (".add",),
    "product": ("expert.weigh", "weigh", "weigh."),
    "norm": ("norm.",),
    "rope": ("rope.q", "rope.k"),
    "weigh": ("shared.scale",),
    "sinks": ("sinks",),
    "embedding_scale": ("scale",),
    "logits_scale": ("scale.logits",),
    "loss": ("loss",),
}


def elementwise_of(name: str) -> str | None:
    """The function that computes an elementwise operation of this name; None where none does."""
    for function, names in ELEMENTWISE.items():
        beginnings, ends = (tuple(n for n in names if n[place] == ".") for place in (-1, 0))
        if name in names or name.startswith(beginnings) or name.endswith(ends):
            return function
    return None


def check_model(model: Model) -> None:
    """Refuse a model with an operation that is not executed.

    Raises:
        ConfigError: names the operation.
    """
    if model.spec.encoder is not None:
        raise ConfigError(f"model {model.name}: encoder-decoders are planned, but not yet executed")
    if model.passed_along:
        names = ", ".join(t.name for t in model.passed_along)
        raise ConfigError(f"model {model.name}: layers that read {names} besides the stream are not yet executed")
    for block in model.train_program():
        for op in block.ops:
            if not _runs(op):
                raise ConfigError(
                    f"model {model.name}: operation {op.name!r} of block {block.name!r} ({type(op).__name__}) is "
                    "planned, but not yet executed"
                )


def check_narrow(model: Model) -> None:
    """Refuse a model whose projections are not executed in narrow formats.

    Raises:
        ConfigError: it has routed experts.
    """
    if any(isinstance(op, Route) for block in model.train_program() for op in block.ops):
        raise ConfigError(
            f"model {model.name}: experts' weights in int8 or fp8 are planned, but not yet executed; leave out "
            "--quantization"
        )


def _runs(op: Op) -> bool:
    if isinstance(op, Elementwise):
        return type(op) is Elementwise and (elementwise_of(op.name) is not None or op.name == "top_k")
    return type(op) in (Einsum, Attention, Lookup, Route)


def check_job(job: TrainingJob) -> None:
    """Refuse formats, optimizers and fine-tuning that are not executed.

    Raises:
        MeshwiseError: names the field.
    """
    formats = job.formats
    roles = ("weights", "activations", "gradients", "reductions", "master", "moments", "second_moments")
    held = {role: getattr(formats, role) or formats.moments for role in roles}  # without a master copy, none is held
    known = ", ".join(f.value for f in HELD)
    _check_recipe(job)
    for role, format_ in held.items():
        if format_ not in HELD:
            raise MeshwiseError(f"precision {job.precision!r}: {role} run in {known}, found {format_.value}")
    narrow = () if formats.recipe is None else (formats.recipe.activations.dtype,)
    if formats.other_compute is not formats.activations or formats.compute not in (*narrow, formats.activations):
        raise MeshwiseError(f"precision {job.precision!r}: matmuls run in the format of activations; leave out compute")
    if job.optimizer_kind.name not in RUNNABLE:
        raise MeshwiseError(
            f"optimizer {job.optimizer!r} is planned, but not yet executed; use one of {', '.join(RUNNABLE)}"
        )
    if job.tuning.stored is not None:
        raise MeshwiseError(
            f"fine_tune {job.fine_tune!r}: frozen weights in {job.tuning.storage} are planned, but not yet executed; "
            "use lora"
        )


def _check_recipe(job: TrainingJob) -> None:
    recipe = job.formats.recipe
    if recipe is None:
        return
    if recipe not in (PRECISIONS[name].recipe for name in RECIPES):
        raise MeshwiseError(
            f"precision {job.precision!r}: this narrow recipe is planned, but not yet executed; use one of "
            f"{', '.join(RECIPES)}, or mixed"
        )
    if recipe.weights is not None and job.formats.master is None:
        raise MeshwiseError(
            f"precision {job.precision!r}: weights that are stored in {recipe.weights.dtype.value} are updated by a "
            "master copy; leave out master=none"
        )


def check_narrow_products(model: Model, job: TrainingJob) -> None:
    """Refuse a model whose products are not trained in the narrow format of the job's recipe.

    Raises:
        ConfigError: it has routed experts.
    """
    if job.formats.recipe is not None and any(isinstance(op, Route) for b in model.train_program() for op in b.ops):
        raise ConfigError(
            f"model {model.name}: experts in the narrow formats of precision {job.precision} are planned, but not yet "
            "executed; use mixed"
        )


#: Tokens of a page of an engine's cache.
PAGE_TOKENS = 16

#: Mesh axes that an engine's layout may have.
SERVED = ("tensor", "cache", "expert")


def check_served(layout: ServingLayout, model: Model) -> None:
    """Refuse a serving layout that the engine does not execute, or that the model has no experts for.

    Raises:
        LayoutError: names the axis, or the choice.
    """
    for axis, size in layout.sizes.items():
        if size > 1 and axis not in SERVED:
            raise LayoutError(
                f"serve: {axis}={size} is planned, but not yet executed by the engine, which splits over "
                f"{', '.join(SERVED)}"
            )
    if layout.expert > 1 and not model.mixtures:
        raise LayoutError(
            f"serve: expert={layout.expert} shares out experts, and {model.name} has none; for engines that work apart "
            f"give --replicas {layout.expert}"
        )
    if layout.cache > 1 and layout.cache_split != "sequence":
        raise LayoutError(
            f"serve: cache={layout.cache},cache_split={layout.cache_split} is planned, but not yet executed by the "
            "engine; write cache_split=sequence"
        )


def check_layout(layout: Layout, model: Model) -> None:
    """Refuse choices of a layout that are not executed.

    Raises:
        LayoutError: names the choice.
        UnknownNameError: for operations of a remat policy that no layer has.
    """
    if layout.stage > 1 and layout.schedule not in PIPELINES:
        known = ", ".join(PIPELINES)
        raise LayoutError(f"layout: schedule={layout.schedule} is planned, but not yet executed; use one of {known}")
    if layout.stage > 1 and layout.remat_layers is not None:
        pieces = layout.stage * layout.virtual_stages
        if layout.remat_layers % pieces:
            raise LayoutError(
                f"layout: remat_layers={layout.remat_layers} of {pieces} pieces that run in step; use a multiple"
            )
    refused = [part for part in layout.offload if part not in OFFLOADED]
    if refused:
        raise LayoutError(f"layout: offload={'+'.join(refused)} is planned, but not yet executed; leave it out")
    if layout.offload_layers is not None:
        raise LayoutError(
            f"layout: offload=activations:{layout.offload_layers} is planned, but not yet executed; write "
            "offload=activations, of all layers"
        )
    if "activations" in layout.offload and layout.stage > 1:
        raise LayoutError(
            f"layout: offload=activations with stage={layout.stage} is planned, but not yet executed; leave one out"
        )
    if layout.remat_layers is not None and layout.remat_layers > model.num_layers:
        raise LayoutError(f"layout: remat_layers={layout.remat_layers} of {model.num_layers} layers; give as many")
    check_remat(layout.remat, model.train_program().blocks)


def check_narrow_layout(layout: Layout, model: Model, job: TrainingJob) -> None:
    """Refuse narrow operands of experts, those that go round while others are multiplied, and stored ones in pieces.

    Raises:
        ConfigError: names the model.
        LayoutError: names the choice.
    """
    check_narrow_products(model, job)
    if job.formats.recipe is not None and job.formats.recipe.weights is not None and "optimizer" in layout.offload:
        raise LayoutError(
            f"layout: offload=optimizer with precision {job.precision} is planned, but not yet "
            "executed: a stored weight has one scale, and is updated in pieces; leave it out"
        )
    if job.formats.recipe is not None and layout.tensor > 1 and layout.collective_matmul != "compiler":
        raise LayoutError(
            f"layout: collective_matmul={layout.collective_matmul} with precision {job.precision} is planned, but not "
            "yet executed; write collective_matmul=compiler"
        )


def check_dispatch(layout: Layout, job: TrainingJob, platforms: Collection[str]) -> None:
    """Refuse a ragged dispatch where it has no meaning or no primitive.

    Args:
        layout, job: of the plan.
        platforms: of the devices, as JAX names them.

    Raises:
        LayoutError: names the choice.
    """
    if layout.expert_dispatch != "ragged":
        return
    if job.capacity_factor is not None:
        raise LayoutError(
            f"layout: expert_dispatch=ragged drops no tokens, and capacity_factor={job.capacity_factor:g} does; leave "
            "one of them out"
        )
    split = [f"{axis}={layout.sizes[axis]}" for axis in layout.expert_axes]
    if len(split) > 1:
        raise LayoutError(
            "layout: expert_dispatch=ragged sends along one mesh axis, and experts are split over "
            f"{' and '.join(split)}; write expert_tensor_parallel=on, or expert_dispatch=slots"
        )
    if split and "cpu" in platforms:
        raise LayoutError(
            f"layout: expert_dispatch=ragged with {split[0]} needs the ragged AllToAll, which this platform (cpu) "
            "lacks; write expert_dispatch=slots"
        )


def check_documents(program: Program) -> None:
    """Refuse several documents in a sequence where queries see keys behind them: what is kept apart is what is before.

    Raises:
        ConfigError: names the attention.
    """
    found = next((op for block in program for op in block.ops if isinstance(op, Attention) and not op.causal), None)
    if found is not None:
        raise ConfigError(
            f"documents: {found.name} is not causal, so that documents of one sequence cannot be kept apart; train on "
            "sequences of one document each"
        )


def check_even(program: Program, placement: Placement, sizes: Mapping[str, float]) -> None:
    """Refuse a split that is not even: arrays are not padded.

    Raises:
        LayoutError: names the tensor, its axis and the mesh axes.
    """
    for t, axis, split in splits_of(program, placement.strategy):
        ways = placement.ways(split)
        if sizes[axis] % ways:
            over = " x ".join(f"{a}={placement.mesh.shape[a]}" for a in placement.split(split))
            raise LayoutError(
                f"layout: {over} splits {axis} = {sizes[axis]:,.0f} of {t.name} into {ways:,} parts that are not "
                f"equal; the plan pads them, execution does not: use sizes that divide {sizes[axis]:,.0f}"
            )


def splits_of(program: Program, strategy: Strategy) -> Iterator[tuple[Tensor, str, tuple[str, ...]]]:
    """Axes that are split somewhere in a program, and over which mesh axes; not slots of experts, which are padded."""
    yield from splits_at_work(program, strategy)
    for part in ("weights", "gradients", "optimizer"):
        yield from splits_in_store(program, strategy, part)


def splits_at_work(program: Program, strategy: Strategy) -> Iterator[tuple[Tensor, str, tuple[str, ...]]]:
    """The same of what operations read and make; of tensors with the same axes that are split alike, of the first."""
    seen = set[object]()
    for op in (op for block in program for op in block.ops):
        splits = iteration_space(strategy, op)
        own = tuple(splits.items())
        for t in op.tensors:
            if (t.axes, own) not in seen:
                seen.add((t.axes, own))
                yield from _split_axes(t, Sharding.of(t.axes, splits))
                yield from _split_axes(t, strategy.home(t.axes))


def splits_in_store(program: Program, strategy: Strategy, part: str) -> Iterator[tuple[Tensor, str, tuple[str, ...]]]:
    """The same of a part of the training state."""
    weights = (t for block in program for op in block.ops for t in op.inputs if t.kind is Kind.WEIGHT)
    for t in {t.axes: t for t in weights}.values():
        yield from _split_axes(t, strategy.stored(t.axes, part))


def _split_axes(t: Tensor, sharding: Sharding) -> Iterator[tuple[Tensor, str, tuple[str, ...]]]:
    for axis, split in zip(t.axes, sharding.splits, strict=True):
        if split and axis != "C":
            yield t, axis, split
