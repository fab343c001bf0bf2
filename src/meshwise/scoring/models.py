"""The model that a measured run trained: a named one, or its dimensions with the switches of its family.

What a row does not say is chosen by a stated rule, and said. Not here: reading rows (`reading`).
"""

from __future__ import annotations

import itertools
import re
from functools import cache

from meshwise.errors import MeshwiseError
from meshwise.models import Model, load_model, model_names
from meshwise.scoring.rows import Row

__all__ = ["family_of", "model_of"]

#: Vocabulary by family, where sources leave it out: Megatron-LM's GPT-2 vocabulary, padded to 128 x 8 ways; BLOOM's.
_USUAL_VOCABULARY = {"bloom": 250_880, "gpt": 51_200, "megatron": 51_200}

#: First word of a name -> family; longer names first where one begins with another.
_FAMILIES = (
    ("maxtext gpt", "MaxText GPT"), ("megatron gpt", "Megatron GPT"), ("vtrain gpt", "Megatron GPT"),
    ("korthikanti", "Megatron GPT"), ("mt-nlg", "Megatron GPT"), ("megatron", "Megatron GPT"), ("gpt-oss", "GPT-OSS"),
    ("gpt", "GPT"), ("mpt", "MPT"), ("bloom", "BLOOM"), ("llama", "Llama"), ("mixtral", "Mixtral"),
    ("mistral", "Mistral"), ("deepseek", "DeepSeek"), ("qwen", "Qwen"), ("gemma", "Gemma"), ("nemotron", "Nemotron"),
    ("kimi", "Kimi"), ("grok", "Grok"), ("glm", "GLM"), ("opt", "OPT"), ("palm", "PaLM"), ("falcon", "Falcon"),
)  # fmt: skip

#: Families with a plain feed-forward of two matrices, layer norms and biases (GPT-2 and its relatives).
_PLAIN = ("MaxText GPT", "Megatron GPT", "GPT", "MPT", "BLOOM", "OPT")
#: Of those, the ones without biases.
_NO_BIAS = ("MPT", "MaxText GPT")


def family_of(run: Row) -> str:
    """Give the family of a run's model, for tables; the first word of its name where none is known.

    >>> from meshwise.scoring import MeasuredRun
    >>> family_of(MeasuredRun(id="1", n_chips=1, global_batch_seqs=1, seq_len=1, measured_metric="step_time",
    ...     measured_value=1.0, unit="s", model="vTrain GPT 18.4B"))
    'Megatron GPT'
    """
    name = run.model.lower()
    known = next((family for start, family in _FAMILIES if name.startswith(start)), None)
    return known or (re.split(r"[\s-]", run.model.strip())[0] if run.model.strip() else "dimensions")


def model_of(run: Row) -> tuple[Model, tuple[str, ...]]:
    """Give the model of a run, and what was assumed of it.

    A built-in of that name whose dimensions are those of the row; else a decoder of these dimensions, with the switches
    of its family; where the family is not known, those whose count of parameters is nearest `params_b`.

    Raises:
        MeshwiseError: neither a known name nor enough dimensions.
    """
    named = _named(run.model)
    if named is not None and _agrees(named, run):
        return named, ()
    missing = [n for n in ("layers", "d_model", "n_heads") if getattr(run, n) is None]
    if missing:
        if named is not None:
            return named, ()
        raise MeshwiseError(
            f"model {run.model!r} is not a name that is known, and {', '.join(missing)} are blank: fill them in"
        )
    if named is not None and named.mixtures and run.moe_experts is None:
        raise MeshwiseError(f"model {run.model!r} has experts, and moe_experts and moe_topk are blank: fill them in")
    notes = []
    vocab = run.vocab or _usual_vocabulary(run)
    if run.vocab is None:
        notes.append(f"vocabulary of {vocab:,} taken, as usual for {family_of(run)}")
    model, more = _of_dimensions(run, vocab)
    return model, (*notes, *more)


@cache
def _named(name: str) -> Model | None:
    """The built-in that a source's name means."""
    plain = _plain(name)
    found = next((known for known in model_names() if _plain(known) == plain), None)
    if found is None:
        try:
            return load_model(name) if name.strip() and "/" not in name and "=" not in name else None
        except MeshwiseError:
            return None
    return load_model(found)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _agrees(model: Model, run: Row) -> bool:
    """Whether what a row says of the dimensions is true of a model."""
    sizes = model.sizes
    heads = {int(v) for k, v in sizes.items() if k.partition(".")[0] == "N"}
    pairs: tuple[tuple[int | None, set[int]], ...] = (
        (run.layers, {model.num_layers}),
        (run.d_model, {model.d_model}),
        (run.vocab, {model.vocab_size}),
        (run.n_heads, heads),
    )
    experts = {int(v) for k, v in sizes.items() if k.partition(".")[0] == "E"}
    return all(said is None or not known or said in known for said, known in pairs) and (
        run.moe_experts is None or run.moe_experts in experts
    )


def _usual_vocabulary(run: Row) -> int:
    found = next((v for word, v in _USUAL_VOCABULARY.items() if word in run.words), None)
    if found is None:
        raise MeshwiseError(f"vocab is blank, and none is usual for models such as {run.model!r}: fill it in")
    return found


def _of_dimensions(run: Row, vocab: int) -> tuple[Model, tuple[str, ...]]:
    """A decoder of these dimensions, with its family's switches."""
    assert run.d_model is not None
    said = {"D": run.d_model, "L": run.layers, "N": run.n_heads, "K": run.n_kv_heads or run.n_heads, "V": vocab}
    if run.head_dim is not None:
        said["H"] = run.head_dim
    width = run.d_ff or 4 * run.d_model
    said |= {"F": width} if run.moe_experts is None else {"E": run.moe_experts, "Fe": width, "top_k": run.moe_topk}
    family = family_of(run)
    switches = dict(_switches(run, family))
    open_ones = [name for name in ("gated", "tied") if name not in switches]
    best: tuple[float, Model, dict[str, str]] | None = None
    for values in itertools.product(("yes", "no"), repeat=len(open_ones)):
        tried = switches | dict(zip(open_ones, values, strict=True))
        model = load_model(" ".join(f"{k}={v}" for k, v in {**said, **tried}.items() if v is not None))
        count = model.parameters.total / 1e9
        off = abs(count / run.params_b - 1) if run.params_b else 0.0
        if best is None or off < best[0] - 1e-9:
            best = off, model, dict(zip(open_ones, values, strict=True))
    assert best is not None
    notes = []
    if open_ones:
        chosen = ", ".join(f"{name}={value}" for name, value in best[2].items())
        notes.append(f"{chosen}: not said, " + ("nearest to params_b" if run.params_b else "taken as usual"))
    if best[0] > 0.1:
        notes.append(f"{best[1].parameters.total / 1e9:,.1f}B parameters by its dimensions, {run.params_b:,}B stated")
    return best[1], tuple(notes)


def _switches(run: Row, family: str) -> list[tuple[str, str]]:
    """What its family, or the row's own words, say of a decoder."""
    words = run.words
    found: list[tuple[str, str]] = []
    if family in _PLAIN:
        found += [("gated", "no"), ("norm", "rms" if family == "MaxText GPT" else "layer")]
        found.append(("bias", "no" if family in _NO_BIAS else "yes"))
        found.append(("tied", "yes"))
        if family not in {"MaxText GPT", "BLOOM"}:
            found.append(("positions", str(run.positions)))
    else:
        found += [("gated", "no")] if "2-matrix" in words or "gelu 4x" in words else []
        found += [("tied", "yes")] if "tied" in words and "untied" not in words else []
        if family in ("Llama", "Mixtral", "Mistral", "DeepSeek", "Qwen", "Gemma", "Kimi", "GLM"):
            found.append(("gated", "yes"))
    return found
