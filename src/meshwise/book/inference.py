"""Chapter "All About Transformer Inference"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from meshwise.book.problems import Derivation, Method, by_rule
from meshwise.book.sharding import closes
from meshwise.core.formula import Formula
from meshwise.hardware import SliceRules, load_chip, networks

#: Parameters of the chapter's models: the invented one has its head in its embedding.
_LLAMA = by_rule("parameters")
_INVENTED = "L*D*(3*F + 2*H*(N + K)) + D*V"
_MOE = "L*D*(3*E*F + 2*H*(N + K)) + D*V"
_ACTIVE = "L*D*(3*k*F + 2*H*(N + K)) + D*V"

_CACHE = "batch*2*kv_bytes*H*K*L*T"
#: One token of each sequence: every cache and the weights are read, or the matmuls take longer.
_LETTERS: dict[str, str | float] = {"P": "params", "C": "C_bf16", "chips": "chips", "B": "batch"}
_STEP = by_rule("decode-step", **_LETTERS, context="T", kv="2*kv_bytes*H*K*L", w="param_bytes")


def smallest_slice(num_bytes: float, chip_bytes: float, chip: str = "v5e") -> str:
    """The smallest slice of a generation that holds so many bytes; the book writes the long axis first."""
    slices = networks()[chip]
    assert isinstance(slices, SliceRules)
    chips = slices.counts_near(math.ceil(num_bytes / chip_bytes) - 1)[-1]
    return "x".join(map(str, sorted(slices.shape_of(chips, load_chip(chip)), reverse=True)))


def slice_for(formula: str) -> Callable[[Mapping[str, Any]], Derivation]:
    """A working: the smallest slice of v5e that holds the bytes of a formula."""

    def find(values: Mapping[str, Any]) -> Derivation:
        """The smallest slice that exists and holds all bytes."""
        num_bytes = Formula(formula).value(values)
        shown = f"{Formula(formula).substituted(values)} = {num_bytes:.4g} bytes over {values['HBM']:g} a chip"
        found = smallest_slice(num_bytes, values["HBM"])
        given = f"bytes={num_bytes:.12g},HBM={values['HBM']:.12g}"
        verb = "rule", "smallest-slice", "--on", "v5e", "--set", given
        return Derivation(found, f"the smallest that holds {formula}", shown, verb)

    return find


def largest_in_table(values: Mapping[str, Any]) -> Derivation:
    """The last batch of a table that fits beside bf16 weights."""
    memory = Formula("2*params + batch*4*H*K*L*T")
    limit = values["chips"] * values["capacity_gib_per_chip"] * 2**30
    fitting = [b for b in values["batches"] if memory.value({**values, "batch": b}) <= limit]
    rows = ", ".join(f"{b}: {memory.value({**values, 'batch': b}):.4g}" for b in values["batches"])
    return Derivation(max(fitting, default=0), f"{memory.text} <= chips * capacity", f"{rows}; limit {limit:.4g} bytes")


def split_of_caches(values: Mapping[str, Any]) -> Derivation:
    """Over heads as far as there are some, then over the batch."""
    heads = min(values["K"], values["chips"])
    found = f"{heads} over heads, {values['chips'] / heads:g} over batch"
    given = f"{values['K']} heads, {values['chips']} chips"
    return Derivation(found, "min(K, chips) over heads, the rest over the batch", given)


METHODS: Mapping[str, Method] = {
    "linear.Bcrit": by_rule("critical-batch", C="C_bf16"),
    "linear.Bcrit_int8w": by_rule("critical-batch", C="C_bf16", w=1),
    "linear.Bcrit_int8": by_rule("critical-batch", C="C_int8", w=1),
    "linear.Bcrit_h100": by_rule("critical-batch", C="C_bf16"),
    "attn.prefill_intensity": "S*T / (S + T)",
    "attn.prefill_T": "2*C_bf16/W_hbm",
    "attn.decode_intensity": "S*T / (S + T)",
    "attn.decode_verdict": "'compute-bound' if S*T/(S + T) > C_bf16/W_hbm else 'memory-bound'",
    "pq.kv": "ctx*kv_per_token",
    "pq.b*": by_rule("decode-step", **_LETTERS, context="ctx", kv="kv_per_token", w=1),
    "pq.b256_mlp": "'compute-bound' if 2*batch*params/C_bf16 > params/W_hbm else 'memory-bound'",
    "m13.ffw": "3*D*F*L",
    "m13.vocab": "2*V*D",
    "m13.attn": "2*D*(N + K)*H*L",
    "m13.total": _LLAMA,
    "m13.weights": "2*params",
    "m13.act": "2*T*D",
    "m13.kv_seq*": "2*bytes*H*K*L*T",
    "m13.kv_vs_params": "ceil(2*params / (2*bytes*H*K*L*T))",
    "m13.gqa_factor": "K_old / K_new",
    "m13.hbm8": "chips*HBM",
    "m13.bw8": "chips*W_hbm",
    "m13.flops8": "chips*C_bf16",
    "m13.train_state": by_rule("train-state", P="params", w="bytes_per_param", state=0),
    "shard.tp_prefill": by_rule("ridge", C="C_bf16", W_hbm="W_ici_bidi"),
    # On sixteen chips.
    "shard.fsdp_decode": "'yes' if weight_bytes/W_ici_bidi < weight_bytes/(16*W_hbm) else 'no'",
    "shard.beta": "W_hbm / W_ici_bidi",
    "shard.Y64": by_rule("decode-tensor", W=1, W_hbm="beta"),
    "q1.params": _INVENTED,
    "q1.kv*": by_rule("kv-bytes", b=1),
    "q2.per_seq": "2*L*K*H*ctx",
    "q2.batch*": by_rule("decode-batch", chips="chips", P=_INVENTED, w=1, context="ctx", kv="2*L*K*H"),
    "q3.load*": by_rule("weights-read", P=_INVENTED, w=1, chips="chips"),
    "q5.total": _MOE,
    "q5.growth": f"({_MOE}) / ({_INVENTED})",
    "q5.active": _ACTIVE,
    "q5.Bcrit": by_rule("critical-batch", C="C_bf16", E="E", k="k"),
    "q5.kv": by_rule("kv-bytes", b=1),
    "q5.flops": f"2*T*({_ACTIVE})",
    "appA.floor": by_rule("weights-read", P="params", w="bytes", chips="chips"),
    "appA.params": "2*D*F",
    "appC.buffer": by_rule("latency-bound", n="shards", hop="hop_us*1e-6", W_link="W_ici_uni"),
    "appC.act": "B*D",
    "appC.verdict": "'latency-bound' if B*D < shards*1e-6*W_ici_uni else 'bandwidth-bound'",
    "appC.Ylimit": "B*D / (1e-6*W_ici_uni)",
    "prefix.saving": "(n - shared) / n",
    "table_*.max_batch": largest_in_table,
    "table_*.kv_*": _CACHE,
    "table_*.mem_*": f"{_CACHE} + params*param_bytes",
    "table_*.step_*": _STEP,
    "table_*.tput_*": f"step = {_STEP}; batch / step",
    "q4.wrap": closes,
    "q4.tp_limit": "2 * axes*F*W_ici_bidi/C_int8",
    "q4.decode_tp": "F*W_ici_bidi / (Y*W_hbm)",
    "q4.kv_shard": split_of_caches,
    "q4.step": by_rule(
        "decode-step", P=_INVENTED, C="C_int8", chips="chips", B="batch", context="ctx", kv="2*L*K*H", w=1
    ),
    "q6.load": by_rule("weights-read", P=_MOE, w=1, chips="chips"),
    "q6.free": f"HBM - ({_MOE})/chips",
    "q6.min_slice": slice_for(_MOE),
    # 2/W (B D/X + 2 B F X/N) is least at X = sqrt(N D / 2 F): 4 sqrt(2 F/D) B D / (sqrt(N) W).
    "q7.coef": "4*sqrt(2*F_over_D)",
    "q7.X": "sqrt(N / (2*F_over_D))",
    # Beyond it that is less than the 4 B D / (3 W) of one dimension over three axes.
    "q7.N*": "(4*sqrt(2*F_over_D) * 3/4)**2",
}
