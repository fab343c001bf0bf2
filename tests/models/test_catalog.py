"""Built-in models: every name finds its model, every row has a source, published sizes are met."""

from __future__ import annotations

import csv
import functools
import json
import operator
from pathlib import Path

import pytest

from meshwise.core.dtypes import DType
from meshwise.models import catalog, load_model, model_names, read_config
from tests.each import each


@each("entry", catalog())
def test_every_name_of_a_model_finds_it_and_its_source_is_given(entry) -> None:  # type: ignore[no-untyped-def]
    model = load_model(entry.name)
    for other in (*entry.hub_names, *entry.aliases, entry.name.upper()):
        assert load_model(other) is model
    assert model.name == entry.name
    assert len(entry.source.text) > 10
    assert len(entry.source.date) == 10
    assert model.source == entry.source


def test_names_are_said_once() -> None:
    names = [n.lower() for e in catalog() for n in {e.name, *e.aliases}]
    assert len(names) == len(set(names))
    assert model_names() == sorted(model_names())


with (Path(__file__).parents[1] / "data" / "models" / "catalog.csv").open(encoding="utf-8") as file:
    PUBLISHED = {row["name"]: row for row in csv.DictReader(file)}


@each("entry", catalog())
def test_counts_and_context_are_the_published_ones(entry) -> None:  # type: ignore[no-untyped-def]
    """The table holds the counts, the context, and the key of the published configuration that says the context."""
    row, model = PUBLISHED[entry.name], load_model(entry.name)
    assert row["source"] == entry.source.text
    assert (model.parameters.total, model.parameters.active) == (int(row["total"]), int(row["active"]))
    assert model.max_seq_len == (int(row["context"]) if row["context"] else None)
    key = row["context_key"]
    if not key.startswith(("none: ", "default of ")):
        assert functools.reduce(operator.getitem, key.split("."), dict(model.config)) == model.max_seq_len


def test_the_table_of_the_published_holds_the_catalog_and_no_more() -> None:
    assert list(PUBLISHED) == model_names()


def test_folders_and_files_are_read(tmp_path: Path) -> None:
    config = {**load_model("qwen3-8b").config, "num_hidden_layers": 2, "torch_dtype": "bfloat16"}
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = load_model(str(folder))
    assert model.name == "my-model"
    assert model.family == "qwen3"
    assert load_model(str(folder / "config.json")).name == "my-model"
    assert load_model(str(folder)).spec == load_model(str(folder / "config.json")).spec


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-3-70b", DType.BF16),
        ("deepseek-v3", DType.FP8),
        ("deepseek-v4-flash", DType.MXFP4),
        ("gpt-oss-120b", DType.MXFP4),
        ("gpt-neox-20b", DType.FP16),
        ("gpt2", None),
    ],
)
def test_the_format_of_published_weights(name: str, dtype: DType | None) -> None:
    assert load_model(name).weight_dtype is dtype


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8"}, DType.FP8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, DType.FP4),
        ({"quant_method": "awq", "bits": 4}, DType.INT4),
        ({"quant_method": "gptq", "bits": 8}, DType.INT8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, DType.INT4),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            DType.INT4,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            DType.FP8,
        ),
        ({"quant_method": "something_else"}, None),
    ],
    ids=str,
)
def test_quantization_changes_the_format_and_no_count(quantization: dict[str, object], dtype: DType | None) -> None:
    plain = load_model("llama-3-8b")
    model = read_config({**plain.config, "quantization_config": quantization}, name="x")
    assert model.weight_dtype is dtype
    assert model.parameters == plain.parameters
