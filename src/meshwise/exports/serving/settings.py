"""The checkpoint that an engine loads, what quantises it, formats of its caches. Not here: any engine's methods."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.core.dtypes import DType
from meshwise.exports.exported import Refusals
from meshwise.exports.serving.choices import ServingChoices
from meshwise.exports.serving.script import Script

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
    """Give the options of formats that vLLM and SGLang have alike.

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
    formats, published = choices.load.formats, choices.published
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
