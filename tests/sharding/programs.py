"""Runs a placed block on NumPy devices: transfers literally, operations from what each device itself holds.

Test support: the referee of `place`. A tensor may be held in several ways at once; the only thing a device may do for
free is to take a part of what it holds. Not here: any choice of what to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwise.core.tensors import Attention, AttentionGradient, Fused, FusedGradient, Kind, Tensor
from meshwise.sharding import Mesh, Sharding
from meshwise.sharding.placed import Held, LocalOp, PlacedBlock, Purpose, Transfer
from meshwise.sharding.strategy import Strategy
from tests.sharding.devices import (
    Blocks,
    Coordinates,
    Devices,
    all_coordinates,
    apply,
    blocks_of,
    collect,
    distribute,
    parts_of,
)
from tests.sharding.formulas import Formulas, Part, Routing, attention_gradient
from tests.sharding.recurrences import kernel_gradients

Arrays = Mapping[str, np.ndarray]
LEARNING_RATE = 0.1


class NotHeldError(AssertionError):
    """A device would need what it does not hold."""


@dataclass(frozen=True)
class Microbatch:
    """Global arrays that enter the forward pass (activations, indices) and the backward pass (`d_` of the outputs)."""

    inputs: Arrays
    output_gradients: Arrays


@dataclass(frozen=True)
class Results:
    """What a training step of one block leaves, as global arrays.

    Args:
        outputs, input_gradients: one mapping per microbatch.
        gradients: of the block's own weights, as the optimizer sees them, summed over microbatches.
        tied_gradients: of weights that another block owns, as accumulated.
        weights: after the update, as stored.
    """

    outputs: tuple[Arrays, ...]
    input_gradients: tuple[Arrays, ...]
    gradients: Arrays
    tied_gradients: Arrays
    weights: Arrays


class Machine:
    """Devices and what they hold: tensor name -> sharding -> blocks."""

    def __init__(self, mesh: Mesh, sizes: Mapping[str, int], formulas: Formulas) -> None:
        self.mesh = mesh
        self.sizes = sizes
        self.formulas = formulas
        self.held: dict[str, dict[Sharding, Devices]] = {}
        self._kernel_outputs: dict[tuple[str, str], Devices] = {}

    def put(self, name: str, sharding: Sharding, devices: Devices) -> None:
        self.held.setdefault(name, {})[sharding] = devices

    def fetch(self, name: str, sharding: Sharding) -> Devices:
        """What devices hold of a tensor in this sharding, taking parts of other copies where that is enough."""
        copies = self.held.get(name, {})
        if sharding in copies:
            return copies[sharding]
        for source, devices in copies.items():
            appended = _appended(source, sharding)
            if appended is not None:
                return Devices(self.mesh, blocks_of(devices.blocks, appended, self.mesh))
        raise NotHeldError(f"{name} is needed as {sharding}, held as {', '.join(map(str, copies)) or 'nothing'}")

    def run(self, items: Iterable[LocalOp | Transfer]) -> None:
        for item in items:
            if isinstance(item, Transfer):
                self.transfer(item)
            else:
                self.compute(item)

    def transfer(self, t: Transfer) -> None:
        self.put(t.tensor.name, t.collective.after, apply(t.collective, self.fetch(t.tensor.name, t.collective.before)))

    def compute(self, item: LocalOp) -> None:
        _check_splits(item)
        op, output = item.op, item.output
        inputs = [(h, self.fetch(h.tensor.name, h.sharding)) for h in item.inputs]
        if isinstance(op, AttentionGradient | FusedGradient):
            self.put(output.tensor.name, output.sharding, self._kernel_outputs[op.source.name, op.inputs[1].name])
            return
        read = [_parts(h, x) for h, x in inputs]
        parts = {d: [part[d] for part in read] for d in all_coordinates(self.mesh)}
        if isinstance(op, Attention | Fused) and op.gradient:
            if isinstance(op, Attention):
                results = {d: attention_gradient(op, p) for d, p in parts.items()}
            else:
                results = {d: kernel_gradients(op, [x.values for x in p]) for d, p in parts.items()}
            further = [t for t in op.inputs[1:] if t.name in next(iter(results.values()))]
            for t in further:
                made = Devices(self.mesh, {d: r[t.name] for d, r in results.items()})
                self._kernel_outputs[op.name.removeprefix("d"), t.name] = made
            blocks = {d: r[op.inputs[0].name] for d, r in results.items()}
        else:
            blocks = self._compute_local(item, parts)
        self.put(output.tensor.name, output.sharding, Devices(self.mesh, blocks))

    def _compute_local(self, item: LocalOp, parts: Mapping[Coordinates, Sequence[Part]]) -> Blocks:
        axes, splits = item.output.tensor.axes, item.output.sharding.splits
        shape = [self.sizes[axis] // self.mesh.size(*split) for axis, split in zip(axes, splits, strict=True)]
        written = [parts_of(self.mesh, split) for split in splits]
        blocks, known = {}, {}
        for device, inputs in parts.items():
            starts = tuple(part[device][0] * width for part, width in zip(written, shape, strict=True))
            key = starts, *((p.starts, p.values.tobytes()) for p in inputs)  # copies are computed once
            if key not in known:
                known[key] = self.formulas.compute(item.op, inputs, starts, shape)
            blocks[device] = result = known[key]
            assert result.shape == tuple(shape), f"{item.op.name}: {result.shape} on a device, expected {shape}"
        return blocks


def _appended(source: Sharding, target: Sharding) -> list[tuple[str, ...]] | None:
    """The mesh axes by which `target` cuts each dimension finer, if the devices of `source` hold that much."""
    if source.unreduced != target.unreduced:
        return None
    appended = []
    for old, new in zip(source.splits, target.splits, strict=True):
        if new[: len(old)] != old or set(new[len(old) :]) & source.mesh_axes:
            return None
        appended.append(new[len(old) :])
    return appended


def _parts(held: Held, devices: Devices) -> dict[Coordinates, Part]:
    """What each device holds, and where that begins in the global array."""
    parts = [parts_of(devices.mesh, split) for split in held.sharding.splits]
    return {
        d: Part(held.tensor.axes, block, tuple(p[d][0] * n for p, n in zip(parts, block.shape, strict=True)))
        for d, block in devices.blocks.items()
    }


def _check_splits(item: LocalOp) -> None:
    """Every tensor is split as the iteration space says, so that costs may count local work by it."""
    splits = dict(item.splits)
    for held in (*item.inputs, item.output):
        for axis, split in zip(held.tensor.axes, held.sharding.splits, strict=True):
            whole = isinstance(item.op, AttentionGradient) and held is item.output and axis == item.op.source.query_axis
            expected = () if whole else splits.get(axis, ())  # written for all positions
            assert split == expected, f"{item.op.name}: {held.tensor} is held as {held.sharding}, iterated as {splits}"


@dataclass
class Step:
    """One optimizer step of a placed block: forward and backward of each microbatch, then the update.

    Args:
        placed, strategy, mesh: what runs where.
        sizes: of every axis.
        weights: global arrays.
        routing: of the tokens, for mixtures.
    """

    placed: PlacedBlock
    strategy: Strategy
    mesh: Mesh
    sizes: Mapping[str, int]
    weights: Arrays
    routing: Routing | None = None
    accumulated: dict[str, tuple[Sharding, Devices]] = field(default_factory=dict)

    def machine(self) -> Machine:
        return Machine(self.mesh, self.sizes, Formulas(self.placed.block, self.routing))

    def run(self, microbatches: Sequence[Microbatch]) -> Results:
        done = [self.microbatch(m) for m in microbatches]
        gradients, weights = self.update()
        tied = {h.tensor.name for h in self.placed.tied}
        return Results(
            outputs=tuple(outputs for outputs, _ in done),
            input_gradients=tuple(gradients for _, gradients in done),
            gradients=gradients,
            tied_gradients={
                n: _collect(d, s) for n, (s, d) in self.accumulated.items() if n.removeprefix("d_") in tied
            },
            weights=weights,
        )

    def microbatch(self, batch: Microbatch) -> tuple[Arrays, Arrays]:
        machine = self.machine()
        tensors = self._tensors()
        self._load_weights(machine)
        for name, array in batch.inputs.items():
            home = self.strategy.home(tensors[name].axes)
            machine.put(name, home, distribute(array, home, self.mesh))
        entering = {name: dict(machine.held[name]) for name in batch.inputs}
        machine.run(self.placed.forward)
        outputs = {n: self._at_home(machine, n, tensors[n].axes) for n in self.placed.block.outputs}
        kept = {h.tensor.name: {h.sharding: machine.fetch(h.tensor.name, h.sharding)} for h in self.placed.kept}
        for t in self.placed.forward if self.placed.block.role == "head" else ():
            if isinstance(t, Transfer):  # nothing runs between the passes of a head: what it gathered is still there
                there = t.collective.after
                kept.setdefault(t.tensor.name, {})[there] = machine.fetch(t.tensor.name, there)
        machine.held = kept
        for name, copies in entering.items():  # token ids are not "kept activations", but are there
            if tensors[name].kind is Kind.INDEX:
                machine.held[name] = {**machine.held.get(name, {}), **copies}
        self._load_weights(machine)
        for name, array in batch.output_gradients.items():
            home = self.strategy.home(tensors[name.removeprefix("d_")].axes)
            machine.put(name, home, distribute(array, home, self.mesh))
        machine.run(self.placed.backward)
        self._accumulate(machine)
        moving = [n for n in batch.inputs if tensors[n].kind is not Kind.INDEX]
        return outputs, {n: self._at_home(machine, f"d_{n}", tensors[n].axes) for n in moving}

    def _tensors(self) -> dict[str, Tensor]:
        ops = self.placed.block.ops
        read = {t.name: t for op in reversed(ops) for t in op.inputs}
        return read | {op.output.name: op.output for op in ops}

    def _load_weights(self, machine: Machine) -> None:
        for h in (*self.placed.weights, *self.placed.tied):
            machine.put(h.tensor.name, h.sharding, distribute(self.weights[h.tensor.name], h.sharding, self.mesh))

    def _at_home(self, machine: Machine, name: str, axes: tuple[str, ...]) -> np.ndarray:
        """What the next block will take for granted."""
        home = self.strategy.home(axes)
        return _collect(machine.fetch(name, home), home)

    def _accumulate(self, machine: Machine) -> None:
        for h in (*self.placed.gradients, *self.placed.tied_gradients):
            name = h.tensor.name
            new = machine.fetch(name, h.sharding)
            if name in self.accumulated:
                old = self.accumulated[name][1]
                new = Devices(self.mesh, {d: old.blocks[d] + block for d, block in new.blocks.items()})
            self.accumulated[name] = (h.sharding, new)

    def update(self) -> tuple[Arrays, Arrays]:
        """Gradients to the optimizer's shards, an update there, new weights to where they are stored."""
        machine = self.machine()
        for h in self.placed.weights:
            if h.tensor.frozen:
                machine.put(h.tensor.name, h.sharding, distribute(self.weights[h.tensor.name], h.sharding, self.mesh))
        for name, (sharding, devices) in self.accumulated.items():
            machine.put(name, sharding, devices)
        waiting = {h.tensor.name: h for h in self.placed.optimizer}
        gradients: dict[str, np.ndarray] = {}

        def renew(held: Held) -> None:
            name, sharding = held.tensor.name, held.sharding
            gradient = machine.fetch(f"d_{name}", sharding)
            gradients[name] = _collect(gradient, sharding)
            master = distribute(self.weights[name], sharding, self.mesh)
            new = {d: w - LEARNING_RATE * gradient.blocks[d] for d, w in master.blocks.items()}
            machine.put(name, sharding, Devices(self.mesh, new))

        for t in self.placed.step:
            if t.purpose is Purpose.WEIGHTS and t.tensor.name in waiting:
                renew(waiting.pop(t.tensor.name))
            machine.transfer(t)
        for held in waiting.values():
            renew(held)
        stored = {h.tensor.name: h.sharding for h in self.placed.weights}
        return gradients, {n: _collect(machine.fetch(n, s), s) for n, s in stored.items()}


def _collect(devices: Devices, sharding: Sharding) -> np.ndarray:
    """As `collect`, for real numbers: copies may differ by rounding, because sums are taken in another order."""
    return collect(devices, sharding, lambda a, b: np.array_equal(a, b) or np.allclose(a, b, rtol=1e-9, atol=1e-9))


def differences(found: Results, expected: Results) -> list[str]:
    """Names of everything that differs."""
    wrong = []
    for part, compare in _COMPARE.items():
        wrong += [f"{part} {name}" for name in compare(getattr(found, part), getattr(expected, part))]
    return wrong


def _unlike(found: Arrays, expected: Arrays) -> list[str]:
    assert set(found) == set(expected), f"{sorted(found)} against {sorted(expected)}"
    return [n for n in expected if not np.allclose(found[n], expected[n], rtol=1e-7, atol=1e-7)]


def _unlike_each(found: Sequence[Arrays], expected: Sequence[Arrays]) -> list[str]:
    return [
        f"{n} of microbatch {i}" for i, pair in enumerate(zip(found, expected, strict=True)) for n in _unlike(*pair)
    ]


_COMPARE: dict[str, Callable[..., list[str]]] = {
    "outputs": _unlike_each,
    "input_gradients": _unlike_each,
    "gradients": _unlike,
    "tied_gradients": _unlike,
    "weights": _unlike,
}
