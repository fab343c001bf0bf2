"""What `run` is asked beside the plan: to train, or to generate. Not here: executing (`execution`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from meshwise.commands.requests import File, Flag, Request, flag
from meshwise.core.errors import MeshwiseError
from meshwise.runtime.processes import Processes

#: Steps from one that is saved to the next, by default.
DEFAULT_EVERY = 100


_TOKENS = Field(
    ge=1,
    le=10**6,
    serialization_alias="generate",
    description="Do not train: generate this many tokens, each the most likely.",
)


class SeveralProcesses(Request):
    """Processes that run together."""

    coordinator: Annotated[str | None, Flag("HOST:PORT")] = None
    """Address of the first of several processes, or auto where JAX knows the cluster (Slurm, TPUs)."""
    num_processes: int | None = Field(default=None, ge=1, le=10**6)
    """How many processes run together; each is started with the same options."""
    process_id: int | None = Field(default=None, ge=0, le=10**6)
    """Number of this process, from 0, the coordinator."""

    @property
    def processes(self) -> Processes | None:
        """The processes that run together; None where this one runs alone."""
        return None if self.coordinator is None else Processes(self.coordinator, self.num_processes, self.process_id)

    def check_processes(self) -> None:
        """See that these options go together.

        Raises:
            MeshwiseError: for one that means nothing without another.
        """
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


class ExecutionRequest(Request):
    """What training and generation share."""

    weights: Annotated[File | None, Flag("PATH")] = None
    """Begin with these weights: a .safetensors or .gguf file, or a folder of .safetensors files."""
    tokenizer: File | None = None
    """The model's tokenizer.json, for --text; for --prompt by default the one beside the --weights."""
    cpu_devices: int | None = Field(default=None, ge=1, le=512)
    """Use this many fake devices of the CPU, whatever other devices there are; a Python process asks for them before it
    uses JAX."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Seed of the initial weights and of the order of tokens."""


class RunRequest(ExecutionRequest, SeveralProcesses):
    """How a plan is to be trained."""

    sections: ClassVar = {
        "Training": ("steps", "learning_rate", "text", "tokenizer", "weights", "checkpoint", "every", "cpu_devices")
    }

    steps: int = Field(default=20, ge=1, le=10**8)
    """Train up to this step, including the steps of a --checkpoint."""
    learning_rate: float = Field(default=3e-4, gt=0, le=1e3)
    """Learning rate of every step; with --warmup-steps or --learning-rate-decay, the highest."""
    warmup_steps: int = Field(default=0, ge=0, le=10**8)
    """Steps in which the learning rate rises from zero."""
    learning_rate_decay: Literal["none", "linear", "cosine"] = "none"
    """How the learning rate falls after the warmup: linearly, or as half a cosine."""
    decay_steps: int | None = Field(default=None, ge=1, le=10**8)
    """Step at which the learning rate reaches its end; by default --steps."""
    final_learning_rate: float | None = Field(default=None, ge=0, le=1e3)
    """Learning rate at the end of the decay; by default 0."""
    text: File | None = None
    """Train on random windows of this text file, instead of synthetic tokens."""
    token_file: File | None = None
    """Train on random windows of this file of token numbers: little-endian without a header (nanoGPT's and Megatron's
    .bin), or .parquet, .arrow or .safetensors."""
    token_format: Literal["uint16", "uint32"] | None = None
    """Format of --token-file and --evaluate without a header; by default uint16 for vocabularies up to 65,536, else
    uint32."""
    documents: Annotated[str | None, Flag("END")] = None
    """Keep documents that share a sequence apart: a token attends to its own alone. END is the token with which each
    ends: its number or, of a --text, as its tokenizer writes it; or 'rows', of the lists of a --token-file."""
    evaluate: File | None = None
    """Held-out text, or file of token numbers, as the one that is trained on: its loss is taken now and then."""
    evaluate_every: int | None = Field(default=None, ge=1, le=10**8)
    """Evaluate every N steps, and after the last; by default 100."""
    evaluate_batches: int | None = Field(default=None, ge=1, le=10**6)
    """Batches that an evaluation is the mean of; by default 8."""
    clip_gradients: float | None = Field(default=None, gt=0, le=1e6)
    """Scale gradients down to this norm, all of them together."""
    beta1: float | None = Field(default=None, ge=0, lt=1)
    """Decay of the average of gradients; by default 0.9."""
    beta2: float | None = Field(default=None, ge=0, lt=1)
    """Decay of the average of their squares; by default 0.95."""
    epsilon: float | None = Field(default=None, gt=0, le=1)
    """Added to the root of that average; by default 1e-8."""
    weight_decay: float | None = Field(default=None, ge=0, le=1e3)
    """Decoupled weight decay, times the learning rate; by default 0.1."""
    decayed: Annotated[Literal["all", "matrices"] | None, Flag(name="--weight-decay-of")] = None
    """What decays: all weights, the default, or matrices and tables alone, without scales of norms and biases."""
    unroll_layers: bool | None = None
    """Write loops over layers out, or never: what the backward pass reads then stays where it was made, and is copied
    into no stack of all layers. On GPUs a step is faster so, and compiling takes longer. By default those of 36 layers
    and less are on NVIDIA GPUs, in steps of one microbatch without experts and of 'data' and 'fsdp' alone, where all
    products are kept, as in 'verify'."""
    metrics: Annotated[str | None, Flag("FILE")] = None
    """Add a line of JSON for each step to this file: loss, learning rate, seconds, tokens/s, norms, evaluations."""
    tensorboard: Annotated[str | None, Flag("DIR")] = None
    """Write the same numbers to this folder for TensorBoard."""
    wandb: Annotated[str | None, Flag("PROJECT")] = None
    """Log the same numbers to this project of Weights & Biases, if its library is installed."""
    keep: int | None = Field(default=None, ge=1, le=10**6)
    """Keep the last N saved steps of a --checkpoint, and remove older ones; by default all are kept."""
    profile: Annotated[str | None, Flag("DIR")] = None
    """Write a profile of a few steps to this folder, and end with where their time went, beside the plan."""
    checkpoint: Annotated[str | None, Flag("DIR")] = None
    """Save steps in this folder, and go on from the last step saved there."""
    every: int | None = Field(
        default=None, ge=1, le=10**8, description=f"Save every N steps, and the last one; by default {DEFAULT_EVERY}."
    )

    def check(self) -> None:
        """See that options go together.

        Raises:
            MeshwiseError: for one that means nothing without another.
        """
        self._check_data()
        if (self.text is None) != (self.tokenizer is None):
            there, missing = ("--text", "--tokenizer") if self.tokenizer is None else ("--tokenizer", "--text")
            raise MeshwiseError(f"{there} needs {missing}")
        if self.every is not None and self.checkpoint is None:
            raise MeshwiseError("--every needs --checkpoint, the folder that steps are saved in")
        if self.keep is not None and self.checkpoint is None:
            raise MeshwiseError("--keep needs --checkpoint, the folder that steps are saved in")
        self._check_decay()
        self.check_processes()

    def _check_data(self) -> None:
        if self.text is not None and self.token_file is not None:
            raise MeshwiseError("--text and --token-file: train on one of them")
        if self.evaluate is not None and self.text is None and self.token_file is None:
            raise MeshwiseError("--evaluate needs --text or --token-file, whose kind of file it is")
        if self.token_format is not None and self.token_file is None:
            raise MeshwiseError("--token-format needs --token-file")
        if self.documents is not None and self.text is None and self.token_file is None:
            raise MeshwiseError("--documents needs --text or --token-file, whose documents are kept apart")
        for name in ("evaluate_every", "evaluate_batches"):
            if getattr(self, name) is not None and self.evaluate is None:
                raise MeshwiseError(f"{flag(name)} needs --evaluate, a held-out file")

    def _check_decay(self) -> None:
        if self.learning_rate_decay == "none":
            for name in ("decay_steps", "final_learning_rate"):
                if getattr(self, name) is not None:
                    raise MeshwiseError(f"{flag(name)} needs --learning-rate-decay linear or cosine")
            return
        name, end = ("steps", self.steps) if self.decay_steps is None else ("decay_steps", self.decay_steps)
        if end <= self.warmup_steps:
            raise MeshwiseError(
                f"{flag(name)} {end}: expected more steps than --warmup-steps {self.warmup_steps}, after which the "
                "learning rate falls"
            )
        if (self.final_learning_rate or 0.0) > self.learning_rate:
            raise MeshwiseError(
                f"--final-learning-rate {self.final_learning_rate:g}: expected at most --learning-rate "
                f"{self.learning_rate:g}, from which it falls"
            )


class GenerateRequest(ExecutionRequest):
    """What is to be generated with a plan's layout."""

    sections: ClassVar = {"Generation": ("tokens", "prompt", "prompt_tokens", "dtype")}

    tokens: Annotated[int, Flag(name="--generate"), _TOKENS]
    prompt: str | None = None
    """Text to go on from, for --generate."""
    prompt_tokens: Annotated[str | None, Flag("NUMBERS")] = None
    """Tokens to go on from, instead of --prompt: 1,2,3."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Format of weights, activations and cache, for --generate; by default fp32 on a CPU, else the plan's."""

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


class RunOptions(RunRequest, GenerateRequest):
    """Both, as the command line takes them."""

    sections: ClassVar = {**RunRequest.sections, **GenerateRequest.sections}

    tokens: Annotated[int | None, Flag(name="--generate"), _TOKENS] = None  # type: ignore[assignment]

    def check(self) -> None:
        """See that options go together: those that only training reads are not for generation.

        Raises:
            MeshwiseError: names one.
        """
        if self.tokens is None:
            for name in ("prompt", "prompt_tokens", "dtype"):
                if getattr(self, name) is not None:
                    raise MeshwiseError(f"{flag(name)} needs --generate, the number of new tokens")
            return RunRequest.check(self)
        training = sorted(self.model_fields_set - set(GenerateRequest.model_fields))
        if others := [name for name in training if getattr(self, name) is not None]:
            raise MeshwiseError(f"{flag(others[0])} is for training; with --generate leave it out")
        return GenerateRequest.check(self)

    def generation(self) -> GenerateRequest:
        """The part that generation reads."""
        return GenerateRequest(**self.model_dump(include=set(GenerateRequest.model_fields)))
