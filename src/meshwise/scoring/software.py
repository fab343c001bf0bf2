"""Which generation of software a training row names: its calibration.

Not here: what generations of software do (`costs.fitted`), or other words of rows (`training`, `formats`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from meshwise.costs.calibration import default_calibration
from meshwise.costs.fitted import SOFTWARE
from meshwise.hardware import Chip
from meshwise.scoring.rows import TrainingRun

#: Software that runs PyTorch's own operations.
_PYTORCH = (
    "torch|fsdp|composer|deepspeed|lightning|accelerate|hugging|transformers|nanotron|litgpt|llama.?factory|automodel"
    "|llm.?foundry|unsloth|vescale|veomni|internevo|colossal|fairscale|metaseq|axolotl|llama.?recipes|olmo|foundation.model.stack"
)

#: What a row says of how the host launches: one program for what the interpreter would launch one by one, graphs of
#: kernels, or launches that wait for their kernel.
_COMPILED = r"torch[. ]?compile|(?:\+|,|with|and) ?compile\b|\bcompiled\b|compile ?[=:] ?(?:true|on|1)\b|inductor"
GRAPHS = r"cuda[- _]?graphs?"
_BLOCKING = r"launch[_ ]blocking|launches block"
_NOT = r"(?:\b(?:no|not|without|un)[ -]?(?:yet )?)(?:"

#: Words after a name that deny it.
_OFF = r"(?:[ =:(]+(?:off|false|disabled)|[ ]?[=:] ?(?:0|no|none|null))\b(?!\.)"

#: A source's words for its software -> a name of `SOFTWARE`, and the last year in which it was that.
_WORDS = (
    (r"maxtext|jax|levanter|axlearn|\bt5x\b|\bpax(?:ml)?\b|flax|\balpa\b|easylm|easydel|haiku|gspmd", "xla", 9999),
    (r"megatron.*deepspeed|neox", "megatron-deepspeed", 2023),
    (r"automodel", "pytorch", 9999),
    (r"megatron|nemo", "megatron-2021", 2023),
    (r"megatron|nemo|neox|megascale|primus|transformer ?engine", "megatron", 9999),
    (r"metaseq|fairseq|fairscale", "megatron-2021", 2022),  # before fused attention
    (r"flashattention \(triton\)|composer|deepspeed|fsdp", "eager-2023", 2023),
    (_PYTORCH, "eager-2023", 2022),
    (r"deepspeed", "deepspeed", 9999),
    (_PYTORCH, "pytorch", 9999),
)

#: The year in which Megatron-LM could fuse attention, and words for it; on Hopper Transformer Engine does.
_FUSED_FROM, _FUSED = 2023, r"flash[- ]?att|transformer[- ]?engine|fp8"

#: Recipes of NVIDIA's Megatron-Bridge, as a source of what its releases do. A whole step is one graph by
#: perf_recipes/deepseek/common.py (commit 267f756), qwen/common.py (134e903) and gpt_oss/common.py (3564acf) on GB200,
#: GB300 and B300 in MXFP8, not on B200 (deepseek/b200/deepseek_v3.py, 13438ed; qwen/b200/qwen3_moe.py, 0bc982d).
#: Experts are exchanged beside compute by scripts/performance/configs/deepseek/deepseek_llm_pretrain.py (0132842,
#: H100), deepseek_workload_base_configs.py (0426418, B200) and qwen/qwen3_workload_base_configs.py (01b2977, H100).
RECIPES = "mbridge-recipes"
_IN_ONE_GRAPH = ("b300-sxm", "gb200-nvl72", "gb300-nvl72")

#: What is assumed of software that no word names.
UNKNOWN = "software is not named or not known: Megatron Core of 2024 and later taken"


def calibration_of(
    run: TrainingRun, calibration: str, *, chip: Chip, mixture: bool, unseen: Collection[str] = ()
) -> tuple[str, tuple[str, ...]]:
    """The calibration with the software that a row names, where "fitted" is asked for; and what was assumed.

    Args:
        run: the row.
        calibration: as asked.
        chip: of its cluster.
        mixture: whether its model has experts.
        unseen: sources; software that only their rows tell of is not known then, nor what `RECIPES` tell.
    """
    if calibration != "fitted" or chip.vendor == "google":
        return calibration, ()
    words, year = run.software.lower(), run.year or 9999
    later = year >= _FUSED_FROM and (default_calibration(chip).name != "ampere" or re.search(_FUSED, run.words))
    meant = (name for pattern, name, last in _WORDS if year <= last and re.search(pattern, words))
    known = (name for name in meant if not (later and name == "megatron-2021"))
    found = next((name for name in known if _is_known(name, unseen)), None)
    if found is None:
        return calibration, (UNKNOWN,)
    if (own := _launched(run, found)) and _is_known(own, unseen):
        return f"fitted+{own}", ()
    if mixture and RECIPES not in unseen and (by_recipe := _by_recipe(run, chip, words)):
        return by_recipe
    return f"fitted+{found}", ()


def _by_recipe(run: TrainingRun, chip: Chip, words: str) -> tuple[str, tuple[str, ...]] | None:
    """What the recipe of a mixture's release says; None where that is nothing."""
    release = re.search(r"container (\d+)\.(\d+)", words)
    since = (int(release[1]), int(release[2])) if release else (0, 0)
    if since >= (26, 6) and chip.name in _IN_ONE_GRAPH and "mx" in run.dtype.lower():
        return "fitted+megatron-graphs", ("a whole step is one CUDA graph, as in the recipes",)
    far = (run.ep or 1) > math.prod(level.degree for level in chip.scale_up)
    if since >= (25, 9) and far and (run.vpp or 1) > 1:
        return "fitted+megatron-beside", ("exchanges between nodes run beside compute, as in the recipes",)
    return None


def _launched(run: TrainingRun, software: str) -> str | None:
    """The same software, launched as a row says; None where it does not say.

    BLOOM was trained with launches that block, without which it hung (its chronicles).
    """
    words = f"{run.software} {run.notes}".lower()
    if software == "megatron-deepspeed" and (says(_BLOCKING, words) or "bloom" in run.model.lower()):
        return "megatron-deepspeed-blocking"
    return "pytorch-compiled" if software == "pytorch" and says(_COMPILED, words) else None


def says(pattern: str, words: str) -> bool:
    """Whether words are there, and not denied."""
    return re.search(pattern, words) is not None and re.search(rf"{_NOT}{pattern})|(?:{pattern}){_OFF}", words) is None


def _is_known(software: str, unseen: Collection[str]) -> bool:
    """Whether a software rests on rows of another source than those unseen, or on none."""
    behind = set(SOFTWARE[software].rests_on)
    return not behind or not behind.issubset(unseen)
