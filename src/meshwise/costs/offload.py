"""What it costs to keep parts of the training state and the activations in the host's memory, over PCIe or NVLink-C2C.

Arithmetic on candidates that were priced without (floats or arrays), so that trying parts costs next to nothing. The
rule, stated once (number 6 of `step`):

* Optimizer: moments and master copies live on the host. Once a step the chip streams them in, updates them and streams
  them out, layer by layer as gradients become ready: this hides behind the last microbatch's backward pass, less one
  layer. (So gradients are not clipped by a norm of all of them, or by that of the step before.) Our own programs
  update when all gradients are made, layer by layer: the streams hide behind nothing, and one is in before it goes out.
* Parameters: weights of layers live on the host and stream in for each forward and each backward pass of a layer, on
  the shards that the chip stores; new weights stream out once a step, with the optimizer. Embedding and head stay.
* Activations: what layers keep goes out during their forward pass and comes back during their backward pass. Where only
  some layers do so, they are spread evenly: the stream of one of every n layers has the compute of n layers to itself.
* Streams of a pass hide behind the compute of that pass of their own layer, in and out at once (links are full
  duplex), as far as it lasts. The chip holds two layers of what is offloaded: one at work, one on its way.

Not here: whether it pays (`planning`), the host's own bandwidth and other users of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.core.errors import LayoutError
from meshwise.core.tensors import Block
from meshwise.costs.arithmetic import Num, maximum, minimum, where
from meshwise.costs.compute import PassCompute
from meshwise.costs.memory import Holding, LayerMemory, StageMemory, fullest
from meshwise.costs.pipeline import Pipeline
from meshwise.costs.step import TERMS, HostMove, Ledger, StepTime
from meshwise.costs.traffic import Pass
from meshwise.hardware import Chip

#: Part of the layout's `offload` -> classes of memory that leave the chip.
HOST_CLASSES = {
    "optimizer": ("master_copies", "optimizer"),
    "parameters": ("parameters",),
    "activations": ("activations",),
}

#: Layers whose data are on the chip at once: the one at work and the one on its way.
_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class HostPart:
    """A layer on the slowest stage.

    Args:
        memory: what its copies hold.
        passes: compute of one copy and microbatch, which streams may hide behind.
    """

    memory: LayerMemory
    passes: Mapping[str, PassCompute]


@dataclass(frozen=True, slots=True)
class HostInputs:
    """All that offloading depends on.

    Args:
        link_bandwidth: of the chip's share of the host link, one way, bytes/s.
        efficiency: achieved share of it.
        parts: the layers.
        stages: memory of the first and the last stage.
        hbm_capacity: bytes.
        pipeline: schedule and sizes.
        update_last: whether the update follows all gradients, and each layer comes in before it goes out: as it is in
            our own programs.
    """

    link_bandwidth: float
    efficiency: float
    parts: tuple[HostPart, ...]
    stages: tuple[StageMemory, ...]
    hbm_capacity: float
    pipeline: Pipeline
    update_last: bool = False

    @property
    def num_microbatches(self) -> Num:
        """Microbatches of a step that each layer of the device works on."""
        return self.pipeline.shape.num_microbatches * self.pipeline.work_share

    @property
    def rounds(self) -> Num:
        """The same with those that fill and drain the pipeline, in which others stream."""
        waits = self.pipeline.schedule.waits(self.pipeline.shape) / self.pipeline.device_chunks
        return self.num_microbatches + waits


def check_offload(chip: Chip, offload: Iterable[str]) -> None:
    """Refuse to offload on a chip whose host is not known.

    Raises:
        LayoutError: naming what was to be offloaded.
    """
    if chip.host_memory is None and (parts := "+".join(offload)):
        raise LayoutError(
            f"layout: offload={parts} needs the host's memory, which is not known for {chip.name}, whose machines "
            "differ; say it in a cluster file (host_memory of the chip: its share), or leave offload out"
        )


def offload_time(
    step: StepTime, host: HostInputs, which: Iterable[str], share: Num = 1.0, ledger: Ledger | None = None
) -> StepTime:
    """The step with these parts offloaded.

    Args:
        step: without.
        host: of the same candidates.
        which: of `HOST_CLASSES`.
        share: of the layers whose activations are offloaded (float or array).
        ledger: filled with what the term is a sum of.
    """
    moves = _moves(host, frozenset(which), share)
    rounds = host.rounds
    exposed: Num = 0.0
    hidden: Num = 0.0
    sent: Num = 0.0
    received: Num = 0.0
    for move in moves:
        runs = 1.0 if move.when is Pass.STEP else rounds
        shown = 1.0 if move.when is Pass.STEP else host.num_microbatches
        exposed = exposed + runs * move.copies * move.exposed
        hidden = hidden + shown * move.copies * (move.seconds - move.exposed)
        sent = sent + runs * move.copies * move.bytes_out
        received = received + runs * move.copies * move.bytes_in
    if ledger is not None:
        ledger.host += moves
        ledger.rounds = rounds
    terms = {**step.terms, "offload": exposed}
    busy = maximum(sent, received) / host.link_bandwidth
    return replace(
        step,
        terms=terms,
        hidden={**step.hidden, "offload": hidden},
        lower=maximum(step.lower, busy),
        expected=sum(terms[name] for name in TERMS),
        upper=step.upper + (sent + received) / (host.link_bandwidth * host.efficiency),
        resources={**step.resources, "host": busy},
    )


def _moves(host: HostInputs, which: frozenset[str], share: Num) -> list[HostMove]:
    """Every stream, with what of it shows: of each layer and pass, then of the update."""
    rate = host.link_bandwidth * host.efficiency
    moves: list[HostMove] = []
    cover: Num = 0.0
    number: Num = 0.0
    for p in host.parts:
        layer = p.memory
        kept = layer.kept * share if "activations" in which else 0.0
        weights = layer.state["parameters"] if "parameters" in which else 0.0
        ahead = p.passes["forward"].seconds
        back = sum(p.passes[name].seconds for name in ("recompute", "backward", "weights"))
        forward = _move(layer, Pass.FORWARD, (kept, weights), ahead, rate)
        backward = _move(layer, Pass.BACKWARD, (0.0, kept + weights), back, rate)
        moves += [forward, backward]
        number = number + layer.number
        cover = cover + layer.number * (back - (backward.seconds - backward.exposed))
    states = weights = 0.0
    for stage in host.stages:
        if "optimizer" in which:
            states = maximum(states, _leaving(stage, "master_copies") + _leaving(stage, "optimizer"))
        if "parameters" in which:
            weights = maximum(weights, _leaving(stage, "parameters"))
    cover = 0.0 if host.update_last else cover * (1 - 1 / number)
    update = _move(None, Pass.STEP, (states + weights, states), cover, rate)
    if host.update_last:
        seconds = (update.bytes_out + update.bytes_in) / rate
        update = replace(update, seconds=seconds, exposed=seconds)
    return [*moves, update]


def _move(layer: LayerMemory | None, when: Pass, out_and_in: tuple[Num, Num], cover: Num, rate: float) -> HostMove:
    block, copies = (layer.block, layer.number) if layer else (None, 1.0)
    seconds = maximum(*out_and_in) / rate
    return HostMove(block, when, copies, *out_and_in, seconds, cover, seconds - minimum(seconds, cover))


def offload_memory(
    stages: Sequence[StageMemory],
    hbm_capacity: float,
    which: Iterable[str],
    share: Num = 1.0,
    holdings: list[Holding] | None = None,
) -> tuple[Mapping[str, Num], Mapping[str, Num]]:
    """Bytes on the fullest chip, and in the host's memory for it, with these parts offloaded.

    Args:
        stages: those that may be the fullest, with nothing offloaded.
        hbm_capacity: bytes; the reserve is a share of it.
        which: of `HOST_CLASSES`.
        share: of the layers whose activations are offloaded (float or array).
        holdings: filled with what the chip's classes are made of (floats only).

    Returns: class -> bytes, "total" included; the same of the host's share, of the stage that needs most of it.
    """
    names = [name for part in HOST_CLASSES if part in set(which) for name in HOST_CLASSES[part]]
    left = [_offload_stage(stage, names, share) for stage in stages]
    away: dict[str, Num] = {}
    for stage in stages:
        mine = {name: _leaving(stage, name, share) for name in names}
        mine["total"] = sum(mine.values())
        more = mine["total"] > away["total"] if away else True
        away = {name: where(more, mine[name], away[name]) for name in mine} if away else mine
    return fullest(left, hbm_capacity, holdings), away


def offloaded_bytes(chip: Chip, stages: Sequence[StageMemory], which: tuple[str, ...], share: Num = 1.0) -> Num:
    """Bytes on the fullest chip with these parts offloaded, or none: infinite where the host has too little memory."""
    if not which:
        return fullest(stages, chip.hbm_usable)["total"]
    inside, away = offload_memory(stages, chip.hbm_usable, which, share)
    return where(away["total"] <= (chip.host_memory or 0.0), inside["total"], math.inf)


def _offload_stage(stage: StageMemory, names: Iterable[str], share: Num) -> StageMemory:
    """The stage without the classes `names` but for what of them is on the chip at once."""
    classes, holdings = dict(stage.classes), stage.holdings
    for name in names:
        leaving, (layer, one) = _leaving(stage, name, share), _largest(stage, name)
        stays = minimum(leaving, _BUFFERS * one)
        before = classes[name]
        classes[name] = minimum(before, maximum(before - leaving, 0.0) + stays)
        if holdings is not None and layer is not None and _BUFFERS * one < leaving:
            left = [_remaining(h, share if name == "activations" else 1.0) if h.name == name else h for h in holdings]
            holdings = [*left, Holding(name, layer, float(_BUFFERS), one)]
    return replace(stage, classes=classes, holdings=holdings)


def _remaining(held: Holding, share: Num) -> Holding:
    """What of a holding stays where `share` of it leaves."""
    leaves = held.name not in _OF_LAYERS or held.block.role == "layer"
    return replace(held, copies=held.copies * (1 - share)) if leaves else held


#: Classes of which only the layers' share leaves the chip.
_OF_LAYERS = ("parameters", "activations")


def _leaving(stage: StageMemory, name: str, share: Num = 1.0) -> Num:
    """Bytes of a class that go to the host; `share` of activations."""
    if name not in _OF_LAYERS:
        return stage.classes[name]
    total: Num = 0.0
    for layer in stage.layers:
        total = total + layer.copies(name) * layer.one(name)
    return total * share if name == "activations" else total


def _largest(stage: StageMemory, name: str) -> tuple[Block | None, Num]:
    """The layer that holds most of a class, one copy of it and of one microbatch: which (of floats), and its bytes."""
    block, most = None, 0.0
    for layer in stage.layers:
        one = layer.present * layer.one(name)
        if block is None or (isinstance(one, float | int) and one > most):
            block = layer.block
        most = maximum(most, one)
    return block, most
