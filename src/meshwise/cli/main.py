"""The entry point: which verbs there are, and the one place where errors become words and exit codes.

Exit codes: 0 ok, 1 a bug of meshwise, 2 usage, 3 nothing feasible or a failed check, 4 an optional dependency is
missing, 130 interrupted. Errors go to stderr as `error: ...`; with `--json` as one JSON object, and stdout stays empty.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

import click

from meshwise import __version__
from meshwise.cli.lazy import LazyCommand, LazyGroup
from meshwise.core.errors import MeshwiseError

_AT = "meshwise.commands"

COMMANDS = {
    "plan": LazyCommand(
        "Find the best plans, and say why others lose.",
        verbs={
            "train": LazyCommand(
                "Find the best layouts for a training job, and why the others lose.", f"{_AT}.plan_train:show_plans"
            ),
            "serve": LazyCommand(
                "Find the best layouts for a serving load, and why the others lose.", f"{_AT}.plan_serve:show_plans"
            ),
        },
    ),
    "estimate": LazyCommand(
        "Estimate what one layout would do.",
        verbs={
            "train": LazyCommand(
                "Estimate what one layout would do for a training job.", f"{_AT}.estimate_train:show_estimate"
            ),
            "serve": LazyCommand(
                "Estimate what one layout would do for a serving load.", f"{_AT}.estimate_serve:show_estimate"
            ),
        },
    ),
    "export": LazyCommand("Write a saved plan as the configuration of another tool.", f"{_AT}.export:show_export"),
    "simulate": LazyCommand(
        "Simulate a training step, or traffic through a serving engine.",
        verbs={
            "train": LazyCommand("Show one training step as a timeline.", f"{_AT}.simulate_train:show_timeline"),
            "serve": LazyCommand(
                "Serve requests over time by replicas of an engine.", f"{_AT}.simulate_serve:show_simulation"
            ),
        },
        default="train",
    ),
    "verify": LazyCommand(
        "Compile a step for its target, and compare with the plan.", f"{_AT}.verify:show_verification"
    ),
    "run": LazyCommand("Train, or generate, as a plan says on the devices that are there.", f"{_AT}.run:show_run"),
    "score": LazyCommand(
        "Compare predictions with measured training runs, or with measured serving.", f"{_AT}.score:show_score"
    ),
    "calibrate": LazyCommand(
        "Refine a chip's calibration by your own measured steps.", f"{_AT}.calibrate:show_calibration"
    ),
    "model": LazyCommand("Count a model: parameters, FLOPs and KV cache, part by part.", f"{_AT}.catalogs:show_model"),
    "models": LazyCommand("List the models known by name.", f"{_AT}.catalogs:show_models"),
    "chips": LazyCommand("List the chips known by name, with their numbers and sources.", f"{_AT}.catalogs:show_chips"),
    "clusters": LazyCommand("Say how clusters are named, and what a name stands for.", f"{_AT}.catalogs:show_clusters"),
    "roofline": LazyCommand(
        "Time one operation on one chip: what binds, and from which batch on.", f"{_AT}.roofline:show_roofline"
    ),
    "shard": LazyCommand("List the collectives that a sharded product needs.", f"{_AT}.shard:show_product"),
    "collective": LazyCommand("Time one collective on a cluster.", f"{_AT}.collective:show_collective"),
    "bench": LazyCommand("Measure single operations on the devices that are there.", f"{_AT}.bench:show_bench"),
}

INTERRUPTED = 130


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every command has --json and --explain. Exit codes: 0 ok, 1 a bug, 2 usage, 3 infeasible, 4 missing extra.",
)
@click.version_option(__version__, message="meshwise %(version)s")
def app() -> None:
    """Say how a large language model is best split over the chips of a cluster, and why."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises, never shows a traceback unless MESHWISE_DEBUG=1.

    Args:
        args: the words after `meshwise` (default: of this process).
    """
    words = list(sys.argv[1:] if args is None else args)
    if sys.stdout is None:  # the shell's >&-
        failure = _Failure("OutputError", "the answer cannot be written: stdout is closed", 2)
        _say(failure, as_json="--json" in words)
        return failure.exit_code
    for stream in (sys.stdout, sys.stderr):
        _replace_what_cannot_be_encoded(stream)
    try:
        code = app.main(args=words, prog_name="meshwise", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has gone: not an error
        _discard_output()
        return 0
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the boundary: what no error of ours explains is a bug)
        failure = _failure(error)
        if failure.kind == "OutputError":
            _discard_output()
        _say(failure, as_json="--json" in words)
        return failure.exit_code
    return code if isinstance(code, int) else 0


def _discard_output() -> None:
    """Let what is still buffered go nowhere: the interpreter flushes it once more at its end, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclass(frozen=True, slots=True)
class _Failure:
    """What stderr says about an error."""

    kind: str
    message: str
    exit_code: int


def _failure(error: BaseException) -> _Failure:  # noqa: PLR0911  (one for each kind of error)
    """Turn anything that was raised into words and an exit code."""
    match error:
        case MeshwiseError():
            return _Failure(type(error).__name__, str(error), error.exit_code)
        case click.exceptions.NoArgsIsHelpError():
            return _Failure("UsageError", f"a command is missing\n\n{error.format_message()}", 2)
        case click.UsageError():
            where = error.ctx.command_path if error.ctx else "meshwise"
            return _Failure("UsageError", f"{error.format_message()}\nSee '{where} --help'.", 2)
        case click.ClickException():
            return _Failure(type(error).__name__, error.format_message(), 2)
        case KeyboardInterrupt() | click.Abort():
            return _Failure("Interrupted", "interrupted", INTERRUPTED)
        case OSError(errno=errno.ENOSPC):
            return _Failure("OutputError", "the answer cannot be written: no space left on the device", 2)
        case _:
            if os.environ.get("MESHWISE_DEBUG") == "1":
                traceback.print_exception(error)
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            return _Failure("Bug", f"this is a bug in meshwise: {cause} (MESHWISE_DEBUG=1 shows where)", 1)


def _say(failure: _Failure, *, as_json: bool) -> None:
    """Print a failure on stderr."""
    if as_json:
        click.echo(json.dumps({"schema_version": "1", "error": asdict(failure)}), err=True)
    else:
        click.echo(f"error: {failure.message}", err=True)


def _replace_what_cannot_be_encoded(stream: TextIO) -> None:
    """Print a question mark where the terminal's encoding lacks a character, instead of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
