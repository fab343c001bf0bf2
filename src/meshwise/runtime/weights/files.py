"""Tensors of published files by name: safetensors in one file or a folder, and GGUF, each read by its own library.

One tensor is read at a time, and a weight taken out of it: transposed, fused with others, in another order. Not here:
which weight a tensor is (`names`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwise.core.errors import ConfigError, MeshwiseError, MissingDependencyError, quoted
from meshwise.core.files import parse_json, read_whole
from meshwise.core.tensors import Block, Einsum, Lookup, Tensor

#: Any array.
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a weight's axes, by what they are to the operation that reads it; in this order.

    Args:
        experts: of a mixture's weights, else none.
        inputs: that are summed over, or looked up.
        outputs: all others.
    """

    experts: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def shape_of(block: Block, t: Tensor, sizes: Mapping[str, float]) -> Shape:
    """What the axes of a weight are to the operation that reads it."""
    reader = next(op for op in block.ops if any(i.name == t.name for i in op.inputs))
    routed = t.axes[:1] if t.name.startswith(("w_expert.", "b_expert.")) else ()
    table = t.axes[:1] if isinstance(reader, Lookup) else ()
    summed = reader.contracted if isinstance(reader, Einsum) else table
    inputs = tuple(a for a in t.axes if a in summed)
    outputs = tuple(a for a in t.axes if a not in (*routed, *inputs))
    assert (*routed, *inputs, *outputs) == t.axes, f"{t.name}: inputs before outputs"
    experts, entering, leaving = (tuple(int(sizes[a]) for a in axes) for axes in (routed, inputs, outputs))
    return Shape(experts, entering, leaving)


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight of one layer in a file.

    Args:
        name: of the tensor, with `{layer}`, and `{expert}` where each expert has its own.
        transposed: whether outputs come before inputs, as linear layers hold them.
        among: weights that are fused into this tensor, in their order, or none where it is this weight alone.
        fused: how: one after another; within each head; or in turns.
        paired: whether the two halves of each head's outputs are interleaved, as another way to rotate wants them.
        more: what the file adds to each value.
    """

    name: str
    transposed: bool = True
    among: tuple[str, ...] = ()
    fused: Literal["after", "in_heads", "in_turns"] = "after"
    paired: bool = False
    more: float = 0.0

    @property
    def by_expert(self) -> bool:
        """Whether each expert has a tensor of its own."""
        return "{expert}" in self.name

    def shape(self, own: str, shapes: Mapping[str, Shape]) -> tuple[int, ...]:
        """Shape of the tensor in the file.

        Args:
            own: name of the weight.
            shapes: of all weights of its block.
        """
        mine = shapes[own]
        experts = () if self.by_expert else mine.experts
        if not mine.inputs:
            return (*experts, self._outputs(own, shapes))
        sides = (self._outputs(own, shapes), math.prod(mine.inputs))
        return (*experts, *(sides if self.transposed else sides[::-1]))

    def _outputs(self, own: str, shapes: Mapping[str, Shape]) -> int:
        return sum(math.prod(shapes[n].outputs) for n in self.among or (own,))

    def take(self, array: Array, own: str, shapes: Mapping[str, Shape]) -> Array:
        """The weight as it is held here: experts, inputs, outputs.

        Args:
            array: the tensor of the file, of the shape above.
            own: name of the weight.
            shapes: of all weights of its block.
        """
        mine = shapes[own]
        experts = () if self.by_expert else mine.experts
        at = len(experts)
        if mine.inputs and not self.transposed:
            array = np.swapaxes(array, -1, -2)  # [experts, outputs, inputs]
        array = self._part(array, own, shapes, at)
        if self.paired:
            *heads, width = mine.outputs
            array = array.reshape(*experts, *heads, width // 2, 2, -1).swapaxes(at + len(heads), at + len(heads) + 1)
        array = array.reshape(*experts, *mine.outputs, *mine.inputs)
        order = [*range(at), *range(at + len(mine.outputs), array.ndim), *range(at, at + len(mine.outputs))]
        return array.transpose(order) - self.more if self.more else array.transpose(order)

    def _part(self, array: Array, own: str, shapes: Mapping[str, Shape], at: int) -> Array:
        """Take this weight's outputs, which are dimension `at`, from among the others'."""
        if not self.among:
            return array
        place = self.among.index(own)
        if self.fused == "in_turns":
            return array[(slice(None),) * at + (slice(place, None, len(self.among)),)]
        widths = [shapes[n].outputs for n in self.among]
        heads = widths[0][0] if self.fused == "in_heads" else 1
        each = [math.prod(w) // heads for w in widths]
        apart = array.reshape(*array.shape[:at], heads, sum(each), *array.shape[at + 1 :])
        begin = sum(each[:place])
        own_part = apart[(slice(None),) * (at + 1) + (slice(begin, begin + each[place]),)]
        return own_part.reshape(*array.shape[:at], heads * each[place], *array.shape[at + 1 :])

    def give(self, parts: Mapping[str, Array], shapes: Mapping[str, Shape]) -> Array:
        """The tensor of the file: what `take` reads.

        Args:
            parts: the weights that lie in it, each as it is held here.
            shapes: of all weights of its block.
        """
        assert not self.paired, "as GGUF holds them, which is not written"
        whole = self._joined({own: self._outputs_first(array, shapes[own]) for own, array in parts.items()}, shapes)
        inputs = next(iter(shapes[own] for own in parts)).inputs
        return np.ascontiguousarray(np.swapaxes(whole, -1, -2) if inputs and not self.transposed else whole)

    def _outputs_first(self, array: Array, mine: Shape) -> Array:
        """[experts, outputs, inputs], outputs and inputs as one dimension each."""
        experts = () if self.by_expert else mine.experts
        at, entering = len(experts), len(mine.inputs)
        order = [*range(at), *range(at + entering, array.ndim), *range(at, at + entering)]
        sides = (math.prod(mine.outputs), *((math.prod(mine.inputs),) if mine.inputs else ()))
        return array.transpose(order).reshape(*experts, *sides)

    def _joined(self, parts: Mapping[str, Array], shapes: Mapping[str, Shape]) -> Array:
        """Weights that are fused, in the order in which they lie."""
        if not self.among:
            return next(iter(parts.values()))
        arrays = [parts[own] for own in self.among]
        mine = shapes[self.among[0]]
        at = 0 if self.by_expert else len(mine.experts)
        if self.fused == "in_turns":
            joined = np.stack(arrays, axis=at + 1)
        else:
            heads = mine.outputs[0] if self.fused == "in_heads" else 1
            apart = [a.reshape(*a.shape[:at], heads, a.shape[at] // heads, *a.shape[at + 1 :]) for a in arrays]
            joined = np.concatenate(apart, axis=at + 1)
        return joined.reshape(*joined.shape[:at], -1, *joined.shape[at + 2 :])


#: Formats whose numbers are the weights themselves; narrower ones come with scales.
_PLAIN = ("F64", "F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"

#: File of adapters, as PEFT names it.
ADAPTERS = "adapter_model.safetensors"


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
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 -- loaded when weights are read

        parts = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if (path / _INDEX).is_file():
            parts = [path / name for name in _indexed(path / _INDEX)]
        if [part.name for part in parts] == [ADAPTERS]:
            raise MeshwiseError(
                f"--weights {path}: holds adapters alone, without the weights beside which they were trained; give the "
                "--checkpoint folder of that run, or what 'export --to transformers' writes of it"
            )
        if not parts:
            raise MeshwiseError(f"--weights {path}: expected a .safetensors file in the folder, found none")
        try:
            self._files: list[Any] = [safe_open(part, framework="numpy") for part in parts]
        except (OSError, SafetensorError) as error:
            raise MeshwiseError(f"--weights {path}: cannot be read as safetensors: {error}") from None

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


def _indexed(index: Path) -> list[str]:
    """Names of the files that an index lists."""
    try:
        found = parse_json(read_whole(index), str(index))
    except UnicodeDecodeError:
        raise ConfigError(f"{index}: expected JSON with a weight_map of tensors to files, found no text") from None
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ConfigError(f"{index}: expected JSON with a weight_map of tensors to files")
    for name in sorted(set(files.values())):
        if not name or Path(name).name != name or "\0" in name:
            raise ConfigError(f"{index}: weight_map: expected names of files beside the index, found {quoted(name)}")
    return sorted(set(files.values()))


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

    @property
    def architecture(self) -> str:
        """The architecture that the file says it is of."""
        field = self._reader.get_field("general.architecture")
        return str(None if field is None else field.contents())

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
