"""Rows of measured training and serving as typed values: their fields are the columns of docs/measurements.md.

Not here: reading files (`reading`), and what a row means (`training`, `serving_scenario`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, TypeVar

from meshwise.core.errors import MeshwiseError
from meshwise.core.tensors import Attention, Fused
from meshwise.models import Model

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnreadRow:
    """A row that cannot be read, which leaves the other rows of its file as they are.

    Args:
        id: of the row, or the number of its line.
        reason: the line and the column, what was expected, what was found.
        counts: whether it would be an independent number if it could be read.
    """

    id: str
    reason: str
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(ABC):
    """What every row says: its origin, the model, the machine, and the number.

    Blank cells are None, or "" in columns of text. A field without a default must be filled in, except `id`.
    `TIMES` and `MEMORY` are the metrics that rows of a kind may have, `SHIPPED` the file that comes with the package.
    """

    TIMES: ClassVar[tuple[str, ...]]
    MEMORY: ClassVar[tuple[str, ...]]
    SHIPPED: ClassVar[str]

    id: str
    source: str = ""
    chip: str = ""
    run_id: str = ""
    source_url_or_repo_path: str = ""
    year: int | None = None
    model: str = ""
    params_b: float | None = None
    layers: int | None = None
    d_model: int | None = None
    d_ff: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    moe_experts: int | None = None
    moe_topk: int | None = None
    hardware: str = ""
    n_chips: int
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    dp: int | None = None
    measured_metric: str
    measured_value: float
    unit: str
    primary: str = "yes"
    arch_source: str = ""
    software: str = ""
    notes: str = ""

    @property
    def words(self) -> str:
        """All remarks, in lower case, to look for words in."""
        return f"{self.model} {self.arch_source} {self.software} {self.notes}".lower()

    @property
    def is_memory(self) -> bool:
        """Whether memory was measured, not time."""
        return self.measured_metric in self.MEMORY

    @property
    def counts(self) -> bool:
        """Whether it is an independent number. Memory always is, whatever else the run says."""
        return self.primary != "no" or self.is_memory

    @property
    @abstractmethod
    def positions(self) -> int:
        """Tokens of the longest sequence: rows of a learned table of positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun(Row):
    """A measured training run."""

    TIMES = ("step_time", "tokens_per_s_per_chip", "tokens_per_s", "MFU", "model_tflops_per_chip",
             "hardware_tflops_per_chip")  # fmt: skip
    MEMORY = ("weights_grads_optimizer_GiB", "activation_memory_GiB", "peak_memory", "gpu_memory")
    SHIPPED = "training.csv"

    dtype: str = ""
    sp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    fsdp_or_zero_stage: str = ""
    recompute: str = ""
    overlap: str = ""
    dispatcher: str = ""
    micro_batch: int | None = None
    global_batch_seqs: int
    seq_len: int
    flops_convention: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_seqs * self.seq_len

    @property
    def positions(self) -> int:
        """Tokens of a sequence."""
        return self.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRun(Row):
    """A measurement of serving."""

    TIMES = ("tpot", "ttft", "first_token_latency", "end_to_end_latency", "latency", "latency_per_token",
             "tokens_per_s", "output_tokens_per_s", "output_tokens_per_s_per_gpu", "effective_memory_bandwidth",
             "MFU")  # fmt: skip
    MEMORY = ("gpu_memory",)
    SHIPPED = "serving.csv"

    engine: str = ""
    weights_dtype: str = ""
    act_dtype: str = ""
    kv_dtype: str = ""
    serving_mode: str = ""
    phase: str = ""
    batch: int | None = None
    concurrency: int | None = None
    prompt_len: int
    output_len: int | None = None

    @property
    def positions(self) -> int:
        """Tokens of the longest request."""
        return self.prompt_len + (self.output_len or 0)

    @property
    def steps(self) -> str:
        """Which steps were measured: "prefill", "decode" or "prefill+decode"; remarks in brackets left out."""
        return self.phase.partition("(")[0].strip().lower() or "prefill+decode"

    @property
    def is_static(self) -> bool:
        """Whether all requests start together, and no other comes between.

        Raises:
            MeshwiseError: `serving_mode` is not understood.
        """
        static = parse_mode(self.serving_mode)[0]
        return self.concurrency is None if static is None else static


def first_match(table: Iterable[tuple[str, T]], words: str) -> T | None:
    """What a table of (pattern, meaning) says of the words: the first pattern that is found counts.

    >>> first_match((("sglang", 1), ("vllm", 2)), "vllm 0.12"), first_match((("sglang", 1),), "ours")
    (2, None)
    """
    return next((meaning for pattern, meaning in table if re.search(pattern, words)), None)


#: How weights are shared between the chips of an engine, where a row says it.
Sharing = Literal["both ways", "gathered"]

#: Patterns -> whether all requests start together, how weights are shared; None where they do not say.
_PHRASES: tuple[tuple[str, tuple[bool | None, Sharing | None]], ...] = (
    (r"static(?: batch(?:es|ing)?)?|single[ -](?:stream|request)|fixed batch(?: size)?|batch inference", (True, None)),
    (r"(?:continuous|in-?flight|dynamic)(?: batch(?:es|ing)?)?", (False, None)),
    # How requests came, where `batch` or `concurrency` says how many were under way.
    (r"(?:closed|open)[ -]loop|poisson|gamma|bursts?|requests at once|(?:trace )?replay(?:ed)?", (False, None)),
    (r"(?:request|arrival|constant)[ -_]?rate|arrivals", (False, None)),
    (r"(?:fixed |constant |max(?:imum)? )?concurren(?:cy|t)|aggregated|(?:off|on)line|serving", (None, None)),
    (r"(?:after |with |without |no )?warm[- ]?up|steady state|throughput|latency|chunked[ -]prefills?", (None, None)),
    (r"(?:no|without) prefix cach(?:e|ing)|prefix cach(?:e|ing) (?:off|disabled)", (None, None)),
    (r"2d(?: weight[ -]stationary| partitioning)?", (None, "both ways")),
    (r"weight[ -]gathered", (None, "gathered")),
)

#: Numbers, units and small words between phrases.
_FILLERS = (
    r"requests?|prompts?|clients?|users?|iterations?|steps?|tokens?|reqs?|qps|rps|s|of|at|with|and|a|per|after"
    r"|all|fixed|max(?:imum)?|batch size|benchmark|inf|\d[\d.]*[km]?"
)

_MODES = (
    "static batch, single stream, continuous batching, closed loop, Poisson arrivals or burst, and of TPUs also 2D "
    "weight-stationary or weight-gathered, with commas between"
)


@cache
def parse_mode(text: str) -> tuple[bool | None, Sharing | None]:
    """Whether all requests start together, and how weights are shared: a cell of `serving_mode`, without its remarks.

    >>> parse_mode("static batch, 2D partitioning"), parse_mode("burst of 1000 prompts"), parse_mode("")
    ((True, 'both ways'), (False, None), (None, None))

    Raises:
        MeshwiseError: an unknown phrase, or two that contradict each other.
    """
    words = re.sub(r"\(.*?\)", " ", text.lower())
    if re.search(r"(?<!non-)(?<!not )\bdisagg", words):
        raise MeshwiseError(f"serving_mode {text!r}: prefill and decode on engines of their own are not compared")
    found = [meaning for pattern, meaning in _PHRASES if re.search(rf"\b(?:{pattern})\b", words)]
    unknown = words
    for pattern in (*(p for p, _ in _PHRASES), _FILLERS):
        unknown = re.sub(rf"\b(?:{pattern})\b", " ", unknown)
    if left := [part for each in unknown.split(",") if (part := " ".join(each.split()).strip("=/+.:; -"))]:
        where = "" if left[0] == text.strip().lower() else f" ({left[0]!r})"
        raise MeshwiseError(f"serving_mode {text!r} is not understood{where}; expected {_MODES}")
    static = {s for s, _ in found if s is not None}
    sharing = {s for _, s in found if s is not None}
    if len(static) > 1 or len(sharing) > 1:
        raise MeshwiseError(f"serving_mode {text!r} says two things at once; expected {_MODES}")
    return next(iter(static), None), next(iter(sharing), None)


_BYTES = {"GIB": 2**30, "GB": 1e9, "MIB": 2**20, "MB": 1e6}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_RATE = re.compile(r"tok(?:en)?s?(?:/s(?:ec|econd)?| (?:per|a) second)((?:/| per )[a-z]+)?(?=$|[\s(,;])")


def measured_seconds(run: TrainingRun, model: Model) -> float:
    """Seconds of a training step.

    Raises:
        MeshwiseError: a unit that is not the metric's.
    """
    value = run.measured_value
    match run.measured_metric:
        case "step_time":
            return duration(run)
        case "tokens_per_s_per_chip" | "tokens_per_s":
            return run.tokens / tokens_per_second(run)
        case "MFU":
            return convention_flops(run, model) / (value / 100 * _peak(run) * run.n_chips)
        case _:
            _expect(run, run.unit.lower().startswith("tflop"), "TFLOP/s/chip")
            return convention_flops(run, model) / (value * 1e12 * run.n_chips)


def duration(run: Row) -> float:
    """Seconds of a measurement of time.

    Raises:
        MeshwiseError: another unit than s, ms, us or min.
    """
    word = re.split(r"[\s(]", run.unit.strip())[0].lower()
    _expect(run, word in _SECONDS, "s, ms, us or min")
    return run.measured_value * _SECONDS[word]


def tokens_per_second(run: Row) -> float:
    """Tokens a second of all chips together; metrics that end in `_per_chip` or `_per_gpu` are of each.

    Raises:
        MeshwiseError: a unit that is not tokens a second, or that is of each chip where the metric is of all.
    """
    each = run.measured_metric.endswith(("_per_chip", "_per_gpu"))
    found = _RATE.match(run.unit.strip().lower())
    right = found is not None and (each or not found[1])
    _expect(run, right, "tokens/s/chip" if each else "tokens/s, of all chips together")
    return run.measured_value * (run.n_chips if each else 1)


def measured_bytes(run: Row) -> float:
    """Bytes of a measurement of memory.

    Raises:
        MeshwiseError: another unit than GiB, GB, MiB or MB.
    """
    word = re.split(r"[^A-Za-z]", run.unit.strip())[0].upper()
    _expect(run, word in _BYTES, "GiB, GB, MiB or MB")
    return run.measured_value * _BYTES[word]


def _expect(run: Row, right: bool, units: str) -> None:
    if not right:
        raise MeshwiseError(f"unit of {run.measured_metric}: expected {units}, found {run.unit!r}")


def _peak(run: TrainingRun) -> float:
    """FLOP/s of one chip that an MFU was divided by: the unit names it."""
    found = re.search(r"([\d.,]+)\s*([TP])FLOP/s", run.unit)
    if found is None or not run.unit.strip().startswith("%"):
        raise MeshwiseError(f"unit of MFU: expected its peak, such as '% of 459 TFLOP/s', found {run.unit!r}")
    return float(found[1].replace(",", "")) * {"T": 1e12, "P": 1e15}[found[2]]


def convention_flops(run: TrainingRun, model: Model) -> float:
    """FLOPs of a step by the convention that the source used.

    6 for each active parameter and token, and attention three times over, every pair counted unless the convention
    says that causality halves it; a third more where recomputation is included. The formula of Narayanan et al. 2021
    (section 5.1) counts as these words do: 96 B s L h^2 (1 + s/6h + V/16Lh), V not computed again.
    """
    words = run.flops_convention
    if re.search(r"96\s*\*?\s*B", words):
        h, layers = model.d_model, model.num_layers
        return 96.0 * run.tokens * layers * h**2 * (1 + run.seq_len / (6 * h) + model.vocab_size / (16 * layers * h))
    halved = not re.search(r"not halved|not causal|full attention", words, re.IGNORECASE)
    again = 4 / 3 if re.search(r"includ|factor 4|hardware", words, re.IGNORECASE) else 1.0
    if run.measured_metric == "hardware_tflops_per_chip" and again == 1.0:
        again = 4 / 3 if "full" in run.recompute else 1.0
    program = model.train_program()
    sizes = program.bind(batch=run.global_batch_seqs, queries=run.seq_len)
    mixing = sum(
        b.repeat * (op.flops(sizes) if halved or isinstance(op, Fused) else op.full_flops(sizes))
        for b in program
        for op in b.ops
        if op.matmul and isinstance(op, Attention | Fused)
    )
    return float(again * (6 * model.parameters.active_in_mfu * run.tokens + 3 * mixing))


def dimension(model: Model, axis: str) -> int:
    """The largest size that an axis of a model has, over the groups of its layers; 0 where it has none."""
    return max((int(size) for name, size in model.sizes.items() if name.partition(".")[0] == axis), default=0)
