"""Every published count of a supported model is met exactly: parameters, active ones, cache bytes, FLOPs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwise.core.dtypes import DType
from meshwise.models import Model, load_model, read_config
from tests.each import each

DATA = Path(__file__).parents[1] / "data" / "models"


def rows(file: str) -> list[dict[str, str]]:
    with (DATA / file).open(encoding="utf-8") as f:
        return list(csv.DictReader(f))


ALL = rows("param_counts.csv")
NAMES = {r["name"] for r in ALL}


def model(row_name: str) -> Model:
    return load_model(row_name.replace("--", "/"))


def by_name(table: list[dict[str, str]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return each("row", table)


def test_the_tables_are_there() -> None:
    assert len(ALL) == 58


@by_name(ALL)
def test_parameters(row: dict[str, str]) -> None:
    count = model(row["name"]).parameters
    with_towers = "ForConditionalGeneration" in row["reference_class"]
    assert (count.total if with_towers else count.language) == int(row["total"])
    towers = sum(n for part, n in count.by_part.items() if part.endswith(" tower"))
    assert count.total - count.language == towers
    assert towers == sum(t.parameters for t in model(row["name"]).spec.towers)
    assert sum(count.by_part.values()) == count.total
    assert count.total == model(row["name"]).train_program().parameters()
    if row["active"]:
        assert count.active == int(row["active"])


CONFIGS = [json.loads(line) for line in (DATA / "published_configs.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", CONFIGS, ids=[r["name"] for r in CONFIGS])
def test_files_with_keys_of_their_own_are_read(row: dict[str, Any]) -> None:
    assert read_config(row["config"], name=row["name"]).parameters.total == row["total"]


KV = [r for r in rows("kv_cache.csv") if r["name"] in NAMES]


@by_name(KV)
def test_cache_bytes(row: dict[str, str]) -> None:
    cache = model(row["name"]).kv_cache
    assert cache.growing_bytes_per_token(DType.BF16) == int(row["bytes_per_token_full_layers_bf16"])
    assert cache.windowed_bytes_per_token(DType.BF16) == int(row["bytes_per_token_windowed_layers_bf16"])
    assert cache.bytes_per_token(DType.BF16) == int(row["bytes_per_token_all_if_no_window_bf16"])
    assert cache.windowed_bytes_max(DType.BF16) == int(row["max_bytes_windowed_per_seq_bf16"] or 0)
    assert cache.bytes_per_token(DType.INT8) == int(row["bytes_per_token_all_if_no_window_bf16"]) / 2
    assert sum(k.layers for k in cache.kinds if k.window) == int(row["layers_windowed"])
    assert sum(k.layers for k in cache.kinds if k.state) == int(row["layers_recurrent"])
    assert cache.state_bytes(DType.BF16) == int(row["state_bytes_bf16_per_seq"])
    assert cache.state_bytes(DType.FP32, DType.BF16) == int(row["state_bytes_fp32ssm_bf16conv_per_seq"])
    assert cache.bytes_per_sequence(0, DType.BF16) == int(row["state_bytes_bf16_per_seq"])


FLOPS = [r for r in rows("flops.csv") if r["name"] in NAMES]


#: Rows of models with recurrences: their chunked products are in the total, and in no closed form.
RECURRENT = {r["name"] for r in KV if int(r["layers_recurrent"])}


@by_name(FLOPS)
def test_forward_flops(row: dict[str, str]) -> None:
    seq = int(row["seq"])
    full = model(row["name"]).forward_flops_per_token(seq, attention="full") * seq
    if row["name"] not in RECURRENT:
        assert full == int(row["closed_form_total"])
        return
    # Convolutions, and the read-out of Mamba-1, are no matrix work in any kernel.
    measured = int(row["total_flops"]) - int(row["convolution_flops"])
    read_out = 2 * 28 * 8192 * 16 * seq if row["name"] == "jamba-v0.1" else 0
    assert full == measured - read_out


#: The longest window of these is under 2,048 positions, so that causal attention computes less than the plain half.
SHORT_WINDOWS = {"gemma-3-27b-it", "gemma-4-26b-a4b", "phi-3-mini-4k", "gpt-oss-120b"}


@by_name([r for r in FLOPS if r["name"] not in SHORT_WINDOWS | RECURRENT])
def test_causal_attention_counts_what_is_computed(row: dict[str, str]) -> None:
    seq = int(row["seq"])
    linear = int(row["closed_form_linear"]) + int(row["closed_form_experts"])
    computed = model(row["name"]).forward_flops_per_token(seq) * seq
    assert computed == linear + int(row["attention_core_if_causal_exact"])


def test_a_window_computes_less_than_causal_attention() -> None:
    row = next(r for r in FLOPS if r["name"] == "gemma-3-27b-it")
    seq, window = 2048, 1024
    linear = int(row["closed_form_linear"])
    pairs_full, pairs_local = seq * (seq + 1) // 2, window * (window + 1) // 2 + (seq - window) * window
    attention = 4 * 128 * 32 * (10 * pairs_full + 52 * pairs_local)
    assert model("gemma-3-27b-it").forward_flops_per_token(seq) * seq == linear + attention


def test_cache_of_a_sequence_stops_growing_in_windows() -> None:
    cache = load_model("gemma-3-27b").kv_cache
    at = [cache.bytes_per_sequence(n, DType.BF16) for n in (1024, 1025, 2024)]
    assert at[0] == 1024 * 507904
    assert at[1] - at[0] == 81920
    assert at[2] - at[0] == 1000 * 81920
