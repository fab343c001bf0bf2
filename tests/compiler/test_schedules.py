"""A program told how long everything takes is kept where it takes less, fits, and there is something left to hide."""

from dataclasses import dataclass, replace

import pytest

from meshwise.compiler.hlo.reader import Module
from meshwise.compiler.memory import CompiledMemory
from meshwise.compiler.schedules import fastest, profile_of
from tests.compiler.hlo.test_schedule import DONE, GATHER_S, PRODUCT, PRODUCT_S, RATES, START, floor_of

OWN, TOLD = {"in_flight": 1}, {"in_flight": 8}
GIB = 2**30
MEMORY = CompiledMemory(arguments=GIB, outputs=0, temporaries=GIB, aliased=0, code=0, peak=2 * GIB)

BESIDE = floor_of(START, PRODUCT.format(n=1), DONE)
AFTER = floor_of(START, DONE, PRODUCT.format(n=1))
STARTS = [START.replace("%s", f"%s{n}") for n in range(5)]
ENDS = [DONE.replace("%d", f"%d{n}").replace("%s", f"%s{n}") for n in range(5)]
#: Its wires are busy for longer than what it computes.
ON_WIRES = floor_of(*STARTS, *ENDS, PRODUCT.format(n=1))


@dataclass
class Compiled:
    module: Module
    memory: CompiledMemory | None = MEMORY


@dataclass
class Compiler:
    """Compiles as if in turn: with its own options, with others, and by seconds that it is told."""

    own: Compiled
    draft: Compiled
    told: Compiled

    def __post_init__(self):
        self.asked = []

    def __call__(self, options):
        self.asked.append(options)
        return (self.own, self.draft, self.told)[len(self.asked) - 1]


def chosen(own, told, *, draft=None, asked=TOLD, rates=RATES):
    compiler = Compiler(own, draft or replace(own), told)
    return fastest(compiler, OWN, asked, AFTER.mesh, rates), compiler


def test_the_program_with_the_least_time_is_kept():
    plain, told = Compiled(AFTER.module), Compiled(BESIDE.module)
    found, compiler = chosen(plain, told)
    assert found is told
    assert compiler.asked == [OWN, TOLD, {**TOLD, "fdo_profile": profile_of(AFTER)}]
    assert chosen(plain, Compiled(AFTER.module))[0] is plain
    assert chosen(plain, Compiled(AFTER.module), draft=told)[0] is told


def test_nothing_is_compiled_again_where_nothing_can_be_won():
    hidden, told = Compiled(BESIDE.module), Compiled(BESIDE.module)
    assert chosen(hidden, told)[1].asked == [OWN]
    assert chosen(Compiled(ON_WIRES.module), told)[1].asked == [OWN]
    assert chosen(Compiled(AFTER.module), told, asked={})[1].asked == [OWN]
    assert chosen(Compiled(AFTER.module, None), told)[1].asked == [OWN]
    assert chosen(Compiled(AFTER.module), told, rates=replace(RATES, chip=None))[1].asked == [OWN]


@pytest.mark.parametrize(("gib", "fits"), [(70, True), (90, False)])
def test_it_needs_no_more_memory_than_the_chip_has(gib, fits):
    plain, told = Compiled(AFTER.module), Compiled(BESIDE.module, replace(MEMORY, temporaries=gib * GIB))
    assert chosen(plain, told)[0] is (told if fits else plain)
    larger = replace(plain, memory=replace(MEMORY, temporaries=95 * GIB))
    assert chosen(larger, told)[0] is told, "neither fits: the one that takes less"


def test_a_profile_says_microseconds_and_of_collectives_that_they_share_the_wires():
    lines = profile_of(BESIDE).decode().splitlines()
    found = {line.split('"')[1]: float(line.split()[-2]) for line in lines}
    assert found == {"s": pytest.approx(3e6 * GATHER_S, abs=1e-3), "p1": pytest.approx(1e6 * PRODUCT_S, abs=1e-3)}
