"""Compiles a lowered program ahead of time for devices that are not there, or finds it compiled already.

The program is handed in as JAX lowered it. What is on disk is found by what went in: the lowered text, the target, the
order of devices, versions. Not here: what the compiled program holds (`hlo`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from meshwise.compiler.environment import compiler_versions, prepare
from meshwise.compiler.hlo.reader import Module, read_module
from meshwise.compiler.memory import CompiledMemory, OutOfMemory
from meshwise.compiler.targets import Target
from meshwise.core.errors import CompilerError

#: Changes when entries are written differently.
_FORMAT = 1


def cache_folder() -> Path:
    """Where compiled programs are kept."""
    own = os.environ.get("MESHWISE_CACHE")
    if own:
        return Path(own) / "compiled"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwise" / "compiled"


def content_key(text: str, facts: Mapping[str, Any]) -> str:
    """Name an entry by all that its content depends on.

    >>> content_key("a", {"x": 1}) == content_key("a", {"x": 1}), content_key("a", {"x": 1}) == content_key("a", {})
    (True, False)
    """
    digest = hashlib.sha256()
    digest.update(json.dumps({"format": _FORMAT, **facts}, sort_keys=True).encode())
    digest.update(text.encode())
    return digest.hexdigest()


def read_entry(key: str, folder: Path | None = None) -> dict[str, Any] | None:
    """Read an entry, None where there is none that can be read."""
    path = (folder or cache_folder()) / f"{key}.json.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, EOFError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get("key") == key else None


def write_entry(key: str, value: Mapping[str, Any], folder: Path | None = None) -> Path | None:
    """Write an entry; give its file, or None where the folder cannot be written: a cache is never a must."""
    home = folder or cache_folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home, prefix=".new-", delete=False) as raw:
            try:
                with gzip.open(raw, "wt", encoding="utf-8", compresslevel=5) as file:
                    json.dump({**value, "key": key}, file)
            except BaseException:
                Path(raw.name).unlink(missing_ok=True)
                raise
        return Path(raw.name).replace(home / f"{key}.json.gz")
    except OSError:
        return None


class Lowered(Protocol):
    """What `jax.jit(f).lower(...)` gives."""

    def as_text(self) -> str:
        """The program before it is compiled."""
        ...

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Any:
        """Compile it."""
        ...


@dataclass(frozen=True)
class Compiled:
    """A program compiled for a target.

    Args:
        target: its name.
        hlo: the scheduled program as text, "" where it does not fit.
        memory: of one device, None where it does not fit.
        out_of_memory: what the compiler said where it does not fit, else None.
        versions: of the compiler's packages.
        seconds: that compiling took.
        cached: whether it was found compiled.
        schedules: how many were compiled, of which this is the fastest.
    """

    target: str
    hlo: str = field(repr=False)
    memory: CompiledMemory | None
    out_of_memory: OutOfMemory | None
    versions: Mapping[str, str]
    seconds: float
    cached: bool
    schedules: int = 1

    @cached_property
    def module(self) -> Module:
        """The program, read."""
        return read_module(self.hlo)

    @property
    def checks_alive(self) -> bool:
        """Whether the compiler itself refuses programs of which more is alive at once than there is memory.

        That of TPUs does, and its sum of temporaries says nothing of what fits: of a program that it took for 15.75 GiB
        the sum was 19.5 GiB, 15.5 GiB of it alive; a 3 % longer sequence it refused, for 15.95 GiB. That of GPUs leaves
        it to the allocator, which is asked for the sum in one piece.
        """
        return "libtpu" in self.versions

    def to_json(self) -> dict[str, Any]:
        """All but whether it was found compiled."""
        return {
            "target": self.target,
            "hlo": self.hlo,
            "memory": None if self.memory is None else self.memory.to_json(),
            "out_of_memory": None if self.out_of_memory is None else self.out_of_memory.message,
            "versions": dict(self.versions),
            "seconds": self.seconds,
            "schedules": self.schedules,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, cached: bool) -> Compiled:
        """Read what `to_json` wrote."""
        memory, message = value["memory"], value["out_of_memory"]
        return cls(
            target=value["target"],
            hlo=value["hlo"],
            memory=None if memory is None else CompiledMemory.from_json(memory),
            out_of_memory=None if message is None else OutOfMemory(message),
            versions=value["versions"],
            seconds=value["seconds"],
            cached=cached,
            schedules=value.get("schedules", 1),
        )


def target_devices(target: Target) -> list[Any]:
    """List the devices of a target, as JAX describes them.

    Raises:
        MissingDependencyError: when its compiler is not installed.
        CompilerError: when the compiler does not know the topology.
    """
    prepare(target)
    from jax.errors import JaxRuntimeError  # noqa: PLC0415  (an optional extra)
    from jax.experimental import topologies  # noqa: PLC0415

    try:
        topology = topologies.get_topology_desc(
            platform=target.platform, topology_name=target.topology, **target.options
        )
        devices = list(topology.devices)
    except (JaxRuntimeError, NotImplementedError) as error:
        raise CompilerError(f"{target.name}: the compiler does not know this topology: {_first_line(error)}") from None
    if len(devices) != target.num_devices:
        raise CompilerError(
            f"{target.name}: expected {target.num_devices} devices, the compiler lists {len(devices)}; "
            "use a chip with one device"
        )
    return devices


def compile_ahead(
    lowered: Lowered, target: Target, device_order: Sequence[int], *, folder: Path | None = None
) -> Compiled:
    """Compile a program, or find it in the cache.

    Args:
        lowered: the program, lowered for devices of the target.
        target: what to compile for.
        device_order: numbers of the devices in the order of the mesh; the text of a lowered program does not say it.
        folder: of the cache (default: `cache_folder()`).

    Raises:
        MissingDependencyError: when the compiler is not installed.
        CompilerError: when the program does not compile, for another reason than memory.
    """
    prepare(target)
    versions = compiler_versions(target.platform)
    facts = {
        "topology": target.topology,
        "options": dict(target.options),
        "compiler_options": {k: v.decode() if isinstance(v, bytes) else v for k, v in target.compiler_options.items()},
        "devices": list(device_order),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "versions": versions,
    }
    key = content_key(lowered.as_text(), facts)
    found = read_entry(key, folder)
    if found is not None:
        return Compiled.from_json(found, cached=True)
    compiled = _compile(lowered, target, versions)
    write_entry(key, compiled.to_json(), folder)
    return compiled


#: A kernel needs more of a GPU's on-chip memory than there is: no other layout or batch would fit.
_ON_CHIP = "shared memory"


def _compile(lowered: Lowered, target: Target, versions: Mapping[str, str]) -> Compiled:
    begun = time.monotonic()
    hlo, memory, message = "", None, None
    try:
        with _uncached():
            result = lowered.compile(compiler_options=dict(target.compiler_options) or None)
        hlo, memory = result.as_text(), CompiledMemory.of(result.memory_analysis())
    except RuntimeError as error:  # JaxRuntimeError is one
        if "RESOURCE_EXHAUSTED" not in str(error) or _ON_CHIP in str(error).lower():
            raise CompilerError(f"{target.name}: the program does not compile: {_first_line(error)}") from error
        message = OutOfMemory(str(error))
    return Compiled(target.name, hlo, memory, message, versions, time.monotonic() - begun, cached=False)


@contextmanager
def _uncached() -> Iterator[None]:
    """Without JAX's cache of programs: it writes those for chips that are not here, and fails to read them again."""
    import jax  # noqa: PLC0415 -- an optional extra
    from jax.experimental.compilation_cache import compilation_cache  # noqa: PLC0415

    enabled = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # whether there is one is looked at once, unless it is reset
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:400] if lines else type(error).__name__
