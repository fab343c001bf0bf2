"""The compilers as optional libraries: whether they are there, and the settings that they want without a device.

JAX may be imported already: what is set here is read when a compiler is loaded, not when JAX is. Not here: compiling.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from importlib import metadata
from pathlib import Path
from typing import Any

from meshwise.compiler.targets import Target
from meshwise.core.errors import MissingDependencyError

#: Modules of which one is a platform's compiler: for each release of CUDA there is one.
_LIBRARIES = {"tpu": ("libtpu",), "cuda": ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")}

#: What a compiler may consist of.
_PACKAGES = {
    "tpu": ("jax", "jaxlib", "libtpu"),
    "cuda": (
        *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
        *("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc"),
    ),
}

#: Without these libtpu asks a cloud's metadata server what it runs on, or says on stderr that it cannot.
_TPU_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else two processes that compile at once exclude each other
}


def check_compiler(platform: str) -> None:
    """Refuse where the compiler of a platform ("tpu", "cuda") is not installed.

    Raises:
        MissingDependencyError: with the line that installs it.
    """
    if _library("jax") is None or not any(map(_library, _LIBRARIES[platform])):
        what = {"tpu": "TPUs", "cuda": "NVIDIA GPUs"}[platform]
        raise MissingDependencyError(f"compiling for {what} needs their compiler: pip install 'meshwise[{platform}]'")


def compiler_versions(platform: str) -> dict[str, str]:
    """Versions of the packages that make up a compiler."""
    found = dict[str, str]()
    for name in _PACKAGES[platform]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _library(name: str) -> Path | None:
    """The file that a module begins with, None where it is not installed."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of a package around it
        return None
    return None if found is None or found.origin is None else Path(found.origin)


def prepare(target: Target) -> None:
    """Set what the target's compiler wants before it is loaded; what a user has set stays.

    Raises:
        MissingDependencyError: when the compiler is not installed.
    """
    check_compiler(target.platform)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if target.platform == "tpu":
        for name, value in _TPU_SETTINGS.items():
            os.environ.setdefault(name, value)
    import jax  # noqa: PLC0415  (an optional extra, and slow)

    settings: Any = jax.config
    if not (os.environ.get("JAX_PLATFORMS") or settings.jax_platforms):
        settings.update("jax_platforms", "cpu")  # else JAX looks for a device of every compiler that it finds
    if target.platform == "cuda":
        _register_cuda()


@functools.cache
def _register_cuda() -> None:
    """Make the CUDA compiler known. It registers itself when plugins are looked for, unless it finds no driver."""
    from jax._src import xla_bridge as private  # noqa: PLC0415  (there is no public way; used here only)

    xla_bridge: Any = private
    xla_bridge._discover_and_register_pjrt_plugins()
    if "cuda" in xla_bridge._topology_factories:
        return
    library = next(filter(None, map(_library, _LIBRARIES["cuda"])))
    xla_bridge.register_plugin("cuda", library_path=str(library.parent / "xla_cuda_plugin.so"))
