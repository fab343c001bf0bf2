"""Chapter "How to Parallelize a Transformer for Training". Its B counts tokens."""

from meshwise.core.dtypes import DType
from meshwise.costs.rules import find_rule
from meshwise.hardware import load_chip, networks
from tests.book.book_rows import answered, check


def flops_per_s(row):
    key = "C_int8" if "C_int8" in row.hardware else "C_bf16"
    return row.hardware[key]


def data_parallel(row):
    return find_rule("fsdp").value(C=flops_per_s(row), W=row.bandwidth, axes=row["axes"])


def data_parallel_chips(row):
    return row["batch"] / data_parallel(row)


def in_pods(row):
    pod = networks()["v5p"].largest_num_chips
    assert pod == row["pod"]
    return data_parallel_chips(row) / pod


def days(row):
    return find_rule("train-time").value(
        P=row["params"], tokens=row["tokens"], C=flops_per_s(row), mfu=row["mfu"], chips=row["chips"]
    )


def tensor_parallel_limit(row):
    axes = row.inputs.get("axes", 1)
    return find_rule("tensor").value(F=row["F"], C=flops_per_s(row), W=row.bandwidth, axes=axes)


def d_ff_for(row):
    """The limit grows in proportion to F."""
    return row["Y"] / find_rule("tensor").value(F=1, C=flops_per_s(row), W=row.bandwidth)


def verdict(enough):
    return "compute-bound" if enough else "comms-bound"


def fsdp_optimum(row):
    return find_rule("mixed-ways").value(**mix(row))


def mix(row):
    tokens = row.inputs.get("B", row.inputs.get("batch"))
    return {"tokens": tokens, "F": row["F"], "chips": row["N"], "MX": row["MX"], "MY": row["MY"]}


def split(row):
    return find_rule("mixed-split").text(**mix(row))


def mixed(row):
    """Only the product M_X M_Y counts; some rows give nothing else."""
    both = row.inputs.get("MXMY") or row["MX"] * row["MY"]
    alpha = row.hardware.get("alpha")
    rates = (alpha, 1) if alpha else (flops_per_s(row), row.bandwidth)
    return find_rule("mixed").value(F=row["F"], C=rates[0], W=rates[1], MX=both)


def gain_of_mixing(row):
    return data_parallel(row) / mixed(row)


def chips_of_the_mix(row):
    return row["batch"] / mixed(row)


def slices(row):
    assert networks()["v5p"].dcn_bandwidth_per_chip_one_way == row.hardware["W_dcn"]
    return verdict(row["per_pod"] > find_rule("dcn").value(C=flops_per_s(row), W_dcn=row.hardware["W_dcn"]))


def parameters(row, *parts):
    counts = row.model.parameters
    return sum(counts.by_part[p] for p in parts) if parts else counts.total


ANSWERS = {
    "alpha.v5p": data_parallel,
    "alpha.v5p_int8": data_parallel,
    "alpha.dp3": data_parallel,
    "alpha.pod_batch": lambda row: data_parallel(row) * networks()["v5p"].largest_num_chips,
    "fsdp.dsv2_chips": data_parallel_chips,
    "fsdp.dsv2_pods": in_pods,
    "fsdp.llama_chips": data_parallel_chips,
    "fsdp.llama_days": days,
    "tp.llama8": lambda row: verdict(row["Y"] < tensor_parallel_limit(row)),
    "tp.llama16": lambda row: verdict(row["Y"] < tensor_parallel_limit(row)),
    "tp.F_for_8": d_ff_for,
    "tp.gemma7": tensor_parallel_limit,
    "tp.llama_per_axis": tensor_parallel_limit,
    "mixed.Xopt": fsdp_optimum,
    "mixed.choice": split,
    "mixed.threshold*": mixed,
    "mixed.gain": gain_of_mixing,
    "mixed.fig_batch*": lambda row: row["N"] * mixed(row),
    "llama2M.fsdp_chips": data_parallel_chips,
    "llama2M.mixed_threshold": mixed,
    "llama2M.mixed_chips*": chips_of_the_mix,
    "llama2M.per_chip": lambda row: find_rule("tokens-per-chip").value(tokens=row["batch"], chips=row["chips"]),
    "llama2M.dcn_ok": slices,
    "llama2M.ici_ok": lambda row: verdict(row["per_chip"] > mixed(row)),
    "llama2M.split1M": split,
    "q1.ffw": lambda row: parameters(row, "mlp"),
    "q1.attn": lambda row: parameters(row, "attention"),
    "q1.vocab": lambda row: parameters(row, "embedding", "head"),
    "q1.total*": parameters,
}
LATER = {}


@answered("training", ANSWERS, LATER)
def test_answers_of_the_book(row, answer):
    check(row, answer)


def test_precision_does_not_move_the_limit_of_tensor_parallelism():
    """The book: int8 doubles C / W, and halves the bytes of the activations that travel."""
    chip = load_chip("v5p")
    bandwidth = 2 * chip.link_bandwidth_one_way
    bf16 = find_rule("tensor").value(F=28672, C=chip.peak(DType.BF16), W=bandwidth)
    int8 = find_rule("tensor").value(F=28672, C=chip.peak(DType.INT8), W=bandwidth, b=1)
    assert bf16 == int8
