"""`calibrate`: a chip's calibration refined by measured steps, or serving. Not here: fitting (`scoring`)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from meshwise.commands.command import Screen, Tell, command, silent, verb
from meshwise.commands.requests import File, Request
from meshwise.core.errors import MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.costs.calibration_files import ALONE, calibration_text, is_file_name
from meshwise.costs.engines import ENGINES
from meshwise.costs.fitted import find_calibration
from meshwise.costs.machine import MeasuredOperation, check_new, write_new
from meshwise.hardware import load_chip
from meshwise.report.calibrate import calibrate_report
from meshwise.scoring import ServingRun, TrainingRun, is_operations, is_serving, read_rows, read_text
from meshwise.scoring.benches import Served, is_bench, read_bench
from meshwise.scoring.fitting import Refined, mean_error, refine, refine_operations, refine_serving
from meshwise.scoring.operations import OperationPrediction


class CalibrateRequest(Request):
    """What `meshwise calibrate` is asked."""

    positional = ("file",)

    file: File
    """Measured training steps, serving or single operations of one chip, as CSV (docs/measurements.md), or results of
    vLLM's, SGLang's, guidellm's or inference-perf's benchmark, as JSON; one row is enough."""
    calibration: str = "fitted"
    """Calibration to refine: fitted (with the rows' software or engine), fitted+ENGINE, operations, or a family."""
    on: str | None = None
    """Of a benchmark's results: the chips that served, such as h100:8. Of collectives: those that took part."""
    model: str | None = None
    """Of a benchmark's results: the model, where they do not name one that is known."""
    tensor: int | None = Field(default=None, ge=1)
    """Of a benchmark's results: chips of an engine (tensor parallelism); all by default."""
    weights: str | None = None
    """Of a benchmark's results: format of the weights, such as fp8; 16 bits by default."""
    save: Path | None = None
    """Write the calibration to this new file (.json), which --calibration takes."""


@command(CalibrateRequest)
def calibrate(request: CalibrateRequest, *, progress: Tell = silent) -> Refined:
    """Refine a chip's calibration by measured steps or serving: what `meshwise calibrate` answers, as values.

    Args:
        progress: told a line now and then.

    Returns: constants before and after, errors before, after, and with each row left out, rows refused.

    Raises:
        MeshwiseError: a file that cannot be read or written; no row that can be used; rows of several chips.
    """
    engine = request.calibration.removeprefix("fitted+")
    if engine not in ENGINES:
        find_calibration(request.calibration, load_chip("h100-sxm"))  # checks the name
    if request.save is not None and not is_file_name(request.save.name):
        raise MeshwiseError(f"--save {request.save}: expected a name that ends in .json, as --calibration does")
    check_new(request.save)
    refined = _refined(request, read_text(Path(request.file)), progress)
    if request.save is not None:
        measured = {
            "rows": len(refined.rows),
            "of": ALONE if isinstance(refined.rows[0], OperationPrediction) else "steps",
            "mape_before": mean_error(refined.before),
            "mape_after": mean_error(refined.after),
            "mape_left_out": mean_error(refined.left_out) if refined.left_out else None,
        }
        write_new(request.save, calibration_text(refined.chip.name, refined.base, refined.calibration, measured))
    return refined


def _refined(request: CalibrateRequest, text: str, progress: Tell) -> Refined:
    """Read the file for what it is, and refine."""
    words = {"--on": request.on, "--model": request.model, "--tensor": request.tensor, "--weights": request.weights}
    if is_bench(text):
        if request.on is None:
            raise MeshwiseError(
                f"{request.file}: results do not say which chips served; give --on, such as --on h100:8"
            )
        served = Served(request.on, request.model or "", request.tensor, request.weights or "")
        return refine_serving(read_bench(text, request.file, served), request.calibration, progress)
    if is_operations(text):
        if given := [name for name, value in words.items() if value is not None and name != "--on"]:
            raise MeshwiseError(f"{', '.join(given)}: single operations are of no model; leave it out")
        return refine_operations(
            read_rows(text, request.file, MeasuredOperation), request.calibration, request.on, progress
        )
    if given := [name for name, value in words.items() if value is not None]:
        raise MeshwiseError(f"{', '.join(given)}: rows of CSV say this themselves; expected with results in JSON alone")
    if is_serving(text):
        return refine_serving(read_rows(text, request.file, ServingRun), request.calibration, progress)
    return refine(read_rows(text, request.file, TrainingRun), request.calibration, progress)


Answer.reports[Refined] = lambda refined: calibrate_report(refined, {})


@verb(CalibrateRequest)
def show_calibration(screen: Screen, request: CalibrateRequest) -> None:
    """Refine a chip's calibration by your own measured steps.

    FILE has a step of training, a time of serving, or a single operation (of bench or profile --save) a row, in the
    columns of docs/measurements.md, or is what a benchmark of serving wrote: vllm bench serve, SGLang's bench_serving,
    guidellm, inference-perf.
    Constants move as far as the rows support it, within what is known of the chip. Rows that are faster than
    physically possible, or take ten times what is predicted, are refused.

    \b
      meshwise calibrate runs.csv --save ours.json
      meshwise calibrate results.json --on h100:8 --save served.json
      meshwise plan train llama-3-70b --on h100:64 --batch-tokens 1Mi --calibration ours.json
    """  # noqa: D301  (click's mark for lines that stay as they are)
    screen.show(calibrate_report(calibrate.answer(request, progress=screen.progress), request.echo()))
