"""The verbs that need JAX, where it is not installed: their help is printed, and what is missing is said."""

import subprocess
import sys

BLOCKED = ("jax", "jaxlib", "orbax", "tokenizers", "libtpu")
HIDING = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED})); from meshwise.cli.main import main"


#: Verbs that cannot go on without, each to the end of what it says.
CALLS = (
    ["bench", "matmul", "--sizes", "8x8x8"],
    ["run", "D=8 F=16 L=1 N=1 K=1 H=8 V=8", "--on", "h100:1", "--batch-tokens", "64", "--seq-len", "8",
     "--layout", "fsdp=1"],
)  # fmt: skip


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run it in an interpreter that finds none of these libraries."""
    code = f"{HIDING}; {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603


def test_help_is_printed_and_what_is_missing_is_said():
    verbs = ("bench", "run", "verify")
    done = run(f"print([main([verb, '--help']) for verb in {verbs}], [main(words) for words in {CALLS}])")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[0, 0, 0] [4, 4]")
    assert [line.startswith("Usage: ") for line in done.stdout.splitlines()].count(True) == len(verbs)
    assert all(f"Usage: meshwise {verb}" in done.stdout for verb in verbs)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 2
    assert all("executing a plan needs JAX: pip install 'meshwise[jax]'" in line for line in said)


def test_python_too():
    code = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED})); from meshwise.runtime import train_step"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert "MissingDependencyError: executing a plan needs JAX: pip install 'meshwise[jax]'" in done.stderr
