"""What a plan asks for that cannot be executed, each refused by name and with its reason before anything runs.

Not here: what can (`forward`, `train`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshwise.core.errors import ConfigError, LayoutError, MeshwiseError
from meshwise.core.tensors import Attention, Einsum, Elementwise, Kind, Lookup, Op, Program, Route, Tensor
from meshwise.jobs import TrainingJob
from meshwise.models import Model
from meshwise.runtime.ops import find_elementwise
from meshwise.runtime.optimizer import RUNNABLE
from meshwise.runtime.params import HELD
from meshwise.runtime.pipeline import PIPELINES
from meshwise.runtime.shardings import Placement
from meshwise.sharding import Sharding
from meshwise.sharding.layout import Layout
from meshwise.sharding.remat import check_remat
from meshwise.sharding.strategy import iteration_space


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


def _runs(op: Op) -> bool:
    if isinstance(op, Elementwise):
        return type(op) is Elementwise and (find_elementwise(op.name) is not None or op.name == "top_k")
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
    if formats.recipe is not None:
        raise MeshwiseError(f"precision {job.precision!r}: narrow recipes are planned, but not yet executed; use mixed")
    for role, format_ in held.items():
        if format_ not in HELD:
            raise MeshwiseError(f"precision {job.precision!r}: {role} run in {known}, found {format_.value}")
    if {formats.compute, formats.other_compute} != {formats.activations}:
        raise MeshwiseError(f"precision {job.precision!r}: matmuls run in the format of activations; leave out compute")
    if job.optimizer_kind.name not in RUNNABLE:
        raise MeshwiseError(
            f"optimizer {job.optimizer!r} is planned, but not yet executed; use one of {', '.join(RUNNABLE)}"
        )
    if not job.tuning.full:
        raise MeshwiseError(f"fine_tune {job.fine_tune!r}: adapters are planned, but not yet executed; use full")


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
    if layout.offload:
        raise LayoutError(f"layout: offload={'+'.join(layout.offload)} is planned, but not yet executed; leave it out")
    if layout.remat_layers is not None and layout.remat_layers > model.num_layers:
        raise LayoutError(f"layout: remat_layers={layout.remat_layers} of {model.num_layers} layers; give as many")
    check_remat(layout.remat, model.train_program().blocks)


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
    split = [f"expert={layout.expert}"] if layout.expert > 1 else []
    split += [f"tensor={layout.tensor}"] if layout.tensor > 1 and not layout.expert_tensor_parallel else []
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


def check_even(program: Program, placement: Placement, sizes: Mapping[str, float]) -> None:
    """Refuse a split that is not even: arrays are not padded.

    Raises:
        LayoutError: names the tensor, its axis and the mesh axes.
    """
    strategy = placement.strategy
    for block in program:
        for op in block.ops:
            splits = iteration_space(strategy, op)
            for t in op.tensors:
                _check_tensor(t, Sharding.of(t.axes, splits), placement, sizes)
                _check_tensor(t, strategy.home(t.axes), placement, sizes)
        for t in (t for op in block.ops for t in op.inputs if t.kind is Kind.WEIGHT):
            for part in ("weights", "gradients", "optimizer"):
                _check_tensor(t, strategy.stored(t.axes, part), placement, sizes)


def _check_tensor(t: Tensor, sharding: Sharding, placement: Placement, sizes: Mapping[str, float]) -> None:
    for axis, split in zip(t.axes, sharding.splits, strict=True):
        ways = placement.ways(split)
        if axis != "C" and sizes[axis] % ways:
            over = " x ".join(f"{a}={placement.mesh.shape[a]}" for a in placement.split(split))
            raise LayoutError(
                f"layout: {over} splits {axis} = {sizes[axis]:,.0f} of {t.name} into {ways:,} parts that are not "
                f"equal; the plan pads them, execution does not: use sizes that divide {sizes[axis]:,.0f}"
            )
