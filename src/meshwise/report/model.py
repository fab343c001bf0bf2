"""The answers of `model` and `models`: parameters by part, FLOPs and KV cache, with their formulas."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.explanation import Explanation
from meshwise.core.units import format_bytes, format_count, format_flops, format_percent
from meshwise.models import Model
from meshwise.report.report import Report
from meshwise.report.table import facts, table
from meshwise.report.words import length_words


def models_report(models: Iterable[Model], inputs: Mapping[str, Any]) -> Report:
    """List the built-in models."""
    rows = list(models)
    return Report(
        command="models",
        inputs=inputs,
        answer=f"{len(rows)} models known by name; a path to a config.json or its folder serves as well",
        data={
            "models": [
                {
                    "name": m.name,
                    "family": m.family,
                    "parameters": {"total": m.parameters.total, "active": m.parameters.active},
                    "num_layers": m.num_layers,
                    "max_seq_len_tokens": m.max_seq_len,
                    "hub_names": list(m.hub_names),
                    "source": {"text": m.source.text, "date": m.source.date},
                }
                for m in rows
            ]
        },
        body=(
            table(
                ("!name", "family", ">parameters", ">active", ">layers", ">context"),
                (
                    (
                        m.name,
                        m.family,
                        format_count(m.parameters.total),
                        format_count(m.parameters.active),
                        str(m.num_layers),
                        f"{m.max_seq_len:,}" if m.max_seq_len else "-",
                    )
                    for m in rows
                ),
            ),
        ),
        next_steps=("meshwise model llama-3-70b: one model, part by part",),
    )


def model_report(model: Model, *, seq_len: int, kv_dtype: DType, inputs: Mapping[str, Any]) -> Report:
    """Count one model.

    Args:
        model: the model.
        seq_len: tokens of the sequence for which FLOPs are counted.
        kv_dtype: format of the cache.
        inputs: what was asked, with defaults.
    """
    count = model.parameters
    cache = model.kv_cache
    forward = model.forward_flops_per_token(seq_len)
    active = "" if count.active == count.total else f", {format_count(count.active)} active"
    return Report(
        command="model",
        inputs=inputs,
        answer=f"{model.name}: {count.total:,} parameters ({format_count(count.total)}{active})",
        data=_data(model, seq_len, kv_dtype),
        body=(
            table(
                ("!part", ">parameters", ">share"),
                ((part, f"{n:,}", format_percent(n / count.total)) for part, n in count.by_part.items()),
            ),
            facts(_facts(model, seq_len, kv_dtype)),
        ),
        assumed=(
            f"FLOPs: matrix products only, a sequence of {seq_len:,} tokens, causal and windowed attention as computed",
            "training: three times forward, recomputation not counted (the convention of MFU)",
            f"KV cache in {kv_dtype.value}, no window full yet",
            *length_words(model, seq_len),
            *model.notes,
        ),
        not_modelled=("element-wise work (norms, activations, softmax) in FLOPs",),
        next_steps=(_suggestion(model, str(inputs["model"])),),
        explanations=_explanations(model, seq_len, kv_dtype, forward, cache.bytes_per_token(kv_dtype)),
    )


def _suggestion(model: Model, asked: str) -> str:
    """A plan of the model as it was asked for, at a length that it can read."""
    length = min(4096, model.max_seq_len or 4096)
    return f"meshwise plan train {shlex.quote(asked)} --on v5p:8x8x8 --batch-tokens 4Mi --seq-len {length}"


def _facts(model: Model, seq_len: int, kv_dtype: DType) -> list[tuple[str, str, str]]:
    spec_sizes = {k: v for k, v in model.sizes.items() if "." not in k}
    forward, cache, count = model.forward_flops_per_token(seq_len), model.kv_cache, model.parameters
    rows = [
        ("family", model.family, ""),
        ("layers", str(model.num_layers), ""),
        ("axis sizes", "", ", ".join(f"{k}={v:,.0f}" for k, v in spec_sizes.items())),
        ("forward", f"{format_flops(forward)}", f"a token, at {seq_len:,} tokens"),
        ("training", f"{format_flops(model.train_flops_per_token(seq_len))}", "a token"),
        ("KV cache", format_bytes(cache.bytes_per_token(kv_dtype)), f"a token, {kv_dtype.value}"),
        ("", format_bytes(cache.bytes_per_sequence(seq_len, kv_dtype)), f"a sequence of {seq_len:,} tokens"),
        ("weights", format_bytes(2.0 * count.total), "in bf16"),
    ]
    if cache.windowed_bytes_per_token(kv_dtype):
        growing = format_bytes(cache.growing_bytes_per_token(kv_dtype))
        rows.insert(7, ("", growing, "a token once every window is full"))
    if cache.state_bytes(kv_dtype):
        rows.insert(
            7, ("states", format_bytes(cache.state_bytes(kv_dtype)), "of recurrences, a sequence of any length")
        )
    if cache.index_bytes_per_token(kv_dtype):
        rows.insert(7, ("", format_bytes(cache.index_bytes_per_token(kv_dtype)), "a token more, for indexers"))
    if count.mtp:
        rows.append(("extra", f"{count.mtp:,}", "parameters of multi-token prediction, not in the total"))
    return rows


def _data(model: Model, seq_len: int, kv_dtype: DType) -> dict[str, Any]:
    count, cache = model.parameters, model.kv_cache
    return {
        "model": {
            "name": model.name,
            "family": model.family,
            "num_layers": model.num_layers,
            "max_seq_len_tokens": model.max_seq_len,
            "hub_names": list(model.hub_names),
            "source": {"text": model.source.text, "date": model.source.date},
        },
        "axis_sizes": dict(model.sizes),
        "parameters": {
            "total": count.total,
            "language": count.language,
            "active": count.active,
            "by_part": dict(count.by_part),
            "multi_token_prediction": count.mtp,
        },
        "kv_cache": {
            "dtype": kv_dtype.value,
            "bytes_per_token": cache.bytes_per_token(kv_dtype),
            "growing_bytes_per_token": cache.growing_bytes_per_token(kv_dtype),
            "windowed_bytes_per_token": cache.windowed_bytes_per_token(kv_dtype),
            "windowed_bytes_max": cache.windowed_bytes_max(kv_dtype),
            "index_bytes_per_token": cache.index_bytes_per_token(kv_dtype),
            "state_bytes": cache.state_bytes(kv_dtype),
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


def _explanations(
    model: Model, seq_len: int, kv_dtype: DType, forward: float, cache_bytes: float
) -> tuple[Explanation, ...]:
    source = f"{model.source.text}, {model.source.date}" if model.source.date else model.source.text
    sizes = model.sizes
    weights = [
        Explanation(
            f"{block.name}.{tensor.name}",
            " x ".join((f"{block.repeat} layers", *tensor.axes) if block.repeat > 1 else tensor.axes),
            " x ".join(
                (*([str(block.repeat)] if block.repeat > 1 else []), *(f"{sizes[a]:,.0f}" for a in tensor.axes))
            ),
            f"{block.repeat * tensor.elements(sizes):,.0f} parameters",
            source,
        )
        for block in model.train_program()
        for tensor in block.weights
    ]
    kinds = model.kv_cache.kinds
    return (
        *weights,
        Explanation(
            "forward",
            "sum over matrix products of 2 x index space, attention over the pairs that are computed, / tokens",
            f"{forward * seq_len:.6g} / {seq_len:,}",
            f"{forward:.6g} FLOPs a token",
            "the book, All the Transformer Math You Need to Know",
        ),
        Explanation(
            "KV cache",
            "sum over kinds of layers of layers x cached elements a token x bytes",
            " + ".join(f"{k.layers} x {k.elements} x {kv_dtype.bytes:g}" for k in kinds),
            f"{cache_bytes:,.0f} bytes a token",
            source,
        ),
    )
