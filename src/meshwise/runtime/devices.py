"""JAX and the devices of this process: real ones or fake ones of the CPU, and how they are arranged in a mesh.

JAX looks only for platforms whose hardware is there: a plugin that is installed for compiling (`meshwise verify`) says
nothing of the machine and would complain. What a user has set (JAX_PLATFORMS) stays. Not here: which chip of the
catalog a device is (`hardware`), several processes (`processes`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import pkgutil
import platform
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import LayoutError, MeshwiseError, MissingDependencyError

if TYPE_CHECKING:
    from jax.sharding import Mesh


def require_jax() -> None:
    """Raise unless JAX can be imported.

    Raises:
        MissingDependencyError: with the line that installs it.
    """
    if importlib.util.find_spec("jax") is None:
        raise MissingDependencyError("executing a plan needs JAX: pip install 'meshwise[jax]'")


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """Arrange devices in a mesh whose arrays are sharded by constraint.

    Args:
        sizes: mesh axis -> size, outermost first.
        devices: in the order of the mesh, last axis fastest; an array of the mesh's shape is taken as it is.

    Raises:
        LayoutError: for another number of devices.
    """
    import numpy as np  # noqa: PLC0415 -- as JAX, loaded when something runs
    from jax.sharding import AxisType, Mesh  # noqa: PLC0415

    shape, found = tuple(sizes.values()), np.asarray(devices)
    if found.size != np.prod(shape, dtype=int):
        axes = ",".join(f"{a}={n}" for a, n in sizes.items())
        raise LayoutError(
            f"layout {axes} runs on {np.prod(shape, dtype=int):,} devices, found {found.size:,}; "
            "give as many, or another layout"
        )
    return Mesh(found.reshape(shape), tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def one_at_a_time(made: Any) -> Any:
    """Wait for what a program makes where its devices are fake ones of a CPU; accelerators keep their order themselves.

    Fake devices share a few threads. When programs follow each other without waiting, those that are ahead wait in a
    collective for others, with the threads that these would need: forever.

    Args:
        made: arrays, returned as they are.
    """
    import jax  # noqa: PLC0415 -- loaded when something runs

    arrays = jax.tree.leaves(made)
    if any(device.platform == "cpu" for array in arrays[:1] for device in array.devices()):
        jax.block_until_ready(made)
    return made


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
    """Whether a library can be loaded; under WSL it lies where no loader looks by itself."""
    for name in (library, os.path.join("/usr/lib/wsl/lib", library)):  # noqa: PTH118 -- a name for the loader
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def find_devices(cpu_devices: int | None = None, told: Callable[[str], None] = lambda _: None) -> list[Any]:
    """List the devices.

    Args:
        cpu_devices: number of fake CPU devices in each process; None for real devices.
        told: hears of accelerators that were looked for in vain.

    Raises:
        MissingDependencyError: JAX is missing.
        MeshwiseError: no device can be used; fake ones were asked for after JAX had looked for devices.
    """
    if cpu_devices is not None:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={cpu_devices}".strip()
        os.environ["JAX_PLATFORMS"] = "cpu"
        if cpu_devices > 1:
            # XLA's threads: a device that waits in a collective holds one, and devices may enter collectives that do
            # not depend on each other in any order; with a thread a device some programs wait for ever.
            os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 4 * cpu_devices)))
    jax = load_jax()
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")  # JAX may have been imported before
    try:
        with looking_for_devices(told):
            found = list(jax.devices())
    except RuntimeError as error:
        raise MeshwiseError(f"JAX cannot use the devices of this machine: {str(error).splitlines()[0]}") from None
    if cpu_devices is not None and jax.local_device_count() != cpu_devices:
        raise MeshwiseError(
            f"{cpu_devices} fake devices were asked for, but JAX has looked for devices before and found "
            f"{len(found)}; ask in a new process"
        )
    return found


@contextlib.contextmanager
def lowering_for(device: Any) -> Iterator[None]:
    """While programs are lowered for a GPU that may not be there: from 0.11 on, JAX's kernels ask which it is."""
    import jax  # noqa: PLC0415 -- loaded already

    from meshwise.runtime.kernels.counted import lowered_for  # noqa: PLC0415

    sharding: Any = jax.sharding
    known: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if device.platform in ("gpu", "cuda") and hasattr(sharding, "AbstractDevice"):
        kind = sharding.AbstractDevice(device_kind=device.device_kind, num_cores=device.core_count, platform="gpu")
        known = sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=kind))
    with lowered_for(str(device.device_kind)), known:
        yield


def software_of(device: Any) -> str:
    """What runs programs on a device."""
    import jax  # noqa: PLC0415 -- loaded already

    words = dict.fromkeys((str(device.platform), str(device.client.platform_version.splitlines()[0])))
    return f"jax {jax.__version__} on {', '.join(words)}"  # the CPU's version is "cpu"


def share_of_machine(num_devices: int) -> str:
    """One of `num_devices` fake devices of this machine's CPU, in words.

    >>> share_of_machine(4).startswith("1/4 of ")
    True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"1/{num_devices} of {_cpu()}, {cores} core{'s' if cores > 1 else ''}"


def _cpu() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return " ".join(re.sub(r'["\\\\]', "", next(names, platform.machine())).split())


def machine_memory() -> int | None:
    """Bytes of memory of this machine, None where the system does not tell."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
