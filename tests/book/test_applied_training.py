"""Chapter "Training LLaMA 3 on TPUs"."""

from meshwise.costs.rules import find_rule
from meshwise.jobs import OPTIMIZERS, PRECISIONS
from meshwise.models import load_model
from tests.book.book_rows import answered, check

BOOK = PRECISIONS["bf16"]


def parameters(row, *parts):
    counts = row.model.parameters
    assert counts == load_model("llama-3-70b").parameters
    return sum(counts.by_part[p] for p in parts) if parts else counts.total


def training_seconds(row, **where):
    return find_rule("train-time").value(P=row["params"], tokens=row["tokens"], C=row.hardware["C_bf16"], **where)


def on_a_pod(row):
    return training_seconds(row, mfu=row["mfu"], chips=row["chips"])


def weights(row):
    return row["params"] * BOOK.weights.bytes


def optimizer(row):
    return row["params"] * OPTIMIZERS["adamw"].moments * BOOK.moments.bytes


def checkpoints(row):
    return find_rule("saved-activations").value(tokens=row["batch"], D=row["D"], L=row["L"], arrays=row["ckpt"])


def total(row):
    state = find_rule("train-state").value(P=row["params"])
    assert state == weights(row) + optimizer(row)
    return state + checkpoints(row)


def chips(row):
    return find_rule("chips-to-hold").value(bytes=total(row), HBM=row.chip().hbm_capacity)


def days_on_fewer_chips(row):
    """The chips that do the work in the stated days on a pod, and fewer of them."""
    flops_per_s = find_rule("train-flops").value(P=70e9, tokens=15e12) / (row["pod"] * row["days"] * 86400)
    return find_rule("train-time").value(P=70e9, tokens=15e12, C=flops_per_s, chips=row["chips"])


ANSWERS = {
    "params.ffw": lambda row: parameters(row, "mlp"),
    "params.vocab": lambda row: parameters(row, "embedding", "head"),
    "params.attn": lambda row: parameters(row, "attention"),
    "params.total": parameters,
    "params.ffw_share": lambda row: parameters(row, "mlp") / parameters(row),
    "flops.per_token": lambda row: find_rule("train-flops").value(P=row["params"]),
    "flops.time_v5p": lambda row: find_rule("train-time").value(
        P=row["params"], tokens=1, C=row.hardware["C_bf16"], chips=1
    ),
    "flops.total": lambda row: find_rule("train-flops").value(P=row["params"], tokens=row["tokens"]),
    "flops.years": lambda row: training_seconds(row, chips=1),
    "pod.seconds": on_a_pod,
    "pod.days": on_a_pod,
    "mem.weights": weights,
    "mem.opt": optimizer,
    "mem.ckpt": checkpoints,
    "mem.total": total,
    # The older text counted three checkpoints a layer: fewer bytes than four, fewer chips.
    "mem.min_chips": chips,
    "mem.min_chips.feb03": chips,
    # 1752 days are 4.8 years, nearly five; the book says four.
    "mem.min_chips_days": days_on_fewer_chips,
    "mem.min_chips_years": days_on_fewer_chips,
    "mem.per_chip*": lambda row: total(row) / row["N"],
}
LATER = {}


@answered("applied-training", ANSWERS, LATER)
def test_answers_of_the_book(row, answer):
    check(row, answer)
