"""What `meshwise run` and `verify` cannot execute, as a table of rules beside those of other tools.

The facts are `runtime.refusals`, which refuses the same when it is asked to execute a plan. Not here: executing it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.core.tensors import Program, Tensor
from meshwise.exports.choices import JAX_CHIPS, XLA_OVERLAP, Choices
from meshwise.exports.exported import Rule
from meshwise.jobs import FineTuning, with_adapters
from meshwise.models import Model
from meshwise.runtime.refusals import (
    OFFLOADED,
    PIPELINES,
    check_job,
    check_model,
    check_narrow_products,
    splits_at_work,
    splits_in_store,
    splits_of,
)
from meshwise.sharding.strategy import Strategy

TITLE = "meshwise run"


def _why(check: Callable[[Choices], None]) -> Callable[[Choices], str]:
    """What a check says of a job, "" where it has no objection; asked once of all its layouts."""

    def said(choices: Choices) -> str:
        if check not in choices.known:
            choices.known[check] = ""
            try:
                check(choices)
            except MeshwiseError as error:
                choices.known[check] = str(error)
        known: str = choices.known[check]
        return known

    return said


_OF_MODEL, _OF_JOB = _why(lambda c: check_model(c.model)), _why(lambda c: check_job(c.job))
_NARROW = _why(lambda c: check_narrow_products(c.model, c.job))


#: A model, and what of it is trained.
Trained = tuple[Model, FineTuning]


def _trained(choices: Choices) -> Trained:
    return choices.model, choices.job.tuning


@functools.lru_cache(maxsize=256)
def _program(trained: Trained) -> Program:
    """With adapters where there are any."""
    model, tuning = trained
    return with_adapters(model.train_program(), tuning)


def _splits(choices: Choices) -> tuple[tuple[tuple[str, ...], int, str], ...]:
    """Mesh axes that split something, its size, a tensor that has it; not sequences: microbatches are whole."""
    return _splits_of(_trained(choices), choices.seq_len, choices.strategy)


@functools.lru_cache(maxsize=256)
def _splits_of(trained: Trained, seq_len: int, strategy: Strategy) -> tuple[tuple[tuple[str, ...], int, str], ...]:
    program = _program(trained)
    sizes = program.bind(batch=1, queries=seq_len)
    found = {(split, int(sizes[a])): t.name for t, a, split in splits_of(program, strategy) if a != "B"}
    return tuple((split, size, name) for (split, size), name in found.items())


def _common(choices: Choices) -> dict[tuple[str, ...], int]:
    """Mesh axes that split something, and what divides all sizes that they split: ways that divide these divide it.

    Strategies have few tables between them: each is read once a job.
    """
    strategy, known = choices.strategy, choices.known
    if (key := (_common, strategy)) not in known:
        at_work = strategy.compute, strategy.fallback, strategy.attention
        if at_work not in known:
            known[at_work] = _divisors(choices, splits_at_work(_program(_trained(choices)), strategy))
        found = dict(known[at_work])
        for table in dict.fromkeys((strategy.weights, strategy.gradients, strategy.optimizer)):
            if (own := (strategy.compute, table)) not in known:
                stored = splits_in_store(_program(_trained(choices)), Strategy(*own), "weights")
                known[own] = _divisors(choices, stored)
            for split, size in known[own].items():
                found[split] = math.gcd(found.get(split, 0), size)
        known[key] = found
    common: dict[tuple[str, ...], int] = known[key]
    return common


def _divisors(choices: Choices, splits: Iterable[tuple[Tensor, str, tuple[str, ...]]]) -> dict[tuple[str, ...], int]:
    """Mesh axes that split something but sequences, and what divides all sizes that they split."""
    sizes, found = _program(_trained(choices)).bind(batch=1, queries=choices.seq_len), dict[tuple[str, ...], int]()
    for axis, split in dict.fromkeys((axis, split) for _, axis, split in splits):
        if axis != "B":
            found[split] = math.gcd(found.get(split, 0), int(sizes[axis]))
    return found


def _is_uneven(choices: Choices) -> Any:
    return sum(size % _ways(choices, split) > 0 for split, size in _common(choices).items()) > 0


def _ways(choices: Choices, split: tuple[str, ...]) -> int:
    return math.prod(getattr(choices.layout, axis) for axis in split)


def _uneven(choices: Choices) -> str:
    """The first split that is not even, in words."""
    split, size, name = next(found for found in _splits(choices) if found[1] % _ways(choices, found[0]))
    return f"{' x '.join(a for a in split if getattr(choices.layout, a) > 1)} over {size} of {name}"


@functools.cache
def _equal_pieces(order: tuple[str, ...]) -> tuple[int, ...]:
    """Into how many equal pieces layers of these kinds can be cut.

    >>> _equal_pieces(("local", "global", "local", "global"))
    (1, 2)
    """
    return tuple(n for n in range(1, len(order) + 1) if order[: len(order) // n] * n == order)


def _unlike(choices: Choices) -> Any:
    """Whether the pieces of a pipeline differ."""
    pieces = choices.layout.stage * choices.layout.virtual_stages
    return math.prod(pieces != n for n in _equal_pieces(choices.model.spec.order)) > 0


def _kept_on_chip(choices: Choices) -> list[str]:
    """What a layout would keep in the host's memory, and the runtime does not."""
    return [part for part in choices.layout.offload if part not in OFFLOADED]


OVERLAP = XLA_OVERLAP

#: What it cannot execute.
RULES: tuple[Rule[Choices], ...] = (
    JAX_CHIPS,
    Rule(lambda c: bool(_OF_MODEL(c)), "model {c.model.name}", _OF_MODEL, "another tool"),
    Rule(lambda c: bool(_OF_JOB(c)), "the job", _OF_JOB, "another tool"),
    Rule(lambda c: bool(_NARROW(c)), "model {c.model.name}", _NARROW, "--precision mixed"),
    Rule(
        lambda c: bool(c.job.formats.recipe) & (c.layout.collective_matmul != "compiler") & (c.layout.tensor > 1),
        "collective_matmul={c.layout.collective_matmul}", "narrow operands go round no ring",
        "collective_matmul=compiler",
    ),
    Rule(
        lambda c: bool(c.job.formats.recipe and c.job.formats.recipe.weights) & ("optimizer" in c.layout.offload),
        "offload=optimizer", "stored narrow weights have one scale, and are not updated in pieces",
        "no offload=optimizer",
    ),
    Rule(
        lambda c: (c.order not in PIPELINES) & (c.layout.stage > 1),
        "schedule={c.order}", f"it runs {', '.join(PIPELINES)}", "schedule=1f1b",
    ),
    Rule(
        lambda c: (c.layout.stage > 1) & _unlike(c),
        "{c.layout.stage} stages of {c.layout.virtual_stages} pieces", "its stages run in step, and hold equal pieces",
        lambda c: f"{', '.join(map(str, _equal_pieces(c.model.spec.order)))} pieces in all",
    ),
    Rule(
        lambda c: (c.layout.stage > 1) & ((c.remat_layers or 0) % (c.layout.stage * c.layout.virtual_stages) > 0),
        "remat_layers={c.remat_layers}", "pieces of the model run in step",
        lambda c: f"a multiple of {c.layout.stage * c.layout.virtual_stages}",
    ),
    Rule(
        lambda c: bool(_kept_on_chip(c)),
        lambda c: f"offload={'+'.join(_kept_on_chip(c))}", f"it keeps {' and '.join(OFFLOADED)} in the host's memory",
        f"offload={'+'.join(OFFLOADED)}",
    ),
    Rule(
        lambda c: "activations" in c.layout.offload and c.offload_layers is not None,
        "offload=activations:{c.offload_layers}", "it keeps those of all layers in the host's memory, or of none",
        "offload=activations",
    ),
    Rule(
        lambda c: ("activations" in c.layout.offload) & (c.layout.stage > 1),
        "offload=activations with {c.layout.stage} stages", "stages of a pipeline keep activations on their chips",
        "offload=optimizer",
    ),
    Rule(
        _is_uneven, _uneven, "it splits into equal parts, and pads nothing", "sizes that divide it",
    ),
)  # fmt: skip
