"""The answers of a sweep: cells of each row, the table on a terminal, and the picture.

Not here: which questions there are, and the file of rows (`commands`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from meshwise.core.errors import MeshwiseError, UnitError, UnknownNameError
from meshwise.core.explanation import Answer
from meshwise.core.units import format_bytes, parse_count
from meshwise.exports import runs_in
from meshwise.exports.serving import serving_runs_in
from meshwise.report.chart import new_figure, svg_of
from meshwise.report.report import Report
from meshwise.report.table import Columns, counted, picked, said, tabulate
from meshwise.search import Plan
from meshwise.search.fits import Fits
from meshwise.search.serving import ServingPlan
from meshwise.simulation.serving import Capacity, Quantiles, ServingResult, Targets

#: Name of a column -> cell; None: empty.
Row = dict[str, Any]

_TRAIN = (
    "plan_layout=layout runs_in num_chips=estimate.num_chips tokens_per_step=estimate.tokens "
    "step_s=estimate.step_time.expected step_lower_s=estimate.step_time.lower step_upper_s=estimate.step_time.upper "
    "tokens_per_s=estimate.tokens_per_s mfu=estimate.mfu bound=estimate.bound memory_bytes=estimate.memory.total "
    "hbm_capacity_bytes=estimate.hbm_capacity cost_usd_per_billion_tokens days=training.days.expected "
    "cost_usd=training.cost_usd"
)

_SERVE = (
    "plan_layout=setup.decode plan_prefill_layout=setup.prefill plan_mode=setup.mode plan_batch=setup.batch runs_in "
    "num_chips=setup.num_chips idle_chips ttft_s=ttft.expected tpot_s=tpot.expected requests_per_s output_tokens_per_s "
    "bound memory_bytes=memory.total hbm_capacity_bytes=hbm_capacity "
    "cost_usd_per_million_output_tokens=usd_per_million_output_tokens"
)

_SIMULATED = (
    "num_chips=system.num_chips ttft_p50_s=ttft.p50 ttft_p90_s=ttft.p90 ttft_p99_s=ttft.p99 tpot_p50_s=tpot.p50 "
    "tpot_p90_s=tpot.p90 tpot_p99_s=tpot.p99 requests_per_s output_tokens_per_s kept_share capacity_requests_per_s "
    "utilisation refused_requests=refused cost_usd_per_million_output_tokens"
)

_FIT = (
    "plan_layout=serving.layout plan_precision=serving.precision engines=serving.engines "
    "requests_per_engine=serving.requests longest_context_tokens trains longest_sequence_tokens"
)


def _columns(fields: str) -> tuple[str, ...]:
    return tuple(field.partition("=")[0] for field in fields.split())


#: Columns of the answers, by command.
TRAIN_COLUMNS, SERVE_COLUMNS, SIMULATED_COLUMNS, FIT_COLUMNS = map(_columns, (_TRAIN, _SERVE, _SIMULATED, _FIT))


class _With:
    """A value, some of whose attributes are others."""

    def __init__(self, value: object, others: Mapping[str, Any]) -> None:
        self._value = value
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


def _fitted(row: Row, fits: bool) -> Row:
    """A row with its status."""
    if fits:
        return {"status": "ok", **row}
    most, found = format_bytes(row["hbm_capacity_bytes"]), format_bytes(row["memory_bytes"])
    return {"status": "infeasible", **row, "reason": f"needs {found} of {most} a chip"}


def plan_row(plan: Plan) -> Row:
    """The cells of a plan of training."""
    shown = {"layout": str(plan.layout), "runs_in": " ".join(runs_in(plan))}
    return _fitted(picked(_With(plan, shown), _TRAIN), plan.estimate.fits)


def serving_row(plan: ServingPlan) -> Row:
    """The cells of a plan of serving."""
    setup, estimate = plan.setup, plan.estimate
    shown = {
        "setup": _With(setup, {"decode": str(setup.decode), "prefill": str(setup.prefill)}),
        "runs_in": " ".join(serving_runs_in(plan.problem, setup)),
        "idle_chips": plan.problem.cluster.num_chips - setup.num_chips,
    }
    return _fitted(picked(_With(estimate, shown), _SERVE), estimate.fits)


def simulated_row(result: ServingResult, targets: Targets, capacity: Capacity | None) -> Row:
    """The cells of a served load."""
    shown = {
        "ttft": Quantiles.of(result.ttft_s),
        "tpot": Quantiles.of(result.tpot_s),
        "output_tokens_per_s": result.output_tokens / result.end,
        "kept_share": float(result.kept(targets).mean()),
        "capacity_requests_per_s": None if capacity is None else capacity.rate,
        "cost_usd_per_million_output_tokens": None if result.usd is None else result.usd / result.output_tokens * 1e6,
    }
    return {"status": "ok", **picked(_With(result, shown), _SIMULATED)}


def fit_row(found: Fits) -> Row:
    """The cells of what fits: of serving on the engines that hold the most requests, of training in each way."""
    serving = max(found.serving, key=lambda s: s.requests * s.engines, default=None)
    shown = {
        "serving": None if serving is None else _With(serving, {"layout": str(serving.layout)}),
        "longest_context_tokens": max((s.context for s in found.serving), default=0),
        "trains": ", ".join(dict.fromkeys(f"{t.precision} {t.fine_tune}" for t in found.training if t.micro_batch)),
        "longest_sequence_tokens": max((t.context for t in found.training), default=0),
    }
    row = picked(shown, _FIT)
    return {"status": "ok", **row} if found.anything else {"status": "infeasible", **row, "reason": "nothing fits"}


@dataclass(frozen=True, slots=True, repr=False)
class Sweep(Answer):
    """The answers of a sweep.

    Args:
        rows: of each question, in the order of the file: key, status, its options, its answer, reason, cpu_s.
        options: columns of the rows that are options.
        file: where they are, too.
        asked: how many questions this run answered; the others were in the file.
        others: rows of other questions that stay in the file.
    """

    rows: tuple[Row, ...]
    options: tuple[str, ...]
    file: str
    asked: int
    others: int = 0

    def having(self, status: str) -> list[Row]:
        """The rows of a status: ok, infeasible, refused, failed."""
        return [row for row in self.rows if row["status"] == status]


#: Rows that a terminal shows, and the most options that have columns of their own there.
_SHOWN, _NAMED = 20, 4

#: What is drawn upwards, the first that the rows have.
_MEASURES = ("tokens_per_s", "output_tokens_per_s", "ttft_p99_s", "requests_per_engine", "longest_context_tokens")

#: The same where only the price varies.
_COSTS = ("cost_usd_per_billion_tokens", "cost_usd_per_million_output_tokens")


def sweep_report(sweep: Sweep, inputs: Mapping[str, Any], axes: tuple[str, str] | None = None) -> Report:
    """Report a sweep.

    Args:
        sweep: its rows.
        inputs: what was asked.
        axes: columns that are drawn, right and up.
    """
    counts = {name: len(sweep.having(name)) for name in ("ok", "infeasible", "refused", "failed")}
    told = ", ".join(f"{n:,} {name}" for name, n in counts.items() if n)
    before = len(sweep.rows) - sweep.asked
    asked = f"; {before:,} of them were answered before" if before else ""
    varied = _varied(sweep)
    y = axes[1] if axes else _measure(sweep, varied)
    named = varied if len(varied) <= _NAMED else []
    columns: Columns = {name: _cell(name) for name in dict.fromkeys((*named, "status", *((y,) if y else ())))}
    if not named:
        columns = {
            "question": lambda row: ", ".join(_shown(row.get(name)) for name in varied if row.get(name)),
            **columns,
        }
    rows, more = sweep.rows[:_SHOWN], len(sweep.rows) - _SHOWN
    return Report(
        command="sweep",
        inputs=inputs,
        answer=f"{counted(len(sweep.rows), 'question')}: {told}{asked}; rows in {sweep.file}",
        data={"file": sweep.file, "counts": counts, "rows": [dict(row) for row in sweep.rows]},
        body=said(
            tabulate(columns, rows, note=lambda row: row.get("reason") or ""),
            Text(f"... {more:,} more in {sweep.file}") if more > 0 else None,
            Text(f"{sweep.file} also keeps {counted(sweep.others, 'answer')} of other questions")
            if sweep.others
            else None,
        ),
        next_steps=said(
            "rows that failed are asked again by the same command" if counts["failed"] else None,
            "refused: mend these questions; the same command asks what has changed" if counts["refused"] else None,
        ),
    )


def _cell(name: str) -> Callable[[Row], str]:
    return lambda row: _shown(row.get(name))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def _varied(sweep: Sweep) -> list[str]:
    """Options that are not the same in all rows."""
    return [name for name in sweep.options if len({row.get(name) for row in sweep.rows}) > 1]


def _measure(sweep: Sweep, varied: Sequence[str]) -> str:
    """The column that is shown and drawn, where none was asked for; "" where no row has an answer."""
    order = (*_COSTS, *_MEASURES) if varied == ["price"] else (*_MEASURES, *_COSTS)
    return next((name for name in order if any(row.get(name) is not None for row in sweep.rows)), "")


def _number(value: Any) -> float | None:
    """A cell as a number, 4Mi too; None if it is none."""
    try:
        return None if value is None or isinstance(value, bool) else float(parse_count(value, ""))
    except (UnitError, MeshwiseError):
        return None


def choose_axes(sweep: Sweep, x: str | None, y: str | None) -> tuple[str, str]:
    """The columns that the picture shows, right and up.

    Unless named: right the numbers that vary most often, chips where one chip's number varies; up tokens per second,
    a latency, or dollars.

    Raises:
        UnknownNameError: there is no such column.
        MeshwiseError: no row has an answer, or a column that is drawn upwards holds no numbers.
    """
    rows = sweep.having("ok")
    if not rows:
        raise MeshwiseError("--svg: expected rows with an answer, found none")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for flag, name in (("--x", x), ("--y", y)):
        if name is not None and name not in columns:
            raise UnknownNameError(f"column ({flag})", name, columns)
    varied = _varied(sweep)
    up = y or _measure(sweep, varied)
    if not up or not any(_number(row.get(up)) is not None for row in rows):
        raise MeshwiseError(f"--y {up}: expected a column of numbers")
    return x or _across(rows, varied), up


def _across(rows: Sequence[Row], varied: Sequence[str]) -> str:
    """The column that is drawn to the right."""
    chips = {str(row.get("on")).partition(":")[0] for row in rows}
    if "on" in varied and len(chips) < len({row.get("on") for row in rows}) and "num_chips" in rows[0]:
        return "num_chips"
    distinct = {name: len({row.get(name) for row in rows}) for name in varied}
    numbers = [name for name in varied if all(_number(row.get(name)) is not None for row in rows)]
    return max(numbers or varied or ["key"], key=lambda name: distinct.get(name, 0))


#: Colors of lines; and of each ten lines the marks of their points, and their dashes.
_COLORS = 10
_STYLES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))


def sweep_svg(sweep: Sweep, axes: tuple[str, str]) -> str:
    """Draw one column over another as SVG, a line for each combination of the options that vary otherwise.

    Raises:
        MissingDependencyError: matplotlib is absent.
    """
    across, up = axes
    rows = [row for row in sweep.having("ok") if _number(row.get(up)) is not None]
    numbers = all(_number(row.get(across)) is not None for row in rows)
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        others = [
            _label(name, row[name], across) for name in _varied(sweep) if name != across and row.get(name) is not None
        ]
        at = _number(row[across]) if numbers else _shown(row.get(across))
        lines.setdefault(", ".join(others), []).append((at, _number(row[up]) or 0.0))
    figure = new_figure(8, 5)
    drawn = figure.subplots()
    for number, (name, points) in enumerate(lines.items()):
        marker, dashes = _STYLES[number // _COLORS % len(_STYLES)]
        ordered = sorted(points) if numbers else points
        xs, ys = [x for x, _ in ordered], [y for _, y in ordered]
        drawn.plot(xs, ys, marker + dashes * numbers, color=f"C{number % _COLORS}", label=name or up)
    values = [_number(row[across]) or 0.0 for row in rows] if numbers else []
    if values and min(values) > 0 and max(values) >= 8 * min(values):
        drawn.set_xscale("log", base=2)
        drawn.set_xticks(sorted(set(values)), [f"{x:,.6g}" for x in sorted(set(values))])
        drawn.minorticks_off()
    elif values:
        drawn.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}")
    heights = [y for points in lines.values() for _, y in points]
    if min(heights) > 0 and max(heights) >= 4 * min(heights):
        drawn.set_yscale("log")
    else:
        drawn.set_ylim(0, 1.08 * max(heights) or None)
    drawn.set(xlabel=across, ylabel=up)
    drawn.grid(visible=True, alpha=0.3)
    if len(lines) > 1:
        figure.legend(loc="outside lower center", fontsize="small", ncols=2)
    return svg_of(figure)


def _label(name: str, value: Any, across: str) -> str:
    """A value of a line's name; of clusters the chip alone where their number is drawn to the right."""
    text = str(value)
    if name == "on":
        return text.partition(":")[0] if across == "num_chips" else text
    return text if name == "model" else f"{name} {text}"
