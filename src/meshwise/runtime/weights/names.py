"""Where published checkpoints hold each weight: the reference implementations' names by family, and GGUF's.

GGUF writers also interleave the halves of rotated heads (llama), add one to Gemma's norms, and stack experts. Not here:
reading (`files`), taking a weight out of a tensor (`stored`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwise.core.errors import ConfigError
from meshwise.models import Model
from meshwise.runtime.weights.files import GgufFile, Stored

#: Name of a weight, in whichever block it is -> where it lies.
Table = Mapping[str, Stored]

_LAYER = "model.layers.{layer}."


def _table(prefix: str, names: Mapping[str, str], *, transposed: bool = True) -> dict[str, Stored]:
    return {weight: Stored(prefix + name, transposed) for weight, name in names.items()}


def _projections(prefix: str, names: Mapping[str, str]) -> dict[str, Stored]:
    """Linear layers with and without biases: `w_q` and `b_q` of "q": "q_proj"."""
    found = {f"w_{own}": Stored(f"{prefix}{name}.weight") for own, name in names.items()}
    return found | {f"b_{own}": Stored(f"{prefix}{name}.bias") for own, name in names.items()}


def _fused(name: str, among: tuple[str, ...], **how: object) -> dict[str, Stored]:
    return {own: Stored(name, among=among, **how) for own in among}  # type: ignore[arg-type]


_ENDS = {
    "w_embed": Stored("model.embed_tokens.weight", transposed=False),
    "norm.final": Stored("model.norm.weight"),
    "w_head": Stored("lm_head.weight"),
}
_NORMS = {"norm.attn": "input_layernorm.weight", "norm.mlp": "post_attention_layernorm.weight"}
_NORMS_AFTER = {
    "norm.attn": "input_layernorm.weight",
    "norm.attn_out": "post_attention_layernorm.weight",
    "norm.mlp": "pre_feedforward_layernorm.weight",
    "norm.mlp_out": "post_feedforward_layernorm.weight",
}
_ATTENTION = {
    **_projections(_LAYER + "self_attn.", {a: f"{a}_proj" for a in "qkvo"}),
    **_table(_LAYER + "self_attn.", {"norm.q": "q_norm.weight", "norm.k": "k_norm.weight"}),
}
_MLP = _projections(_LAYER + "mlp.", {a: f"{a}_proj" for a in ("gate", "up", "down")})
_EXPERTS = _projections(_LAYER + "mlp.experts.{expert}.", {f"expert.{a}": f"{a}_proj" for a in ("gate", "up", "down")})
_LLAMA: Table = {**_ENDS, **_table(_LAYER, _NORMS), **_ATTENTION, **_MLP}
_SANDWICHED: Table = {**_LLAMA, **_table(_LAYER, _NORMS_AFTER)}
_QWEN_MOE: Table = {**_LLAMA, **_EXPERTS, "w_router": Stored(_LAYER + "mlp.gate.weight")}
_PHI3: Table = {
    **_LLAMA,
    **_fused(_LAYER + "self_attn.qkv_proj.weight", ("w_q", "w_k", "w_v")),
    **_fused(_LAYER + "mlp.gate_up_proj.weight", ("w_gate", "w_up")),
}
_MIXTRAL: Table = {
    **_LLAMA,
    **_table(
        _LAYER + "block_sparse_moe.",
        {
            "w_router": "gate.weight",
            "w_expert.gate": "experts.{expert}.w1.weight",
            "w_expert.up": "experts.{expert}.w3.weight",
            "w_expert.down": "experts.{expert}.w2.weight",
        },
    ),
}
_DEEPSEEK: Table = {
    **_QWEN_MOE,
    **_table(
        _LAYER + "self_attn.",
        {
            "w_q_a": "q_a_proj.weight",
            "b_q_a": "q_a_proj.bias",
            "norm.q_a": "q_a_layernorm.weight",
            "norm.kv_a": "kv_a_layernorm.weight",
        },
    ),
    **_fused(_LAYER + "self_attn.kv_a_proj_with_mqa.weight", ("w_kv_a", "w_k_rope")),
    **_fused(_LAYER + "self_attn.kv_a_proj_with_mqa.bias", ("b_kv_a", "b_k_rope")),
    **_fused(_LAYER + "self_attn.kv_b_proj.weight", ("w_k", "w_v"), fused="in_heads"),
    **_projections(_LAYER + "mlp.shared_experts.", {f"shared.{a}": f"{a}_proj" for a in ("gate", "up", "down")}),
    "b_router.correction": Stored(_LAYER + "mlp.gate.e_score_correction_bias"),
}
_GPT_OSS: Table = {
    **_LLAMA,
    **_projections(_LAYER + "mlp.", {"router": "router"}),
    **_fused(_LAYER + "mlp.experts.gate_up_proj", ("w_expert.gate", "w_expert.up"), fused="in_turns", transposed=False),
    **_fused(_LAYER + "mlp.experts.gate_up_proj_bias", ("b_expert.gate", "b_expert.up"), fused="in_turns"),
    "w_expert.down": Stored(_LAYER + "mlp.experts.down_proj", transposed=False),
    "b_expert.down": Stored(_LAYER + "mlp.experts.down_proj_bias"),
    "sinks": Stored(_LAYER + "self_attn.sinks"),
}
_H = "transformer.h.{layer}."
_GPT2: Table = {
    "w_embed": Stored("transformer.wte.weight", transposed=False),
    "w_positions": Stored("transformer.wpe.weight", transposed=False),
    "norm.final": Stored("transformer.ln_f.weight"),
    "norm.final.bias": Stored("transformer.ln_f.bias"),
    "w_head": Stored("lm_head.weight"),
    **_table(_H, {"norm.attn": "ln_1.weight", "norm.attn.bias": "ln_1.bias"}),
    **_table(_H, {"norm.mlp": "ln_2.weight", "norm.mlp.bias": "ln_2.bias"}),
    **_fused(_H + "attn.c_attn.weight", ("w_q", "w_k", "w_v"), transposed=False),
    **_fused(_H + "attn.c_attn.bias", ("b_q", "b_k", "b_v")),
    **_table(
        _H,
        {"w_o": "attn.c_proj.weight", "w_up": "mlp.c_fc.weight", "w_down": "mlp.c_proj.weight"},
        transposed=False,
    ),
    **_table(_H, {"b_o": "attn.c_proj.bias", "b_up": "mlp.c_fc.bias", "b_down": "mlp.c_proj.bias"}),
}

_TABLES: dict[str, Table] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "smollm3", "qwen2", "qwen3", "gemma"), _LLAMA),
    **dict.fromkeys(("olmo2", "gemma2", "gemma3_text"), _SANDWICHED),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _DEEPSEEK),
    "qwen3_moe": _QWEN_MOE,
    "phi3": _PHI3,
    "mixtral": _MIXTRAL,
    "gpt_oss": _GPT_OSS,
    "gpt2": _GPT2,
}


def hub_names(model: Model) -> Table:
    """Where published checkpoints of a model's family hold its weights.

    >>> from meshwise.models import load_model
    >>> hub_names(load_model("mixtral-8x7b"))["w_expert.up"].name
    'model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight'

    Raises:
        ConfigError: for a family whose names are not known here.
    """
    if model.family not in _TABLES:
        raise ConfigError(
            f"model {model.name}: it is not known how checkpoints of family {model.family!r} name their weights; "
            f"families that can be loaded: {', '.join(sorted(_TABLES))}"
        )
    table = _TABLES[model.family]
    weights = {t.name for block in model.train_program() for t in block.weights}
    if "w_q_a" in weights:
        table = {**table, "w_q": Stored(_LAYER + "self_attn.q_b_proj.weight")}  # from the latent
    return table


#: Family -> the architecture's name in GGUF.
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
_INTERLEAVED = ("llama",)
_NORMS_FROM_ZERO = ("gemma", "gemma2", "gemma3")
_GGUF_EXPERTS = "model.layers.{layer}.mlp.experts."


def gguf_names(model: Model, file: GgufFile) -> Mapping[str, Stored]:
    """Where a GGUF file holds the weights of a model.

    Raises:
        ConfigError: for a family that is not read from GGUF, or a file of another architecture.
    """
    if model.family not in _ARCHITECTURES:
        raise ConfigError(
            f"model {model.name}: family {model.family!r} is not read from GGUF; give safetensors, or one of "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    architecture = _ARCHITECTURES[model.family]
    if file.architecture != architecture:
        raise ConfigError(
            f"--weights {file.path}: model {model.name} is of architecture {architecture!r}, the file of "
            f"{file.architecture!r}; give the model's own weights"
        )
    named = ((own, _translated(own, stored, architecture)) for own, stored in hub_names(model).items())
    return {own: stored for own, stored in named if stored is not None}


def _translated(own: str, stored: Stored, architecture: str) -> Stored | None:
    """Where a GGUF file of this architecture holds a weight; None if it has no such tensor."""
    import gguf  # noqa: PLC0415 -- loaded when weights are read

    kind = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    published = f"{_GGUF_EXPERTS}{own.removeprefix('w_expert.')}_proj.weight" if stored.by_expert else stored.name
    found = gguf.get_tensor_name_map(kind, 1).get_name(published.format(layer=0), try_suffixes=(".weight", ".bias"))
    if found is None:
        return None
    name = found.replace("blk.0.", "blk.{layer}.")
    paired = architecture in _INTERLEAVED and own in ("w_q", "w_k", "b_q", "b_k")
    more = 1.0 if architecture in _NORMS_FROM_ZERO and own.startswith("norm.") else 0.0
    return replace(stored, name=name, paired=paired, more=more)
