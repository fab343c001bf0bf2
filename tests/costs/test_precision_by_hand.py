"""Bytes of published training recipes per parameter, and what narrow formats make faster, against numbers on paper."""

import math

import pytest

from meshwise.core.errors import MeshwiseError
from meshwise.core.tensors import Convert, Einsum
from meshwise.costs.calibration import IDENTITY
from meshwise.costs.estimate import estimate_training, evaluate_layout, layout_candidate
from meshwise.costs.explain import work_out
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step import Ledger
from meshwise.hardware import parse_cluster
from meshwise.jobs import PRECISIONS, TrainingJob
from meshwise.models import load_model
from meshwise.sharding import CollectiveKind
from meshwise.sharding.layout import Layout

T = 4096
D, F, NH, KH, V, L = 4096, 14336, 4096, 1024, 128256, 32  # LLaMA-3-8B
PROJECTIONS = L * (2 * D * NH + 2 * D * KH + 3 * D * F)
PARAMETERS = PROJECTIONS + L * 2 * D + 2 * V * D + D


def problem(precision="bf16", optimizer="adamw", *, model="llama-3-8b", on="h100:8", sequences=8):
    job = TrainingJob(batch_tokens=str(sequences * T), seq_len=str(T), precision=precision, optimizer=optimizer)
    return TrainingProblem(load_model(model), job, parse_cluster(on), IDENTITY)


def layout(**choices):
    sizes = {a: n for a, n in choices.items() if a in ("data", "fsdp", "tensor")}
    return Layout(**choices, wires=tuple((a, (n,)) for a, n in sizes.items()))


def estimate(precision="bf16", optimizer="adamw", *, model="llama-3-8b", on="h100:8", sequences=8, **choices):
    p = problem(precision, optimizer, model=model, on=on, sequences=sequences)
    return estimate_training(p, Fabric.of(p.cluster), layout(**(choices or {"fsdp": 8, "remat": "full"})))


STATE = ("parameters", "gradients", "master_copies", "optimizer")


def state(*args, **choices):
    m = estimate(*args, **choices).memory
    return sum(m[name] for name in STATE)


def test_megatron_mixed_keeps_eighteen_bytes_of_which_zero_shares_out_twelve():
    # Weights 2, gradients 4, master 4, moments 8: 18; a distributed optimizer over dp leaves 6 + 12 / dp.
    assert state("mixed", fsdp=8, remat="full") == PARAMETERS * 18 / 8
    assert state("mixed", data=8, zero=0, remat="full") == PARAMETERS * 18
    assert state("mixed", data=8, zero=1, remat="full") == PARAMETERS * (6 + 12 / 8)


@pytest.mark.parametrize(
    ("precision", "narrow", "wide"),
    [
        # projections: weights with their scales + gradients + master + moments; the rest is stored in bf16
        ("fp8", 1 + 4 + 4 + 8, 18),
        ("fp8-current", 1 + 4 + 4 + 8, 18),
        ("fp8-block", 1 + 4 / 128**2 + 4 + 4 + 4, 2 + 4 + 4 + 4),  # DeepSeek-V3: bf16 moments
        ("int8", 18, 18),
        ("mxfp8,gradients=bf16", 2 * (1 + 1 / 32) + 2 + 4 + 8, 16),  # blocks of both directions
        ("nvfp4", 0.5 + 1 / 16 + 4 + 4 + 8, 18),
    ],
)
def test_bytes_of_a_parameter(precision, narrow, wide):
    expected = (PROJECTIONS * narrow + (PARAMETERS - PROJECTIONS) * wide) / 8
    assert state(precision, on="b200:8") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        ("adamw", 8),
        ("lion", 4),
        ("momentum", 4),
        ("sgd", 0),
        ("adamw-8bit", 2 * (1 + 4 / 256)),
        ("lion-8bit", 1 + 4 / 256),
    ],
)
def test_bytes_of_optimizer_state(optimizer, moments):
    assert estimate("bf16", optimizer).memory["optimizer"] == pytest.approx(PARAMETERS * moments / 8, rel=1e-12)


def test_moments_may_have_two_formats():
    assert estimate("mixed,moments=bf16,second_moments=fp16").memory["optimizer"] == PARAMETERS * 4 / 8
    assert estimate("mixed,second_moments=bf16").memory["optimizer"] == PARAMETERS * 6 / 8
    halved = estimate("mixed,second_moments=bf16", "adafactor").memory["optimizer"]
    assert halved == estimate("mixed", "adafactor").memory["optimizer"] / 2


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix():
    sums = L * sum((D + NH, D + KH, D + KH, NH + D, D + F, D + F, F + D)) + 2 * (V + D)
    vectors = (2 * L + 1) * D
    whole = estimate("bf16", "adafactor", tensor=1, data=8, zero=0, remat="full").memory
    assert whole["optimizer"] == (sums + vectors) * 4
    # Where fsdp splits D, each chip still keeps the sums over D whole.
    shared = estimate("bf16", "adafactor").memory
    other = L * sum((NH, KH, KH, NH, F, F, F)) + 2 * V
    assert shared["optimizer"] == ((sums - other + vectors) / 8 + other) * 4


def test_muon_keeps_one_moment_of_matrices_and_two_of_the_rest():
    rest = PARAMETERS - PROJECTIONS
    assert estimate("bf16", "muon").memory["optimizer"] == (PROJECTIONS * 4 + rest * 8) / 8


def newton_schulz(rows, columns):
    m, n = sorted((rows, columns))
    return 5 * (2 * m * n * m + 2 * m**3 + 2 * m * m * n)


def test_muon_computes_five_iterations_of_every_matrix_dealt_out():
    shapes = [(D, NH), (D, KH), (D, KH), (NH, D), (D, F), (D, F), (F, D)]
    total = L * sum(newton_schulz(*shape) for shape in shapes)
    for choices, ways in (
        ({"fsdp": 8}, 8),
        ({"data": 8, "zero": 0}, 1),
        ({"data": 8, "zero": 1}, 8),
        ({"tensor": 8}, 8),
    ):
        e = estimate("bf16", "muon", remat="full", **choices)
        lion = estimate("bf16", "lion", remat="full", **choices)
        seconds = e.resources["compute"] - lion.resources["compute"]
        assert seconds == pytest.approx(total / ways / e.peak_flops_per_s, rel=1e-6)
        assert e.terms["optimizer"] > lion.terms["optimizer"] + seconds


def test_muon_never_shares_one_matrix():
    p = problem("bf16", "muon", on="h100:4096", sequences=4096)
    e = estimate_training(p, Fabric.of(p.cluster), Layout(fsdp=4096, remat="full", wires=(("fsdp", (8, 32, 16)),)))
    assert e.terms["optimizer"] >= newton_schulz(D, F) / e.peak_flops_per_s


def test_muon_brings_its_shards_together_and_back():
    p = problem("bf16", "muon")
    fabric = Fabric.of(p.cluster)
    rows = [
        c for c in work_out(p, fabric, layout(fsdp=8, remat="full")).collectives if c.kind is CollectiveKind.ALL_TO_ALL
    ]
    # Counted over the group: bf16 momentum of a layer, there and back.
    assert [(c.num_bytes, c.count_per_pass) for c in rows] == [(2 * PROJECTIONS / L, 2)]
    assert not [
        c
        for c in work_out(p, fabric, layout(data=8, zero=0, remat="full")).collectives
        if c.kind is CollectiveKind.ALL_TO_ALL
    ]


def test_the_update_moves_what_it_holds():
    def moved(precision, optimizer):
        p = problem(precision, optimizer)
        ledger = Ledger()
        evaluate_layout(p, Fabric.of(p.cluster), layout(fsdp=8, remat="full"), ledger)
        return ledger.optimizer_bytes * 8

    assert moved("bf16", "adamw") == PARAMETERS * (2 + 2 * 2 + 2 * 8)
    assert moved("mixed", "adamw") == PARAMETERS * (4 + 2 * 4 + 2 * 2 + 2 * 8)
    assert moved("bf16", "adamw-8bit") == pytest.approx(PARAMETERS * (2 + 2 * 2 + 4 * (1 + 4 / 256)))
    assert moved("bf16", "muon") == PROJECTIONS * (2 + 4 + 8 + 4) + (PARAMETERS - PROJECTIONS) * (2 + 4 + 16)
    narrow, rest = 4 + 8 + 2 * 1 + 16, 4 + 8 + 4 + 16
    assert moved("fp8", "adamw") == PROJECTIONS * narrow + (PARAMETERS - PROJECTIONS) * rest


def test_kept_inputs_of_matmuls_are_narrow():
    # x, q, k, v, attention, the middle, gate, up in bf16; the inputs of q, o, gate and down in fp8, norms not:
    # where bf16 keeps x.attn, x.mlp and act, fp8 keeps one byte of each, and one of attention besides.
    wide = D + 2 * NH + 2 * KH + D + 2 * F
    narrow = D + D + F + NH
    kept = estimate("fp8", fsdp=8, remat="none").memory["activations"]
    assert kept == L * T * (2 * wide + narrow)
    block = estimate("fp8-block", fsdp=8, remat="none").memory["activations"]
    assert block == pytest.approx(L * T * (2 * wide + narrow * (1 + 4 / 128)), rel=1e-12)


@pytest.mark.parametrize("precision", ["fp8", "fp8-current", "fp8-block", "int8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_a_narrow_format_never_gains_more_than_its_rate(precision, model):
    choices = {"fsdp": 4, "tensor": 2, "remat": "full"}
    wide = estimate("mixed", model=model, on="b200:8", **choices)
    e = estimate(precision, model=model, on="b200:8", **choices)
    ratio = e.peak_flops_per_s / wide.peak_flops_per_s
    assert ratio == (4 if precision == "nvfp4" else 2)
    for mine, other in zip(
        (e.step_time.lower, e.step_time.expected, e.step_time.upper),
        (wide.step_time.lower, wide.step_time.expected, wide.step_time.upper),
        strict=True,
    ):
        assert other / ratio < mine <= other
    assert e.step_time.expected < wide.step_time.expected
    assert sum(e.terms.values()) == pytest.approx(e.step_time.expected, rel=1e-12)
    assert sum(v for n, v in e.memory.items() if n != "total") == e.memory["total"]
    assert e.step_time.lower >= e.model_flops / (8 * e.peak_flops_per_s)


def test_matrix_units_are_busy_by_the_rate_of_each_matmul():
    e = estimate("fp8", fsdp=8, remat="none")
    chip = parse_cluster("h100:8").chip
    fp8, bf16 = chip.flops_per_s["fp8"], chip.flops_per_s["bf16"]
    attention = 2 * 2 * NH * (T + 1) / 2 * 3.5  # scores and values, of which the backward pass makes 2.5 times
    expected = T * (6 * PROJECTIONS / fp8 + (6 * V * D + L * attention) / bf16)
    assert e.resources["compute"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_only_projections_and_experts_are_narrow(precision):
    program = problem(precision, model="mixtral-8x7b").train_program()
    recipe = PRECISIONS[precision].recipe
    narrow = {op.name for b in program for op in b.ops if isinstance(op, Einsum) and op.narrow}
    expected = {"q", "k", "v", "o", "expert.gate", "expert.up", "expert.down"}
    assert narrow == (expected if recipe else set())
    converted = {op.inputs[0].name for b in program for op in b.ops if isinstance(op, Convert)}
    tokens = "x.mlp" if recipe and recipe.dispatches else "slots"
    assert converted == ({"x.attn", "attention", "expert.act", tokens} if recipe else set())


def test_tokens_travel_to_experts_narrow_and_back_wide():
    p = problem("fp8-block", model="mixtral-8x7b")
    (layer,) = (b for b in p.train_program() if b.role == "layer")
    by_name = {op.name: op for op in layer.ops}
    assert by_name["dispatch"].output.dtype == "fp8"
    assert by_name["combine"].output.dtype is None
    structure, _ = layout_candidate(p.model, layout(fsdp=8, remat="full"))
    placed = next(b for b in p.lowered.training(structure) if b.placed.block is layer).placed
    back = {i.op.name: i.op for i in placed.backward if hasattr(i, "op")}
    assert back["dcombine"].output.dtype == "fp8"
    assert back["ddispatch"].output.dtype is None


def test_weights_are_gathered_and_gradients_reduced_as_the_roles_say():
    def bytes_of(precision, kind):
        p = problem(precision)
        rows = work_out(p, Fabric.of(p.cluster), layout(fsdp=8, remat="full")).collectives
        return math.fsum(c.num_bytes for c in rows if c.block == "layer" and c.kind is kind and c.when == "backward")

    projections, norms = PROJECTIONS / L, 2 * D
    assert bytes_of("mixed", CollectiveKind.ALL_GATHER) == 2 * (projections + norms)
    assert bytes_of("fp8", CollectiveKind.ALL_GATHER) == projections + 2 * norms
    assert bytes_of("int8", CollectiveKind.ALL_GATHER) == 2 * (projections + norms)
    assert bytes_of("fp8", CollectiveKind.REDUCE_SCATTER) == 4 * (projections + norms)
    assert bytes_of("fp8,reductions=bf16", CollectiveKind.REDUCE_SCATTER) == 2 * (projections + norms)
    assert estimate("fp8,reductions=bf16").memory["gradients"] == estimate("fp8").memory["gradients"]


def test_a_conversion_reads_and_writes_what_its_recipe_says():
    def convert_bytes(precision, on="b200:8"):
        p = problem(precision, on=on)
        blocks = work_out(p, Fabric.of(p.cluster), layout(fsdp=8, remat="full")).blocks
        layer = next(b for b in blocks if b.name == "layer")
        return next(o.num_bytes for o in layer.operations if o.name == "convert.x.attn") / (T * D)

    assert convert_bytes("fp8") == 2 + 2
    assert convert_bytes("fp8-current") == 2 * 2 + 2
    assert convert_bytes("fp8-block") == 2 + 2 * (1 + 4 / 128)
    assert convert_bytes("mxfp8") == 2 + 2 * (1 + 1 / 32)
    assert convert_bytes("nvfp4") == 2 * 2 + 2 * (0.5 + 1 / 16)
    assert convert_bytes("int8", "h100:8") == 2 * 2 + 1


@pytest.mark.parametrize(
    ("precision", "on", "words"),
    [
        (
            "fp8",
            "v5p:2x2x1",
            r"^precision fp8: needs fp8 matrix units, TPU v5p has bf16, int8, int4, fp32; use another",
        ),
        ("mxfp8", "h100:8", r"^precision mxfp8: needs fp4 matrix units, H100 SXM has bf16"),
        ("nvfp4", "mi355x:8", r"^precision nvfp4: a format of nvidia chips, found "),
        ("int8", "tpu7x:2x2x1", r"^precision int8: needs int8 matrix units"),
    ],
)
def test_a_chip_without_the_format_is_refused_by_name(precision, on, words):
    p = problem(precision, on=on)
    with pytest.raises(MeshwiseError, match=words):
        evaluate_layout(p, Fabric.of(p.cluster), Layout(fsdp=p.cluster.num_chips, wires=(("fsdp", tuple(
            d.size for d in Fabric.of(p.cluster).dimensions)),)))  # fmt: skip


def test_a_rate_by_role_needs_no_recipe():
    # "compute" alone: matmuls with weights at the rate of fp8, nothing converted.
    e, wide = estimate("bf16,compute=fp8"), estimate("bf16")
    assert e.memory == wide.memory
    assert wide.step_time.expected / 2 < e.step_time.expected < wide.step_time.expected
