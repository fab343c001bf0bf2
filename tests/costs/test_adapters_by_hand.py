"""Memory, traffic and time of LoRA and QLoRA on LLaMA-3-70B, against numbers on paper."""

import math

import pytest

from meshwise.costs.calibration import IDENTITY
from meshwise.costs.estimate import estimate_training
from meshwise.costs.explain import work_out
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import Layout
from meshwise.sharding.placed import Purpose

D, F, NH, KH, V, L = 8192, 28672, 8192, 1024, 128256, 80
PROJECTIONS = L * (2 * D * NH + 2 * D * KH + 3 * D * F)
PARAMETERS = PROJECTIONS + L * 2 * D + 2 * V * D + D
#: Inputs and outputs of q, k, v, o, gate, up, down, over which an adapter's rank is spread.
INTO, OUT = 3 * D + NH + 2 * D + F, NH + 2 * KH + D + 2 * F + D
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)


def problem(fine_tune="full", *, model="llama-3-70b", on="h200:8", length=2048, sequences=8, **changes):
    job = TrainingJob(
        batch_tokens=str(sequences * length),
        seq_len=str(length),
        fine_tune=fine_tune,
        **{"precision": "book", **changes},
    )
    return TrainingProblem(load_model(model), job, parse_cluster(on), IDENTITY)


def estimate(p, **choices):
    sizes = {a: n for a, n in choices.items() if a in ("data", "fsdp", "tensor")}
    return estimate_training(
        p, Fabric.of(p.cluster), Layout(**choices, wires=tuple((a, (n,)) for a, n in sizes.items()))
    )


def test_state_of_lora_is_the_frozen_model_and_fourteen_bytes_an_adapter_parameter():
    rank = 16
    m = estimate(problem("lora:rank=16"), data=8, remat="full", zero=0).memory
    adapters = L * rank * (INTO + OUT)
    assert m["parameters"] == 2 * (PARAMETERS + adapters)
    assert m["gradients"] == 2 * adapters
    assert m["optimizer"] == 8 * adapters
    mixed = estimate(problem("lora:rank=16", precision="mixed"), data=8, remat="full", zero=0).memory
    assert mixed["master_copies"] == mixed["gradients"] == 4 * adapters
    # fsdp splits the residual width: of A where it comes in, of B where it goes out.
    split = L * rank * (5 * D + 2 * D)
    whole = adapters - split
    assert estimate(problem("lora:rank=16"), fsdp=8, remat="full").memory["optimizer"] == 8 * (split / 8 + whole)


def test_qlora_of_seventy_billion_fits_in_48_gb():
    # One sequence of 512 tokens on one 48 GB GPU, as in Dettmers et al. 2023 for 65 billion parameters.
    p = problem("qlora:rank=16", on="h200:1", length=512, sequences=1)
    m = estimate(p, data=1, remat="full").memory
    adapters = L * 16 * (INTO + OUT)
    assert m["parameters"] == pytest.approx(NF4 * PROJECTIONS + 2 * (PARAMETERS - PROJECTIONS + adapters), rel=1e-12)
    assert (m["total"] - m["reserve"]) < 48e9 < estimate(problem("lora:rank=16", on="h200:1", length=512, sequences=1),
                                                        data=1, remat="full").memory["parameters"]  # fmt: skip
    int4 = estimate(problem("qlora:rank=16,storage=int4", on="h200:1", length=512, sequences=1), data=1, remat="full")
    expected = (0.5 + 2 / 128) * PROJECTIONS + 2 * (PARAMETERS - PROJECTIONS + adapters)
    assert int4.memory["parameters"] == pytest.approx(expected, rel=1e-12)


def test_widened_weights_are_not_kept():
    kept = [estimate(problem(f), fsdp=8, remat="none").memory["activations"] for f in ("lora", "qlora")]
    assert kept[0] == kept[1]


def test_adapters_keep_their_narrow_middle_alone():
    # Beside what the full backward pass reads, x A of seven projections; nothing of the frozen branch or the sum.
    full = estimate(problem(), fsdp=8, remat="none").memory["activations"]
    lora = estimate(problem("lora:rank=16"), fsdp=8, remat="none").memory["activations"]
    assert lora - full == L * 2048 * 7 * 16 * 2
    saved = [estimate(problem(f), fsdp=8, remat="matmuls").memory["activations"] for f in ("full", "lora:rank=16")]
    assert saved[1] - saved[0] == L * 2048 * 7 * 16 * 2


def test_a_weight_is_widened_each_time_it_is_multiplied():
    p = problem("qlora", on="h200:8")
    w = work_out(p, Fabric.of(p.cluster), Layout(fsdp=8, remat="none", wires=(("fsdp", (8,)),)))
    layer = next(b for b in w.blocks if b.name == "layer")
    widened = [o for o in layer.operations if o.name == "widen.w_gate"]
    assert [o.when for o in widened] == ["forward", "recompute"]
    assert all(o.num_bytes == pytest.approx(D * F * (NF4 + 2)) for o in widened)


def test_only_adapters_are_reduced_and_four_bits_gathered():
    def sent(fine_tune, purpose):
        p = problem(fine_tune)
        w = work_out(p, Fabric.of(p.cluster), Layout(fsdp=8, remat="full", wires=(("fsdp", (8,)),)))
        rows = [c for c in w.collectives if c.block == "layer" and c.purpose is purpose and c.when != "forward"]
        return math.fsum(c.num_bytes for c in rows)

    into = 16 * 7 * D  # of A and of B where fsdp splits them; the others are reduced once a step
    assert sent("lora:rank=16", Purpose.GRADIENTS) == 2 * 16 * (INTO + OUT)
    assert sent("lora:rank=16", Purpose.WEIGHTS) == 2 * (PROJECTIONS / L + 2 * D + into)
    assert sent("qlora:rank=16", Purpose.WEIGHTS) == pytest.approx(NF4 * PROJECTIONS / L + 2 * (2 * D + into))


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("layout", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}, {"data": 8, "zero": 1}])
def test_adapters_take_less_than_training_everything_and_add_up(model, layout):
    full, lora, qlora = (estimate(problem(f, model=model), remat="none", **layout) for f in ("full", "lora", "qlora"))
    for e in (lora, qlora):
        assert sum(e.terms.values()) == pytest.approx(e.step_time.expected, rel=1e-12)
        assert sum(v for n, v in e.memory.items() if n != "total") == e.memory["total"]
        assert e.step_time.lower >= e.model_flops / (8 * e.peak_flops_per_s) * (1 - 1e-9)
        assert 2 / 3 * full.resources["compute"] < e.resources["compute"] < 0.75 * full.resources["compute"]
        assert 0.6 * full.model_flops < e.model_flops < 0.75 * full.model_flops
        assert e.step_time.expected < full.step_time.expected
    # Widening costs time on the chip; where weights are gathered, four bits save more of it than that.
    work = [sum(e.terms[n] for n in ("forward", "backward", "recompute")) for e in (lora, qlora)]
    assert work[0] < work[1]
    assert "fsdp" not in layout or qlora.resources["fsdp"] < lora.resources["fsdp"] / 2
    assert qlora.memory["parameters"] < lora.memory["parameters"]


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "adamw-8bit"])
def test_optimizers_keep_states_of_adapters_alone(optimizer):
    state = estimate(problem("lora", optimizer=optimizer), data=8, zero=0, remat="full").memory["optimizer"]
    adapters = L * 16 * (INTO + OUT)
    sums = L * (INTO + OUT + 2 * 7 * 16)
    expected = {"adafactor": 4 * sums, "muon": 4 * adapters, "adamw-8bit": 2 * (1 + 4 / 256) * adapters}
    assert state == pytest.approx(expected[optimizer], rel=1e-12)
