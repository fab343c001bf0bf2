"""The runs that the chapter on GPUs names, through the public API: DeepSeek-V3, LLaMA-3-405B, the rows of Megatron-LM.

What was published, what the chapter says of it, and what meshwise makes of the same layout.
"""

import pytest

import meshwise
from meshwise.costs.rules import find_rule

#: DeepSeek-V3 technical report: 2.664M H800 hours for 14.8T tokens, batches of 15,360 sequences of 4,096.
DEEPSEEK = {"on": "h800:2048", "batch_tokens": 15360 * 4096, "seq_len": 4096, "precision": "fp8-block"}
DEEPSEEK_SECONDS = 2.664e6 * 3600 / 2048 * (15360 * 4096 / 14.8e12)
#: Section 3.1: 64-way experts over 8 nodes, 16-way pipeline, 2-way ZeRO-1, DualPipe.
DEEPSEEK_LAYOUT = "ep=64,pp=16,dp=2,zero=1,fully_sharded=off,schedule=dualpipe"

#: The Llama 3 Herd of Models, table 4: chips, tensor, context, stage, data, sequence length, MFU. 16M tokens a batch,
#: bf16 with fp32 gradients, optimizer state shared out; interleaved schedule; keys and values gathered over context.
LLAMA = (
    (8192, "tp=8,pp=16,dp=64", 8192, 0.43),
    (16384, "tp=8,pp=16,dp=128", 8192, 0.41),
    (16384, "tp=8,cp=16,pp=16,dp=8,context_method=gather,fully_sharded=off", 131072, 0.38),
)

#: C and W of an H100 as the chapter rounds them.
H100 = {"C": 9.9e14, "W_node": 4e11}
#: Rows of Megatron-LM's table of hyperparameters: parameters, chips, sequences, ways of tensor x pipeline.
MEGATRON = {"16B": (192, 192, 1), "70B": (768, 384, 16), "314B": (3072, 1536, 64)}


@pytest.fixture(scope="module")
def deepseek():
    layout = f"{DEEPSEEK_LAYOUT},micro_batch=1,num_microbatches=120"
    return meshwise.estimate_train("deepseek-v3", layout=layout, batch_slack=0, **DEEPSEEK).plans[0]


def test_deepseek_v3_fits_as_it_was_trained(deepseek):
    assert deepseek.layout.sequences == 15360
    assert deepseek.estimate.fits


def test_deepseek_v3_takes_the_time_that_was_reported(deepseek):
    assert pytest.approx(19.91, abs=0.01) == DEEPSEEK_SECONDS
    time = deepseek.estimate.step_time
    assert time.lower < DEEPSEEK_SECONDS < time.upper
    assert time.expected == pytest.approx(DEEPSEEK_SECONDS, rel=0.15)


def test_deepseek_v3_needs_its_experts_spread_out(deepseek):
    """Experts left to FSDP take more than plans may fill, and six times as long; to tensor parallelism, longer."""
    gathered = meshwise.estimate_train("deepseek-v3", layout="fsdp=-1", **DEEPSEEK).plans[0].estimate
    assert sum(gathered.memory.values()) > 0.9 * gathered.hbm_capacity
    assert gathered.step_time.expected > 6 * deepseek.estimate.step_time.expected
    split = "tp=8,pp=16,dp=-1,zero=1,schedule=dualpipe,micro_batch=1,num_microbatches=960"
    tensor = meshwise.estimate_train("deepseek-v3", layout=split, batch_slack=0, **DEEPSEEK).plans[0].estimate
    assert tensor.step_time.expected > deepseek.estimate.step_time.expected


# Slow: the whole search over 2,048 chips.
@pytest.mark.slow
def test_deepseek_v3_as_it_was_trained_is_near_the_best_of_all(deepseek):
    """Within a tenth of the best, which spreads experts, too."""
    found = meshwise.plan_train("deepseek-v3", batch_slack=0, **DEEPSEEK)
    best = found.plans[0]
    tokens = deepseek.layout.sequences * 4096
    assert best.layout.sequences * 4096 == tokens
    assert best.estimate.step_time.expected <= deepseek.estimate.step_time.expected
    assert deepseek.estimate.step_time.expected <= 1.1 * best.estimate.step_time.expected
    assert best.layout.expert > 1


def test_reduction_over_two_replicas_needs_half_the_batch(deepseek):
    """Two-way data parallelism at the spine: 2 / (2 - 1) times the bandwidth, and it is next to nothing of the step."""
    assert find_rule("fsdp-node").value(**H100, X=2) == pytest.approx(find_rule("fsdp-node").value(**H100) / 2)
    assert deepseek.estimate.terms["data"] < 0.01 * deepseek.estimate.step_time.expected


@pytest.mark.parametrize(("chips", "layout", "seq_len", "mfu"), LLAMA)
def test_llama_3_405b_reaches_what_was_published(chips, layout, seq_len, mfu):
    plan = meshwise.estimate_train(
        "llama-3.1-405b",
        on=f"h100:{chips}",
        layout=f"{layout},zero=1,schedule=interleaved",
        batch_tokens="16Mi",
        seq_len=seq_len,
        precision="bf16,gradients=fp32,master=fp32",
        batch_slack=0,
    ).plans[0]
    time = plan.estimate.step_time
    assert plan.estimate.fits
    assert plan.estimate.mfu == pytest.approx(mfu, rel=0.2)
    published = time.expected * plan.estimate.mfu / mfu
    assert time.lower < published


@pytest.mark.parametrize("row", MEGATRON)
def test_rows_of_megatron_lm_are_compute_bound_with_their_model_parallelism(row):
    chips, sequences, ways = MEGATRON[row]
    tokens = find_rule("tokens-per-chip").value(tokens=sequences * 4096, chips=chips)
    need = find_rule("fsdp-node").value(**H100, split=ways)
    assert tokens > need


def test_rows_of_megatron_lm_that_would_be_bound_by_communication():
    """2,048 tokens a chip are too few for data parallelism alone: 70B and 314B, not 16B."""
    alone = find_rule("fsdp-node").value(**H100)
    short = {row for row, (chips, sequences, _) in MEGATRON.items() if sequences * 4096 / chips < alone}
    assert short == {"70B", "314B"}
