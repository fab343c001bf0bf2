"""Chapter "How to Parallelize a Transformer for Training". Its B counts tokens."""

from meshwise.core.dtypes import DType
from meshwise.costs import budgets, rules
from meshwise.hardware import load_chip, networks
from tests.book.book_rows import answered, check


def flops_per_s(row):
    key = "C_int8" if "C_int8" in row.hardware else "C_bf16"
    return row.hardware[key]


def data_parallel(row):
    return rules.data_parallel_critical_tokens_per_chip(flops_per_s(row), row.bandwidth, num_axes=row["axes"])


def data_parallel_chips(row):
    return rules.data_parallel_max_chips(row["batch"], data_parallel(row))


def in_pods(row):
    pod = networks()["v5p"].largest_num_chips
    assert pod == row["pod"]
    return data_parallel_chips(row) / pod


def days(row):
    return budgets.training_time(row["params"], row["tokens"], flops_per_s(row), mfu=row["mfu"], num_chips=row["chips"])


def tensor_parallel_limit(row):
    return rules.tensor_parallel_limit(row["F"], flops_per_s(row), row.bandwidth, num_axes=row.inputs.get("axes", 1))


def d_ff_for(row):
    """The limit grows in proportion to F."""
    return row["Y"] / rules.tensor_parallel_limit(1, flops_per_s(row), row.bandwidth)


def verdict(enough):
    return "compute-bound" if enough else "comms-bound"


def fsdp_optimum(row):
    return rules.mixed_fsdp_optimum(
        row.inputs.get("B", row.inputs.get("batch")),
        row["F"],
        row["N"],
        fsdp_axes=row["MX"],
        tensor_axes=row["MY"],
    )


def split(row):
    return "x".join(map(str, rules.power_of_two_split(row["N"], fsdp_optimum(row))))


def mixed(row):
    """Only the product M_X M_Y counts; some rows give nothing else."""
    both = row.inputs.get("MXMY") or row["MX"] * row["MY"]
    alpha = row.hardware.get("alpha")
    rates = (alpha, 1) if alpha else (flops_per_s(row), row.bandwidth)
    return rules.mixed_critical_tokens_per_chip(row["F"], *rates, fsdp_axes=both)


def gain_of_mixing(row):
    return data_parallel(row) / mixed(row)


def chips_of_the_mix(row):
    return rules.data_parallel_max_chips(row["batch"], mixed(row))


def slices(row):
    assert networks()["v5p"].dcn_bandwidth_per_chip_one_way == row.hardware["W_dcn"]
    return verdict(row["per_pod"] > rules.hybrid_critical_tokens_per_slice(flops_per_s(row), row.hardware["W_dcn"]))


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
    "llama2M.per_chip": lambda row: rules.tokens_per_chip(row["batch"], row["chips"]),
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
    bf16 = rules.tensor_parallel_limit(28672, chip.peak(DType.BF16), bandwidth)
    int8 = rules.tensor_parallel_limit(28672, chip.peak(DType.INT8), bandwidth, bytes_per_value=1)
    assert bf16 == int8
