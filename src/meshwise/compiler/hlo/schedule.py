"""How long a compiled program must take at given rates, by the order in which it runs: what waits, and what is hidden.

One instruction after the other, each at the roofline; collectives that start at one place and are waited for at another
use their links meanwhile, one at a time on the same links. A lower bound: rates are data-sheet rates, and nothing is
charged for starting. Not here: which rates (`meshwise.compiler.floor`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwise.compiler.hlo.bytes_moved import flops_of, moved_by
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.loops import trip_count
from meshwise.compiler.hlo.reader import Computation, Instruction, Module
from meshwise.compiler.hlo.traffic import Emitted, emitted_collectives

_CHAIN = re.compile(r'chain_id="(\w+)"')

#: Instructions that take no time.
_FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective of the program.

    Args:
        emitted: itself.
        seconds: of one run, alone on its links.
        exposed: seconds of one run in which the program does nothing else.
    """

    emitted: Emitted
    seconds: float
    exposed: float

    @property
    def per_step(self) -> tuple[float, float]:
        """Seconds of a step that it takes, and those that are exposed."""
        return self.seconds * self.emitted.count, self.exposed * self.emitted.count


@dataclass(frozen=True)
class Schedule:
    """A scheduled program at given rates.

    Args:
        module: the program.
        mesh: that it was compiled for.
        work: (FLOPs, format of the operands, bytes) of an instruction -> seconds.
        wire: seconds of one run of a collective.
    """

    module: Module
    mesh: DeviceMesh
    work: Callable[[float, str, float], float]
    wire: Callable[[Emitted], float]
    _exposed: dict[tuple[str, str], float] = field(default_factory=dict, repr=False)
    _times: dict[str, float] = field(default_factory=dict, repr=False)

    @cached_property
    def seconds(self) -> float:
        """Of the whole program."""
        return self._time(self.module.main)

    @cached_property
    def collectives(self) -> tuple[Sent, ...]:
        """All collectives."""
        assert self.seconds >= 0  # which finds out what is exposed
        return tuple(
            Sent(one, self._seconds[one.computation.name, one.instruction.name], self._exposed.get(_key(one), 0.0))
            for one in self._emitted
        )

    def durations(self, shared: float) -> Mapping[str, float]:
        """Instruction -> seconds of one run; of what starts a collective, `shared` times those on its links."""
        assert self.seconds >= 0  # which finds the computations that run
        found: dict[str, float] = {}
        for computation in (self.module.computations[name] for name in self._times):
            walk = _Walk(self, computation)
            for i in computation.instructions:
                if i.opcode not in _FREE and not i.opcode.endswith("-done"):
                    sent = walk.sends(i)
                    found[i.name] = shared * sent if sent else walk.work(i)
        return found

    @cached_property
    def _emitted(self) -> tuple[Emitted, ...]:
        return emitted_collectives(self.module, self.mesh)

    @cached_property
    def _seconds(self) -> Mapping[tuple[str, str], float]:
        return {_key(one): self.wire(one) for one in self._emitted}

    @cached_property
    def _links(self) -> Mapping[tuple[str, str], frozenset[str]]:
        """Mesh axes whose links a collective uses."""
        return {_key(one): frozenset(a.partition("/")[0] for a in one.axes) for one in self._emitted}

    @cached_property
    def _chains(self) -> Mapping[tuple[str, str], tuple[str, str]]:
        """Number of a collective in steps -> the step that it is counted at."""
        return {
            (chain[1], _channel(one.instruction)): _key(one)
            for one in self._emitted
            if (chain := _CHAIN.search(one.instruction.tail)) is not None
        }

    def _time(self, computation: Computation) -> float:
        if computation.name not in self._times:
            self._times[computation.name] = 0.0  # a program has no cycles; this is for one that is torn
            self._times[computation.name] = _Walk(self, computation).run()
        return self._times[computation.name]

    def body(self, name: str) -> float:
        """Seconds of a computation that an instruction runs."""
        return self._time(self.module.computations[name])


def _key(one: Emitted) -> tuple[str, str]:
    return one.computation.name, one.instruction.name


#: Computation and instruction of a collective.
_Key = tuple[str, str]


@dataclass
class _Walk:
    """One run through a computation."""

    whole: Schedule
    computation: Computation
    now: float = 0.0
    last: dict[str, _Key] = field(default_factory=dict)  # mesh axis -> the collective that uses its links last
    begins: dict[_Key, float] = field(default_factory=dict)
    ends: dict[_Key, float] = field(default_factory=dict)
    before: dict[_Key, _Key] = field(default_factory=dict)  # collective -> the one that it waited for
    started: dict[str, _Key] = field(default_factory=dict)  # start instruction -> collective

    def run(self) -> float:
        steps = {i.name: self._steps(i) for i in self.computation.instructions if i.opcode in ("fusion", "async-start")}
        last = {key: name for name, keys in steps.items() for key in keys}
        for i in self.computation.instructions:
            if i.opcode == "async-start" and steps[i.name]:
                self.started[i.name] = steps[i.name][0]
                self._start(self.started[i.name])
            elif i.opcode == "async-update" and i.operands[0] in self.started:
                self.started[i.name] = self.started[i.operands[0]]
            elif i.opcode.endswith("-done") and i.operands and i.operands[0] in self.started:
                self._wait(self.started[i.operands[0]])
                self.now += self.work(i)
            elif (self.computation.name, i.name) in self.whole._seconds:
                self._collective(i)
            else:
                inside = steps.get(i.name, ())
                for key in inside:
                    if key not in self.ends:
                        self._start(key)
                self.now += self.work(i)
                for key in inside:
                    if last[key] == i.name:
                        self._wait(key)
        for key in [k for k, end in self.ends.items() if end > self.now]:
            self._wait(key)
        return self.now

    def _steps(self, i: Instruction) -> tuple[_Key, ...]:
        """Collectives that run inside of a fusion, beside its work; those in several fusions are one, the first's."""
        found = []
        waiting = list(i.called)
        while waiting:
            inside = self.whole.module.computations[waiting.pop()]
            for inner in inside.instructions:
                key = (inside.name, inner.name)
                chain = _CHAIN.search(inner.tail) if "chain_id" in inner.tail else None
                if chain is not None:
                    key = self.whole._chains.get((chain[1], _channel(inner)), key)
                if key in self.whole._seconds:
                    found.append(key)
                waiting += inner.called if inner.opcode in ("fusion", "call", "async-start") else ()
        return tuple(dict.fromkeys(found))

    def _collective(self, i: Instruction) -> None:
        key = (self.computation.name, i.name)
        self._start(key)
        if i.opcode.endswith("-start"):
            self.started[i.name] = key
        else:
            self._wait(key)

    def _start(self, key: _Key) -> None:
        links = self.whole._links[key]
        busy = max((self.last[a] for a in links if a in self.last), key=self.ends.__getitem__, default=key)
        self.begins[key] = self.now
        if busy != key and self.ends[busy] > self.now:
            self.begins[key], self.before[key] = self.ends[busy], busy
        self.ends[key] = self.begins[key] + self.whole._seconds[key]
        self.last.update(dict.fromkeys(links, key))

    def _wait(self, key: _Key) -> None:
        """Until it has ended; what is waited for is its own, and of those before it on the same links."""
        exposed, until, at = self.whole._exposed, max(self.now, self.ends[key]), key
        while self.ends[at] > self.now:
            exposed[at] = exposed.get(at, 0.0) + self.ends[at] - max(self.now, self.begins[at])
            if at not in self.before:
                break
            at = self.before[at]
        self.now = until

    def sends(self, i: Instruction) -> float:
        """Seconds on its links of the collective that an instruction starts, 0 where it starts none."""
        inside = self._steps(i) if i.opcode == "async-start" else ((self.computation.name, i.name),)
        return sum(self.whole._seconds.get(key, 0.0) for key in inside)

    def work(self, i: Instruction) -> float:
        """Seconds of one run at the roofline, of loops and calls those of what they run."""
        if i.opcode == "while":
            trips = trip_count(self.whole.module, self.computation, i)
            body, condition = i.computation("body"), i.computation("condition")
            return (self.whole.body(body) + self.whole.body(condition)) * (1 if trips is None else trips)
        if i.opcode == "conditional":
            return max((self.whole.body(name) for name in i.called), default=0.0)
        if i.opcode in ("call", "async-start"):
            return sum(self.whole.body(name) for name in i.called)
        flops, dtype = flops_of(self.whole.module, self.computation, i)
        return self.whole.work(flops, dtype, moved_by(self.whole.module, self.computation, i))


def _channel(i: Instruction) -> str:
    found = re.search(r"\bchannel_id=(\d+)", i.tail)
    return found[1] if found else ""
