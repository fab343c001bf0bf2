"""Kernels that mix positions compute what their papers say, on numbers small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwise.core.dtypes import DType
from meshwise.core.kernels import (
    CompressedAttention,
    IndexScores,
    Scan,
    SelectiveScan,
    ShortConvolution,
    SparseAttention,
)
from meshwise.core.tensors import Op
from meshwise.models import Model, load_model


def find(model: Model, kind: type[Op], name: str) -> tuple[Any, dict[str, Any]]:
    sizes = model.train_program().bind(batch=1, queries=2048)
    ops = {op.name: op for b in model.train_program() for op in b.ops if isinstance(op, kind)}
    return ops[name], sizes


def test_a_state_space_computes_in_chunks() -> None:
    op, sizes = find(load_model("mamba2-2.7b"), Scan, "ssm.scan")
    tokens, heads, width, state, chunk = 2048, 80, 64, 128, 256
    scores = 2 * tokens * chunk * state  # of the one group
    assert op.flops(sizes) == scores + heads * tokens * (2 * chunk * width + 4 * state * width)
    one = {**sizes, "T": 1}
    assert op.flops(one) == 2 * state + heads * (2 * width + 4 * state * width)


def test_the_delta_rule_computes_in_chunks() -> None:
    op, sizes = find(load_model("qwen3-next"), Scan, "delta.scan")
    tokens, heads, width, chunk = 2048, 32, 128, 64
    assert op.flops(sizes) == heads * tokens * (2 * chunk * 5 * width + 6 * width * width)
    # The reference implementation solves two triangular systems instead of multiplying by an inverse.
    assert op.full_flops(sizes) == heads * tokens * (2 * chunk * 3 * width + 6 * width * width)


def test_recurrences_take_arrays() -> None:
    op, sizes = find(load_model("nemotron-h-8b"), Scan, "ssm.scan")
    lengths = np.array([1.0, 100.0, 128.0, 4096.0])
    together = op.flops({**sizes, "T": lengths})
    assert together.tolist() == [op.flops({**sizes, "T": t}) for t in lengths]


def test_mamba_1_and_convolutions_run_on_the_vector_unit() -> None:
    model = load_model("jamba")
    scan, sizes = find(model, SelectiveScan, "ssm.scan")
    conv, _ = find(model, ShortConvolution, "ssm.conv")
    assert not scan.matmul
    assert not conv.matmul
    assert scan.flops(sizes) == 9 * 2048 * 8192 * 16
    assert conv.flops(sizes) == (2 * 4 + 5) * 2048 * 8192


@pytest.mark.parametrize(("name", "heads", "index_bytes"), [("deepseek-v3.2", 64, 15616), ("glm-5.1", 32, 19968)])
def test_an_indexer_scores_every_pair_and_keeps_its_keys(name: str, heads: int, index_bytes: int) -> None:
    model = load_model(name)
    op, sizes = find(model, IndexScores, "index.scores")
    assert op.flops(sizes) == 2 * heads * (128 + 1) * 2048 * 2049 / 2
    assert model.kv_cache.index_bytes_per_token(DType.BF16) == index_bytes


def test_sparse_attention_is_computed_the_cheaper_way() -> None:
    op, sizes = find(load_model("deepseek-v3.2"), SparseAttention, "attention")
    heads, dense, latent, chosen = 128, 192 + 128, 2 * 512 + 64, 2048
    for tokens in (1024, 2048, 4096, 8192):  # few positions: over all pairs
        here = {**sizes, "T": tokens, "S": tokens}
        assert op.flops(here) == pytest.approx(2 * heads * dense * tokens * (tokens + 1) / 2)
    for tokens in (32768, 131072):  # many: over the chosen ones, each wider
        here = {**sizes, "T": tokens, "S": tokens}
        pairs = chosen * (chosen + 1) / 2 + (tokens - chosen) * chosen
        assert op.flops(here) == pytest.approx(2 * heads * latent * pairs)
        assert op.full_flops(here) == pytest.approx(2 * heads * dense * tokens * tokens)


def brute_pairs(tokens: int, window: int, ratio: int, top_k: int | None) -> int:
    """What each query sees: its window, and the compressed keys that are complete, or the best of them."""
    complete = [min(p // ratio, top_k or p) if ratio else 0 for p in range(1, tokens + 1)]
    return sum(min(p, window) for p in range(1, tokens + 1)) + sum(complete)


@pytest.mark.parametrize(("ratio", "top_k"), [(0, None), (4, None), (4, 5), (4, 512), (128, None)])
def test_compressed_attention_counts_what_each_query_sees(ratio: int, top_k: int | None) -> None:
    op, sizes = find(load_model("deepseek-v4-flash"), CompressedAttention, "attention")
    op = replace(op, ratio=ratio, top_k=top_k)
    lengths = [1, 3, 4, 19, 20, 21, 100, 127, 128, 300, 513]
    for tokens in lengths:
        here = {**sizes, "T": tokens, "S": tokens}
        assert op.flops(here) == 4 * 64 * 512 * brute_pairs(tokens, 128, ratio, top_k)
        one_more = {**sizes, "T": 1, "S": tokens}
        added = brute_pairs(tokens, 128, ratio, top_k) - brute_pairs(tokens - 1, 128, ratio, top_k)
        assert op.pairs(one_more) == added
    together = op.flops({**sizes, "T": np.array(lengths, float), "S": np.array(lengths, float)})
    assert together.tolist() == [op.flops({**sizes, "T": t, "S": t}) for t in lengths]


def test_the_indexer_of_compressed_keys_scores_each_complete_one() -> None:
    model = load_model("deepseek-v4-flash")
    op, sizes = find(model, IndexScores, "index.scores")
    pairs = sum(p // 4 for p in range(1, 2049))
    assert op.flops(sizes) == 2 * 64 * (128 + 1) * pairs
    chosen = sum(min(p // 4, 512) for p in range(1, 4097))
    assert replace(op, gradient=True).flops({**sizes, "T": 4096, "S": 4096}) == 3 * 2 * 64 * (128 + 1) * chosen
    assert model.kv_cache.index_bytes_per_token(DType.BF16) == 21 * 128 / 4 * 2


def test_compressed_positions_are_cached_at_their_share() -> None:
    cache = load_model("deepseek-v4-flash").kv_cache
    assert cache.growing_bytes_per_token(DType.BF16) == (21 * 512 / 4 + 20 * 512 / 128) * 2
    assert cache.windowed_bytes_max(DType.BF16) == 43 * 512 * 128 * 2


def test_blocks_are_chosen_by_heads_that_score_every_position() -> None:
    model = load_model("minimax-m3")
    op, sizes = find(model, IndexScores, "index.scores")
    here = {**sizes, "T": 8192, "S": 8192}
    assert op.flops(here) == 2 * 4 * 128 * 8192 * 8193 / 2
    attention, _ = find(model, SparseAttention, "attention")
    chosen = 16 * 128
    pairs = chosen * (chosen + 1) / 2 + (8192 - chosen) * chosen
    assert attention.flops(here) == pytest.approx(2 * 64 * (128 + 128) * pairs)
