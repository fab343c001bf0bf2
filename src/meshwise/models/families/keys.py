"""Keys of a configuration that remember which of them were read: so a default that took part can be told.

Not here: what any key means (`base` and the families).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, PrivateAttr

#: Keys of which 1 means that a pattern is absent: every layer is alike.
_STEPS = frozenset({"decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "n_group", "topk_group"})


def _absent(key: str, value: object) -> bool:
    """Whether a default says only that a feature is not there; a number that is no count sizes nothing."""
    if value is None or value is False or isinstance(value, float):
        return True
    return value is not True and (value == 0 or (value == 1 and key in _STEPS))


class Keys(BaseModel):
    """An object of a configuration."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True, protected_namespaces=())

    _read: set[str] = PrivateAttr(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        """Give an attribute, and remember it when it is a key."""
        value = super().__getattribute__(name)
        if name in type(self).__pydantic_fields__:
            self._read.add(name)
        return value

    @classmethod
    def spelling(cls, field: str) -> str:
        """Give the key of a field as published files spell it.

        >>> from meshwise.models.families import FAMILIES
        >>> FAMILIES["gpt2"].spelling("hidden_size")
        'n_embd'
        """
        alias = cls.__pydantic_fields__[field].validation_alias
        return str(alias.choices[0]) if isinstance(alias, AliasChoices) else field

    @classmethod
    def known_keys(cls) -> frozenset[str]:
        """Keys that are used, by every spelling."""
        names: set[str] = set(cls.model_fields)
        for info in cls.model_fields.values():
            if isinstance(info.validation_alias, AliasChoices):
                names.update(str(choice) for choice in info.validation_alias.choices)
        return frozenset(names)

    def defaulted(self, prefix: str = "") -> Mapping[str, Any]:
        """Give what was read so far, was not said, and is no absent feature: by field, nested ones with dots."""
        found: dict[str, Any] = {}
        for field in [f for f in type(self).__pydantic_fields__ if f in self._read]:
            value = getattr(self, field)
            if isinstance(value, Keys):
                found |= value.defaulted(f"{prefix}{field}.")
            elif field not in self.model_fields_set and not _absent(field, value):
                found[prefix + self.spelling(field)] = value
        return found
