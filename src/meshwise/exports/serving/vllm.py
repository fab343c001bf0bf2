"""A plan as commands of vLLM: `vllm serve` for its engines, `vllm bench serve` to measure it.

Written for the release 0.33.0. Sources: its `vllm/engine/arg_utils.py` (names of the options),
`vllm/config/parallel.py` (what each size splits, and that experts are split over tensor and data ranks together),
`config/cache.py` and `config/scheduler.py` (cache formats, limits per data-parallel rank), `config/model.py` and
`config/vllm.py` (which sizes of decode context parallelism there are), `config/speculative.py`,
`model_executor/layers/quantization/` (which methods quantise as they load), `kv_connector/v1/nixl` (roles);
and vllm-router 0.1.17. Not here: `--help`'s other options, which stay as they are.
"""

from __future__ import annotations

import json
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.exports.exported import Rule
from meshwise.exports.serving.choices import ON_GPUS, EngineRules, Methods, Pool, ServingChoices, formats_of, vendors
from meshwise.exports.serving.script import (
    Options,
    Script,
    add_measurement,
    add_router,
    command,
    common_notes,
    format_options,
    length_spreads,
    mean_note,
    serving_benchmark,
    shell_json,
)

VERSION, ROUTER = "0.33.0", "vllm-router 0.1.17"

#: Its methods, by formats of weights and of operands.
_QUANTIZATION: Methods = {
    (DType.FP8, DType.FP8): ("fp8_per_tensor", ("fp8", "compressed-tensors", "modelopt"), ""),
    (DType.INT8, DType.INT8): ("compressed-tensors", ("compressed-tensors",), "int8 weights and operands (W8A8)"),
    (DType.INT8, DType.BF16): ("compressed-tensors", ("compressed-tensors",), "int8 weights alone (W8A16)"),
    (DType.INT4, DType.BF16): ("awq_marlin", ("awq",), "int4 weights by groups of 128 (AWQ)"),
    (DType.FP4, DType.FP4): ("modelopt_fp4", ("modelopt",), "NVFP4"),
}
#: Methods of published checkpoints that it reads as they are.
_LOADS = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "awq", "gptq", "bitsandbytes")
_CACHE = {DType.FP8: "fp8", DType.INT8: "int8_per_token_head", DType.FP4: "nvfp4"}

#: How its ranks nest, innermost first.
_NUMBERED = (("tensor", "cache"), ("context",), ("stage",), ("expert",))

#: Which node of an engine this is.
_NODE = '"${NODE:?0 on the first node, then 1, ...}"'

_CONNECTOR = {"prefill": "kv_producer", "decode": "kv_consumer"}


def vllm(choices: ServingChoices) -> Script:
    """Write the commands."""
    script = Script(f"{VERSION}, {ROUTER}" if choices.apart else VERSION)
    script.notes += common_notes(
        choices, "vLLM", numbered=_NUMBERED, mixes=True, prefix_option="--no-enable-prefix-caching"
    )
    if choices.latent:
        script.notes.append(f"vLLM chooses the blocks of latents itself; the plan has {choices.load.block_tokens}")
    for pool in choices.pools:
        options = _options(choices, pool, script)
        words = 'vllm serve "$MODEL"'
        if choices.apart:
            words = f'VLLM_NIXL_SIDE_CHANNEL_HOST="${{HOST:?address of this node}}" {words}'
        script.add(pool.name, pool.words, run=command(words, options, last=_worker(choices, pool)))
    if choices.apart:
        add_router(choices, script, "vllm-router", switch="--vllm-pd-disaggregation", port=8000)
    base = '"${URL:-http://127.0.0.1:8000}"'
    bench = {"--backend": "vllm", "--base-url": base, **serving_benchmark(choices)}
    apart = length_spreads(choices)
    if apart is None:
        script.notes.append(mean_note(choices))
    elif choices.load.mix is not None:
        bench["--random-range-ratio"] = shell_json(apart)
    add_measurement(choices, script, command("vllm bench serve", bench))
    return script


#: What its options cannot say.
RULES: EngineRules = (
    vendors(("nvidia", "amd"), "--to jetstream on TPUs"),
    *ON_GPUS,
    *formats_of(_QUANTIZATION, _CACHE, none="no method of it has these formats", kv="kv=fp8", loads=_LOADS),
    Rule(
        lambda c: c.layout.expert > 1 and c.weight_chips > 1 and c.layout.expert_tensor_parallel,
        "expert_tensor_parallel=on", "it splits the number of experts over tensor and data ranks together",
        "expert_tensor_parallel=off",
    ),
    Rule(
        lambda c: c.layout.cache > 1 and not c.latent and c.layout.tensor < c.kv_heads,
        "tensor={c.layout.tensor},cache={c.layout.cache}",
        "it splits positions among copies of {c.kv_heads} key/value heads, which begin beyond as many ways",
        "tensor={c.kv_heads} with cache, or tensor={c.weight_chips}",
    ),
    Rule(
        lambda c: c.layout.cache > 1 and any(n // c.kv_heads % c.layout.cache for n in c.heads),
        "cache={c.layout.cache}", "query heads of a key/value head do not divide over it", "tensor={c.weight_chips}",
    ),
    Rule(
        lambda c: c.layout.context > 1 and (c.mixture or c.layout.context_method != "gather"),
        "context={c.layout.context}",
        lambda c: "experts are split over it, too" if c.mixture else "it gathers keys and values",
        lambda c: f"tensor={c.layout.tensor * c.layout.context}",
    ),
    Rule(
        lambda c: c.name == "decode" and c.layout.stage > 1,
        "stage={c.layout.stage} of generation", "NIXL hands caches to engines without a pipeline",
        lambda c: f"tensor={c.layout.tensor * c.layout.stage}, --mode aggregated, or plan serve --forbid stage",
    ),
    Rule(
        lambda c: c.apart and c.layout.cache > 1,
        "cache={c.layout.cache}", "NIXL hands over caches that are split by heads",
        "tensor={c.weight_chips}, or --mode aggregated",
    ),
)  # fmt: skip


def _options(choices: ServingChoices, pool: Pool, script: Script) -> Options:
    load = choices.load
    out: dict[str, str | int | float | None] = {"--port": '"${PORT:-8000}"', **_parallel(choices, pool)}
    out |= format_options(choices, _QUANTIZATION, _CACHE, script)
    if not choices.latent:
        out["--block-size"] = load.block_tokens
    out |= {
        "--gpu-memory-utilization": f"{1 - load.reserve:g}",
        "--max-model-len": choices.longest,
        "--max-num-seqs": pool.requests_per_rank,
        "--max-num-batched-tokens": max(pool.step_tokens, pool.requests_per_rank),
        "--enable-chunked-prefill": None,
        "--enable-prefix-caching" if load.cached_prefix else "--no-enable-prefix-caching": None,
    }
    if load.draft_tokens:
        out["--speculative-config"] = _speculative(choices, script)
    if choices.apart:
        role = {"kv_connector": "NixlConnector", "kv_role": _CONNECTOR[pool.name]}
        out["--kv-transfer-config"] = shell_json(role)
    return out


def _parallel(choices: ServingChoices, pool: Pool) -> dict[str, str | int | float | None]:
    layout, nodes = pool.layout, choices.nodes(pool.layout)
    out: dict[str, str | int | float | None] = {"--tensor-parallel-size": pool.weight_chips}
    if layout.cache > 1:
        out["--decode-context-parallel-size"] = layout.cache
    if layout.context > 1:
        out["--prefill-context-parallel-size"] = layout.context
    if layout.stage > 1:
        out["--pipeline-parallel-size"] = layout.stage
    if layout.expert > 1:
        out["--data-parallel-size"] = layout.expert
    if layout.expert > 1 or (choices.mixture and pool.weight_chips > 1 and not layout.expert_tensor_parallel):
        out["--enable-expert-parallel"] = None
    if layout.expert > 1:
        library = "deepep" if choices.problem.cluster.chip.vendor == "nvidia" else "mori"
        fast = "low_latency" if pool.name == "decode" else "high_throughput"
        out["--all2all-backend"] = f"{library}_{fast}"
    if nodes == 1:
        return out
    head = '"${HEAD:?address of the first node}"'
    if layout.expert == 1:
        return out | {"--nnodes": nodes, "--node-rank": _NODE, "--master-addr": head}
    if layout.expert % nodes == 0:
        return out | {"--data-parallel-size-local": layout.expert // nodes, "--data-parallel-address": head}
    return out | {"--distributed-executor-backend": "ray", "--data-parallel-backend": "ray"}


def _worker(choices: ServingChoices, pool: Pool) -> list[str]:
    """What nodes after the first say besides."""
    layout, nodes = pool.layout, choices.nodes(pool.layout)
    if nodes == 1 or (layout.expert > 1 and layout.expert % nodes):
        return []
    ranks = f" --data-parallel-start-rank $(({layout.expert // nodes} * NODE))" if layout.expert > 1 else ""
    return [f'$([ {_NODE} = 0 ] || echo "--headless{ranks}")']


def _speculative(choices: ServingChoices, script: Script) -> str:
    """The draft, as JSON; rates of acceptance, with which the plan's own can be measured, as a note."""
    count, chance = choices.load.draft_tokens, choices.load.acceptance
    config: dict[str, Any] = {"num_speculative_tokens": count}
    rates = [round(chance ** (n + 1), 6) for n in range(count)]
    forced = json.dumps({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates})
    note = f"to measure with the plan's acceptance, add {forced[1:-1]} to --speculative-config"
    if note not in script.notes:
        script.notes.append(note)
    if choices.predicts_tokens:
        return shell_json({"method": "mtp", **config})
    script.settings["DRAFT"] = '"${DRAFT:?a draft model}"'
    return f'\'{{"model": "\'"$DRAFT"\'", "num_speculative_tokens": {count}}}\''
