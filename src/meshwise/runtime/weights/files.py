"""Tensors of published files by name: safetensors in one file or a folder, and GGUF, each read by its own library.

One tensor is read at a time. Not here: which weight a tensor is (`names`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwise.core.errors import ConfigError, MeshwiseError, MissingDependencyError
from meshwise.runtime.weights.stored import Array

#: Formats whose numbers are the weights themselves; narrower ones come with scales.
_PLAIN = ("F64", "F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"


class SafetensorsFiles:
    """Tensors by name, over one or several files.

    Args:
        path: a file, or a folder with one or more, and their index where it has one.

    Raises:
        MissingDependencyError: the library is missing.
        MeshwiseError: no such file, or no safetensors in it.
    """

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("safetensors") is None:
            raise MissingDependencyError("--weights needs the library safetensors: pip install 'meshwise[run]'")
        self.path = path
        self._files = self._open(path)

    def _open(self, path: Path) -> list[Any]:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 -- loaded when weights are read

        parts = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if (path / _INDEX).is_file():
            parts = [path / name for name in self._indexed(path / _INDEX)]
        if not parts:
            raise MeshwiseError(f"--weights {path}: expected a .safetensors file in the folder, found none")
        try:
            return [safe_open(part, framework="numpy") for part in parts]
        except (OSError, SafetensorError) as error:
            raise MeshwiseError(f"--weights {path}: cannot be read as safetensors: {error}") from None

    @staticmethod
    def _indexed(index: Path) -> list[str]:
        """Names of the files that an index lists."""
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{index}: expected JSON with a weight_map of tensors to files") from None

    @cached_property
    def _of(self) -> dict[str, Any]:
        """Tensor -> its file."""
        return {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 -- no mapping

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._of.items()}

    def read(self, name: str) -> Array:
        """Read a tensor.

        Raises:
            ConfigError: for a format whose numbers are not the weights themselves.
        """
        file = self._of[name]
        found = file.get_slice(name).get_dtype()
        if found not in _PLAIN:
            raise ConfigError(
                f"{self.path}: tensor {name!r}: expected {', '.join(_PLAIN)}, found {found}, which is not dequantised "
                "here; give a checkpoint in bf16"
            )
        return file.get_tensor(name)


class GgufFile:
    """Tensors by name.

    Args:
        path: of the file.

    Raises:
        MissingDependencyError: the library is missing.
        MeshwiseError: no such file, or a torn one.
    """

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise MissingDependencyError("--weights of GGUF needs the library gguf: pip install 'meshwise[run]'")
        from gguf import GGUFReader  # noqa: PLC0415 -- loaded when weights are read

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise MeshwiseError(f"--weights {path}: cannot be read as GGUF: {error}") from None

    def said(self, key: str) -> Any:
        """A value of the file's metadata, or None."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    @property
    def architecture(self) -> str:
        """The architecture that the file says it is of."""
        return str(self.said("general.architecture"))

    @cached_property
    def _of(self) -> dict[str, Any]:
        return {t.name: t for t in self._reader.tensors}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, slowest dimension first."""
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._of.items()}

    def read(self, name: str) -> Array:
        """Read a tensor: fp32, dequantised."""
        from gguf import dequantize  # noqa: PLC0415

        t = self._of[name]
        return dequantize(t.data, t.tensor_type).reshape(self.shapes[name])
