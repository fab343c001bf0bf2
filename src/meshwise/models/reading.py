"""From the text of a config.json to a `Model`: torn JSON, unknown families, unknown keys and wrong values all end here.

Every key is either used by its family, known to be of no consequence for what is counted, or refused by name.
Not here: what the keys of a family mean (`families`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from meshwise.errors import ConfigError
from meshwise.models.families import FAMILIES, NOT_YET, FamilyConfig
from meshwise.models.model import Model, Source
from meshwise.models.spec import Architecture, Mixture

__all__ = ["parse_json", "read_config"]


def parse_json(text: str, where: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: with line and column when it is torn, or when it is no object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [k for k, _ in pairs]
        twice = next((k for k in keys if keys.count(k) > 1), None)
        if twice is not None:
            raise ConfigError(f"{where}: key {twice!r} appears twice; keep one")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as e:
        raise ConfigError(
            f"{where}: not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}; is the file complete?"
        ) from None
    except ConfigError:
        raise
    except ValueError:  # Python's limit on the digits of a whole number
        raise ConfigError(f"{where}: not a configuration: a number has thousands of digits") from None
    except RecursionError:
        raise ConfigError(f"{where}: not a configuration: nested too deeply") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object with keys such as 'model_type', found {_json_name(value)}")
    return value


def _json_name(value: Any) -> str:
    """Give what JSON calls this value, with the value when it is short."""
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    name = names.get(type(value), type(value).__name__)
    text = json.dumps(value) if not isinstance(value, (list, dict, type(None))) else ""
    return f"{name} {text[:60]}".rstrip()


def _family(config: Mapping[str, Any], where: str) -> type[FamilyConfig]:
    """Give the family that reads this configuration."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        found = "no such key" if "model_type" not in config else _json_name(kind)
        foreign = next((k for k in config if "ssm" in k or "mamba" in k), None)
        if foreign is not None:
            raise ConfigError(
                f"{where}: key {foreign!r}: state-space layers are not supported yet, and 'model_type' is missing"
            )
        raise ConfigError(f"{where}: key 'model_type': expected the family's name, such as \"llama\", found {found}")
    if kind in NOT_YET:
        raise ConfigError(f"{where}: model_type {kind!r} is not supported yet: {NOT_YET[kind]}")
    if kind not in FAMILIES:
        near = difflib.get_close_matches(kind, FAMILIES, n=3, cutoff=0.6)
        known = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(sorted(FAMILIES))}"
        raise ConfigError(f"{where}: model_type {kind!r} is not understood; {known}")
    return FAMILIES[kind]


def _explain(error: ValidationError, where: str) -> ConfigError:
    """Give the first complaint of the validator, in our words."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(p) for p in first["loc"] if not str(p).startswith("function-"))
    if first["type"] == "missing":
        return ConfigError(f"{where}: key {key!r} is missing; it has no default for this model_type")
    if first["type"] == "value_error":
        return ConfigError(f"{where}: {first['msg'].removeprefix('Value error, ')}")
    expected = first["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return ConfigError(f"{where}: key {key!r}: expected {expected}, found {_json_name(first['input'])}")


#: Spellings of "how many experts a token visits".
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_k", "moe_top_k", "ffn_config")


def _refuse_impossible(spec: Architecture, values: Mapping[str, Any]) -> None:
    """Refuse sizes that are fine alone and impossible together."""
    for group in spec.groups:
        ffn = group.layer.ffn
        if isinstance(ffn, Mixture) and ffn.top_k > ffn.experts:
            key = next((k for k in _CHOSEN if k in values), _CHOSEN[0])
            raise ConfigError(f"key {key!r}: expected at most {ffn.experts}, the experts there are; found {ffn.top_k}")


def read_config(
    config: Mapping[str, Any],
    *,
    name: str,
    source: Source | None = None,
    hub_names: tuple[str, ...] = (),
    where: str = "config.json",
) -> Model:
    """Read a parsed config.json.

    Args:
        config: the object, verbatim.
        name: what to call the model.
        source: where it comes from; the place `where` if not given.
        hub_names: other names of it.
        where: file name for messages.

    Raises:
        ConfigError: names the key, what was expected and what was found.
    """
    family = _family(config, where)
    try:
        values = family.unwrap(dict(config))
        read = family.model_validate(values)
        read.refuse_unknown(values)
        spec = read.architecture()
        _refuse_impossible(spec, values)
    except ValidationError as e:
        raise _explain(e, where) from None
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from None
    return Model(
        name=name,
        family=str(config["model_type"]),
        spec=spec,
        config=dict(config),
        source=source or Source(where),
        weight_dtype=read.weight_dtype(),
        hub_names=hub_names,
    )
