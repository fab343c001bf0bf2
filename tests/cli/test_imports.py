"""What the quick paths must not load, seen from a fresh interpreter."""

import subprocess
import sys


def modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after `code`."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    return set(done.stderr.splitlines())


def loaded_after(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after `code`."""
    return {name.split(".")[0] for name in modules_after(code)}


def test_importing_the_package_loads_no_jax() -> None:
    loaded = loaded_after("import meshwise")
    assert "meshwise" in loaded
    assert not {"jax", "jaxlib", "numpy", "pydantic"} & loaded


def test_help_loads_neither_numpy_nor_pydantic_nor_rich() -> None:
    calls = (["--help"], ["--version"], ["no-such-command"])
    loaded = loaded_after(f"from meshwise.cli.main import main\nfor words in {calls}: main(words)")
    assert "click" in loaded
    assert not {"jax", "numpy", "pydantic", "rich", "matplotlib"} & loaded


def test_planning_training_loads_no_package_that_it_does_not_use() -> None:
    loaded = modules_after("from meshwise.cli.main import COMMANDS; COMMANDS['plan'].load().lazy['train'].load()")
    assert "meshwise.search.search" in loaded
    others = ("compiler", "exports.serving", "runtime", "scoring", "simulation", "costs.serving", "search.serving")
    found = {name for name in loaded if name.startswith(tuple(f"meshwise.{other}" for other in others))}
    # What our own runtime executes is read as what other tools do, without JAX.
    assert found == {f"meshwise.runtime{part}" for part in ("", ".devices", ".overlap", ".refusals")}
    assert "jax" not in loaded
    assert not {"jax", "matplotlib"} & {name.split(".")[0] for name in loaded}


def test_loading_a_command_leaves_the_collector_of_garbage_as_it_was() -> None:
    load = "import gc\nfrom meshwise.cli.main import COMMANDS\n{}\n"
    load += "COMMANDS['chips'].load()\nassert gc.isenabled() is {}"
    modules_after(load.format("", True))
    modules_after(load.format("gc.disable()", False))
