"""From the text of a config.json to a `Model`: torn JSON, unknown families, unknown keys and wrong values all end here.

Every key is either used by its family, known to be of no consequence for what is counted, or refused by name.
Not here: what the keys of a family mean (`families`).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwise.core import files
from meshwise.core.errors import ConfigError
from meshwise.models.families import FAMILIES, NOT_YET, Family, Reading, Towered, read_family
from meshwise.models.families.dimensions import parse_dimensions
from meshwise.models.families.keys import Fault
from meshwise.models.model import Functions, Model, Source
from meshwise.models.spec import Architecture, Mixture


def parse_json(text: str, where: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: with line and column when it is torn, or when it is no object.
    """
    value = files.parse_json(text, where, finite=False)  # some bound time steps by infinity
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object with keys such as 'model_type', found {_found(value)}")
    return value


def _found(value: Any) -> str:
    """A value as JSON writes it, or what JSON calls it when it is not short.

    >>> _found(-4), _found("yes"), _found(None), _found([1])
    ('-4', '"yes"', 'null', 'a list')
    """
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if value is None or isinstance(value, (bool, int, float, str)):
        return json.dumps(value)[:60]
    return type(value).__name__


def _family(config: Mapping[str, Any], where: str) -> Family | Towered:
    """The row of the family that reads this configuration."""
    kind = config.get("model_type")
    if "model_type" not in config and isinstance(config.get("ssm_cfg"), dict):
        kind = "mamba_ssm"  # the first publication of Mamba and Mamba-2 names no family
    if "model_type" not in config and {"model", "cluster", "calibration"} <= set(config):
        raise ConfigError(
            f"{where}: this is a plan that --save wrote, not a model: it says the whole question, so commands that "
            f"take a plan take it without --on, a layout and the like ({_readers(config)}); expected a model's name or "
            "its config.json"
        )
    if not isinstance(kind, str):
        found = "no such key" if "model_type" not in config else _found(kind)
        foreign = next((k for k in config if "ssm" in k or "mamba" in k), None)
        if foreign is not None:
            raise ConfigError(
                f"{where}: key {foreign!r} is of state-space layers, whose family is not clear: 'model_type' is missing"
            )
        raise ConfigError(f"{where}: key 'model_type': expected the family's name, such as \"llama\", found {found}")
    if kind in NOT_YET:
        raise ConfigError(f"{where}: model_type {kind!r} is not supported yet: {NOT_YET[kind]}")
    if kind not in FAMILIES:
        near = difflib.get_close_matches(kind, FAMILIES, n=3, cutoff=0.6)
        known = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(sorted(FAMILIES))}"
        raise ConfigError(
            f"{where}: model_type {kind!r} is not understood; {known}. Decoders of other families are said by "
            "dimensions instead of a file: 'D=4096 F=14336 L=32 N=32 K=8 H=128 V=128256', E, top_k and Fe of experts"
        )
    return FAMILIES[kind]


def _readers(plan: Mapping[str, Any]) -> str:
    """Commands that take a saved plan of this kind."""
    if plan.get("kind") == "serving":
        return "of serving: 'meshwise estimate serve', 'simulate serve', 'export'"
    return "of training: 'meshwise simulate train', 'verify', 'run', 'export'"


def _refuse_endless(config: Mapping[str, Any]) -> None:
    """Refuse NaN and infinities, however deep they stand."""
    # A bound of time steps that has no upper end is written as infinity, and bounds nothing that is counted.
    todo: list[tuple[str, Any]] = [(k, v) for k, v in config.items() if k != "time_step_limit"]
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{key}.{k}", v) for k, v in value.items()]
        elif isinstance(value, list):
            todo += [(f"{key}.{i}", v) for i, v in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"key {key!r}: expected a finite number, found {_found(value)}")


def _taken(defaults: Mapping[str, Any], family: str) -> str:
    """What the file left to the defaults of its family."""
    said = ", ".join(f"{key} = {_value(value)}" for key, value in defaults.items())
    return f"taken from the defaults of model_type {family!r}, because config.json does not say: {said}"


def _value(value: Any) -> str:
    """A default as a note shows it; an object counts layers of each kind."""
    if isinstance(value, dict):
        return " and ".join(f"{number} {kind}" for kind, number in value.items())
    return json.dumps(value)


def _architecture(read: Reading) -> Architecture:
    """Build the architecture, with a note of every default that took part."""
    kind = read.keys.model_type
    try:
        spec = read.architecture()
    except ConfigError as e:
        blamed = {k: v for k, v in read.defaulted().items() if k in str(e)}
        raise ConfigError(f"{e}; {_taken(blamed, kind)}" if blamed else str(e)) from None
    defaults = read.defaulted()
    return replace(spec, notes=(*spec.notes, _taken(defaults, kind))) if defaults else spec


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """The first of several spellings that says something."""
    return next((config[n] for n in names if config.get(n) is not None), None)


def _number(config: Mapping[str, Any], *names: str) -> float | None:
    """The first of several spellings that is a number."""
    value = _first(config, *names)
    return value if type(value) in (int, float) else None


def _functions(text: Reading) -> Functions:
    """What a configuration, or else its family, says of the functions around matmuls."""
    config, own = text.config, text.family.numbers
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    return Functions(
        activation=str(_first(config, "hidden_act", "hidden_activation", "activation_function") or ""),
        norm_epsilon=_number(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
        or (own.epsilon if own else None),
        rope_base=_number({**config, **parameters}, "rope_theta", "rotary_emb_base") or (own.theta if own else None),
        rope_scaled=_first(scaling, "rope_type", "type") not in (None, "default"),
        rope_share=float(_number(config, "partial_rotary_factor", "rotary_pct") or 1),
    )


#: Spellings of "how many experts a token visits".
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "experts_per_token", "moe_k", "moe_top_k", "ffn_config")


def _refuse_impossible(spec: Architecture, values: Mapping[str, Any]) -> None:
    """Refuse sizes that are fine alone and impossible together."""
    for group in spec.groups:
        ffn = group.layer.ffn
        if isinstance(ffn, Mixture) and ffn.top_k > ffn.experts:
            key = next((k for k in _CHOSEN if k in values), _CHOSEN[0])
            raise ConfigError(f"key {key!r}: expected at most {ffn.experts}, the experts there are; found {ffn.top_k}")


#: Formats of weights that names of published checkpoints hold.
_NAMED_FORMAT = re.compile(
    r"(?i)(?<![a-z0-9])(fp8|mxfp4|nvfp4|fp4|int8|int4|awq|gptq|w8a8|w4a16|[48]-?bit)(?![a-z0-9])"
)


def _unsaid_formats(name: str, read: Reading) -> str:
    """What to say where the format of published weights is not known: by its method, or by the name alone."""
    named, found = _NAMED_FORMAT.search(name), read.quantization()
    if found is not None and found.weights is None:
        method = repr(found.method) if found.method else "a method that is not named"
        return f"quantised by {method}, of which no size is known here; give its formats by --precision"
    if named is None or found is not None:
        return ""
    return (
        f"the name says {named[1]}, and no 'quantization_config' (nor hf_quant_config.json beside it) does: the "
        "published weights are taken to be in its 'torch_dtype'; give their formats by --precision"
    )


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
        read = read_family(family, config)
        _refuse_endless(config)
        left = read.refuse_unknown()
        spec = _architecture(read)
        if left:
            note = f"keys of the configuration that are not used, as no count depends on them: {', '.join(left)}"
            spec = replace(spec, notes=(*spec.notes, note))
        if note := _unsaid_formats(name, read):
            spec = replace(spec, notes=(*spec.notes, note))
        read.refuse_activations(group.layer for group in spec.groups)
        _refuse_impossible(spec, read.config)
    except Fault as e:
        found = _found(e.value)
        raise ConfigError(f"{where}: key {e.path!r}: expected {e.expected}, found {found}") from None
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from None
    return Model(
        name=name,
        family=read.keys.model_type,
        spec=spec,
        config=dict(config),
        source=source or Source(where),
        weight_dtype=read.weight_dtype(),
        hub_names=hub_names,
        functions=_functions(read.text),
        quantization=read.quantization(),
    )


def read_dimensions(text: str, *, name: str, where: str = "dimensions", toml: bool = False) -> Model:
    """Read a model from its dimensions.

    Args:
        text: as `parse_dimensions` takes it.
        name: what to call the model.
        where: file name for messages.
        toml: whether it is TOML.

    Raises:
        ConfigError: names what is not understood, wrong or missing.

    >>> model = read_dimensions("D=8192 F=28672 L=80 N=64 K=8 H=128 V=128256", name="mine")
    >>> model.parameters.total  # of LLaMA-3-70B
    70553706496
    """
    values = parse_dimensions(text, where, toml=toml)
    said = {k: ("yes" if v else "no") if isinstance(v, bool) else str(v) for k, v in values.items()}
    source = Source(f"dimensions as given: {' '.join(f'{k}={v}' for k, v in said.items())}")
    return read_config({"model_type": "dimensions", **values}, name=name, source=source, where=where)


def read_model_json(text: str) -> Model:
    """Read what `Model.to_json` wrote.

    Raises:
        ConfigError: when it cannot be understood.
    """
    value = parse_json(text, "model JSON")
    config, name, source = value.get("config"), value.get("name"), value.get("source")
    if not isinstance(config, dict) or not isinstance(name, str):
        raise ConfigError("model JSON: expected the keys 'name' and 'config', as `to_json` writes them")
    known = Source(str(source.get("text", "")), str(source.get("date", ""))) if isinstance(source, dict) else None
    hub_names = tuple(str(n) for n in value.get("hub_names", ()))
    return read_config(config, name=name, source=known, hub_names=hub_names, where="model JSON")
