"""What a program contains and nothing can count is named."""

import gzip
import json
from pathlib import Path

import pytest

from meshwise.compiler.hlo.reader import read_module
from meshwise.compiler.hlo.traffic import unread
from meshwise.core.errors import CompilerError

DATA = Path(__file__).parents[2] / "data" / "compiled"


def main(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    head = f"HloModule m, num_partitions=4\n\n{before}ENTRY %main (x: f32[8]) -> f32[8] {{"
    return f"{head}\n  %x = f32[8]{{0}} parameter(0)\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('%y = f32[8]{0} custom-call(%x), custom_call_target="__cudnn$fmha"', "calls of __cudnn$fmha"),
        ("%y = f32[8]{0} all-to-some(%x), channel_id=1, replica_groups=[1,4]<=[4]", "all-to-some: devices take part"),
    ],
)
def test_calls_and_collectives_that_are_not_known(line, words):
    (found,) = unread(read_module(main(f"ROOT {line}")))
    assert found.startswith(words)


def test_a_loop_whose_rounds_depend_on_data():
    loop = """%body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}

%condition (p: (s32[], s32[])) -> pred[] {
  %q = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  ROOT %less = pred[] compare(%j, %m), direction=LT
}

"""
    text = main(
        "%zero = s32[] constant(0)",
        "%n = s32[] parameter(1)",
        "%start = (s32[], s32[]) tuple(%zero, %n)",
        "ROOT %w = (s32[], s32[]) while(%start), condition=%condition, body=%body",
        before=loop,
    )
    assert unread(read_module(text)) == ("the loop w (): its rounds depend on data, and one is counted",)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.gz")), ids=lambda p: p.name)
def test_programs_of_training_steps_are_counted_whole(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        text = file.read()
    hlo = json.loads(text)["compiled"]["hlo"] if path.name.endswith(".json.gz") else text
    assert unread(read_module(hlo)) == ()


def test_a_line_that_is_neither_is_refused():
    with pytest.raises(CompilerError, match="expected an instruction or a computation, found 'what is this'"):
        read_module(main("ROOT %y = f32[8]{0} copy(%x)") + "\nwhat is this\n")
