"""Compiling ahead of time: what is cached, what is refused, and what a message of memory says."""

import gzip
import importlib.util
import re
import subprocess
import sys

import pytest

from meshwise.compiler import environment
from meshwise.compiler.compiling import Compiled, cache_folder, compile_ahead, content_key, read_entry, write_entry
from meshwise.compiler.environment import check_compiler, compiler_versions
from meshwise.compiler.memory import CompiledMemory, OutOfMemory
from meshwise.compiler.targets import Target, describe_gpu, known_gpus
from meshwise.core.errors import CompilerError, MissingDependencyError
from meshwise.hardware import load_chip, parse_cluster
from meshwise.hardware.names import chip_of_device

MEMORY = CompiledMemory(arguments=100, outputs=60, temporaries=30, aliased=50, code=5, peak=120)
TARGET = Target.of(parse_cluster("v5e:2x2"))


class Analysis:
    argument_size_in_bytes, output_size_in_bytes, temp_size_in_bytes = 100, 60, 30
    alias_size_in_bytes, generated_code_size_in_bytes, peak_memory_in_bytes = 50, 5, 120
    host_argument_size_in_bytes = host_temp_size_in_bytes = 0


class Program:
    """A lowered program that counts how often it is compiled."""

    def __init__(self, text="module", error=None):
        self.text, self.error, self.compiled = text, error, 0

    def as_text(self):
        return self.text

    def compile(self, compiler_options=None):
        assert compiler_options is None
        self.compiled += 1
        if self.error:
            raise RuntimeError(self.error)
        return self

    def memory_analysis(self):
        return Analysis()


@pytest.fixture
def _no_compiler_needed(monkeypatch):
    monkeypatch.setattr("meshwise.compiler.compiling.prepare", lambda _: None)
    monkeypatch.setattr("meshwise.compiler.compiling.compiler_versions", lambda _: {"jax": "1"})


@pytest.mark.usefixtures("_no_compiler_needed")
def test_a_program_is_compiled_once(tmp_path):
    program = Program()
    first = compile_ahead(program, TARGET, range(4), folder=tmp_path)
    again = compile_ahead(program, TARGET, range(4), folder=tmp_path)
    assert program.compiled == 1
    assert (first.cached, again.cached) == (False, True)
    assert (again.memory, again.hlo, again.versions) == (MEMORY, first.hlo, {"jax": "1"})


@pytest.mark.usefixtures("_no_compiler_needed")
def test_another_order_of_devices_or_target_is_another_program(tmp_path):
    program = Program()
    compile_ahead(program, TARGET, [0, 1, 2, 3], folder=tmp_path)
    compile_ahead(program, TARGET, [0, 2, 1, 3], folder=tmp_path)
    compile_ahead(program, Target.of(parse_cluster("v6e:2x2")), [0, 1, 2, 3], folder=tmp_path)
    assert program.compiled == 3


@pytest.mark.usefixtures("_no_compiler_needed")
def test_what_does_not_fit_is_a_result_and_is_cached(tmp_path):
    program = Program(error="RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 36.63G of 15.75G hbm.")
    compile_ahead(program, TARGET, range(4), folder=tmp_path)
    found = compile_ahead(program, TARGET, range(4), folder=tmp_path)
    assert program.compiled == 1
    assert found.memory is None
    assert found.out_of_memory.used == 36.63 * 2**30


@pytest.mark.usefixtures("_no_compiler_needed")
@pytest.mark.parametrize(
    "words", ["UNIMPLEMENTED: no such thing", "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 245808"]
)
def test_another_failure_is_an_error_with_the_compilers_words(words, tmp_path):
    """A kernel that does not fit on the chip is no program that does not fit into its memory."""
    with pytest.raises(CompilerError, match=f"does not compile: {words}"):
        compile_ahead(Program(error=f"{words}\nmore"), TARGET, range(4), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_torn_entry_counts_as_absent(tmp_path):
    write_entry("k", {"a": 1}, tmp_path)
    assert read_entry("k", tmp_path)["a"] == 1
    file = tmp_path / "k.json.gz"
    file.write_bytes(file.read_bytes()[:20])
    assert read_entry("k", tmp_path) is None
    with gzip.open(file, "wt") as out:
        out.write('{"key": "another"}')
    assert read_entry("k", tmp_path) is None
    assert read_entry("none", tmp_path) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert write_entry("k", {}, tmp_path / "file" / "folder") is None


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MESHWISE_CACHE", raising=False)
    assert cache_folder() == tmp_path / "xdg" / "meshwise" / "compiled"
    monkeypatch.setenv("MESHWISE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "compiled"
    monkeypatch.delenv("MESHWISE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "meshwise" / "compiled"


def test_a_key_depends_on_all_of_it():
    keys = {content_key(*args) for args in (("a", {}), ("b", {}), ("a", {"x": 1}), ("a", {"x": 2}))}
    assert len(keys) == 4


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_an_absent_compiler_is_named_with_the_line_that_installs_it(monkeypatch, platform):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'meshwise\[{platform}\]'"):
        environment.check_compiler(platform)
    monkeypatch.setattr(environment.importlib.util, "find_spec", _no_parent)
    with pytest.raises(MissingDependencyError):
        environment.check_compiler(platform)


def _no_parent(name):
    raise ModuleNotFoundError(name)


def test_the_compiler_of_cuda_13_is_found_where_it_alone_is(monkeypatch):
    found = importlib.util.find_spec

    def find(name, *rest):
        if "xla_cuda" in name:
            return found("jax") if name.endswith("13") else None
        return found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    check_compiler("cuda")
    assert set(compiler_versions("cuda")) >= {"jax", "jaxlib"}, "packages that are not there are left out"


@pytest.mark.parametrize("name", known_gpus())
def test_a_gpu_is_called_as_its_driver_does(name):
    """By that JAX knows its kind, and XLA how long its collectives take."""
    called = re.search(r'"(NVIDIA .*)"', describe_gpu(load_chip(name)))[1]
    assert chip_of_device(called) == name.replace("h800", "h100"), "JAX's kernels do not know an H800"


def test_the_package_is_imported_without_jax():
    code = "import meshwise.compiler.compiling, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603  (our own words)


def test_memory_adds_up():
    assert MEMORY.total == 100 + 30 + 60 - 50
    assert CompiledMemory.from_json(MEMORY.to_json()) == MEMORY
    compiled = Compiled("v5e:2x2", "", MEMORY, None, {"jax": "1"}, 2.0, cached=False)
    assert Compiled.from_json(compiled.to_json(), cached=False) == compiled


@pytest.mark.parametrize(
    ("message", "used", "capacity"),
    [
        ("Used 36.63G of 15.75G hbm. Exceeded hbm capacity by 20.88G.", 36.63 * 2**30, 15.75 * 2**30),
        (
            "Ran out of memory on HBM, the total memory required for temporaries (44.72G) exceeds available (15.75G).",
            44.72 * 2**30,
            15.75 * 2**30,
        ),
        ("RESOURCE_EXHAUSTED: no numbers", None, None),
    ],
)
def test_what_a_message_of_memory_says(message, used, capacity):
    assert (OutOfMemory(message).used, OutOfMemory(message).capacity) == (used, capacity)


def test_the_breakdown_of_a_message():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 36.63G of 15.75G hbm.\n\n"
        "Total hbm usage >= 36.88G:\n    reserved        258.00M \n    program          36.63G \n\nother words"
    )
    assert OutOfMemory(message).breakdown == ("    reserved        258.00M", "    program          36.63G")
