"""Weights written as they are published: safetensors by the family's names, their index, and `config.json`.

One weight of all layers is in memory at a time, and one file. Not here: what is written (`saved`), names (`names`).
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.core.errors import MeshwiseError, MissingDependencyError
from meshwise.core.files import write_whole
from meshwise.models import Model
from meshwise.runtime.weights.files import Array, Stored
from meshwise.runtime.weights.loading import Piece, Published
from meshwise.runtime.weights.names import hub_names

#: Bytes of a file, at most, unless one tensor is larger.
SHARD_BYTES = 5_000_000_000

#: Reads weights by their names: (block, name, number of the layer among the block's) -> array.
Arrays = Callable[[Collection[str]], Mapping[tuple[str, str, int], Array]]


@dataclass(frozen=True, slots=True)
class Written:
    """Weights that were written.

    Args:
        folder: that holds them.
        files: in it.
        tensors: how many, and all their bytes.
        config: what `config.json` says.
    """

    folder: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int
    config: Mapping[str, Any]


def write_weights(model: Model, read: Arrays, folder: Path, *, itemsize: int, dtype: str) -> Written:
    """Write weights as those of the model's family are published.

    Args:
        model: whose they are, as it is published.
        read: gives them.
        folder: to be made; it is there when all of it is written.
        itemsize: bytes of an element.
        dtype: its format, as `config.json` names it.

    Raises:
        MissingDependencyError: the library is missing.
        ConfigError: a model whose published names are not known.
        MeshwiseError: a folder that is there already, or cannot be written.
    """
    published = Published(model, hub_names(model))
    left = ("torch_dtype", "quantization_config")
    config = {**{key: value for key, value in model.config.items() if key not in left}, "dtype": dtype}
    with new_folder(folder) as unfinished:
        files, tensors, total = _write_all(published, read, unfinished, itemsize)
        write_whole(unfinished / "config.json", json.dumps(config, indent=2) + "\n")
    return Written(folder, (*files, "config.json"), tensors, total, config)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when all of it is written.

    Raises:
        MissingDependencyError: the library for what is written there is missing.
        MeshwiseError: it is there already, or cannot be written.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise MissingDependencyError("writing weights needs the library safetensors: pip install 'meshwise[run]'")
    if folder.exists():
        raise MeshwiseError(f"--output {folder}: it is there already; name a new folder")
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a command that was killed
        unfinished.mkdir()
        yield unfinished
        unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise MeshwiseError(f"--output {folder}: {error.strerror or error}") from None


def save(tensors: Mapping[str, Array], file: Path) -> None:
    """Write a file of tensors.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 -- loaded when weights are written
    from safetensors.numpy import save_file  # noqa: PLC0415 -- as above

    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk is one, too
        raise OSError(str(error)) from None


def _write_all(published: Published, read: Arrays, folder: Path, itemsize: int) -> tuple[list[str], int, int]:
    """Write all tensors, and their index where there are several files.

    Returns: names of files, number of tensors, their bytes.
    """
    tensors = list(_tensors(published))
    names: dict[str, str] = {}
    numbers = _shards([math.prod(t.shape) * itemsize for t in tensors])
    count, total = numbers[-1] + 1, sum(math.prod(t.shape) for t in tensors) * itemsize
    files = [f"model-{n + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for n in range(count)]
    held: dict[str, Array] = {}
    last: tuple[frozenset[str], Mapping[tuple[str, str, int], Array]] = (frozenset(), {})
    for tensor, number, following in zip(tensors, numbers, [*numbers[1:], -1], strict=True):
        owns = frozenset(tensor.owns)
        if last[0] != owns:
            last = owns, read(owns)
        held[tensor.name] = tensor.give(last[1])
        names[tensor.name] = files[number]
        if following != number:
            save(held, folder / files[number])
            held = {}
    if count > 1:
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2)
        write_whole(folder / "model.safetensors.index.json", index + "\n")
        files.append("model.safetensors.index.json")
    return files, len(tensors), total


def _shards(sizes: list[int]) -> list[int]:
    """Number of the file of each tensor.

    >>> _shards([3_000_000_000, 3_000_000_000, 1, 6_000_000_000])
    [0, 1, 1, 2]
    """
    found, number, held = [], 0, 0
    for size in sizes:
        if held and held + size > SHARD_BYTES:
            number, held = number + 1, 0
        held += size
        found.append(number)
    return found


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the files, and the weights in it."""

    piece: Piece
    block: str
    number: int
    expert: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape

    @property
    def owns(self) -> tuple[str, ...]:
        stored: Stored = self.piece.stored
        return stored.among or (self.piece.own,)

    def give(self, read: Mapping[tuple[str, str, int], Array]) -> Array:
        """Make it of the weights."""
        parts = {own: read[self.block, own, self.number][self.expert] for own in self.owns}
        made = self.piece.stored.give(parts, self.piece.shapes)
        assert made.shape == self.shape, f"{self.name}: {made.shape} is not {self.shape}"
        return made


def tensor_names(published: Published) -> Iterator[str]:
    """Names of all tensors."""
    return (tensor.name for tensor in _tensors(published))


def _tensors(published: Published) -> Iterator[_Tensor]:
    """All tensors, weight by weight, so that each is read once."""
    program = published.model.train_program()
    for own in dict.fromkeys(t.name for block in program for t in block.weights):
        for block in program:
            if own not in published.shapes[block.name]:
                continue
            for number, layer in enumerate(published.layers[block.name]):
                for expert, piece in published.pieces(block.name, own, layer).items():
                    if own == (piece.stored.among or (own,))[0]:
                        yield _Tensor(piece, block.name, number, expert)
