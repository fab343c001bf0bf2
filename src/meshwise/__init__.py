"""meshwise: the best way to split a large language model over the chips of a cluster, and why.

The verbs of the command line are functions here: `meshwise.plan_train(...)` is `meshwise plan train ...`. They are
loaded when first used, so that importing the package is quick and loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwise.errors import InfeasibleError, MeshwiseError

if TYPE_CHECKING:
    from meshwise.handover import HandedOver
    from meshwise.planning import Plan, Planning
    from meshwise.scoring import Score
    from meshwise.verbs.bench import bench
    from meshwise.verbs.calibrate import calibrate
    from meshwise.verbs.catalogs import all_models, chip, chips, cluster, clusters, model
    from meshwise.verbs.collective import collective
    from meshwise.verbs.estimate_serve import estimate_serve
    from meshwise.verbs.estimate_train import estimate_train
    from meshwise.verbs.export import export
    from meshwise.verbs.generate import generate
    from meshwise.verbs.plan_serve import plan_serve
    from meshwise.verbs.plan_serve_many import compare_serve
    from meshwise.verbs.plan_train import plan_train
    from meshwise.verbs.roofline import roofline
    from meshwise.verbs.run import run_plan
    from meshwise.verbs.score import score
    from meshwise.verbs.shard import shard
    from meshwise.verbs.simulate import simulate_step
    from meshwise.verbs.simulate_serve import simulate_serve
    from meshwise.verbs.verify import verify

__version__ = "0.1.0"

__all__ = [
    "HandedOver",
    "InfeasibleError",
    "MeshwiseError",
    "Plan",
    "Planning",
    "Score",
    "__version__",
    "all_models",
    "bench",
    "calibrate",
    "chip",
    "chips",
    "cluster",
    "clusters",
    "collective",
    "compare_serve",
    "compare_train",
    "estimate_serve",
    "estimate_train",
    "export",
    "generate",
    "model",
    "plan_serve",
    "plan_train",
    "roofline",
    "run_plan",
    "scale_train",
    "score",
    "shard",
    "simulate_serve",
    "simulate_step",
    "verify",
]

#: Public name -> the module that it is loaded from.
_HOMES = {
    "HandedOver": "meshwise.handover",
    "run_plan": "meshwise.verbs.run",
    "simulate_serve": "meshwise.verbs.simulate_serve",
    "simulate_step": "meshwise.verbs.simulate",
    "compare_serve": "meshwise.verbs.plan_serve_many",
    "compare_train": "meshwise.verbs.plan_many",
    "scale_train": "meshwise.verbs.plan_many",
    "Plan": "meshwise.planning",
    "Planning": "meshwise.planning",
    "Score": "meshwise.scoring",
    **dict.fromkeys(("all_models", "chip", "chips", "cluster", "clusters", "model"), "meshwise.verbs.catalogs"),
    **{
        name: f"meshwise.verbs.{name}"
        for name in (
            "bench",
            "calibrate",
            "collective",
            "estimate_serve",
            "estimate_train",
            "export",
            "generate",
            "plan_serve",
            "plan_train",
            "roofline",
            "score",
            "shard",
            "verify",
        )
    },
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
