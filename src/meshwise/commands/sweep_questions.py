"""The questions of a sweep: read from a TOML or CSV file, each checked as its command's own request, and answered.

In TOML an option that has a list is crossed with the others; in CSV a row is a question. Not here: running many
(`workers`), and the table of answers (`sweep_table`).
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from meshwise import __version__
from meshwise.commands.command import in_order
from meshwise.commands.estimate_serve import EstimateServeRequest
from meshwise.commands.estimate_train import EstimateTrainRequest, estimate_train
from meshwise.commands.fit import FitRequest, fit
from meshwise.commands.plan_files import read_text
from meshwise.commands.plan_serve import PlanServeRequest, find_serving_plans
from meshwise.commands.plan_train import PlanTrainRequest, plan_train
from meshwise.commands.requests import Flag, Request, former_names, marker, validated
from meshwise.commands.simulate_serve import SimulateServeRequest, simulate_serve
from meshwise.core.errors import ConfigError, InfeasibleError, MeshwiseError, UnknownNameError
from meshwise.core.files import parse_toml
from meshwise.models import load_model
from meshwise.report.sweep import (
    FIT_COLUMNS,
    SERVE_COLUMNS,
    SIMULATED_COLUMNS,
    TRAIN_COLUMNS,
    Row,
    fit_row,
    plan_row,
    serving_row,
    simulated_row,
)
from meshwise.search.serving import ServingPlan

#: The key that names the command, and the tables of options that go together.
COMMAND, CASE = "command", "case"

Value = str | int | float | bool


class SimulatedRequest(SimulateServeRequest):
    """What `meshwise simulate serve` is asked, with what serves."""

    positional = ("costs",)

    costs: Annotated[str, Flag(name="PLAN|COSTS")]
    """A plan of serving, or the step costs of an engine: a JSON file."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a command is for a sweep.

    Args:
        request: its request.
        check: resolves the request's names, before anything is run.
        row: answers, as cells of a table.
        columns: that a row may have.
    """

    request: type[Request]
    check: Callable[[Any], object]
    row: Callable[[Any], Row]
    columns: tuple[str, ...]


def _plan_train(request: PlanTrainRequest) -> Row:
    return plan_row(plan_train.answer(request).plans[0])


def _plan_serve(request: PlanServeRequest) -> Row:
    problem = request.problem()
    return serving_row(ServingPlan(problem, find_serving_plans(request, problem).plans[0]))


def _estimate_serve(request: EstimateServeRequest) -> Row:
    return serving_row(request.plan())


def _check_plan_train(request: PlanTrainRequest) -> None:
    request.constraints(request.problem())


def _check_plan_serve(request: PlanServeRequest) -> None:
    if request.several:
        raise MeshwiseError(
            "on, precision: found several in one question; write a list, which makes a question of each"
        )
    request.constraints_on(request.problem())


def _check_estimate_serve(request: EstimateServeRequest) -> None:
    next(request.setups(request.problem()))


def _check_simulated(request: SimulatedRequest) -> None:
    request.load()
    read_text("costs", request.costs, "'meshwise plan serve ... --save plan.json' writes a plan")


def _simulate_serve(request: SimulatedRequest) -> Row:
    served = simulate_serve.answer(request.costs, request)
    return simulated_row(served.result, served.targets, served.capacity)


#: Command -> its kind.
KINDS = {
    "plan train": Kind(PlanTrainRequest, _check_plan_train, _plan_train, TRAIN_COLUMNS),
    "plan serve": Kind(PlanServeRequest, _check_plan_serve, _plan_serve, SERVE_COLUMNS),
    "estimate train": Kind(
        EstimateTrainRequest,
        lambda request: request.problem(),
        lambda request: plan_row(estimate_train.answer(request).plans[0]),
        TRAIN_COLUMNS,
    ),
    "estimate serve": Kind(EstimateServeRequest, _check_estimate_serve, _estimate_serve, SERVE_COLUMNS),
    "simulate serve": Kind(SimulatedRequest, _check_simulated, _simulate_serve, SIMULATED_COLUMNS),
    "fit": Kind(
        FitRequest,
        lambda request: (request.must_find(), load_model(request.model)),
        lambda request: fit_row(fit.answer(request)),
        FIT_COLUMNS,
    ),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question, as it was written.

    Args:
        command: of `KINDS`.
        options: field of its request -> what was written.
        places: field -> where, for errors.
        place: where the question stands; all begin with the file.
    """

    command: str
    options: Mapping[str, Value]
    places: Mapping[str, str]
    place: str

    def request(self) -> Request:
        """The command's own request.

        Raises:
            MeshwiseError: with where, what was expected and what was found; a line for each problem.
        """
        kind = KINDS[self.command]
        names = {name: f"{self.place}, {name.replace('_', '-')}" for name in kind.request.model_fields}
        try:
            request = validated(kind.request, self.options, {**names, **self.places})
            with suppress(InfeasibleError):  # an answer of its own
                kind.check(request)
        except MeshwiseError as error:
            places = (self.place, *self.places.values())
            lines = [line if line.startswith(places) else f"{self.place}: {line}" for line in str(error).split("\n")]
            raise MeshwiseError("\n".join(lines)) from None
        return request

    def key(self, request: Request | None) -> str:
        """What tells it from others: command, inputs with defaults, contents of files, version of this package.

        Args:
            request: its own; None where it cannot be asked.
        """
        files = {name: _digest(value) for name, value in self.options.items() if isinstance(value, str)}
        inputs = dict(self.options) if request is None else request.echo()
        said = [__version__, self.command, inputs, {name: found for name, found in files.items() if found}]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _digest(text: str) -> str:
    """Of the file that a value names, if it names one."""
    for path in (Path(text), Path(text) / "config.json"):
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        except (OSError, ValueError):
            continue
    return ""


def answer(question: Question) -> Row:
    """Answer one question: the cells of its row, of which `status` and `reason` say whether it has an answer."""
    begun = time.process_time()
    try:
        row = KINDS[question.command].row(question.request())
    except InfeasibleError as error:
        row = {"status": "infeasible", "reason": str(error)}
    except MeshwiseError as error:
        row = {"status": "refused", "reason": str(error)}
    return {**row, "cpu_s": round(time.process_time() - begun, 3)}


# Reading


def read_questions(file: Path, command: str | None = None) -> list[Question]:
    """Read the questions of a file.

    Args:
        file: TOML, or CSV.
        command: of all questions, where the file names none.

    Raises:
        MeshwiseError: no such file; ConfigError: it cannot be understood; UnknownNameError: a command or an option.
    """
    expected = "TOML (sweep.toml) or CSV (sweep.csv)"
    if file.suffix not in (".toml", ".csv"):
        raise MeshwiseError(f"{file}: expected {expected}, told by the ending of its name")
    text = read_text("sweep", file, "docs/sweep.md shows one", expected)
    rows = _crossed(text, str(file)) if file.suffix == ".toml" else _lines(text, str(file))
    found = [_question(options, places, place, command) for options, places, place in rows]
    if not found:
        raise ConfigError(f"{file}: expected at least one question, found none; docs/sweep.md shows a file")
    return found


#: Option as written -> value; option -> where; where the question is.
_Written = tuple[dict[str, Value], dict[str, str], str]


def _question(options: dict[str, Value], places: Mapping[str, str], place: str, command: str | None) -> Question:
    """Find the command and the fields that options mean."""
    own = options.pop(COMMAND, None)
    if own is not None and command is not None and own != command:
        raise ConfigError(f"{places[COMMAND]}: found {own!r}, and --command {command}; leave one of them out")
    name = own or command
    if name is None:
        raise ConfigError(f"{place}: {COMMAND} is missing: {', '.join(KINDS)}; write it, or give --command")
    if name not in KINDS:
        raise UnknownNameError("command of a sweep", str(name), KINDS, f"In {place}.", list_all=True)
    fields = _fields(KINDS[str(name)].request)
    given: dict[str, Value] = {}
    where: dict[str, str] = {}
    for option, value in options.items():
        field = fields.get(option.removeprefix("--").replace("-", "_"))
        if field is None:
            hint = f"In {places[option]}; 'meshwise {name} --help' says what each means."
            raise UnknownNameError("option", option, [known.replace("_", "-") for known in fields], hint)
        if field in given:
            raise ConfigError(f"{places[option]}: given twice")
        given[field], where[field] = value, places[option]
    return Question(str(name), given, where, place)


def _fields(request: type[Request]) -> dict[str, str]:
    """Option, as Python names would be, -> field: names, former names and flags of their own."""
    found: dict[str, str] = {}
    for name, info in in_order(request).items():
        own = (marker(info, Flag) or Flag()).name
        names = (name, *former_names(name, info), *((own.removeprefix("--"),) if own.startswith("--") else ()))
        found |= {one.replace("-", "_"): name for one in names}
    return found


def _lines(text: str, file: str) -> Iterator[_Written]:
    """The questions of CSV: the first line has the options, an empty cell leaves one out."""
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        if twice := [name for name in header if not name or header.count(name) > 1]:
            raise ConfigError(
                f"{file}, line 1: expected the name of an option in each column, once; found {twice[0]!r}"
            )
        for row in rows:
            place = f"{file}, line {rows.line_num}"
            if len(row) > len(header):
                raise ConfigError(f"{place}: expected {len(header)} cells, found {len(row)}; quote what has commas")
            cells = {name: cell.strip() for name, cell in zip(header, row, strict=False) if cell.strip()}
            if cells:
                yield dict(cells), {name: f"{place}, column {name}" for name in cells}, place
    except csv.Error as error:
        raise ConfigError(f"{file}, line {rows.line_num}: expected CSV: {error}") from None


def _crossed(text: str, file: str) -> Iterator[_Written]:
    """The questions of TOML: every combination of what lists hold, for each `[[case]]` if there are any."""
    found = parse_toml(text, file)
    cases = found.pop(CASE, [{}])
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise ConfigError(f"{file}: {CASE}: expected tables of options that go together, each below [[{CASE}]]")
    blocks = re.split(rf"^\s*\[\[\s*{CASE}\s*\]\].*$", text, flags=re.MULTILINE)
    starts = list(itertools.accumulate((block.count("\n") for block in blocks), initial=1))
    for number, case in enumerate(cases, 1):
        if both := sorted(found.keys() & case.keys()):
            raise ConfigError(f"{file}: {both[0]} is given for all questions and in [[{CASE}]] {number}; leave one out")
        own = blocks[number] if number < len(blocks) else ""
        places = {name: _place(file, name, blocks[0], 1) for name in found}
        places |= {name: _place(file, name, own, starts[number] if own else 1) for name in case}
        options = {name: _values(value, places[name]) for name, value in {**found, **case}.items()}
        varied = [name for name, values in options.items() if len(values) > 1]
        for values in itertools.product(*options.values()):
            question = dict(zip(options, values, strict=True))
            these = ", ".join(f"{name}={question[name]}" for name in varied)
            yield question, places, f"{file}{f' ({these})' if these else ''}"


def _place(file: str, name: str, block: str, start: int) -> str:
    """Where an option stands, by line if it is found."""
    key = re.search(rf"^\s*[\"']?{re.escape(name)}[\"']?\s*=", block, re.MULTILINE)
    line = f", line {start + block.count(chr(10), 0, key.end())}" if key else ""
    return f"{file}{line}, {name}"


def _values(value: Any, place: str) -> Sequence[Value]:
    """What an option takes in turn."""
    values = value if isinstance(value, list) else [value]
    if wrong := [one for one in values if not isinstance(one, str | int | float | bool)]:
        raise ConfigError(f"{place}: expected text, a number, true or false, or a list of them, found {wrong[0]!r}")
    if not values:
        raise ConfigError(f"{place}: expected at least one value, found an empty list")
    if twice := [one for one in values if values.count(one) > 1]:
        raise ConfigError(f"{place}: {twice[0]!r} is listed twice; leave one out")
    return values
