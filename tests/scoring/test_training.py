"""What rows mean: published runs of each source as plans, and the traps in their words."""

import pytest

from meshwise.core.errors import MeshwiseError
from meshwise.scoring import Refusal, TrainingRun, predict_training, shipped_rows
from meshwise.scoring.formats import precision_of
from meshwise.scoring.rows import convention_flops, measured_bytes, measured_seconds
from meshwise.scoring.scenario import cluster_of, model_of, node_bandwidth
from meshwise.scoring.training import build_scenario
from tests.each import each

RUNS = {run.id: run for run in shipped_rows(TrainingRun)}
BASE = {"id": "x", "n_chips": 8, "global_batch_seqs": 64, "seq_len": 8192, "measured_metric": "step_time",
        "measured_value": 2.0, "unit": "s", "chip": "h100-sxm", "model": "llama-3-8b"}  # fmt: skip


def run(**changes):
    return TrainingRun(**(BASE | changes))


@pytest.mark.parametrize(
    ("name", "sizes", "choices"),
    [
        ("T-maxtext-0015", {"data": 2, "fsdp": 32, "tensor": 8}, {"remat": "projections", "num_microbatches": 1}),
        ("T-maxtext-0094", {"data": 2, "fsdp": 8}, {"remat": "matmuls"}),
        ("T-llmfoundry-0025", {"data": 512, "fsdp": 1}, {"zero": 2, "remat": "none"}),
        ("T-llmfoundry-0001", {"data": 1, "fsdp": 512}, {"micro_batch": 8, "num_microbatches": 1}),
        ("T-korthikanti-0003", {"tensor": 8, "stage": 8}, {"sequence_parallel": False, "virtual_stages": 3}),
        ("T-korthikanti-0004", {"tensor": 8, "stage": 8}, {"sequence_parallel": True, "remat": "recompute:core_attn"}),
        ("T-mbridge-0147", {"fsdp": 64}, {"offload": ("activations",), "offload_layers": 20, "remat": "none"}),
        ("T-mbridge-0519", {"fsdp": 8}, {"remat": "full", "remat_layers": 5}),
        ("T-mbridge-0579", {"data": 2, "expert": 32, "tensor": 2, "stage": 8}, {"expert_tensor_parallel": False}),
        ("T-mbridge-0175", {"data": 4, "expert": 32, "stage": 2}, {"schedule": "interleaved", "zero": 1}),
    ],
)
def test_layouts_of_published_runs(name, sizes, choices):
    layout = build_scenario(RUNS[name]).layout
    assert {axis: layout.sizes[axis] for axis in sizes} == sizes
    assert {key: layout.choices.get(key) for key in choices} == choices
    assert layout.num_chips == RUNS[name].n_chips


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("T-korthikanti-0001", "fp16,reductions=fp16"),
        ("T-bloomprequel-0232", "fp16,gradients=fp16"),
        ("T-llmfoundry-0157", "bf16,master=fp32"),
        ("T-llmfoundry-0001", "mixed"),
        ("T-mbridge-0147", "fp8-current,gradients=bf16"),
        ("T-mbridge-0149", "mxfp8,gradients=bf16"),
        ("T-mbridge-0545", "mxfp8,gradients=bf16"),
        ("T-nemo2407-0001", "fp8"),
    ],
)
def test_formats_of_published_runs(name, precision):
    assert precision_of(RUNS[name])[0] == precision


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("T-maxtext-0005", 64.76), ("T-maxtext-0031", 1024), ("T-llmfoundry-0001", 64.3), ("T-llmfoundry-0043", 30.0),
        ("T-sc21-0009", 529.6), ("T-mbridge-0001", 671.0), ("T-mbridge-0013", 30.5), ("T-bloomprequel-0100", 181.0),
    ],
)  # fmt: skip
def test_models_have_the_parameters_that_sources_state(name, billions):
    model, _ = model_of(RUNS[name])
    assert model.parameters.total / 1e9 == pytest.approx(billions, rel=0.03)


def test_every_row_that_states_parameters_has_about_as_many():
    for row in RUNS.values():
        if row.params_b is not None and row.counts:
            assert model_of(row)[0].parameters.total / 1e9 == pytest.approx(row.params_b, rel=0.06), row.id


def test_switches_that_nobody_states_are_those_of_the_count_of_parameters():
    sizes = {"model": "Own 7B", "layers": 32, "d_model": 4096, "d_ff": 11008, "n_heads": 32, "vocab": 32000}
    gated, notes = model_of(run(**sizes, params_b=6.74))
    assert gated.parameters.total == 6_738_415_616
    assert any("gated=yes, tied=no" in note for note in notes)
    plain, _ = model_of(run(**sizes, params_b=5.3))
    assert plain.parameters.total < 5.4e9


def test_a_file_in_the_current_folder_is_no_model_of_a_row(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text("D = 64\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MeshwiseError, match="is not a name that is known"):
        model_of(run(model="mine.toml"))


def test_a_padded_table_of_tokens_does_not_make_another_model():
    cells = {"layers": 48, "d_model": 3840, "n_heads": 16, "n_kv_heads": 8, "head_dim": 256, "d_ff": 15360}
    model, _ = model_of(run(model="Gemma-3-12B", vocab=262144, **cells))
    assert {b.name: b.repeat for b in model.train_program() if b.role == "layer"} == {
        "layer.local": 40,
        "layer.global": 8,
    }
    other, _ = model_of(run(model="Gemma-3-12B", vocab=128000, **cells))
    assert other.vocab_size == 128000


@pytest.mark.parametrize(
    ("name", "software", "tp", "sums"),
    [
        ("Falcon-180B", "TensorRT-LLM v0.9.0", 8, 1),
        ("Falcon-180B", "TensorRT-LLM v0.5.0", 8, 2),
        ("Falcon-180B", "TensorRT-LLM v0.5.0", 1, 1),
        ("GPT-J-6B", "vLLM", 1, 1),
        ("GPT 20B", "vLLM", 8, 2),
    ],
)
def test_branches_that_read_one_input_are_summed_once(name, software, tp, sums):
    model, _ = model_of(run(model=name, software=software, tp=tp, layers=8, d_model=512, n_heads=8, vocab=50_400))
    (layer,) = (b for b in model.train_program() if b.role == "layer")
    assert sum(op.name.startswith("residual") for op in layer.ops) == sums


@pytest.mark.parametrize(
    ("name", "arch", "tied"), [("Llama 7B own", "", False), ("Own", "tied logits", True), ("Gemma own", "", True)]
)
def test_heads_are_tables_of_their_own_unless_something_says_otherwise(name, arch, tied):
    cells = {"layers": 4, "d_model": 1024, "n_heads": 8, "d_ff": 4096, "vocab": 32000}
    model, _ = model_of(run(model=name, arch_source=arch, **cells))
    table = 1024 * 32000
    assert (model.parameters.total - 4 * (4 * 1024**2 + 3 * 1024 * 4096) < 1.5 * table) is tied


@pytest.mark.parametrize(
    ("changes", "software"),
    [
        ({"software": "NeMo container 25.11"}, "fitted"),
        ({"software": "NeMo container 25.11", "ep": 32, "dp": 32, "n_chips": 32}, "fitted"),
        ({"software": "NeMo container 25.11", "ep": 32, "dp": 32, "pp": 2, "vpp": 2, "n_chips": 64},
         "fitted+megatron-beside"),
        ({"software": "NeMo 24.07", "ep": 32, "dp": 32, "n_chips": 32}, "fitted"),
        ({"software": "NeMo container 25.11", "ep": 32, "dp": 32, "n_chips": 32, "chip": "gb200"}, "fitted"),
        ({"software": "NeMo container 26.06", "ep": 32, "dp": 32, "n_chips": 32, "chip": "gb200"}, "fitted"),
        ({"software": "NeMo container 26.06", "ep": 32, "dp": 32, "n_chips": 32, "chip": "gb200", "dtype": "MXFP8"},
         "fitted+megatron-graphs"),
        ({"software": "NeMo container 26.06", "ep": 8, "dp": 32, "n_chips": 32, "chip": "b200", "dtype": "MXFP8"},
         "fitted"),
        ({"software": "Megatron-DeepSpeed 2022", "year": 2022}, "fitted+megatron-deepspeed"),
        ({"software": "Megatron-DeepSpeed", "year": 2022, "notes": "CUDA_LAUNCH_BLOCKING=1"},
         "fitted+megatron-deepspeed-blocking"),
        ({"software": "Megatron-LM core 0.12", "notes": "CUDA graphs"}, "fitted"),
        ({"software": "NeMo AutoModel 25.11"}, "fitted+pytorch"),
        ({"software": "Primus (Megatron)"}, "fitted"),
        ({"software": "torchtitan", "notes": "FSDP2 + torch.compile"}, "fitted+pytorch-compiled"),
        ({"software": "torchtitan + compile"}, "fitted+pytorch-compiled"),
        ({"software": "torchtitan, eager", "notes": "without torch.compile"}, "fitted+pytorch"),
        ({"software": "Megatron-LM Apr-2021", "year": 2021}, "fitted+megatron-2021"),
        ({"software": "DeepSpeed 0.16, ZeRO-2"}, "fitted+deepspeed"),
        ({"software": "LLM Foundry"}, "fitted+pytorch"),
    ],
)  # fmt: skip
def test_software_is_what_a_release_did_where_experts_are(changes, software):
    mixture = {"model": "qwen3-30b-a3b", "moe_experts": 128, "moe_topk": 8, "seq_len": 4096, "year": 2025}
    calibration = build_scenario(run(**(mixture | changes))).problem.calibration
    assert calibration.name == software


def test_networks_are_read_from_the_words():
    assert node_bandwidth("H100 80GB SXM (GCP A3 High, 8/node, 4x200 Gb/s GPUDirect-TCPX per node)") == 100e9
    assert node_bandwidth("A100 80GB SXM (Selene, 8x HDR200 IB per node)") == 200e9
    assert node_bandwidth("A100 SXM (8 per node, 800 Gb/s per node by vTrain config)") == 100e9
    assert node_bandwidth("H100 80GB SXM (DGX)") is None
    cluster, _ = cluster_of(RUNS["T-bloomprequel-0100"])
    # Four ports of 12.5 GB/s for eight chips; NCCL has 40.5 of 100 Gb/s where other networks have 84.
    assert cluster.network.levels[-1].bandwidth_per_chip_one_way == pytest.approx(50e9 / 8 * 0.405 / 0.84)


def test_slices_are_read_from_the_words():
    assert cluster_of(RUNS["T-maxtext-0015"])[0].describe().startswith("v5p:256*2 -> 512 x TPU v5p")
    assert cluster_of(RUNS["T-maxtext-0083"])[0].num_slices == 2
    assert cluster_of(RUNS["T-maxtext-0021"])[0].num_slices == 1


def test_units():
    model, _ = model_of(run())
    assert measured_seconds(run(unit="ms"), model) == 0.002
    assert measured_seconds(run(measured_metric="tokens_per_s_per_chip", unit="tokens/s/GPU"), model) == 64 * 8192 / 16
    assert measured_bytes(run(measured_metric="peak_memory", unit="GB/GPU")) == 2e9
    with pytest.raises(MeshwiseError, match="expected s, ms, us or min, found 'hours'"):
        measured_seconds(run(unit="hours"), model)
    for unit in ("%", "fraction of 989 TFLOP/s"):
        with pytest.raises(MeshwiseError, match="expected its peak"):
            measured_seconds(run(measured_metric="MFU", unit=unit), model)
    for metric, unit in (
        ("tokens_per_s", "ktokens/s"), ("tokens_per_s", "tokens/min"), ("tokens_per_s", "tokens/s/GPU"),
        ("tokens_per_s_per_chip", "tokens"),
    ):  # fmt: skip
        with pytest.raises(MeshwiseError, match=f"unit of {metric}: expected tokens/s.*, found '{unit}'"):
            measured_seconds(run(measured_metric=metric, unit=unit), model)


def test_narayanan_and_words_count_alike():
    """96 B s L h^2 (1 + s/6h + V/16Lh) is 8 N and whole attention four times; logits are not computed again."""
    row = RUNS["T-sc21-0009"]
    model, _ = model_of(row)
    stated = convention_flops(row, model)
    words = run(**{f: getattr(row, f) for f in ("model", "layers", "d_model", "n_heads", "vocab", "global_batch_seqs",
                "seq_len", "head_dim", "d_ff")}, n_chips=row.n_chips, recompute="full",
                measured_metric="hardware_tflops_per_chip", flops_convention="attention NOT halved")  # fmt: skip
    assert convention_flops(words, model) == pytest.approx(stated, rel=0.01)


def test_mfu_of_maxtext_agrees_with_its_tflops():
    """The source gives both: 70.31 % of 459 TFLOP/s and 323 TFLOP/s."""
    model, _ = model_of(RUNS["T-maxtext-0005"])
    seconds = measured_seconds(RUNS["T-maxtext-0005"], model)
    assert measured_seconds(RUNS["T-maxtext-0006"], model) == pytest.approx(seconds, rel=0.002)


@each(
    "changes, words",
    [
        ({"chip": ""}, "chip is blank"),
        ({"chip": "h100"}, None),
        ({"chip": "z80"}, "unknown chip 'z80'"),
        ({"tp": 3}, "tp 3 x pp 1"),
        ({"dtype": "posit8"}, "dtype 'posit8' is not understood"),
        ({"fsdp_or_zero_stage": "HYBRID-7"}, "fsdp_or_zero_stage 'HYBRID-7' is not understood"),
        ({"recompute": "every other tuesday"}, "recompute 'every other tuesday' is not understood"),
        ({"micro_batch": 3}, "no multiple of micro_batch 3"),
        ({"model": "No Such", "layers": 2}, "d_model, n_heads are blank"),
        ({"layers": 40}, "layers is 40, and that of llama-3-8b is 32"),
        ({"d_ff": 28672}, "d_ff is 28,672, and that of llama-3-8b is 14,336"),
        ({"moe_topk": 2}, "moe_topk is 2, and moe_experts is blank"),
        ({"moe_experts": 8}, "moe_experts is 8, and that of llama-3-8b is none"),
        ({"tp": 4, "sp": 2}, "sp: expected 1 or tp, which is 4, found 2"),
        ({"vpp": 2}, "vpp 2 without pipeline stages"),
        ({"ep": 8}, "ep 8 of a model without experts"),
        ({"fsdp_or_zero_stage": "FSDP over 3"}, "expected over how many of the 8 replicas"),
        ({"fsdp_or_zero_stage": "HSDP, 3 replicas"}, "expected over how many of the 8 replicas"),
        ({"recompute": "nonesuch"}, "recompute 'nonesuch' is not understood"),
        ({"recompute": "full; optimizer offloaded"}, "recompute 'full; optimizer offloaded' is not understood"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_its_reason(changes, words):
    if words is None:
        assert build_scenario(run(**changes)).problem.cluster.chip.name == "h100-sxm"
        return
    with pytest.raises(MeshwiseError) as error:
        build_scenario(run(**changes))
    assert words in str(error.value)


def test_what_is_too_fast_because_it_cannot_fit_is_refused_for_that():
    found = predict_training(run(model="llama-3.1-405b", fsdp_or_zero_stage="FSDP", recompute="full", micro_batch=1))
    assert isinstance(found, Refusal)
    assert "it does not fit in memory: " in found.reason
    assert "needed on a chip of 79.1 GiB (optimizer 378 GiB" in found.reason


def test_what_is_open_is_said():
    assert build_scenario(run()).open == ("remat", "zero", "micro_batch")
    assert build_scenario(run(recompute="none", micro_batch=1, fsdp_or_zero_stage="FSDP")).open == ()
