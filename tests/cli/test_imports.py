"""What the quick paths must not load, seen from a fresh interpreter."""

import subprocess
import sys

import pytest


def loaded_after(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after `code`."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    return {line.split(".")[0] for line in done.stderr.splitlines()}


def test_importing_the_package_loads_no_jax() -> None:
    loaded = loaded_after("import meshwise")
    assert "meshwise" in loaded
    assert not {"jax", "jaxlib", "numpy", "pydantic"} & loaded


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["no-such-command"]])
def test_help_loads_neither_numpy_nor_pydantic_nor_rich(words: list[str]) -> None:
    loaded = loaded_after(f"from meshwise.cli.main import main\nmain({words!r})")
    assert "click" in loaded
    assert not {"jax", "numpy", "pydantic", "rich", "matplotlib"} & loaded
