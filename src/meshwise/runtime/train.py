"""The training step of a plan: gradients over microbatches and one update, everything where the plan says.

Not here: the forward pass (`layers`), a loop over steps or data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Route
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.own_program import LOOPED_BY, keeps_products, writes_layers_out
from meshwise.jobs import TrainingJob, with_adapters
from meshwise.models import Model
from meshwise.models.numerics import read_numerics
from meshwise.runtime.devices import make_mesh
from meshwise.runtime.gradients import Accumulation
from meshwise.runtime.layers import Arrays, Stack
from meshwise.runtime.offloaded import Streams, held_away
from meshwise.runtime.ops import Surroundings
from meshwise.runtime.optimizer import Hyperparameters, clipped, update
from meshwise.runtime.overlap import profiled_options, step_options
from meshwise.runtime.params import (
    Order,
    Parameter,
    Tree,
    cast,
    describe_parameters,
    dtype_of,
    in_format,
    initial_values,
    layer_order,
    plan_segments,
    those_of,
    trained,
    zeros,
)
from meshwise.runtime.pipeline import piece_order
from meshwise.runtime.refusals import (
    RUNNABLE,
    check_dispatch,
    check_documents,
    check_even,
    check_job,
    check_layout,
    check_model,
    check_narrow_layout,
)
from meshwise.runtime.scaled import Narrowing
from meshwise.runtime.shardings import Placement
from meshwise.runtime.watched import mapped, together
from meshwise.runtime.zigzag import Zigzag
from meshwise.sharding import Sharding
from meshwise.sharding.layout import Layout
from meshwise.sharding.remat import remat_policy

#: Weights, a master copy where there is one, moments by name, and the number of steps taken.
State = dict[str, Any]
Batch = Mapping[str, jax.Array]
#: Mesh axes, besides `data`, whose devices hold whole weights and gradients where a layout is not fully sharded.
_WHOLE = ("context", "ulysses", "expert")


@dataclass(frozen=True)
class TrainStep:
    """A compiled or compilable training step.

    Args:
        stack: the model as it is executed.
        parameters: by run and name.
        job, layout: of the plan.
        constants: of the optimizer.
        documents: whether sequences hold several.
    """

    stack: Stack
    parameters: Mapping[str, Mapping[str, Parameter]]
    job: TrainingJob
    layout: Layout
    constants: Hyperparameters
    documents: bool = False

    @property
    def mesh(self) -> Mesh:
        """Devices, in a grid of those mesh axes of the layout that have more than one, outermost first."""
        return self.stack.placement.mesh

    @cached_property
    def trained(self) -> Mapping[str, Mapping[str, Parameter]]:
        """The parameters that are not frozen: those with gradients, moments and a master copy."""
        return trained(self.parameters)

    @property
    def layer_order(self) -> Order:
        """The layers that each run of the program holds, as JSON values."""
        return layer_order(self.stack.segments, self.parameters, self.layout.stage, self.layout.virtual_stages)

    @cached_property
    def abstract_state(self) -> State:
        """Shapes, formats and shardings of the training state.

        Keys: "weights" (run -> name -> array), "master" likewise where the precision has one, "moments" (name of the
        moment -> run -> name -> array), "step" (int32). Frozen weights are among the first alone.
        """
        formats = self.job.formats
        state: State = {"step": jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole)}
        state["weights"] = self._abstract_weights
        if formats.master is not None:
            state["master"] = self._abstract(self.trained, "optimizer", formats.master)
        state["moments"] = {
            name: self._abstract(
                self.trained, "optimizer", formats.second_moments if name == "variance" else formats.moments
            )
            for name in self._moments
        }
        return state

    @cached_property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a step's batch: "tokens" and "labels", int32 [microbatches, sequences of one, seq_len].

        Where sequences hold several documents, "documents" is of the same shape: the position with which that of each
        token begins.
        """
        layout = self.layout
        shape = (layout.num_microbatches, layout.sequences // layout.num_microbatches, int(self.job.seq_len))
        splits = self.stack.placement.strategy.splits(("B", "T"), sequence=False)
        sharding = self.stack.placement.named(Sharding.of(("B", "T"), splits), stack=1)
        names = ("tokens", "labels", "documents") if self.documents else ("tokens", "labels")
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in names}

    @cached_property
    def jitted(self) -> Any:
        """The step, jitted: (state, batch) -> (state, metrics), the state donated.

        Metrics: "loss", and "gradient_norm" where it is clipped.
        """
        state, batch = (jax.tree.map(lambda a: a.sharding, t) for t in (self.abstract_state, self.abstract_batch))
        metrics = dict.fromkeys(("loss",) if self.constants.clip is None else ("loss", "gradient_norm"), self._whole)
        return jax.jit(
            self._step,
            in_shardings=(state, batch),
            out_shardings=(state, metrics),
            donate_argnums=0,
            keep_unused=True,  # weights that only their update writes would be held beside the new ones
        )

    @cached_property
    def loss(self) -> Any:
        """Jitted: (weights, batch) -> mean loss."""
        weights = jax.tree.map(lambda a: a.sharding, self.abstract_state["weights"])
        batch = jax.tree.map(lambda a: a.sharding, self.abstract_batch)
        return jax.jit(lambda weights, batch: self._gradients(weights, batch)[0], in_shardings=(weights, batch))

    @cached_property
    def gradients(self) -> Any:
        """Jitted: (weights, batch) -> (mean loss, its gradients as accumulated and reduced for the optimizer)."""
        weights = jax.tree.map(lambda a: a.sharding, self.abstract_state["weights"])
        batch = jax.tree.map(lambda a: a.sharding, self.abstract_batch)
        return jax.jit(self._gradients, in_shardings=(weights, batch))

    def initial_state(self, seed: int) -> State:
        """Draw a training state, each array where it is stored; the same for every layout.

        Args:
            seed: of the random numbers.
        """
        abstract = self.abstract_state
        state: State = {"step": zeros(abstract["step"]), "moments": zeros(abstract["moments"])}
        if "master" in abstract:
            state["master"] = initial_values(self.trained, seed, abstract["master"])
            own = cast(state["master"], those_of(abstract["weights"], self.trained))
        else:
            own = initial_values(self.trained, seed, those_of(abstract["weights"], self.trained))
        frozen = {key: {n: p for n, p in run.items() if p.tensor.frozen} for key, run in self.parameters.items()}
        state["weights"] = together(own, initial_values(frozen, seed, abstract["weights"]))
        return state

    @property
    def compiler_options(self) -> dict[str, bool | int]:
        """Options with which it is to be compiled: `step.jitted.lower(...).compile(step.compiler_options)`."""
        return step_options(self.stack.placement.platform, self.layout, ragged=self._ragged)

    @property
    def profiled_options(self) -> dict[str, bool | int]:
        """Options for where the compiler is told how long everything takes besides; none where that is of no use."""
        return profiled_options(self.stack.placement.platform, self.layout, ragged=self._ragged)

    @property
    def _ragged(self) -> bool:
        routed = any(isinstance(op, Route) for block in self.stack.program for op in block.ops)
        return routed and self.stack.around.expert_dispatch == "ragged"

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def _moments(self) -> tuple[str, ...]:
        return RUNNABLE[self.constants.name]

    def _abstract(self, parameters: Mapping[str, Mapping[str, Parameter]], part: str, format_: DType) -> Tree:
        placement, dtype = self.stack.placement, dtype_of(format_)
        found = jax.tree.map(lambda p: p.abstract(placement, part, dtype), parameters)
        return jax.tree.map(held_away, found) if part == "optimizer" and self._streams else found

    @property
    def stores_narrow(self) -> bool:
        """Whether some weights are stored in a narrow format, made of their master copies."""
        return self.stack.around.narrowing is not None and self.stack.around.narrowing.weights is not None

    @property
    def _abstract_weights(self) -> Tree:
        """Those that products read in a narrow format are stored in it."""
        placement, narrowing = self.stack.placement, self.stack.around.narrowing
        dtype = dtype_of(self.job.formats.weights)

        def one(p: Parameter) -> Any:
            if narrowing is not None and narrowing.weights is not None and p.tensor.dtype is narrowing.weights:
                return p.abstract_scaled(placement, narrowing.operands)
            return p.abstract(placement, "weights", dtype)

        return jax.tree.map(one, self.parameters)

    @property
    def _streams(self) -> bool:
        """Whether the optimizer's state is in the host's memory."""
        return "optimizer" in self.layout.offload

    @property
    def _tokens(self) -> int:
        """Of a step."""
        return int(self.layout.sequences * self.job.seq_len)

    def _sums(self, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        """The mean loss, and gradients of the sum."""
        formats = dtype_of(self.job.formats.gradients), dtype_of(self.job.formats.reductions)
        loss, gradients = Accumulation(self.stack, self.parameters, self.layout, *formats).accumulate(weights, batch)
        return loss / self._tokens, gradients

    def _gradients(self, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        loss, gradients = self._sums(weights, batch)
        return loss, jax.tree.map(lambda g: g / self._tokens, gradients)

    def _step(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        loss, gradients = (self._sums if self.constants.clip is None else self._gradients)(state["weights"], batch)
        metrics = {"loss": loss}
        if self.constants.clip is not None:
            with jax.named_scope("clip"):
                gradients, metrics["gradient_norm"] = clipped(gradients, self.constants.clip)
        step, weights = state["step"] + 1, those_of(state["weights"], self.trained)
        kept = {name: state["moments"][name] for name in self._moments}
        if "master" in state:
            kept["master"] = state["master"]
        with jax.named_scope("update"):
            found, made = (self._update_away if self._streams else self._update)(step, weights, gradients, kept)
        new = {"step": step, "weights": together(state["weights"], found)}
        if "master" in state:
            new["master"] = made.pop("master")
        return new | {"moments": made}, metrics

    def _update(
        self, step: jax.Array, weights: Tree, gradients: Tree, kept: Mapping[str, Tree]
    ) -> tuple[Tree, dict[str, Tree]]:
        """New weights, and what is kept of each by name: moments, and a master copy where there is one."""

        def one(parameter: Parameter, weight: Any, gradient: jax.Array, *old: jax.Array) -> Any:
            """Update a parameter where its optimizer state is, and bring the new weight to where weights are stored."""
            held = partial(parameter.hold, placement=self.stack.placement, part="optimizer")
            named = dict(zip(kept, old, strict=True))
            new, made = self._updated(step, parameter, mapped(weight, held), held(gradient), named)
            stored = mapped(mapped(new, held), partial(parameter.gathered, placement=self.stack.placement))
            return {name: held(value) for name, value in made.items()} | {"weights": stored}

        made = jax.tree.map(one, self.trained, weights, gradients, *kept.values())
        return _part(made, "weights"), {name: _part(made, name) for name in kept}

    def _update_away(
        self, step: jax.Array, weights: Tree, gradients: Tree, kept: Mapping[str, Tree]
    ) -> tuple[Tree, dict[str, Tree]]:
        """The same where what is kept is in the host's memory."""
        placement = self.stack.placement

        def held(tree: Tree) -> Tree:
            return jax.tree.map(lambda p, x: p.hold(x, placement, "optimizer"), self.trained, tree)

        away = jax.tree.map(lambda _, *own: dict(zip(kept, own, strict=True)), self.trained, *kept.values())
        streams = Streams(self.trained, placement, partial(self._updated, step))
        new, away = streams.run(held(weights), held(gradients), away)
        stored = jax.tree.map(lambda p, w: p.gathered(p.hold(w, placement, "optimizer"), placement), self.trained, new)
        return stored, {name: _part(away, name) for name in kept}

    def _updated(
        self, step: jax.Array, parameter: Parameter, weight: Any, gradient: jax.Array, kept: Arrays
    ) -> tuple[Any, dict[str, jax.Array]]:
        """One weight, or a piece of it, and what is kept of it, each in its format."""
        moments, constants = {n: kept[n] for n in self._moments}, self.constants.of(is_matrix=parameter.is_matrix)
        master = kept.get("master", weight)
        if self.constants.clip is None:  # else it has been done; here compilers join it to what follows, looped or not
            gradient = gradient / self._tokens
        new, changed = update(constants, master, gradient, moments, step)
        made = {
            name: value.astype(kept[name].dtype) for name, value in (changed | {"master": new}).items() if name in kept
        }
        return in_format(new, weight), made


def _part(made: Mapping[str, Mapping[str, Mapping[str, Any]]], name: str) -> Tree:
    """Of each weight what has this name."""
    return {key: {own: found[name] for own, found in run.items()} for key, run in made.items()}


def train_step(
    model: Model,
    layout: Layout,
    job: TrainingJob,
    devices: Sequence[Any],
    constants: Hyperparameters | None = None,
    *,
    documents: bool = False,
) -> TrainStep:
    """Make the training step of a plan.

    Args:
        model, layout, job: of the plan.
        devices: as many as the layout has chips, in the order of its mesh (`layout.used_axes`, last axis fastest);
            they may be of a topology that is only compiled for.
        constants: of the optimizer, whose name is the job's.
        documents: whether sequences hold several, which do not see each other.

    Raises:
        ConfigError: for a model that is not executed, by name.
        LayoutError: for a choice or an uneven split that is not executed, or another number of devices.
        MeshwiseError: for a precision or optimizer that is not executed.
    """
    check_model(model)
    check_job(job)
    check_layout(layout, model)
    check_narrow_layout(layout, model, job)
    numerics = read_numerics(model)
    mesh = make_mesh({a: layout.sizes[a] for a in layout.used_axes} or {"data": 1}, devices)
    at_once = layout.num_microbatches == 1 and layout.stage == 1
    once = () if at_once or layout.fully_sharded or layout.zero >= 2 else _WHOLE
    reduces = "optimizer" if at_once else "gradients"
    placement = Placement(mesh, LayoutChoices.of(layout).strategy, reduces=reduces, once=once)
    program = with_adapters(model.train_program(), job.tuning)
    if documents:
        check_documents(program)
    sizes = program.bind(batch=layout.sequences // layout.num_microbatches, queries=job.seq_len)
    check_even(program, placement, sizes)
    check_dispatch(layout, job, {d.platform for d in mesh.devices.flat})
    order, remat_layers, pieces = numerics.order, layout.remat_layers, layout.stage * layout.virtual_stages
    if layout.stage > 1:
        order = piece_order(order, layout)
        remat_layers = None if remat_layers is None else remat_layers // pieces
    policy = remat_policy(layout.remat)
    segments = plan_segments(order, remat_layers, keeps=keeps_products(model.train_program(), policy))
    around = Surroundings(
        numerics,
        activations=dtype_of(job.formats.activations),
        sizes=program.sizes,
        capacity=job.capacity_factor,
        collective_matmul=layout.collective_matmul,
        expert_dispatch=layout.dispatch(dropless=job.capacity_factor is None, grouped=placement.has_grouped_products),
        loss=layout.loss,
        zigzag=Zigzag.of(program, placement, int(job.seq_len)),
        adapter_scale=job.tuning.scale,
        narrowing=Narrowing.of(program, job.formats),
    )
    unroll = not _looped(layout, placement) and writes_layers_out(model.train_program(), policy)
    away = "activations" in layout.offload
    stack = Stack(program, around, segments, placement, policy, unroll=unroll, away=away)
    named = replace(constants or Hyperparameters(), name=job.optimizer_kind.name)
    stacked = tuple(n for n in (layout.stage, layout.virtual_stages) if n > 1) if layout.stage > 1 else ()
    parameters = describe_parameters((around.narrowing or stack).program, segments, numerics, stacked)
    return TrainStep(stack, parameters, job, layout, named, documents)


def _looped(layout: Layout, placement: Placement) -> bool:
    """Whether layers stay in loops: of those written out, many would come back from the host's memory at once."""
    sizes = any(getattr(layout, size) > 1 for size in LOOPED_BY)
    return sizes or not placement.is_nvidia or "activations" in layout.offload
