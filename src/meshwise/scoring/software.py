"""Which generation of software a training row names: its calibration.

Not here: what generations of software do (`costs.fitted`), or other words of rows (`training`, `formats`).
"""

from __future__ import annotations

import math
import re

from meshwise.costs.calibration import default_calibration
from meshwise.costs.fitted import SOFTWARE
from meshwise.hardware import Chip
from meshwise.scoring.rows import TrainingRun

#: Software that runs PyTorch's own operations.
_PYTORCH = "torch|fsdp|composer|deepspeed|lightning|accelerate|hugging|transformers|nanotron|litgpt|llama.?factory"

#: A source's words for its software -> a name of `SOFTWARE`, and the last year in which it was that.
_WORDS = (
    (r"maxtext|jax|levanter|axlearn", "xla", 9999),
    (r"megatron.*deepspeed", "megatron-deepspeed", 2023),
    (r"megatron|nemo", "megatron-2021", 2023),
    (r"megatron|nemo|transformer ?engine", "megatron", 9999),
    (r"flashattention \(triton\)|composer|deepspeed|fsdp", "eager-2023", 2023),
    (rf"(?:{_PYTORCH}).*(?<!no )(?<!not )(?<!without )(?:torch\.)?compile", "pytorch-compiled", 9999),
    (_PYTORCH, "pytorch", 9999),
)

#: What is assumed of software that no word names.
UNKNOWN = "software is not named or not known: Megatron Core of 2024 and later taken"


def calibration_of(
    run: TrainingRun, calibration: str, *, chip: Chip, mixture: bool, unseen: str = ""
) -> tuple[str, tuple[str, ...]]:
    """The calibration with the software that a row names, where "fitted" is asked for; and what was assumed.

    Args:
        run: the row.
        calibration: as asked.
        chip: of its cluster.
        mixture: whether its model has experts.
        unseen: a source; software of which only its rows are known is not known then.
    """
    if calibration != "fitted" or chip.vendor == "google":
        return calibration, ()
    words, year = run.software.lower(), run.year or 9999
    meant = (name for pattern, name, last in _WORDS if year <= last and re.search(pattern, words))
    found = next((name for name in meant if _is_known(name, unseen)), None)
    if found is None:
        return calibration, (UNKNOWN,)
    release = re.search(r"container (\d+)\.(\d+)", words)
    since = (int(release[1]), int(release[2])) if release else (0, 0)
    graphs = since >= (26, 6) and default_calibration(chip).name == "blackwell"
    if graphs and _is_known("megatron-graphs", unseen):
        return "fitted+megatron-graphs", ()
    far = (run.ep or 1) > math.prod(level.degree for level in chip.scale_up)
    if since >= (25, 9) and mixture and far and _is_known("megatron-beside", unseen):
        return "fitted+megatron-beside", ("exchanges between nodes run beside compute, as in the recipes",)
    return f"fitted+{found}", ()


def _is_known(software: str, unseen: str) -> bool:
    """Whether rows of another source than `unseen` stand behind a software."""
    return set(SOFTWARE[software].rests_on) != {unseen}
