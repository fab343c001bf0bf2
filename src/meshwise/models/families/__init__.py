"""Families of models: which `model_type` is read by which class, and which are known but not supported yet."""

from __future__ import annotations

from meshwise.models.families.base import FamilyConfig
from meshwise.models.families.llama import LlamaConfig

__all__ = ["FAMILIES", "NOT_YET", "FamilyConfig"]

_READERS: tuple[type[FamilyConfig], ...] = (LlamaConfig,)

#: `model_type` -> the class that reads it.
FAMILIES = {name: reader for reader in _READERS for name in reader.model_types}

#: `model_type` -> why it is not supported yet.
NOT_YET: dict[str, str] = {}
