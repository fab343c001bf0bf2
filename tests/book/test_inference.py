"""Chapter "All About Transformer Inference": what is counted of a model, rooflines, and floors of a decode step."""

import math

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Attention, Tensor
from meshwise.costs.collectives import collective_time
from meshwise.costs.operation import parse_operation
from meshwise.costs.roofline import critical_size, roofline
from meshwise.costs.rules import find_rule
from meshwise.jobs import ServingLoad
from meshwise.models import CacheKind, KVCache, load_model
from meshwise.sharding import CollectiveKind
from tests.book.book_rows import MATMUL, answered, check, decoder, torus

INT8, BF16 = DType.INT8, DType.BF16

LINEAR = {
    (16, 16): MATMUL,
    (8, 16): parse_operation("bf16[B, D] * int8[D, F] -> bf16[B, F]"),
    (8, 8): parse_operation("int8[B, D] * int8[D, F] -> int8[B, F]"),
}


def critical_batch(row):
    operation = LINEAR[row.inputs.get("bits_param", 16), row.inputs.get("bits_act", 16)]
    return critical_size(operation, "B", {}, row.rates(operation).ridge)


def attention(row, **sizes):
    """Full multi-head attention that reads q, k, v and writes its output once."""
    axes = {"q": "BTNH", "k": "BSKH", "v": "BSKH", "o": "BTNH"}
    q, k, v, o = (Tensor(name, tuple(letters), dtype=BF16) for name, letters in axes.items())
    operation = Attention(name="attention", inputs=(q, k, v), output=o, causal=False)
    shape = {"B": 1, "N": 32, "K": 32, "H": 128, **(sizes or row.sizes)}
    return roofline(operation, shape, row.rates(operation))


def prompt_that_computes(row):
    """The intensity of T queries over T keys grows in proportion to T."""
    assert attention(row, T=200, S=200).intensity == 100 * attention(row, T=2, S=2).intensity
    return row.rates().ridge / attention(row, T=1, S=1).intensity


def cache_of(bytes_per_token):
    return KVCache((CacheKind("layer", 1, int(bytes_per_token)),))


def decode_step(row):
    chip = row.chip()
    return find_rule("decode-step").value(
        B=row["batch"],
        P=row["params"],
        context=row["ctx"],
        kv=cache_of(row["kv_per_token"]).bytes_per_token(INT8),
        C=chip.peak(BF16),
        W_hbm=chip.hbm_bandwidth,
        chips=row["chips"],
        w=INT8.bytes,
    )


def matmuls_of_the_step(row):
    chip = row.chip()
    critical = find_rule("critical-batch").value(C=chip.peak(BF16), W_hbm=chip.hbm_bandwidth, w=INT8.bytes)
    return "compute-bound" if row["batch"] > critical else "memory-bound"


def llama_2_13b(row):
    assert row.model.parameters == load_model("llama-2-13b").parameters
    return row.model


def parts(row, *names):
    counts = llama_2_13b(row).parameters
    return sum(counts.by_part[n] for n in names) if names else counts.total


def cache_of_a_sequence(row):
    return llama_2_13b(row).kv_cache.bytes_per_sequence(row["T"], BF16)


def gqa_factor(row):
    old, new = (decoder(N=40, K=row[k]).kv_cache_bytes_per_token() for k in ("K_old", "K_new"))
    return old / new


def fsdp_decode(row):
    """Gathering a layer's weights, as FSDP would in every step, beside reading this chip's sixteenth of them."""
    chip = row.chip()
    gather = collective_time(CollectiveKind.ALL_GATHER, row["weight_bytes"], torus(chip, 16))
    read = find_rule("weights-read").value(P=row["weight_bytes"], W_hbm=chip.hbm_bandwidth, chips=16, w=INT8.bytes)
    return "yes" if gather < read else "no"


def invented(row, **changes):
    """The chapter's invented model, whose head is its embedding."""
    return decoder(**row.sizes, tied=True, **changes)


def largest_batch(row):
    model = invented(row)
    return find_rule("decode-batch").value(
        P=model.parameters.total,
        context=row["ctx"],
        kv=model.kv_cache.bytes_per_token(INT8),
        HBM=row.chip().hbm_capacity,
        chips=row["chips"],
        w=INT8.bytes,
    )


def load_weights(row):
    return find_rule("weights-read").value(
        P=invented(row).parameters.total, W_hbm=row.chip().hbm_bandwidth, chips=row["chips"], w=INT8.bytes
    )


def growth(row):
    dense = decoder(**{k: v for k, v in row.sizes.items() if k not in "Ek"}, tied=True)
    return invented(row).parameters.total / dense.parameters.total


def sparse_critical_batch(row):
    rates = row.rates()
    return find_rule("critical-batch").value(C=rates.flops_per_s, W_hbm=rates.bandwidth, E=row["E"], k=row["k"])


def weights_floor(row):
    return find_rule("weights-read").value(
        P=row["params"], W_hbm=row.chip().hbm_bandwidth, chips=row["chips"], w=row["bytes"]
    )


def latency_bound_bytes(row, shards):
    chip = row.chip()
    return find_rule("latency-bound").value(n=shards, W_link=chip.link_bandwidth_one_way, hop=chip.hop_latency)


def activations(row):
    return Tensor("x", ("B", "D")).elements(row.sizes) * INT8.bytes


def cache_per_token(row):
    return invented(row).kv_cache_bytes_per_token(INT8)


def compute_left(row):
    load = ServingLoad(prompt=row["n"], output=1, cached_prefix=row["shared"])
    return load.computed / load.prompt


def hbm_over_ici(row):
    chip = row.chip()
    return chip.hbm_bandwidth / (2 * chip.link_bandwidth_one_way)


ANSWERS = {
    "linear.Bcrit*": critical_batch,
    "attn.prefill_intensity": lambda row: attention(row).intensity,
    "attn.decode_intensity": lambda row: attention(row).intensity,
    "attn.prefill_T": prompt_that_computes,
    "attn.decode_verdict": lambda row: f"{attention(row).bound}-bound",
    "pq.kv": lambda row: cache_of(row["kv_per_token"]).bytes_per_sequence(row["ctx"], INT8),
    "pq.b4": decode_step,
    "pq.b256": decode_step,
    "pq.b256_mlp": matmuls_of_the_step,
    "m13.ffw": lambda row: parts(row, "mlp"),
    "m13.vocab": lambda row: parts(row, "embedding", "head"),
    "m13.attn": lambda row: parts(row, "attention"),
    "m13.total": parts,
    "m13.weights": lambda row: row["params"] * BF16.bytes,
    "m13.act": lambda row: Tensor("x", ("T", "D")).elements(row.sizes) * BF16.bytes,
    "m13.kv_seq": cache_of_a_sequence,
    # 6.7 decimal GB under a GiB header; 6.25 GiB.
    "m13.kv_seq_gib": cache_of_a_sequence,
    "m13.kv_vs_params": lambda row: math.ceil(row["params"] * BF16.bytes / cache_of_a_sequence(row)),
    "m13.gqa_factor": gqa_factor,
    "m13.hbm8": lambda row: row["chips"] * row.chip().hbm_capacity,
    "m13.bw8": lambda row: row["chips"] * row.chip().hbm_bandwidth,
    "m13.flops8": lambda row: row["chips"] * row.chip().peak(BF16),
    # 10 bytes a parameter are 130 GB, which chapter 5 says too; "100 GB" is its order of magnitude.
    "m13.train_state": lambda row: find_rule("train-state").value(P=row["params"]),
    "shard.tp_prefill": lambda row: 1 / find_rule("tensor").value(F=1, C=row.rates().flops_per_s, W=row.bandwidth),
    "shard.fsdp_decode": fsdp_decode,
    "shard.beta": hbm_over_ici,
    "shard.Y64": lambda row: find_rule("decode-tensor").value(F=row["F"], B=row["B"], W_hbm=row["beta"], W=1),
    "q1.params": lambda row: invented(row).parameters.total,
    "q1.kv*": cache_per_token,
    "q2.per_seq": lambda row: invented(row).kv_cache.bytes_per_sequence(row["ctx"], INT8),
    "q2.batch*": largest_batch,
    "q3.load*": load_weights,
    "q5.total": lambda row: invented(row).parameters.total,
    "q5.growth": growth,
    "q5.active": lambda row: invented(row).parameters.active,
    "q5.Bcrit": sparse_critical_batch,
    "q5.kv": cache_per_token,
    "q5.flops": lambda row: find_rule("forward-flops").value(P=invented(row).parameters.active, tokens=row["T"]),
    "appA.floor": weights_floor,
    "appA.params": lambda row: 2 * Tensor("w", ("D", "F")).elements(row.sizes),
    "appC.buffer": lambda row: latency_bound_bytes(row, row["shards"]),
    "appC.act": activations,
    "appC.verdict": lambda row: (
        "latency-bound" if activations(row) < latency_bound_bytes(row, row["shards"]) else "bandwidth-bound"
    ),
    "prefix.saving": compute_left,
    "appC.Ylimit": lambda row: activations(row) / latency_bound_bytes(row, 1),
}
LATER = {}


@answered("inference", ANSWERS, LATER)
def test_answers_of_the_book(row, answer):
    check(row, answer)
