"""A shell script of functions, one a command: the engines, what stands before them, the measurement.

Measurements of all engines take requests of the plan's lengths, as many at once. And what all engines have to be told:
the checkpoint, what quantises it, formats of caches. Not here: any engine's own names and methods.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.units import format_time
from meshwise.exports.choices import commented, extents_words
from meshwise.exports.serving.choices import Methods, ServingChoices
from meshwise.jobs.lengths import Uniform, parse_lengths
from meshwise.sharding.serving import ServingLayout

#: Flag -> its value as the shell takes it; None for a switch.
Options = Mapping[str, str | int | float | None]


def shell_json(value: Any) -> str:
    """Quote a value as JSON for the shell."""
    return shlex.quote(json.dumps(value))


def command(words: str, options: Options, *, last: Iterable[str] = ()) -> list[str]:
    """Write one command: its words, then an option a line, then words that follow."""
    lines = [words, *(flag if value is None else f"{flag} {value}" for flag, value in options.items()), *last]
    return [f"{'    ' if n == 0 else '        '}{line}" for n, line in enumerate(lines)]


def heredoc(file: str, document: str) -> list[str]:
    """Write a file from inside a script."""
    return [f"    cat >{file} <<'END'", *document.rstrip("\n").split("\n"), "END"]


def router_urls(choices: ServingChoices, what: str = "URLs") -> tuple[str, str]:
    """The variables that say where engines apart answer: those that prefill, those that decode."""
    setup = choices.setup
    return (
        f'"${{PREFILL_URLS:?{what} of engines that prefill: {setup.prefill.replicas}}}"',
        f'"${{DECODE_URLS:?{what} of engines that decode: {setup.decode.replicas}}}"',
    )


@dataclass
class Script:
    """What an engine is handed.

    Args:
        version: what of the engine it was written for.
        settings: variables with their defaults, as shell text.
        functions: name -> (what it does, lines of its body, each a command or a whole document).
        notes: what means something else there, or has to be said in another place.
        use: how to run it, in words.
    """

    version: str
    settings: dict[str, str] = field(default_factory=dict)
    functions: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    use: str = ""

    def add(self, name: str, what: str, *parts: list[str], run: list[str]) -> None:
        """Add a function: documents that it writes, then the command that it runs."""
        body = ["\n".join(part) for part in parts]
        self.functions[name] = (what, [*body, " \\\n".join(run)])

    def text(self, choices: ServingChoices, title: str) -> str:
        """The whole file."""
        lines = [*_header(choices), f"written for {title}: {self.version}", *(f"note: {n}" for n in self.notes)]
        settings = "".join(f"{name}={value}\n" for name, value in self.settings.items())
        functions = "\n".join(
            f"# {what}\n{name}() {{\n" + "\n".join(body) + "\n}\n" for name, (what, body) in self.functions.items()
        )
        top = "#!/bin/bash\n" + commented([*lines, f"use: {self.use}"])
        names = ", ".join(self.functions)
        given = f'[ $# -gt 0 ] || {{ echo "which one: {names}?" >&2; exit 2; }}'
        return f'{top}set -eu\n{given}\n{settings}\n{functions}\n"$@"\n'


def _header(choices: ServingChoices) -> list[str]:
    setup, load, estimate = choices.setup, choices.load, choices.estimate
    chips = f"{setup.num_chips:,} x {choices.problem.cluster.chip.title}"
    layouts = [f"prefill: {setup.prefill}", f"decode: {setup.decode}"] if choices.apart else [f"layout: {setup.decode}"]
    prefix = f", {load.cached_prefix:,.0f} of them cached" if load.cached_prefix else ""
    mean = f" on average ({load.mix.words})" if load.mix else ""
    engine = "each decoding engine" if choices.apart else "each engine"
    tokens = estimate.output_tokens_per_s / choices.measured_engines
    where = "" if choices.measured_engines == 1 else " on each engine"
    return [
        f"{choices.model.name} on {chips}, a plan of meshwise",
        *layouts,
        f"load: {load.prompt:,.0f} tokens in{prefix}, {load.output:,.0f} out{mean}",
        f"batch: {setup.batch:,} requests at once on {engine}",
        f"precision {load.precision}",
        (
            f"predicted: TTFT {format_time(estimate.ttft.expected)}, TPOT {format_time(estimate.tpot.expected)}, "
            f"{tokens:,.0f} output tokens/s{where}"
        ),
    ]


def add_router(
    choices: ServingChoices, script: Script, words: str, *, switch: str, port: int, bootstrap: str = ""
) -> None:
    """Add what stands before engines apart, where it is told their addresses by options.

    Args:
        choices, script: the plan, and where the command is added.
        words: of the command.
        switch: the option for engines apart.
        port: it answers on unless told.
        bootstrap: what follows the address of an engine that prefills.
    """
    prefill, decode = router_urls(choices)
    options: Options = {switch: None, "--policy": "round_robin", "--port": f'"${{PORT:-{port}}}"'}
    ends = f"$(printf -- '--prefill %s {bootstrap}' $(echo {prefill}))", f"$(printf -- '--decode %s ' $(echo {decode}))"
    script.add("router", "what requests are sent to", run=command(words, options, last=ends))


#: How a measurement is to be read.
_MEASURED = (
    "'bench' keeps as many requests on their way as the plan has; the first ones come at once and wait for each other, "
    "so compare medians of TTFT and TPOT"
)


def length_spreads(choices: ServingChoices) -> dict[str, float] | None:
    """How far lengths are from their means at most, as shares of these, where they are alike or uniform; else None.

    Of prompts without what is cached, which is the same for all.
    """
    load = choices.load
    if load.mix is None:
        return {"input": 0.0, "output": 0.0}
    if load.mix.prompt is None or load.mix.output is None:
        return None
    out = {}
    for name, text, cached in (("input", load.mix.prompt, load.cached_prefix), ("output", load.mix.output, 0.0)):
        lengths = parse_lengths(text)
        if not isinstance(lengths, Uniform):
            return None
        out[name] = round((lengths.most - lengths.least) / (lengths.most + lengths.least - 2 * cached), 6)
    return out


def mean_note(choices: ServingChoices) -> str:
    """Note that the benchmark sends requests of the mean length."""
    words = choices.load.mix.words if choices.load.mix else ""
    return f"'bench' sends requests of the mean length, the plan has {words}"


def serving_benchmark(choices: ServingChoices) -> dict[str, str | int | float | None]:
    """The options of a closed loop of requests of the plan's lengths."""
    load = choices.load
    return {
        "--model": '"$MODEL"',
        "--dataset-name": "random",
        "--random-input-len": choices.new_tokens,
        "--random-prefix-len": int(load.cached_prefix),
        "--random-output-len": choices.output_tokens,
        "--random-range-ratio": "0.0",
        "--ignore-eos": None,
        "--num-prompts": choices.num_prompts,
        "--max-concurrency": choices.on_their_way,
        "--request-rate": "inf",
        "--seed": 0,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,90,99",
    }


def add_measurement(choices: ServingChoices, script: Script, run: list[str]) -> None:
    """End a script with the command that measures, how its numbers are to be read, and how the script is run."""
    script.add("bench", "measure what was predicted", run=run)
    script.notes.append(_MEASURED)
    first = "prefill, decode and router" if choices.apart else "serve"
    script.use = f"bash THIS_FILE {first}, each where it is to run; when they answer, bash THIS_FILE bench"


#: Formats of activations as vLLM and SGLang name them.
_DTYPES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}


def format_options(
    choices: ServingChoices, methods: Methods, caches: Mapping[DType, str], script: Script
) -> dict[str, str | int | float | None]:
    """The options of formats that vLLM and SGLang have alike.

    Args:
        choices, methods, script: as in `model_setting`.
        caches: format of the cache -> the engine's name of it.
    """
    formats = choices.load.formats
    out: dict[str, str | int | float | None] = {"--dtype": _DTYPES[formats.activations]}
    method = model_setting(choices, methods, script)
    if method:
        out["--quantization"] = method
    out["--kv-cache-dtype"] = "auto" if formats.kv == formats.activations else caches[formats.kv]
    return out


def model_setting(choices: ServingChoices, methods: Methods, script: Script) -> str:
    """Set MODEL in a script, and give the method that quantises it; "" where its checkpoint says so itself.

    Args:
        choices: the plan.
        methods: that the engine has, by formats.
        script: where the model is named.
    """
    formats, quantization = choices.load.formats, choices.model.quantization
    published = quantization.method if quantization is not None else ""
    hub = choices.model.hub_names[0] if choices.model.hub_names else ""
    if choices.wide:
        _name(script, hub if not published else "", "a checkpoint in " + formats.activations.value)
        return ""
    if choices.published:
        _name(script, hub, "")
        return ""
    method, same, needed = methods[choices.formats]
    if published and published not in same:
        _name(script, "", f"a checkpoint in {needed or formats.weights.value}; the published one is {published}")
    else:
        _name(script, "" if needed else hub, f"a checkpoint in {needed}")
    return method


def _name(script: Script, hub: str, wanted: str) -> None:
    script.settings["MODEL"] = f'"${{MODEL:-{hub}}}"' if hub else f'"${{MODEL:?{wanted}}}"'


def common_notes(
    choices: ServingChoices, title: str, *, numbered: Sequence[Sequence[str]], mixes: bool, prefix_option: str
) -> list[str]:
    """What an engine decides itself, and what the plan counts on.

    Args:
        choices: the plan.
        title: the engine's own name.
        numbered: groups of mesh axes as the engine nests its ranks, innermost first.
        mixes: whether it puts whole prompts into one step with what is generated.
        prefix_option: what turns prefix caching off.
    """
    setup, load = choices.setup, choices.load
    layouts = dict.fromkeys((setup.prefill, setup.decode))
    notes = [_how_many(choices)]
    if any(pool.layout.replicas > 1 for pool in choices.pools):
        more = "" if choices.apart else "; 'bench' measures one"
        notes.append(f"give each engine of a kind the same number of requests{more}")
    if any(layout.structure.sequence_parallel for layout in layouts):
        notes.append(
            f"sequence_parallel=on: {title} keeps positions whole between the matmuls of prefill, by an AllReduce "
            "where the plan has a ReduceScatter and an AllGather of as many bytes"
        )
    if mixes and not choices.apart and setup.chunk is None:
        notes.append(f"{title} puts a prompt and what is generated into one step; in the plan they take turns")
    if any(layout.stage > 1 for layout in layouts):
        notes.append(f"{title} forms the parts of the batch that its stages work on; the plan has as many as stages")
    if not load.cached_prefix:
        notes.append(f"the plan counts on no cached prefix; for traffic that has some, leave out {prefix_option}")
    if load.draft_tokens:
        notes.append(
            f"the plan counts on {load.acceptance:.0%} of proposed tokens accepted, and on a draft that takes no time"
        )
    if (made_for := choices.model.max_seq_len) and load.longest > made_for:
        notes.append(
            f"the model was made for {made_for:,} tokens: give its configuration a scaling of positions, without which "
            f"{title} may refuse longer requests"
        )
    placed = (_placement_note(choices, layout, numbered, title) for layout in layouts)
    return [*notes, *(note for note in placed if note)]


def _how_many(choices: ServingChoices) -> str:
    """How many servers there are, and on what."""
    each = [
        f"{pool.layout.replicas} x '{pool.name}' on {_chips(pool.layout.engine_chips)}"
        + (" each" if pool.layout.replicas > 1 else "")
        for pool in choices.pools
    ]
    return "start " + " and ".join(each)


def _chips(count: int) -> str:
    return "1 chip" if count == 1 else f"{count:,} chips"


def _placement_note(
    choices: ServingChoices, layout: ServingLayout, numbered: Sequence[Sequence[str]], title: str
) -> str:
    """Where axes lie, where an engine would number its ranks otherwise; "" where it would not."""
    group = {axis: number for number, axes in enumerate(numbered) for axis in axes}
    wires = [(axis, extents) for axis, extents in layout.wires or () if max(extents) > 1 and axis in group]
    names = [d.name for d in choices.problem.network.dimensions]
    # Axes on one level of the network may nest in any order there.
    order = [n for d in range(len(names)) for n in sorted(group[axis] for axis, e in wires if e[d] > 1)]
    if order == sorted(order):
        return ""
    placed = "; ".join(f"{axis} on {extents_words(names, extents)}" for axis, extents in wires)
    return f"{title} numbers its ranks otherwise than the plan lies ({placed}): order the hosts so"
