"""A serving plan: model, load, cluster, layouts and batches, with what they would do. Its JSON alone reproduces it.

Not here: finding it (`planner`), or words (`report`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.core.errors import ConfigError
from meshwise.costs.engines import find_serving_calibration
from meshwise.costs.problem import ServingProblem, check_context
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.jobs import ServingLoad
from meshwise.models import read_model_json
from meshwise.search.plan import Document, read_document, saved_cluster, saved_problem, unchanged_values
from meshwise.sharding.serving import ServingLayout

_SETUP = ("mode", "prefill", "decode", "batch", "prefill_batch", "chunk")
_KEYS = (
    "schema_version",
    "kind",
    "model",
    "load",
    "cluster",
    "cluster_document",
    "price_usd_per_chip_hour",
    "calibration",
    "setup",
)


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
        setup = self.setup
        value = {
            "schema_version": "2",
            "kind": "serving",
            **saved_problem(self.problem),
            "load": self.problem.load.model_dump(mode="json"),
            "setup": {name: getattr(setup, name) for name in _SETUP}
            | {"prefill": setup.prefill.to_json(), "decode": setup.decode.to_json()},
        }
        return json.dumps({key: value[key] for key in _KEYS}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> ServingPlan:
        """Read what `to_json` wrote and estimate it again.

        Raises:
            ConfigError: not such a JSON document; other errors as its parts raise them.
        """
        value = read_document(text, "serving", _KEYS, _upgraded)
        with unchanged_values():
            cluster, model = saved_cluster(value), read_model_json(json.dumps(value["model"]))
            calibration = find_serving_calibration(value["calibration"], cluster.chip)
            load = ServingLoad(**value["load"])
            check_context(model, load)
            problem = ServingProblem(model, load, cluster, calibration)
            return cls(problem, estimate_serving(problem, _setup(value["setup"])))


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
    return ServingSetup(value["mode"], prefill, decode, value["batch"], value["prefill_batch"], value["chunk"])
