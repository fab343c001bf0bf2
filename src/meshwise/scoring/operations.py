"""Measured single operations beside what they should take, so that a calibration can be refined by them.

They say how fast products, attention, copies and collectives are; nothing of the host, or of what hides behind what.
Not here: reading rows (`reading`), fitting (`fitting`), or measuring (`runtime.bench`, `profile.rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.alone import AttentionShape, attention_work, collective_seconds, local_seconds, product_work
from meshwise.costs.calibration import CALIBRATIONS, Calibration, default_calibration
from meshwise.costs.fitted import find_calibration
from meshwise.costs.machine import SECONDS, MeasuredOperation
from meshwise.hardware import Chip, Cluster, load_chip, parse_cluster
from meshwise.scoring.constants import FLOPS, HBM, LINKS, Constant
from meshwise.scoring.prediction import WRONG, Refusal
from meshwise.scoring.rows import UnreadRow
from meshwise.sharding import CollectiveKind

#: Shorter operations are all launch and start-up, which these constants do not say.
_SHORTEST = 20e-6


@dataclass(frozen=True)
class OperationPrediction:
    """A measured operation beside what it should take.

    Args:
        run: the row.
        hardware: its chip.
        calibration: of the prediction.
        price: seconds under a calibration.
        assumed: what the row does not say; nothing, as one that lacks something is left out.
    """

    run: MeasuredOperation
    hardware: Chip
    calibration: Calibration
    price: Callable[[Calibration], float]
    assumed: tuple[str, ...] = ()

    @property
    def chip(self) -> str:
        """Name of its chip."""
        return self.hardware.name

    @property
    def measured(self) -> float:
        """Seconds."""
        return self.run.seconds

    @property
    def expected(self) -> float:
        """Seconds under its calibration."""
        return self.price(self.calibration)

    @property
    def error(self) -> float:
        """Signed: 0.1 where 10 % too much is predicted."""
        return self.expected / self.measured - 1

    def seconds_under(self, calibration: Calibration) -> float:
        """Expected seconds under another calibration."""
        return self.price(calibration)

    def depends_on(self, constant: Constant) -> bool:
        """Whether the constant is a rate of single operations on this chip."""
        own = default_calibration(self.hardware).name
        return constant.unit in (FLOPS, HBM, LINKS) and constant.applies(self.calibration, own)


def predict_operations(
    rows: Sequence[MeasuredOperation | UnreadRow], calibration: str, on: str | None = None
) -> tuple[list[OperationPrediction], tuple[Refusal, ...]]:
    """Predict rows of single operations, and say of the others why they cannot be used.

    Args:
        rows: of `meshwise bench --save` or `meshwise profile --save`.
        calibration: as `--calibration` takes it.
        on: the cluster whose network collectives used; None: as many chips as took part, by the chip's usual network.
    """
    found, refused = list[OperationPrediction](), list[Refusal]()
    for row in rows:
        if isinstance(row, UnreadRow):
            refused.append(Refusal(row, row.reason))
            continue
        try:
            found.append(_predicted(row, calibration, on))
        except MeshwiseError as error:
            refused.append(Refusal(row, str(error)))
    return found, tuple(refused)


def _predicted(row: MeasuredOperation, calibration: str, on: str | None) -> OperationPrediction:
    """Predict a row.

    Raises:
        MeshwiseError: why it cannot be used.
    """
    if row.primary == "no":
        raise MeshwiseError("it is no independent number (column primary)")
    if row.unit not in SECONDS:
        raise MeshwiseError(f"column unit: expected one of {', '.join(SECONDS)}; found {row.unit!r}")
    chip = load_chip(row.chip or row.hardware)
    price = _collective(row, chip, on) if row.category == "collective" else _local(row, chip)
    found = OperationPrediction(row, chip, find_calibration(calibration, chip), price)
    if found.measured < _SHORTEST:
        raise MeshwiseError(f"{found.measured * 1e6:.3g} us are a launch and little else; expected 20 us or more")
    if found.measured < (bound := price(CALIBRATIONS["none"])):
        raise MeshwiseError(
            f"{found.measured:.4g} s is less than the {bound:.4g} s that data sheet and network allow; {WRONG}"
        )
    return found


def _local(row: MeasuredOperation, chip: Chip) -> Callable[[Calibration], float]:
    """What prices an operation of one chip."""
    if row.category == "memory":
        return partial(local_seconds, chip, None, 0.0, float(_given(row.bytes, "bytes")))
    dtype = _format(row, chip)
    if row.category == "gemm":
        work = product_work(_given(row.m, "m"), _given(row.k, "k"), _given(row.n, "n"), dtype)
        return partial(local_seconds, chip, dtype, *work)
    if row.category == "attention prefill" and row.causal in ("yes", "no"):
        names = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim")
        sizes = [_given(getattr(row, name), name) for name in names]
        if row.causal == "yes" and row.seq_q != row.seq_kv:
            raise MeshwiseError(
                f"columns seq_q, seq_kv: causal attention of {row.seq_q} queries to {row.seq_kv} keys does not say "
                "which of these each sees; expected as many queries as keys"
            )
        work = attention_work(AttentionShape.of(*sizes, causal=row.causal == "yes"), dtype)
        return partial(local_seconds, chip, dtype, *work, attends=True)
    raise MeshwiseError(
        f"{row.category}: no constant of a calibration of training; expected gemm, attention prefill (column causal "
        "yes or no), memory or collective"
    )


def _given(value: int | None, column: str) -> int:
    if value is None:
        raise MeshwiseError(f"column {column}: expected a value, found a blank cell")
    return value


def _format(row: MeasuredOperation, chip: Chip) -> DType:
    known = [d.value for d in chip.flops_per_s]
    if row.dtype not in known:
        raise MeshwiseError(f"column dtype: expected one of {', '.join(known)}, found {row.dtype!r}")
    return DType(row.dtype)


def _collective(row: MeasuredOperation, chip: Chip, on: str | None) -> Callable[[Calibration], float]:
    """What prices a collective that ran alone."""
    for words, why in (
        ("beside computation", "it ran beside computation, which slows it down"),
        ("waiting for others", "waiting for other ranks is in its time; profile all of them together"),
    ):
        if words in row.notes:
            raise MeshwiseError(f"{why}; expected a collective that ran alone")
    try:
        kind = CollectiveKind(row.op.replace("_", "-"))
    except ValueError:
        known = ", ".join(k.value.replace("-", "_") for k in CollectiveKind if k is not CollectiveKind.SLICE)
        raise MeshwiseError(f"column op: expected one of {known}; found {row.op!r}") from None
    return partial(collective_seconds, _cluster(row, chip, on), kind, float(_given(row.bytes, "bytes")))


def _cluster(row: MeasuredOperation, chip: Chip, on: str | None) -> Cluster:
    """Chips that took part."""
    try:
        found = parse_cluster(on or f"{chip.name}:{row.n_chips}")
    except MeshwiseError as error:
        raise MeshwiseError(f"the network of {row.n_chips} x {chip.name} is not known: {error}; give --on") from None
    if (found.chip.name, found.num_chips) != (chip.name, row.n_chips):
        raise MeshwiseError(
            f"--on {on}: expected the {row.n_chips} x {chip.name} that took part, found {found.num_chips} x "
            f"{found.chip.name}"
        )
    return found
