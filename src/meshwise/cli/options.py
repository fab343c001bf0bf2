"""The click command of a verb: its options are the fields of its requests, so that a parameter is declared once.

Unit, bounds, default and help are the field's; text goes to its own parser (`meshwise.core.units.Quantity`), and errors
come back with the flag as typed.
Not here: which requests there are (`commands`, `jobs`).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

import click
from pydantic.fields import FieldInfo

from meshwise.cli.output import Output
from meshwise.cli.shells import completion_script
from meshwise.commands.command import Verb, in_order
from meshwise.commands.requests import Flag, Request, bare_type, choices, flag, former_names, marker, notes
from meshwise.commands.typed import SUGGESTED, build, suggestions, typed_name
from meshwise.core.units import Quantity

#: Where it is here -> what users of other tools type.
_MEANT = {
    "a step's batch is in tokens, --batch-tokens 4Mi; the requests that an engine serves at once are --max-batch of a "
    "plan, --batch of an estimate": (
        "batch-size global-batch-size gbs bs max-num-seqs concurrency max-concurrency users"
    ),
    "sequences of a microbatch are micro_batch= of --layout": "micro-batch-size mbs",
    "lengths are --seq-len of training, --prompt and --output of serving, --context of 'meshwise fit'": (
        "seq seqlen seq-length sequence-length max-seq-len context-length max-model-len input-len output-len isl osl "
        "context ctx input input-length input-tokens output-length output-tokens prompt-length prompt-tokens"
    ),
    "chips and their number are one name, --on h100:64 or --on v5e:4x8": (
        "gpus num-gpus ngpus nodes chips num-chips devices gpu gpu-type tpu chip hardware device accelerator "
        "cluster num-nodes nnodes world-size"
    ),
    "mesh axes stand in --layout of 'estimate' (--layout tp=8,dp=2); a search fixes them by --fix tensor=8": (
        "tp dp pp cp ep fsdp zero mesh parallelism tensor-parallel-size pipeline-parallel-size data-parallel-size "
        "tensor-model-parallel-size pipeline-model-parallel-size"
    ),
    "number formats are --precision": "dtype quantization quant bits kv-cache-dtype fp8 bf16",
    "what is recomputed is remat= of --layout; a search fixes it by --fix remat=full": (
        "remat recompute checkpointing activation-checkpointing gradient-checkpointing"
    ),
    "requests per second are --rate": "qps rps request-rate requests-per-second",
    "targets are --max-ttft 500ms and --max-tpot 30ms": "ttft tpot slo",
    "the tool that runs the plan is --tool": "framework backend",
    "the model stands by itself, 'meshwise plan train llama-3-8b ...'": "model",
}

#: Option that is not known -> where it is here.
GUESSES: Mapping[str, str] = {f"--{name}": text for text, names in _MEANT.items() for name in names.split()}

#: Where options stand that no section names, in a request with sections and in one without.
_RARE, _PLAIN, _OUTPUT = "Less common", "Options", "Output"


def click_command(verb: Verb) -> click.Command:
    """Build a verb's command."""

    def run(as_json: bool, explain: bool, details: bool, **given: Any) -> None:
        asked = [build(verb, request, _typed(number, request, given)) for number, request in enumerate(verb.requests)]
        with Output(as_json, explain, details) as output:
            code = verb.function(output, *asked)
        if code:
            raise click.exceptions.Exit(code)

    params = [p for number, request in enumerate(verb.requests) for p in _parameters(verb, number, request)]
    about = [
        click.Option(["--details"], is_flag=True, help="Show all tables, what lost and why, and what is assumed."),
        click.Option(["--explain"], is_flag=True, help="Show formula, substitution, result and source of each number."),
        click.Option(
            ["--json", "as_json"], is_flag=True, help="Print JSON (errors too, on stderr); units are in the names."
        ),
    ]
    return _Command(None, params=[*params, *about], callback=run, help=inspect.getdoc(verb.function))


def _typed(number: int, request: type[Request], given: Mapping[str, Any]) -> dict[str, Any]:
    """What click found for one of a verb's requests: field -> value."""
    return {name: given[f"{name}_{number}"] for name in request.model_fields}


def _parameters(verb: Verb, number: int, request: type[Request]) -> list[click.Parameter]:
    """The options and arguments of one request, in the order of the help."""
    where = {name: section for section, names in request.sections.items() for name in names}
    out: list[click.Parameter] = []
    for name, info in in_order(request).items():
        shown, key = typed_name(verb, request, name), f"{name}_{number}"
        if name in request.positional:
            done = _completed(request, name)
            nargs = -1 if typing.get_origin(bare_type(info.annotation)) is tuple else 1
            out.append(click.Argument([key], required=info.is_required(), metavar=shown, nargs=nargs, **done))
        else:
            former = [flag(old) for old in former_names(name, info)]
            option = _option(info, shown, key, former, **_completed(request, name))
            option.section = where.get(name, _RARE if where else _PLAIN)
            out.append(option)
    return out


def _option(info: FieldInfo, shown: str, key: str, former: list[str], **options: Any) -> _Option:
    """The click option of one field."""
    kind, quantity = bare_type(info.annotation), marker(info, Quantity)
    words = [*notes(info), *(["required"] if info.is_required() else [])]
    assert info.description, f"a field needs a description: {shown}"
    options["help"] = info.description + (f"  [{'; '.join(words)}]" if words else "")
    if kind is bool:
        switch = shown if "/" in shown else f"{shown}/--no-{shown.removeprefix('--')}"
        return _Option([switch, *former, key], default=None, **options)
    if words := choices(kind):
        options["type"] = click.Choice(words)
    else:
        unit = quantity.unit.upper().replace(" ", "_") if quantity else kind.__name__.upper()
        plain = {"STR": "TEXT", "INT": "N", "FLOAT": "NUMBER", "PATH": "FILE"}.get(unit, unit)
        options["metavar"] = (marker(info, Flag) or Flag()).metavar or plain
    multiple = typing.get_origin(kind) in (tuple, list, dict)
    return _Option([shown, *former, key], default=() if multiple else None, multiple=multiple, **options)


def _completed(request: type[Request], name: str) -> dict[str, Any]:
    """The argument of click that completes a field's value; the last of a list."""

    def complete(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",")
        return [f"{before}{comma}{value}" for value in suggestions(request, name) if value.startswith(last)]

    return {"shell_complete": complete} if name in SUGGESTED else {}


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what completes words in bash, zsh or fish.

    Commands, options, models, clusters, chips, precisions and tools are completed.

    \b
      eval "$(meshwise completion bash)"      in ~/.bashrc
      eval "$(meshwise completion zsh)"       in ~/.zshrc
      meshwise completion fish | source       in ~/.config/fish/config.fish
    """  # noqa: D301  (click's mark for lines that stay as they are)
    click.echo(completion_script(shell))


class _Option(click.Option):
    """An option with its section of the help; its former names work, and stay out of the help."""

    section = _OUTPUT

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        names, self.opts = self.opts, self.opts[:1]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


class _Command(click.Command):
    """A command whose help shows options by section, those that everybody needs first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections.setdefault(getattr(param, "section", _OUTPUT), []).append(record)
        if set(sections) <= {_PLAIN, _OUTPUT}:  # few options: one list
            sections = {_PLAIN: sections.get(_PLAIN, []) + sections[_OUTPUT]}
        for section in sorted(sections, key=lambda name: {_OUTPUT: 1, _RARE: 2}.get(name, 0)):
            with formatter.section(section):
                formatter.write_dl(sections[section])
