"""What type checkers make of calls of the public functions; that the stub is current is a test of the pages."""

import subprocess
import sys

import pytest

USER = """
import meshwise

planning = meshwise.plan_train("llama-3-8b", on="v5e:4x4", batch_tokens="1Mi", seq_len=4096, fix={"tensor": 4})
plan: meshwise.Plan = planning.plans[0]
served = meshwise.simulate_serve("engine.json", rate=2.0, max_ttft="200ms")
result = meshwise.run_plan(plan, steps=3)
"""
WRONG = """
import meshwise

meshwise.plan_train("llama-3-8b", batch_tokens="1Mi", seq_len=4096, objective="speed")
meshwise.plan_train("llama-3-8b", batch_tokens="1Mi")
meshwise.plan_serve("llama-3-8b", batch=3)
"""


def mypy(code: str, folder) -> list[str]:
    (folder / "user.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={folder / 'cache'}", "user.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    return [line.partition("error: ")[2] for line in done.stdout.splitlines() if "error: " in line]


@pytest.mark.slow  # mypy reads the whole package; proves that users' calls are checked against the fields
def test_calls_are_checked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    assert mypy(USER, folder) == []
    objective, missing, unknown = mypy(WRONG, folder)
    assert 'Argument "objective"' in objective
    assert "Literal['time', 'cost', 'chips']" in objective
    assert 'Missing named argument "seq_len"' in missing
    assert 'Unexpected keyword argument "batch"' in unknown
