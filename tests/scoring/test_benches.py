"""Results of serving benchmarks as rows, and a calibration of serving refined by them."""

import json
from dataclasses import replace

import pytest

from meshwise.cli.main import main
from meshwise.core.errors import MeshwiseError
from meshwise.costs.engines import engine_chunk, find_serving_calibration
from meshwise.costs.fitted import find_calibration
from meshwise.hardware import load_chip
from meshwise.scoring import predict_serving
from meshwise.scoring.benches import Served, read_bench

VLLM = {"backend": "vllm", "model_id": "meta-llama/Meta-Llama-3-8B-Instruct", "completed": 200, "duration": 50.0,
        "total_input_tokens": 200_000, "total_output_tokens": 51_200, "mean_tpot_ms": 10.0}  # fmt: skip
SGLANG = {k: v for k, v in VLLM.items() if k != "model_id"} | {"backend": "sglang", "concurrency": 11.0}
GUIDELLM = {"benchmarks": [{
    "config": {"backend": {"model": "llama-3-8b"}, "strategy": {"type_": "poisson"}},
    "metrics": {
        "inter_token_latency_ms": {"successful": {"mean": 10.0}},
        "time_per_output_token_ms": {"successful": {"mean": 9.9}},
        "requests_per_second": {"successful": {"mean": 4.0}},
        "prompt_token_count": {"successful": {"mean": 1000.0}},
        "output_token_count": {"successful": {"mean": 256.0}},
    },
}]}  # fmt: skip
INFERENCE_PERF = {"load_summary": {"count": 200}, "successes": {
    "count": 200, "latency": {"time_per_output_token": {"mean": 0.010}}, "throughput": {"requests_per_sec": 4.0},
    "prompt_len": {"mean": 1000.0}, "output_len": {"mean": 256.0}}}  # fmt: skip
SERVED = Served("h100:2", model="llama-3-8b")


@pytest.mark.parametrize("document", [VLLM, SGLANG, GUIDELLM, INFERENCE_PERF])
def test_each_benchmark_gives_the_same_row(document):
    """4 requests a second, each 255 times 10 ms long: 10.2 decode at once."""
    (row,) = read_bench(json.dumps(document, indent=2), "r.json", SERVED)
    assert (row.prompt_len, row.output_len, row.batch) == (1000, 256, 10)
    assert (row.measured_metric, row.measured_value, row.unit) == ("tpot", pytest.approx(0.010), "s")
    assert (row.n_chips, row.tp, row.is_static) == (2, 2, False)
    assert predict_serving(row).engine == document.get("backend", "not named")


def test_lines_and_lists_are_several_results_and_engines_share_requests():
    lines = read_bench("\n".join(json.dumps(d) for d in (VLLM, SGLANG)), "r.jsonl", SERVED)
    assert [row.engine for row in lines] == ["vllm", "sglang"]
    assert [row.id for row in read_bench(json.dumps([VLLM, VLLM]), "r.json", SERVED)] == ["result 1", "result 2"]
    (two,) = read_bench(json.dumps(VLLM), "r.json", replace(SERVED, tensor=1))
    assert (two.tp, two.batch) == (1, 5)


def test_a_checkpoint_is_named_without_its_owner_and_what_it_was_tuned_for():
    (row,) = read_bench(json.dumps(VLLM), "r.json", Served("h100:1"))
    assert predict_serving(row).scenario.problem.model.name == "llama-3-8b"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (VLLM | {"model_id": "acme/unknown-9b"}, "'acme/unknown-9b', which is not a name that is known"),
        (VLLM | {"duration": 0}, "duration: expected a number above 0, found 0"),
        ({"a": 1}, "found the keys a"),
        ({"successes": {"latency": {}}}, "latency.time_per_output_token.mean: expected a number"),
    ],
)
def test_a_result_that_lacks_something_says_so(document, words):
    (row,) = read_bench(json.dumps(document), "r.json", Served("h100:1"))
    assert words in row.reason


def test_what_is_no_result_is_refused():
    with pytest.raises(MeshwiseError, match="expected a result of vllm"):
        read_bench("[1]", "r.json", SERVED)
    with pytest.raises(MeshwiseError, match=r"r\.json"):
        read_bench("{", "r.json", SERVED)
    with pytest.raises(MeshwiseError, match="--tensor 3"):
        read_bench(json.dumps(VLLM), "r.json", replace(SERVED, tensor=3))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What a host of 2 ms a step and 80 us a request would have measured."""
    found = []
    for rate, tpot in ((1, 10.0), (6, 14.0), (12, 20.0), (18, 30.0)):
        document = VLLM | {"duration": 200 / rate, "mean_tpot_ms": tpot}
        row = predict_serving(read_bench(json.dumps(document), "r", Served("h100:1"))[0])
        true = row.seconds_under(replace(row.calibration, host_step=2e-3, host_request=80e-6)) * 1e3
        found.append(document | {"mean_tpot_ms": true, "duration": document["duration"] * true / tpot})
    file = tmp_path_factory.mktemp("bench") / "results.json"
    file.write_text("\n".join(map(json.dumps, found)))
    return file


def test_a_calibration_of_serving_is_refined_and_taken(results, tmp_path, capsys):
    ours = tmp_path / "ours.json"
    assert main(["calibrate", str(results), "--on", "h100:1", "--save", str(ours), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["base"] == "fitted+vllm"
    assert data["mape"]["before"] > 0.10
    assert data["mape"]["left_out"] < data["mape"]["before"] / 2
    moved = {c["name"]: c["after"] / c["before"] for c in data["constants"]}
    assert moved["host.step"] > 1.2
    assert moved["host.request"] > 1.2
    chip = load_chip("h100-sxm")
    found = find_serving_calibration(str(ours), chip)
    assert found.host_request > 1.2 * find_serving_calibration("fitted", chip).host_request
    assert "host_request" in found.refined
    assert engine_chunk((), found) == 8192
    with pytest.raises(MeshwiseError, match=r"refined by measured serving under fitted\+vllm"):
        find_calibration(str(ours), chip)
    with pytest.raises(MeshwiseError, match="another family"):
        find_serving_calibration(str(ours), load_chip("b200-sxm"))


def test_results_need_chips_and_rows_do_not(results, tmp_path, capsys):
    assert main(["calibrate", str(results)]) == 2
    assert "--on" in capsys.readouterr().err
    file = tmp_path / "rows.csv"
    file.write_text(
        "chip,model,n_chips,tp,engine,phase,concurrency,prompt_len,output_len,measured_metric,measured_value,unit\n"
        "h100-sxm,llama-3-8b,1,1,vllm,,16,1000,256,tpot,12,ms\n"
    )
    assert main(["calibrate", str(file), "--on", "h100:1"]) == 2
    assert "--on: rows of CSV say this themselves" in capsys.readouterr().err
    assert main(["calibrate", str(file)]) == 0
    assert "host.step" in capsys.readouterr().out
