"""The answer of `fit`: a table of serving, and one of training. Not here: what fits (`search.fits`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.units import format_bytes
from meshwise.report.model import length_words
from meshwise.report.report import Report, reasons
from meshwise.report.table import Columns, counted, picked, said, tabulate
from meshwise.search.fits import Fits, ServingFit, TrainingFit
from meshwise.sharding.layout import layout_words

_NOT_MODELLED = ("time: what fits may be slow; 'meshwise plan' finds what is fast", "memory in the host")


def fit_report(found: Fits, inputs: Mapping[str, Any]) -> Report:
    """Whether a model fits, and how much of it.

    Args:
        found: what fits.
        inputs: what was asked, with defaults.
    """
    model, cluster = found.model, found.cluster

    def names(fit: ServingFit) -> str:
        return "published" if fit.precision == found.published else fit.precision

    smallest = {names(fit): fit for fit in reversed(found.serving) if fit.requests}

    on = f"{model.name} on {cluster.num_chips:,} x {cluster.chip.title}"
    asked = f"{format_bytes(cluster.chip.hbm_usable)} a chip; requests and sequences of {found.context:,.0f} tokens"
    tables: tuple[RenderableType, ...] = said(
        Text(asked),
        *(Text(words) for words in length_words(model, found.context)),
        tabulate({**_SERVING, "serving": names}, found.serving) if found.serving else None,
        tabulate(_TRAINING, found.training) if found.training else None,
        reasons("Not asked", found.refused),
    )
    return Report(
        command="fit",
        inputs=inputs,
        answer=f"{on}: {_serves(smallest)}; {_trains(found)}",
        data={
            "context_tokens": found.context,
            "serving": [_serving_data(fit) for fit in found.serving],
            "training": [_training_data(fit) for fit in found.training],
            **({"refused": dict(found.refused)} if found.refused else {}),
        },
        brief=tables,
        body=tables,
        assumed=said(
            cluster.describe(),
            f"published: {found.published}, the formats of the checkpoint ({model.quantization.method})"
            if model.quantization is not None and found.published
            else None,
            *model.notes,
            "serving: half of a request is prompt, prefilled whole (of the longest, all that is longer); a tenth of "
            "the memory is left to the engine",
            "an engine's split is, of tensor, expert and stages of eight, the one that holds the most requests",
            "training: Adam, everything recomputed, microbatches of one sequence where not said otherwise",
        ),
        not_modelled=_NOT_MODELLED,
        next_steps=("the fastest of what fits: 'meshwise plan serve', 'meshwise plan train'",),
    )


def _number(value: int) -> str:
    return f"{value:,}" if value else "no"


_SERVING: Columns = {
    "serving": "precision",
    "engine": "layout",
    ">engines": ("engines", "{:,}".format),
    ">weights": ("weights", format_bytes),
    ">requests": ("requests", _number),
    ">longest": ("context", _number),
}

_TRAINING: Columns = {
    "training": lambda fit: fit.precision if fit.fine_tune == "full" else fit.fine_tune,
    "split": lambda fit: layout_words(fit.plan.layout) + (f",zero={z}" if (z := fit.plan.layout.zero) else ""),
    ">state": ("state", format_bytes),
    ">microbatch": ("micro_batch", _number),
    ">longest": ("context", _number),
}


def _serves(smallest: Mapping[str, ServingFit]) -> str:
    """The smallest engine of each precision that holds a request, in words."""
    if not smallest:
        return "serving does not fit"
    sizes = {name: fit.layout.num_chips for name, fit in smallest.items()}
    chips = {n: [p for p, m in reversed(sizes.items()) if m == n] for n in sorted(set(sizes.values()))}
    return "serves on " + ", ".join(f"{counted(n, 'chip')} in {' or '.join(names)}" for n, names in chips.items())


def _trains(found: Fits) -> str:
    kinds = dict.fromkeys(t.fine_tune for t in found.training if t.micro_batch)
    if not kinds:
        return "training does not fit"
    return "trains in full" if "full" in kinds else f"trains with {' or '.join(kinds)} only"


def _serving_data(fit: ServingFit) -> dict[str, Any]:
    return {
        "layout": str(fit.layout),
        **picked(fit, "precision num_chips=layout.num_chips engines weight_bytes=weights"),
        **picked(fit, "largest_batch=requests longest_context_tokens=context"),
    }


def _training_data(fit: TrainingFit) -> dict[str, Any]:
    return {
        "layout_text": fit.plan.line,
        **picked(fit, "precision fine_tune state_bytes=state memory_bytes=plan.estimate.memory.total"),
        **picked(fit, "largest_micro_batch=micro_batch longest_sequence_tokens=context"),
    }
