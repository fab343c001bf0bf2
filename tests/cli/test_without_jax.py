"""The verbs that need JAX, where it is not installed: their help is printed, and what is missing is said."""

import subprocess
import sys

import pytest

BLOCKED = ("jax", "jaxlib", "orbax", "tokenizers", "libtpu")
HIDING = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED})); from meshwise.cli.main import main"


def meshwise(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an interpreter that finds none of these libraries."""
    code = f"{HIDING}; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)  # noqa: S603


def test_help_is_printed():
    verbs = ("bench", "run", "verify")
    code = f"{HIDING}; print([main([verb, '--help']) for verb in {verbs}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", "[0, 0, 0]")
    assert all(f"Usage: meshwise {verb}" in done.stdout for verb in verbs)


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "matmul", "--sizes", "8x8x8"],
        ["run", "D=8 F=16 L=1 N=1 K=1 H=8 V=8", "--on", "h100:1", "--batch-tokens", "64", "--seq-len", "8",
         "--layout", "fsdp=1"],
    ],
)  # fmt: skip
def test_what_is_missing_is_said(words):
    done = meshwise(*words)
    assert done.returncode == 4
    assert "error: executing a plan needs JAX: pip install 'meshwise[jax]'" in done.stderr
    assert done.stdout == ""


def test_python_too():
    code = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED})); from meshwise.runtime import train_step"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert "MissingDependencyError: executing a plan needs JAX: pip install 'meshwise[jax]'" in done.stderr
