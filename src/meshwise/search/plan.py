"""A plan: model, job, cluster and layout, with what they would do. Its JSON alone reproduces it.

Not here: finding the layout (`search`, `planner`), or words (`report`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.costs.estimate import Estimate, TrainingRun, estimate_training, training_run
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import ServingProblem, TrainingProblem
from meshwise.hardware import Cluster, parse_cluster, read_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import read_model_json
from meshwise.models.model import check_length
from meshwise.sharding.layout import Layout

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

_KEYS = (
    "schema_version",
    "model",
    "job",
    "cluster",
    "cluster_document",
    "price_usd_per_chip_hour",
    "calibration",
    "layout",
    "fabric",
)

Kind = Literal["training", "serving"]

#: What was read from JSON.
Document = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
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

    @classmethod
    def of(cls, problem: TrainingProblem, layout: Layout, fabric: Fabric) -> Plan:
        """Estimate `layout`."""
        estimate = estimate_training(problem, fabric, layout)
        return cls(problem, layout, fabric, estimate, training_run(problem, estimate))

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

    def to_json(self) -> str:
        """The inputs verbatim; `from_json` computes the rest again."""
        value = {
            "schema_version": "1",
            **saved_problem(self.problem),
            "job": self.problem.job.model_dump(),
            "layout": self.layout.to_json(),
            "fabric": [{"name": d.name, "size": d.size, "wraps": d.wraps} for d in self.fabric.dimensions],
        }
        return json.dumps({key: value[key] for key in _KEYS}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote and estimate it again.

        Raises:
            ConfigError: not such a JSON document; other errors as its parts raise them.
        """
        value = read_document(text, "training", _KEYS)
        with unchanged_values():
            if value["layout"]["wires"] is None:
                raise ConfigError("plan JSON: layout.wires: expected where each mesh axis lies, found null")
            cluster, model = saved_cluster(value), read_model_json(json.dumps(value["model"]))
            job = TrainingJob(**value["job"])
            check_length(model, job.seq_len)
            problem = TrainingProblem(model, job, cluster, find_calibration(value["calibration"], cluster.chip))
            fabric = _fabric(cluster, value["fabric"], flat_rings=problem.calibration.flat_rings)
            return cls.of(problem, Layout.from_json(value["layout"]), fabric)


def saved_problem(problem: TrainingProblem | ServingProblem) -> dict[str, object]:
    """What the JSON of a plan says of its problem, besides job or load."""
    return {
        "model": json.loads(problem.model.to_json()),
        "cluster": problem.cluster.name,
        "cluster_document": problem.cluster.document,
        "price_usd_per_chip_hour": problem.cluster.price_per_chip_hour,
        "calibration": problem.calibration.name,
    }


def read_document(
    text: str, kind: Kind, keys: tuple[str, ...], upgrade: Callable[[Document], Document] = lambda value: value
) -> Document:
    """The JSON object of a saved plan.

    Args:
        text: JSON.
        kind: of the plan.
        keys: that it has.
        upgrade: makes the current schema of an earlier one.

    Raises:
        ConfigError: no such document.
    """
    version, save = ("1", "--save") if kind == "training" else ("2", "'plan serve --save'")
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise ConfigError(f"plan JSON: expected what {save} writes: {where}") from None
    check_kind(value, kind)
    if kind == "serving" and kind_of(value) != kind:
        raise ConfigError("plan JSON: expected a plan of serving, as 'meshwise plan serve ... --save' writes it")
    value = upgrade(value) if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and value.get("schema_version", version if kind == "training" else None) != version:
        raise ConfigError(
            f"plan JSON: schema_version: expected {version!r}, found {value.get('schema_version')!r}; another version "
            "of meshwise saved it: plan again with this one"
        )
    if not isinstance(value, Mapping) or set(value) != set(keys):
        found = ", ".join(sorted(value)) if isinstance(value, Mapping) else type(value).__name__
        raise ConfigError(f"plan JSON: expected the keys {', '.join(sorted(keys))}; found {found}")
    return value


@contextmanager
def unchanged_values() -> Iterator[None]:
    """The error for a saved plan with a changed value, where the failure itself says no more."""
    try:
        yield
    except MeshwiseError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        raise _changed(error) from error


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
        first = error.errors()[0]
        where, told = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
        words = told if told.startswith(f"{where}:") else f"{where}: {told[:1].lower()}{told[1:]}"
        if "found" not in told and first["type"] not in ("missing", "extra_forbidden"):
            words += f", found {first['input']!r}"
    elif isinstance(error, LookupError):
        words = f"{error} is missing"
    else:
        words = "one is of another kind than its neighbours need (null, or text for a number)"
    return ConfigError(
        f"plan JSON: expected what --save writes; a value was changed: {words}; undo that, or save the plan again"
    )


def saved_cluster(value: Document) -> Cluster:
    """The cluster of a plan, from its name or from the text of its file, at the plan's price.

    Raises:
        ClusterError: there is no such cluster, or the text describes none.
    """
    name, document, price = (value[key] for key in ("cluster", "cluster_document", "price_usd_per_chip_hour"))
    if not document:
        return parse_cluster(name, price=price)
    cluster = read_cluster(document, name=name, where="plan JSON: cluster_document")
    return cluster if price is None else cluster.replace(chip=cluster.chip.replace(price_per_chip_hour=price))


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
