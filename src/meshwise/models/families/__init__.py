"""Families of models: which `model_type` is read by which class, and which are known but not supported yet."""

from __future__ import annotations

from meshwise.models.families.alibi import ALIBI_FAMILIES
from meshwise.models.families.base import FamilyConfig
from meshwise.models.families.cohere import COHERE_FAMILIES
from meshwise.models.families.deepseek import DEEPSEEK_FAMILIES
from meshwise.models.families.further import FURTHER_FAMILIES
from meshwise.models.families.gemma import GEMMA_FAMILIES
from meshwise.models.families.gpt import GPT_FAMILIES
from meshwise.models.families.llama import LLAMA_FAMILIES
from meshwise.models.families.mixtures import MIXTURE_FAMILIES
from meshwise.models.families.not_yet import NOT_YET
from meshwise.models.families.olmo import OLMO_FAMILIES
from meshwise.models.families.phi import PHI_FAMILIES
from meshwise.models.families.qwen import QWEN_FAMILIES

__all__ = ["FAMILIES", "NOT_YET", "FamilyConfig"]

_READERS: tuple[type[FamilyConfig], ...] = (
    *LLAMA_FAMILIES,
    *QWEN_FAMILIES,
    *GEMMA_FAMILIES,
    *PHI_FAMILIES,
    *GPT_FAMILIES,
    *ALIBI_FAMILIES,
    *COHERE_FAMILIES,
    *OLMO_FAMILIES,
    *DEEPSEEK_FAMILIES,
    *MIXTURE_FAMILIES,
    *FURTHER_FAMILIES,
)

#: `model_type` -> the class that reads it.
FAMILIES = {name: reader for reader in _READERS for name in reader.model_types}
