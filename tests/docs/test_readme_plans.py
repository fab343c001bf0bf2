"""The plans of the README go into the tools that it names, and through the compiler.

Slow: it searches the README's jobs, a whole pod among them, and compiles all layers of a model of 70B parameters.
"""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import meshwise
from meshwise.exports import runs_in

pytestmark = pytest.mark.slow

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ meshwise plan train (.*)$", README, re.MULTILINE)


@cache
def planned(command, **more):
    """What a command asks, asked from Python."""
    model, *words = shlex.split(command)
    asked = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    return meshwise.plan_train(model, **asked, **more).plans


def test_the_readme_has_plans():
    assert len(COMMANDS) > 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_plan_exports_to_the_tools_that_it_names(command):
    for plan in planned(command):
        tools = [tool for tool in runs_in(plan) if tool != "meshwise"]
        assert tools
        assert all(meshwise.export(plan, to=tool).text for tool in tools)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_compiler_agrees_with_the_best_plan_of_our_own_runtime(command):
    pytest.importorskip("libtpu" if "v5p" in command else "jax_cuda12_plugin")
    verified = meshwise.verify(planned(command, tool="meshwise")[0])
    lines = {line.name: line for line in verified.lines}
    assert verified.fits
    assert lines["arguments"].compiled == pytest.approx(lines["arguments"].predicted, rel=0.01)
    assert lines["peak"].compiled == pytest.approx(lines["peak"].predicted, rel=0.15)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_plan_can_take_the_time_that_it_says(command):
    pytest.importorskip("libtpu" if "v5p" in command else "jax_cuda12_plugin")
    plan = planned(command)[0]
    if "meshwise" not in runs_in(plan):
        pytest.skip("another tool's plan")
    verified = meshwise.verify(plan)
    assert verified.fits
    assert verified.unexplained_share < 0.02
    assert verified.floor.verdict != "impossible"
