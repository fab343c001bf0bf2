"""What a training row says of rematerialisation and offloading, as choices of a layout.

Words of Megatron-LM, MaxText, torchtitan and JAX. Not here: the policies (`sharding.remat`), or other words of rows
(`training`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.models import Model
from meshwise.scoring.rows import TrainingRun, dimension
from meshwise.sharding.remat import MODULES, check_remat, parse_remat

#: Projections of attention: those of a latent, too, where there is one.
_QKV = "q+k+v+q_a+kv_a"

#: MaxText's names -> ours (`get_remat_policy` in MaxText/layers/decoders.py).
_MAXTEXT = {
    "full": "full",
    "minimal": "projections",
    "minimal_flash": "matmuls",
    "minimal_with_context": "matmuls",
    "minimal_with_context_and_quantization": "matmuls",
    "save_qkv_proj": f"save:{_QKV}",
    "save_out_proj": "save:o",
    "save_dot_except_mlp": "attention",
    "save_dot_except_mlpwi": f"save:{_QKV}+o+down",
    "save_dot_with_context_except_mlp": f"save:{_QKV}+attention+o",
    "none": "none",
}

#: MaxText's policies of which everything kept, but the input of the layer, goes to the host.
_MAXTEXT_OFFLOADED = {"minimal_offloaded": "projections", "qkv_proj_offloaded": f"save:{_QKV}"}

#: MaxText's names of tensors, which `custom` policies place, -> ours. The input of a layer is always kept.
_TENSORS = {
    "decoder_layer_input": "",
    "context": "attention",
    "query_proj": "q",
    "key_proj": "k",
    "value_proj": "v",
    "qkv_proj": _QKV,
    "mla_q": "q",
    "mla_kv": "kv_a",
    "out_proj": "o",
    "mlpwi": "gate+up+expert.gate+expert.up",
    "mlpwi_0": "gate+expert.gate",
    "mlpwi_1": "up+expert.up",
    "mlpwo": "down+expert.down",
}

#: What torchtitan's `selective_ac_option = "op"` keeps: attention, and every other product with weights, in order.
_EVERY_OTHER = "save:q+v+gate+down+attention"

#: Layers whose activations are offloaded, and what may follow a policy: what the column `sp` says.
_LAYERS_OFFLOADED = (
    r"(?:activations of (\d+) layers offloaded|offload\w* (?:the )?activations (?:of )?(\d+) layers)"
    r"(?: to (?:the )?(?:cpu|host))?"
)
_FURTHER = r"(?: ?\+ ?sequence parallel(?:ism)?)?"


def read_recompute(run: TrainingRun, model: Model, choices: dict[str, Any], notes: list[str]) -> None:
    """What is computed again, and what lives in the host's memory.

    Args:
        run: the row.
        model: its model: names of what its layers lack are left out, and said.
        choices: of the layout, filled.
        notes: what was assumed, filled.

    Raises:
        MeshwiseError: words without a meaning here.
    """
    bare = " ".join(_without_origin(run.recompute).lower().split())
    if offloaded := re.search(_LAYERS_OFFLOADED, bare):
        choices["offload"] = ("activations",)
        choices["offload_layers"] = int(next(filter(None, offloaded.groups())))
        bare = re.sub(_LAYERS_OFFLOADED, "", bare).strip(" ;,+") or "none"
    if not bare:
        return
    bare = _offloaded_whole(_SHORT.get(bare, bare), choices)
    for read in (_of_counts, _of_jax, _of_torchtitan, _of_megatron, _of_words):
        if read(run, bare, model, choices, notes):
            return
    try:
        request = parse_remat(bare)  # a policy as layouts write it
    except MeshwiseError as error:
        raise MeshwiseError(f"recompute {bare!r} is not understood: {error}") from None
    choices |= {"remat": request.policy} | ({} if request.layers is None else {"remat_layers": request.layers})
    if request.offloads:
        choices["offload"] = ("activations",)


#: Short words -> longer ones: of torchtitan, of JAX (`jax.checkpoint_policies`), of people.
_SHORT = {
    "sac": "selective", "selective ac": "selective", "selective activation checkpointing": "selective",
    "core attention": "core_attn", "selective (attn)": "core_attn", "selective (attention)": "core_attn",
    "checkpoint_dots": "dots_saveable", "save_nothing": "nothing_saveable", "offload": "cpu offload",
}  # fmt: skip

#: What people call recomputation, beside the word for how much of it.
_CHECKPOINTS = (
    r"(?:(?:activation|gradient|layer|selective)[- ]?)?(?:re-?comput\w*|re-?materiali[sz]ation|remat"
    r"|check-?point\w*|ac\b)"
)

#: Layers of each piece of a pipeline, as Megatron-LM's method `block` counts them.
_IN_PIECES = r"\bblock\b\D*(\d+)|(\d+) layers? (?:of |per |in )(?:each |a |every )?(?:stage|piece|chunk)"

#: Words of "none", and of all layers.
_NONE = {"no", "not", "none", "off", "false", "disabled", "without", "used"}
_ALL = {"full", "fully", "all", "every", "each", "layer", "layers", "yes", "true", "on", "enabled", "uniform"}


def _offloaded_whole(bare: str, choices: dict[str, Any]) -> str:
    """The words without those that offload all that is kept to the host."""
    found = re.search(r"[;,+ ]*(?:with |and )?(no |without )?\b(?:cpu|host|activation)[- ]offload\w*", bare)
    if found is None or "custom" in bare:
        return bare
    if not found[1]:
        choices["offload"] = ("activations",)
    return (bare[: found.start()] + bare[found.end() :]).strip(" ;,+") or "none"


def _of_counts(run: TrainingRun, bare: str, model: Model, choices: dict[str, Any], notes: list[str]) -> bool:
    """Full recomputation of some layers; whether the words are such. Megatron-LM counts them in each piece."""
    layers = model.num_layers
    if found := re.search(r"^(?:full\b.*?|checkpoint\w*\W+)?(?:first |last )?(\d+) ?(?:of|/) ?(\d+) layers", bare):
        if int(found[2]) != layers:
            raise MeshwiseError(f"recompute {bare!r}: {model.name} has {layers} layers, found {found[2]}")
        number = int(found[1])
    elif found := re.fullmatch(r"(?:full,? ?)?([\d.]+) ?% of (?:the |all )?layers", bare):
        number = max(1, round(layers * min(float(found[1]), 100.0) / 100))
    elif found := re.search(_IN_PIECES, bare):
        pieces = (run.pp or 1) * (run.vpp or 1)
        number = int(found[1] or found[2]) * pieces
        if pieces > 1:
            notes.append(f"recompute: {number // pieces} layers in each of {pieces} pieces of the pipeline")
    else:
        return False
    choices |= {"remat": "full"} | ({"remat_layers": number} if number < layers else {})
    return True


def _of_words(run: TrainingRun, bare: str, _: Model, choices: dict[str, Any], notes: list[str]) -> bool:
    """Whether all layers, or none, are checkpointed, as people say it; whether the words are such."""
    if "memory budget" in bare or "memory_budget" in bare:
        notes.append(f"recompute {run.recompute!r}: chosen by the compiler, so the fastest that fits")
        return True
    much = re.sub(rf"recompute_granularity|granularity|method|num_layers|{_CHECKPOINTS}", " ", bare)
    words = set(re.findall(r"[a-z]+", much))
    if words <= _NONE and (words or bare == "0"):
        choices["remat"] = "none"
    elif words <= _ALL and "%" not in bare:
        choices["remat"] = "full"
        if "full" not in words:
            notes.append(f"recompute {run.recompute!r}: every layer, as checkpoints of whole blocks are")
    else:
        return False
    return True


def _of_jax(run: TrainingRun, bare: str, model: Model, choices: dict[str, Any], notes: list[str]) -> bool:
    """Policies of MaxText and JAX; whether the words are such."""
    if found := re.search(r"custom\s*\((.*)\)", bare):
        _custom(found[1], model, choices, notes)
    elif "save_and_offload_only_these_names" in bare:
        _saved_and_offloaded(bare, model, choices, notes)
    elif (found := re.search(r"remat_policy\s*[=:]\s*(\w+)", bare)) or _is_maxtext(run, bare):
        _maxtext(found[1] if found else bare, model, choices, notes)
    else:
        return False
    return True


def _of_megatron(_: TrainingRun, bare: str, model: Model, choices: dict[str, Any], notes: list[str]) -> bool:
    """Granularities and modules of Megatron-LM; whether the words are such."""
    if found := re.fullmatch(r"(none|full)(?:(?<=full) on (\d+) layers)?(?: ?\(.*\))?" + _FURTHER, bare):
        choices["remat"] = found[1]
        if found[2]:
            choices["remat_layers"] = int(found[2])
    elif modules := _modules(bare):
        if " or " in bare:
            notes.append(f"recompute {bare!r}: which modules varies between machines")
        choices["remat"] = _present(f"recompute:{'+'.join(modules)}", model, notes)
    elif re.fullmatch(r"selective(?: ?\((?:[\w-]+ )*(?:default|core|granularity)\))?" + _FURTHER, bare):
        choices["remat"] = "recompute:core_attn"  # the default list of modules
    else:
        return False
    return True


def _of_torchtitan(run: TrainingRun, bare: str, model: Model, choices: dict[str, Any], notes: list[str]) -> bool:
    """Selective checkpoints of every so many layers, or of every other product; whether the words are such."""
    if not re.match(rf"selective|(?:per-)?op\b|op-level|sac\b|{_CHECKPOINTS}[ =:]*selective", bare):
        return False
    if found := re.search(r"every (\d+|other|second)|(?:option|layer)\W+(\d+)", bare):
        number = found[1] or found[2]
        choices |= {"remat": "full", "remat_layers": max(1, model.num_layers // int(number if number.isdigit() else 2))}
    elif re.search(r"\bops?\b|\bop-level\b", bare) or ("torchtitan" in run.software.lower() and _is_default(bare)):
        choices["remat"] = _present(_EVERY_OTHER, model, notes)
    else:
        return False
    return True


def _is_default(bare: str) -> bool:
    """Whether words ask for selective recomputation and say no more: torchtitan's configs choose operations."""
    return re.fullmatch(rf"(?:selective|sac)(?: ?\((?:[\w-]+ )*default\))?(?: {_CHECKPOINTS})?", bare) is not None


def names_origin(words: str) -> bool:
    """Whether words were looked up elsewhere than the measurement: the place stands at their end."""
    return _without_origin(words) != words.strip()


def _without_origin(words: str) -> str:
    """The words without the place they were looked up in, which ends them in square brackets.

    >>> _without_origin("none [configs @v0.3.0]"), _without_origin("recompute_modules=['mlp', 'moe_act']")
    ('none', "recompute_modules=['mlp', 'moe_act']")
    """
    found = re.search(r"\s+\[([^\]]*)\]\s*$", words)
    if found is None or set(re.findall(r"[\w.]+", found[1])) <= {*MODULES}:
        return words.strip()  # a list of modules is no place
    return words[: found.start()].strip()


def _is_maxtext(run: TrainingRun, bare: str) -> bool:
    names = {*_MAXTEXT, *_MAXTEXT_OFFLOADED} - {"full", "none"}
    return bare in names or ("maxtext" in run.software.lower() and bare in _MAXTEXT)


def _maxtext(name: str, model: Model, choices: dict[str, Any], notes: list[str]) -> None:
    """One of MaxText's policies by name."""
    if name in _MAXTEXT_OFFLOADED:
        choices["remat"] = policy = _present(_MAXTEXT_OFFLOADED[name], model, notes, say=False)
        kept = "q+k+v+o+gate+up+down" if policy == "projections" else policy.removeprefix("save:")
        _offload(kept.split("+"), [""], model, choices, notes)
    elif name in _MAXTEXT:
        choices["remat"] = _present(_MAXTEXT[name], model, notes, say=False)
    else:
        notes.append(f"remat_policy={name} is not known here: the fastest that fits")


def _custom(placed: str, model: Model, choices: dict[str, Any], notes: list[str]) -> None:
    """MaxText's `custom` policy: where each named tensor is, `device`, `offload` or `remat`."""
    places: dict[str, list[str]] = {"device": [], "offload": []}
    for part in filter(None, (p.strip() for p in re.split(r"[,;]", placed))):
        name, where = [*re.split(r"[:=\s]+", part, maxsplit=1), ""][:2]
        if name not in _TENSORS or where not in (*places, "remat"):
            raise MeshwiseError(
                f"recompute custom({part}): expected a tensor of MaxText ({', '.join(_TENSORS)}) at device, offload or "
                "remat, as in decoder_layer_input:offload"
            )
        if where != "remat":
            places[where] += _own(name, model)
    _keep(places["device"], places["offload"], model, choices, notes)


def _saved_and_offloaded(bare: str, model: Model, choices: dict[str, Any], notes: list[str]) -> None:
    """`save_and_offload_only_these_names` of JAX: with both lists by name, or one list, which is offloaded."""
    both = {key: re.search(rf"names_which_can_be_{key}\s*=\s*\[(.*?)\]", bare) for key in ("saved", "offloaded")}
    if not any(both.values()):
        names = re.search(r"\((.*)\)", bare)
        both["offloaded"] = names
    saved, offloaded = ([] if found is None else _names(found[1], model) for found in both.values())
    _keep(saved, offloaded, model, choices, notes)


def _names(listed: str, model: Model) -> list[str]:
    """Our names of a list of tensors, MaxText's translated."""
    return [own for name in re.findall(r"[\w.]+", listed) for own in _own(name, model)]


def _own(name: str, model: Model) -> list[str]:
    """Our names of a tensor of MaxText in a model; of other tensors their own."""
    names = _TENSORS.get(name, name).split("+")
    blocks = model.train_program().blocks
    return [own for own in names if _is_there(own, blocks)] or names


def _keep(saved: list[str], offloaded: list[str], model: Model, choices: dict[str, Any], notes: list[str]) -> None:
    """Keep these tensors and the layer's input (""), some of them on the host."""
    kept = [name for name in (*saved, *offloaded) if name]
    choices["remat"] = _present(f"save:{'+'.join(dict.fromkeys(kept))}", model, notes) if kept else "full"
    if offloaded:
        _offload(offloaded, [*saved, *([] if "" in offloaded else [""])], model, choices, notes)


def _offload(
    offloaded: Sequence[str], stay: Sequence[str], model: Model, choices: dict[str, Any], notes: list[str]
) -> None:
    """Offload tensors beside others that stay: as many layers' whole activations as have the same bytes."""
    choices["offload"] = ("activations",)
    gone, left = (sum(_width(name, model) for name in set(names)) for names in (offloaded, stay))
    if left:
        layers = max(1, round(model.num_layers * gone / (gone + left)))
        choices["offload_layers"] = layers
        notes.append(f"some tensors of each layer offloaded: taken as all of those of {layers} of {model.num_layers}")


def _width(name: str, model: Model) -> int:
    """Values of a token in a tensor of a layer, "" its input; 0 of what the model does not have."""
    n, k, h = (dimension(model, axis) for axis in ("N", "K", "H"))
    heads = {"q": n * h, "attention": n * h, "k": k * h, "v": k * h}
    wide = dict.fromkeys(("gate", "up"), dimension(model, "F"))
    return (heads | wide | dict.fromkeys(("", "o", "down"), model.d_model)).get(name, 0)


def _modules(bare: str) -> list[str]:
    """Modules of Megatron-LM that a text of nothing else lists; of alternatives the first."""
    if not re.match(r"selective|recompute|modules|\[|\(|(?:" + "|".join(MODULES) + r")\b", bare):
        return []
    names = re.findall(r"[a-z_]+", bare.partition(" or ")[0])
    listed = [name for name in dict.fromkeys(names) if name in MODULES]
    if bare.startswith("selective") and "attention core" in bare:
        listed = ["core_attn", *listed]
    words = {"selective", "recompute", "recompute_modules", "recompute_granularity", "modules", "and", "of", "layers"}
    known = words | {"sequence", "parallel", "parallelism", "attention", "core", "only"}
    return listed if bare.startswith("selective") or set(names) <= {*known, *listed} else []


def _present(policy: str, model: Model, notes: list[str], *, say: bool = True) -> str:
    """A policy without the names that no layer of the model has; a list that names nothing else is `full` or `none`."""
    verb, colon, listed = policy.partition(":")
    if not colon:
        return policy
    blocks = model.train_program().blocks
    names = listed.split("+")
    have = [name for name in names if _is_there(name, blocks)]
    if say and (gone := [name for name in names if name not in have]):
        notes.append(f"recompute: {', '.join(gone)}: no layer of {model.name} has such")
    if not have:
        return "full" if verb == "save" else "none"
    return f"{verb}:{'+'.join(have)}"


def _is_there(name: str, blocks: Any) -> bool:
    try:
        check_remat(f"save:{name}", blocks)
    except UnknownNameError:
        return name == ""
    return True
