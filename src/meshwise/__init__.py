"""meshwise: the best way to split a large language model over the chips of a cluster, and why.

The verbs of the command line are functions here: `meshwise.plan_train(...)` is `meshwise plan train ...`. They are
loaded when first used, so that importing the package is quick and loads nothing else, not even `typing`. Type checkers
read their signatures in `__init__.pyi`, which `python docs/generate.py` writes.
"""

from __future__ import annotations

__version__ = "0.1.0"

#: Module -> the public names that are loaded from it.
_NAMES = {
    "meshwise.commands.bench": ("bench",),
    "meshwise.commands.book": ("answer_book",),
    "meshwise.commands.calibrate": ("calibrate",),
    "meshwise.commands.catalogs": ("all_models", "chip", "chips", "cluster", "clusters", "model"),
    "meshwise.commands.collective": ("collective",),
    "meshwise.commands.estimate_serve": ("estimate_serve",),
    "meshwise.commands.estimate_train": ("Plan", "PlanResult", "estimate_train"),
    "meshwise.commands.export": ("export", "export_weights"),
    "meshwise.commands.fit": ("fit",),
    "meshwise.commands.hlo": ("explain", "explain_file"),
    "meshwise.commands.load": ("load",),
    "meshwise.commands.plan_serve": ("compare_serve", "plan_serve"),
    "meshwise.commands.plan_train": ("compare_train", "plan_train", "scale_train"),
    "meshwise.commands.profile": ("profile_run",),
    "meshwise.commands.roofline": ("roofline",),
    "meshwise.commands.rule": ("rule",),
    "meshwise.commands.run": ("generate", "run_plan"),
    "meshwise.commands.score": ("score",),
    "meshwise.commands.shard": ("shard",),
    "meshwise.commands.simulate_serve": ("simulate_serve",),
    "meshwise.commands.simulate_train": ("simulate_step",),
    "meshwise.commands.sweep": ("sweep",),
    "meshwise.commands.verify": ("verify",),
    "meshwise.core.errors": ("InfeasibleError", "MeshwiseError"),
    "meshwise.exports": ("Exported",),
    "meshwise.scoring": ("Score",),
    "meshwise.report.sweep": ("Sweep",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__"]
__all__ += _HOMES  # noqa: PLE0605  (the names of the table)


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwise' has no attribute {name!r}")
    import importlib  # noqa: PLC0415 -- the first instants of a command load nothing in which Ctrl-C could fall

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
