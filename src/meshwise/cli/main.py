"""The entry point: which verbs there are, and the one place where errors become words and exit codes.

A verb is imported when it is called, so that `meshwise --help` stays quick.

Exit codes: 0 ok, 1 a bug of meshwise, 2 usage, 3 nothing feasible or a failed check, 4 an optional dependency is
missing, 130 interrupted. Errors go to stderr as `error: ...`; with `--json` as one JSON object, and stdout stays empty.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import click

from meshwise import __version__
from meshwise.cli.streams import discard, tell
from meshwise.core.errors import MeshwiseError, StalePlanWarning, UnknownNameError, short


def _made(module: str, attribute: str) -> click.Command:
    from meshwise.cli.options import click_command  # noqa: PLC0415  (what reads requests is loaded with one)

    found = getattr(importlib.import_module(module), attribute)
    return found if isinstance(found, click.Command) else click_command(found)


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """One line of `--help`, and where its command lives.

    Args:
        summary: the line; a test compares it with the command's own.
        target: `module:attribute` of a verb; of a group "".
        verbs: of a group, its verbs.
    """

    summary: str
    target: str = ""
    verbs: Mapping[str, LazyCommand] = field(default_factory=dict)

    def load(self) -> click.Command:
        """Import the command."""
        if self.verbs:
            return LazyGroup(help=self.summary, lazy=self.verbs)
        module, attribute = self.target.split(":")
        if module in sys.modules:  # in a process that runs many commands: what lives then is garbage by and by
            return _made(module, attribute)
        collecting = gc.isenabled()
        gc.disable()  # what is loaded stays, and it is a lot: no garbage is collected meanwhile, nor in it later
        try:
            return _made(module, attribute)
        finally:
            gc.freeze()
            if collecting:
                gc.enable()


class LazyGroup(click.Group):
    """A group that knows its commands by name and summary only."""

    def __init__(self, *args: object, lazy: Mapping[str, LazyCommand], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.lazy = lazy

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`meshwise simulate PLAN` is `meshwise simulate train PLAN`."""
        named = not args or args[0] in (*self.lazy, *self.get_help_option_names(ctx))
        return super().parse_args(ctx, args if named or ctx.info_name != "simulate" else ["train", *args])

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        """Names in the order in which they are declared."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command."""
        entry = self.lazy.get(cmd_name)
        return entry.load() if entry else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that `args` starts with.

        Raises:
            UnknownNameError: with the nearest commands.
        """
        name = args[0]
        if name in GUESSES and not ctx.parent:
            raise MeshwiseError(f"unknown command {name!r}: {GUESSES[name]}")
        if name not in self.lazy and not name.startswith("-"):
            if _NOT_COMMANDS.fullmatch(name):
                is_cluster = _CLUSTER.fullmatch(name) is not None
                of_all = ["fit MODEL --on", "plan train MODEL --on"] if is_cluster else ["model", "fit"]
                verbs = [f"{verb} MODEL --on" if is_cluster else verb for verb in self.lazy] if ctx.parent else of_all
                where = " or ".join(f"'{ctx.command_path} {verb} {name} ...'" for verb in verbs)
                raise MeshwiseError(f"unknown command {name!r}: what is asked comes first, {where}")
            raise UnknownNameError("command", name, self.lazy, hint=f"See '{ctx.command_path} --help'.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.lazy.items()])


#: Where it is -> the commands that users look for.
_MEANT = {
    "what fits is 'meshwise fit', the memory of one layout 'meshwise estimate'": "memory mem vram fits",
    "clusters are compared by 'meshwise plan train MODEL --on h100:64,v5p:4x4x4 ...'": "compare vs",
    "'meshwise plan train' plans it, 'meshwise run' does it": "train pretrain finetune",
    "'meshwise plan serve' plans it, 'meshwise serve' does it": "serving infer inference",
    "the best layouts are found by 'meshwise plan train' and 'meshwise plan serve'": "optimize search tune best",
    "'meshwise plan train' and 'meshwise estimate train' say it; see --tokens": (
        "cost price mfu time latency throughput speed"
    ),
    "a model is counted by 'meshwise model MODEL'": "params parameters count flops info size",
    "what one layout does is 'meshwise estimate train' or 'meshwise estimate serve'": "calculate predict analyze",
    "'meshwise --help' lists commands, 'meshwise models', 'chips' and 'clusters' list names": "list ls help",
    "'meshwise --version' says it": "version",
    "'meshwise chips' and 'meshwise clusters' list them": "gpus gpu tpus hardware",
    "single operations are measured by 'meshwise bench'": "benchmark",
}

#: What is no command by its letters, but a model or a cluster: digits and the like are in it.
_NOT_COMMANDS, _CLUSTER = re.compile(r".*[0-9:/.].*"), re.compile(r"\d+[xX*][\w-]+|[\w-]+:\S+")

#: Command that is not known -> where it is here.
GUESSES = {name: text for text, names in _MEANT.items() for name in names.split()}

_GROUPS = {
    "plan": "Find the best plans, and say why others lose.",
    "estimate": "Estimate what one layout would do.",
    "simulate": "Simulate a training step, or traffic through a serving engine.",
}

#: Verb -> where in `commands` it is, and its line in the help.
VERBS = {
    "plan train": ("plan_train:show_plans", "Find the best layouts for a training job, and why the others lose."),
    "plan serve": ("plan_serve:show_plans", "Find the best layouts for a serving load, and why the others lose."),
    "estimate train": ("estimate_train:show_estimate", "Estimate what one layout would do for a training job."),
    "estimate serve": ("estimate_serve:show_estimate", "Estimate what one layout would do for a serving load."),
    "fit": ("fit:show_fit", "Find out what fits in memory, for serving and for training."),
    "sweep": ("sweep:show_sweep", "Answer many questions: models x clusters x jobs x prices, in parallel."),
    "export": ("export:show_export", "Write a saved plan as the configuration of another tool."),
    "simulate train": ("simulate_train:show_timeline", "Show one training step as a timeline."),
    "simulate serve": ("simulate_serve:show_simulation", "Serve requests over time by replicas of an engine."),
    "verify": ("verify:show_verification", "Compile a step for its target, and compare with the plan."),
    "hlo": ("hlo:show_program", "Explain any compiled XLA program: memory, collectives, FLOPs, time."),
    "run": ("run:show_run", "Train, or generate, as a plan says on the devices that are there."),
    "profile": ("profile:show_profile", "Say where the time of a real run went, and why."),
    "serve": ("serve:show_serve", "Serve a model, or a plan, over HTTP by OpenAI's protocol."),
    "load": ("load:show_load", "Send a load to an endpoint, and say what its users would notice."),
    "score": ("score:show_score", "Compare predictions with measured training runs, or with measured serving."),
    "calibrate": ("calibrate:show_calibration", "Refine a chip's calibration by your own measured steps."),
    "model": ("catalogs:show_model", "Count a model: parameters, FLOPs and KV cache, part by part."),
    "models": ("catalogs:show_models", "List the models known by name."),
    "chips": ("catalogs:show_chips", "List the chips known by name, with their numbers and sources."),
    "clusters": ("catalogs:show_clusters", "Show how clusters are named, and what a name stands for."),
    "roofline": ("roofline:show_roofline", "Time one operation on one chip: what binds, and from which batch on."),
    "shard": ("shard:show_product", "List the collectives that a sharded product needs."),
    "collective": ("collective:show_collective", "Time one collective on a cluster."),
    "book": ("book:show_book", 'Answer the worked problems of "How To Scale Your Model", with your own numbers.'),
    "rule": ("rule:show_rule", 'Work out a rule of "How To Scale Your Model", or solve it for any of its letters.'),
    "bench": ("bench:show_bench", "Measure single operations on the devices that are there."),
}


#: What `meshwise ui` does.
UI = "Show answers in the browser: each view a link, each link a command."

#: What `meshwise completion` does.
COMPLETION = "Print what completes words in bash, zsh or fish."


def _commands(prefix: str = "") -> dict[str, LazyCommand]:
    """Name -> command, of a group's verbs or of all; groups stand where their first verb does."""
    found: dict[str, LazyCommand] = {}
    for name, (target, summary) in VERBS.items():
        word, _, verb = name.removeprefix(prefix).partition(" ")
        if name.startswith(prefix) and not verb:
            found[word] = LazyCommand(summary, f"meshwise.commands.{target}")
        elif name.startswith(prefix) and word not in found:
            found[word] = LazyCommand(_GROUPS[word], verbs=_commands(f"{word} "))
    return found


#: What `meshwise mcp` does.
AGENTS = "Give the verbs to agents, as tools of the Model Context Protocol on stdin and stdout."

COMMANDS = {
    **_commands(),
    "ui": LazyCommand(UI, "meshwise.web.serve:show_ui"),
    "mcp": LazyCommand(AGENTS, "meshwise.cli.mcp:mcp"),
    "completion": LazyCommand(COMPLETION, "meshwise.cli.options:completion"),
}

INTERRUPTED = 130

#: How a refusal begins where this machine cannot hold what was asked for.
NO_MEMORY = "this machine has too little free memory"


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="All have --json, --details, --explain. Exit codes: 0 ok, 1 a bug, 2 usage, 3 infeasible, 4 missing extra.",
)
@click.version_option(__version__, message="meshwise %(version)s")
def app() -> None:
    """Find the best way to split a large language model over the chips of a cluster, and why it is the best."""


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
        if hasattr(stream, "reconfigure"):  # a question mark where the terminal's encoding lacks a character
            stream.reconfigure(errors="replace")
    warnings.showwarning = _warn
    with _interrupts() as interrupted:
        return _run(words, interrupted)


def _run(words: list[str], interrupted: Callable[[], bool]) -> int:
    """Run a command; `interrupted`: whether Ctrl-C has come."""
    try:
        code = app.main(args=words, prog_name="meshwise", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # the reader (head, less) has gone, which click makes an exit: not an error
        discard(sys.stdout)
        return 0
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the boundary: what no error of ours explains is a bug)
        failure = _failure(error)
        if failure.kind != "OutputError" and interrupted():
            failure = _Failure("Interrupted", "interrupted", INTERRUPTED)
        if failure.kind == "OutputError":
            discard(sys.stdout)
        _say(failure, as_json="--json" in words)
        return failure.exit_code
    return code if isinstance(code, int) else 0


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Tell whether Ctrl-C has come since, whatever became of it: libraries make other errors of it, while they load."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def came() -> bool:
        try:
            return signal.SIGINT in os.read(read, 1 << 16)
        except BlockingIOError:
            return False

    try:
        yield came
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def _warn(message: Warning | str, category: type[Warning], *_where: object, **_more: object) -> None:
    """Say a warning of ours as a line on stderr; those of libraries are for us, not for users."""
    if issubclass(category, StalePlanWarning) or os.environ.get("MESHWISE_DEBUG") == "1":
        tell(f"note: {short(str(message))}\n")


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
        case click.NoSuchOption():
            from meshwise.cli.options import GUESSES as OPTIONS  # noqa: PLC0415  (loaded with the command that failed)

            where = error.ctx.command_path if error.ctx else "meshwise"
            meant = OPTIONS.get(error.option_name)
            told = f"no option {error.option_name}: {meant}" if meant else error.format_message()
            return _Failure("UsageError", f"{short(told)}\nSee '{where} --help'.", 2)
        case click.UsageError():
            where, told = error.ctx.command_path if error.ctx else "meshwise", error.format_message()
            options = [name for p in error.ctx.command.params for name in p.opts] if error.ctx else []
            extra = "extra argument" in told and "--on" in options
            beside = "; all else are options: a cluster is --on h100:8" if extra else ""
            return _Failure("UsageError", f"{short(told)}{beside}\nSee '{where} --help'.", 2)
        case click.ClickException():
            return _Failure(type(error).__name__, short(error.format_message()), 2)
        case KeyboardInterrupt() | click.Abort():
            return _Failure("Interrupted", "interrupted", INTERRUPTED)
        case MemoryError():
            why = f" ({short(str(error))})" if str(error) else ""
            told = f"{NO_MEMORY}{why}: ask for less at once, or run it where there is more"
            return _Failure("OutOfMemory", told, 2)
        case OSError(errno=errno.ENOSPC):
            return _Failure("OutputError", "the answer cannot be written: no space left on the device", 2)
        case OSError(errno=errno.ENAMETOOLONG, filename=name):
            return _Failure("ConfigError", short(f"no file can have so long a name, found {str(name)!r}"), 2)
        case OSError(errno=errno.EDQUOT | errno.EFBIG | errno.EIO, strerror=str(why), filename=None):
            return _Failure("OutputError", f"the answer cannot be written: {why.lower()}", 2)
        case _:
            if os.environ.get("MESHWISE_DEBUG") == "1":
                traceback.print_exception(error)
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            return _Failure("Bug", f"this is a bug in meshwise: {cause} (MESHWISE_DEBUG=1 shows where)", 1)


def _say(failure: _Failure, *, as_json: bool) -> None:
    """Print a failure on stderr."""
    said = json.dumps({"schema_version": "1", "error": asdict(failure)}) if as_json else f"error: {failure.message}"
    tell(f"{said}\n")
