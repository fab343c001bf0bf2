"""The verb `rule`: letters from the reader, the cluster and the model; solving; words for what goes wrong."""

import json
import re

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.costs.rules import RULES
from meshwise.hardware import load_chip


def asked(capsys, *words):
    assert main(["rule", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_are_listed_and_each_is_described(capsys):
    assert [r["name"] for r in asked(capsys)["rules"]] == list(RULES)
    for name in RULES:
        found = asked(capsys, name)
        assert found["formula"].split(" = ")[0] in found["letters"]


def test_a_chip_gives_its_letters_and_the_reader_goes_before_it(capsys):
    chip = load_chip("v5e")
    found = asked(capsys, "critical-batch", "--on", "v5e", "--set", "w=1")
    assert found["value"] == pytest.approx(chip.flops_per_s["bf16"] / chip.hbm_bandwidth / 2)
    assert "Google Cloud" in found["letters"]["W_hbm"]["source"]
    found = asked(capsys, "critical-batch", "--on", "v5e", "--set", "w=1,W_hbm=1.64TB/s", "--dtype", "int8")
    assert found["value"] == pytest.approx(chip.flops_per_s["int8"] / 1.64e12 / 2)
    assert found["letters"]["W_hbm"]["source"] == "given"


@pytest.mark.parametrize(
    ("words", "unknown", "value"),
    [
        (["fsdp", "--on", "v5p:16x20x28", "--set", "axes=3"], "tokens", 8960 * 850),
        (["fsdp", "--on", "v5p", "--set", "axes=3,tokens=4Mi", "--solve", "chips"], "chips", 4934.5),
        (["fsdp-node", "--on", "h100:64", "--set", "X=2,C=9.9e14"], "tokens", 64 * 1237.5),
        (["tensor", "--on", "h100", "--model", "llama-3-70b"], "Y", 28672 * 4.5e11 / 9.894e14),
        (["dcn", "--on", "v5p:8x8x8*2"], "tokens", 2 * 73440),
        (["send", "--on", "v5e:4x4", "--set", "bytes=16MiB"], "t", 6e-6 + 2**24 / 9e10),
        (["send", "--on", "v5e:16x16", "--set", "bytes=16MiB"], "t", 16e-6 + 2**24 / 9e10),
        (["all-to-all", "--on", "v5e:4x8", "--set", "bytes=1GB"], "t", 1e9 * 8 / (4 * 32 * 9e10)),
        (["smallest-slice", "--on", "v5e", "--set", "bytes=140e9"], "chips", 16),
        (["train-time", "--on", "h100", "--model", "llama-3-70b", "--set", "tokens=15T,mfu=40%,t=30d"], "chips", 6190),
        (["train-time", "--set", "P=37e9,tokens=14.8e12,C=1.513e15,chips=1,t=1e10", "--solve", "mfu"], "mfu", 0.21716),
        (["decode-batch", "--on", "v5e:4x4", "--model", "llama-3-8b", "--set", "context=8192"], "B", 241),
        (["host-transfer", "--on", "v5e", "--set", "bytes=1GB"], "t", 1e9 / load_chip("v5e").host_link_bandwidth),
    ],
)  # fmt: skip
def test_answers(capsys, words, unknown, value):
    found = asked(capsys, *words)
    assert (found["unknown"], found["value"]) == (unknown, pytest.approx(value, rel=1e-4))


def test_of_a_mixture_the_rules_that_count_flops_take_its_active_parameters(capsys):
    model = meshwise.model("mixtral-8x7b")
    flops = asked(capsys, "train-flops", "--model", "mixtral-8x7b")
    assert flops["value"] == 6 * model.parameters.active
    held = asked(capsys, "train-state", "--model", "mixtral-8x7b")
    assert held["value"] == 10 * model.parameters.total
    batch = asked(capsys, "critical-batch", "--model", "mixtral-8x7b", "--on", "v5e")
    assert batch["value"] == pytest.approx(240.54 * 8 / 2, rel=1e-4)


def test_sizes_are_text(capsys):
    assert asked(capsys, "local-shape", "--set", "shape=1024x4096,ways=4x1")["value"] == "256x4096"
    assert meshwise.rule("mixed-split", values="tokens=4Mi,F=28672,MX=2,chips=8960").value == "2048x4"


def test_neighbours_of_a_count_between_two_are_shown(capsys):
    assert main(["rule", "tensor", "--on", "v5p", "--set", "Y=11.2", "--solve", "axes", "--model", "llama-3-70b"]) == 0
    said = capsys.readouterr().out
    assert "axes = 0.996" in said
    assert re.search(r"axes = 1 +Y = 11\.2439", said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["critical-bach"], "unknown rule 'critical-bach'. Nearest: critical-batch"),
        (["fsdp", "--on", "v5p", "--set", "ax=3"], "unknown letter 'ax'"),
        (["fsdp", "--set", "axes=3"], "fsdp: C is missing: FLOP/s of a chip (--set C=..., --on CHIP)"),
        (["fsdp", "--set", "axes=3"], "fsdp: W is missing"),
        (["dcn", "--on", "v5p", "--set", "tokens=4Mi"], "--solve says what to find instead: slices, C, W_dcn, b"),
        (["ridge", "--on", "v5e", "--solve", "C", "--set", "C=1e14"], "--solve C: it is also given by --set"),
        (["ridge", "--on", "v5e", "--solve", "D"], "unknown letter 'D'"),
        (["ridge", "--on", "v5e", "--set", "W_hbm=fast"], "W_hbm: expected"),
        (["ridge", "--on", "v5e", "--set", "W_hbm=-1"], "ridge: expected W_hbm above zero, found -1"),
        (["ridge", "--on", "v5e", "--set", "W_hbm=nan"], "W_hbm: expected a finite number"),
        (["ridge", "--on", "v5e", "--set", "W_hbm"], "expected LETTER=NUMBER"),
        (["decode-batch", "--on", "v5e", "--set", "P=1e9,context=1,kv=1e6,B=2.5", "--solve", "chips"], "it jumps"),
        (["local-shape", "--set", "shape=10x4,ways=4x1"], "the ways do not divide the axes"),
        (["local-shape", "--set", "shape=8x4,local=2x4", "--solve", "ways"], "ways is not one number"),
        (["smallest-slice", "--on", "v5e", "--set", "bytes=1e15"], "the largest is 256"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_in_words(capsys, words, said):
    assert main(["rule", *words]) == 2
    assert said in capsys.readouterr().err


def test_in_python_a_rule_must_be_named():
    with pytest.raises(meshwise.MeshwiseError, match="which rule"):
        meshwise.rule()
    assert repr(meshwise.rule("ridge", on="v5e")) == "<RuleAnswer: ridge: intensity = 240.537>"
