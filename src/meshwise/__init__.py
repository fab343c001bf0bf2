"""meshwise: the best way to split a large language model over the chips of a cluster, and why.

The verbs of the command line are functions here: `meshwise.plan_train(...)` is `meshwise plan train ...`. They are
loaded when first used, so that importing the package is quick and loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import InfeasibleError, MeshwiseError

if TYPE_CHECKING:
    from meshwise.commands.bench import bench
    from meshwise.commands.calibrate import calibrate
    from meshwise.commands.catalogs import all_models, chip, chips, cluster, clusters, model
    from meshwise.commands.collective import collective
    from meshwise.commands.estimate_serve import estimate_serve
    from meshwise.commands.estimate_train import estimate_train
    from meshwise.commands.export import export
    from meshwise.commands.generate import generate
    from meshwise.commands.plan_serve import plan_serve
    from meshwise.commands.plan_serve_many import compare_serve
    from meshwise.commands.plan_train import plan_train
    from meshwise.commands.roofline import roofline
    from meshwise.commands.run import run_plan
    from meshwise.commands.score import score
    from meshwise.commands.shard import shard
    from meshwise.commands.simulate import simulate_step
    from meshwise.commands.simulate_serve import simulate_serve
    from meshwise.commands.verify import verify
    from meshwise.exports import Exported
    from meshwise.scoring import Score
    from meshwise.search import Plan, PlanResult

__version__ = "0.1.0"

__all__ = [
    "Exported",
    "InfeasibleError",
    "MeshwiseError",
    "Plan",
    "PlanResult",
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
    "Exported": "meshwise.exports",
    "run_plan": "meshwise.commands.run",
    "simulate_serve": "meshwise.commands.simulate_serve",
    "simulate_step": "meshwise.commands.simulate",
    "compare_serve": "meshwise.commands.plan_serve_many",
    "compare_train": "meshwise.commands.plan_many",
    "scale_train": "meshwise.commands.plan_many",
    "Plan": "meshwise.search",
    "PlanResult": "meshwise.search",
    "Score": "meshwise.scoring",
    **dict.fromkeys(("all_models", "chip", "chips", "cluster", "clusters", "model"), "meshwise.commands.catalogs"),
    **{
        name: f"meshwise.commands.{name}"
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
