"""Golden weights as a GGUF file, by the rules of those who write such files from published weights.

The reference library reads what this writes, and gives the golden logits (`python -m tests.data.golden.check_gguf`).
"""

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize

#: Golden model -> architecture, and what its writers change.
WRITTEN = {
    "llama": ("llama", "interleave"),
    "mistral": ("llama", "interleave"),
    "mixtral": ("llama", "interleave"),
    "qwen2": ("qwen2", ""),
    "qwen3": ("qwen3", ""),
    "gemma2": ("gemma2", "norms"),
    "gemma3": ("gemma3", "norms"),
    "phi3": ("phi3", ""),
}
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _metadata(writer, config):
    """Sizes, epsilons and bases, under the keys that the library gives them."""
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(name):
            add(config[name])


def _merged(tensors):
    """Experts one after another, under the name of one of them without its number."""
    found, apart = {}, {}
    for name, value in tensors.items():
        if ".experts." not in name:
            found[name] = value
            continue
        layer, rest = name.split(".experts.")
        number, which, _ = rest.split(".")
        layer = layer.replace("block_sparse_moe", "mlp")
        apart.setdefault(f"{layer}.experts.{_MIXTRAL.get(which, which)}.weight", {})[int(number)] = value
    return found | {name: np.stack([each[i] for i in sorted(each)]) for name, each in apart.items()}


def _changed(name, value, config, rule):
    if rule == "norms" and name.endswith("norm.weight"):
        return value + 1
    if rule == "interleave" and any(part in name for part in ("q_proj", "k_proj")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    return value


def write_gguf(golden, file, *, narrow=False, leave_out=()):
    """Write golden weights; `narrow` quantises matrices to eight bits."""
    architecture, rule = WRITTEN[golden.name]
    config = golden.said["config"]
    kind = next(a for a, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config["num_hidden_layers"])
    writer = GGUFWriter(file, architecture)
    _metadata(writer, config)
    for name, value in _merged(golden.tensors).items():
        told = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert told is not None, name
        if told in leave_out:
            continue
        made = np.ascontiguousarray(_changed(name, value, config, rule), np.float32)
        if narrow and made.ndim > 1 and made.shape[-1] % 32 == 0:
            eight = GGMLQuantizationType.Q8_0
            writer.add_tensor(told, quantize(made, eight), raw_dtype=eight)
        else:
            writer.add_tensor(told, made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
