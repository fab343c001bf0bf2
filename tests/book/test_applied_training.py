"""Chapter "Training LLaMA 3 on TPUs"."""

from meshwise.costs import budgets
from meshwise.jobs import OPTIMIZERS, PRECISIONS
from meshwise.models import load_model
from tests.book.book_rows import answered, check

BOOK = PRECISIONS["bf16"]


def parameters(row, *parts):
    counts = row.model.parameters
    assert counts == load_model("llama-3-70b").parameters
    return sum(counts.by_part[p] for p in parts) if parts else counts.total


def training_seconds(row, **where):
    return budgets.training_time(row["params"], row["tokens"], row.hardware["C_bf16"], **where)


def on_a_pod(row):
    return training_seconds(row, mfu=row["mfu"], num_chips=row["chips"])


def weights(row):
    return row["params"] * BOOK.weights.bytes


def optimizer(row):
    return row["params"] * OPTIMIZERS["adamw"].moments * BOOK.moments.bytes


def checkpoints(row):
    return budgets.saved_activation_bytes(row["batch"], row["D"], row["L"], saved_per_layer=row["ckpt"])


def total(row):
    state = budgets.training_state_bytes(row["params"])
    assert state == weights(row) + optimizer(row)
    return state + checkpoints(row)


def chips(row):
    return budgets.chips_to_hold(total(row), row.chip().hbm_capacity)


def days_on_fewer_chips(row):
    """The chips that do the work in the stated days on a pod, and fewer of them."""
    flops_per_s = budgets.training_flops(70e9, 15e12) / (row["pod"] * row["days"] * 86400)
    return budgets.training_time(70e9, 15e12, flops_per_s, num_chips=row["chips"])


ANSWERS = {
    "params.ffw": lambda row: parameters(row, "mlp"),
    "params.vocab": lambda row: parameters(row, "embedding", "head"),
    "params.attn": lambda row: parameters(row, "attention"),
    "params.total": parameters,
    "params.ffw_share": lambda row: parameters(row, "mlp") / parameters(row),
    "flops.per_token": lambda row: budgets.training_flops(row["params"]),
    "flops.time_v5p": lambda row: budgets.training_time(row["params"], 1, row.hardware["C_bf16"]),
    "flops.total": lambda row: budgets.training_flops(row["params"], row["tokens"]),
    "flops.years": training_seconds,
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
