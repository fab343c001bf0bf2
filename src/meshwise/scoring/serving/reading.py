"""A row of a file of measured serving as a typed value; reading such files. Not here: what it means (`setup`)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from meshwise.scoring.rows import Row, RowFormat, UnreadRow, all_read, header_of, rows_of
from meshwise.scoring.serving.columns import SERVING_COLUMNS, SERVING_METRICS
from meshwise.scoring.serving.modes import parse_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun(Row):
    """A row; cells that are blank are None, or "" where they are text. The fields are the columns."""

    METRICS = SERVING_METRICS

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
        """Which steps it is of: "prefill", "decode" or "prefill+decode"; remarks in brackets left out."""
        return self.phase.partition("(")[0].strip().lower() or "prefill+decode"

    @property
    def is_static(self) -> bool:
        """Whether all requests start together, and no other comes between.

        Raises:
            MeshwiseError: `serving_mode` is not understood.
        """
        static = parse_mode(self.serving_mode).static
        return self.concurrency is None if static is None else static


_SERVED = RowFormat(
    SERVING_COLUMNS,
    ("n_chips", "prompt_len", "measured_metric", "measured_value", "unit"),
    ServedRun,
)


def is_serving(text: str) -> bool:
    """Whether a file's header is that of measured serving."""
    header = header_of(text)
    return "engine" in header and "phase" in header


def served_runs_of(text: str, where: str) -> tuple[ServedRun | UnreadRow, ...]:
    """Read the text of a file; `where` is what errors call it. A row with a wrong cell says so.

    Raises:
        MeshwiseError: its header has an unknown column or lacks one.
    """
    return rows_of(text, where, _SERVED)


def shipped_served_runs() -> tuple[ServedRun, ...]:
    """Published measurements of serving that come with the package, each with its source."""
    text = (files("meshwise.scoring") / "data" / "serving.csv").read_text(encoding="utf-8")
    return all_read(served_runs_of(text, "serving.csv"))
