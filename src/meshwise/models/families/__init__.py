"""Families of models: which `model_type` is read by which row, and which are known but not supported yet."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.models.families import (
    deepseek,
    dense,
    dimensions,
    encoder_decoder,
    hybrids,
    mamba,
    mixed,
    mixtures,
    towered,
)
from meshwise.models.families.features import Family
from meshwise.models.families.ignored import NOT_YET
from meshwise.models.families.reader import Reading, read_family
from meshwise.models.families.towered import Towered

__all__ = ["FAMILIES", "NOT_YET", "Family", "Reading", "Towered", "read_family"]

_MODULES = (dense, mixtures, deepseek, mixed, mamba, hybrids, encoder_decoder, towered, dimensions)
#: Every row; those that a leading underscore hides are parts of others.
ROWS: list[Family | Towered] = [
    row
    for module in _MODULES
    for name, row in vars(module).items()
    if isinstance(row, Family | Towered) and not name.startswith("_")
]
#: `model_type` -> the row that reads it.
FAMILIES: Mapping[str, Family | Towered] = {kind: row for row in ROWS for kind in row.model_types}
