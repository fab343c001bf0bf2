"""Chapter "Serving LLaMA 3-70B on TPUs"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwise.book.inference import slice_for, smallest_slice
from meshwise.book.problems import Derivation, Method, by_rule
from meshwise.core.formula import Formula

_CACHE_BYTES = by_rule("kv-bytes", b="bytes")
#: int8 weights beside bf16 arithmetic.
_LETTERS: dict[str, str | float] = {"P": "params", "C": "C_bf16", "chips": "chips", "B": "batch"}
_STEP_32 = by_rule("decode-step", **_LETTERS, context="T", kv="kv_token", w=1)
_STEP = by_rule("decode-step", **_LETTERS, context="ctx", kv="kv_token", w=1)
_QPS = by_rule("qps", B="batch", t_step="step_ms*1e-3", outputs="tokens")
_READ = by_rule("weights-read", P="params", w=1, chips="chips")
_FULL = "HBM / W_hbm"


def best_per_dollar(values: Mapping[str, Any]) -> Derivation:
    """The chip with most FLOPs for a dollar."""
    rates = {n: c * 3600 / usd for n, c, usd in zip(values["names"], values["C"], values["usd"], strict=True)}
    shown = ", ".join(f"{name}: {rate:.3g}" for name, rate in rates.items())
    return Derivation(max(rates, key=rates.__getitem__), "the most of C * 3600 / price", shown)


def on_smallest_slice(formula: str) -> Callable[[Mapping[str, Any]], Derivation]:
    """A working with N chips, the smallest slice that holds the weights."""

    def find(values: Mapping[str, Any]) -> Derivation:
        """First the smallest slice that holds the weights; what is left of its HBM is for caches."""
        long, short = smallest_slice(values["params"] * values["bytes"], values["HBM"]).split("x")
        known = {**values, "N": int(long) * int(short)}
        return Derivation(Formula(formula).value(known), formula, Formula(formula).substituted(known))

    return find


METHODS: Mapping[str, Method] = {
    "cost.best": best_per_dollar,
    "cost.*": by_rule("flops-per-dollar", C="C_bf16", price="usd_per_hour"),
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
    "minslice.*_nkv*": on_smallest_slice(
        by_rule("decode-batch", chips="N", P="params", w="bytes", context="ctx", kv=_CACHE_BYTES)
    ),
    "prefill.time": by_rule("prefill-time", P="params", C="C_bf16", chips="chips", mfu="mfu"),
    "prefill.finish": by_rule("ended-per-step", B="batch", outputs="gen"),
    "prefill.evicted": "batch/gen * (prefill + gen)",
    "prefill.ratio": by_rule("prefill-engines", B="batch", t_prefill="prefill_s", outputs="gen", t_step="step_s"),
    "q1.flops": by_rule("forward-flops", P="params"),
    "q1.flops_bound": by_rule("prefill-time", P="params", tokens=1, C="C_bf16"),
    "q1.bw_bound": by_rule("weights-read", P="params", w="bytes"),
    "q3.min_chips": by_rule("chips-to-hold", bytes="params"),
    "q3.step_32": _READ,
    "q3.min_step": _READ,
    "q3.batch_64": (
        "limit = limit_ms*1e-3; read = kv_seq/(chips*W_hbm); "
        "computing = limit / (read + 2*params/(chips*C_bf16)); reading = (limit - params/(chips*W_hbm)) / read; "
        "floor(min(computing, reading, (chips*HBM - params)/kv_seq))"
    ),
    "bs32.kv": "batch*T*kv_token",
    "bs32.total": "batch*T*kv_token + params",
    "bs32.chips": by_rule("chips-to-hold", bytes="batch*T*kv_token + params"),
    "bs32.slice": slice_for("batch*T*kv_token + params"),
    "bs32.Bcrit": by_rule("critical-batch", C="C_bf16", w=1),
    "bs32.regime": "'compute-bound' if batch > C_bf16/W_hbm/2 else 'memory-bound'",
    "bs32.step_*": _STEP_32,
    "bs32.tput": f"step = {_STEP_32}; batch / step",
    "bs32.tput_chip": f"step = {_STEP_32}; batch / step / chips",
    "bs32.ici_limit*": "F*axes / alpha",
    "full.step": _FULL,
    "full.decode": f"tokens * {_FULL}",
    "full.int4_min": by_rule("weights-read", P="params", w="bytes", chips="chips"),
    "qps.base": _QPS,
    "qps.*": f"{_QPS} / chips",
    "double.left": "chips*HBM - params*bytes",
    "double.batch": by_rule("decode-batch", chips="chips", P="params", w="bytes", context="ctx", kv="kv_token"),
    "double.base": _QPS,
    "double.*": f"{_QPS} / chips",
    "shard.tp": "'yes' if Y < F*axes/alpha else 'no'",
    "shard.Ydecode": by_rule("decode-tensor", W=1, W_hbm="beta"),
    "shard.t_ici": "2*B*D / W_ici_bidi",
    "shard.t_hbm": "2*D*F/Y / W_hbm",
    "shard.t_math": "2*B*D*F/Y / C_bf16",
    "shard.bound": (
        "ici = 2*B*D/W_ici_bidi; hbm = 2*D*F/Y/W_hbm; math = 2*B*D*F/Y/C_bf16; "
        "'HBM' if hbm > max(ici, math) else 'ICI' if ici > math else 'FLOPs'"
    ),
    "pareto.min_latency": _STEP,
    "pareto.plateau": f"step = {_STEP}; batch / step / chips",
    "pareto.crossover": "2*params/C_bf16 / (kv_token/W_hbm)",
    "pareto.max_batch_8k": by_rule("decode-batch", chips="chips", P="params", w=1, context="ctx", kv="kv_token"),
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
