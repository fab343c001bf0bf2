"""What an event of an xplane means: names of its plane's metadata, and the operation of the instruction that it is of.

Not here: planes and lines (`xplane`), what an instruction does (`hlo`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from meshwise.profile.kinds import collective_kind, kernel_category
from meshwise.profile.reading.hlo import HloProgram, phase_of
from meshwise.profile.reading.hlo_parts import arrays_in, groups_in
from meshwise.profile.reading.protos import Message
from meshwise.profile.trace import Activity, Collective, HostThread, Marker, OpKind, OpTable, Stream
from meshwise.profile.work import array_bytes


@dataclass
class Names:
    """Names of one plane's metadata."""

    stats: dict[int, str]
    events: dict[int, Message]

    @classmethod
    def of(cls, plane: Message) -> Names:
        """Those of a plane."""
        return cls({e.key: e.value.name for e in plane.stat_metadata}, {e.key: e.value for e in plane.event_metadata})

    def values(self, stats: Message) -> dict[str, object]:
        """Statistics by name; most are references or numbers that are not 0."""
        names, found = self.stats, dict[str, object]()
        for stat in stats:
            reference = stat.ref_value
            found[names.get(stat.metadata_id, "")] = (
                names.get(reference, "") if reference else stat.int64_value or self.value(stat)
            )
        return found

    def numbered(self, *wanted: str) -> dict[str, int]:
        """Numbers of the statistics with these names; -1, which none has, where the plane has none."""
        numbers = {name: number for number, name in self.stats.items()}
        return {name: numbers.get(name, -1) for name in wanted}

    def value(self, stat: Message) -> object:
        """The value of one, references resolved."""
        if stat.HasField("ref_value"):
            return self.stats.get(stat.ref_value, "")
        for name in ("int64_value", "uint64_value", "str_value", "double_value", "bytes_value"):
            if stat.HasField(name):
                return getattr(stat, name)
        return None


@dataclass
class Reader:
    """Collects what the planes hold."""

    source: str
    ops: OpTable = field(default_factory=OpTable)
    known: dict[tuple[object, ...], int] = field(default_factory=dict)
    programs: dict[int, HloProgram] = field(default_factory=dict)
    by_name: dict[str, list[HloProgram]] = field(default_factory=dict)
    devices: dict[tuple[str, int], list[Stream]] = field(default_factory=dict)
    chips: dict[tuple[str, int], str] = field(default_factory=dict)
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    markers: list[Marker] = field(default_factory=list)
    threads: list[HostThread] = field(default_factory=list)
    texts: dict[str, int] = field(default_factory=dict)
    launches: dict[int, int] = field(default_factory=dict)
    unknown: int = 0
    unplaced: int = 0
    broken: int = 0

    def program_of(self, stats: dict[str, object]) -> tuple[int | str, HloProgram | None]:
        """The program of an event, by its number, else by its name if one alone has it; and what it is known by."""
        number, name = stats.get("program_id"), str(stats.get("hlo_module", ""))
        if isinstance(number, int) and number in self.programs:
            return number, self.programs[number]
        named = self.by_name.get(name, [])
        return name, named[0] if len(named) == 1 else None


def hlo_kind(reader: Reader, name: str, stats: dict[str, object], text: str) -> OpKind:
    """The operation of an instruction: from its program's HLO, else from the event's own words.

    What the trace itself says (a TPU's category, FLOPs, bytes) goes before what is counted here.
    """
    _, program = reader.program_of(stats)
    found = program.op(name) if program is not None else None
    if found is None:
        reader.unknown += 1
        found = _from_words(name, stats, text)
    changes: dict[str, object] = {}
    if stats.get("hlo_category"):
        changes["label"] = str(stats["hlo_category"])
    for key, attribute in (("flops", "flops"), ("bytes_accessed", "num_bytes")):
        if isinstance(stats.get(key), int | float) and found.activity != Activity.CONTROL:
            changes |= {attribute: float(str(stats[key])), "source": "trace"}
    if not found.scope and stats.get("tf_op"):
        scope = str(stats["tf_op"]).rstrip(":")
        changes |= {"scope": scope, "phase": phase_of(scope)}
    return replace(found, **changes) if changes else found  # type: ignore[arg-type]


#: Wraps a scope of JAX, and says nothing of what is computed there.
_WRAPPED = re.compile(r"\b(transpose|jvp|vmap|jit|pjit|remat|checkpoint)\(")


def _from_words(name: str, stats: dict[str, object], text: str) -> OpKind:
    """An operation whose program is not in the file."""
    label = str(stats.get("hlo_category", ""))
    plain = re.sub(r"[.\d]+$", "", name)
    words = f"{label} {plain}"
    scope = str(stats.get("tf_op") or stats.get("name") or "").rstrip(":")
    base = OpKind(name, Activity.COMPUTE, "other", scope, phase=phase_of(scope), label=label,
                  program=str(stats.get("hlo_module", "")))  # fmt: skip
    results, operands = arrays_in(text)
    if re.search(r"all-|reduce-scatter|collective|ragged-all|\bsend|\brecv", words):
        named = collective_kind(plain)
        kind = named if named != "collective" else collective_kind(label)
        groups = groups_in(text)
        largest = max(map(array_bytes, (*results, *operands)), default=0.0)
        sent = Collective(kind, largest or None, len(groups[0]) if groups else None, groups)
        return replace(base, activity=Activity.COLLECTIVE, category="collective", collective=sent)
    if re.search(r"copy-(start|done)|infeed|outfeed|async-start|async-done", words):
        return replace(base, activity=Activity.COPY, category="copy")
    if re.match(r"(while|conditional|call)\b", plain):
        return replace(base, activity=Activity.CONTROL, category="control")
    if "convolution" in label or " dot(" in text or plain.startswith("dot"):
        category = "matmul"
    elif label in ("data formatting", "copy") or plain in ("copy", "transpose", "bitcast"):
        category = "layout"
    else:
        category = kernel_category(f"{_WRAPPED.sub('(', scope)} {plain}".strip())
        if category == "other" and re.search(r"loop|elementwise", label):
            category = "elementwise"
    return replace(base, category=category, results=results, operands=operands)
