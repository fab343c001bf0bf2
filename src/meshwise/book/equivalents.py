"""Problems whose answer a rule gives under another formula than the working's: the rule, and its letters as formulas.

A command is given only where the rule's number is ours: with other inputs a rule may round or take a maximum. Not here:
workings that are a rule's own formula (the chapters).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.core.formula import Formula
from meshwise.costs.rules import LETTERS, find_rule

#: Why no command gives an answer.
REASONS: Mapping[str, str] = {
    "arithmetic": "arithmetic of one line: shown above",
    "listed": "a number that the question gives or a data sheet lists",
    "words": "a word: the numbers are compared above",
    "notation": "a reading of the notation, in words above",
    "search": "the best of a few, all of them above",
}


@dataclass(frozen=True)
class _Same:
    """A rule, formulas of the question's letters for the rule's, and the letter that is solved for."""

    rule: str
    letters: Mapping[str, str]
    solve: str


def _same(rule: str, solve: str = "", /, **letters: str) -> _Same:
    return _Same(rule, letters, solve)


_BYTES = _same("local-bytes", shape="shape", b="bytes", ways="1")
_ICI = {"C": "C_bf16", "W": "W_ici_bidi"}
_FSDP_CHIPS = _same("fsdp", "chips", tokens="batch", axes="axes", **_ICI)
_MIXED_CHIPS = _same("mixed", "chips", tokens="batch", MX="MXMY", MY="1", F="F", **_ICI)
_TENSOR_NODE = _same("tensor", F="F", W="W_gpu", C="C_bf16")
_PER_GPU = _same("tokens-per-chip", tokens="batch", chips="gpus")
_SEQUENCES_PER_GPU = _same("tokens-per-chip", tokens="seqs*seq", chips="gpus")
_CACHES = _same("kv-cache", L="L", K="K", H="H", b="kv_bytes", B="batch", context="T")
_TABLE_KV = "2*kv_bytes*H*K*L"
_DECODES = {"P": "params", "B": "batch", "context": "T", "chips": "chips", "C": "C_bf16", "W_hbm": "W_hbm"}

_CHECKPOINTED = _same("chips-to-hold", bytes="params*10 + 2*ckpt*batch*D*L", HBM="HBM")

SAME: Mapping[str, _Same] = {
    "roofline.compute.*": _same("compute-time", flops="flops", C="C_bf16"),
    "roofline.q1.ops": _same("matmul-flops", B="B", D="D", F="F"),
    "roofline.q1.upper": _same("matmul-unhidden", B="B", D="D", F="F", b="1", w="1", C="C_int8", W_hbm="W_hbm"),
    "roofline.q3.cross_*": _same("matmul-batch", D="D", F="F", b="2", w="1", C="C_bf16", W_hbm="W_hbm"),
    "roofline.q5.Bcrit*": _same("critical-batch", C="sparse_spec/2", W_hbm="W_hbm"),
    "roofline.dot.vpu_ridge": _same("ridge", C="cores_per_chip*vpu_flops_per_core", W_hbm="W_hbm"),
    "tpus.mxu.per_mxu": _same("systolic", units="1", side="sqrt(rows*k*n/cycles)", clock="clock"),
    "tpus.mxu.v5e_chip": _same("systolic", units="mxus", side="sqrt(rows*k*n/cycles)", clock="clock"),
    "tpus.vmem.min_intensity": _same("ridge", C="C_bf16", W_hbm="vmem_over_hbm*W_hbm"),
    "tpus.q1.bytes_per_chip": _same("local-bytes", b="bytes", shape="params", ways="chips"),
    "tpus.q1.load_time": _same("weights-read", P="params", w="bytes", chips="chips", W_hbm="W_hbm"),
    "tpus.q4.ops_per_row": _same("matmul-flops", B="1", D="D", F="F"),
    "tpus.q4.Bcrit_hbm*": _same("matmul-batch", D="D", F="F", b="1", w="1", C="C_int8", W_hbm="W_hbm"),
    "tpus.q4.Bcrit_vmem": _same("matmul-batch", D="D", F="F", b="1", w="1", C="C_int8", W_hbm="ratio*W_hbm"),
    "tpus.q5.bytes": _same("local-bytes", b="bytes", shape="array", ways="1"),
    "tpus.q5.bw_time": _same("link-time", bytes="prod(array)*bytes", links="2", W_link="W_ici_uni"),
    "tpus.q6.array": _same("local-bytes", b="elem_bytes", shape="n*n", ways="1"),
    "tpus.q6.ici": _same("link-time", bytes="array_bytes_book*(chips - 1)/chips", links="2", W_link="W_ici_uni"),
    "tpus.q6.hbm": _same("memory-time", bytes="array_bytes_book", W_hbm="W_hbm"),
    "tpus.q6.flops": _same("matmul-flops", B="vec", D="n", F="n"),
    "tpus.q6.math": _same("compute-time", flops="2*vec*n*n", C="C_bf16"),
    "tpus.q6.total_exact_bytes": _same(
        "link-time", bytes="n*n*elem_bytes*(chips - 1)/chips", links="2", W_link="W_ici_uni"
    ),
    "sharding.pq1.bytes": _same("local-bytes", b="bytes", shape="shape", ways="X*Y"),
    "sharding.pq1.time": _same("memory-time", bytes="prod(shape)*bytes/(X*Y)", W_hbm="W_hbm"),
    "sharding.pq2.per_device": _same("local-bytes", b="bytes", shape="shape", ways="X*Y"),
    "sharding.agquiz.shard": _same("local-bytes", b="bytes", shape="E*F", ways="n"),
    "sharding.agquiz.array": _same("local-bytes", b="bytes", shape="E*F", ways="1"),
    "sharding.agquiz.naive": _same("ring-time", bytes="bytes*E*F", W="W_ici_bidi"),
    "sharding.agquiz.actual": _same("one-way-all-gather", n="n", bytes="bytes*E*F", W_link="W_ici_uni", hop="1e-6"),
    "sharding.agquiz.small_hop": _same("link-time", bytes="bytes*E*F/n", W_link="W_ici_uni"),
    "sharding.q2.1": _same("ring-time", bytes="bytes*B*D/Y", W="W_ici_bidi"),
    "sharding.q2.2": _same("ring-time", bytes="bytes*B*D", axes="2", W="W_ici_bidi"),
    "sharding.q2.3*": _same("ring-time", bytes="2*bytes*B*D/(X*Y)", W="W_ici_bidi"),
    "sharding.q2.fun1": _same("ring-time", bytes="bytes*B*D/Y", axes="2", W="W_ici_bidi"),
    "sharding.q2.fun2": _same("ring-time", bytes="bytes*B*D", axes="3", W="W_ici_bidi"),
    "sharding.q3.per_device": _same("local-bytes", b="bytes", shape="B", ways="n"),
    "sharding.q5.flops_time": _same("compute-time", flops="2*I*J*K", chips="N", C="C_bf16"),
    "sharding.q5.comms_time": _same("ring-time", bytes="bytes*I*K", axes="3", W="W_ici_bidi"),
    "sharding.q6.a_math": _same("compute-time", flops="2*I*J*K", chips="X*Y", C="C_bf16"),
    "sharding.q6.b_comms": _same("one-way-all-gather", n="X", bytes="bytes*J*K/Y", W_link="W_ici_uni", hop="1e-6"),
    "sharding.q6.a_comms": _same("link-time", bytes="2*(Y - 1)/Y * bytes*I*K/X", W_link="W_ici_uni"),
    "sharding.q7.weight": _same("local-bytes", b="bytes", shape="D*F", ways="1"),
    "sharding.q7.act": _same("local-bytes", b="bytes", shape="B*D", ways="1"),
    "sharding.q7.per_device": _same("local-bytes", b="bytes", shape="2*D*F", ways="chips"),
    "sharding.q7.math": _same("compute-time", flops="4*B*D*F", chips="chips", C="C_bf16"),
    "sharding.q7.comms": _same("ring-time", bytes="2*bytes*B*D", W="2*W_ici_uni"),
    "sharding.q7.hbm": _same("memory-time", bytes="2*bytes*D*F", chips="chips", W_hbm="W_hbm"),
    "transformers.dots.dot": _same("matmul-flops", B="1", D="P", F="1"),
    "transformers.dots.matvec": _same("matmul-flops", B="N", D="P", F="1"),
    "transformers.dots.matmul": _same("matmul-flops", B="N", D="P", F="M"),
    "transformers.acct.dot_flops": _same("attention-flops", B="B", T="T", N="N", H="H", L="1"),
    "training.fsdp.dsv2_chips": _FSDP_CHIPS,
    "training.fsdp.llama_chips": _FSDP_CHIPS,
    "training.llama2M.fsdp_chips": _FSDP_CHIPS,
    "training.llama2M.mixed_chips*": _MIXED_CHIPS,
    "training.q3.layer_math": _same("compute-time", flops="4*batch*D*F", chips="N", C="C_bf16"),
    "training.q3.layer_fsdp": _same("ring-time", bytes="4*D*F/Y", axes="MX", W="W_ici_bidi"),
    "training.q3.layer_tp": _same("ring-time", bytes="4*batch*D/X", axes="MY", W="W_ici_bidi"),
    "applied_training.flops.time_v5p": _same("train-time", P="params", tokens="1", chips="1", C="C_bf16"),
    "applied_training.flops.years": _same("train-time", P="params", tokens="tokens", chips="1", C="C_bf16"),
    "applied_training.mem.weights": _same("train-state", P="params", state="0"),
    "applied_training.mem.min_chips": _CHECKPOINTED,
    "applied_training.mem.min_chips.feb03": _CHECKPOINTED,
    "applied_training.q1.per_chip": _same("tokens-per-chip", tokens="batch", chips="pods*pod"),
    "inference.m13.weights": _same("train-state", P="params", state="0"),
    "inference.m13.kv_seq*": _same("kv-cache", L="L", K="K", H="H", b="bytes", context="T"),
    "inference.q2.per_seq": _same("kv-cache", L="L", K="K", H="H", b="1", context="ctx"),
    "inference.table_*.kv_*": _CACHES,
    "inference.table_*.mem_*": _same(
        "serving-bytes", P="params", w="param_bytes", B="batch", context="T", kv=_TABLE_KV
    ),
    "inference.table_*.tput_*": _same("decode-throughput", **_DECODES, w="param_bytes", kv=_TABLE_KV),
    "inference.q4.decode_tp": _same("decode-tensor", "B", Y="Y", F="F", W="W_ici_bidi", W_hbm="W_hbm"),
    "inference.q4.tp_limit": _same("tensor", F="F", W="W_ici_bidi", C="C_int8", axes="axes", b="1"),
    "applied_inference.kv.seq32k": _same("kv-cache", L="L", K="K", H="H", b="bytes", context="T"),
    "applied_inference.kv.bs240": _same("kv-cache", L="L", K="K", H="H", b="bytes", context="T", B="batch"),
    "applied_inference.kv.chips": _same("chips-to-hold", bytes="params*bytes + 2*L*K*H*bytes*T*batch", HBM="HBM"),
    "applied_inference.bcrit.int8": _same("critical-batch", C="C_int8", W_hbm="W_hbm", w="weight_bytes"),
    "applied_inference.bcrit.*": _same("critical-batch", C="C_bf16", W_hbm="W_hbm", w="weight_bytes"),
    "applied_inference.minslice.*_size": _same("local-bytes", b="bytes", shape="params", ways="1"),
    "applied_inference.bs32.total": _same("serving-bytes", P="params", w="1", B="batch", context="T", kv="kv_token"),
    "applied_inference.bs32.tput": _same("decode-throughput", **_DECODES, w="1", kv="kv_token"),
    "applied_inference.bs32.ici_limit*": _same("tensor", F="F", C="alpha", W="1", axes="axes"),
    "applied_inference.full.step": _same("memory-time", bytes="HBM", W_hbm="W_hbm"),
    "applied_inference.pareto.max_latency": _same("memory-time", bytes="HBM", W_hbm="W_hbm"),
    "applied_inference.shard.t_ici": _same("ring-time", bytes="2*B*D", W="W_ici_bidi"),
    "applied_inference.shard.t_hbm": _same("memory-time", bytes="2*D*F/Y", W_hbm="W_hbm"),
    "applied_inference.shard.t_math": _same("compute-time", flops="2*B*D*F/Y", C="C_bf16"),
    "applied_inference.q2.kv": _same("kv-cache", L="L", K="K", H="H", b="1", context="ctx", B="batch"),
    "profiling.hlo.fusion3_bytes": _BYTES,
    "profiling.ffw.time": _same("compute-time", flops="2*B*T*D*F", chips="cores", C="C_bf16"),
    "profiling.ffw.util": _same(
        "compute-time", "mfu", t="measured_ms*1e-3", flops="2*B*T*D*F", chips="cores", C="C_bf16"
    ),
    "profiling.rs.time": _same("ring-time", bytes="2*B/dp*T*D", W="W_ici_bidi"),
    "profiling.attn.q_proj": _same("compute-time", flops="2*B*T*D*N*H", chips="cores", C="C_bf16"),
    "jax_stuff.auto.ar_bytes": _BYTES,
    "gpus.q3.*": _same("ridge", C="C", W_hbm="W"),
    "gpus.q4.bytes": _same("matmul-bytes", B="B", D="D", F="F"),
    "gpus.q7.ridge": _same("ridge", C="vec", W_hbm="W"),
    "gpus.q7.t_*": _same("memory-time", bytes="12*N", W_hbm="W"),
    "gpus.ds.per_gpu": _SEQUENCES_PER_GPU,
    "gpus.ll.per_gpu": _PER_GPU,
    "gpus.r2.per_gpu": _PER_GPU,
    "gpus.r3.*_tokens": _SEQUENCES_PER_GPU,
    "gpus.n3.bytes": _same("local-bytes", b="bytes", shape="D*F", ways="1"),
    "gpus.n3.approx*": _same("ring-time", bytes="D*F*bytes", W="W_gpu"),
    "gpus.c1.approx": _same("ring-time", bytes="bytes*B*F", W="W_gpu"),
    "gpus.c3.inner8": _same("all-gather-node", n="nodes", bytes="2*D*F", W="W_node"),
    "gpus.k3.time": _same("ring-time", bytes="2*D*F/Y", W="W_gpu"),
    "gpus.sharp.mlp_bytes": _BYTES,
    "gpus.dp.intra": _same("fsdp", chips="1", C="C_bf16", W="W_gpu"),
    "gpus.dp.llama3_batch": _same("fsdp", chips="gpus", C="C_bf16", W="W_node"),
    "gpus.dp.dsv3": _same("fsdp", chips="1", C="C_bf16", W="W"),
    "gpus.dp.dsv3_batch": _same("fsdp", chips="gpus", C="C_bf16", W="W"),
    "gpus.r1.tp": _same("tensor", "F", Y="1", W="W_gpu", C="C_bf16"),
    "gpus.r2.min_gpus": _same("chips-to-hold", bytes="10*params", HBM="HBM"),
    "gpus.r2.tp_limit": _TENSOR_NODE,
    "gpus.r2.dp_mem": _same("local-bytes", b="10", shape="params", ways="tp"),
    "gpus.f1.node": _same("switch-rate", ports="links", W_port="gbit/8*1e9"),
    "gpus.pod.leaf_bw": _same("switch-rate", switches="nodes", ports="links", W_port="gbit/8*1e9"),
    "gpus.f1.leaf_expr": _same("switch-rate", ports="ports", W_port="gbit/8*1e9"),
    "gpus.nvlink.*": _same("switch-rate", ports="links", W_port="GBps_per_link*1e9"),
    "gpus.pod.tpu_egress": _same("switch-rate", ports="links", W_port="GBps*1e9"),
    "gpus.pod.nvl72_egress": _same("switch-rate", ports="nics", W_port="gbit/8*1e9"),
    "gpus.f2.core_4096": _same("switches-above", below="spines", uplinks="up", ports="ports"),
    "gpus.f2.spines_2048": _same("switches-above", below="gpus/su*leaf", uplinks="up", ports="ports"),
    "gpus.f2.spines_4096": _same("switches-above", below="gpus/su*leaf", uplinks="up", ports="down"),
}


def same_by_rule(name: str, value: float | str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Words of the command whose rule gives an answer, () where none does.

    Args:
        name: of the problem.
        value: our answer, in base units.
        values: of the question, by name.
    """
    same = next((same for pattern, same in SAME.items() if fnmatchcase(name, pattern)), None)
    if same is None or isinstance(value, str):
        return ()
    rule = find_rule(same.rule)
    try:
        given: dict[str, Any] = {n: _sized(n, Formula(text).value(values)) for n, text in same.letters.items()}
        result = given.pop(rule.result, value)
        found = rule.value(**({**given, same.solve: value} if same.solve else given))
    except (MeshwiseError, KeyError):
        return ()
    if not math.isclose(found, result, rel_tol=1e-9):
        return ()
    told = {**given, rule.result: result} if same.solve else given
    words = ("rule", rule.name, "--set", ",".join(f"{n}={_number(v)}" for n, v in told.items()))
    return (*words, "--solve", same.solve) if same.solve else words


def _sized(letter: str, value: Any) -> Any:
    """A letter of sizes is a list, of one if need be."""
    return [value] if LETTERS[letter].unit == "sizes" and not isinstance(value, list) else value


def _number(value: Any) -> str:
    return "x".join(map(_number, value)) if isinstance(value, list) else f"{value:.12g}"


def why_no_command(method: str, value: float | str) -> str:
    """Why no command gives an answer, a key of REASONS.

    Args:
        method: the formula, or the name of the function that works it out.
        value: the answer.
    """
    if method in ("best_per_dollar", "largest_in_table", "find", "split_of_caches"):
        return "search"
    if method in ("verdict", "legal", "implied", "ways", "batch_that_binds") or method.startswith("shape("):
        return "notation"
    if method.isidentifier():
        return "listed"
    return "words" if isinstance(value, str) and "'" in method else "arithmetic"
