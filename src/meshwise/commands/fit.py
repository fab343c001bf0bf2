"""`fit`: whether a model fits on a cluster, for serving and for training. Not here: what is fast (`plan_train`)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from meshwise.commands.command import Screen, Tell, command, silent, verb
from meshwise.commands.plan_serve import split_precisions
from meshwise.commands.requests import Flag
from meshwise.commands.where import ModelOnCluster
from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import Quantity, format_count, parse_count
from meshwise.costs.compute import check_precision, published_precision
from meshwise.costs.engines import find_serving_calibration
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import ServingProblem, TrainingProblem
from meshwise.hardware import Cluster
from meshwise.jobs import ServingLoad, TrainingJob, parse_serving_precision
from meshwise.jobs.training import whole_tokens
from meshwise.models import Model, load_model
from meshwise.models.model import check_length
from meshwise.report.fit import fit_report
from meshwise.search.fits import Fits, ServingFit, serving_fits, training_fits

#: Ways to train that are tried: precision, and what is trained.
TRAINED = (("mixed", "full"), ("book", "full"), ("mixed", "lora"), ("mixed", "qlora"))

#: Length of sequences unless one is given, or the model reads fewer.
_USUAL = 8192

#: Tokens of the shortest request.
_LEAST = 2


class FitRequest(ModelOnCluster):
    """What `meshwise fit` is asked."""

    sections: ClassVar = {"Fit": ("on", "context", "precision")}

    context: Annotated[float, Quantity("tokens", parse_count, format_count, "8Ki")] | None = Field(
        default=None, ge=_LEAST, le=1e9, serialization_alias="context_tokens"
    )
    """Tokens of a request, prompt and output together, and of a training sequence, also more than what the model was
    made for; by default 8192, or what the model reads."""
    precision: Annotated[str, Flag("PRECISIONS")] = ""
    """Serving precisions to try, fp8,int4-weights; by default those that the chip multiplies in, and int4 weights."""

    @field_validator("context")
    @classmethod
    def _context_is_whole(cls, context: float | None) -> float | None:
        return context if context is None else whole_tokens(context)

    @field_validator("precision")
    @classmethod
    def _precisions_are_known(cls, text: str) -> str:
        for one in split_precisions(text):
            parse_serving_precision(one)
        return text

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those to try; none for the usual ones."""
        return split_precisions(self.precision)


@command(FitRequest)
def fit(request: FitRequest, *, progress: Tell = silent) -> Fits:
    """Find out what fits in memory: what `meshwise fit` answers, as values.

    >>> import meshwise
    >>> found = meshwise.fit("llama-3-8b", on="h100:1")
    >>> found.serving[0].requests > 10, [t.fine_tune for t in found.training if t.micro_batch]
    (True, ['lora', 'qlora'])

    Args:
        progress: told a line now and then.

    Raises:
        MeshwiseError: an argument that cannot be understood; a named precision that the chip cannot multiply.
    """
    cluster, model = request.must_find(), load_model(request.model)
    context = request.context or min(_USUAL, model.max_seq_len or _USUAL)
    check_length(model, context)
    if context < _LEAST:
        raise MeshwiseError(
            f"{model.name} reads {context:g} token, and a request has {_LEAST}: one to read, one written"
        )
    loads = [_load(context, name, request.context) for name in request.precisions or usual_precisions(model, cluster)]
    for load in loads if request.precisions else ():
        check_precision(cluster.chip, load.formats.formats)
    refused: dict[str, str] = {}
    serving: tuple[ServingFit, ...] = ()
    try:
        progress("what fits of serving")
        model.serving_program("decode")  # refuses what cannot be served
        calibration = find_serving_calibration("fitted", cluster.chip)
        serving = serving_fits([ServingProblem(model, load, cluster, calibration) for load in loads])
    except MeshwiseError as error:
        refused["serving"] = str(error)
    progress("what fits of training")
    training, others = training_fits(_training_problems(model, cluster, context))
    published = "" if request.precisions or model.quantization is None else loads[0].precision
    return Fits(model, cluster, context, serving, training, published, refused | others)


def _load(context: float, precision: str, asked: float | None) -> ServingLoad:
    """Half of the context is prompt; what is asked for may be longer than what the model was made for."""
    return ServingLoad(prompt=context // 2, output=context - context // 2, precision=precision, context=asked)


def usual_precisions(model: Model, cluster: Cluster) -> tuple[str, ...]:
    """The published checkpoint's, those that a chip multiplies in, and weights of four bits, which any chip reads."""
    rates = {dtype.value for dtype in cluster.chip.flops_per_s}
    eight = next((name for name in ("fp8", "int8") if name in rates), "int8-weights")
    usual = ("bf16", eight, *(("fp4",) if "fp4" in rates else ()), "int4-weights")
    return tuple(dict.fromkeys((published_precision(model, cluster.chip), *usual)))


def _training_problems(model: Model, cluster: Cluster, context: float) -> list[TrainingProblem]:
    calibration = find_calibration("fitted", cluster.chip)
    jobs = [TrainingJob.one_sequence(context, precision=p, fine_tune=t) for p, t in TRAINED]
    return [TrainingProblem(model, job, cluster, calibration) for job in jobs]


Answer.reports[Fits] = lambda found: fit_report(found, {})


@verb(FitRequest)
def show_fit(screen: Screen, request: FitRequest) -> int | None:
    """Find out what fits in memory, for serving and for training.

    Requests and context by precision and size of an engine; training by what is trained and how it is split. Memory
    alone, by the same accounting as 'estimate'; what is fast is found by 'plan'. If nothing fits, the exit code is 3.

    \b
      meshwise fit llama-3-70b --on h100:8
      meshwise fit qwen3-32b --on rtx-4090:2 --context 32Ki
      meshwise fit gpt-oss-120b --on h100:1 --precision fp4
    """  # noqa: D301  (click's mark for lines that stay as they are)
    found = fit.answer(request, progress=screen.progress)
    screen.show(fit_report(found, request.echo()))
    return None if found.anything else InfeasibleError.exit_code
