"""A plan of training or of serving: what is given, layouts, and what they would do. Its JSON alone reproduces it.

Not here: finding the layout (`search`, `planner`), or words (`report`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from meshwise.core.errors import ConfigError, LayoutError, MeshwiseError, quoted, refused_value
from meshwise.core.explanation import Answer
from meshwise.core.files import parse_json
from meshwise.core.units import format_time
from meshwise.costs.engines import find_serving_calibration
from meshwise.costs.estimate import Estimate, TrainingRun, estimate_training, training_run
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import find_calibration
from meshwise.costs.local import Local
from meshwise.costs.problem import STEPS, ServingProblem, TrainingProblem, check_context
from meshwise.hardware import Cluster, parse_cluster, read_cluster
from meshwise.jobs import ServingLoad, TrainingJob
from meshwise.models import Model, read_model_json
from meshwise.models.model import check_length
from meshwise.sharding.layout import Layout
from meshwise.sharding.serving import ServingLayout

if TYPE_CHECKING:  # planning training loads nothing of serving
    from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
    from meshwise.simulation.serving import ServingResult

#: Kind of a plan -> commands that read its file.
_READERS = {
    "training": "'meshwise simulate train', 'verify', 'run' and 'export'",
    "serving": "'meshwise estimate serve', 'simulate serve' and 'export'",
}
#: Kind of a plan -> what makes one, with --save.
_WRITERS = {
    "training": "'meshwise plan train ... --save' or 'estimate train ... --save'",
    "serving": "'meshwise plan serve ... --save' or 'estimate serve ... --save'",
}

#: Why one of several compared clusters has no plan: Ctrl-C came before the search, or before it found one.
NOT_SEARCHED = "not searched: interrupted"

Kind = Literal["training", "serving"]

_PROBLEM = ("cluster", "cluster_document", "price_usd_per_chip_hour", "calibration")
#: Kind of a plan -> keys of its file.
_KEYS: dict[Kind, tuple[str, ...]] = {
    "training": ("schema_version", "model", "job", *_PROBLEM, "layout", "fabric"),
    "serving": ("schema_version", "kind", "model", "load", *_PROBLEM, "setup"),
}
#: What a file may have besides: of the estimate, which those of older versions lack, and that stages work in step.
_ESTIMATE, _IN_STEP = "estimate", "in_step"
_SETUP = ("mode", "prefill", "decode", "batch", "prefill_batch", "chunk")

Document = Mapping[str, Any]  # what was read from JSON


@dataclass(frozen=True, repr=False)
class Plan(Answer):
    """One layout of a problem, with its estimate.

    Args:
        problem: model, job, cluster, calibration.
        layout: complete, wires included.
        fabric: the network, or the part of it that the layout uses.
        estimate: what it would do.
        training: what the whole run would take, None without a token budget.
    """

    problem: TrainingProblem
    layout: Layout
    fabric: Fabric
    estimate: Estimate
    training: TrainingRun | None
    stale: str = field(default="", compare=False)
    """What the file that the plan was read from says of its estimate, where it is computed otherwise now."""

    def __repr__(self) -> str:
        on = f"{self.problem.model.name} on {self.problem.cluster.num_chips:,} x {self.problem.cluster.chip.title}"
        return f"<Plan: {on}, {self.layout}: {format_time(self.estimate.step_time.expected)} a step>"

    @classmethod
    def of(cls, problem: TrainingProblem, layout: Layout, fabric: Fabric, local: Local | None = None) -> Plan:
        """Estimate `layout`; `local` as `evaluate` takes it."""
        estimate = estimate_training(problem, fabric, layout, local)
        return cls(problem, layout, fabric, estimate, training_run(problem, estimate))

    @property
    def line(self) -> str:
        """The layout as `estimate train --layout` reads it, which chooses nothing but the wires."""
        return self.layout.line(experts=bool(self.problem.model.mixtures))

    @property
    def chip_hours_per_billion_tokens(self) -> float:
        """Expected chip-hours of training on 1e9 tokens."""
        e = self.estimate
        return 1e9 * e.num_chips * e.step_time.expected / e.tokens / 3600

    @property
    def cost_usd_per_billion_tokens(self) -> float | None:
        """Expected dollars of training on 1e9 tokens, None where no price is known."""
        price = self.problem.cluster.price_per_chip_hour
        return None if price is None else price * self.chip_hours_per_billion_tokens

    @property
    def kept(self) -> dict[str, float]:
        """What a file keeps of the estimate, to notice where it is computed otherwise later."""
        return {"step_time_s": self.estimate.step_time.expected, "memory_bytes": self.estimate.memory["total"]}

    def to_json(self) -> str:
        """The inputs verbatim, and what they gave; `from_json` computes it again and compares."""
        return _saved(
            "training",
            self,
            schema_version="1",
            job=self.problem.job.model_dump(),
            layout=self.layout.to_json(),
            fabric=[{"name": d.name, "size": d.size, "wraps": d.wraps} for d in self.fabric.dimensions],
            **{_IN_STEP: True} if self.problem.in_step else {},
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote and estimate it again.

        Raises:
            ConfigError: not such a JSON document; other errors as its parts raise them.
        """
        with _document(text, "training") as value:
            if value["layout"]["wires"] is None:
                raise ConfigError("plan JSON: layout.wires: expected where each mesh axis lies, found null")
            cluster, model = _cluster_and_model(value)
            job = TrainingJob(**value["job"])
            check_length(model, job.seq_len)
            calibration, in_step = find_calibration(value["calibration"], cluster.chip), value.get(_IN_STEP, False)
            problem = TrainingProblem(model, job, cluster, calibration, {False: False, True: True}[in_step])
            fabric = _fabric(cluster, value["fabric"], flat_rings=problem.calibration.flat_rings)
            layout = Layout.from_json(value["layout"])
            _check_batch(layout, job)
            _check_wires(layout, fabric)
            plan = cls.of(problem, layout, fabric)
            return replace(plan, stale=_stale(value, plan.kept))


@dataclass(frozen=True, repr=False)
class ServingPlan(Answer):
    """A setup of a problem, with its estimate.

    Args:
        problem: model, load, cluster, calibration.
        estimate: what its setup would do, wires included.
    """

    problem: ServingProblem
    estimate: ServingEstimate
    stale: str = field(default="", compare=False)
    """What the file that the plan was read from says of its estimate, where it is computed otherwise now."""

    def __repr__(self) -> str:
        on = f"{self.setup.num_chips:,} x {self.problem.cluster.chip.title}, {self.setup.decode}"
        return f"<ServingPlan: {self.problem.model.name} on {on}: TPOT {format_time(self.estimate.tpot.expected)}>"

    @property
    def setup(self) -> ServingSetup:
        """Layouts with wires, and batches."""
        return self.estimate.setup

    @property
    def kept(self) -> dict[str, float]:
        """What a file keeps of the estimate, to notice where it is computed otherwise later."""
        return {"ttft_s": self.estimate.ttft.expected, "tpot_s": self.estimate.tpot.expected}

    def to_json(self) -> str:
        """The inputs verbatim, and what they gave; `from_json` computes it again and compares."""
        layouts = {step: getattr(self.setup, step).to_json() for step in STEPS}
        return _saved(
            "serving",
            self,
            schema_version="2",
            kind="serving",
            load=self.problem.load.model_dump(mode="json"),
            setup={name: getattr(self.setup, name) for name in _SETUP} | layouts,
        )

    @classmethod
    def from_json(cls, text: str) -> ServingPlan:
        """Read what `to_json` wrote and estimate it again.

        Raises:
            ConfigError: not such a JSON document; other errors as its parts raise them.
        """
        from meshwise.costs.serving.estimate import estimate_serving  # noqa: PLC0415

        with _document(text, "serving") as value:
            cluster, model = _cluster_and_model(value)
            calibration = find_serving_calibration(value["calibration"], cluster.chip)
            load = ServingLoad(**value["load"])
            check_context(model, load)
            problem = ServingProblem(model, load, cluster, calibration)
            setup = _setup(value["setup"])
            if setup.num_chips > cluster.num_chips:
                raise LayoutError(
                    f"plan JSON: setup: its engines need {setup.num_chips:,} chips, {cluster.name} has "
                    f"{cluster.num_chips:,}; lower replicas, or plan again"
                )
            for layout in (setup.prefill, setup.decode):
                _check_wires(layout, problem.network)
            plan = cls(problem, estimate_serving(problem, setup))
            return replace(plan, stale=_stale(value, plan.kept))


def _check_batch(layout: Layout, job: TrainingJob) -> None:
    """Refuse, by a LayoutError with both numbers, microbatches that are not the job's batch."""
    if abs(layout.sequences - job.sequences) > job.sequences * job.batch_slack + 1e-9:
        raise LayoutError(
            f"plan JSON: layout: its microbatches are {layout.sequences:,} sequences a step, the job's batch is "
            f"{job.sequences:,.6g} (within {job.batch_slack:.0%}); plan again"
        )


def _check_wires(layout: Layout | ServingLayout, fabric: Fabric) -> None:
    """Refuse wires that leave out an axis, or do not lie on the network.

    Raises:
        LayoutError: with the axis, or the dimension of the network.
    """
    wires, shape = dict(layout.wires or ()), fabric.sizes
    for axis in (a for a in layout.FIELDS.axes if a != "replicas"):
        if getattr(layout, axis) > 1 and axis not in wires:
            raise LayoutError(f"plan JSON: layout.wires: {axis}={getattr(layout, axis)} lies nowhere; plan again")
    for axis, extents in wires.items():
        if len(extents) != len(shape):
            raise LayoutError(
                f"plan JSON: layout.wires.{axis}: expected {len(shape)} extents, one for each dimension of the "
                f"network, found {len(extents)}; plan again"
            )
    for number, size in enumerate(shape):
        used = math.prod(extents[number] for extents in wires.values())
        if used > size:
            raise LayoutError(
                f"plan JSON: layout.wires: dimension {fabric.dimensions[number].name} of the network has {size:,} "
                f"chips, the wires use {used:,}; plan again"
            )


def _saved(kind: Kind, plan: Plan | ServingPlan, /, **own: object) -> str:
    """The JSON of a plan: what it has of its `own`, what it was made for, and its estimate."""
    problem = plan.problem
    value = own | {
        "model": json.loads(problem.model.to_json()),
        "cluster": problem.cluster.name,
        "cluster_document": problem.cluster.document,
        "price_usd_per_chip_hour": problem.cluster.price_per_chip_hour,
        "calibration": problem.calibration.name,
    }
    kept = {key: value[key] for key in (*_KEYS[kind], _IN_STEP) if key in value}
    return json.dumps(kept | {_ESTIMATE: plan.kept}, indent=2)


def _stale(value: Document, now: Mapping[str, float]) -> str:
    """Where a file's estimate is not what is computed `now`: "step_time_s 3.1 saved, 3.2 now"; nothing where it is.

    Raises:
        ConfigError: it holds no such numbers.
    """
    kept = value.get(_ESTIMATE, now)
    if not isinstance(kept, Mapping) or set(kept) != set(now):
        raise ConfigError(f"plan JSON: {_ESTIMATE}: expected the numbers {', '.join(now)}; leave it out, or save again")
    for name, number in kept.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ConfigError(f"plan JSON: {_ESTIMATE}.{name}: expected a finite number, found {quoted(number)}")
    return ", ".join(
        f"{name} {kept[name]:.6g} saved, {number:.6g} now"
        for name, number in now.items()
        if not math.isclose(kept[name], number, rel_tol=1e-9)
    )


def _parsed(text: str, kind: Kind) -> Document:
    """The JSON object of a saved plan, in the current schema; refused where it is none."""
    version, save = ("1", "--save") if kind == "training" else ("2", "'plan serve --save'")
    try:
        value = parse_json(text, "plan JSON", finite=False)  # some models bound time steps by infinity
    except ConfigError as error:
        raise ConfigError(f"{error}; expected what {save} writes") from None
    check_kind(value, kind)
    if kind == "serving" and kind_of(value) != kind:
        raise ConfigError("plan JSON: expected a plan of serving, as 'meshwise plan serve ... --save' writes it")
    value = _upgraded(value) if kind == "serving" and isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and value.get("schema_version", version if kind == "training" else None) != version:
        raise ConfigError(
            f"plan JSON: schema_version: expected {version!r}, found {value.get('schema_version')!r}; another version "
            "of meshwise saved it: plan again with this one"
        )
    besides = {_ESTIMATE, _IN_STEP} if kind == "training" else {_ESTIMATE}
    if not isinstance(value, Mapping) or set(value) - besides != set(_KEYS[kind]):
        found = ", ".join(sorted(value)) if isinstance(value, Mapping) else type(value).__name__
        raise ConfigError(f"plan JSON: expected the keys {', '.join(sorted(_KEYS[kind]))}; found {found}")
    return value


@contextmanager
def _document(text: str, kind: Kind) -> Iterator[Document]:
    """A saved plan; where something goes wrong with it that says no more, say that a value was changed."""
    value = _parsed(text, kind)
    try:
        yield value
    except MeshwiseError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        raise _changed(error) from error


def _cluster_and_model(value: Document) -> tuple[Cluster, Model]:
    """The cluster of a plan, from its name or from the text of its file, at the plan's price; and its model.

    Raises:
        ClusterError: there is no such cluster, or the text describes none.
    """
    name, document, price = (value[key] for key in ("cluster", "cluster_document", "price_usd_per_chip_hour"))
    if document:
        cluster = read_cluster(document, name=name, where="plan JSON: cluster_document")
        cluster = cluster if price is None else cluster.replace(chip=cluster.chip.replace(price_per_chip_hour=price))
    else:
        cluster = parse_cluster(name, price=price)
    return cluster, read_model_json(json.dumps(value["model"]))


def kind_of(value: object) -> Kind | None:
    """What kind of plan a JSON value was saved as; None where it is no plan, or says not which.

    Those of serving have a key `kind`, those of training have a job and one layout.
    """
    if not isinstance(value, Mapping):
        return None
    if value.get("kind") == "serving":
        return "serving"
    return "training" if "kind" not in value and {"model", "job", "cluster", "layout"} <= set(value) else None


def check_kind(value: object, kind: Kind) -> None:
    """Refuse a plan of the other kind.

    Raises:
        ConfigError: with the commands that read it.
    """
    found = kind_of(value)
    if found not in (None, kind):
        raise ConfigError(
            f"plan JSON: this is a plan of {found}, which {_READERS[found]} read; expected one of {kind}, as "
            f"{_WRITERS[kind]} writes it"
        )


def _changed(error: Exception) -> ConfigError:
    """Which value of a saved plan was changed, judging by the error it caused."""
    if isinstance(error, ValidationError):
        words = refused_value(error)
    elif isinstance(error, LookupError):
        words = f"{error} is missing"
    else:
        words = "one is of another kind than its neighbours need (null, or text for a number)"
    return ConfigError(
        f"plan JSON: expected what --save writes; a value was changed: {words}; undo that, or save the plan again"
    )


def _upgraded(value: Document) -> Document:
    """A plan of schema 1 as schema 2 writes it: the layout of decode steps was called "generate"."""
    setup = value.get("setup")
    if value.get("schema_version") != "1":
        return value
    if isinstance(setup, Mapping) and "generate" in setup:
        setup = {"decode" if name == "generate" else name: part for name, part in setup.items()}
    return {**value, "setup": setup, "schema_version": "2"}


def _setup(value: object) -> ServingSetup:
    if not isinstance(value, Mapping) or set(value) != set(_SETUP):
        raise ConfigError(f"plan JSON: setup: expected the keys {', '.join(_SETUP)}")
    if value["mode"] not in ("aggregated", "disaggregated"):
        raise ConfigError(f"plan JSON: setup: mode: expected aggregated or disaggregated, found {value['mode']!r}")
    for name in ("batch", "prefill_batch", "chunk"):
        number = value[name]
        if not (name == "chunk" and number is None) and (type(number) is not int or number < 1):
            raise ConfigError(f"plan JSON: setup: {name}: expected a whole number, at least 1, found {number!r}")
    prefill, decode = (ServingLayout.from_json(value[name]) for name in ("prefill", "decode"))
    from meshwise.costs.serving.answer import ServingSetup  # noqa: PLC0415

    return ServingSetup(value["mode"], prefill, decode, value["batch"], value["prefill_batch"], value["chunk"])


def _fabric(cluster: Cluster, used: list[Document], *, flat_rings: bool) -> Fabric:
    """The part of the cluster's network that a plan used."""
    whole = Fabric.of(cluster, flat_rings=flat_rings)
    if [d.get("name") for d in used] != [d.name for d in whole.dimensions]:
        raise ConfigError(
            f"plan JSON: fabric names {[d.get('name') for d in used]}, "
            f"the cluster has {[d.name for d in whole.dimensions]}"
        )
    all_of_it = all(d.size == int(u["size"]) for d, u in zip(whole.dimensions, used, strict=True))
    dims = (
        replace(d, size=int(u["size"]), wraps=bool(u["wraps"]), twisted=d.twisted and all_of_it)
        for d, u in zip(whole.dimensions, used, strict=True)
    )
    return replace(whole, dimensions=tuple(dims))


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan that was sent requests.

    Args:
        estimate: what closed forms expect of it at full load.
        rate: requests per second to the whole plan.
        result: what became of those that were simulated.
        parts: equal parts of the plan, of which one was simulated, with as large a part of the rate.
        share: of the requests that kept all targets.
    """

    estimate: ServingEstimate
    rate: float
    result: ServingResult
    parts: int = 1
    share: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second at this rate: what arrives is served."""
        return self.rate * self.estimate.output

    @property
    def tokens_per_chip(self) -> float:
        """The same for each chip that is used."""
        return self.tokens_per_s / self.estimate.setup.num_chips

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """All dollars over the output tokens at this rate."""
        dollars = self.estimate.usd_per_s
        return None if dollars is None else dollars / (self.rate * self.estimate.output) * 1e6
