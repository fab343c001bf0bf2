"""The worked answers of "How To Scale Your Model" (meshwise/book/problems.csv), and how the engine's are checked.

A test file holds a table from row ids (or patterns of them) to functions that answer by the public API. Every row of a
chapter is in that table or in the chapter's `LATER`, with the reason.
"""

import csv
import functools
import json
import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import meshwise.book
from meshwise.core.dtypes import DType
from meshwise.costs.fabric import Dimension, Fabric
from meshwise.costs.network import make_group_link
from meshwise.costs.operation import parse_operation
from meshwise.costs.roofline import rates_of
from meshwise.hardware import load_chip
from meshwise.models import read_config
from tests.each import each

PATH = Path(meshwise.book.__file__).with_name("problems.csv")

#: The book's names of chips -> ours, where they differ.
CHIPS = {"v4p": "v4", "h100 sxm": "h100"}

#: Unit in which the book prints -> base unit.
UNITS = {
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "ms*chips": 1e-3, "days": 86400, "years": 365.25 * 86400, "GHz": 1e9,
    "GB": 1e9, "GiB": 2**30, "GB (book prints GiB)": 1e9, "GB/s": 1e9, "TB/s": 1e12, "TB/s (book prints TiB/s)": 1e12,
    "TFLOPs/s": 1e12,
}  # fmt: skip

#: Hardware constants of a row that are rates of the matrix unit.
FORMATS = {"C": DType.BF16, "C_bf16": DType.BF16, "bf16": DType.BF16, "C_int8": DType.INT8, "fp8": DType.FP8}

#: How closely an answer must meet the value that was worked out again from the row's own numbers, where the book's
#: tolerance would let more pass. Norms and routers, which the book's formulas leave out, are within it.
EXACT = 2e-4

MATMUL = parse_operation("bf16[B, D] * bf16[D, F] -> bf16[B, F]")


@dataclass(frozen=True)
class Row:
    """One row of problems.csv."""

    id: str
    chapter: str
    inputs: dict
    hardware: dict
    printed: float | str
    recomputed: float | str
    unit: str
    tolerance: float
    status: str
    question: str

    def __getitem__(self, name):
        return self.inputs[name]

    @property
    def sizes(self):
        """The inputs that are sizes of axes."""
        return {name: value for name, value in self.inputs.items() if len(name) == 1}

    @property
    def bandwidth(self):
        """The network's bandwidth as the row's formulas mean it: of a ring both ways, of a GPU, a node or a chip."""
        names = ("W_ici_bidi", "W_net", "W_node", "W_gpu", "W_dcn")
        return next(self.hardware[name] for name in names if name in self.hardware)

    def chip(self, default="v5e"):
        """The chip of the row with the constants that the row used; one that names none gets those of `default`."""
        name = str(self.hardware.get("chip", self.inputs.get("chip", default))).lower().removeprefix("tpu ")
        chip = load_chip(CHIPS.get(name, name))
        hw = self.hardware
        rates = {dtype: hw[key] for key, dtype in FORMATS.items() if key in hw}
        changes = {
            "hbm_bandwidth": hw.get("W_hbm", hw.get("W")),
            "hbm_capacity": hw.get("HBM"),
            "link_bandwidth_one_way": hw["W_ici_bidi"] / 2 if "W_ici_bidi" in hw else hw.get("W_ici_uni"),
            "vector_flops_per_s": hw.get("vec"),
            "flops_per_s": rates or None,
        }
        return chip.replace(**{name: value for name, value in changes.items() if value is not None})

    def rates(self, operation=MATMUL, default="v5e"):
        """The slopes of the row's chip for an operation, without the padding of tiles, which the book leaves out."""
        return replace(rates_of(operation, self.chip(default)), tile=None)

    @functools.cached_property
    def model(self):
        """A gated decoder with the row's L, D, F, N, K, H, V (and E, k), whose head is its own."""
        return decoder(**self.sizes)


def decoder(*, L=1, D=4096, F=4 * 4096, N=32, K=None, H=128, V=32000, E=None, k=None, tied=False, **others):
    """A gated decoder, or a mixture of E experts of which each token visits k."""
    del others
    mixture = {} if E is None else {"num_local_experts": E, "num_experts_per_tok": k}
    config = {
        "model_type": "llama" if E is None else "mixtral",
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": N,
        "num_key_value_heads": N if K is None else K,
        "head_dim": H,
        "vocab_size": V,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        **mixture,
    }
    return read_config(config, name="row")


def torus(chip, *axes):
    """The wire of one group that spans a torus; an axis is its size, negative where the ends are not joined."""
    dims = [
        Dimension(n, abs(a), True, a > 0, chip.link_bandwidth_one_way, chip.hop_latency)
        for n, a in zip("xyz", axes, strict=False)
    ]
    fabric = Fabric(tuple(dims))
    return make_group_link(fabric, {"X": fabric.sizes}, ("X",))


def _number(text):
    try:
        return float(text)
    except ValueError:
        return text


def _without_units(text):
    values = json.loads(text or "{}")
    values.pop("_units", None)
    return values


@functools.cache
def rows():
    """Every row, in the order of the file."""
    with PATH.open(encoding="utf-8", newline="") as file:
        return tuple(
            Row(
                id=line["id"],
                chapter=line["chapter"],
                inputs=_without_units(line["inputs"]),
                hardware=_without_units(line["hw_constants"]),
                printed=_number(line["answer_value"]),
                recomputed=_number(line["recomputed_value"]),
                unit=line["answer_unit"],
                tolerance=float(line["tolerance"]),
                status=line["status"],
                question=line["question"],
            )
            for line in csv.DictReader(file)
        )


def _matches(row, patterns):
    return [p for p in patterns if p == row.id.split(".", 1)[1] or fnmatchcase(row.id.split(".", 1)[1], p)]


def answered(chapter, answers, later):
    """A test of every row of a chapter that is not for later, with the function that answers it."""
    return each("row, answer", answered_rows(chapter, answers, later))


def answered_rows(chapter, answers, later):
    """Pair every row that is not for later with the function that answers it; keys are ids without the chapter.

    Fails when a row of the chapter is in neither table or in both, and when an entry is of no row.
    """
    cases, used = [], set()
    for row in (r for r in rows() if r.chapter == chapter):
        found, put_off = _matches(row, answers), _matches(row, later)
        assert len(found) + len(put_off) == 1, f"{row.id}: answered by {found}, put off by {put_off}"
        used.update(found, put_off)
        if found:
            cases.append((row, answers[found[0]]))
    unused = (set(answers) | set(later)) - used
    assert not unused, f"{chapter}: no row for {sorted(unused)}"
    return cases


def catalog(answer):
    """Mark an answer as made of the catalog's numbers, not of the row's: it meets what is printed, within tolerance."""
    answer.catalog = True
    return answer


def check(row, answer):
    """Compare an answer with what the row says, by its status."""
    value = answer(row)
    if isinstance(row.recomputed, str):
        assert value == row.recomputed, row.question
        if row.status not in ("book_inconsistent", "superseded"):
            assert value == row.printed, row.question
        return
    value /= UNITS.get(row.unit, 1)
    agrees = math.isclose(value, row.printed, rel_tol=max(row.tolerance, 1e-9))
    if row.status in ("superseded", "book_inconsistent"):
        assert not agrees, f"{row.question} {value} should not be what an earlier or inconsistent text printed"
        assert value == pytest.approx(row.recomputed, rel=max(row.tolerance, 1e-9)), row.question
    else:
        assert agrees, f"{row.question} expected {row.printed} {row.unit} within {row.tolerance}, found {value}"
        if not getattr(answer, "catalog", False):
            assert value == pytest.approx(row.recomputed, rel=EXACT), row.question
