"""Models given by their dimensions count as the papers' do, and what is wrong with a text is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError, UnknownNameError
from meshwise.models import load_model, read_dimensions, read_model_json

LLAMA = "D=8192 F=28672 L=80 N=64 K=8 H=128 V=128256"

SIZES = {key: int(value) for key, value in (item.split("=") for item in LLAMA.split())}
GPT = "gated=no bias=yes tied=yes norm=layer"

#: Dimensions of models that are published without a configuration -> parameters by the formula of their paper.
PAPERS = {
    # Brown et al. 2020; Smith et al. 2022 with a vocabulary padded to 51,200; Mistral Large 2.
    f"D=12288 F=49152 L=96 N=96 V=50257 positions=2048 {GPT}": 174_604_259_328,
    f"D=20480 F=81920 L=105 N=128 H=160 V=51200 positions=2048 {GPT}": 529_600_819_200,
    "D=12288, F=28672, L=88, N=96, K=8, H=128, V=32768": 122_610_069_504,
    LLAMA: 70_553_706_496,
}


@pytest.mark.parametrize(("text", "parameters"), PAPERS.items())
def test_parameters_of_papers(text: str, parameters: int) -> None:
    assert load_model(text).parameters.total == parameters


@pytest.mark.parametrize(
    ("width", "layers", "heads", "billions"),
    # Narayanan et al. 2021, table 1: GPT models, V = 51,200, 2,048 positions.
    [
        (2304, 24, 24, 1.7), (3072, 30, 32, 3.6), (4096, 36, 32, 7.5), (6144, 40, 48, 18.4), (8192, 48, 64, 39.1),
        (10240, 60, 80, 76.1), (12288, 80, 96, 145.6), (16384, 96, 128, 310.1), (20480, 105, 128, 529.6),
        (25600, 128, 160, 1008.0),
    ],
)  # fmt: skip
def test_the_models_of_megatron(width: int, layers: int, heads: int, billions: float) -> None:
    model = load_model(f"D={width} F={4 * width} L={layers} N={heads} V=51200 positions=2048 {GPT}")
    assert model.parameters.total / 1e9 == pytest.approx(billions, abs=0.05)


def test_the_same_model_as_by_its_configuration() -> None:
    mine, theirs = load_model(LLAMA), load_model("llama-3-70b")
    assert mine.sizes == theirs.sizes
    assert mine.train_program() == theirs.train_program()
    assert mine.kv_cache == theirs.kv_cache
    mixture = load_model("D=4096 L=32 N=32 K=8 V=32000 E=8 top_k=2 Fe=14336")
    assert mixture.train_program() == load_model("mixtral-8x7b").train_program()
    assert mixture.parameters.active == 12_879_925_248


def test_switches() -> None:
    d, f, n, v, layers = 64, 256, 4, 100, 3
    text = f"D={d} F={f} L={layers} N={n} V={v}"
    base = 2 * v * d + layers * (4 * d * d + 3 * d * f + 2 * d) + d
    assert load_model(text).parameters.total == base
    assert load_model(f"{text} tied=yes").parameters.total == base - v * d
    assert load_model(f"{text} gated=no").parameters.total == base - layers * d * f
    assert load_model(f"{text} parallel=yes").parameters.total == base - layers * d
    assert load_model(f"{text} norm=layer").parameters.total == base + (2 * layers + 1) * d
    assert load_model(f"{text} positions=32").parameters.total == base + 32 * d
    assert load_model(f"{text} bias=yes").parameters.total == base + layers * (5 * d + 2 * f)
    assert load_model(f"{text} window=16").kv_cache.windowed_bytes_max(DType.BF16) == 2 * 2 * layers * d * 16
    experts = load_model(f"{text} E=4 top_k=1 Fe=32 Fs=48 dense=1")
    dense, moe = 3 * d * f, 4 * 3 * d * 32 + 3 * d * 48 + 4 * d
    assert experts.parameters.total == base - layers * dense + dense + (layers - 1) * moe


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.dims", "# a model\nD = 8192  F = 28672\nL=80, N=64 K=8\nH=128 # wide\nV=128_256\n"),
        ("mine.txt", LLAMA),
        ("mine.toml", "\n".join(item.replace("=", " = ") for item in LLAMA.split())),
        (
            "mine.json",
            json.dumps({"model_type": "dimensions", **SIZES}),
        ),
    ],
)
def test_files(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    model = load_model(str(tmp_path / name))
    assert model.name == "mine"
    assert model.parameters.total == 70_553_706_496
    assert read_model_json(model.to_json()) == model


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("D=8192", ["'L', 'N', 'V' are missing"]),
        ("D=8192 L=80 N=64 V=9", ["F is missing"]),
        (f"{LLAMA} E=8", ["top_k, Fe missing", "a mixture has E, top_k and Fe"]),
        (f"{LLAMA} E=8 top_k=9 Fe=4", ["'top_k'", "at most 8", "found 9"]),
        (f"{LLAMA} Fs=8", ["Fs and dense are of mixtures"]),
        (f"{LLAMA} X=8", ["'X' is no dimension", "there are: D, F, L"]),
        (f"{LLAMA} topk=8", ["'topk' is no dimension", "did you mean top_k"]),
        ("d=8192", ["'d' is no dimension", "did you mean D (residual width)"]),
        (f"{LLAMA} D=4", ["'D' appears twice"]),
        (f"{LLAMA} window", ["expected key=value, found 'window'", "for example: D=8192"]),
        (f"{LLAMA} window=", ["expected key=value"]),
        (f"{LLAMA} window=big", ["window: expected a whole number", "'big'"]),
        (f"{LLAMA} window=-4", ["window: expected a whole number", "'-4'"]),
        (f"{LLAMA} window=0", ["'window': expected more than 0"]),
        (f"{LLAMA} gated=maybe", ["gated: expected yes or no, found 'maybe'"]),
        (f"{LLAMA} norm=batch", ["'norm': expected", "'rms'", "batch"]),
        ("D=100 F=3 L=1 N=3 V=4", ["'D': expected a multiple of N (3), found 100"]),
        ("D=100 F=3 L=1 N=4 K=3 V=4", ["'N': expected a multiple of K (3), found 4"]),
        (f"D={'9' * 5000} L=1 N=1 V=1 F=1", ["'D': expected at most 10,000,000"]),
    ],
)
def test_what_is_wrong_is_said(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        load_model(text)
    for word in words:
        assert word in str(e.value)


def test_torn_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file.*dimensions"):
        load_model(str(tmp_path / "missing.dims"))
    file = tmp_path / "torn.toml"
    file.write_text("D = \n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"torn\.toml is not TOML: Invalid value"):
        load_model(str(file))
    with pytest.raises(UnknownNameError, match="dimensions"):
        load_model("my-model")
    with pytest.raises(ConfigError, match="mine: 'Q' is no dimension"):
        read_dimensions("Q=4", name="x", where="mine")
