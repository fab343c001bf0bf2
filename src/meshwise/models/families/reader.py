"""A configuration as its family reads it: what it means, what is not understood, and which defaults took part.

Not here: any family.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache, lru_cache
from typing import Any

from meshwise.core.dtypes import DType, parse_dtype
from meshwise.core.errors import ConfigError, UnknownNameError
from meshwise.models.families.features import Family, build_decoder, default_type
from meshwise.models.families.ignored import ACTIVATION_KEYS, IRRELEVANT, check_activation, is_harmless
from meshwise.models.families.keys import Keys, known_keys
from meshwise.models.families.towered import MEDIA_KEYS, Towered
from meshwise.models.model import Quantization
from meshwise.models.spec import Architecture, Layer
from meshwise.models.towers import Tower, TowerPart, linear

#: Kind of tower -> what a note calls it.
_WORDS = {"vision": "vision tower", "audio": "audio tower", "cross": "layers that attend to pictures"}


class Reading:
    """A configuration without towers."""

    def __init__(self, family: Family | Towered, config: Mapping[str, Any]) -> None:
        """Check the keys of `config`.

        Raises:
            Fault: a value that its key may not hold.
            ConfigError: keys that are missing.
        """
        self.row, self.config, self.keys = family, config, Keys(family.keys, config)

    @property
    def text(self) -> Reading:
        """The language model's part."""
        return self

    @property
    def family(self) -> Family:
        """The row of a language model."""
        assert isinstance(self.row, Family), "of a model with towers its text part is asked"
        return self.row

    def refuse_unknown(self) -> list[str]:
        """Refuse the first key that is neither used nor of no consequence; return those that were left out by name."""
        self.keys.refuse_disagreement(self.config)
        known, kind = known_keys(self.row.keys) | IRRELEVANT | ACTIVATION_KEYS | self.row.ignored, self.keys.model_type
        left = [k for k, v in self.config.items() if k not in known and v is not None]  # null: the key is not set
        for key in left:
            if not is_harmless(key, self.config[key]):
                raise ConfigError(
                    f"key {key!r} is not understood for model_type {kind!r}, and may change "
                    "what is computed; remove it if it does not"
                )
        for name in self.keys.architectures or ():
            if self.row.classes and name not in self.row.classes:
                expected = " or ".join(self.row.classes)
                raise ConfigError(f"key 'architectures': expected {expected} for model_type {kind!r}, found {name!r}")
        return left

    def refuse_activations(self, layers: Iterable[Layer]) -> None:
        """Refuse an activation that is not known, or does not fit the layers."""
        gated = all(layer.ffn.gated for layer in layers if layer.ffn is not None)
        for key in sorted((ACTIVATION_KEYS & set(self.config)) - known_keys(self.row.keys)):
            check_activation(key, self.config[key], gated=gated)

    def architecture(self) -> Architecture:
        """What the keys mean."""
        return build_decoder(self.family, self.keys)

    def defaulted(self) -> dict[str, Any]:
        """Defaults that took part, but for conventions: as many key/value heads, heads that share the width."""
        found, k = self.keys.defaulted(), self.keys
        if "num_attention_heads" in k and "hidden_size" in k and self.family.build is None:
            n = k.num_attention_heads
            conventions = {"num_key_value_heads": n, "head_dim": k.hidden_size / n}
            found = {key: v for key, v in found.items() if conventions.get(key) != v}
        kinds = self._pattern()
        return {**found, "layer_types": dict(sorted(Counter(kinds).items()))} if kinds else found

    def _pattern(self) -> list[str]:
        """Kinds of layers by a pattern of the family that no key says."""
        f, k = self.family, self.keys
        if f.pattern is not None:
            return f.pattern(k)
        fixed = isinstance(f.local, int) and k.layer_types is None
        return [default_type(f, k, i) for i in range(k.num_hidden_layers)] if fixed else []

    def quantization(self) -> Quantization | None:
        """The formats of a published checkpoint that is quantised, else None."""
        k, inner = self.keys, self.text.keys
        config = k.quantization_config or inner.quantization_config
        if config is None:
            return None
        named = config.get("expert_dtype") or (k.expert_dtype if "expert_dtype" in k else None)
        return read_quantization(config, experts=DType.MXFP4 if named == "fp4" else None)

    def weight_dtype(self) -> DType | None:
        """Format of the published weights, or None when the configuration does not say one that is known."""
        k, quantization = self.keys, self.quantization()
        if quantization is not None:
            return quantization.most
        text = k.dtype or k.torch_dtype
        try:
            return None if text is None else parse_dtype(text.removeprefix("torch."))
        except UnknownNameError:
            return None


class ToweredReading(Reading):
    """A configuration of a language model beside towers."""

    def __init__(self, row: Towered, config: Mapping[str, Any]) -> None:
        """Check the keys at every level."""
        super().__init__(row, _nested(row, config))
        self.towered = row
        self._text, self._chosen = self._read_text(), self._choose_vision()
        said = self.keys.vision_config
        self.vision = None if said is None else Keys(self._chosen.keys, said, "vision_config.")
        said = self.keys.audio_config if row.sound else None
        self.audio = Keys(row.sound.keys, said, "audio_config.") if row.sound and said is not None else None

    @property
    def text(self) -> Reading:
        """The language model, read by its family."""
        return self._text

    def _read_text(self) -> Reading:
        row, k = self.towered, self.keys
        config = k.text_config
        kind = config.get("model_type", next(iter(row.texts)))
        if not isinstance(kind, str) or kind not in row.texts:
            raise ConfigError(
                f"key 'text_config.model_type': expected {' or '.join(map(repr, row.texts))}, found {kind!r}"
            )
        family = row.texts[kind]
        unread = {"architectures", "top_k"} if "top_p" in config else {"architectures"}  # of sampling
        values = {key: v for key, v in config.items() if key not in unread}
        if k.tie_word_embeddings or (k.tie_word_embeddings is False and not row.either):
            values["tie_word_embeddings"] = k.tie_word_embeddings
        elif row.tied is not None:
            values.setdefault("tie_word_embeddings", row.tied)
        return Reading(family, {**values, "model_type": kind if kind in family.model_types else family.model_types[0]})

    def _choose_vision(self) -> Any:
        """The kind of the vision tower."""
        config, kinds = self.keys.vision_config or {}, self.towered.visions
        kind = config.get("model_type")
        if len(kinds) > 1 and kind is not None and (not isinstance(kind, str) or kind not in kinds):
            raise ConfigError(
                f"key 'vision_config.model_type': expected {' or '.join(map(repr, kinds))}, found {kind!r:.60}"
            )
        return kinds.get(str(kind), next(iter(kinds.values())))

    def refuse_unknown(self) -> list[str]:
        """Refuse unknown keys at every level."""
        left = super().refuse_unknown() + self.text.refuse_unknown()
        if self.vision is not None:
            left += self._chosen.refuse_unknown(self.keys.vision_config, "vision_config.")
        if self.towered.sound is not None and self.audio is not None:
            left += self.towered.sound.refuse_unknown(self.keys.audio_config, "audio_config.")
        return left

    def refuse_activations(self, layers: Iterable[Layer]) -> None:
        """Refuse activations of the language model; those of the towers are checked with their keys."""
        self.text.refuse_activations(layers)

    def _towers(self, width: int) -> tuple[Tower, ...]:
        row, found = self.towered, []
        if self.vision is not None:
            projector = row.projector(self.keys, self.vision, width)
            found.append(Tower("vision", (*self._chosen.parts(self.vision), *projector)))
        if row.sound is not None and self.audio is not None:
            projector = (TowerPart("projector", linear("project", self.audio.output_proj_dims, width, bias=False)),)
            found.append(Tower("audio", (*row.sound.parts(self.audio), *projector)))
        return (*found, *(row.crossing(self.text.keys) if row.crossing else ()))

    def architecture(self) -> Architecture:
        """The language model's, with the towers and what is to be said of them."""
        spec = self.text.architecture()
        towers = self._towers(spec.d_model)
        notes = [
            f"{_WORDS[tower.kind]}: {tower.parameters:,} parameters are counted and held in memory; a step is priced "
            "on text alone, 0 image or sound tokens"
            for tower in towers
        ]
        if not towers:
            notes = ["counted without its vision tower, whose sizes the configuration does not say"]
        return replace(spec, towers=towers, notes=(*spec.notes, *notes))

    def defaulted(self) -> dict[str, Any]:
        """What was left to the defaults, at every level."""
        found = {**self.keys.defaulted(), **self.text.defaulted()}
        unsaid = self.keys.tie_word_embeddings is None and "tie_word_embeddings" not in self.keys.text_config
        if self.towered.tied and unsaid:
            found["tie_word_embeddings"] = True
        parts = (part.defaulted() for part in (self.vision, self.audio) if part is not None)
        return {**found, **{key: v for part in parts for key, v in part.items()}}

    def weight_dtype(self) -> DType | None:
        """As the outer level says, unless only the language model's is quantized; else the language model's."""
        inner = self.text.weight_dtype()
        if self.keys.quantization_config is None and self.text.keys.quantization_config is not None:
            return inner
        return super().weight_dtype() or inner


def _nested(row: Towered, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that the language model's sizes are there, and nest them where the file does not."""
    text = config.get("text_config")
    if text is None and row.flat and "hidden_size" in config:
        outer = known_keys(row.keys) | set(MEDIA_KEYS.split())
        outer -= {"torch_dtype", "dtype", "quantization_config", "rope_scaling", "rope_parameters"}
        beside = {k: v for k, v in config.items() if k in outer}
        return {**beside, "text_config": {k: v for k, v in config.items() if k not in outer}}
    if text is None:
        raise ConfigError("key 'text_config' is missing; it holds the language model's sizes")
    return config


def read_family(row: Family | Towered, config: Mapping[str, Any]) -> Reading:
    """Read a configuration by the row of its family."""
    return ToweredReading(row, config) if isinstance(row, Towered) else Reading(row, config)


#: Modules of a layer by what they are part of, as checkpoints name them; `#` stands for the layer.
_MODULES = {
    "attention": ("layers.#.self_attn.q_proj", "layers.#.attention.q_proj", "layers.#.attn.q_proj"),
    "experts": ("layers.#.mlp.experts.0.down_proj", "layers.#.block_sparse_moe.experts.0.w2", "layers.#.mlp.experts"),
    "weights": ("layers.#.mlp.down_proj", "layers.#.mlp.shared_experts.down_proj"),
}

#: Keys that list modules which are left as they were.
_LEFT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")

#: Words of a method -> format of weights, and of operands.
_METHODS = {
    "w4a16_nvfp4": (DType.FP4, None),
    "nvfp4": (DType.FP4, DType.FP4),
    "modelopt_fp4": (DType.FP4, DType.FP4),
    "mxfp4": (DType.MXFP4, None),
    "w4a16": (DType.INT4, None),
    "w4a8": (DType.INT4, DType.FP8),
    "fp8": (DType.FP8, DType.FP8),
}


def read_quantization(config: Mapping[str, Any], *, experts: DType | None = None) -> Quantization:
    """Read `quantization_config`: fp8, mxfp4, compressed-tensors, modelopt (NVFP4, FP8), awq, gptq, bitsandbytes.

    Args:
        config: the value of the key.
        experts: format of routed experts that is said elsewhere.

    >>> read_quantization({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}).attention
    <DType.BF16: 'bf16'>
    """
    found = {part: _formats_of(config, part) for part in _MODULES}
    weights, operands, group = found["weights"]
    each = {part: None if of[0] == weights else of[0] or DType.BF16 for part, of in found.items()}
    narrow = next((of for of in found.values() if of[0] is not None), _UNSAID)
    unknown = narrow[0] is None
    return Quantization(
        method=str(config.get("quant_method", "")) or ("modelopt" if "quant_algo" in config else ""),
        weights=None if unknown else weights or DType.BF16,
        attention=None if unknown else each["attention"],
        experts=None if unknown else experts or each["experts"],
        operands=operands or narrow[1],
        kv=DType.FP8 if _caches_fp8(config) else None,
        group=group or narrow[2],
    )


_Formats = tuple[DType | None, DType | None, int | None]

_UNSAID: _Formats = (None, None, None)


def _formats_of(config: Mapping[str, Any], part: str) -> _Formats:
    """Formats of the weights and operands of a part of the layers, and of a group; None as they were or not known."""
    left = [pattern for key in _LEFT for pattern in _listed(config.get(key))]
    if any(_names(pattern, part) for pattern in left):
        return _UNSAID
    listed, groups = config.get("quantized_layers"), config.get("config_groups")
    if isinstance(listed, Mapping):
        own = [v for name, v in listed.items() if _part(name) == part and isinstance(v, Mapping)]
        each = [str(layer.get("quant_algo", "")).lower() for layer in own]
        return _by_method(Counter(each).most_common(1)[0][0]) if each else _UNSAID
    if isinstance(groups, Mapping):
        return next((_of_group(group) for group in groups.values() if _is_for(group, part)), _UNSAID)
    found = _by_method(f"{config.get('quant_method', '')} {config.get('quant_algo', '')}".lower())
    return _by_bits(config) if found is _UNSAID else found


def _by_bits(config: Mapping[str, Any]) -> _Formats:
    """As AWQ, GPTQ and bitsandbytes say it."""
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    if bits == 4:
        return DType.INT4, None, group if isinstance(group, int) and group > 0 else None
    if config.get("load_in_4bit") is True:
        return DType.INT4, None, _NF4_GROUP
    whole = config.get("load_in_8bit") is True
    return (DType.INT8, DType.INT8 if whole else None, None) if bits == 8 or whole else _UNSAID


def _is_for(group: Any, part: str) -> bool:
    """Whether a group of compressed-tensors is for a part of the layers."""
    targets = _listed(group.get("targets") or ["Linear"]) if isinstance(group, Mapping) else []
    return any(target == "Linear" or _names(target, part) for target in targets)


def _part(module: str) -> str:
    return "experts" if ".experts." in module else "attention" if "att" in module else "weights"


#: Weights that share a scale in bitsandbytes' four bits.
_NF4_GROUP = 64


def _by_method(method: str) -> _Formats:
    return next(((w, o, None) for word, (w, o) in _METHODS.items() if word in method), _UNSAID)


def _of_group(group: Mapping[str, Any]) -> _Formats:
    """A group of compressed-tensors: bits and types of weights and of what they are multiplied with."""
    weights, operands = (v if isinstance(v, Mapping) else {} for v in map(group.get, ("weights", "input_activations")))
    stored, size = _narrow(weights), weights.get("group_size")
    if stored is DType.FP4 and size == _MX_BLOCK:
        stored = DType.MXFP4
    return stored, _narrow(operands), size if isinstance(size, int) and size > 0 else None


#: Elements that share a scale in the OCP's microscaling formats.
_MX_BLOCK = 32


def _narrow(of: Mapping[str, Any]) -> DType | None:
    found = {"4 float": DType.FP4, "4": DType.INT4, "8 float": DType.FP8, "8": DType.INT8}
    return found.get(f"{of.get('num_bits')}{' float' if of.get('type') == 'float' else ''}")


def _names(pattern: Any, part: str) -> bool:
    """Whether a pattern names a part of an ordinary layer: a regular expression after `re:`, a glob, or a module.

    Published files list tens of thousands of modules: most are told apart by how they begin.
    """
    text = str(pattern)
    if text.startswith("re:"):
        expression = _expression(text[3:])
        return expression is not None and any(map(expression.match, _full_names(part)))
    begin = re.split(r"[*?[]", text, maxsplit=1)[0]
    globs = (text, f"{text}.*") if begin != text else ()
    return any(
        f".{text}." in f".{module}." or (module.startswith(begin) and any(fnmatch(module, glob) for glob in globs))
        for module in _full_names(part)
    )


@lru_cache(maxsize=1 << 16)
def _expression(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):  # it names nothing
        return None


@cache
def _full_names(part: str) -> tuple[str, ...]:
    """Modules of a part of an ordinary layer, as models have them."""
    own = [name.replace("#", _LAYER) for name in _MODULES[part]]
    return tuple(f"{top}.{name}" for name in own for top in ("model", "language_model.model", "model.language_model"))


#: A layer that is neither the first nor the last of any model, whose modules are as most are.
_LAYER = "7"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _caches_fp8(config: Mapping[str, Any]) -> bool:
    scheme = config.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else None
    return bits == 8 or str(config.get("kv_cache_quant_algo") or "").lower() == "fp8"
