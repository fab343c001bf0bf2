"""`run --generate`, and training that begins with published weights: tokens, loss and refusals."""

import json

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import meshwise
from meshwise.cli.main import main
from meshwise.commands.execution import least_times
from meshwise.commands.run_requests import RunOptions
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.hardware import load_chip
from meshwise.runtime.data import SyntheticTokens
from meshwise.runtime.states import starting_state
from meshwise.runtime.weights import open_weights
from meshwise.sharding.layout import Layout
from tests.runtime.golden import Golden
from tests.runtime.steps import by_layer, make

GOLDEN = Golden.of("llama")
WORDS = {f"w{i}": i for i in range(96)}
JOB = {"on": "h100:4", "batch_tokens": 256, "seq_len": 32, "precision": "fp32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model as it is published: configuration, weights and tokenizer."""
    folder = tmp_path_factory.mktemp("published")
    GOLDEN.write(folder)
    (folder / "config.json").write_text(json.dumps(GOLDEN.said["config"]))
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="w0"))  # noqa: S106 -- no secret
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def plan_of(folder, layout="fsdp=2,tensor=2"):
    return meshwise.estimate_train(str(folder), layout=layout, **JOB).plans[0]


@pytest.mark.jax
def test_the_most_likely_tokens_are_generated_and_timed(folder, tmp_path, capsys):
    prompt, expected = GOLDEN.tokens[0][:9], GOLDEN.logits[0].argmax(-1)[8]
    words = " ".join(f"w{t}" for t in prompt)
    plan = tmp_path / "plan.json"
    plan.write_text(plan_of(folder).to_json())
    asked = ["run", str(plan), "--weights", str(folder), "--prompt", words, "--generate", "3", "--json"]
    assert main(asked) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["prompt_tokens"] == prompt.tolist()
    assert said["tokens"][0] == expected
    assert said["text"].split() == [f"w{t}" for t in said["tokens"]]
    assert (said["sequences"], said["num_devices"], said["layout"][:15]) == (2, 4, "fsdp=2,tensor=2")
    assert len(said["seconds"]) == 2
    assert said["time_to_first_token_s"] > 0
    assert said["tokens_per_s"] == pytest.approx(2 / said["time_per_token_s"])
    assert said["least_time_per_token_s"] is None  # of a CPU no bound is known


@pytest.mark.jax
def test_a_cpu_generates_in_the_format_that_it_is_fast_in_and_says_so(folder, capsys):
    job = ["--on", "h100:1", "--batch-tokens", "256", "--seq-len", "32", "--layout", "remat=full"]
    asked = ["run", str(folder), *job, "--weights", str(folder), "--prompt-tokens", "1,2,3", "--generate", "2"]
    for options, dtype, words in (
        ([], "fp32", "fp32, in which a CPU is fast; the plan's is bf16 (--dtype)"),
        (["--dtype", "bf16"], "bf16", "bf16, in which a CPU is several times slower than in fp32"),
        (["--precision", "fp32"], "fp32", "format: fp32"),
    ):
        assert main([*asked, *options, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["dtype"] == dtype
        assert main([*asked, *options]) == 0
        assert words in " ".join(capsys.readouterr().out.split())


def test_the_least_times_are_reading_weights_and_the_prompts_flops():
    given = {"on": "h100:8", "batch_tokens": "512Ki", "seq_len": 4096, "layout": "fsdp=4,tensor=2"}
    plan = meshwise.estimate_train("llama-3-8b", **given).plans[0]
    chip, parameters, table = load_chip("h100"), 8_030_261_248, 128_256 * 4096
    first, each = least_times(plan, chip, DType.BF16, 4, 8192)
    assert each == pytest.approx((parameters - table) * 2 / 2 / chip.hbm_bandwidth)
    flops = 2 * 4 * ((parameters - 2 * table) * 8192 + table)  # the head reads one position
    assert first == pytest.approx(flops / (8 * chip.flops_per_s[DType.BF16]))
    assert least_times(plan, chip, DType.BF16, 4, 1)[0] == pytest.approx(each)


@pytest.mark.jax
@pytest.mark.parametrize("choices", [{"fsdp": 2, "tensor": 2}, {"stage": 3, "fsdp": 2, "num_microbatches": 3}])
def test_training_begins_with_published_weights(folder, choices):
    step = make(GOLDEN.model, Layout(**choices), precision="mixed")
    state = starting_state(step, open_weights(folder, GOLDEN.model))
    tensors = GOLDEN.tensors
    for part, dtype in (("weights", "bfloat16"), ("master", "float32")):
        found = by_layer(step, state[part])
        assert found["layer"]["w_up"].dtype == dtype
        for i in range(3):
            expected = tensors[f"model.layers.{i}.mlp.up_proj.weight"].T.astype(found["layer"]["w_up"].dtype)
            np.testing.assert_array_equal(found["layer"]["w_up"][i], expected)
    assert int(state["step"]) == 0
    assert not any(np.any(m) for m in jax.tree.leaves(state["moments"]))


@pytest.mark.jax
def test_a_run_begins_with_published_weights(folder):
    plan = plan_of(folder)
    begun = meshwise.run_plan(plan, steps=1, weights=str(folder))
    tokens = SyntheticTokens(96, 0).sequences(1, plan.layout.sequences, 33)
    step = make(GOLDEN.model, Layout(), length=32)
    weights = starting_state(step, open_weights(folder, GOLDEN.model))["weights"]
    expected = jax.jit(step.stack.losses)(weights, {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}).mean()
    assert begun.losses[0] == pytest.approx(float(expected), rel=1e-5)
    assert abs(begun.losses[0] - np.log(96)) > 0.1  # of drawn weights it is about that


def test_options_that_do_not_go_together_are_refused(folder):
    plan = plan_of(folder)
    for options, match in (
        ({}, "needs one of --prompt, a text, and --prompt-tokens"),
        ({"prompt": "w1", "prompt_tokens": "1"}, "needs one of --prompt"),
        ({"prompt": "w1"}, "--prompt needs --tokenizer"),
        ({"prompt_tokens": "1,x"}, "expected numbers of tokens, 1,2,3"),
        ({"prompt_tokens": "1,96"}, "token 96 is not among the 96 of the model"),
        ({"prompt": "", "tokenizer": str(folder / "tokenizer.json")}, "expected at least one token, found none"),
        ({"prompt_tokens": "1", "weights": "none.gguf"}, "none.gguf: there is no such file"),
    ):
        with pytest.raises(MeshwiseError, match=match):
            meshwise.generate(plan, tokens=3, **options)
    for options, match in (
        ({"prompt": "w1"}, "--prompt needs --generate"),
        ({"dtype": "bf16"}, "--dtype needs --generate"),
        ({"tokens": 3, "prompt_tokens": "1", "steps": 3}, "--steps is for training; with --generate leave it out"),
    ):
        with pytest.raises(MeshwiseError, match=match):
            RunOptions(**options).check()
