"""Which platforms JAX is to look for: plugins whose hardware is not there are left out, so that none complains of it.

A library that is installed for compiling (`meshwise verify`) says nothing of the machine. What a user has set
(JAX_PLATFORMS) stays. Not here: the devices (`devices`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwise.runtime.backend import require_jax

#: Device files of NVIDIA GPUs: of a driver, under WSL, of boards on which the GPU shares the processor's memory.
_GPU_FILES = ("nvidia[0-9]*", "nvidiactl", "dxg", "nvhost-gpu", "nvgpu*")

#: Device files of TPUs.
_TPU_FILES = ("accel[0-9]*", "vfio/[0-9]*")

#: Modules beside the plugin that look for a driver when JAX is imported.
_CUDA_PARTS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

#: Who says that a plugin could not be used.
_LOGGER = "jax._src.xla_bridge"


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the machine has, by its driver and its device files.

    Args:
        gpu: whether an NVIDIA driver answers.
        tpu: whether there is a device file of a TPU.
    """

    gpu: bool
    tpu: bool

    @classmethod
    def find(cls, devices: Path = Path("/dev"), driver: str = "libcuda.so.1") -> Hardware:
        """Look at this machine."""
        return cls(gpu=_any(devices, _GPU_FILES) and _loads(driver), tpu=_any(devices, _TPU_FILES))


@dataclass
class _Kept(logging.Filter):
    """Keeps what plugins say, for one line of ours instead of their tracebacks."""

    lines: list[str] = field(default_factory=list)

    def filter(self, record: logging.LogRecord) -> bool:
        """Swallow a record of an error, and remember its last words."""
        if record.levelno < logging.WARNING:
            return True
        cause = record.exc_info[1] if record.exc_info else None
        self.lines.append(" ".join(f"{record.getMessage() if cause is None else cause}".split()))
        return False


def load_jax(hardware: Hardware | None = None) -> Any:
    """Import JAX; without a GPU driver, as if its parts for GPUs were not installed, which would say so on stderr.

    Args:
        hardware: of this machine, unless given.

    Raises:
        MissingDependencyError: JAX is missing.
    """
    require_jax()
    absent = [] if "jax" in sys.modules or (hardware or Hardware.find()).gpu else list(_CUDA_PARTS)
    blocked = [name for name in absent if name not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]  # None: not to be imported
    try:
        return importlib.import_module("jax")
    finally:
        for name in blocked:
            del sys.modules[name]


@contextlib.contextmanager
def looking_for_devices(told: Callable[[str], None], hardware: Hardware | None = None) -> Iterator[None]:
    """While JAX looks for devices, leave out the plugins of hardware that is not there.

    Args:
        told: hears what was found, where a plugin was installed in vain or could not be used.
        hardware: of this machine, unless given.
    """
    there = hardware or Hardware.find()
    settings: Any = load_jax(there).config
    plugins = _plugins()
    cuda = [name for name in plugins if "xla_cuda" in name]
    if settings.jax_platforms:
        wanted = {"cuda", "gpu"} & set(settings.jax_platforms.split(","))
        with _left_out([] if there.gpu or wanted else cuda):
            yield
        return
    others = there.tpu or len(cuda) < len(plugins)  # then JAX looks for all
    if cuda and not there.gpu:
        told(f"no GPU driver found{'' if others else '; running on CPU'}")
    if there.gpu and not cuda:
        told("a GPU driver was found, and JAX runs without it: pip install 'meshwise[cuda]' brings what is missing")
    if not others:
        settings.update("jax_platforms", "cuda,cpu" if cuda and there.gpu else "cpu")
    logger, kept = logging.getLogger(_LOGGER), _Kept()
    logger.addFilter(kept)
    try:
        with _left_out([] if there.gpu else cuda):
            yield
    finally:
        logger.removeFilter(kept)
        for line in kept.lines:
            told(line)


def _plugins() -> list[str]:
    """Names of the modules that JAX loads to find devices."""
    package = importlib.util.find_spec("jax_plugins")
    if package is None or package.submodule_search_locations is None:
        return []
    places = list(package.submodule_search_locations)
    return [module.name for module in pkgutil.iter_modules(places, "jax_plugins.")]


@contextlib.contextmanager
def _left_out(names: list[str]) -> Iterator[None]:
    """Put an empty plugin in the place of each; the real ones may be loaded afterwards, to compile."""
    put = []
    for name in names:
        if name not in sys.modules:
            empty = types.ModuleType(name)
            empty.__spec__ = importlib.util.find_spec(name)
            empty.initialize = lambda: None  # type: ignore[attr-defined]
            sys.modules[name] = empty
            put.append(name)
    try:
        yield
    finally:
        for name in put:
            del sys.modules[name]


def _any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _loads(library: str) -> bool:
    """Whether a library is there; under WSL it stands where no loader looks by itself."""
    for name in (library, os.path.join("/usr/lib/wsl/lib", library)):  # noqa: PTH118 -- a name for the loader
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False
