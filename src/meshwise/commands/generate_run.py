"""Generation, executed: devices, weights, prompt and program brought together.

It loads JAX. Not here: the request (`generate`), the program (`runtime`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.commands.generate import GenerateRequest
from meshwise.commands.plan_devices import chip_of, plan_devices
from meshwise.compiler.placement import place_devices
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.hardware import Chip
from meshwise.report.generate import GenerateResult
from meshwise.runtime.data import read_tokenizer
from meshwise.runtime.devices import software_of
from meshwise.runtime.generate import generate_timed, generator
from meshwise.runtime.weights import open_weights
from meshwise.search import Plan


def generate_as_planned(
    plan: Plan, request: GenerateRequest, *, progress: Callable[[str], None], told: Callable[[str], None]
) -> GenerateResult:
    """Generate with a plan's layout.

    Args: as of `execute_generation`.

    Raises: as `generate`.
    """
    model, layout, dtype = plan.problem.model, plan.layout, plan.problem.job.formats.activations
    tokenizer = None if request.tokenizer_file is None else read_tokenizer(request.tokenizer_file)[0]
    prompt = _prompt(request, tokenizer, model.vocab_size)
    published = None if request.weights is None else open_weights(Path(request.weights), model)
    devices = plan_devices(plan, request.cpu_devices, told)
    sequences = layout.data * layout.fsdp * layout.expert
    made = generator(
        model,
        layout,
        place_devices(devices, layout),
        sequences=sequences,
        length=len(prompt) + request.generate,
        dtype=dtype,
    )
    progress("reading weights")
    weights = made.initial_weights(request.seed) if published is None else made.load(published)
    found = generate_timed(made, weights, np.tile(prompt, (sequences, 1)), request.generate, progress)
    chip, new = chip_of(plan, devices), tuple(int(t) for t in found.tokens[0])
    least = (None, None) if chip is None else least_times(plan, chip, dtype, sequences, len(prompt))
    return GenerateResult(
        plan=plan,
        hardware=str(devices[0].device_kind),
        num_devices=len(devices),
        software=software_of(devices[0]),
        chip=None if chip is None else chip.name,
        weights=f"drawn by seed {request.seed}" if request.weights is None else request.weights,
        prompt=tuple(int(t) for t in prompt),
        tokens=new,
        text=None if tokenizer is None else tokenizer.decode(list(new)),
        sequences=sequences,
        compile_seconds=found.compile_seconds,
        first_seconds=found.first_seconds,
        seconds=found.seconds,
        least_first_seconds=least[0],
        least_seconds=least[1],
    )


def _prompt(request: GenerateRequest, tokenizer: Any, vocabulary: int) -> np.ndarray:
    """Give the prompt's tokens.

    Raises:
        MeshwiseError: it has none, or one that the model does not know.
    """
    if request.prompt is not None:
        flag, ids = "--prompt", tokenizer.encode(request.prompt).ids
    else:
        flag, said = "--prompt-tokens", (request.prompt_tokens or "").split(",")
        if not all(s.strip().isdecimal() for s in said):
            raise MeshwiseError(f"{flag} {request.prompt_tokens!r}: expected numbers of tokens, 1,2,3")
        ids = [int(s) for s in said]
    if not ids:
        raise MeshwiseError(f"{flag}: expected at least one token, found none")
    if max(ids) >= vocabulary:
        hint = "; give the tokenizer of this model" if request.prompt is not None else ""
        raise MeshwiseError(f"{flag}: token {max(ids):,} is not among the {vocabulary:,} of the model{hint}")
    return np.asarray(ids, np.int32)


def least_times(plan: Plan, chip: Chip, dtype: DType, sequences: int, length: int) -> tuple[float | None, float | None]:
    """Give the least time to a first token, and that of each after it, in seconds; None where the peak is not known.

    A device reads the active weights that it multiplies by at least once, and computes its share of the prompt.

    Args:
        plan: whose model and layout run.
        chip: that runs them.
        dtype: of weights and activations.
        sequences: that are extended together; length: of their prompt.
    """
    model, layout = plan.problem.model, plan.layout
    table = 0 if model.spec.head.tied else model.vocab_size * model.d_model  # of which a token reads one row
    multiplied = model.parameters.active - table
    reading = multiplied * dtype.bytes / layout.sizes["tensor"] / chip.hbm_bandwidth
    peak = chip.flops_per_s.get(dtype)
    if peak is None:
        return None, reading
    head = model.vocab_size * model.d_model * (length - 1)  # of the prompt's last position alone
    flops = 2 * sequences * (multiplied * length - head)
    return max(reading, flops / (layout.num_chips * peak)), reading
