"""Write what this folder holds, with the reference library: NAME.json (configuration, tensors, tokens) and NAME.npy.

`pip install torch transformers` and `python -m tests.data.golden.make`; the tests need neither. Logits are those of
weights that `regenerate.draw` draws, in fp32, on a CPU.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.data.golden.regenerate import draw

HERE = Path(__file__).parent
SEQUENCES, LENGTH, VOCABULARY = 2, 20, 96

COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "hidden_act": "silu",
}  # fmt: skip
GEMMA = {"head_dim": 32, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
CAPPED = {**GEMMA, "sliding_window": 6, "query_pre_attn_scalar": 24}
MODELS = {
    "llama": {**COMMON, "model_type": "llama", "hidden_act": "silu", "rope_scaling": LLAMA3},
    "mistral": {**COMMON, "model_type": "mistral", "sliding_window": 6, "head_dim": 24, "hidden_act": "silu"},
    "qwen2": {**COMMON, "model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {**COMMON, "model_type": "qwen3", "head_dim": 32, "hidden_act": "silu", "tie_word_embeddings": True},
    "smollm3": {
        **COMMON, "model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "hidden_act": "silu",
        "tie_word_embeddings": True, "use_sliding_window": False, "pad_token_id": None,
    },
    "olmo2": {**COMMON, "model_type": "olmo2", "hidden_act": "silu"},
    "phi3": {**COMMON, "model_type": "phi3", "hidden_act": "silu", "sliding_window": None, "pad_token_id": None},
    "gemma": {**COMMON, **GEMMA, "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        **COMMON, **CAPPED, "model_type": "gemma2", "num_hidden_layers": 4, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        **COMMON, **CAPPED, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window_pattern": 6,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 32, "vocab_size": VOCABULARY,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    },
    "mixtral": {
        **COMMON, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "hidden_act": "silu",
    },
    "qwen3_moe": {
        **COMMON, "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1],
        "hidden_act": "silu",
    },
    "deepseek_v3": {**COMMON, **LATENT, "model_type": "deepseek_v3"},
    "gpt_oss": {
        **COMMON, "model_type": "gpt_oss", "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 6,
        "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.5, "hidden_act": "silu",
        "rope_scaling": {**YARN, "truncate": False}, "attention_bias": True,
    },
}  # fmt: skip


def golden(name, config, folder):
    """Write one model's files."""
    parsed = transformers.AutoConfig.for_model(**config)
    parsed._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=torch.float32)
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        tensors = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    save_file({key: draw(key, shape) for key, shape in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = np.random.RandomState(0).randint(0, VOCABULARY, (SEQUENCES, LENGTH))
    with torch.no_grad():
        logits = model.eval()(torch.tensor(tokens)).logits.numpy()
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}"
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    said = {"made_by": made_by, "config": config, "written": written, "tokens": tokens.tolist(), "tensors": tensors}
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in said.items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (HERE / f"{name}.json").write_text(text, encoding="utf-8")
    np.save(HERE / f"{name}.npy", logits.astype(np.float32))


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            golden(name, MODELS[name], Path(folder))
