"""Words of training rows that are easily misread: formats, shards, pipelines, devices, chip files."""

import pytest

from meshwise.core.errors import MeshwiseError
from meshwise.hardware.cluster_file import TEMPLATE
from meshwise.scoring import Refusal, TrainingRun, predict_training, read_rows, score_training
from meshwise.scoring.formats import precision_of
from meshwise.scoring.rows import parse_mode
from meshwise.scoring.scenario import node_bandwidth
from meshwise.scoring.training import build_scenario
from tests.each import each

BASE = {"id": "x", "n_chips": 8, "global_batch_seqs": 64, "seq_len": 8192, "measured_metric": "step_time",
        "measured_value": 20.0, "unit": "s", "chip": "h100-sxm", "model": "llama-3-8b"}  # fmt: skip


def run(**changes):
    return TrainingRun(**(BASE | changes))


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        ("bf16 + float8", "fp8-current"),
        ("bf16 + FP8", "fp8-current"),
        ("float8 (rowwise)", "fp8-current"),
        ("float8 (delayed scaling)", "fp8"),
        ("bf16 params, fp8 matmuls (rowwise)", "fp8-current"),
        ("bf16 (no fp8)", "bf16,master=fp32"),
        ("bf16 + MXFP8", "mxfp8"),
        ("mixed bf16/fp8", "fp8-current"),
        ("tf32", "fp32,compute=tf32"),
        ("bf16 (fp32 reduce)", "bf16,master=fp32"),
    ],
)
def test_narrow_formats_beside_bf16(dtype, precision):
    assert precision_of(run(dtype=dtype, software="torchtitan", chip="b200-sxm"))[0] == precision


@pytest.mark.parametrize(
    "words", ["FSDP2, no re-shard after forward", "FSDP (reshard_after_forward=False)", "FSDP without resharding"]
)
def test_weights_that_stay_gathered_are_zero_2(words):
    layout = build_scenario(run(fsdp_or_zero_stage=words)).layout
    assert (layout.sizes["data"], layout.sizes["fsdp"]) == (8, 1)
    assert layout.choices["zero"] == 2
    assert build_scenario(run(fsdp_or_zero_stage="FSDP2, re-shard after forward")).layout.sizes["fsdp"] == 8


@each(
    "words, data, fsdp, zero",
    [
        ("HSDP 2x4", 2, 4, 1),
        ("HSDP, shard degree 4", 2, 4, 1),
        ("HSDP, replicate=4", 4, 2, 1),
        ("FSDP=4, DP=2", 2, 4, 1),
        ("zero3", 1, 8, 0),
        ("3", 1, 8, 0),
        ("fully sharded", 1, 8, 0),
        ("ZeRO2", 8, 1, 2),
        ("2", 8, 1, 2),
        ("dist-opt", 8, 1, 1),
        ("DP", 8, 1, 0),
        ("FSDP NO_SHARD", 8, 1, 0),
        ("FSDP(4) x DDP(2)", 2, 4, 1),
        ("dp_shard 4, dp_replicate 2", 2, 4, 1),
        ("data_parallel_shard_degree=4", 2, 4, 1),
        ("sharded data parallel", 1, 8, 0),
        ("Sharded DDP", 8, 1, 2),
        ("fsdp 4 x dp 2", 2, 4, 1),
        ("FSDP 2", 1, 8, 0),
        ("MiCS 4", 2, 4, 1),
        ("zero_stage=3", 1, 8, 0),
        ("zero_stage: 1", 8, 1, 1),
        ("ZeRO++", 1, 8, 0),
    ],
)
def test_what_replicas_share(words, data, fsdp, zero):
    layout = build_scenario(run(fsdp_or_zero_stage=words)).layout
    assert (layout.sizes["data"], layout.sizes["fsdp"], layout.choices["zero"]) == (data, fsdp, zero)


def test_a_hybrid_that_says_no_number_shares_within_a_node():
    scenario = build_scenario(run(n_chips=32, tp=2, fsdp_or_zero_stage="HYBRID_SHARD"))
    assert (scenario.layout.sizes["data"], scenario.layout.sizes["fsdp"]) == (4, 4)
    assert "replicas of a node" in " ".join(scenario.assumed)


def test_groups_of_an_optimizer_are_said_not_to_be_priced():
    assert "groups of 4" in " ".join(build_scenario(run(fsdp_or_zero_stage="ZeRO-1 over 4")).assumed)


def test_experts_may_be_padded_to_a_capacity():
    cells = {"model": "mixtral-8x7b", "moe_experts": 8, "moe_topk": 2, "software": "MaxText", "chip": "v5p"}
    wide, plain = (build_scenario(run(**cells, notes=n)).problem.job for n in ("capacity_factor=1.25", ""))
    assert (wide.capacity_factor, plain.capacity_factor) == (1.25, None)
    assert "MTP" in " ".join(build_scenario(run(notes="DeepSeekV3 (w/ MTP)")).assumed)
    assert "MTP" not in " ".join(build_scenario(run(notes="DeepSeekV3 (w/o MTP)")).assumed)


@pytest.mark.parametrize(
    ("cells", "sources"),
    [
        ({"dtype": "fp8"}, ()),
        ({"chip": "b200", "dtype": "bf16"}, ("format",)),
        ({"chip": "b200", "dtype": "fp8"}, ()),
        ({"chip": "h200", "dtype": "fp16"}, ("chip", "format")),
        ({"chip": "mi300x", "dtype": "fp8"}, ("family",)),
        ({"chip": "v5p", "dtype": "int8", "software": "MaxText"}, ("format",)),
    ],
)
def test_formats_and_chips_of_which_no_step_was_measured_are_causes_of_uncertainty(cells, sources):
    assert build_scenario(run(**({"software": "Megatron-LM"} | cells))).problem.uncertainty_sources == sources


LLAMA_405B = {"model": "Llama-3.1-405B", "layers": 126, "d_model": 16384, "n_heads": 128, "n_kv_heads": 8,
              "d_ff": 53248, "vocab": 128256}  # fmt: skip


def test_embedding_and_loss_may_be_pieces_of_a_pipeline():
    """16 stages of 8 pieces hold 126 layers, the embedding and the head; a piece more, and some are empty."""
    cells = LLAMA_405B | {"tp": 8, "pp": 16, "vpp": 8, "n_chips": 1024, "global_batch_seqs": 512, "micro_batch": 1}
    found = predict_training(run(**cells, dtype="fp8", software="NeMo container 25.11", measured_value=100.0))
    assert not isinstance(found, Refusal)
    assert (found.layout.stage, found.layout.virtual_stages) == (16, 8)
    one_less = predict_training(run(**(cells | {"layers": 125}), dtype="fp8", measured_value=100.0))
    assert "at least a layer each" in one_less.reason


def test_ways_may_count_devices_of_which_a_chip_has_two():
    cells = {"chip": "tpu7x", "n_chips": 64, "global_batch_seqs": 256, "software": "MaxText", "recompute": "full"}
    scenario = build_scenario(run(**cells, dp=128, micro_batch=2, fsdp_or_zero_stage="FSDP over 128"))
    assert scenario.layout.sizes["fsdp"] == 64
    assert (scenario.layout.choices["micro_batch"], scenario.layout.choices["num_microbatches"]) == (4, 1)
    assert "devices" in " ".join(scenario.assumed)
    tensor = build_scenario(run(**cells, tp=2, dp=64, fsdp_or_zero_stage="FSDP"))
    assert (tensor.layout.sizes["tensor"], tensor.layout.sizes["fsdp"]) == (2, 32)
    with pytest.raises(MeshwiseError, match="n_chips is 64"):
        build_scenario(run(**cells, dp=96))


def test_replicas_of_tpus_share_weights_unless_the_row_says_otherwise():
    cells = {"chip": "v5e", "n_chips": 512, "global_batch_seqs": 512, "notes": "2 slice(s)"}
    assert {a: n for a, n in build_scenario(run(**cells)).layout.sizes.items() if n > 1} == {"data": 2, "fsdp": 256}
    assert build_scenario(run(**cells, fsdp_or_zero_stage="DDP")).layout.sizes["data"] == 512


def test_a_chip_may_be_a_file(tmp_path):
    file = tmp_path / "chip.toml"
    file.write_text(TEMPLATE)
    found = predict_training(run(chip=str(file)))
    assert found.scenario.problem.cluster.chip.hbm_bandwidth == 4e12
    assert found.scenario.problem.cluster.num_chips == 8
    assert "none.toml" in predict_training(run(chip=str(tmp_path / "none.toml"))).reason


def test_rows_that_are_not_primary_are_not_counted_though_they_cannot_be_read():
    header = ",".join(BASE) + ",primary"
    cells = ",".join(str(v) for v in BASE.values())
    broken = cells.replace("x,8", "y,eight", 1)
    score = score_training(read_rows(f"{header}\n{cells},yes\n{broken},no\n", "rows.csv", TrainingRun))
    assert (len(score.predictions), len(score.refusals), len(score.set_aside)) == (1, 0, 1)
    assert "cannot be read" in score.set_aside[0].reason


def test_what_software_spares_where_a_run_would_not_fit():
    """Gemma's logits of 8 sequences a chip; a 16-bit copy of the weights beside fp32 ones under XLA."""
    cells = {"chip": "v5p", "model": "gemma-3-12b", "n_chips": 16, "seq_len": 8192, "recompute": "full"}
    cells |= {"software": "MaxText", "measured_value": 60.0, "fsdp_or_zero_stage": "FSDP"}
    found = predict_training(run(**cells, micro_batch=8, global_batch_seqs=128))
    assert not found.false_oom
    assert "chunks" in " ".join(found.scenario.assumed)
    assert found.layout.loss == "chunked"
    small = predict_training(run(**cells, micro_batch=1, global_batch_seqs=16))
    assert small.memory == small.estimate.memory, "nothing is spared where all fits"


def test_replicas_that_cannot_hold_copies_share_the_weights():
    cells = {"model": "llama-3-70b", "n_chips": 64, "global_batch_seqs": 64, "recompute": "full", "micro_batch": 1}
    found = predict_training(run(**cells))
    assert (found.layout.fsdp, found.layout.data) == (64, 1)
    assert not found.false_oom


def test_words_for_power_and_memory_change_the_chip():
    plain = predict_training(run(recompute="none", micro_batch=1))
    weak = predict_training(run(recompute="none", micro_batch=1, hardware="H100 SXM, 500 W"))
    assert weak.scenario.problem.cluster.chip.power == 500
    assert weak.expected > 1.2 * plain.expected
    assert "500 W" in " ".join(weak.scenario.assumed)


@pytest.mark.parametrize(
    ("cells", "precision"),
    [
        ({"dtype": "fp8 (delayed scaling)", "software": "NeMo 25.04", "year": 2025}, "fp8,gradients=bf16"),
        ({"dtype": "fp8 rowwise", "software": "torchtitan"}, "fp8-current"),
        ({"dtype": "FP8 block-wise", "software": "Megatron-LM"}, "fp8-block"),
        ({"dtype": "fp8", "notes": "fp8_recipe=mxfp8", "chip": "b200-sxm"}, "mxfp8"),
        ({"dtype": "bfloat16", "software": "MaxText", "chip": "v6e"}, "bf16,master=fp32"),
        ({"dtype": "fp16", "software": "Megatron-LM 2022"}, "fp16,reductions=fp16"),
        ({"dtype": "bf16", "software": "Megatron-Core", "notes": "grad_reduce_in_bf16"}, "mixed,gradients=bf16"),
        ({"dtype": "bf16", "software": "NeMo", "year": 2025, "notes": "grad_reduce_in_fp32=true"}, "mixed"),
    ],
)
def test_recipes_of_formats(cells, precision):
    assert precision_of(run(**cells))[0] == precision


@each(
    "cells, field, value",
    [
        ({"overlap": "tensor off"}, "collective_matmul", False),
        ({"notes": "tp_comm_overlap=False"}, "collective_matmul", False),
        ({"software": "torchtitan + compile, async TP"}, "collective_matmul", True),
        ({"software": "torchtitan + compile, no async TP"}, "collective_matmul", False),
        ({"overlap": "gradients late; pipeline on"}, "late_once", ("gradients",)),
        ({"overlap": "gradients late; pipeline on"}, "late_sends", 0),
        ({"notes": "overlap_grad_reduce: false"}, "late_once", ("gradients",)),
        ({"notes": "overlap_grad_reduce (off)"}, "late_once", ("gradients",)),
        ({"software": "Megatron-LM 2022", "year": 2022, "notes": "overlap_grad_reduce"}, "late_exchange", False),
        ({"software": "Megatron-LM 2022", "year": 2022, "notes": "overlap_grad_reduce"}, "late_once", ("weights",)),
        ({"software": "Megatron-LM 2022", "year": 2022, "overlap": "weights on"}, "late_once", ("gradients",)),
        ({"notes": "tp_comm_overlap: null"}, "collective_matmul", False),
        ({"notes": "overlap_param_gather=0"}, "late_once", ("weights",)),
        ({"notes": "overlap_p2p_comm=False"}, "late_sends", 1),
        ({"notes": "overlap_moe_expert_parallel_comm=true"}, "beside_exchanges", True),
        ({"dispatcher": "alltoall"}, "distinct_dispatch", False),
        ({"notes": "moe_token_dispatcher_type=alltoall"}, "distinct_dispatch", False),
        ({"notes": "flex dispatcher, DeepEP"}, "distinct_dispatch", True),
        ({"notes": "DeepEP disabled"}, "distinct_dispatch", False),
        ({"notes": "moe_enable_deepep=false"}, "distinct_dispatch", False),
        ({"software": "torchtitan, CUDA graphs"}, "gap", 2e-6),
        ({"software": "torchtitan"}, "uneven_ring", True),
        ({"software": "torchtitan, PyTorch 2.5"}, "uneven_ring", True),
        ({"software": "torchtitan, PyTorch 2.8"}, "uneven_ring", False),
        ({"software": "torchtitan", "notes": "load-balanced CP"}, "uneven_ring", False),
        ({"software": "NeMo 24.07, CUDA graphs"}, "gap", 2e-6),
        ({"software": "torchtitan without CUDA graphs"}, "gap", 8.2e-6),
        ({"software": "torchtitan", "notes": "cuda_graph=False"}, "gap", 8.2e-6),
        ({"software": "torchtitan, CUDA graphs off"}, "gap", 8.2e-6),
    ],
)
def test_traffic_that_a_row_says_is_hidden_or_not(cells, field, value):
    cells = {"software": "NeMo 24.07"} | cells
    assert getattr(build_scenario(run(**cells)).problem.calibration, field) == value
    as_asked = build_scenario(run(**cells), "fitted+megatron").problem.calibration  # by whoever scores
    assert as_asked == build_scenario(run(software="NeMo 24.07"), "fitted+megatron").problem.calibration


@pytest.mark.parametrize("shared", ["DDP", "dist-opt"])
def test_a_step_is_slower_where_gradients_wait(shared):
    cells = {"n_chips": 64, "global_batch_seqs": 64, "fsdp_or_zero_stage": shared, "software": "NeMo 24.07"}
    hidden, late = (predict_training(run(**cells, overlap=words)) for words in ("gradients on", "gradients off"))
    assert late.expected > 1.02 * hidden.expected


@pytest.mark.parametrize("cells", [{"overlap": "tensor maybe"}, {"overlap": "everything on"}, {"dispatcher": "pigeon"}])
def test_words_of_traffic_without_a_meaning_are_refused(cells):
    with pytest.raises(MeshwiseError, match="is not understood; expected"):
        build_scenario(run(**cells))


@pytest.mark.parametrize(
    ("words", "static"),
    [
        ("burst of 1000 prompts", False),
        ("1000 requests at once, after 10 warm-up requests", False),
        ("closed loop, 64 clients", False),
        ("Poisson arrivals at 4 req/s", False),
        ("request-rate=inf", False),
        ("continuous batching with chunked prefill", False),
        ("in-flight batching, max concurrency 64", False),
        ("offline throughput", None),
        ("online serving, prefix caching off", None),
        ("single request, 2 warmup iterations", True),
    ],
)
def test_protocols_of_benchmarks(words, static):
    assert parse_mode(words) == (static, None)


def test_megatron_sums_gradients_of_inputs_beside_those_of_weights_since_2022():
    cells = {"chip": "a100-sxm-80gb", "software": "Megatron-LM", "tp": 4, "sp": 1, "measured_value": 60.0}
    before, since, denied = (
        build_scenario(run(**cells, year=year, notes=notes)).problem.calibration.beside_sums
        for year, notes in ((2021, ""), (2022, ""), (2022, "--no-async-tensor-model-parallel-allreduce"))
    )
    assert (before, since, denied) == (False, True, False)


@pytest.mark.parametrize("year", [2023, 2025])
def test_engines_of_deepspeed_gather_new_weights_after_the_update(year):
    cells = {"fsdp_or_zero_stage": "ZeRO-2", "year": year, "measured_value": 60.0}
    engine, plain = (
        build_scenario(run(**cells, software=s)).problem.calibration for s in ("DeepSpeed", "PyTorch FSDP")
    )
    assert "weights" in engine.late_once
    assert "weights" not in plain.late_once
    assert engine.elementwise_passes == plain.elementwise_passes


@pytest.mark.parametrize(
    ("software", "year", "stage"),
    [
        ("DeepSpeed", 2025, 2),
        ("DeepSpeed", 2023, 1),
        ("DeepSpeed 0.16", 2025, 2),
        ("PyTorch 2.1, DeepSpeed v0.12.3", 2024, 1),
        ("deepspeed==0.12.4", 2023, 2),
        ("DeepSpeed 0.35B", 2025, 2),
        ("DeepSpeed 0.16, use_multi_rank_bucket_allreduce=false", 2025, 1),
        ("PyTorch FSDP", 2025, 0),
    ],
)
def test_releases_of_deepspeed_that_sum_gradients_on_all_replicas(software, year, stage):
    """Under stage 1 of ZeRO all, under stage 2 since release 0.12.4."""
    cells = {"fsdp_or_zero_stage": "ZeRO-2", "software": software, "year": year, "measured_value": 60.0}
    assert build_scenario(run(**cells)).problem.calibration.whole_sums == stage


def test_a_loss_in_chunks_holds_few_logits():
    cells = {"measured_metric": "peak_memory", "measured_value": 60.0, "unit": "GiB", "micro_batch": 4, "dtype": "bf16"}
    cells |= {"fsdp_or_zero_stage": "FSDP", "recompute": "full", "software": "torchtitan"}
    plain, chunked = (predict_training(run(**cells, notes=n)) for n in ("", "chunked cross-entropy"))
    assert plain.memory["logits_and_loss"] > 4 * 2**30
    assert chunked.layout.loss == "chunked"
    assert chunked.memory["logits_and_loss"] < 1.5 * 2**30
    assert predict_training(run(**cells, notes="no chunked cross-entropy")).memory == plain.memory


PIPELINE = {"n_chips": 64, "tp": 4, "pp": 4, "dp": 4, "micro_batch": 1, "global_batch_seqs": 64, "dtype": "bf16"}


@pytest.mark.parametrize(
    ("cells", "schedule", "pieces"),
    [
        ({"vpp": 5}, "interleaved", 5),
        ({"notes": "1F1B (non-interleaved)"}, "1f1b", 1),
        ({"notes": "GPipe"}, "gpipe", 1),
        ({"software": "Megatron-LM + zero bubble (ZB-H1)"}, "zb-h1", 1),
        ({"notes": "ZBV schedule", "vpp": 2}, "zb-v", 1),
        ({"software": "HAI-LLM with DualPipe"}, "dualpipe", 1),
        ({"notes": "DualPipeV", "vpp": 2}, "dualpipe-v", 1),
        ({"notes": "interleaved zero bubble", "vpp": 5}, "interleaved", 5),
    ],
)
def test_orders_of_a_pipeline(cells, schedule, pieces):
    choices = build_scenario(run(**(PIPELINE | {"software": "Megatron-LM"} | cells))).layout.choices
    assert (choices["schedule"], choices["virtual_stages"]) == (schedule, pieces)


def test_what_a_schedule_cannot_run_is_refused_by_its_own_reason():
    with pytest.raises(MeshwiseError, match="6 microbatches do not divide by 4 stages"):
        build_scenario(run(**(PIPELINE | {"vpp": 5, "global_batch_seqs": 24})))


@pytest.mark.parametrize(
    ("cells", "axis", "method"),
    [
        ({}, "context", "ring"),
        ({"notes": "all-gather CP"}, "context", "gather"),
        ({"notes": "cp_comm_type=all_gather"}, "context", "gather"),
        ({"software": "DeepSpeed Ulysses"}, "ulysses", None),
        ({"notes": "cp_comm_type=a2a"}, "ulysses", None),
        ({"chip": "v5p", "software": "MaxText"}, "context", "gather"),
    ],
)
def test_how_positions_are_split(cells, axis, method):
    layout = build_scenario(run(**({"n_chips": 8, "cp": 4, "dp": 2, "software": "Megatron-LM"} | cells))).layout
    assert (layout.sizes[axis], layout.choices.get("context_method")) == (4, method)


@pytest.mark.parametrize(
    ("cells", "calibration"),
    [
        ({"software": "Megatron-LM", "year": 2023, "chip": "a100-sxm-80gb"}, "fitted+megatron-2021"),
        ({"software": "Megatron-LM", "year": 2023, "chip": "a100-sxm-80gb", "notes": "FlashAttention"}, "fitted"),
        ({"software": "NeMo 23.08", "year": 2023}, "fitted"),
        ({"software": "metaseq", "year": 2022, "chip": "a100-sxm-80gb"}, "fitted+megatron-2021"),
        ({"software": "Hugging Face accelerate", "year": 2022, "chip": "a100-sxm-80gb"}, "fitted+eager-2023"),
        ({"software": "EasyLM"}, "fitted+xla"),
    ],
)
def test_what_software_of_a_year_was(cells, calibration):
    assert build_scenario(run(**cells)).problem.calibration.name == calibration


@each(
    "words, gb_per_s",
    [
        ("EFA 3200 Gbps per node", 400),
        ("3.2 Tb/s InfiniBand per node", 400),
        ("400 Gb/s per GPU, NVLink 900 GB/s", 400),
        ("A100 40GB, 400 Gb/s per node (EFA)", 50),
        ("A3 Mega (1,800 Gbps per node)", 225),
        ("A100 (1600 Gbps RoCE)", 200),
        ("8 x ConnectX-7 400 Gb/s", 400),
        ("A100 (100 Gb/s Ethernet)", None),
        ("H100 96GB SXM (500 W, HBM2e 2.4 TB/s, 8 per node)", None),
        ("8x H100 SXM, 3200 Gbps", 400),
        ("64x H100 80GB SXM", None),
        ("8x MI300X 192GB", None),
        ("NVLink 7.2 Tb/s per GPU, IB 400 Gb/s per GPU", 400),
        ("NVLink 3.6 Tb/s", None),
        ("400 gb/s per gpu", 400),
        ("EFA 400 Gbps", 50),
        ("p4d.24xlarge", 50),
        ("GCP a3-megagpu-8g", 200),
        ("A3 High", 100),
        ("8x HDR IB", 200),
        ("2x NDR per node", 100),
        ("HDR InfiniBand 200 Gb/s x8", 200),
        ("200Gbps x 4 NICs", 100),
        ("4x OPA 100", 50 * 0.405 / 0.84),
    ],
)
def test_networks_as_sources_write_them(words, gb_per_s):
    found = node_bandwidth(words)
    assert found == (gb_per_s and pytest.approx(gb_per_s * 1e9))


@pytest.mark.parametrize(
    ("words", "software", "remat"),
    [
        ("selective AC", "NeMo", "recompute:core_attn"),
        ("SAC", "torchtitan", "save:q+v+gate+down+attention"),
        ("core attention", "NeMo", "recompute:core_attn"),
        ("checkpoint_dots", "JAX", "matmuls"),
        ("save_nothing", "JAX", "full"),
        ("per-op SAC", "torchtitan", "save:q+v+gate+down+attention"),
    ],
)
def test_short_words_for_recomputation(words, software, remat):
    assert build_scenario(run(recompute=words, software=software)).layout.choices["remat"] == remat


def test_a_share_of_recomputation_is_not_all_of_it():
    with pytest.raises(MeshwiseError, match="'25%' is not understood"):
        build_scenario(run(recompute="25%"))


@pytest.mark.parametrize(
    ("cells", "offload"),
    [
        ({"fsdp_or_zero_stage": "ZeRO-3 offload"}, ("optimizer",)),
        ({"fsdp_or_zero_stage": "ZeRO stage 3, optimizer and parameter offload"}, ("optimizer", "parameters")),
        (
            {"fsdp_or_zero_stage": "ZeRO-3 + CPU offload", "recompute": "full + CPU offload"},
            ("optimizer", "activations"),
        ),
        ({"fsdp_or_zero_stage": "ZeRO-3, no offload", "recompute": "full"}, None),
        ({"fsdp_or_zero_stage": "FSDP, cpu_offload=False", "recompute": "full"}, None),
        ({"fsdp_or_zero_stage": "ZeRO-3, offload: none", "recompute": "full"}, None),
        ({"fsdp_or_zero_stage": "ZeRO-3 non-offloaded", "recompute": "full"}, None),
    ],
)
def test_state_in_the_hosts_memory(cells, offload):
    assert build_scenario(run(**cells, software="DeepSpeed")).layout.choices.get("offload") == offload


def test_cells_that_say_nothing_are_blank():
    header = "chip,model,n_chips,tp,recompute,software,global_batch_seqs,seq_len,measured_metric,measured_value,unit"
    cells = "h100,llama-3-8b,8,N/A,unknown,-,64,8192,step_time,20,s"
    (found,) = read_rows(f"{header}\n{cells}\n", "here", TrainingRun)
    assert (found.tp, found.recompute, found.software) == (None, "", "")
