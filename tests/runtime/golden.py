"""Golden models: their configuration, a file of their weights, and the logits of the reference library."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from meshwise.models import read_config
from tests.data.golden.regenerate import draw

DATA = Path(__file__).parents[1] / "data" / "golden"

#: All that are drawn; real checkpoints say which file they are.
NAMES = sorted(p.stem for p in DATA.glob("*.json") if '"tensors"' in p.read_text())


@dataclass(frozen=True)
class Golden:
    name: str
    said: dict[str, Any]

    @classmethod
    def of(cls, name):
        return cls(name, json.loads((DATA / f"{name}.json").read_text()))

    @property
    def model(self):
        return read_config(self.said["config"], name=self.name)

    @property
    def written(self):
        """The model of the configuration as newer versions of the reference library write it."""
        return read_config(self.said["written"], name=self.name)

    @property
    def tokens(self):
        return np.asarray(self.said["tokens"])

    @property
    def logits(self):
        return np.load(DATA / f"{self.name}.npy")

    @property
    def tensors(self):
        return {name: draw(name, shape) for name, shape in self.said["tensors"].items()}

    def write(self, folder, **others):
        """Write the weights as the reference library names them."""
        file = folder / f"{self.name}.safetensors"
        save_file({**self.tensors, **others}, file)
        return file
