"""A measured training run: what it did in our words, and what is predicted of its step's time or its memory.

What a row leaves open stays open in the layout, to be chosen best; what was read into it is said. Not here: reading
rows (`reading`), models and machines (`scenario`), and what all rows say together (`score`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from pydantic import ValidationError

from meshwise.core.errors import MeshwiseError, refused_value
from meshwise.costs.calibration import Calibration
from meshwise.costs.estimate import Estimate, evaluate_layout, launched_share
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import find_calibration
from meshwise.costs.makespans import PipelineShape
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.schedules import find_schedule
from meshwise.costs.spread import interval_of, relative_spread
from meshwise.hardware import Chip, Cluster
from meshwise.jobs import TrainingJob
from meshwise.models import Model
from meshwise.scoring.formats import precision_of
from meshwise.scoring.overlap import as_run
from meshwise.scoring.prediction import WRONG, Prediction, Refusal, does_not_fit, needed_bytes
from meshwise.scoring.recompute import names_origin, read_recompute
from meshwise.scoring.rows import TrainingRun, first_match, measured_bytes, measured_seconds
from meshwise.scoring.scenario import Scenario, cluster_of, model_of
from meshwise.scoring.sharing import read_sharing
from meshwise.scoring.software import UNKNOWN, calibration_of, says
from meshwise.search import Plan, complete_layout
from meshwise.sharding.layout import MESH_AXES, Layout, LayoutRequest


@dataclass(frozen=True, kw_only=True)
class TrainingScenario(Scenario):
    """A training run as it can be estimated.

    Args:
        layout: as far as the row says it.
        open: what of the layout the row does not say, and the time depends on.
        uncertainty_sources: what else it does not say: causes of `spread.SPREADS`.
    """

    run: TrainingRun
    problem: TrainingProblem
    layout: LayoutRequest
    open: tuple[str, ...]
    uncertainty_sources: tuple[str, ...] = ()

    @property
    def causes(self) -> tuple[str, ...]:
        """All causes of `spread.SPREADS` that widen its interval."""
        return (*self.open, *dict.fromkeys((*self.uncertainty_sources, *self.problem.uncertainty_sources)))

    def without_recompute(self) -> TrainingScenario:
        """The same with recomputation and offloading open, where what was looked up cannot be of this run."""
        named = ("remat", "remat_layers", "offload", "offload_layers")
        choices = {name: value for name, value in self.layout.choices.items() if name not in named}
        note = f"recompute {self.run.recompute!r} does not fit in memory, so is of another run: the fastest that fits"
        layout = replace(self.layout, choices=choices)
        return replace(self, layout=layout, assumed=(*self.assumed, note), open=(*self.open, "remat"))

    def fully_sharded(self) -> TrainingScenario:
        """The same with weights shared by all replicas, where copies cannot be meant."""
        sizes = dict(self.layout.sizes)
        sizes |= {"fsdp": sizes["fsdp"] * sizes["data"], "data": 1}
        layout = replace(self.layout, sizes=sizes, written=tuple(a for a in MESH_AXES if sizes[a] > 1))
        note = "FSDP over all replicas: copies of the weights do not fit in memory"
        return replace(self, layout=layout, assumed=(*self.assumed, note))

    def with_chunked_loss(self) -> TrainingScenario:
        """The same with a loss in chunks, where all logits at once would not fit."""
        layout = replace(self.layout, choices={**self.layout.choices, "loss": "chunked"})
        note = "the loss is computed in chunks of the sequence: all logits at once would not fit"
        return replace(self, layout=layout, assumed=(*self.assumed, note))


def build_scenario(run: TrainingRun, calibration: str = "fitted", unseen: Collection[str] = ()) -> TrainingScenario:
    """What a run did; arguments as of `predict_training`.

    Raises:
        MeshwiseError: something that it says is unknown here, or contradicts itself.
    """
    model, of_model = model_of(run)
    cluster, of_cluster = cluster_of(run)
    precision, of_precision = precision_of(run)
    try:
        job = TrainingJob(
            batch_tokens=run.tokens,
            seq_len=run.seq_len,
            batch_slack=0.0,
            precision=precision,
            expert_imbalance=1.0 if "force-balanced" in run.words else None,
            capacity_factor=_capacity(run, model),
        )
    except ValidationError as error:
        raise MeshwiseError(refused_value(error)) from None
    name, of_software = calibration_of(run, calibration, chip=cluster.chip, mixture=bool(model.mixtures), unseen=unseen)
    found = find_calibration(name, cluster.chip)
    sizes, choices, of_layout = _layout(run, model, cluster)
    choices |= {"loss": "chunked"} if says(_CHUNKED, run.words) else {}
    Layout.from_json({**sizes, **choices})  # checks every value
    settled = {*choices, *(("zero",) if sizes["data"] == 1 else ())}
    return TrainingScenario(
        run=run,
        problem=TrainingProblem(model, job, cluster, as_run(found, run) if calibration == "fitted" else found),
        layout=LayoutRequest(sizes, choices, tuple(a for a in MESH_AXES if sizes[a] > 1)),
        assumed=(*of_model, *of_cluster, *of_precision, *of_software, *of_layout),
        open=tuple(name for name in ("remat", "zero", "micro_batch") if name not in settled),
        uncertainty_sources=("unnamed",) if UNKNOWN in of_software else (),
    )


def _capacity(run: TrainingRun, model: Model) -> float | None:
    """Slots that experts are padded to over the mean, where a row says so; at least one."""
    found = re.search(r"capacity[ _-]factor\W{0,3}(\d+(?:\.\d+)?)", run.words)
    return max(float(found[1]), 1.0) if found and model.mixtures else None


def _layout(run: TrainingRun, model: Model, cluster: Cluster) -> tuple[dict[str, int], dict[str, Any], list[str]]:
    """Sizes of mesh axes, the choices that the row says, and what was assumed."""
    sizes = dict.fromkeys(MESH_AXES, 1)
    choices: dict[str, Any] = {}
    notes: list[str] = []
    tp, pp, cp, micro_batch = run.tp or 1, run.pp or 1, run.cp or 1, run.micro_batch
    dp = run.dp or run.n_chips // (tp * pp * cp)
    chip = cluster.chip
    if chip.devices_per_chip > 1 and tp * pp * cp * dp == run.n_chips * chip.devices_per_chip:
        tp, dp, micro_batch = _as_chips(run, tp, dp, chip.devices_per_chip)
        notes.append(f"its ways count devices, {chip.devices_per_chip} a chip: those of a chip are taken together")
    if tp * pp * cp * dp != run.n_chips:
        raise MeshwiseError(
            f"tp {tp} x pp {pp} x cp {cp} x dp {dp} = {tp * pp * cp * dp:,} chips, but n_chips is {run.n_chips:,}"
        )
    sizes |= {"tensor": tp, "stage": pp, "context": cp}
    _check_ways(run, model)
    replicas = _experts(run.ep or 1, dp, tp, sizes, choices)
    sizes["data"] = replicas
    read_sharing(run, chip, sizes, choices, notes)
    if not run.fsdp_or_zero_stage and chip.vendor == "google":  # as MaxText's default mesh
        copies = cluster.num_slices if replicas % cluster.num_slices == 0 else 1
        sizes |= {"data": copies, "fsdp": replicas // copies}
        choices["zero"] = 1 if copies > 1 else 0
        notes.append("FSDP over the replicas of a slice: the usual way on TPUs")
    if tp > 1:
        choices["sequence_parallel"] = run.sp is None or run.sp > 1
    if cp > 1:
        _read_context(run, chip, sizes, choices)
    if pp > 1:
        pieces = run.vpp or 1
        named = first_match(_SCHEDULES if pieces <= _MOST_FOLDED else _GPIPE, run.words)
        choices["schedule"] = named or ("interleaved" if pieces > 1 else "1f1b")
        choices["virtual_stages"] = 1 if named else pieces
    of_state = choices.get("offload", ())
    read_recompute(run, model, choices, notes)
    if of_state:
        choices["offload"] = tuple(dict.fromkeys((*of_state, *choices["offload"])))
    _microbatches(run, micro_batch, sizes, choices)
    if pp > 1 and "num_microbatches" in choices:
        shape = PipelineShape(pp, choices["num_microbatches"], choices["virtual_stages"])
        if reason := find_schedule(choices["schedule"]).why_not(shape):
            raise MeshwiseError(reason)
    if "tokendrop" in run.words:
        notes.append("tokens beyond an expert's capacity are dropped: taken as balanced")
    if re.search(r"\b(?:w/|with) mtp\b", run.words):
        notes.append("layers that predict further tokens (MTP) are not counted")
    return sizes, choices, notes


#: A source's words for the order of a pipeline's work -> schedule; others are 1F1B, interleaved where vpp says so.
_GPIPE = ((r"gpipe", "gpipe"),)
_SCHEDULES = (
    (r"dual-?pipe-?v\b", "dualpipe-v"), (r"dual-?pipe", "dualpipe"), (r"\bzb-?v|v-schedule", "zb-v"),
    (r"\bzb-?h1\b|zero[- ]?bubble", "zb-h1"), *_GPIPE,
)  # fmt: skip

#: Pieces on a stage that a row may give to schedules which fold the model; more of them are interleaved.
_MOST_FOLDED = 2

#: Words for the exchange of heads of DeepSpeed-Ulysses, and for gathers of keys and values.
_ULYSSES = r"ulysses|cp_comm_type[ =:]+a2a\b"
_GATHERED = r"all-?gather[- ](?:based )?(?:cp\b|context)|cp_comm_type[ =:]+all_?gather"


def _read_context(run: TrainingRun, chip: Chip, sizes: dict[str, int], choices: dict[str, Any]) -> None:
    """How positions are split: as the words say, else MaxText gathers keys and values, and others send them round."""
    if re.search(_ULYSSES, run.words):
        sizes |= {"ulysses": sizes["context"], "context": 1}
        return
    gathers = chip.vendor == "google" or re.search(_GATHERED, run.words) is not None
    choices["context_method"] = "gather" if gathers else "ring"


def _as_chips(run: TrainingRun, tp: int, dp: int, devices: int) -> tuple[int, int, int | None]:
    """Ways of tensor parallelism and of replicas, and the microbatch, where the devices of a chip are one.

    Replicas are taken together first: a chip then works on what its devices do.
    """
    if dp % devices:
        return tp // devices, dp, run.micro_batch
    return tp, dp // devices, run.micro_batch and run.micro_batch * devices


def _check_ways(run: TrainingRun, model: Model) -> None:
    """Refuse ways that nothing here is split in, which the layout could not hold."""
    tp = run.tp or 1
    if run.sp not in (None, 1, tp):
        raise MeshwiseError(f"sp: expected 1 or tp, which is {tp}, found {run.sp}")
    if (run.vpp or 1) > 1 and (run.pp or 1) == 1:
        raise MeshwiseError(f"vpp {run.vpp} without pipeline stages; expected 1 or a blank cell, or pp above 1")
    if (run.ep or 1) > 1 and not model.mixtures:
        raise MeshwiseError(f"ep {run.ep} of a model without experts; expected 1 or a blank cell")


def _experts(ep: int, dp: int, tp: int, sizes: dict[str, int], choices: dict[str, Any]) -> int:
    """Take expert parallelism out of dp, and out of tp, whose devices then hold whole experts.

    Megatron-LM counts devices of dp and tp alike in ep.

    Returns: the dp that is left.
    """
    if ep == 1:
        return dp
    over_data = ep // tp if ep % tp == 0 else ep
    if dp % over_data:
        raise MeshwiseError(f"ep {ep} does not divide dp x tp = {dp} x {tp} replicas")
    sizes["expert"] = over_data
    if tp > 1:
        choices["expert_tensor_parallel"] = ep % tp != 0
    return dp // over_data


def _microbatches(run: TrainingRun, micro_batch: int | None, sizes: dict[str, int], choices: dict[str, Any]) -> None:
    replicas = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    if micro_batch is None:
        if run.global_batch_seqs % replicas:
            raise MeshwiseError(f"{run.global_batch_seqs:,} sequences do not divide over {replicas:,} replicas")
        return
    number, rest = divmod(run.global_batch_seqs, replicas * micro_batch)
    if rest or not number:
        raise MeshwiseError(
            f"global_batch_seqs {run.global_batch_seqs:,} is no multiple of micro_batch {micro_batch} x "
            f"{replicas:,} replicas"
        )
    choices |= {"micro_batch": micro_batch, "num_microbatches": number}


#: Metric of memory -> the classes of an estimate that it measures.
_MEMORY_PARTS = {
    "weights_grads_optimizer_GiB": ("parameters", "master_copies", "gradients", "optimizer"),
    "activation_memory_GiB": ("activations", "logits_and_loss"),
}


@dataclass(frozen=True)
class TrainingPrediction(Prediction):
    """A training run that was predicted.

    Args:
        layout: complete: what the row left open was chosen.
    """

    scenario: TrainingScenario
    estimate: Estimate
    layout: Layout

    @cached_property
    def launched(self) -> float:
        """Share of the step in which devices wait for hosts to launch layers with experts."""
        problem = self.scenario.problem
        fabric = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
        return launched_share(problem, fabric, self.layout, self.estimate.step_time.expected)

    def spread(self, causes: Collection[str]) -> float:
        """The standard deviation of the logarithm of its time, where these are the causes (`costs.spread`)."""
        return relative_spread(self.estimate.terms, causes, self.launched)

    def seconds_under(self, calibration: Calibration) -> float:
        """As in `Prediction`; the layout stays."""
        problem = replace(self.scenario.problem, calibration=calibration)
        fabric = Fabric.of(problem.cluster, flat_rings=calibration.flat_rings)
        return float(evaluate_layout(problem, fabric, self.layout).step.expected)


def predict_training(
    run: TrainingRun, calibration: str = "fitted", unseen: Collection[str] = ()
) -> TrainingPrediction | Refusal:
    """Predict one run; a row that cannot be understood is a refusal with its reason.

    Args:
        run: the row.
        calibration: as `--calibration` takes it; "fitted" takes the software that the row names.
        unseen: sources; what only they say of software is not known then.
    """
    try:
        scenario = build_scenario(run, calibration, unseen)
        measured = measured_bytes(run) if run.is_memory else measured_seconds(run, scenario.problem.model)
        plan = _planned(scenario)
        for other in _other_readings(scenario):
            if not _overflows(_spared(scenario, plan.estimate)[0], plan.estimate):
                break
            scenario = other
            plan = _planned(scenario)
    except MeshwiseError as error:
        return Refusal(run, str(error))
    estimate, step = plan.estimate, plan.estimate.step_time
    expected, bound = step.expected, step.lower
    memory, spared = _spared(scenario, estimate)
    scenario = replace(scenario, assumed=(*scenario.assumed, *spared))
    if run.is_memory:
        parts = _MEMORY_PARTS.get(run.measured_metric, ("total",))
        expected, bound = sum(memory.get(part, 0.0) for part in parts), 0.0
    elif measured < step.lower * 0.98:
        # What does not fit has no time that could be compared.
        if _overflows(memory, estimate):
            return Refusal(run, does_not_fit(memory, estimate.hbm_capacity))
        faster = f"{measured:.4g} s a step is faster than the chips' data sheets allow"
        return Refusal(run, f"{faster}, at least {step.lower:.4g} s ({estimate.bound}); {WRONG}")
    found = TrainingPrediction(scenario, estimate, estimate.terms, memory, measured, expected, bound, None, plan.layout)
    if run.is_memory:
        return found
    return replace(found, likely=interval_of(expected, bound, found.spread(scenario.causes)))


def _planned(scenario: TrainingScenario) -> Plan:
    """The plan of a scenario, with what its row left open."""
    layout = scenario.layout
    return _plan_of(scenario.problem, tuple(layout.sizes.items()), tuple(layout.choices.items()))


@lru_cache(maxsize=64)
def _plan_of(problem: TrainingProblem, sizes: tuple[Any, ...], choices: tuple[Any, ...]) -> Plan:
    """The same; several rows tell of one run: its time, its share of the peak, its memory."""
    written = tuple(axis for axis, size in sizes if size > 1)
    return complete_layout(problem, LayoutRequest(dict(sizes), dict(choices), written), memory_share=1.0)


def _overflows(memory: Mapping[str, float], estimate: Estimate) -> bool:
    return needed_bytes(memory) > estimate.hbm_capacity


def _other_readings(scenario: TrainingScenario) -> Iterator[TrainingScenario]:
    """Other readings of a row that does not fit as it was read: it ran."""
    run = scenario.run
    if not run.is_memory and "loss" not in scenario.layout.choices:
        yield (scenario := scenario.with_chunked_loss())
    if not run.fsdp_or_zero_stage and scenario.layout.sizes["data"] > 1:
        yield scenario.fully_sharded()
    if names_origin(run.recompute) and "remat" in scenario.layout.choices:  # looked up elsewhere than the measurement
        yield scenario.without_recompute()


#: A row's words for a loss in chunks.
_CHUNKED = (
    r"chunked (?:loss|cross|ce\b)|(?:loss|cross[- ]entropy|logits) in chunks|(?:cut|linear) cross[- ]entropy|liger"
)


def _spared(scenario: TrainingScenario, estimate: Estimate) -> tuple[Mapping[str, float], tuple[str, ...]]:
    """Memory without what software spares where a run that ran would not fit; what it is."""
    memory, notes = dict(estimate.memory), list[str]()
    if scenario.run.is_memory:
        return memory, ()
    compiled, precision = scenario.problem.calibration.compiled, scenario.problem.job.formats
    if compiled and precision.master is not None and _overflows(memory, estimate):
        _spare(memory, "parameters", 0.0)
        notes.append("weights are cast from the master copy as they are read: no copy in 16 bits is stored")
    if not compiled and estimate.memory.get("gathered_weights") and _overflows(memory, estimate):
        _spare(memory, "gathered_weights", memory["gathered_weights"] / 2)
        notes.append("one layer's weights or its gradients are whole at a time, not both")
    return (memory, tuple(notes)) if not _overflows(memory, estimate) else (estimate.memory, ())


def _spare(memory: dict[str, float], name: str, left: float) -> None:
    memory["total"] -= memory[name] - left
    memory[name] = left
