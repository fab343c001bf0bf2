"""What one change would do to a serving layout: a factor of an axis moved, another batch, chunk or format of caches.

Not here: changes in training, and how those are chosen that are worth the words (`search.diagnosis`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.jobs import ServingLoad
from meshwise.search.diagnosis import Change, gaining, moved_factors
from meshwise.search.plan import ServingPlan
from meshwise.search.tools import ServingTool
from meshwise.sharding.serving import SERVING_AXES

#: Chunks of a prompt that are tried, and formats of caches.
_CHUNKS = (512, 2048)
_CACHES = (DType.FP8, DType.INT8)

_Try = tuple[str, str, ServingProblem, ServingSetup]


def serving_changes(
    plan: ServingPlan, asked: Callable[[ServingProblem], Sequence[ServingTool]] = lambda _: (), *, most: int = 3
) -> tuple[Change[ServingPlan], ...]:
    """The changes of one thing that gain most tokens a second; of a setup that does not fit, those with which it fits.

    Args:
        plan: of layouts and batches.
        asked: the engines for a problem: if one of them runs the plan, one of them runs what is returned.
        most: how many to return.
    """
    guarded = any(tool.runs(plan.setup) for tool in asked(plan.problem))
    tried = []
    for kind, what, problem, setup in _tries(plan):
        try:
            if guarded and not any(tool.runs(setup) for tool in asked(problem)):
                continue
            e = estimate_serving(problem, setup, count=False)
        except MeshwiseError:
            continue
        if e.fits:
            change = Change(what, ServingPlan(problem, e), e.output_tokens_per_s / plan.estimate.output_tokens_per_s)
            tried.append((kind, change))
    return gaining(tried, plan, _bare, most=most, fits=plan.estimate.fits)


def _bare(plan: ServingPlan) -> object:
    return plan.problem.load.precision, _unplaced(plan.setup)


def _unplaced(setup: ServingSetup) -> ServingSetup:
    return replace(setup, prefill=setup.prefill.replace(wires=None), decode=setup.decode.replace(wires=None))


def _tries(plan: ServingPlan) -> Iterator[_Try]:
    """Kind, words, problem and setup of each change."""
    problem, setup = plan.problem, _unplaced(plan.setup)
    for kind, what, other in (*_layouts(problem, setup), *_numbers(plan, setup)):
        yield kind, what, problem, other
    load = problem.load
    kept = ",".join(part for part in load.precision.split(",") if not part.strip().startswith("kv="))
    known = problem.cluster.chip.flops_per_s
    for cache in (c for c in _CACHES if c in known and c.bits < load.formats.kv.bits):
        fields = {name: getattr(load, name) for name in ServingLoad.model_fields}
        narrow = ServingLoad(**fields | {"precision": f"{kept},kv={cache.value}"})
        yield "kv", f"--precision {narrow.precision}", replace(problem, load=narrow), setup


def _layouts(problem: ServingProblem, setup: ServingSetup) -> Iterator[tuple[str, str, ServingSetup]]:
    """A factor of one mesh axis given to another; of engines that work apart, of one kind of them."""
    targets = ["tensor", "stage", "replicas", *(["expert"] if problem.model.mixtures else [])]
    together = setup.one_layout
    for step in ("decode",) if together else ("prefill", "decode"):
        layout = getattr(setup, step)
        sizes = {a: getattr(layout, a) for a in (*SERVING_AXES, "replicas") if getattr(layout, a) > 1}
        whole = problem.cluster.num_chips // layout.engine_chips
        moves = list(moved_factors(sizes, targets))
        if setup.mode == "aggregated" and whole > layout.replicas:
            moves.append(("idle", f"replicas={whole}", {"replicas": whole}))
        if 2 * setup.num_chips <= problem.cluster.num_chips:
            larger = {axis: 2 * getattr(layout, axis) for axis in targets}
            moves += [("idle", f"{axis}={size}", {axis: size}) for axis, size in larger.items()]
        for axis, words, moved in moves:
            with contextlib.suppress(MeshwiseError):  # axes that do not go together
                if together:
                    both = setup.prefill.replace(**moved), setup.decode.replace(**moved)
                    yield axis, words, replace(setup, prefill=both[0], decode=both[1])
                elif step == "decode":
                    yield axis, f"decode {words}", replace(setup, decode=layout.replace(**moved))
                else:
                    yield axis, f"prefill {words}", replace(setup, prefill=layout.replace(**moved))


def _numbers(plan: ServingPlan, setup: ServingSetup) -> Iterator[tuple[str, str, ServingSetup]]:
    """Other batches, numbers of prompts together, and chunks."""
    batch, most = setup.batch, plan.estimate.largest_batch or 0
    for other in dict.fromkeys((2 * batch, batch // 2, most if most < batch else 0)):
        if other >= 1:
            yield "batch", f"--batch {other:,}".replace(",", ""), replace(setup, batch=other)
    for prompts in (2 * setup.prefill_batch, setup.prefill_batch // 2):
        if prompts >= 1:
            yield "prefill_batch", f"--prefill-batch {prompts}", replace(setup, prefill_batch=prompts)
    if setup.mode == "aggregated":
        for chunk in _CHUNKS:
            if chunk < plan.problem.load.computed and chunk != setup.chunk:
                alike = replace(setup, prefill=setup.decode) if setup.one_layout else setup
                yield "chunk", f"--chunk {chunk}", replace(alike, chunk=chunk, prefill_batch=1)
        if setup.chunk is not None:
            yield "chunk", "prompts whole (no --chunk)", replace(setup, chunk=None)
