"""Chapter "Serving LLaMA 3-70B on TPUs"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwise.book.inference import slice_for, smallest_slice
from meshwise.book.problems import Derivation, Method
from meshwise.core.formula import Formula

_CACHE_BYTES = "2*K*H*L*bytes"
#: int8 weights beside bf16 arithmetic.
_STEP = "cache/(chips*W_hbm) + max(2*batch*params/(chips*C_bf16), params/(chips*W_hbm))"
_OF_32 = "cache = batch*T*kv_token; "
_QPS = "batch / (step_ms*1e-3*tokens)"
_FULL = "HBM / W_hbm"


def best_per_dollar(values: Mapping[str, Any]) -> Derivation:
    """The chip with most FLOPs for a dollar."""
    rates = {n: c * 3600 / usd for n, c, usd in zip(values["names"], values["C"], values["usd"], strict=True)}
    shown = ", ".join(f"{name}: {rate:.3g}" for name, rate in rates.items())
    return Derivation(max(rates, key=rates.__getitem__), "the most of C * 3600 / price", shown)


def on_smallest_slice(formula: str) -> Callable[[Mapping[str, Any]], Derivation]:
    """A working with N chips, the smallest slice that holds the weights."""

    def find(values: Mapping[str, Any]) -> Derivation:
        long, short = smallest_slice(values["params"] * values["bytes"], values["HBM"]).split("x")
        known = {**values, "N": int(long) * int(short)}
        return Derivation(Formula(formula).value(known), formula, Formula(formula).substituted(known))

    return find


METHODS: Mapping[str, Method] = {
    "cost.best": best_per_dollar,
    "cost.*": "C_bf16*3600 / usd_per_hour",
    "kv.token": _CACHE_BYTES,
    "kv.seq32k": f"{_CACHE_BYTES}*T",
    "kv.bs240": f"{_CACHE_BYTES}*T*batch",
    "kv.chips": f"ceil((params*bytes + {_CACHE_BYTES}*T*batch) / HBM)",
    "bcrit.int8": "C_int8*weight_bytes / (2*W_hbm)",
    "bcrit.*": "C_bf16*weight_bytes / (2*W_hbm)",
    "minslice.*_size": "params*bytes",
    "minslice.*_kv": _CACHE_BYTES,
    "minslice.*_min": "params*bytes / HBM",
    "minslice.*_slice": slice_for("params*bytes"),
    "minslice.*_left": on_smallest_slice("N*HBM - params*bytes"),
    "minslice.*_nkv*": on_smallest_slice(f"floor((N*HBM - params*bytes) / ({_CACHE_BYTES}*ctx))"),
    "prefill.time": "2*params*tokens / (chips*C_bf16*mfu)",
    "prefill.finish": "batch / gen",
    "prefill.evicted": "batch/gen * (prefill + gen)",
    "prefill.ratio": "batch*prefill_s / (gen*step_s)",
    "q1.flops": "2*params",
    "q1.flops_bound": "2*params / C_bf16",
    "q1.bw_bound": "bytes*params / W_hbm",
    "q3.min_chips": "ceil(params / HBM)",
    "q3.step_32": "params / (chips*W_hbm)",
    "q3.min_step": "params / (chips*W_hbm)",
    "q3.batch_64": (
        "limit = limit_ms*1e-3; read = kv_seq/(chips*W_hbm); "
        "computing = limit / (read + 2*params/(chips*C_bf16)); reading = (limit - params/(chips*W_hbm)) / read; "
        "floor(min(computing, reading, (chips*HBM - params)/kv_seq))"
    ),
    "bs32.kv": "batch*T*kv_token",
    "bs32.total": "batch*T*kv_token + params",
    "bs32.chips": "ceil((batch*T*kv_token + params) / HBM)",
    "bs32.slice": slice_for("batch*T*kv_token + params"),
    "bs32.Bcrit": "C_bf16/W_hbm / 2",
    "bs32.regime": "'compute-bound' if batch > C_bf16/W_hbm/2 else 'memory-bound'",
    "bs32.step_*": _OF_32 + _STEP,
    "bs32.tput": f"{_OF_32}step = {_STEP}; batch / step",
    "bs32.tput_chip": f"{_OF_32}step = {_STEP}; batch / step / chips",
    "bs32.ici_limit*": "F*axes / alpha",
    "full.step": _FULL,
    "full.decode": f"tokens * {_FULL}",
    "full.int4_min": "params*bytes / (chips*W_hbm)",
    "qps.base": _QPS,
    "qps.*": f"{_QPS} / chips",
    "double.left": "chips*HBM - params*bytes",
    "double.batch": "floor((chips*HBM - params*bytes) / (kv_token*ctx))",
    "double.base": _QPS,
    "double.*": f"{_QPS} / chips",
    "shard.tp": "'yes' if Y < F*axes/alpha else 'no'",
    "shard.Ydecode": "F / (B*beta)",
    "shard.t_ici": "2*B*D / W_ici_bidi",
    "shard.t_hbm": "2*D*F/Y / W_hbm",
    "shard.t_math": "2*B*D*F/Y / C_bf16",
    "shard.bound": (
        "ici = 2*B*D/W_ici_bidi; hbm = 2*D*F/Y/W_hbm; math = 2*B*D*F/Y/C_bf16; "
        "'HBM' if hbm > max(ici, math) else 'ICI' if ici > math else 'FLOPs'"
    ),
    "pareto.min_latency": f"cache = batch*ctx*kv_token; {_STEP}",
    "pareto.plateau": f"cache = batch*ctx*kv_token; step = {_STEP}; batch / step / chips",
    "pareto.crossover": "2*params/C_bf16 / (kv_token/W_hbm)",
    "pareto.max_batch_8k": "floor((chips*HBM - params) / (kv_token*ctx))",
    "pareto.max_latency": _FULL,
    # A token costs its share of the step: one sequence against as many as twice the least step serves.
    "pareto.cost_drop": (
        "least = (params + ctx*kv_token)/(chips*W_hbm); "
        "batch = 2*least / (ctx*kv_token/(chips*W_hbm) + 2*params/(chips*C_bf16)); batch / 2"
    ),
    "q2.params": "params",
    "q2.kv": "2*L*K*H*ctx*batch",
    "q2.act": "2*batch*F",
    "q2.slice": slice_for("params + 2*L*K*H*ctx*batch"),
}
