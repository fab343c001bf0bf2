"""The checkpoint that an engine loads, what quantises it, formats of its caches, and what else it has to be told.

Not here: any engine's methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwise.core.dtypes import DType
from meshwise.exports.choices import extents_words
from meshwise.exports.exported import Refusals
from meshwise.exports.serving.choices import ServingChoices
from meshwise.exports.serving.script import Script
from meshwise.sharding.serving import ServingLayout

#: Formats of published checkpoints that are stored otherwise than their config's dtype, by quantization method.
_PUBLISHED = {"fp8": (DType.FP8, DType.FP8)}

#: Formats of activations as vLLM and SGLang name them.
_DTYPES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}

#: (weights, operands) -> the engine's name of the method, the methods of published checkpoints that have these formats
#: already, and the checkpoint that it needs ("" where any will do).
Methods = Mapping[tuple[DType, DType], tuple[str, tuple[str, ...], str]]


def format_options(
    choices: ServingChoices, methods: Methods, caches: Mapping[DType, str], refusals: Refusals, script: Script
) -> dict[str, str | int | float | None]:
    """The options of formats that vLLM and SGLang have alike.

    Args:
        choices, methods, refusals, script: as in `model_setting`.
        caches: format of the cache -> the engine's name of it.
    """
    formats = choices.load.formats
    out: dict[str, str | int | float | None] = {"--dtype": _DTYPES[formats.activations]}
    method = model_setting(choices, methods, refusals, script)
    if method:
        out["--quantization"] = method
    if formats.kv == formats.activations:
        out["--kv-cache-dtype"] = "auto"
    elif formats.kv in caches:
        out["--kv-cache-dtype"] = caches[formats.kv]
    else:
        refusals.add(f"kv={formats.kv.value}", "its caches have no such format", "kv=fp8")
    return out


def model_setting(choices: ServingChoices, methods: Methods, refusals: Refusals, script: Script) -> str:
    """Set MODEL in a script, and give the method that quantises it; "" where its checkpoint says so itself.

    Args:
        choices: the plan.
        methods: that the engine has, by formats.
        refusals: where a format that it does not have is noted.
        script: where the model is named.
    """
    formats, published = choices.load.formats, choices.model.quantization
    wide = choices.formats == (formats.activations, formats.activations)
    hub = choices.model.hub_names[0] if choices.model.hub_names else ""
    if wide:
        _name(script, hub if not published else "", "a checkpoint in " + formats.activations.value)
        return ""
    if choices.formats not in methods:
        known = ", ".join(f"weights={w.value},compute={c.value}" for w, c in methods)
        weights, operands = choices.formats
        refusals.add(
            f"weights={weights.value},compute={operands.value}", "no method of it has these formats", f"one of {known}"
        )
        return ""
    method, same, needed = methods[choices.formats]
    if published in same and _PUBLISHED.get(published) == choices.formats:
        _name(script, hub, "")
        return ""
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
