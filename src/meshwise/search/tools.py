"""Tools that run plans, as a search reads them: which of its candidates at least one of them takes.

A tool is a list of conditions on a layout; `exports` has them. Not here: any tool's own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.arithmetic import Condition
from meshwise.search.candidates import Array, CandidateTable, ComputeVariant, Index, Mask, PipelineVariant
from meshwise.sharding.layout import MESH_AXES, Layout

if TYPE_CHECKING:  # planning training loads nothing of serving
    from meshwise.costs.serving.answer import ServingSetup
    from meshwise.sharding.serving import ServingLayout

#: Bits of a word of conditions.
_WORD = 64

#: Sizes of an axis that is used, as far as any search goes.
_MORE_THAN_ONE = np.arange(2, 1 << 12)

#: True of layouts that a tool cannot express; sizes may be arrays, an entry a layout.
Refusal = Callable[[Layout], Condition]


@dataclass(frozen=True)
class Tool:
    """A tool that runs plans of one job.

    Args:
        name: as `--tool` and `--to` take it.
        refusals: each true of layouts that the tool cannot express.
        takes_rings: whether it takes ring attention wherever it takes keys and values that are gathered.
    """

    name: str
    refusals: tuple[Refusal, ...]
    takes_rings: bool = False

    def runs(self, layout: Layout) -> bool:
        """Whether the tool can express a complete layout."""
        return not any(refused(layout) for refused in self.refusals)

    def may_run(self, choices: Mapping[str, object], sizes: Mapping[str, object] | None = None) -> bool:
        """Whether the tool can express some layout with these sizes and choices."""
        return not any(refuses_all(refused, choices, sizes) for refused in self.refusals)


@dataclass(frozen=True)
class ServingTool:
    """An engine that serves one load.

    Args:
        name: as `--tool` and `--to` take it.
        takes: whether engines of a kind ("serve" for both steps, "prefill", "decode") can have a layout, with so many
            prompts prefilled together and in chunks of so many tokens.
    """

    name: str
    takes: Callable[[str, ServingLayout, int, int | None], bool]

    def runs(self, setup: ServingSetup) -> bool:
        """Whether the engine can express a whole setup."""
        if setup.mode == "aggregated":
            return setup.one_layout and self.takes("serve", setup.decode, setup.prefill_batch, setup.chunk)
        kinds = ("prefill", setup.prefill), ("decode", setup.decode)
        return all(self.takes(kind, layout, setup.prefill_batch, setup.chunk) for kind, layout in kinds)

    def takes_each(self, kind: str, layouts: Sequence[ServingLayout], *, several: bool) -> tuple[Mask, Mask]:
        """Which layouts it takes for one prompt, and for `several` that are prefilled together."""
        one = [self.takes(kind, layout, 1, None) for layout in layouts]
        more = [
            taken and several and self.takes(kind, layout, 2, None) for taken, layout in zip(one, layouts, strict=True)
        ]
        return np.array(one, bool), np.array(more, bool)


class _Unknown(Exception):  # noqa: N818 -- no error: a condition reads what is not known yet
    """A condition reads what is open."""


class _Partly:
    """A layout of which some fields are known, sizes as columns; it remembers which of its choices were read."""

    def __init__(self, sizes: Mapping[str, object], choices: Mapping[str, object]) -> None:
        self.sizes, self.choices, self.read = sizes, choices, set[str]()

    def __getattr__(self, name: str) -> object:
        if name in self.sizes:
            return self.sizes[name]
        if name not in self.choices:
            raise _Unknown(name)
        self.read.add(name)
        return self.choices[name]


def refuses_all(
    refused: Refusal, choices: Mapping[str, object] | None = None, sizes: Mapping[str, object] | None = None
) -> bool:
    """Whether a condition holds for every layout that has these sizes and choices, whatever the others are."""
    try:
        return bool(np.all(refused(cast(Layout, _Partly(sizes or {}, choices or {})))))
    except _Unknown:
        return False


def possible_variants(tools: Sequence[Tool], variants: Iterable[ComputeVariant]) -> tuple[ComputeVariant, ...]:
    """The compute variants that some tool may take; all of them without tools.

    A way to attend that is not the first is one of meshes with an axis `context`.
    """

    def possible(v: ComputeVariant) -> bool:
        first = v.own.context_method == v.asked.context_method[0]
        sizes = {} if first else {"context": _MORE_THAN_ONE}
        return any(t.may_run(v.layout_choices, sizes) for t in tools)

    return tuple(v for v in variants if not tools or possible(v))


def possible_schedules(tools: Sequence[Tool], schedules: Sequence[PipelineVariant]) -> tuple[PipelineVariant, ...]:
    """The schedules that some tool may take; where no tool has pipelines, the first stands for one stage."""
    kept = [s for s in schedules if not tools or any(t.may_run(s.layout_choices, {"stage": 2}) for t in tools)]
    return tuple(kept or schedules[:1])


def possible_meshes(tools: Sequence[Tool], sizes: Mapping[str, Array], values: Mapping[str, Iterable[object]]) -> Mask:
    """Which meshes some tool may take with choices among `values`; those that are not named may be any."""
    refused: Condition = True
    for tool in tools:
        each: Condition = False
        for condition in tool.refusals:
            each = each | _always(condition, sizes, {}, values)
        refused = refused & each
    return np.broadcast_to(np.logical_not(refused), len(next(iter(sizes.values()))))


def _always(
    refused: Refusal, sizes: Mapping[str, Array], choices: Mapping[str, object], values: Mapping[str, Iterable[object]]
) -> Condition:
    """Of which sizes a condition holds with these choices, whatever others it reads, each among its values."""
    try:
        return refused(cast(Layout, _Partly(sizes, choices)))
    except _Unknown as unknown:
        name = str(unknown)
    held: Condition = name in values
    for value in values.get(name, ()):
        if np.any(held):  # else some choice is taken everywhere
            held = held & _always(refused, sizes, {**choices, name: value}, values)
    return held


class ToolMasks:
    """Which candidates of one network at least one tool takes.

    A condition is worked out once for all meshes of the table (for all rows, where it reads how the batch is cut), for
    each combination of the choices that it reads. What a tool refuses is a set of conditions, as bits of two integers,
    of meshes and of rows.

    Args:
        tools: at least one.
        table: meshes and cuts of the batch.
    """

    def __init__(self, tools: Sequence[Tool], table: CandidateTable) -> None:
        self.tools, self.table = tools, table
        self._read: dict[Refusal, tuple[str, ...]] = {}  # choices that a condition reads
        self._reads = 0  # how often more of them became known
        self._groups: dict[str, tuple[list[tuple[Refusal, ...]], int]] = {}  # of a tool, and at which of these it was
        self._several: dict[tuple[tuple[Refusal, ...], tuple[object, ...]], _Bits | None] = {}
        self._known: dict[tuple[Refusal, tuple[object, ...]], bool | _Bits] = {}
        self._names: dict[str, tuple[str, ...]] = {}  # choices that some condition of a tool reads
        self._tools: dict[tuple[str, tuple[str, ...], tuple[object, ...]], _Bits | None] = {}
        self._flags = _Flags(len(table.meshes)), _Flags(len(table))
        self._flags[0].add(np.ones(len(table.meshes), bool))  # what refuses all
        self._ways: dict[frozenset[_Bits], int] = {}  # sets of conditions of which none may hold -> their number
        self._sets: list[tuple[_Words, _Words]] = []  # the same, for `takes`: each of the ways of every number

    def number(self, several: Iterable[Mapping[str, object]]) -> int:
        """Number of the conditions under which a tool takes one of several combinations of choices."""
        found = {self._refusals(tool, choices) for choices in several for tool in self.tools} - {None}
        ways = frozenset({(0, 0)} if (0, 0) in found else found)  # the one takes everything
        return self._ways.setdefault(ways, len(self._ways))  # type: ignore[arg-type]  # without None

    def takes(self, numbers: Index, at: Index) -> Mask:
        """Which rows of the table some tool takes, each under the conditions of a number."""
        out = np.zeros(len(at), bool)
        entries = self.table.mesh_id[at], at
        for words in self._words():
            free = np.ones(len(at), bool)
            for flags, sets, own in zip(self._flags, words, entries, strict=True):
                free &= flags.none_of(sets, numbers, own)
            out |= free
        return out

    def _words(self) -> list[tuple[_Words, _Words]]:
        """For each of the ways in which a tool may take a layout, its conditions on meshes and on rows, by number."""
        if not self._sets or len(self._sets[0][0]) < len(self._ways):
            most = max(map(len, self._ways), default=0)
            every = [[*ways, *[(1, 0)] * (most - len(ways))] for ways in self._ways]
            meshes, rows = self._flags
            self._sets = [
                (meshes.words_of([each[way][0] for each in every]), rows.words_of([each[way][1] for each in every]))
                for way in range(most)
            ]
        return self._sets

    def _refusals(self, tool: Tool, choices: Mapping[str, object]) -> _Bits | None:
        """The conditions of a tool; None where one refuses all."""
        names = self._names.get(tool.name, ())
        key = tool.name, names, tuple([choices[name] for name in names])
        if key not in self._tools:
            each = [self._together(refusals, choices) for refusals in self._grouped(tool)]
            # What was worked out with fewer choices read stands under keys that no longer come up.
            names = self._names[tool.name] = tuple(sorted({n for r in tool.refusals for n in self._read[r]}))
            key = tool.name, names, tuple([choices[name] for name in names])
            self._tools[key] = _all_of(each)
        return self._tools[key]

    def _grouped(self, tool: Tool) -> list[tuple[Refusal, ...]]:
        """Conditions of a tool that read the same choices, as far as is known; each that was not asked yet alone."""
        groups, reads = self._groups.get(tool.name, ([], -1))
        if reads != self._reads:
            by_names: dict[object, list[Refusal]] = {}
            for refused in tool.refusals:
                by_names.setdefault(self._read.get(refused, refused), []).append(refused)
            groups = [tuple(own) for own in by_names.values()]
            self._groups[tool.name] = groups, self._reads
        return groups

    def _together(self, refusals: tuple[Refusal, ...], choices: Mapping[str, object]) -> _Bits | None:
        """Several conditions that read the same choices; None where one refuses all."""
        key = refusals, tuple([choices[name] for name in self._read.get(refusals[0], ())])
        if key not in self._several:
            before = self._reads
            each = [self._refused(refused, choices) for refused in refusals]
            found = _all_of([(0, 0) if bits is False else None if bits is True else bits for bits in each])
            if self._reads != before:  # some have read more than the key says
                return found
            self._several[key] = found
        return self._several[key]

    def _refused(self, refused: Refusal, choices: Mapping[str, object]) -> bool | _Bits:
        key = refused, tuple([choices[name] for name in self._read.get(refused, ())])
        if key not in self._known:
            kind, layout = 0, _Partly(self.table.axes(), choices)
            try:
                held = refused(cast(Layout, layout))
            except _Unknown:  # it reads how the batch is cut
                kind, layout = 1, _Partly(self._rows, choices)
                held = refused(cast(Layout, layout))
            # What was worked out with fewer choices read stands under keys that no longer come up.
            read = tuple(sorted(layout.read.union(self._read.get(refused, ()))))
            self._reads += read != self._read.get(refused)
            self._read[refused] = read
            key = refused, tuple([choices[name] for name in read])
            if np.ndim(held):
                bit = self._flags[kind].add(np.asarray(held, bool))
                self._known[key] = (0, bit) if kind else (bit, 0)
            else:
                self._known[key] = bool(held)
        return self._known[key]

    @cached_property
    def _rows(self) -> dict[str, Array]:
        table = self.table
        cut = {"micro_batch": table.micro_batch, "num_microbatches": table.num_microbatches}
        return {a: table.axis(a) for a in MESH_AXES} | cut


#: A set of conditions, of meshes and of rows: a bit for each.
_Bits = tuple[int, int]

#: [sets, words]: such sets, of meshes or of rows.
_Words = NDArray[np.uint64]


def _all_of(parts: Iterable[_Bits | None]) -> _Bits | None:
    """Conditions of all parts together; None where one of them refuses all."""
    meshes = rows = 0
    for bits in parts:
        if bits is None:
            return None
        meshes, rows = meshes | bits[0], rows | bits[1]
    return meshes, rows


class _Flags:
    """Conditions of some entries: which of them hold, a bit each."""

    def __init__(self, entries: int) -> None:
        self.words, self.number = np.zeros((entries, 1), np.uint64), 0

    def add(self, holds: Mask) -> int:
        """A further condition; its bit."""
        word, bit = divmod(self.number, _WORD)
        if word == self.words.shape[1]:
            self.words = np.pad(self.words, ((0, 0), (0, 1)))
        self.words[:, word] |= holds.astype(np.uint64) << np.uint64(bit)
        self.number += 1
        return 1 << (self.number - 1)

    def words_of(self, sets: Sequence[int]) -> _Words:
        """Sets of conditions as words."""
        width = self.words.shape[1]
        return np.frombuffer(b"".join([s.to_bytes(8 * width, "little") for s in sets]), "<u8").reshape(-1, width)

    def none_of(self, sets: _Words, numbers: Index, at: Index) -> Mask:
        """Of which entries no condition of a set holds; `numbers` says of which."""
        if not sets.any():
            return np.ones(len(at), bool)
        words = self.words[at, : sets.shape[1]]  # none of the sets has a condition that was added since
        return np.asarray(~(words & sets[numbers]).any(axis=1))
