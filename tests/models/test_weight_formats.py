"""A quantized checkpoint changes the bytes of its weights, never their number."""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.models import load_model, read_config


def mixed(**formats: int) -> dict[str, Any]:
    """As many layers of each format as asked."""
    names = [f for f, number in formats.items() for _ in range(number)]
    layers = {f"model.layers.{i}.up_proj": {"quant_algo": name} for i, name in enumerate(names)}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def tensors(**weights: Any) -> dict[str, Any]:
    """One group of modules with these weights."""
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, "fp4"),
        ({"quant_method": "mxfp4"}, "fp4"),
        (
            mixed(NVFP4=3, MXFP8=2),
            "fp4",
        ),
        (
            mixed(NVFP4=2, MXFP8=3),
            "fp8",
        ),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        (tensors(num_bits=8, type="float"), "fp8"),
        (tensors(num_bits=4, type="int"), "int4"),
    ],
)
@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-vl-8b"])
def test_the_format_is_read_and_the_count_stays(name: str, quantization: dict[str, Any], dtype: str) -> None:
    plain = load_model(name)
    quantized = read_config({**plain.config, "quantization_config": quantization}, name="x")
    assert quantized.parameters == plain.parameters
    assert quantized.weight_dtype is not None
    assert quantized.weight_dtype.value == dtype


def test_a_format_that_only_the_text_part_says() -> None:
    dtype = load_model("kimi-k2.5").weight_dtype
    assert dtype is not None
    assert dtype.value == "int4"
