"""Weights in GGUF, read and dequantised by the library `gguf`, a tensor at a time.

Not here: which weight a tensor is (`gguf_names`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwise.core.errors import MeshwiseError, MissingDependencyError
from meshwise.runtime.weights.stored import Array


class GgufFile:
    """Tensors by name.

    Args:
        path: of the file.

    Raises:
        MissingDependencyError: the library is missing.
        MeshwiseError: there is no such file, or it is torn.
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
        """Give what the file's metadata says, or None."""
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
        array: Array = dequantize(t.data, t.tensor_type).reshape(self.shapes[name])
        return array
