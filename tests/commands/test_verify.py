"""A plan beside programs that XLA compiled: every byte and FLOP has its line, and every difference its reason."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

import meshwise
from meshwise.commands.compile_worker import compile_apart
from meshwise.commands.estimate_train import OWN_RUNTIME, plan_given
from meshwise.commands.verify import compare_program, verify, verify_best
from meshwise.compiler.compiling import Compiled
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.lines import REASONS, UNEXPLAINED
from meshwise.compiler.memory import CompiledMemory
from meshwise.core.errors import CompilerError, ConfigError, MeshwiseError
from meshwise.report.model import rounded_words
from meshwise.report.verify import verification_report, with_verified
from tests.commands.cut import first_layers

DATA = Path(__file__).parents[1] / "data" / "compiled"


def stored(name):
    with gzip.open(DATA / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        value = json.load(file)
    mesh = DeviceMesh(value["mesh"]["sizes"], tuple(value["mesh"]["slices"]))
    return Compiled.from_json(value["compiled"], cached=True), mesh


def stored_for(plan, chips="h100_8"):
    """The program of a plan of the first layers of Llama 3 8B."""
    return stored(f"llama-3-8b_{chips}_fsdp4_tensor2_{plan.problem.model.num_layers}_layers")


def compiler(plan, *, progress):
    """A compiler that knows these programs."""
    progress("compiling")
    return stored_for(plan)


def with_compiler(compiler, function, *args, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwise.commands.verify.compile_apart", compiler)
        return function(*args, **options)


def planned(layers, folder, on="h100:8"):
    """What `estimate_train` says of the first layers of Llama 3 8B."""
    return meshwise.estimate_train(
        first_layers("llama-3-8b", layers, folder),
        on=on,
        batch_tokens="64Ki",
        seq_len=4096,
        precision="book",
        layout="fsdp=4,tensor=2,remat=full",
    )


@pytest.fixture(scope="module", params=[2, 4])
def gpu_plan(request, tmp_path_factory):
    return planned(request.param, tmp_path_factory.mktemp("model")).plans[0]


@pytest.fixture(scope="module")
def tpu_plan(tmp_path_factory):
    return planned(2, tmp_path_factory.mktemp("model"), on="v5p:2x2x2").plans[0]


@pytest.fixture(scope="module")
def gpu(gpu_plan):
    return with_compiler(compiler, verify, gpu_plan)


def line(found, name):
    (one,) = [x for x in found.lines if x.name == name]
    return one


def reasons(one):
    return {d.reason: d.amount for d in one.differences}


def test_what_was_compiled_is_told(gpu, gpu_plan):
    assert (gpu.layers, gpu.target) == (gpu_plan.problem.model.num_layers, "h100-sxm:8")
    assert gpu.program.cached
    assert gpu.program.memory == stored_for(gpu_plan)[0].memory


def test_arguments_are_the_training_state_within_a_thousandth(gpu, gpu_plan):
    arguments = line(gpu, "arguments")
    memory = gpu_plan.estimate.memory
    assert arguments.predicted == pytest.approx(memory["parameters"] + memory["optimizer"], rel=1e-9)
    assert arguments.compiled == pytest.approx(arguments.predicted, rel=1e-3)


def test_what_is_predicted_is_what_the_plan_says(gpu, gpu_plan):
    assert line(gpu, "peak").predicted == pytest.approx(gpu.predicted_total, rel=1e-9)
    memory = gpu_plan.estimate.memory
    assert gpu.predicted_total == pytest.approx(memory["total"] - memory["reserve"], rel=1e-12)


def test_peak_memory_is_within_fifteen_percent(gpu):
    assert line(gpu, "peak").ratio == pytest.approx(1.0, abs=0.15)
    assert gpu.fits


def test_all_traffic_is_explained(gpu):
    assert gpu.unexplained_share == 0.0
    assert all(d.reason in REASONS for x in gpu.lines for d in x.differences)


def test_differences_add_up(gpu):
    for x in (*gpu.group("memory"), *gpu.group("collectives"), *gpu.group("flops")):
        assert sum(d.amount for d in x.differences) == pytest.approx(x.compiled - x.predicted, abs=0.002 * x.compiled)


def test_collectives_have_the_bytes_that_the_algebra_derived(gpu):
    """Gathers and scatters: the same bytes, of the head's weights and its input once for both passes."""
    names = [f"{kind} over {axis}" for kind in ("all-gather", "reduce-scatter") for axis in ("fsdp", "tensor")]
    for name in names:
        assert line(gpu, name).compiled == pytest.approx(line(gpu, name).predicted, rel=1e-3), name


def test_matmuls_are_those_of_the_program(gpu):
    for x in gpu.group("flops"):
        if x.name == "layer/attention":
            assert x.ratio == pytest.approx(2.0, rel=1e-3)  # causal pairs were expected, all are multiplied
            assert set(reasons(x)) == {"masked pairs"}
        else:
            assert x.compiled == pytest.approx(x.predicted, rel=1e-6), x.name
            assert not x.differences


def test_what_is_moved_is_beside_what_was_planned_block_by_block(gpu):
    found = {x.name: x for x in gpu.group("moved")}
    assert set(found) == {"embed", "layer", "head", "elsewhere"}
    assert all(x.compiled > 0 and x.predicted > 0 for x in found.values())
    assert 2 < found["layer"].ratio < 10  # scores are written, which fused attention does not


def test_a_tpu_program_compares_as_well(tpu_plan):
    compiled, mesh = stored_for(tpu_plan, "v5p_2x2x2")
    lines = {x.name: x for x in compare_program(tpu_plan, compiled, mesh)}
    assert lines["arguments"].ratio == pytest.approx(1.0, rel=1e-3)
    assert sum(x.unexplained for x in lines.values()) == 0.0
    assert reasons(lines["all-reduce over fsdp"])["reduced whole"] == lines["all-reduce over fsdp"].compiled


def test_a_program_that_runs_out_of_memory_is_an_answer(gpu_plan):
    message = (
        "RESOURCE_EXHAUSTED: Used 36.63G of 15.75G hbm. Exceeded.\n\nTotal hbm usage >= 36.88G:\n    program  36.63G"
    )

    def compiler(plan, *, progress):
        value = {**stored_for(plan)[0].to_json(), "hlo": ""}
        return Compiled.from_json({**value, "memory": None, "out_of_memory": message}, cached=False), DeviceMesh({})

    found = with_compiler(compiler, verify, gpu_plan)
    assert not found.fits
    assert (found.lines, found.floor, found.unread, found.without_kernel) == ((), None, (), ())
    report = verification_report(found, str(gpu_plan.layout), {})
    layers = gpu_plan.problem.model.num_layers
    assert report.answer == (
        f"Does not fit: compiled for h100-sxm:8, {layers} layers run out of memory: 36.6 GiB of 15.8 GiB"
    )
    (program,) = report.envelope()["compiled"]
    seconds = stored_for(gpu_plan)[0].seconds
    assert program == {"layers": layers, "cached": False, "compile_s": seconds, "schedules": 1, "memory_bytes": None}


def test_a_program_whose_memory_exceeds_the_chip_does_not_fit(gpu_plan):
    def compiler(plan, *, progress):
        compiled, mesh = stored_for(plan)
        big = CompiledMemory.from_json({**compiled.memory.to_json(), "temporaries": 90 * 10**9})
        return Compiled.from_json({**compiled.to_json(), "memory": big.to_json()}, cached=True), mesh

    assert not with_compiler(compiler, verify, gpu_plan).fits


def test_on_tpus_what_is_alive_decides(tpu_plan):
    """XLA's sum of temporaries there is larger than what it takes, and it refuses what does not fit itself."""
    alive = stored_for(tpu_plan, "v5p_2x2x2")[0].memory.alive

    def compiler(plan, *, progress):
        compiled, mesh = stored_for(plan, "v5p_2x2x2")
        big = CompiledMemory.from_json({**compiled.memory.to_json(), "temporaries": 200 * 10**9})
        return Compiled.from_json({**compiled.to_json(), "memory": big.to_json()}, cached=True), mesh

    found = with_compiler(compiler, verify, tpu_plan)
    assert found.set_aside == found.peak == alive
    assert found.fits
    assert "alive at once" not in verification_report(found, str(tpu_plan.layout), {}).answer


def test_what_the_report_says(gpu, gpu_plan):
    report = verification_report(gpu, str(gpu_plan.layout), {"plan": "plan.json"})
    amount = {2: "6.49 GiB", 4: "7.16 GiB"}[gpu.layers]
    assert report.answer.startswith(f"Fits: compiled for h100-sxm:8 it takes {amount} of 79.1 GiB a chip, {amount} of")
    whole = "the whole model is compiled, with all its layers"
    assert report.assumed[0] == f"{whole} (found in the cache of compiled programs)"
    asked = gpu_plan.problem.job.model_copy(update={"batch_tokens": 60_000})
    words = rounded_words(asked, 65_536)
    assert words == "batch: 65,536 tokens, +9.2 % of what was asked, so that it divides"
    assert verification_report(gpu, str(gpu_plan.layout), {}, words).assumed[0] == words
    assert rounded_words(asked, 60_000) is None
    data = report.envelope()
    assert {"memory", "collectives", "matmuls", "fits", "compiler_versions"} <= set(data)
    assert all(x["differences"] or x["predicted_flops"] for x in data["matmuls"])
    json.dumps(data, allow_nan=False)


def test_the_best_plans_are_verified_and_those_that_fail_go_last(tmp_path):
    planning = planned(4, tmp_path)
    names = [replace(planning.plans[0], training=None) for _ in range(4)]
    planning = replace(planning, plans=tuple(names))

    def compiler(plan, *, progress):
        compiled, mesh = stored_for(plan)
        if plan is names[1]:
            raise CompilerError("no")
        if plan is names[0]:
            value = {**compiled.to_json(), "hlo": "", "memory": None, "out_of_memory": "RESOURCE_EXHAUSTED"}
            return Compiled.from_json(value, cached=False), mesh
        return compiled, mesh

    ranked, verified = with_compiler(compiler, verify_best, planning, 3)
    assert [p is n for p, n in zip(ranked.plans, (*names[1:], names[0]), strict=True)] == [True] * 4
    assert [(v.rank, v.fails, v.refused) for v in verified] == [(1, True, ""), (2, False, "no"), (3, False, "")]
    assert ranked.reasons[0].startswith("it is the fastest whose compiled program")
    kept, _ = with_compiler(compiler, verify_best, replace(planning, plans=tuple(names[2:])), 2)
    assert kept.plans == tuple(names[2:])
    report = with_verified(verification_report(verified[2].found, "", {}), verified)
    assert [row["fits"] for row in report.data["verified"]] == [False, None, True]


def test_reasons_are_said_once_and_none_is_the_unexplained_one():
    assert UNEXPLAINED not in REASONS
    assert len(set(REASONS.values())) == len(REASONS)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"on": "tpu7x:2x2x1", "layout": "fsdp=4"}, CompilerError, "two devices"),
        ({"on": "mi300x:8", "layout": "fsdp=8"}, CompilerError, "AMD"),
        ({"layout": "fsdp=8"}, MeshwiseError, "on"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_is_compiled(asked, error, words):
    with pytest.raises(error, match=words):
        verify("llama-3-8b", batch_tokens="64Ki", seq_len=4096, precision="book", **asked)


def test_bad_plans(tmp_path, gpu_plan):
    (tmp_path / "torn.json").write_text('{"model": ')
    with pytest.raises(ConfigError, match=r"torn.json.: not valid JSON: .*; expected what --save writes"):
        verify(tmp_path / "torn.json")
    with pytest.raises(MeshwiseError, match="its job in it"):
        verify(gpu_plan, layout="fsdp=8")
    with pytest.raises(MeshwiseError, match="found 3"):
        verify(3)


def test_a_compiler_that_stops_its_process_is_an_error_with_its_last_words(gpu_plan, monkeypatch, tmp_path):
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho noise\necho 'Check failed: ok' >&2\nexit 134\n")
    stub.chmod(0o755)
    monkeypatch.setattr("meshwise.commands.compile_worker.sys.executable", str(stub))
    with pytest.raises(CompilerError, match=r"compiling .* \([24] layers\): the compiler stopped with code 134: Check"):
        compile_apart(gpu_plan)


def test_a_job_is_priced_as_the_program_that_is_compiled_unless_it_says_otherwise():
    job = {"on": "h100:8", "batch_tokens": "64Ki", "seq_len": 4096, "layout": "fsdp=8,remat=full"}
    assert plan_given("llama-3-8b", job, OWN_RUNTIME).problem.calibration.name == "fitted+xla"
    assert plan_given("llama-3-8b", job).problem.calibration.name == "fitted"
    other = plan_given("llama-3-8b", job | {"calibration": "operations"}, OWN_RUNTIME)
    assert other.problem.calibration.name not in ("fitted", "fitted+xla")
