"""One saved step on disk: its record, its files, and arrays of its state, read whole or by name.

Weights of a step are read as published ones are, so that what was trained is generated with, or trained on. Not here:
writing a step (`checkpoints`), published files (`weights`).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.jobs.fine_tuning import FULL, is_adapter, parse_fine_tuning
from meshwise.models import Model, as_published, read_config
from meshwise.runtime.adapters import Adapters
from meshwise.runtime.params import Order, Parameter, Tree, by_layer
from meshwise.runtime.weights import open_weights
from meshwise.runtime.weights.files import Array
from meshwise.runtime.weights.loading import LoadableWeights
from meshwise.runtime.weights.peft import write_adapters
from meshwise.runtime.weights.writing import Written, write_weights

STEP = re.compile(r"step-(\d{8})")
STATE, RECORD = "state", "meshwise.json"
VERSION = "1"


@dataclass(frozen=True)
class SavedStep:
    """A step that was saved, in a folder of its own.

    Args:
        place: the folder.
        number: of the step.
    """

    place: Path
    number: int

    def record(self, *parts: str) -> dict[str, Any]:
        """Read what it is the state of.

        Args:
            parts: of its identity, that are to be there.

        Raises:
            ConfigError: another version's, or a torn one.
        """
        file = self.place / RECORD
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.torn(f"{RECORD}: {error}") from None
        if not isinstance(record, dict) or record.get("format") != VERSION:
            other = record.get("format") if isinstance(record, dict) else None
            raise ConfigError(
                f"checkpoint {self.place}: expected format {VERSION!r}, found {other!r}; "
                "it was written by another version"
            )
        mappings = ("files", "order", *parts)
        if record.get("step") != self.number or not all(isinstance(record.get(name), dict) for name in mappings):
            raise self.torn(f"{RECORD} was changed")
        return record

    def check_files(self, record: Mapping[str, Any]) -> None:
        """See that every file is what was saved."""
        found = files_of(self.place)
        found.pop(RECORD, None)
        for name, expected in record["files"].items():
            if name not in found:
                raise self.torn(f"{name} is missing")
            if found[name] != expected:
                raise self.torn(f"{name} is not what was saved (it has {found[name][0]:,} bytes)")

    def torn(self, words: str) -> ConfigError:
        """The error that says what is wrong with it."""
        return ConfigError(
            f"checkpoint {self.place} is torn: {words}; remove that folder to go on from the step that was saved "
            "before it"
        )

    def read(self, part: str = "", names: Collection[str] = ()) -> dict[str, Any]:
        """Read arrays whole, into the memory of the host.

        Args:
            part: of the state, that holds weights by run and name; all of the state unless given.
            names: of the weights that are read of it.
        """
        import orbax.checkpoint as ocp  # noqa: PLC0415  (an optional extra)

        there = (self.place / STATE).absolute()
        with ocp.PyTreeCheckpointer() as reader:
            tree = dict(reader.metadata(there).item_metadata.tree)
            if part:
                runs = {key: {n: a for n, a in run.items() if n in names} for key, run in tree[part].items()}
                tree = {part: {key: run for key, run in runs.items() if run}}
            how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            asked = ocp.args.PyTreeRestore(item=tree, restore_args=how, partial_restore=bool(part))
            return dict(reader.restore(there, args=asked))

    @cached_property
    def has_master(self) -> bool:
        """Whether it holds a master copy of the weights, in a wider format."""
        import orbax.checkpoint as ocp  # noqa: PLC0415

        with ocp.PyTreeCheckpointer() as reader:
            return "master" in reader.metadata((self.place / STATE).absolute()).item_metadata.tree


def files_of(folder: Path) -> dict[str, list[int]]:
    """File -> bytes and checksum."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): [p.stat().st_size, _checksum(p)] for p in paths}


def _checksum(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while part := stream.read(1 << 24):
            total = zlib.crc32(part, total)
    return total


def find_step(path: Path) -> SavedStep | None:
    """The step that a folder is, or the last of those that it holds; None if there is none."""
    if match := STEP.fullmatch(path.name):
        return SavedStep(path, int(match[1])) if (path / RECORD).exists() else None
    if not path.is_dir():
        return None
    found = [(int(match[1]), p) for p in path.iterdir() if (match := STEP.fullmatch(p.name))]
    return SavedStep(max(found)[1], max(found)[0]) if found else None


@dataclass(frozen=True)
class SavedWeights:
    """Weights of a saved step.

    Args:
        step: that holds them.
        record: of the step.
        model: whose they are.
    """

    step: SavedStep
    record: Mapping[str, Any]
    model: Model

    def arrays(self, names: Collection[str], part: str) -> dict[tuple[str, str, int], Array]:
        """Read weights whole, adapters merged into theirs: (block, name, number of the layer) -> array.

        Args:
            names: of weights.
            part: of the state, "weights" or "master", where frozen weights are not.
        """
        adapters = self.adapters
        if adapters is None:
            return self.stored(names, part)
        return adapters.merged(self.stored(names, "weights"), self.stored(adapters.names(names), part))

    def wide(self, names: Collection[str], dtype: np.dtype) -> dict[tuple[str, str, int], Array]:
        """The same as `arrays` of "weights"; those in a narrow format of their master copies, in `dtype`."""
        found = self.arrays(names, "weights")
        narrow = {name for (_, name, _), read in found.items() if isinstance(read, dict)}
        masters = self.arrays(narrow, "master")
        return found | {key: array.astype(dtype) for key, array in masters.items()}

    @cached_property
    def adapters(self) -> Adapters | None:
        """What was trained, if that is adapters."""
        tuning = parse_fine_tuning(str(self.record["job"].get("fine_tune", FULL.name)))
        return None if tuning.full else Adapters.of(self.model, tuning)

    def stored(self, names: Collection[str], part: str) -> dict[tuple[str, str, int], Array]:
        """Read arrays of the state; arguments and result as of `arrays`, adapters by themselves."""
        if not names:
            return {}
        try:
            return by_layer(self.step.read(part, names)[part], self.record["order"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self.step.torn(str(error).splitlines()[0]) from None

    def load(self, parameters: Mapping[str, Mapping[str, Parameter]], order: Order, abstract: Tree) -> Tree:
        """Read weights into arrays, as `Weights.load` does; of the master copy where there is one."""
        part, tree = "master" if self.step.has_master else "weights", Tree()
        for name in dict.fromkeys(name for run in parameters.values() for name in run):  # one in memory at a time
            found = self.arrays([name], part)
            for key, run in parameters.items():
                if name in run:
                    layers = [found[order[key]["block"], name, n] for n in order[key]["layers"]]
                    whole = np.stack(layers).reshape(run[name].shape)
                    tree.setdefault(key, {})[name] = put(abstract[key][name], whole)
        return tree


def put(abstract: jax.ShapeDtypeStruct, value: Any) -> jax.Array:
    """Place an array, of which each device takes its own part."""
    whole = np.asarray(value, abstract.dtype)
    assert whole.shape == abstract.shape, f"{whole.shape} is not {abstract.shape}"
    return jax.make_array_from_callback(whole.shape, abstract.sharding, whole.__getitem__)


def saved_weights(path: Path, model: Model | None = None) -> SavedWeights | None:
    """Open the weights of a saved step, and see that its files are what was saved; None where there is no step.

    Args:
        path: its folder, or that of a run, whose last step is taken.
        model: that they should be of; None: the step says it.

    Raises:
        ConfigError: a torn step, or one of another model.
    """
    step = find_step(path)
    if step is None:
        return None
    record = step.record("model", "job")
    config = {key: value for key, value in record["model"].items() if key != "name"}
    if model is not None and config != json.loads(json.dumps(dict(model.config))):
        raise ConfigError(
            f"--weights {path}: the step is of model {record['model'].get('name')!r}, expected {model.name}; "
            "give the run's own model"
        )
    step.check_files(record)
    own = model or read_config(config, name=str(record["model"].get("name")), where=str(step.place / RECORD))
    return SavedWeights(step, record, own)


def export_step(saved: SavedWeights, folder: Path) -> Written:
    """Write the weights of a saved step as those of its model's family are published, in the format that they have.

    Args and errors: as of `write_weights`.
    """
    model = as_published(saved.model, int(saved.record["job"]["seq_len"]))
    (dtype,) = {array.dtype for array in saved.arrays(["norm.final"], "weights").values()}
    return write_weights(model, partial(saved.wide, dtype=dtype), folder, itemsize=dtype.itemsize, dtype=str(dtype))


def export_adapters(saved: SavedWeights, folder: Path) -> Written:
    """Write the adapters of a saved step as PEFT reads them, as they are updated.

    Raises:
        MeshwiseError: it has none; and as `write_adapters`.
    """
    adapters = saved.adapters
    if adapters is None:
        raise MeshwiseError(
            f"{saved.step.place}: --to peft writes adapters, and this run trained all weights; use --to transformers"
        )
    model = as_published(saved.model, int(saved.record["job"]["seq_len"]))
    names = {t.name for block in adapters.program for t in block.weights if is_adapter(t)}
    own = saved.stored(names, "master" if saved.step.has_master else "weights")
    base = saved.record.get("run", {}).get("weights", saved.model.name)
    return write_adapters(model, adapters.tuning, own, folder, str(base))


def find_weights(path: Path, model: Model) -> LoadableWeights:
    """Open weights of a model: a saved step of training, or published files.

    Args and errors: as of `saved_weights` and `open_weights`.
    """
    try:
        return saved_weights(path, model) or open_weights(path, model)
    except OSError as error:
        raise MeshwiseError(f"--weights {path}: {error.strerror}") from None
