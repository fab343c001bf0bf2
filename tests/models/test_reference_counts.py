"""Small random configurations of every family count as the reference implementation counts and runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise.core.backward import backward
from meshwise.core.tensors import Einsum
from meshwise.models import read_config
from meshwise.models.families import FAMILIES
from tests.each import each

FILE = Path(__file__).parents[1] / "data" / "models" / "reference_counts.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]

#: Families without a class in the reference: PaLM has our own keys, some are published with their code, others are
#: parts of families with towers or another name of a family. Those with towers have rows of their own.
UNCOVERED = {"palm", "internlm2", "deepseek", "phi-msft", "minimax_m3_vl_text", "step3p5", "dimensions"} | {
    "mamba_ssm", "qwen3_5", "qwen3_5_moe", "minimax_text_01", "minimax_m1", "baichuan", "minicpm", "bailing_moe",
    "bailing_moe_v2", "mimo", "apertus",
}  # fmt: skip
TOWERED = FILE.with_name("reference_towers.jsonl")


def flops_of(case: dict[str, Any]) -> tuple[int, int | None]:
    """Tokens of the sequence, and what the counter saw."""
    seq = 64 if "flops_64" in case else 32
    return seq, case[f"flops_{seq}"]


def test_every_family_is_covered() -> None:
    assert sum(flops_of(c)[1] is not None for c in CASES) > 200
    towered = {json.loads(line)["config"]["model_type"] for line in TOWERED.read_text(encoding="utf-8").splitlines()}
    assert {c["config"]["model_type"] for c in CASES} | towered == set(FAMILIES) - UNCOVERED


@each("case", CASES)
def test_parameters_flops_and_backward(case: dict[str, Any]) -> None:
    model = read_config(case["config"], name="x")
    assert model.parameters.total == case["total"]
    seq, flops = flops_of(case)
    if flops is not None:
        assert model.forward_flops_per_token(seq, attention="full") * seq == pytest.approx(flops, rel=1e-12)
    program = model.train_program()
    sizes = program.bind(batch=2, queries=8)
    for block in program:
        forward = sum(op.flops(sizes) for op in block.ops if isinstance(op, Einsum))
        assert sum(op.flops(sizes) for op in backward(block) if isinstance(op, Einsum)) == pytest.approx(2 * forward)


PUBLISHED = [
    (
        7737708544,
        {
            "model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": False, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 92544, "tie_word_embeddings": False,
        },
    ),
    (
        16375728128,
        {
            "model_type": "deepseek", "architectures": ["DeepseekForCausalLM"], "hidden_size": 2048,
            "vocab_size": 102400, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "n_routed_experts": 64, "n_shared_experts": 2,
            "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28, "first_k_dense_replace": 1,
        },
    ),
    (
        2779683840,
        {
            "model_type": "phi-msft", "n_embd": 2560, "n_head": 32, "n_head_kv": None, "n_inner": None, "n_layer": 32,
            "n_positions": 2048, "vocab_size": 51200, "rotary_dim": 32,
        },
    ),
    (  # Baichuan2-7B
        7505973248,
        {
            "model_type": "baichuan", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 125696, "max_position_embeddings": 4096, "z_loss_weight": 0,
        },
    ),
    (  # MiniCPM-2B
        2724880896,
        {
            "model_type": "minicpm", "hidden_size": 2304, "intermediate_size": 5760, "num_hidden_layers": 40,
            "num_attention_heads": 36, "num_key_value_heads": 36, "vocab_size": 122753, "scale_emb": 12,
            "dim_model_base": 256, "scale_depth": 1.4,
        },
    ),
    (  # Ling-lite-1.5
        16801974272,
        {
            "model_type": "bailing_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "vocab_size": 126464,
        },
    ),
    (  # Ling-mini-2.0
        16255643392,
        {
            "model_type": "bailing_moe_v2", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
            "moe_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
            "vocab_size": 157184, "use_qk_norm": True, "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True, "n_group": 8, "topk_group": 4,
        },
    ),
    (  # Apertus-8B, less two numbers a layer
        8053338176 - 64,
        {
            "model_type": "apertus", "hidden_act": "xielu", "hidden_size": 4096, "intermediate_size": 21504,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072,
        },
    ),
    (  # MiMo-7B, less its module of multi-token prediction
        7833409536 - 210790400,
        {
            "model_type": "mimo", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151680,
            "num_nextn_predict_layers": 1,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("total", "config"), PUBLISHED, ids=[c["model_type"] for _, c in PUBLISHED])
def test_families_published_with_their_code(total: int, config: dict[str, Any]) -> None:
    assert read_config(config, name="x").parameters.total == total
