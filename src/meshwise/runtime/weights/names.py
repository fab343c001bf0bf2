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


def _layers(prefix: str, names: Mapping[str, str], *, transposed: bool = True) -> dict[str, Stored]:
    """Linear layers and norms with their biases: `w_q` and `b_q` of "q", `norm.q` and `norm.q.bias` of "norm.q"."""
    found = {}
    for own, name in names.items():
        weight, bias = (own, f"{own}.bias") if own.startswith("norm.") else (f"w_{own}", f"b_{own}")
        found[weight] = Stored(f"{prefix}{name}.weight", transposed)
        found[bias] = Stored(f"{prefix}{name}.bias")
    return found


def _fused(name: str, among: tuple[str, ...], **how: object) -> dict[str, Stored]:
    return {own: Stored(name, among=among, **how) for own in among}  # type: ignore[arg-type]


_MATRICES = ("gate", "up", "down")
_LLAMA: Table = {
    "w_embed": Stored("model.embed_tokens.weight", transposed=False),
    "w_head": Stored("lm_head.weight"),
    **_layers("model.", {"norm.final": "norm"}),
    **_layers(_LAYER, {"norm.attn": "input_layernorm", "norm.mlp": "post_attention_layernorm"}),
    **_layers(_LAYER + "self_attn.", {a: f"{a}_proj" for a in "qkvo"} | {"norm.q": "q_norm", "norm.k": "k_norm"}),
    **_layers(_LAYER + "mlp.", {a: f"{a}_proj" for a in _MATRICES}),
}
_SANDWICHED: Table = {
    **_LLAMA,
    **_layers(_LAYER, {"norm.attn_out": "post_attention_layernorm"}),
    **_layers(_LAYER, {"norm.mlp": "pre_feedforward_layernorm", "norm.mlp_out": "post_feedforward_layernorm"}),
}
_QWEN_MOE: Table = {
    **_LLAMA,
    **_layers(_LAYER + "mlp.experts.{expert}.", {f"expert.{a}": f"{a}_proj" for a in _MATRICES}),
    "w_router": Stored(_LAYER + "mlp.gate.weight"),
}
_PHI3: Table = {
    **_LLAMA,
    **_fused(_LAYER + "self_attn.qkv_proj.weight", ("w_q", "w_k", "w_v")),
    **_fused(_LAYER + "mlp.gate_up_proj.weight", ("w_gate", "w_up")),
}
_MIXTRAL: Table = {
    **_LLAMA,
    "w_router": Stored(_LAYER + "block_sparse_moe.gate.weight"),
    **_layers(
        _LAYER + "block_sparse_moe.experts.{expert}.", {"expert.gate": "w1", "expert.up": "w3", "expert.down": "w2"}
    ),
}
_DEEPSEEK: Table = {
    **_QWEN_MOE,
    **_layers(_LAYER + "self_attn.", {"q_a": "q_a_proj", "norm.q_a": "q_a_layernorm", "norm.kv_a": "kv_a_layernorm"}),
    **_fused(_LAYER + "self_attn.kv_a_proj_with_mqa.weight", ("w_kv_a", "w_k_rope")),
    **_fused(_LAYER + "self_attn.kv_a_proj_with_mqa.bias", ("b_kv_a", "b_k_rope")),
    **_fused(_LAYER + "self_attn.kv_b_proj.weight", ("w_k", "w_v"), fused="in_heads"),
    **_layers(_LAYER + "mlp.shared_experts.", {f"shared.{a}": f"{a}_proj" for a in _MATRICES}),
    "b_router.correction": Stored(_LAYER + "mlp.gate.e_score_correction_bias"),
}
_GPT_OSS: Table = {
    **_LLAMA,
    **_layers(_LAYER + "mlp.", {"router": "router"}),
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
    "w_head": Stored("lm_head.weight"),
    **_layers("transformer.", {"norm.final": "ln_f"}),
    **_layers(_H, {"norm.attn": "ln_1", "norm.mlp": "ln_2"}),
    **_fused(_H + "attn.c_attn.weight", ("w_q", "w_k", "w_v"), transposed=False),
    **_fused(_H + "attn.c_attn.bias", ("b_q", "b_k", "b_v")),
    **_layers(_H, {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}, transposed=False),
}

#: Family -> where published checkpoints hold each weight, and the architecture's name in GGUF, "" if not read from it.
_FAMILIES: dict[str, tuple[Table, str]] = {
    "deepseek_v3": (_DEEPSEEK, ""),
    "gemma": (_LLAMA, "gemma"),
    "gemma2": (_SANDWICHED, "gemma2"),
    "gemma3_text": (_SANDWICHED, "gemma3"),
    "gpt2": (_GPT2, ""),
    "gpt_oss": (_GPT_OSS, ""),
    "kimi_k2": (_DEEPSEEK, ""),
    "llama": (_LLAMA, "llama"),
    "ministral": (_LLAMA, ""),
    "mistral": (_LLAMA, "llama"),
    "mixtral": (_MIXTRAL, "llama"),
    "olmo2": (_SANDWICHED, ""),
    "phi3": (_PHI3, "phi3"),
    "qwen2": (_LLAMA, "qwen2"),
    "qwen3": (_LLAMA, "qwen3"),
    "qwen3_moe": (_QWEN_MOE, "qwen3moe"),
    "smollm3": (_LLAMA, ""),
}


def hub_names(model: Model) -> Table:
    """Where published checkpoints of a model's family hold its weights.

    >>> from meshwise.models import load_model
    >>> hub_names(load_model("mixtral-8x7b"))["w_expert.up"].name
    'model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight'

    Raises:
        ConfigError: for a family whose names are not known here.
    """
    if model.family not in _FAMILIES:
        raise ConfigError(
            f"model {model.name}: it is not known how checkpoints of family {model.family!r} name their weights; "
            f"families that can be loaded: {', '.join(_FAMILIES)}"
        )
    table = _FAMILIES[model.family][0]
    weights = {t.name for block in model.train_program() for t in block.weights}
    if "w_q_a" in weights:
        table = {**table, "w_q": Stored(_LAYER + "self_attn.q_b_proj.weight")}  # from the latent
    return table


_INTERLEAVED = ("llama",)
_NORMS_FROM_ZERO = ("gemma", "gemma2", "gemma3")
_GGUF_EXPERTS = "model.layers.{layer}.mlp.experts."


def gguf_names(model: Model, file: GgufFile) -> Mapping[str, Stored]:
    """Where a GGUF file holds the weights of a model.

    Raises:
        ConfigError: for a family that is not read from GGUF, or a file of another architecture.
    """
    architecture = _FAMILIES[model.family][1] if model.family in _FAMILIES else ""
    if not architecture:
        raise ConfigError(
            f"model {model.name}: family {model.family!r} is not read from GGUF; give safetensors, or one of "
            f"{', '.join(family for family, (_, name) in _FAMILIES.items() if name)}"
        )
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
