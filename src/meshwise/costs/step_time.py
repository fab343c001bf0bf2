"""Put the time of a step together from sums over roles, for any pipeline schedule: cheap arithmetic.

Not here: the sums (`overlap`), which are worked out once for all schedules, or the rule that they follow (`step`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from meshwise.costs.arithmetic import Num, is_zero, maximum, minimum, where
from meshwise.costs.calibration import Calibration
from meshwise.costs.collectives import collective_time
from meshwise.costs.makespans import PipelineShape, PipelineTimes, StageTimes
from meshwise.costs.overlap import OnceSums, RoleSums, Sums, split_exposed, total
from meshwise.costs.pipeline import Pipeline, Shares, chunk_shares, device_shares
from meshwise.costs.step import NETWORKS, TERMS, Ledger, StepRates, StepTime
from meshwise.costs.traffic import Pass
from meshwise.sharding import CollectiveKind
from meshwise.sharding.placed import Purpose


@dataclass(frozen=True, slots=True)
class StepParts:
    """What does not depend on the schedule.

    Args:
        sums: of one microbatch, by role; once: of a step, by role.
        layers: of the model.
        rates: chip, calibration, wires.
        boundary_bytes: what one chip sends to the next stage per microbatch and direction.
        senders: chips that hold the same of it and send a part each.
    """

    sums: Mapping[str, RoleSums]
    once: Mapping[str, OnceSums]
    layers: int
    rates: StepRates
    boundary_bytes: Num
    senders: Num = 1.0


def passes_makespan(sums: Mapping[str, RoleSums], calibration: Calibration, layers: int, pipeline: Pipeline) -> Any:
    """Seconds of a step of the passes of its microbatches alone: no update, no sends, nothing that happens once."""
    times = _times(sums, calibration, pipeline, chunk_shares(layers, pipeline))
    return pipeline.schedule.makespan(pipeline.shape, times)


def passes_works(
    sums: Mapping[str, RoleSums], calibration: Calibration, layers: int, pipeline: Pipeline
) -> tuple[Num, Num, Num]:
    """Seconds of a step that devices are at work on these passes, as `Schedule.works`."""
    times = _times(sums, calibration, pipeline, chunk_shares(layers, pipeline))
    return pipeline.schedule.works(pipeline.shape, times)


_NOTHING_HIDDEN = dict.fromkeys(NETWORKS, 0.0)
_NO_RESOURCES = dict.fromkeys(("compute", "hbm", *NETWORKS), 0.0)
_NO_TERMS = dict.fromkeys(TERMS, 0.0)


def step_time(
    parts: StepParts,
    pipeline: Pipeline,
    *,
    optimizer_bytes: Num,
    optimizer_matmul: Num = 0.0,
    copied_bytes: Num = 0.0,
    ledger: Ledger | None = None,
) -> StepTime:
    """Put the time of a step together.

    Args:
        parts: the sums.
        pipeline: schedule and sizes (1 stage: gradient accumulation).
        optimizer_bytes: HBM traffic of the optimizer on one chip.
        optimizer_matmul: seconds of its matmuls at the data-sheet rate.
        copied_bytes: gradients that one chip tells the one with a copy of its stages, once a step.
        ledger: filled with what the terms are sums of.

    The busiest device's work is what the terms say; `pipeline_bubble` is what it waits for. See `makespans`.
    """
    rates, schedule, shape = parts.rates, pipeline.schedule, pipeline.shape
    calibration, microbatches = rates.calibration, shape.num_microbatches
    late, shares = calibration.sends_waited_for(schedule.name), chunk_shares(parts.layers, pipeline)
    times = _times(parts.sums, calibration, pipeline, shares)
    works = schedule.works(shape, times)
    stored, saved = _busiest(pipeline, device_shares(parts.layers, pipeline), times, works)
    worked = {role: share * pipeline.work_share for role, share in stored.items()}
    micro = RoleSums.mixed(parts.sums, worked)
    once = _once(parts, micro, stored, shape, ledger)
    by_schedule = _hide_exchanges(micro, saved, pipeline.paired_passes(beside=calibration.beside_exchanges), shape)
    send = send_seconds(rates, parts.boundary_bytes, parts.senders)
    copied = _send_of(rates, copied_bytes) if schedule.copies > 1 else 0.0
    optimizer = optimizer_bytes / rates.chip.hbm_bandwidth
    terms = _NO_TERMS | _in_step(micro.terms, microbatches, once.exposed)
    terms["pipeline_bubble"] = schedule.makespan(shape, times) - maximum(*works)
    terms["pipeline_send"] = pipeline.waited_sends(late, works, send, in_step=calibration.compiled) + copied
    terms["optimizer"] = optimizer / calibration.hbm_efficiency + optimizer_matmul / calibration.matmul_efficiency
    expected = total(terms.values())
    if not rates.bounded:
        return StepTime(terms, {}, math.nan, expected, math.nan, {}, math.nan)
    waits = schedule.waits(shape) * _least(pipeline, shares)
    waited = {name: waits * seconds for name, seconds in parts.sums["layer"].resources.items()}
    update = {"compute": optimizer_matmul, "hbm": optimizer}
    resources = _NO_RESOURCES | _with_turns(_in_step(micro.resources, microbatches, waited, once.bounds, update))
    nothing_hidden = _nothing_hidden(parts, pipeline, shares, send)
    if ledger is not None:
        ledger.pipeline, ledger.times, ledger.nothing_hidden = pipeline, times, nothing_hidden
        ledger.hidden_by_schedule, ledger.waits = by_schedule, waits / maximum(worked["layer"], 1e-30)
        ledger.send, ledger.boundary_bytes = send, parts.boundary_bytes
        ledger.copied, ledger.copied_bytes = copied, copied_bytes
        ledger.optimizer_bytes, ledger.optimizer_matmul = optimizer_bytes, optimizer_matmul
        _on_the_busiest_device(ledger, stored, worked)
    return StepTime(
        terms=terms,
        hidden=_NOTHING_HIDDEN | _in_step(micro.hidden, microbatches, once.hidden),
        lower=maximum(*resources.values()),
        expected=expected,
        upper=nothing_hidden + once.serial + copied + terms["optimizer"],
        resources=resources,
        flops=microbatches * micro.flops["flops"],
    )


def _with_turns(resources: Sums) -> Sums:
    """The same where collectives that nothing runs beside come after the busier of compute and HBM.

    Each has its own gradients of weights beside them: a step of a faster chip is never bounded higher.
    """
    if "in_turn" in resources:
        of_hbm = resources.pop("in_turn_hbm") + resources["hbm"]
        resources["in_turn"] = maximum(resources["in_turn"] + resources.get("compute", 0.0), of_hbm)
    return resources


def _hide_exchanges(micro: RoleSums, saved: Num, pairs: Num, shape: PipelineShape) -> Num:
    """Hide exchanges of tokens behind another microbatch's compute, where `pairs` of passes run together.

    Returns: share of the exposed exchanges of microbatches that is hidden so; `saved` are the seconds of a pair.
    """
    if "expert" not in micro.terms:
        return 0.0
    exchanges = micro.terms["expert"]
    share = minimum(pairs * saved / maximum(shape.num_microbatches * exchanges, 1e-30), 1.0)
    micro.terms["expert"] = exchanges * (1 - share)
    micro.hidden.add("expert", exchanges * share)
    return share


def _in_step(of_microbatch: Sums, microbatches: Num, *besides: Mapping[str, Num]) -> Sums:
    """Sums of a step, from those of a microbatch and what comes besides."""
    sums = Sums({name: microbatches * seconds for name, seconds in of_microbatch.items()})
    for more in besides:
        for name, seconds in more.items():
            if not is_zero(seconds):
                sums.add(name, seconds)
    return sums


def _times(
    sums: Mapping[str, RoleSums], calibration: Calibration, pipeline: Pipeline, chunks: tuple[Shares, Shares, Shares]
) -> PipelineTimes:
    shape = pipeline.shape
    if calibration.beside_exchanges and not pipeline.schedule.overlaps:
        share = pipeline.paired_passes(beside=True) / (shape.num_microbatches * shape.virtual_stages)
        return PipelineTimes(*(_beside(sums, own, calibration.interference, share) for own in chunks))
    cores = calibration.exchange_cores if pipeline.schedule.overlaps else None
    return PipelineTimes(*(_stage_times(sums, shares, cores) for shares in chunks))


def _busiest(
    pipeline: Pipeline, devices: tuple[Shares, Shares, Shares], times: PipelineTimes, works: tuple[Num, Num, Num]
) -> tuple[Shares, Num]:
    """What the busiest device stores of each role, and the seconds that a pair of its passes saves run together."""
    first, middle, last = devices
    at_first, between = works[0] > works[2], works[1] > maximum(works[0], works[2])
    ends = {role: where(at_first, first[role], last[role]) for role in first}
    stored = {role: where(between, middle[role], ends[role]) for role in first}
    if pipeline.schedule.chunks is None:  # an end and middle chunks on one device
        own, count = where(at_first, times.first.saved, times.last.saved), pipeline.shape.virtual_stages
        return stored, where(between, times.middle.saved, (own + (count - 1) * times.middle.saved) / count)
    return stored, where(between, times.middle.saved, times.ends.saved)


class _Once(NamedTuple):
    """What happens once a step: exposed and hidden seconds and bounds by term, and seconds of all with none hidden."""

    exposed: Sums
    hidden: Sums
    bounds: Sums
    serial: Num


def _once(parts: StepParts, micro: RoleSums, stored: Shares, shape: PipelineShape, ledger: Ledger | None) -> _Once:
    """Hide reductions behind the last backward pass, and new weights behind the next forward pass.

    They hide behind what compute of one microbatch covers nothing else yet, less one layer.
    """
    calibration = parts.rates.calibration
    once = _Once(Sums(), Sums(), Sums(), 0.0)
    for purpose in (Purpose.GRADIENTS, Purpose.WEIGHTS):
        by_term = Sums()
        for role, own in parts.once.items():
            for (why, term), seconds in own.seconds.items():
                if why is purpose:
                    by_term.add(term, stored[role] * seconds)
        together = total(by_term.values())
        cover: Num = 0.0
        if not calibration.late_exchange and by_term:
            cover = micro.cover[purpose] * free_share(purpose, calibration, shape, parts.layers * stored["layer"])
        _, share = split_exposed(together, cover, calibration.interference)
        for term, seconds in by_term.items():
            once.exposed.add(term, seconds * share)
            once.hidden.add(term, seconds * (1 - share))
        once = once._replace(serial=once.serial + together)
        if ledger is not None:
            ledger.hidings = [
                replace(h, cover=cover, exposed_share=share)
                if h.when is Pass.STEP and h.sent[0].collective.purpose is purpose
                else h
                for h in ledger.hidings
            ]
    for role, own in parts.once.items():
        for term, seconds in own.bounds.items():
            once.bounds.add(term, stored[role] * seconds)
    return once


def free_share(purpose: Purpose, calibration: Calibration, shape: PipelineShape, layers: Num) -> Num:
    """Share of a pass of so many layers behind which what happens once a step for a purpose may hide: not one of them.

    It is 0 where the software sends it late.
    """
    free = 1 - 1 / maximum(layers, 1.0)
    late = {*calibration.late_once}
    if purpose is Purpose.WEIGHTS:
        return free * ("weights" not in late)
    if {"whole", "gradients"} & late:
        return 0.0
    if "accumulated" in late:
        return where(shape.num_microbatches > 1, 0.0, free)
    return where(shape.stages > 1, 0.0, free) if "pipelines" in late else free


def _on_the_busiest_device(ledger: Ledger, stored: Shares, worked: Shares) -> None:
    """Turn what all copies of a block do into what the busiest device does."""
    ledger.blocks = [replace(b, count=b.count * worked[b.time.block.role]) for b in ledger.blocks]
    ledger.hidings = [
        replace(h, count=h.count * (stored if h.when is Pass.STEP else worked)[h.block.role]) for h in ledger.hidings
    ]


def _least(pipeline: Pipeline, chunks: tuple[Shares, Shares, Shares]) -> Num:
    """Share of the layers in the chunk that has fewest: the others are waited for at least as long."""
    first, middle, last = (shares["layer"] for shares in chunks)
    least = minimum(first, last)
    return where(pipeline.num_chunks > 2, minimum(least, middle), least)


def _stage_times(sums: Mapping[str, RoleSums], shares: Shares, cores: float | None) -> StageTimes:
    """The passes of a chunk. `cores`: share of the compute units set aside for hidden exchanges; None hides none."""
    passes = _shared_passes(sums, shares, "passes")
    if cores is None:
        return StageTimes(**passes)
    computes = _shared(sums, shares, "terms", "forward"), _shared(sums, shares, "terms", "backward", "recompute")
    forward, backward = (_shared(sums, shares, "exchanged", name) for name in ("forward", "backward"))
    # Each exchanges tokens while the other computes; the backward pass also while its own gradients of weights, which
    # nothing waits for, are computed. Neither hides behind the same arithmetic twice.
    free = computes[0] + minimum(passes["weights"], computes[1])
    hidden = minimum(minimum(forward, computes[1]) + minimum(backward, free), computes[0] + computes[1])
    # While a pair runs, its arithmetic does without the compute units that are set aside.
    longer = (computes[0] + computes[1]) * (cores / (1 - cores))
    return StageTimes(**passes, saved=maximum(hidden - longer, 0.0))


def _beside(sums: Mapping[str, RoleSums], shares: Shares, interference: float, paired: Num) -> StageTimes:
    """The passes of a chunk, of which the share `paired` exchanges tokens while another's passes compute.

    What a pair saves is taken from both of its passes, by their exchanges.
    """
    passes = _shared_passes(sums, shares, "passes")
    computes = _shared(sums, shares, "terms", "forward"), _shared(sums, shares, "terms", "backward", "recompute")
    exchanges = {name: _shared(sums, shares, "exchanged", name) for name in ("forward", "backward")}
    hidden = {
        "forward": minimum(exchanges["forward"], computes[1]),
        "backward": minimum(exchanges["backward"], computes[0]),
    }
    saved: Num = 0.0
    for name, seconds in hidden.items():
        won = seconds * (1 - interference)
        passes[name] = passes[name] - won * paired
        saved = saved + won
    return StageTimes(**passes, saved=saved)


def _nothing_hidden(parts: StepParts, pipeline: Pipeline, shares: tuple[Shares, Shares, Shares], send: Num) -> Num:
    """Seconds of all microbatches with nothing overlapped."""
    sent = send * max(parts.rates.calibration.late_sends, 1) * (pipeline.shape.stages > 1)
    serial = PipelineTimes(*(_serial_times(parts.sums, of, sent) for of in shares))
    return pipeline.schedule.makespan(pipeline.shape, serial)


def _serial_times(sums: Mapping[str, RoleSums], shares: Shares, send: Num) -> StageTimes:
    """Passes with nothing overlapped; a send after each that has one."""
    passes = _shared_passes(sums, shares, "serial")
    return StageTimes(passes["forward"] + send, passes["backward"] + send, passes["weights"])


def _shared_passes(sums: Mapping[str, RoleSums], shares: Shares, what: str) -> dict[str, Num]:
    """Seconds of the passes of a chunk."""
    totals: dict[str, Num] = {"forward": 0.0, "backward": 0.0, "weights": 0.0}
    for role, own in sums.items():
        share = shares[role]
        if not is_zero(share):
            for name, seconds in getattr(own, what).items():
                totals[name] = totals[name] + share * seconds
    return totals


def _shared(sums: Mapping[str, RoleSums], shares: Shares, what: str, *names: str) -> Num:
    total: Num = 0.0
    for role, own in sums.items():
        if not is_zero(shares[role]):
            for name in names:
                total = total + shares[role] * getattr(own, what)[name]
    return total


def send_seconds(rates: StepRates, boundary_bytes: Num, senders: Num) -> Num:
    """Seconds of one send between neighbouring stages; arguments as in `StepParts`."""
    if isinstance(senders, float) and senders == 1:
        return _send_of(rates, boundary_bytes)
    links, wire = rates.calibration.links, rates.wires(("tensor",))
    gathered = collective_time(CollectiveKind.ALL_GATHER, boundary_bytes, wire, links=links)
    return _send_of(rates, boundary_bytes / senders) + where(senders > 1, gathered, 0.0)


def _send_of(rates: StepRates, num_bytes: Num) -> Num:
    """Seconds to send `num_bytes` along the stage axis, once."""
    return collective_time(CollectiveKind.PERMUTE, num_bytes, rates.wires(("stage",)), links=rates.calibration.links)
