"""Rows of measured serving: how each metric is converted, what is refused, and that no shipped row is dropped."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

import meshwise
from meshwise.cli.main import main
from meshwise.core.errors import MeshwiseError
from meshwise.scoring import (
    Refusal,
    ServingPrediction,
    ServingRun,
    TrainingRun,
    predict_serving,
    read_rows,
    score_serving,
    shipped_rows,
)
from meshwise.scoring.serving import MEASURED_MODELS, causes_of, compared, measured_number
from meshwise.scoring.serving_scenario import build_serving_scenario
from tests.each import each

BASE = {
    "id": "a", "chip": "h100-sxm", "model": "llama-3.1-8b", "n_chips": "2", "tp": "2", "engine": "ours",
    "phase": "decode", "weights_dtype": "bf16", "batch": "8", "concurrency": "8", "prompt_len": "1024",
    "output_len": "129", "serving_mode": "continuous batching", "measured_metric": "tpot", "measured_value": "10",
    "unit": "ms",
}  # fmt: skip
STATIC = {"serving_mode": "static batch", "concurrency": "", "phase": "prefill+decode"}


def row(**changes):
    cells = BASE | changes
    values = ",".join(f'"{value}"' for value in cells.values())
    (run,) = read_rows(",".join(cells) + "\n" + values + "\n", "rows.csv", ServingRun)
    return run


#: A mixture on eight B200.
MIXTURE = {"model": "deepseek-v3", "chip": "b200-sxm", "n_chips": "8", "tp": "8", "ep": "8", "concurrency": "64",
           "measured_value": "40"}  # fmt: skip


def estimate(**changes):
    """What `estimate serve` says of the row's load."""
    given = {"prompt": 1024, "output": 129, "batch": 8, "layout": "tensor=2"} | changes
    return meshwise.estimate_serve("llama-3.1-8b", on="h100:2", **given)


def predicted(**changes):
    found = predict_serving(row(**changes))
    assert isinstance(found, ServingPrediction), found
    return found


def test_tpot_of_continuous_batching_is_the_batching_algebra():
    """Of 128 steps 7 take a prompt of another request along, whose tokens share the reading of weights."""
    e = estimate(chunk=8192)
    by_hand = 121 / 128 * e.decode.seconds.expected + 7 / 128 * e.prefill.interval
    apart = estimate(chunk="none")
    assert e.prefill.interval < apart.prefill.interval + apart.decode.seconds.expected
    found = predicted()
    assert found.measured == pytest.approx(0.010)
    assert found.expected == pytest.approx(by_hand) == pytest.approx(e.tpot.expected)
    assert found.error == pytest.approx(by_hand / 0.010 - 1)


def test_a_static_batch_is_prefilled_together_and_generates_without_interruption():
    e = estimate(prefill_batch=8)
    first, step = e.prefill.seconds.expected, e.decode.seconds.expected
    whole = first + 128 * step
    assert predicted(**STATIC, measured_metric="end_to_end_latency", unit="s", measured_value="2").expected == (
        pytest.approx(whole)
    )
    rate = predicted(**STATIC, measured_metric="output_tokens_per_s_per_gpu", measured_value="258", unit="tokens/s/GPU")
    assert rate.measured == pytest.approx(8 * 129 / (258 * 2))
    assert rate.expected == pytest.approx(whole)
    prefill = predicted(**STATIC | {"phase": "prefill"}, measured_metric="first_token_latency", measured_value="400")
    assert prefill.expected == pytest.approx(first)
    steps = predicted(**STATIC | {"phase": "decode"}, measured_metric="latency", unit="s", measured_value="2")
    assert steps.expected == pytest.approx(129 * step)
    one = predicted(**STATIC | {"phase": "decode"}, measured_metric="latency_per_token")
    assert one.expected == pytest.approx(step)
    per_step = predicted(**STATIC | {"phase": "decode"}, measured_metric="tokens_per_s", unit="tokens/s")
    assert (per_step.measured, per_step.compared) == (pytest.approx(8 / 10), "step")


def test_rates_end_to_end_count_the_prefill():
    run = row(**STATIC | {"phase": "decode"}, measured_metric="tokens_per_s", unit="tokens/s (end to end, batch 8)")
    assert compared(run) == "whole"
    assert measured_number(run, 1) == pytest.approx(8 * 129 / 10)


def test_a_table_of_tensorrt_llm_means_each_chip():
    """That of A100 in release 0.6; those of other chips and releases say which they mean."""
    cells = STATIC | {"measured_metric": "output_tokens_per_s", "unit": "tokens/s", "engine": "TensorRT-LLM"}

    def seconds(chip, software):
        return measured_number(row(**cells, chip=chip, software=software), 1)

    assert seconds("a100-sxm-80gb", "TensorRT-LLM v0.5.0") == pytest.approx(8 * 129 / 10)
    assert seconds("l40s", "TensorRT-LLM v0.6.1") == pytest.approx(8 * 129 / 10)
    assert seconds("a100-sxm-80gb", "TensorRT-LLM v0.6.1") == pytest.approx(8 * 129 / 10 / 2)
    known = row(**cells, chip="a100-sxm-80gb", software="TensorRT-LLM v0.6.1")
    assert "each chip" in build_serving_scenario(known, "fitted").assumed[-1]


def test_memory_is_without_the_reserve_and_holds_the_caches_of_a_static_batch_once():
    found = predicted(**STATIC, measured_metric="gpu_memory", unit="GB", measured_value="12")
    cache = 8 * 1168 * 32 * 2 * 8 * 128 * 2 / 2  # 1,153 tokens in blocks of 16, over two chips
    e = estimate(prefill_batch=8)
    assert found.expected == pytest.approx(e.memory["weights"] + cache + e.memory["activations"], rel=1e-6)
    assert found.bound == 0.0


def test_requests_that_do_not_fit_wait():
    found = predicted(batch="512", concurrency="512", prompt_len="8192", output_len="1024", measured_value="200")
    e = estimate(prompt=8192, output=1024, batch=512, reserve=0)  # a margin of plans, not of runs
    assert found.estimate.setup.batch == e.largest_batch < 512
    assert any("the others wait" in note for note in found.scenario.assumed)


@pytest.mark.parametrize(
    ("cells", "needed"),
    [
        ({"model": "llama-3.1-405b"}, "weights 378 GiB, kv cache"),
        ({"model": "llama-3.1-405b", "measured_value": "1000"}, "weights 378 GiB, kv cache"),
        ({"model": "llama-3.1-405b", "measured_metric": "gpu_memory", "unit": "GB"}, "weights 378 GiB"),
        (
            STATIC | {"batch": "4096", "prompt_len": "8192", "measured_metric": "end_to_end_latency"},
            "(kv cache 2.04 TiB, activations",
        ),
    ],
)
def test_what_cannot_fit_is_refused_for_that(cells, needed):
    found = predict_serving(row(**cells))
    assert isinstance(found, Refusal)
    assert "it does not fit in memory: " in found.reason
    assert "needed on a chip of 79.1 GiB" in found.reason
    assert needed in found.reason


@pytest.mark.parametrize(
    ("mode", "concurrency", "static"),
    [
        ("aggregated continuous batching, fixed concurrency", "8", True),
        ("static batch", "8", False),
        ("Offline static batch (all at once)", "", False),
        ("", "8", True),
        ("", "", False),
    ],
)
def test_modes_say_when_requests_start(mode, concurrency, static):
    assert row(serving_mode=mode, concurrency=concurrency).is_static is not static


@pytest.mark.parametrize("notes", ["no MTP", "w/o speculative decoding", "MTP off", "without draft tokens", "eager"])
def test_drafts_that_are_denied_are_none(notes):
    assert predicted(notes=notes).expected == predicted().expected


@pytest.mark.parametrize(
    "mode",
    ["closed loop, after warm-up", "Poisson arrivals", "burst", "request rate 4 req/s, chunked prefill", "open loop"],
)
def test_how_requests_came_does_not_matter_where_it_is_said_how_many_were_under_way(mode):
    assert predicted(serving_mode=mode).expected == predicted().expected


def test_a_mode_says_how_weights_are_shared_on_any_chip():
    layouts = build_serving_scenario(row(serving_mode="static batch, 2D weight-stationary"), "operations").candidates
    assert {x.decode.width for x in layouts} == {1, 2}
    (gathered, tensor) = build_serving_scenario(row(serving_mode="weight-gathered"), "operations").candidates[::-1]
    assert (gathered.decode.fsdp, tensor.decode.tensor) == (2, 2)


def test_an_engine_that_is_not_known_is_said_to_be_taken_as_another():
    assert "engine is not named or not known: vLLM taken" in build_serving_scenario(row(), "fitted").assumed
    assert not any("engine" in note for note in build_serving_scenario(row(engine="vllm 0.9"), "fitted").assumed)


@pytest.mark.parametrize(
    ("cells", "precision"),
    [
        ({"weights_dtype": "fp8"}, "weights=fp8,activations=bf16,compute=fp8,kv=bf16"),
        ({"weights_dtype": "int8", "act_dtype": "bf16"}, "weights=int8,activations=bf16,compute=bf16,kv=bf16"),
        ({"weights_dtype": "int4 (group 32)"}, "weights=int4,activations=bf16,compute=bf16,kv=bf16"),
        ({"weights_dtype": "fp16", "kv_dtype": "fp8"}, "weights=fp16,activations=fp16,compute=fp16,kv=fp8"),
        ({"weights_dtype": ""}, "weights=bf16,activations=bf16,compute=bf16,kv=bf16"),
    ],
)
def test_formats(cells, precision):
    assert build_serving_scenario(row(**cells), "operations").problem.load.precision == precision


@each(
    "cells, reason",
    [
        ({"measured_value": "0.001"}, "faster than the chips' data sheets allow"),
        ({"measured_metric": "ttft", "phase": "prefill (includes queueing)"}, "how requests came"),
        ({"measured_metric": "MFU", "unit": "% of 989 TFLOP/s"}, "derived; give the latency"),
        ({"measured_metric": "effective_memory_bandwidth", "unit": "GB/s per GPU"}, "derived; give tokens_per_s"),
        ({"phase": "training"}, "expected prefill, decode or prefill+decode"),
        ({"unit": "minutes"}, "unit of tpot: expected s, ms, us or min, found 'minutes'"),
        ({"weights_dtype": "ternary"}, "weights_dtype 'ternary' is not understood"),
        ({"tp": "4"}, "tp 4 x pp 1 is not n_chips 2"),
        ({"ep": "3", "model": "qwen3-30b-a3b"}, "ep 3: expected 1, tp 2"),
        ({"output_len": "0"}, "output_len is blank or 0"),
        ({"batch": "", "concurrency": ""}, "batch and concurrency are blank"),
        ({"chip": "h1000"}, "h1000"),
        ({"notes": "MTP with 3 draft tokens"}, "tokens were drafted and checked (mtp)"),
        ({"engine": "sglang (EAGLE-3)"}, "tokens were drafted and checked (eagle"),
        ({"serving_mode": "disaggregated"}, "serving_mode 'disaggregated': prefill and decode on engines of their own"),
        ({"serving_mode": "static batch, chunked"}, "is not understood ('chunked'); expected static batch"),
        ({"serving_mode": "static batch, continuous batching"}, "says two things at once"),
        ({"serving_mode": "static batch, weight-gathered", "tp": "1"}, "expected tp above 1 and ep 1, found tp 1"),
        ({"ep": "2"}, "ep 2 of a model without experts"),
        ({"moe_topk": "2"}, "moe_topk is 2, and moe_experts is blank"),
        ({"layers": "40"}, "layers is 40, and that of llama-3.1-8b is 32: leave it blank, or fill in d_model, n_heads"),
        ({"n_kv_heads": "32"}, "n_kv_heads is 32, and that of llama-3.1-8b is 8"),
        ({"batch": "16"}, "batch 16 of 1 engines is 16 requests at once, but concurrency is 8"),
        ({"weights_dtype": "int4; lm_head fp8"}, "after a semicolon stands the format of experts"),
        ({"weights_dtype": "fp8; experts nvfp4"}, "the model has no experts"),
        ({"weights_dtype": "fp8; experts q17"}, "weights_dtype 'q17' is not understood"),
        (
            {"measured_metric": "output_tokens_per_s", "unit": "tokens/s/GPU"},
            "expected tokens/s, of all chips together",
        ),
        ({"measured_metric": "output_tokens_per_s", "unit": "tokens/min"}, "found 'tokens/min'"),
    ],
)
def test_what_cannot_be_predicted_says_why(cells, reason):
    found = predict_serving(row(**cells))
    assert isinstance(found, Refusal)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("engine", "software", "name"),
    [
        ("vllm 0.12.0", "", "vllm"),
        ("sglang 0.5.9", "", "sglang"),
        ("trtllm ", "; measured 2025-10-29", "trtllm"),
        ("TensorRT-LLM", "TensorRT-LLM v0.9.0", "trtllm-2023"),
        ("FasterTransformer", "FasterTransformer v5.x (2022-23)", "fastertransformer"),
        ("gpt-fast (torch.compile)", "gpt-fast 2024 README", "gpt-fast"),
        ("JetStream", "", "jax"),
        ("ours", "", "vllm"),
    ],
)
def test_a_row_names_its_engine(engine, software, name):
    found = build_serving_scenario(row(engine=engine, software=software), "fitted").problem.calibration
    assert found.name == f"fitted+{name}"
    asked = build_serving_scenario(row(engine=engine, software=software), "fitted+sglang").problem.calibration
    assert asked.name == "fitted+sglang"
    assert build_serving_scenario(row(engine=engine), "operations").problem.calibration.name == "hopper"


def test_lengths_and_caches_of_inferencemax():
    """Lengths from 0.8 to 1.0 of nominal, and a cache of fp8 with checkpoints that have scales for it."""
    cells = {"prompt_len": "1024", "output_len": "8192", "weights_dtype": "fp8"}
    notes = {"notes": "lengths are nominal (InferenceMAX draws +-20%)"}
    plain, drawn = (build_serving_scenario(row(**cells | n), "fitted").problem.load for n in ({}, notes))
    assert (plain.prompt, plain.output) == (1024, 8192)
    assert (drawn.prompt, drawn.output) == (922, 7373)
    assert (plain.formats.kv.value, drawn.formats.kv.value) == ("bf16", "fp8")
    blocks = build_serving_scenario(row(**cells | notes | {"weights_dtype": "fp8_block"}), "fitted").problem.load
    assert blocks.formats.kv.value == "bf16"
    of_checkpoint = build_serving_scenario(row(**cells | {"engine": "trtllm 1.0"}), "fitted").problem.load
    assert of_checkpoint.formats.kv.value == "fp8"


@pytest.mark.parametrize(
    ("batch", "prompt", "output", "together"),
    [(8, 1024, 129, 1), (512, 1024, 129, 4), (512, 2048, 129, 4), (999, 9000, 9, 1)],
)
def test_prompts_that_come_in_one_step_are_prefilled_together(batch, prompt, output, together):
    """As far as 8,192 tokens of a step allow."""
    run = row(batch=str(batch), concurrency=str(batch), prompt_len=str(prompt), output_len=str(output))
    assert build_serving_scenario(run, "fitted").candidates[0].prefill_batch == together


def test_more_prompts_than_any_matmul_could_multiply_were_not_all_computed():
    """64 prompts of 4,000 tokens within 99 steps of 8.5 ms on four H100: 70 % of their peak, beside what is sent."""
    cells = {"n_chips": "4", "tp": "4", "batch": "64", "concurrency": "64", "prompt_len": "4000", "output_len": "100"}
    found = predict_serving(row(**cells, weights_dtype="fp8", measured_value="8.5"))
    assert isinstance(found, Refusal)
    assert "best rates that single operations have reached" in found.reason
    assert isinstance(predict_serving(row(**cells, weights_dtype="fp8", measured_value="20")), ServingPrediction)


def test_one_die_of_a_package_is_no_chip():
    found = predict_serving(row(chip="mi250x", n_chips="1", tp="1", batch="1", concurrency="1"))
    assert isinstance(found, Refusal)
    assert "dies" in found.reason


def test_intervals_are_claimed_by_what_was_compared_with_steps():
    assert predicted().likely.low < predicted().expected < predicted().likely.high
    assert predict_serving(row(), "operations").likely is None
    assert predict_serving(row(), "none").likely is None


def test_no_shipped_row_is_dropped():
    runs = shipped_rows(ServingRun)
    assert len(runs) == 1360
    assert all(run.source and run.source_url_or_repo_path for run in runs)
    some = runs[::19]  # of all sources, and of rows that are not counted
    score = score_serving(some)
    seen = [x.run.id for x in (*score.predictions, *score.refusals, *score.set_aside)]
    assert sorted(seen) == sorted(run.id for run in some)
    assert {r.run.primary for r in score.set_aside} == {"no"}
    assert all(r.reason for r in (*score.refusals, *score.set_aside))
    assert len(score.predictions) > 0.9 * score.rows
    errors = [p.expected / p.measured - 1 for p in score.times]
    assert score.overall.mape == pytest.approx(sum(map(abs, errors)) / len(errors))
    inside = [p.likely.low <= p.measured <= p.likely.high for p in score.times]
    assert score.overall.coverage_80 == pytest.approx(sum(inside) / len(inside))
    assert not score.false_oom
    assert sum(e.rows for e in score.groups["phase"].values()) == len(score.times)


def test_every_shipped_row_says_what_it_is_compared_with():
    """Refused are numbers derived from others, and times that include queueing."""
    refused = []
    for run in shipped_rows(ServingRun):
        try:
            compared(run)
        except MeshwiseError:
            refused.append(run)
    assert {r.measured_metric for r in refused} == {"ttft", "effective_memory_bandwidth", "MFU"}
    assert {r.primary for r in refused} == {"no"}


@pytest.fixture
def file(tmp_path):
    cells = [BASE, BASE | {"id": "b", "primary": "no"}, BASE | {"id": "c", "tp": "4"}]
    path = tmp_path / "serving.csv"
    names = [*BASE, "primary"]
    path.write_text("\n".join([",".join(names), *(",".join(c.get(n, "yes") for n in names) for c in cells)]) + "\n")
    return path


def test_the_command(file, capsys):
    assert main(["score", str(file)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 rows predicted" in text
    assert "b: primary is no: tpot of a run whose other row counts" in text
    assert "c: tp 4 x pp 1 is not n_chips 2" in text
    assert main(["score", str(file), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["inputs"]["calibration"] == "fitted"
    found = answer["predictions"][0]
    assert found["low_80"] < found["expected"] < found["high_80"]
    assert found["calibration"] == "fitted+vllm", "what is not named"
    assert found["error"] == pytest.approx(found["expected"] / found["measured"] - 1)
    assert answer["by_phase"]["decode"]["rows"] == 1


@pytest.mark.parametrize(
    ("weights", "formats"),
    [
        ("bfloat16", "weights=bf16,activations=bf16,compute=bf16"),
        ("W4A16", "weights=int4,activations=bf16,compute=bf16"),
        ("8-bit", "weights=int8,activations=bf16,compute=bf16"),
        ("fp8; experts fp8_block", "weights=fp8,activations=bf16,compute=fp8"),
        ("fp8; experts nvfp4", "weights=fp8,experts=fp4,activations=bf16,compute=fp4"),
        ("bf16; experts mxfp4", "weights=bf16,experts=fp4,activations=bf16,compute=bf16"),
    ],
)
def test_formats_of_weights_and_of_experts_apart(weights, formats):
    found = predicted(**MIXTURE, weights_dtype=weights)
    assert found.scenario.problem.load.precision.startswith(formats + ",")


def test_ways_of_the_same_chips_attend_by_sequences():
    found = predicted(**MIXTURE | {"tp": "8", "dp": "8", "ep": "8"}, weights_dtype="fp8")
    assert str(found.estimate.setup.decode) == "expert=8"
    assert "same chips" in " ".join(found.scenario.assumed)


@pytest.mark.parametrize(
    ("notes", "under_way", "batch"), [("", "64", 8), ("per DP rank", "64", 64), ("per DP rank", "8", 8)]
)
def test_a_batch_may_be_of_each_rank_that_attends_for_its_own(notes, under_way, batch):
    ranks = MIXTURE | {"dp": "8", "batch": "8", "concurrency": under_way, "notes": notes}
    assert predicted(**ranks, weights_dtype="fp8").estimate.setup.batch == batch


def test_prompts_wait_for_a_rank_each_where_a_benchmark_says_so():
    """Of InferenceMAX's TensorRT-LLM; half a prompt a step comes, and 60 steps are enough for all ranks."""
    ranks = MIXTURE | {"dp": "8", "batch": "512", "concurrency": "512", "prompt_len": "1024", "output_len": "1024"}
    notes = {"notes": "InferenceMAX draws lengths", "weights_dtype": "nvfp4"}
    apart, together = (predicted(**ranks, **notes, engine=e).estimate.setup for e in ("sglang 0.5", "trtllm 1.1"))
    assert (apart.prefill_batch, together.prefill_batch) == (1, 8)


def test_an_engine_that_is_not_known_has_a_wider_interval():
    known, other = (predicted(engine=name) for name in ("vllm 0.11", "LMDeploy"))
    assert other.expected == known.expected
    widths = [math.log(p.likely.high / p.expected) for p in (other, known)]
    assert widths[0] > 1.2 * widths[1]


def test_training_is_told_from_serving(file):
    assert meshwise.score(file).rows == 2
    with pytest.raises(MeshwiseError, match="measurements of serving"):
        read_rows(file.read_text(), str(file), TrainingRun)


def test_the_page_describes_every_column_and_metric():
    page = (Path(__file__).parents[2] / "docs" / "measurements.md").read_text()
    serving = page.partition("## Serving")[2].partition("\n## ")[0]
    shared = page.partition("## Training runs")[2].partition("\n## ")[0]
    assert all(f"| `{f.name}` |" in serving + shared for f in fields(ServingRun))
    assert all(f"| `{name}` |" in serving for name in (*ServingRun.TIMES, *ServingRun.MEMORY))


def test_measured_models_are_those_of_the_rows_that_ship():
    runs = [run for run in shipped_rows(ServingRun) if isinstance(run, ServingRun) and run.counts]
    first = {run.model: run for run in reversed(runs) if "MI250" not in run.hardware and not run.is_memory}
    models = [build_serving_scenario(run, "fitted").problem.model for run in first.values()]
    assert {(m.num_layers, m.d_model) for m in models} == MEASURED_MODELS


def test_intervals_are_wider_for_mixtures_and_models_that_were_not_measured():
    def causes(model):
        scenario = build_serving_scenario(row(model=model, engine="vllm"), "fitted")
        return causes_of(scenario, scenario.problem)

    assert causes("llama-3.1-8b") == ("engine",)
    assert causes("gemma-2-9b") == ("engine", "model")
    assert causes("mixtral-8x7b") == ("engine", "experts")
    known, new = (predict_serving(row(model=model, engine="vllm")) for model in ("llama-3.1-8b", "gemma-2-9b"))
    assert new.likely.high / new.expected > known.likely.high / known.expected
