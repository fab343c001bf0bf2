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

FILE = Path(__file__).parents[1] / "data" / "models" / "reference_counts.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]

#: Families without a class in the reference: PaLM has our own keys, some are published with their code, others are
#: parts of families with towers or another name of a family. Those with towers have rows of their own.
UNCOVERED = {"palm", "internlm2", "deepseek", "phi-msft", "minimax_m3_vl_text", "step3p5", "dimensions"} | {
    "mamba_ssm", "qwen3_5", "qwen3_5_moe", "minimax_text_01", "minimax_m1",
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


@pytest.mark.parametrize("case", CASES, ids=[f"{c['config']['model_type']}-{i}" for i, c in enumerate(CASES)])
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
]  # fmt: skip


@pytest.mark.parametrize(("total", "config"), PUBLISHED, ids=[c["model_type"] for _, c in PUBLISHED])
def test_families_published_with_their_code(total: int, config: dict[str, Any]) -> None:
    assert read_config(config, name="x").parameters.total == total
