"""Whether a model fits on a cluster at all: how many requests, how long, how large microbatches, by format and split.

Memory alone, by the accounting of estimates. Not here: what is fast (`planner`), and words (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.core.errors import MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.costs.engines import engine_chunk
from meshwise.costs.problem import ServingProblem, TrainingProblem, readable_context
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.memory import LONGEST, engine_memory, longest_context, most
from meshwise.hardware import Cluster
from meshwise.models import Model
from meshwise.search.completed import check_request, search_layout, training_limits
from meshwise.search.plan import Plan
from meshwise.search.serving.space import EngineLimits
from meshwise.sharding.layout import MESH_AXES, LayoutRequest
from meshwise.sharding.serving import ServingLayout, parse_serving_layout

#: Where a search for the most of something ends.
_MOST_REQUESTS, _MOST_SEQUENCES = 1 << 20, 1 << 12


@dataclass(frozen=True, slots=True)
class ServingFit:
    """What fits on engines of one layout.

    Args:
        precision: its name.
        layout: of one engine.
        engines: how many of them the cluster holds.
        weights: bytes on the fullest chip.
        requests: of the asked context, at once on one engine; 0 where the weights and one are too much.
        context: tokens of the longest single request that fits, no more than the model reads; 0 where none does.
    """

    precision: str
    layout: ServingLayout
    engines: int
    weights: float
    requests: int
    context: int


@dataclass(frozen=True, slots=True)
class TrainingFit:
    """What fits of training in one way.

    Args:
        precision, fine_tune: names, as a job has them.
        plan: the leanest of that split: microbatches of one sequence, everything recomputed.
        state: bytes on the fullest chip that do not depend on the batch.
        micro_batch: most sequences of the asked length in a microbatch; 0 where one does not fit.
        context: tokens of the longest single sequence that fits, no more than the model reads; 0 where none does.
    """

    precision: str
    fine_tune: str
    plan: Plan
    state: float
    micro_batch: int
    context: int


@dataclass(frozen=True, slots=True, repr=False)
class Fits(Answer):
    """What fits.

    Args:
        model, cluster: of what, and on what.
        context: tokens of a request or a sequence.
        serving: by precision and size of an engine, the smallest engines first.
        training: by job and split of all chips.
        published: the precision of the published checkpoint, where it is quantised and was tried; else "".
        refused: what could not be asked ("serving", or a way to train) -> why.
    """

    model: Model
    cluster: Cluster
    context: float
    serving: tuple[ServingFit, ...]
    training: tuple[TrainingFit, ...]
    published: str
    refused: Mapping[str, str]

    @property
    def anything(self) -> bool:
        """Whether anything fits at all."""
        return any(s.requests for s in self.serving) or any(t.micro_batch for t in self.training)


def serving_fits(problems: Sequence[ServingProblem]) -> tuple[ServingFit, ...]:
    """What fits on engines of one chip, two, four, ..., up to the cluster, of the best split of each.

    Of an engine's splits (tensor, experts, stages of eight tensor ways) the one that holds the most requests stands for
    all. Of each precision: engines from the smallest that holds a request, and no more than three sizes.

    Args:
        problems: one for each precision; the load says how long requests are.
    """
    return tuple(fit for problem in problems for fit in _of_precision(problem))


def _of_precision(problem: ServingProblem) -> Iterator[ServingFit]:
    chips, shown = 1, 0
    last: ServingFit | None = None
    while chips <= problem.cluster.num_chips and shown < 3:
        found = [_serving_fit(problem, layout) for layout in _engines(problem, chips)]
        if found:
            last = max(found, key=lambda fit: (fit.requests, fit.context, -fit.weights))
            if last.requests or last.context:
                shown += 1
                yield last
        chips *= 2
    if last is not None and not shown:  # not even all chips together
        yield last


def _engines(problem: ServingProblem, chips: int) -> Iterator[ServingLayout]:
    """Ways to split an engine that tools have, as far as the model has what they split."""
    limits = EngineLimits.of(problem.model)
    ways = [f"tensor={chips}"] if limits.heads % chips == 0 else []
    if chips > 1 and limits.experts % chips == 0:
        ways.append(f"expert={chips}")
    inner = math.gcd(8, limits.heads)
    if chips > inner and chips % inner == 0 and chips // inner <= limits.layers:
        ways.append(f"tensor={inner},stage={chips // inner}")
    for text in ways:
        try:
            yield parse_serving_layout(text, num_chips=chips)
        except MeshwiseError:
            continue


def _serving_fit(problem: ServingProblem, layout: ServingLayout) -> ServingFit:
    capacity, chunk = problem.cluster.chip.hbm_usable, engine_chunk((), problem.calibration)

    def total(requests: int) -> float:
        return engine_memory(problem, replace(setup, batch=requests), "decode")["total"]

    setup = ServingSetup("aggregated", layout, layout, 1, chunk=chunk)
    return ServingFit(
        precision=problem.load.precision,
        layout=layout,
        engines=problem.cluster.num_chips // layout.num_chips,
        weights=engine_memory(problem, setup, "decode")["weights"],
        requests=most(lambda n: total(n) <= capacity, _MOST_REQUESTS),
        context=min(longest_context(problem, setup), int(readable_context(problem.model, problem.load) or LONGEST)),
    )


def training_splits(problem: TrainingProblem) -> Iterator[tuple[dict[str, int], int]]:
    """Sizes of mesh axes, and the ZeRO stage, of the usual splits of all chips; what is frozen has little to share."""
    chips = problem.cluster.num_chips
    inner = problem.network.dimensions[0]
    heads = training_limits(problem).largest["tensor"]
    yield {"data": chips}, 0
    if chips == 1:
        return
    if problem.job.tuning.full:
        yield {"data": chips}, 2
    yield {"fsdp": chips}, 0
    ways = math.gcd(min(8, inner.size) if not inner.torus else 4, math.gcd(heads, chips))
    if 1 < ways < chips:
        yield {"fsdp": chips // ways, "tensor": ways}, 0


def training_fits(problems: Sequence[TrainingProblem]) -> tuple[tuple[TrainingFit, ...], dict[str, str]]:
    """What fits of training, for each job and each usual split of all chips.

    Args:
        problems: one for each precision and way of fine-tuning; the job says how long sequences are.

    Returns: what was asked, and why a split of a job could not be: "lora, fsdp=8" -> the reason.
    """
    found, refused = [], {}
    for problem in problems:
        for sizes, zero in training_splits(problem):
            try:
                found.append(_training_fit(problem, sizes, zero))
            except MeshwiseError as error:
                job = problem.job.precision if problem.job.tuning.full else problem.job.fine_tune
                refused[f"{job}, {','.join(f'{axis}={n}' for axis, n in sizes.items())}"] = str(error)
    return tuple(found), refused


def _training_fit(problem: TrainingProblem, sizes: Mapping[str, int], zero: int) -> TrainingFit:
    replicas = math.prod(n for axis, n in sizes.items() if axis != "tensor")
    problem = _with_length(problem, replicas, problem.job.seq_len)
    choices = {"remat": "full", "zero": zero, "micro_batch": 1, "num_microbatches": 1}
    if "data" not in sizes:
        del choices["zero"]
    request = LayoutRequest(dict.fromkeys(MESH_AXES, 1) | dict(sizes), choices, tuple(sizes))
    check_request(problem, request)
    lean = search_layout(problem, request, (), math.inf).front[-1]
    plan = Plan.of(problem, lean.layout, lean.fabric)
    capacity = plan.estimate.hbm_capacity

    def total(micro_batch: int, length: float) -> float:
        layout = plan.layout.replace(micro_batch=micro_batch)
        other = Plan.of(_with_length(problem, replicas * micro_batch, length), layout, plan.fabric)
        return other.estimate.memory["total"]

    longest = min(max(problem.model.max_seq_len or LONGEST, int(problem.job.seq_len)), LONGEST)
    return TrainingFit(
        precision=problem.job.precision,
        fine_tune=problem.job.fine_tune,
        plan=plan,
        state=sum(plan.estimate.memory.get(n, 0.0) for n in ("parameters", "master_copies", "gradients", "optimizer")),
        micro_batch=most(lambda n: total(n, problem.job.seq_len) <= capacity, _MOST_SEQUENCES),
        context=most(lambda tokens: total(1, tokens) <= capacity, longest),
    )


def _with_length(problem: TrainingProblem, sequences: int, length: float) -> TrainingProblem:
    return replace(problem, job=problem.job.of_sequences(sequences, length))
