"""A serving plan: model, load, cluster, layouts and batches, with what they would do. Its JSON alone reproduces it.

Not here: finding it (`planner`), or words (`report`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.costs.engines import find_serving_calibration
from meshwise.costs.problem import ServingProblem, check_context
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.jobs import ServingLoad
from meshwise.models import read_model_json
from meshwise.search.plan import changed, check_kind, saved_cluster
from meshwise.sharding.serving import ServingLayout

#: What the key `kind` of a saved serving plan says; plans of training have no such key.
SERVING = "serving"

_SETUP = ("mode", "prefill", "decode", "batch", "prefill_batch", "chunk")
_KEYS = {
    "schema_version",
    "kind",
    "model",
    "load",
    "cluster",
    "cluster_document",
    "price_usd_per_chip_hour",
    "calibration",
    "setup",
}


@dataclass(frozen=True)
class ServingPlan:
    """A setup of a problem, with its estimate.

    Args:
        problem: model, load, cluster, calibration.
        estimate: what its setup would do, wires included.
    """

    problem: ServingProblem
    estimate: ServingEstimate

    @property
    def setup(self) -> ServingSetup:
        """Layouts with wires, and batches."""
        return self.estimate.setup

    def to_json(self) -> str:
        """The inputs verbatim; `from_json` computes the rest again."""
        problem, setup = self.problem, self.setup
        value = {
            "schema_version": "2",
            "kind": SERVING,
            "model": json.loads(problem.model.to_json()),
            "load": problem.load.model_dump(mode="json"),
            "cluster": problem.cluster.name,
            "cluster_document": problem.cluster.document,
            "price_usd_per_chip_hour": problem.cluster.price_per_chip_hour,
            "calibration": problem.calibration.name,
            "setup": {
                "mode": setup.mode,
                "prefill": setup.prefill.to_json(),
                "decode": setup.decode.to_json(),
                "batch": setup.batch,
                "prefill_batch": setup.prefill_batch,
                "chunk": setup.chunk,
            },
        }
        return json.dumps(value, indent=2)

    @classmethod
    def from_json(cls, text: str) -> ServingPlan:
        """Read what `to_json` wrote and estimate it again.

        Raises:
            ConfigError: not such a JSON document; other errors as its parts raise them.
        """
        value = _document(text)
        try:
            cluster = saved_cluster(value["cluster"], value["cluster_document"], value["price_usd_per_chip_hour"])
            calibration = find_serving_calibration(value["calibration"], cluster.chip)
            model = read_model_json(json.dumps(value["model"]))
            load = ServingLoad(**value["load"])
            check_context(model, load)
            problem = ServingProblem(model, load, cluster, calibration)
            return cls(problem, estimate_serving(problem, _setup(value["setup"])))
        except MeshwiseError:
            raise
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
            raise changed(error) from error


def _document(text: str) -> Mapping[str, Any]:
    """The JSON object, with the keys of a serving plan."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"plan JSON: expected what 'plan serve --save' writes: {error.msg} at line {error.lineno}, column "
            f"{error.colno}"
        ) from None
    check_kind(value, "serving")
    if not isinstance(value, Mapping) or value.get("kind") != SERVING:
        raise ConfigError("plan JSON: expected a plan of serving, as 'meshwise plan serve ... --save' writes it")
    if value.get("schema_version") == "1":
        value = _upgraded(value)
    if value.get("schema_version") != "2":
        raise ConfigError(
            f"plan JSON: schema_version: expected '2', found {value.get('schema_version')!r}; another version of "
            "meshwise saved it: plan again with this one"
        )
    if set(value) != _KEYS:
        raise ConfigError(f"plan JSON: expected the keys {', '.join(sorted(_KEYS))}; found {', '.join(sorted(value))}")
    return dict(value)


def _upgraded(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """A plan of schema 1 as schema 2 writes it: the layout of decode steps was called "generate"."""
    setup = value.get("setup")
    if isinstance(setup, Mapping) and "generate" in setup:
        setup = {"decode" if name == "generate" else name: part for name, part in setup.items()}
    return {**value, "setup": setup, "schema_version": "2"}


def _setup(value: Any) -> ServingSetup:
    if not isinstance(value, Mapping) or set(value) != set(_SETUP):
        raise ConfigError(f"plan JSON: setup: expected the keys {', '.join(_SETUP)}")
    if value["mode"] not in ("aggregated", "disaggregated"):
        raise ConfigError(f"plan JSON: setup: mode: expected aggregated or disaggregated, found {value['mode']!r}")
    for name in ("batch", "prefill_batch", "chunk"):
        number = value[name]
        if not (name == "chunk" and number is None) and (type(number) is not int or number < 1):
            raise ConfigError(f"plan JSON: setup: {name}: expected a whole number, at least 1, found {number!r}")
    prefill, decode = (ServingLayout.from_json(value[name]) for name in ("prefill", "decode"))
    return ServingSetup(value["mode"], prefill, decode, value["batch"], value["prefill_batch"], value["chunk"])
