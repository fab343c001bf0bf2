"""The answers of `model` and `models`: parameters by part, FLOPs and KV cache, with their formulas."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.explanation import Explanation
from meshwise.core.units import format_bytes, format_count, format_flops, format_percent
from meshwise.costs.compute import published_precision
from meshwise.costs.problem import TrainingProblem
from meshwise.jobs import TrainingJob, trainable_parameters
from meshwise.jobs.serving_precision import parse_serving_precision, quantised
from meshwise.models import Model
from meshwise.report.report import Report
from meshwise.report.table import Columns, facts, picked, table, tabulate


def length_words(model: Model, seq_len: float) -> tuple[str, ...]:
    """Warn about sequences longer than a model was trained for.

    >>> from meshwise.models import load_model
    >>> length_words(load_model("llama-3-8b"), 16384), length_words(load_model("llama-3-8b"), 8192)
    (('sequences of 16,384 tokens exceed the 8,192 that llama-3-8b was trained for',), ())
    """
    longest = model.max_seq_len
    if longest is None or seq_len <= longest:
        return ()
    return (f"sequences of {seq_len:,.0f} tokens exceed the {longest:,} that {model.name} was trained for",)


def tuning_words(problem: TrainingProblem) -> str | None:
    """What is trained, where that is not everything."""
    if problem.job.tuning.full:
        return None
    trained = trainable_parameters(problem.train_program())
    share = format_percent(trained / problem.model.parameters.total)
    return f"fine-tuning: {problem.job.tuning.meaning}; {trained:,} trainable parameters, {share} of the model's"


def rounded_words(job: TrainingJob, tokens: float) -> str | None:
    """Say that a step has another number of tokens than was asked for; None where it has as many."""
    more = 100 * job.rounding(tokens)
    return f"batch: {tokens:,.0f} tokens, {more:+.1f} % of what was asked, so that it divides" if more else None


def models_report(models: Iterable[Model], inputs: Mapping[str, Any]) -> Report:
    """List the built-in models."""
    rows = list(models)
    columns: Columns = {
        "!name": "name",
        "family": "family",
        ">parameters": ("parameters.total", format_count),
        ">active": ("parameters.active", format_count),
        ">layers": "num_layers",
        ">context": ("max_seq_len", "{:,}".format),
    }
    return Report(
        command="models",
        inputs=inputs,
        answer=f"{len(rows)} models known by name; a path to a config.json or its folder works as well",
        data={"models": [{**_named(m), "parameters": picked(m.parameters, "total active")} for m in rows]},
        body=(tabulate(columns, rows),),
        next_steps=("meshwise model llama-3-70b: one model, part by part",),
    )


def _named(model: Model) -> dict[str, Any]:
    return picked(model, "name family num_layers hub_names source max_seq_len_tokens=max_seq_len")


def model_report(model: Model, *, seq_len: int, kv_dtype: DType, inputs: Mapping[str, Any]) -> Report:
    """Count one model.

    Args:
        model: the model.
        seq_len: tokens of the sequence for which FLOPs are counted.
        kv_dtype: format of the cache.
        inputs: what was asked, with defaults.
    """
    count = model.parameters
    active = "" if count.active == count.total else f", {format_count(count.active)} active"
    parts = ((part, f"{n:,}", format_percent(n / count.total)) for part, n in count.by_part.items())
    return Report(
        command="model",
        inputs=inputs,
        answer=f"{model.name}: {count.total:,} parameters ({format_count(count.total)}{active})",
        data=_data(model, seq_len, kv_dtype),
        body=(table(("!part", ">parameters", ">share"), parts), facts(_facts(model, seq_len, kv_dtype))),
        assumed=(
            f"FLOPs: matrix products only, a sequence of {seq_len:,} tokens, causal and windowed attention as computed",
            "training: three times forward, recomputation not counted (the convention of MFU)",
            f"KV cache in {kv_dtype.value}, no window full yet",
            *length_words(model, seq_len),
            *model.notes,
        ),
        not_modelled=("element-wise work (norms, activations, softmax) in FLOPs",),
        next_steps=(_suggestion(model, str(inputs["model"])),),
        explanations=tuple(_explanations(model, seq_len, kv_dtype)),
    )


def _suggestion(model: Model, asked: str) -> str:
    """A plan of the model as it was asked for, at a length that it can read."""
    length = min(4096, model.max_seq_len or 4096)
    return f"meshwise plan train {shlex.quote(asked)} --on v5p:8x8x8 --batch-tokens 4Mi --seq-len {length}"


def _facts(model: Model, seq_len: int, kv_dtype: DType) -> Iterator[tuple[str, str, str]]:
    cache, count = model.kv_cache, model.parameters
    yield "family", model.family, ""
    yield "layers", str(model.num_layers), ""
    yield "axis sizes", "", ", ".join(f"{k}={v:,.0f}" for k, v in model.sizes.items() if "." not in k)
    yield "forward", format_flops(model.forward_flops_per_token(seq_len)), f"a token, at {seq_len:,} tokens"
    yield "training", format_flops(model.train_flops_per_token(seq_len)), "a token"
    yield "KV cache", format_bytes(cache.bytes_per_token(kv_dtype)), f"a token, {kv_dtype.value}"
    yield "", format_bytes(cache.bytes_per_sequence(seq_len, kv_dtype)), f"a sequence of {seq_len:,} tokens"
    if cache.index_bytes_per_token(kv_dtype):
        yield "", format_bytes(cache.index_bytes_per_token(kv_dtype)), "a token more, for indexers"
    if cache.state_bytes(kv_dtype):
        yield "states", format_bytes(cache.state_bytes(kv_dtype)), "recurrent, a sequence of any length"
    if cache.windowed_bytes_per_token(kv_dtype):
        yield "", format_bytes(cache.growing_bytes_per_token(kv_dtype)), "a token once every window is full"
    yield "weights", format_bytes(2.0 * count.total), "in bf16"
    if model.quantization is not None and model.quantization.weights is not None:
        formats = published_precision(model)
        program = quantised(model.train_program(), parse_serving_precision(formats))
        yield "", format_bytes(program.weight_bytes(DType.BF16.bytes)), f"as published: {formats}"
    if count.mtp:
        yield "extra", f"{count.mtp:,}", "parameters of multi-token prediction, not in the total"


def _data(model: Model, seq_len: int, kv_dtype: DType) -> dict[str, Any]:
    cache, count = model.kv_cache, model.parameters
    per_dtype = (
        *("bytes_per_token", "growing_bytes_per_token", "windowed_bytes_per_token", "windowed_bytes_max"),
        *("index_bytes_per_token", "state_bytes"),
    )
    return {
        "model": _named(model),
        "axis_sizes": dict(model.sizes),
        "parameters": picked(count, "total language active by_part") | {"multi_token_prediction": count.mtp},
        "kv_cache": {
            "dtype": kv_dtype.value,
            **{name: getattr(cache, name)(kv_dtype) for name in per_dtype},
            "bytes_per_sequence": cache.bytes_per_sequence(seq_len, kv_dtype),
        },
        "flops": {
            "seq_len_tokens": seq_len,
            "forward_per_token": model.forward_flops_per_token(seq_len),
            "forward_per_token_attention_full": model.forward_flops_per_token(seq_len, "full"),
            "training_per_token": model.train_flops_per_token(seq_len),
        },
        "notes": list(model.notes),
    }


def _explanations(model: Model, seq_len: int, kv_dtype: DType) -> Iterator[Explanation]:
    source = f"{model.source.text}, {model.source.date}" if model.source.date else model.source.text
    sizes, forward = model.sizes, model.forward_flops_per_token(seq_len)
    for block in model.train_program():
        repeated = (f"{block.repeat} layers",) if block.repeat > 1 else ()
        for tensor in block.weights:
            numbers = (*(str(block.repeat) for _ in repeated), *(f"{sizes[a]:,.0f}" for a in tensor.axes))
            count = f"{block.repeat * tensor.elements(sizes):,.0f} parameters"
            formula = " x ".join((*repeated, *tensor.axes))
            yield Explanation(f"{block.name}.{tensor.name}", formula, " x ".join(numbers), count, source)
    yield Explanation(
        "forward",
        "sum over matrix products of 2 x index space, attention over the pairs that are computed, / tokens",
        f"{forward * seq_len:.6g} / {seq_len:,}",
        f"{forward:.6g} FLOPs a token",
        "the book, All the Transformer Math You Need to Know",
    )
    yield Explanation(
        "KV cache",
        "sum over kinds of layers of layers x cached elements a token x bytes",
        " + ".join(f"{k.layers} x {k.elements} x {kv_dtype.bytes:g}" for k in model.kv_cache.kinds),
        f"{model.kv_cache.bytes_per_token(kv_dtype):,.0f} bytes a token",
        source,
    )
