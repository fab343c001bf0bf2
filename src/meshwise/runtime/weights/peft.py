"""Adapters written as PEFT reads them: safetensors by the published names of projections, and their configuration.

A tensor that holds several weights side by side has one adapter there: of their ranks together, each in its own part of
the outputs. Not here: adapters merged into their weights (`runtime.adapters`), whole models (`writing`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.core.errors import ConfigError
from meshwise.core.files import write_whole
from meshwise.jobs import FineTuning
from meshwise.models import Model
from meshwise.runtime.weights.files import ADAPTERS, Array, Shape
from meshwise.runtime.weights.loading import Piece, Published
from meshwise.runtime.weights.names import hub_names
from meshwise.runtime.weights.writing import Written, new_folder, save, tensor_names

_PREFIX, _SUFFIX = "base_model.model.", ".weight"
#: Families of mixtures whose adapters it reads as they were named: transformers holds all experts in one tensor now,
#: and PEFT takes dense layers and shared experts of other families for experts, which have the same names.
_EXPERTS = ("mixtral",)
_ATTENTION = FineTuning("lora:targets=attention", "lora", targets=("attention",))
_CONFIG = "adapter_config.json"


def write_adapters(
    model: Model, tuning: FineTuning, own: Mapping[tuple[str, str, int], Array], folder: Path, base: str
) -> Written:
    """Write adapters.

    Args:
        model: beside whose weights they were trained, as it is published.
        tuning: which ones, and how they are scaled.
        own: their matrices: (block, name, number of the layer) -> array.
        folder: to be made; it is there when all of it is written.
        base: what the configuration calls the model.

    Raises:
        MissingDependencyError: the library is missing.
        ConfigError: a model whose published names are not known; adapters of experts that PEFT does not read.
        MeshwiseError: a folder that is there already, or cannot be written.
    """
    published = Published(model, hub_names(model))
    modules = list(_modules(published, own))
    held = {f"{_PREFIX}{m.name}.{key}": array for m in modules for key, array in m.matrices(own, tuning.rank).items()}
    with new_folder(folder) as unfinished:
        save(held, unfinished / ADAPTERS)
        config = _config(published, modules, tuning, base)
        write_whole(unfinished / _CONFIG, json.dumps(config, indent=2) + "\n")
    return Written(folder, (ADAPTERS, _CONFIG), len(held), sum(a.nbytes for a in held.values()), config)


@dataclass(frozen=True)
class _Module:
    """A linear layer of the reference implementation that has an adapter.

    Args:
        piece: its tensor.
        block, number: of the layer.
        expert: number of the expert, where each has its own.
        owns: weights in it that have adapters.
        shapes: of all weights of its block.
    """

    piece: Piece
    block: str
    number: int
    expert: tuple[int, ...]
    owns: tuple[str, ...]
    shapes: Mapping[str, Shape]

    @property
    def name(self) -> str:
        return self.piece.name.removesuffix(_SUFFIX)

    def matrices(self, own: Mapping[tuple[str, str, int], Array], rank: int) -> dict[str, Array]:
        """A [rank, in] and B [out, rank], the ranks of all weights in it together."""
        stored, width = self.piece.stored, rank * len(self.owns)
        down, up = ([own[self.block, f"{n}.{side}", self.number][self.expert] for n in self.owns] for side in "ab")
        parts, shapes = {}, dict(self.shapes)
        for name in stored.among or self.owns:
            shape = shapes[name] = replace(shapes[name], experts=(), inputs=(width,))
            parts[name] = np.zeros((width, *shape.outputs), up[0].dtype)
            if name in self.owns:
                place = self.owns.index(name)
                parts[name][place * rank : (place + 1) * rank] = up[place]
        together = np.concatenate([a.reshape(-1, rank) for a in down], axis=1)
        return {
            "lora_A.weight": np.ascontiguousarray(together.T),
            "lora_B.weight": replace(stored, transposed=True).give(parts, shapes),
        }


def _modules(published: Published, own: Mapping[tuple[str, str, int], Array]) -> Iterator[_Module]:
    """Every tensor of the files beside which there is an adapter."""
    seen, mistaken = set[str](), bool(published.model.mixtures) and published.model.family not in _EXPERTS
    for block, name, number in [(b, n.removesuffix(".a"), k) for b, n, k in own if n.endswith(".a")]:
        shapes = published.shapes[block]
        for expert, piece in published.pieces(block, name, published.layers[block][number]).items():
            stored = piece.stored
            if mistaken and not _ATTENTION.adapts(name):
                raise ConfigError(
                    f"model {published.model.name}: {name.removeprefix('w_')} has adapters, and of mixtures of family "
                    f"{published.model.family!r} PEFT reads those of attention alone; write them merged: "
                    "--to transformers"
                )
            if piece.name not in seen:
                seen.add(piece.name)
                owns = tuple(n for n in stored.among or (name,) if (block, f"{n}.a", number) in own)
                yield _Module(piece, block, number, expert, owns, shapes)


def _config(published: Published, modules: list[_Module], tuning: FineTuning, base: str) -> dict[str, Any]:
    """What `adapter_config.json` says."""
    tails = _tails({m.name: len(m.owns) for m in modules}, {n.removesuffix(_SUFFIX) for n in tensor_names(published)})
    parts = {tails[m.name]: len(m.owns) for m in modules}
    alpha = tuning.alpha or tuning.rank
    several = {tail: number for tail, number in sorted(parts.items()) if number > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": tuning.rank,
        "lora_alpha": alpha,
        "target_modules": sorted(parts),
        "rank_pattern": {tail: tuning.rank * number for tail, number in several.items()},
        "alpha_pattern": {tail: alpha * number for tail, number in several.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": not modules[0].piece.stored.transposed,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _tails(adapted: Mapping[str, int], every: Collection[str]) -> dict[str, str]:
    """The shortest end of each name that no other module has than those whose adapters are of as many weights.

    >>> _tails({"h.0.attn.proj": 1}, {"h.0.attn.proj", "h.0.mlp.proj"})
    {'h.0.attn.proj': 'attn.proj'}
    """

    def ends(name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[n:]) for n in range(len(parts) - 1, -1, -1)]

    alike = Counter((end, number) for name, number in adapted.items() for end in ends(name))
    there = Counter(end for name in every for end in ends(name))
    return {name: next(e for e in ends(name) if alike[e, number] == there[e]) for name, number in adapted.items()}
