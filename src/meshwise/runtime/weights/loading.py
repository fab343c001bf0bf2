"""Weights of a model from published files, each device's own part of them.

All names and shapes are compared before anything is read; a process holds its devices' parts of one weight at a time,
and one tensor of the file. Not here: where a family's files hold what (`names`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.models import Model, as_published
from meshwise.models.numerics import read_numerics
from meshwise.runtime.params import Order, Parameter, Tree
from meshwise.runtime.weights.files import Array, GgufFile, SafetensorsFiles, Shape, Stored, shape_of
from meshwise.runtime.weights.names import gguf_names, hub_names

#: What files hold besides weights: frequencies of rotations and masks, which follow from the configuration.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")


class TensorFile(Protocol):
    """Tensors by name."""

    path: Path

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        ...

    def read(self, name: str) -> Array:
        """Read a tensor."""
        ...


def open_weights(path: Path, model: Model) -> Weights:
    """Open published weights of a model, and see that they are its own, all of them.

    Args:
        path: a .safetensors or .gguf file, or a folder of .safetensors files.
        model: whose weights they are.

    Raises:
        MissingDependencyError: the library that reads them is missing.
        ConfigError: a family that cannot be loaded; a weight that the file lacks or holds in another shape; a tensor
            that the model does not use.
        MeshwiseError: a file that cannot be read.
    """
    if not path.exists():
        raise MeshwiseError(f"--weights {path}: there is no such file; give a .safetensors or .gguf file, or a folder")
    if path.suffix == ".gguf":
        file = GgufFile(path)
        found = Weights(model, gguf_names(model, file), file)
    elif path.is_dir() or path.suffix == ".safetensors":
        told = as_published(model, 1) if model.family == "dimensions" else model  # the family that computes the same
        found = Weights(told, hub_names(told), SafetensorsFiles(path))
    else:
        raise MeshwiseError(f"--weights {path}: expected a .safetensors or .gguf file, or a folder of the former")
    found.check()
    return found


class LoadableWeights(Protocol):
    """Weights of a model, wherever they are kept."""

    def load(self, parameters: Mapping[str, Mapping[str, Parameter]], order: Order, abstract: Tree) -> Tree:
        """Read weights into arrays."""
        ...


@dataclass(frozen=True)
class Piece:
    """A weight of one layer, and of one expert where each has a tensor of its own."""

    name: str
    stored: Stored
    own: str
    shapes: Mapping[str, Shape]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        return self.stored.shape(self.own, self.shapes)


@dataclass(frozen=True)
class Published:
    """Where published files hold the weights of a model.

    Args:
        model: whose they are.
        names: weight -> where it lies.
    """

    model: Model
    names: Mapping[str, Stored]

    @cached_property
    def layers(self) -> Mapping[str, list[int]]:
        """Block -> numbers of its layers; 0 alone for a block that is no layer."""
        found: dict[str, list[int]] = {block.name: [0] for block in self.model.train_program()}
        for block in (order := read_numerics(self.model).order):
            found[block] = []
        for layer, block in enumerate(order):
            found[block].append(layer)
        return found

    @cached_property
    def shapes(self) -> Mapping[str, Mapping[str, Shape]]:
        """Block -> name of a weight -> its shape."""
        program = self.model.train_program()
        return {b.name: {t.name: shape_of(b, t, program.sizes) for t in b.weights} for b in program}

    def pieces(self, block: str, own: str, layer: int) -> dict[tuple[int, ...], Piece]:
        """The tensors that hold one layer's weight: by expert where each has its own, else one under ()."""
        stored = self.names.get(own)
        if stored is None:
            raise ConfigError(
                f"{self._where}model {self.model.name}: files of family {self.model.family!r} hold no "
                f"{own!r} of block {block!r}, as far as is known here"
            )
        shapes = self.shapes[block]
        if not stored.by_expert:
            return {(): Piece(self._name(stored.name, layer=layer), stored, own, shapes)}
        count = shapes[own].experts[0]
        names = (self._name(stored.name, layer=layer, expert=e) for e in range(count))
        return {(e,): Piece(name, stored, own, shapes) for e, name in enumerate(names)}

    @property
    def _where(self) -> str:
        """What an error says first."""
        return ""

    def _name(self, template: str, **numbers: int) -> str:
        return template.format(**numbers)


@dataclass(frozen=True)
class Weights(Published):
    """Weights of a model in files.

    Args:
        file: the tensors.
    """

    file: TensorFile

    @property
    def _where(self) -> str:
        return f"--weights {self.file.path}: "

    def check(self) -> None:
        """Check that the file holds every weight in its shape, and nothing else.

        Raises:
            ConfigError: with the tensor's name, and what was expected.
        """
        used = set()
        for piece in self._all():
            self._check_piece(piece)
            used.add(piece.name)
        rest = sorted(n for n in set(self.file.shapes) - used if not _DERIVED.fullmatch(n) and not self._again(n))
        if rest:
            raise ConfigError(
                f"--weights {self.file.path}: model {self.model.name} has no use for {len(rest):,} tensors: "
                f"{', '.join(rest[:5])}{', ...' if len(rest) > 5 else ''}; is it another model's file?"
            )

    def _check_piece(self, piece: Piece) -> None:
        found = self.file.shapes.get(piece.name)
        if found is None:
            raise ConfigError(
                f"--weights {self.file.path}: model {self.model.name} expects a tensor {piece.name!r} of shape "
                f"{list(piece.shape)}, for its {piece.own}; the file has none"
            )
        if found != piece.shape:
            raise ConfigError(
                f"--weights {self.file.path}: tensor {piece.name!r}: model {self.model.name} expects shape "
                f"{list(piece.shape)}, found {list(found)}"
            )

    def _again(self, name: str) -> bool:
        """Whether a tensor is the embedding once more: the head of a model that ties both."""
        head, table = self.names.get("w_head"), self.names["w_embed"]
        if head is None or name != head.name or self.file.shapes[name] != self.file.shapes[self._name(table.name)]:
            return False
        return bool(np.array_equal(self.file.read(name), self.file.read(self._name(table.name))))

    def _all(self) -> Iterator[Piece]:
        for block in self.model.train_program():
            for t in block.weights:
                for number in range(block.repeat):
                    yield from self.pieces(block.name, t.name, self.layers[block.name][number]).values()

    def _name(self, template: str, **numbers: int) -> str:
        """Fill in a name; some published files leave out the first part of names."""
        name = template.format(**numbers)
        short = name.removeprefix("transformer.")
        return short if name not in self.file.shapes and short in self.file.shapes else name

    def load(self, parameters: Mapping[str, Mapping[str, Parameter]], order: Order, abstract: Tree) -> Tree:
        """Read weights into arrays.

        Args:
            parameters: by run and name.
            order: which layers each run holds.
            abstract: shapes, formats and shardings, by run and name.

        Returns: the arrays, by run and name; each device has its own part alone.
        """
        tree = Tree()
        for key, run in parameters.items():
            block, numbers = order[key]["block"], order[key]["layers"]
            tree[key] = {}
            for name, parameter in run.items():
                read: dict[tuple[int, ...], Callable[[], Array]] = {}
                for place, number in zip(product(*map(range, parameter.stack)), numbers, strict=True):
                    for rest, piece in self.pieces(block, name, self.layers[block][number]).items():
                        read[*place, *rest] = partial(self._read, piece)
                tree[key][name] = _place(abstract[key][name], read)
        return tree

    def _read(self, piece: Piece) -> Array:
        return piece.stored.take(self.file.read(piece.name), piece.own, piece.shapes)


def _place(abstract: Any, read: Mapping[tuple[int, ...], Callable[[], Array]]) -> jax.Array:
    """Make an array of parts, of which each device of this process holds its own.

    Args:
        abstract: shape, format and sharding.
        read: numbers of the leading dimensions -> reads what they number.
    """
    shape, sharding = abstract.shape, abstract.sharding
    where = {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
    parts = {bounds: np.empty([stop - start for start, stop in bounds], abstract.dtype) for bounds in where.values()}
    for lead, value in read.items():
        wanted = [b for b in parts if all(lo <= i < hi for i, (lo, hi) in zip(lead, b, strict=False))]
        whole = value() if wanted else None
        for bounds in wanted:
            assert whole is not None
            at = tuple(i - lo for i, (lo, _) in zip(lead, bounds, strict=False))
            parts[bounds][at] = whole[tuple(slice(*b) for b in bounds[len(lead) :])]
    held = [jax.device_put(parts[bounds], device) for device, bounds in where.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, held)
