"""Tools that run plans, as a search reads them: which of its candidates at least one of them takes.

A tool is a list of conditions on a layout; `exports` has them. Not here: any tool's own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from meshwise.costs.arithmetic import Condition
from meshwise.search.candidates import CandidateTable, ComputeVariant, Mask, PipelineVariant
from meshwise.sharding.layout import MESH_AXES, Layout

if TYPE_CHECKING:  # planning training loads nothing of serving
    from meshwise.costs.serving.answer import ServingSetup
    from meshwise.sharding.serving import ServingLayout

#: True of layouts that a tool cannot express; sizes may be arrays, an entry a layout.
Refusal = Callable[[Layout], Condition]


@dataclass(frozen=True)
class Tool:
    """A tool that runs plans of one job.

    Args:
        name: as `--tool` and `--to` take it.
        refusals: each true of layouts that the tool cannot express.
    """

    name: str
    refusals: tuple[Refusal, ...]

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
        known: dict[ServingLayout, tuple[bool, bool]] = {}
        for layout in layouts:
            if layout not in known:
                one = self.takes(kind, layout, 1, None)
                known[layout] = one, several and one and self.takes(kind, layout, 2, None)
        each = np.array([known[layout] for layout in layouts], bool).reshape(-1, 2)
        return each[:, 0], each[:, 1]


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
    """The compute variants that some tool may take; all of them without tools."""
    return tuple(v for v in variants if not tools or any(t.may_run(v.layout_choices) for t in tools))


def possible_schedules(tools: Sequence[Tool], schedules: Sequence[PipelineVariant]) -> tuple[PipelineVariant, ...]:
    """The schedules that some tool may take; where no tool has pipelines, the first stands for one stage."""
    kept = [s for s in schedules if not tools or any(t.may_run(asdict(s), {"stage": 2}) for t in tools)]
    return tuple(kept or schedules[:1])


class ToolMasks:
    """Which candidates of one network at least one tool takes.

    A condition is worked out once for all rows of the table, for each combination of the choices that it reads.

    Args:
        tools: at least one.
        table: meshes and cuts of the batch.
    """

    def __init__(self, tools: Sequence[Tool], table: CandidateTable) -> None:
        self.tools = tools
        self._sizes = {a: table.axis(a) for a in MESH_AXES}
        self._sizes |= {"micro_batch": table.micro_batch, "num_microbatches": table.num_microbatches}
        self._read: dict[Refusal, set[str]] = {}
        self._known: dict[tuple[Refusal, tuple[object, ...]], bool | Mask] = {}
        self._names: dict[str, tuple[str, ...]] = {}  # choices that some condition of a tool reads
        self._tools: dict[tuple[str, tuple[str, ...], tuple[object, ...]], tuple[Mask, ...] | None] = {}

    def conditions(self, choices: Mapping[str, object]) -> tuple[tuple[Mask, ...], ...]:
        """Of each tool that takes some rows of the table under one combination of choices: which rows it refuses.

        A tool takes the rows that none of its conditions holds for.
        """
        found = (self._conditions_of(tool, choices) for tool in self.tools)
        return tuple(rows for rows in found if rows is not None)

    def _conditions_of(self, tool: Tool, choices: Mapping[str, object]) -> tuple[Mask, ...] | None:
        """The rows that each condition of a tool refuses; None where one refuses all."""
        names = self._names.get(tool.name, ())
        key = tool.name, names, tuple(choices[name] for name in names)
        if key not in self._tools:
            rows = [self._refused(refused, choices) for refused in tool.refusals]
            # What was worked out with fewer choices read stands under keys that no longer come up.
            names = self._names[tool.name] = tuple(sorted({n for r in tool.refusals for n in self._read[r]}))
            key = tool.name, names, tuple(choices[name] for name in names)
            some = tuple(r for r in rows if not isinstance(r, bool))
            self._tools[key] = None if any(r is True for r in rows) else some
        return self._tools[key]

    def _refused(self, refused: Refusal, choices: Mapping[str, object]) -> bool | Mask:
        read = self._read.setdefault(refused, set())
        key = refused, tuple(choices[name] for name in sorted(read))
        if key not in self._known:
            layout = _Partly(self._sizes, choices)
            rows = refused(cast(Layout, layout))
            # What was worked out with fewer choices read stands under keys that no longer come up.
            read |= layout.read
            key = refused, tuple(choices[name] for name in sorted(read))
            self._known[key] = np.asarray(rows, bool) if np.ndim(rows) else bool(rows)
        return self._known[key]
