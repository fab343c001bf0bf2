"""What `run` is asked beside the plan. Not here: executing (`train_run`), flags (`cli`)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from meshwise.core.errors import MeshwiseError
from meshwise.runtime.processes import Processes

#: Steps from one that is saved to the next, unless told.
DEFAULT_EVERY = 100


class RunRequest(BaseModel):
    """How a plan is to be run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(
        default=20, ge=1, le=10**8, description="Train up to this step, those of a --checkpoint counted."
    )
    learning_rate: float = Field(
        default=3e-4,
        gt=0,
        le=1e3,
        description="Of every step; with --warmup-steps or --learning-rate-decay, the highest.",
    )
    warmup_steps: int = Field(
        default=0, ge=0, le=10**8, description="Steps in which the learning rate rises from zero."
    )
    learning_rate_decay: Literal["none", "linear", "cosine"] = Field(
        default="none", description="How the learning rate falls after that: in equal steps, or as half a cosine."
    )
    decay_steps: int | None = Field(
        default=None, ge=1, le=10**8, description="Step at which it has fallen to its end; unless given, --steps."
    )
    final_learning_rate: float | None = Field(
        default=None, ge=0, le=1e3, description="To which it falls; unless given, 0."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Of the initial weights and of the order of tokens.")
    text: str | None = Field(
        default=None,
        description="Train on random windows of this text file, instead of on synthetic tokens.",
        json_schema_extra={"metavar": "FILE"},
    )
    tokenizer: str | None = Field(
        default=None, description="The model's tokenizer.json, for --text.", json_schema_extra={"metavar": "FILE"}
    )
    cpu_devices: int | None = Field(
        default=None, ge=1, le=512, description="Use so many fake devices of the CPU, whatever else is there."
    )
    profile: str | None = Field(
        default=None, description="Write a profile of a few steps to this folder.", json_schema_extra={"metavar": "DIR"}
    )
    checkpoint: str | None = Field(
        default=None,
        description="Save steps in this folder, and go on from the last one that is in it.",
        json_schema_extra={"metavar": "DIR"},
    )
    every: int | None = Field(
        default=None,
        ge=1,
        le=10**8,
        description=f"Steps from one that is saved to the next; unless given, {DEFAULT_EVERY}.",
    )
    coordinator: str | None = Field(
        default=None,
        description="Of several processes: address of the first, or auto where JAX knows the cluster (Slurm, TPUs).",
        json_schema_extra={"metavar": "HOST:PORT"},
    )
    num_processes: int | None = Field(
        default=None, ge=1, le=10**6, description="How many run together; each is started with the same options."
    )
    process_id: int | None = Field(
        default=None, ge=0, le=10**6, description="Which of them this one is, from 0, the coordinator."
    )
    weights: str | None = Field(
        default=None,
        description="Begin with these weights: a .safetensors or .gguf file, or a folder of .safetensors files.",
        json_schema_extra={"metavar": "PATH"},
    )
    generate: int | None = Field(
        default=None, ge=1, le=10**6, description="Do not train: generate so many tokens, each the most likely."
    )
    prompt: str | None = Field(
        default=None,
        description="Text to go on from, for --generate; its --tokenizer may lie beside the --weights.",
        json_schema_extra={"metavar": "TEXT"},
    )
    prompt_tokens: str | None = Field(
        default=None,
        description="Tokens to go on from, instead of --prompt: 1,2,3.",
        json_schema_extra={"metavar": "NUMBERS"},
    )

    def check(self) -> None:
        """See that options go together.

        Raises:
            MeshwiseError: for one that means nothing without another.
        """
        if self.generate is not None:
            self._check_generation()
            return
        for name in ("prompt", "prompt_tokens"):
            if getattr(self, name) is not None:
                raise MeshwiseError(f"--{name.replace('_', '-')} needs --generate, the number of new tokens")
        if (self.text is None) != (self.tokenizer is None):
            there, missing = ("--text", "--tokenizer") if self.tokenizer is None else ("--tokenizer", "--text")
            raise MeshwiseError(f"{there} needs {missing}")
        if self.every is not None and self.checkpoint is None:
            raise MeshwiseError("--every needs --checkpoint, the folder that steps are saved in")
        self._check_decay()
        self._check_processes()

    @property
    def processes(self) -> Processes | None:
        """The processes that run together; None where this one runs alone."""
        return None if self.coordinator is None else Processes(self.coordinator, self.num_processes, self.process_id)

    def _check_processes(self) -> None:
        numbers = {"--num-processes": self.num_processes, "--process-id": self.process_id}
        given = [flag for flag, value in numbers.items() if value is not None]
        if self.coordinator in (None, "auto"):
            if given and self.coordinator is None:
                raise MeshwiseError(f"{given[0]} needs --coordinator HOST:PORT, the address of the first process")
            if given:
                raise MeshwiseError(f"{given[0]}: with --coordinator auto JAX finds it itself; leave it out")
            return
        if len(given) < len(numbers):
            raise MeshwiseError(f"--coordinator {self.coordinator} needs --num-processes and --process-id")
        host, _, port = str(self.coordinator).rpartition(":")
        if not host or not port.isdigit():
            raise MeshwiseError(f"--coordinator: expected HOST:PORT or auto, found {self.coordinator!r}")
        if (self.process_id or 0) >= (self.num_processes or 1):
            raise MeshwiseError(
                f"--process-id {self.process_id}: expected less than --num-processes {self.num_processes}"
            )

    def _check_decay(self) -> None:
        if self.learning_rate_decay == "none":
            for flag, given in (
                ("--decay-steps", self.decay_steps),
                ("--final-learning-rate", self.final_learning_rate),
            ):
                if given is not None:
                    raise MeshwiseError(f"{flag} needs --learning-rate-decay linear or cosine")
            return
        flag, end = ("--steps", self.steps) if self.decay_steps is None else ("--decay-steps", self.decay_steps)
        if end <= self.warmup_steps:
            raise MeshwiseError(
                f"{flag} {end}: expected more steps than --warmup-steps {self.warmup_steps}, after which the learning "
                "rate falls"
            )
        if (self.final_learning_rate or 0.0) > self.learning_rate:
            raise MeshwiseError(
                f"--final-learning-rate {self.final_learning_rate:g}: expected at most --learning-rate "
                f"{self.learning_rate:g}, from which it falls"
            )

    def _check_generation(self) -> None:
        """Refuse options that only training reads.

        Raises:
            MeshwiseError: names one.
        """
        read = {"weights", "generate", "prompt", "prompt_tokens", "tokenizer", "cpu_devices", "seed"}
        others = sorted(name for name in self.model_fields_set - read if getattr(self, name) is not None)
        if others:
            raise MeshwiseError(f"--{others[0].replace('_', '-')} is for training; with --generate leave it out")
