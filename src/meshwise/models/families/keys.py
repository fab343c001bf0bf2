"""Keys of configuration files: what each may hold, by which names it is written, and which defaults took part.

A family names the keys that it understands, with the defaults of its reference implementation; what a key may hold
follows from its name. Not here: what any key means (`features` and the families).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshwise.core.errors import ConfigError

#: The default of a key that must be given: sizes are not guessed.
REQUIRED = object()


@dataclass(frozen=True)
class Fault(Exception):  # noqa: N818 -- it becomes a `ConfigError` at the door
    """A value that is not what its key may hold."""

    path: str
    expected: str
    value: object


class Kind(Protocol):
    """What a key may hold."""

    def read(self, value: Any, path: str) -> Any:
        """The value as families use it.

        Raises:
            Fault: it is something else.
        """


@dataclass(frozen=True)
class Whole:
    """A whole number within bounds."""

    least: int
    most: int

    def read(self, value: Any, path: str) -> int:
        """As it is."""
        if type(value) is not int:
            raise Fault(path, "a whole number", value)
        if value < self.least:
            raise Fault(path, "more than 0" if self.least == 1 else f"at least {self.least}", value)
        if value > self.most:
            raise Fault(path, f"at most {self.most:,}", value)
        return value


@dataclass(frozen=True)
class Number:
    """A number, above 0 and up to `most` where that is given."""

    most: float | None = None

    def read(self, value: Any, path: str) -> float:
        """As it is."""
        if type(value) not in (int, float):
            raise Fault(path, "a number", value)
        if self.most is not None and not 0 < value <= self.most:
            raise Fault(path, f"more than 0 and at most {self.most:g}", value)
        return float(value) if type(value) is float else int(value)


@dataclass(frozen=True)
class Only:
    """One of a few values."""

    values: tuple[object, ...]

    def read(self, value: Any, path: str) -> Any:
        """As it is."""
        if not any(type(v) is type(value) and v == value for v in self.values):
            words = [repr(v) if isinstance(v, str) else json.dumps(v) for v in self.values]
            raise Fault(path, " or ".join(filter(None, (", ".join(words[:-1]), words[-1]))), value)
        return value


@dataclass(frozen=True)
class Plain:
    """A JSON value of one type."""

    type: type
    word: str

    def read(self, value: Any, path: str) -> Any:
        """As it is."""
        if type(value) is not self.type:
            raise Fault(path, self.word, value)
        return value


@dataclass(frozen=True)
class Listed:
    """A list of values of one kind, `count` of them where that is given."""

    of: Kind
    count: int | None = None

    def read(self, value: Any, path: str) -> list[Any]:
        """As it is."""
        if not isinstance(value, list):
            raise Fault(path, "a list", value)
        if self.count not in (None, len(value)):
            raise Fault(path, f"a list of {self.count}" if self.count else "an empty list", value)
        return [self.of.read(v, f"{path}.{i}") for i, v in enumerate(value)]


@dataclass(frozen=True)
class Either:
    """Any of several kinds."""

    kinds: tuple[Kind, ...]

    def read(self, value: Any, path: str) -> Any:
        """As the first kind that it fits."""
        faults = []
        for kind in self.kinds:
            try:
                return kind.read(value, path)
            except Fault as e:
                faults.append(e)
        raise Fault(path, " or ".join(dict.fromkeys(f.expected for f in faults)), value)


@dataclass(frozen=True)
class Inside:
    """An object with keys of its own; `closed` refuses others."""

    schema: Schema
    closed: bool = True

    def read(self, value: Any, path: str) -> Keys:
        """Its keys."""
        if not isinstance(value, dict):
            raise Fault(path, "an object", value)
        for key in value:
            if self.closed and not any(key in k.spellings for k in self.schema.values()):
                raise Fault(f"{path}.{key}", f"one of {', '.join(self.schema)}", value[key])
        return Keys(self.schema, value, f"{path}.")


@dataclass(frozen=True)
class ByLayer:
    """An object by numbers of layers, as later files write them: "05"."""

    schema: Schema

    def read(self, value: Any, path: str) -> dict[int, Keys]:
        """The keys of each layer."""
        if not isinstance(value, dict):
            raise Fault(path, "an object", value)
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) <= 5):
                raise Fault(f"{path}.{key}", "the number of a layer", value[key])
        return {int(key): Inside(self.schema).read(v, f"{path}.{key}") for key, v in value.items()}


SIZE, COUNT, LAYERS = Whole(1, 10_000_000), Whole(1, 100_000), Whole(1, 10_000)
POSITIONS, INDEX, FEW = Whole(1, 1_000_000_000), Whole(0, 10_000), Whole(1, 1000)
SWITCH, TEXT, OBJECT = Plain(bool, "true or false"), Plain(str, "a text"), Plain(dict, "an object")
INTEGER, ANY_LIST = Plain(int, "a whole number"), Plain(list, "a list")
AUTO = Only(("auto",))

#: Kind -> keys that hold it; other keys hold what their default is, or a size.
_KINDS: dict[Kind, str] = {
    COUNT: """
        num_attention_heads num_key_value_heads num_heads attention_heads decoder_attention_heads n_head kv_n_heads
        num_attention_groups num_global_key_value_heads num_sliding_attention_heads swa_num_attention_heads
        swa_num_key_value_heads linear_num_key_heads linear_num_value_heads vt_num_attention_heads index_n_heads
        sparse_num_index_heads mamba_n_heads mamba_num_heads N K E top_k num_experts_per_tok num_local_experts
        n_routed_experts moe_k moe_num_experts moe_top_k top_k_experts n_group topk_group decoder_sparse_step
        interleave_moe_layer_step moe_layer_interval full_attention_interval attn_layer_period expert_layer_period
        no_rope_layer_interval sliding_window_pattern hybrid_block_size index_topk index_topk_blocks sparse_topk_blocks
        compress_rate_csa compress_rate_hca compressed_sparse_attention heavily_compressed_attention hc_mult
        hc_sinkhorn_iters o_groups chunk_size mamba_chunk_size block_size n_groups ngroups mamba_n_groups
        relative_attention_num_buckets pad_vocab_size_multiple num_channels in_channels conv_kernel_size max_num_tiles
        downsample_factor scale_factor spatial_merge_size temporal_patch_size
    """,
    LAYERS: """
        num_hidden_layers num_decoder_layers decoder_layers n_layer depth num_global_layers vt_num_hidden_layers L
    """,
    POSITIONS: """
        max_position_embeddings n_ctx sliding_window window_size attention_chunk_size index_block_size
        sparse_block_size num_position_embeddings position_embedding_size positions window
    """,
    INDEX: """
        n_shared_experts num_hash_layers attn_layer_offset expert_layer_offset first_k_dense_replace num_experts
        hidden_size_per_layer_input max_window_layers moe_layer_start_index moe_num_shared_experts num_mtp_modules
        mtp_num_hidden_layers num_kv_shared_layers num_nextn_predict_layers dense Fs
    """,
    FEW: "conv_kernel d_conv expand linear_conv_kernel_dim mamba_d_conv mamba_expand",
    SWITCH: "norm_topk_prob is_gated_act postnorm zero_centered tie_word_embeddings",
    TEXT: """
        model_type torch_dtype dtype topk_method expert_dtype feed_forward_proj hybrid_override_pattern shared_moe_mode
        sparse_score_type attention_type
    """,
    OBJECT: """
        quantization_config rope_scaling rope_parameters text_config vision_config audio_config attn_cfg ffn_act_fn
    """,
    Number(): "routed_scaling_factor final_logit_softcapping clip_qkv softmax_scale moe_jitter_eps",
    Only((False,)): "add_cross_attention is_encoder_decoder",
    Only(("softmax", "sigmoid", "sqrtsoftplus", "noaux_tc")): "scoring_func",
    Either((COUNT, AUTO)): "time_step_rank mamba_dt_rank dt_rank",
    Either((SIZE, AUTO)): "mamba_d_head",
    Listed(TEXT): "architectures",
    Listed(INDEX): "moe_layers cross_attention_layers deepstack_visual_indexes",
    Listed(INTEGER): "no_rope_layers mlp_only_layers attn_layer_indices sparse_attention_freq",
    Listed(Only(("full_attention", "sliding_attention", "chunked_attention"))): "layer_types",
    Listed(Only(("dense", "sparse"))): "mlp_layer_types",
    Listed(Only((0, 1))): "hybrid_layer_pattern attn_type_list moe_layer_freq",
    Listed(COUNT, 2): "merge_kernel_size subsampling_conv_channels",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}

#: Key -> further names of it, in every family.
_ALSO = {
    "num_experts": "num_local_experts",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts num_local_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
    "sliding_window": "sliding_window_size",
    "sliding_window_pattern": "_sliding_window_pattern layer_switch",
    "layers_block_type": "layer_types",
}

#: Keys that may be null although they have a default: what null means is for the family to say.
_NULLABLE = frozenset({
    "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings", "sliding_window", "q_lora_rank",
    "n_shared_experts", "attention_chunk_size", "n_group", "topk_group", "final_logit_softcapping",
})  # fmt: skip

#: Keys of which 1 means that a pattern is absent: every layer is alike.
_STEPS = frozenset({"decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "n_group", "topk_group"})


@dataclass(frozen=True)
class Key:
    """A key of one family.

    Args:
        kind: what it may hold.
        default: where the configuration does not say; `REQUIRED` for none.
        spellings: names by which files write it, the usual one first.
        null: whether it may be null.
    """

    kind: Kind
    default: object
    spellings: tuple[str, ...]
    null: bool


@dataclass(frozen=True)
class Held:
    """A default that says what its key may hold, where the name does not, or that it may be null."""

    kind: Kind | None
    default: object = None
    null: bool = False


def only(*values: object, default: object = None) -> Held:
    """A key that may only hold one of `values`: what any other would change is not modelled."""
    return Held(Only(values), default)


def maybe(default: object) -> Held:
    """A key with a default that may be null all the same."""
    return Held(None, default, null=True)


OFF, ON = only(False), only(True)

#: Keys that a family understands, by its own names.
Schema = Mapping[str, Key]


def schema(base: Schema, defaults: Mapping[str, object], spelled: Mapping[str, str]) -> Schema:
    """The keys of a family.

    Args:
        base: those that it shares with another.
        defaults: key -> default; a `Held` where what it may hold does not follow from its name.
        spelled: key -> names by which this family's files write it, the usual one first.
    """
    made = dict(base)
    for name, given in defaults.items():
        held = given if isinstance(given, Held) else Held(None, given, name in _NULLABLE)
        default, null = held.default, held.null or held.default is None
        kind = held.kind or _KIND_OF.get(name) or _kind_of_default(default)
        made[name] = Key(kind, default, (name, *_ALSO.get(name, "").split()), null)
    for name, names in spelled.items():
        old = made[name]
        made[name] = Key(old.kind, old.default, tuple(dict.fromkeys((*names.split(), *old.spellings))), old.null)
    return made


def _kind_of_default(default: object) -> Kind:
    kinds: dict[type, Kind] = {bool: SWITCH, float: Number(), str: TEXT}
    return kinds.get(type(default), SIZE)


def _absent(key: str, value: object) -> bool:
    """Whether a default says only that a feature is not there; a number that is no count sizes nothing."""
    if value is None or value is False or isinstance(value, float) or key == "model_type":
        return True
    return value is not True and (value == 0 or (value == 1 and key in _STEPS))


def _said(key: Key, values: Mapping[str, Any]) -> str | None:
    """The spelling by which a key is said, or else is null."""
    found = [s for s in key.spellings if s in values]
    return next((s for s in found if values[s] is not None), found[0] if found else None)


class Keys:
    """The keys of an object, as attributes; it remembers which were read, so that a default that took part is told."""

    def __init__(self, keys: Schema, values: Mapping[str, Any], path: str = "") -> None:
        """Check every key.

        Raises:
            Fault: a value that its key may not hold.
            ConfigError: with all keys that are missing.
        """
        said = {name: _said(key, values) for name, key in keys.items()}
        missing = [
            repr(path + key.spellings[0]) for n, key in keys.items() if said[n] is None and key.default is REQUIRED
        ]
        if missing:
            words = f"key {missing[0]} is missing" if len(missing) == 1 else f"keys {', '.join(missing)} are missing"
            raise ConfigError(f"{words}; sizes are not guessed: is the file complete?")
        self._schema, self._values, self._path = keys, {}, path
        self._read: set[str] = set()
        self._said = {name for name, spelling in said.items() if spelling is not None}
        for name, key in keys.items():
            spelling = said[name]
            value = key.default if spelling is None else values[spelling]
            if isinstance(key.kind, Inside) and value is not None and spelling is None:
                value = key.kind.read({}, path + name)
            elif spelling is not None and not (value is None and key.null):
                value = key.kind.read(value, path + spelling)
            self._values[name] = value

    def __getattr__(self, name: str) -> Any:
        """The value of a key."""
        if name.startswith("_") or name not in self._values:
            raise AttributeError(name)
        self._read.add(name)
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        """Whether a key is understood."""
        return name in self._schema

    def spelling(self, name: str) -> str:
        """The key as published files write it."""
        return self._schema[name].spellings[0]

    def default(self, name: str) -> object:
        """What a key is where it is not said."""
        return self._schema[name].default

    def refuse_disagreement(self, values: Mapping[str, Any]) -> None:
        """Refuse two spellings of one key with two values."""
        for key in self._schema.values():
            said = {s: values[s] for s in key.spellings if values.get(s) is not None}
            if len({repr(v) for v in said.values()}) > 1:
                text = ", ".join(f"{k} = {v!r}" for k, v in said.items())
                raise ConfigError(f"keys that mean the same disagree: {text}; keep one")

    def defaulted(self) -> dict[str, Any]:
        """What was read so far, was not said, and is no absent feature, by the key's path."""
        found: dict[str, Any] = {}
        for name in [n for n in self._schema if n in self._read]:
            value = self._values[name]
            if isinstance(value, Keys):
                found |= value.defaulted()
            elif name not in self._said and not _absent(name, value):
                found[self._path + self.spelling(name)] = value
        return found

    def per_layer(self, name: str, listed: list[Any] | None = None) -> list[Any]:
        """A list with one entry a layer: the key's, unless given; layers of multi-token prediction may follow."""
        values: list[Any] = getattr(self, name) if listed is None else listed
        further = self._values.get("num_nextn_predict_layers") or 0
        if len(values) == self.num_hidden_layers + further:
            values = values[: self.num_hidden_layers]
        if len(values) != self.num_hidden_layers:
            raise ConfigError(
                f"key {self._path + name!r}: expected one entry a layer ({self.num_hidden_layers}), found {len(values)}"
            )
        return values


def known_keys(keys: Schema) -> frozenset[str]:
    """Keys that are used, by every spelling."""
    return frozenset(s for key in keys.values() for s in key.spellings)


def divide(total: int, parts: int, total_key: str, parts_key: str) -> int:
    """`total / parts`, which must be whole."""
    if total % parts:
        raise ConfigError(f"key {total_key!r}: expected a multiple of {parts_key} ({parts}), found {total}")
    return total // parts
