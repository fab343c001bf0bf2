"""Generation with a plan's layout: what `meshwise run --generate` answers, as values.

JAX is loaded when something runs. Not here: flags (`cli`), words (`report`), how it is executed (`generate_run`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from meshwise.commands.export import read_plan
from meshwise.commands.requests import validated
from meshwise.core.errors import MeshwiseError
from meshwise.report.generate import GenerateResult
from meshwise.runtime.devices import load_jax
from meshwise.search import Plan


class GenerateRequest(BaseModel):
    """What is to be generated with a plan's layout."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generate: int = Field(ge=1, le=10**6, description="Tokens to generate.")
    weights: str | None = None
    prompt: str | None = None
    prompt_tokens: str | None = None
    tokenizer: str | None = None
    cpu_devices: int | None = Field(default=None, ge=1, le=512)
    seed: int = Field(default=0, ge=0, le=2**31 - 1)

    def check(self) -> None:
        """See that options go together.

        Raises:
            MeshwiseError: for what is missing, or one too many.
        """
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise MeshwiseError("--generate needs one of --prompt, a text, and --prompt-tokens, numbers: 1,2,3")
        if self.prompt is not None and self.tokenizer_file is None:
            raise MeshwiseError("--prompt needs --tokenizer, the model's tokenizer.json")

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer that was given, else the one beside the weights, else None."""
        if self.tokenizer is not None:
            return Path(self.tokenizer)
        if self.weights is None:
            return None
        weights = Path(self.weights)
        beside = (weights if weights.is_dir() else weights.parent) / "tokenizer.json"
        return beside if beside.is_file() else None


def generate(
    plan: Plan | str | os.PathLike[str],
    *,
    tokens: int,
    prompt: str | None = None,
    prompt_tokens: str | None = None,
    weights: str | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
    cpu_devices: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> GenerateResult:
    """Generate with a plan's layout on the devices that are there: what `meshwise run --generate` answers.

    Args:
        plan: a plan, or the file that one was saved in.
        tokens: how many new ones; each is the most likely.
        prompt: a text; prompt_tokens: or numbers, "1,2,3".
        weights: a .safetensors or .gguf file, or a folder; without it weights are drawn.
        tokenizer: the model's tokenizer.json; unless given, that beside the weights.
        seed: of weights that are drawn.
        cpu_devices: use so many fake devices of the CPU; to be asked for before JAX is used in the process.
        progress: told a line now and then.

    Raises:
        MissingDependencyError: JAX, or a library that an option needs, is missing.
        InfeasibleError: memory does not suffice.
        MeshwiseError: a plan that cannot generate, or not on these devices; weights that are not the model's; an
            argument that cannot be understood.
    """
    given: dict[str, Any] = {
        "generate": tokens,
        "weights": weights,
        "prompt": prompt,
        "prompt_tokens": prompt_tokens,
        "tokenizer": tokenizer,
        "cpu_devices": cpu_devices,
        "seed": seed,
    }
    request = validated(GenerateRequest, given)
    if not isinstance(plan, Plan | str | os.PathLike):
        raise MeshwiseError(f"plan: expected a plan or the file of one, found {plan!r}")
    return execute_generation(plan if isinstance(plan, Plan) else read_plan(plan), request, progress=progress)


def execute_generation(
    plan: Plan,
    request: GenerateRequest,
    *,
    progress: Callable[[str], None] = lambda _: None,
    told: Callable[[str], None] = lambda _: None,
) -> GenerateResult:
    """Generate with a plan's layout.

    Args:
        plan, request: what to do.
        progress: told a line now and then; told: what is to be known of the devices.

    Raises: as `generate`.
    """
    request.check()
    load_jax()
    from meshwise.commands.generate_run import generate_as_planned  # noqa: PLC0415  (an optional extra)

    return generate_as_planned(plan, request, progress=progress, told=told)
