"""A plan as commands of TensorRT-LLM: `trtllm-serve` with its YAML for the engines, its benchmark to measure it.

Written for 1.2: `tensorrt_llm/commands/serve.py` at commit 00209af (names of the options) and `llmapi/llm_args.py`
(names in the YAML); `docs/source/features/disagg-serving.md` (engines apart); `serve/scripts/benchmark_serving.py` at
commit 0228a71. Data-parallel attention takes all ranks of tensor parallelism there, and limits are per rank.
Not here: other options, which stay as they are.
"""

from __future__ import annotations

import json
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.exports.exported import Rule
from meshwise.exports.serving.choices import (
    ON_GPUS,
    EngineRules,
    Methods,
    Pool,
    ServingChoices,
    formats_of,
    vendors,
    whole_experts,
)
from meshwise.exports.serving.script import (
    Options,
    Script,
    add_measurement,
    command,
    common_notes,
    heredoc,
    length_spreads,
    mean_note,
    model_setting,
    router_urls,
    serving_benchmark,
)

VERSION = "1.2 (commands/serve.py at commit 00209af)"

#: Its methods, by formats of weights and of operands; no option names them, as checkpoints do.
_QUANTIZATION: Methods = {
    (DType.FP8, DType.FP8): ("checkpoint", ("fp8",), "fp8 (ModelOpt)"),
    (DType.INT4, DType.BF16): ("checkpoint", ("awq",), "int4 weights by groups of 128 (ModelOpt, AWQ)"),
    (DType.FP4, DType.FP4): ("checkpoint", ("modelopt",), "NVFP4 (ModelOpt)"),
}
#: Methods of published checkpoints that it reads as they are.
_LOADS = ("fp8", "mxfp4", "modelopt")
_CACHE = {DType.FP8: "fp8", DType.FP4: "nvfp4"}

#: How its ranks nest, innermost first.
_NUMBERED = (("tensor", "cache"), ("context",), ("expert",), ("stage",))


def tensorrt_llm(choices: ServingChoices) -> Script:
    """Write the commands."""
    script = Script(VERSION)
    script.notes += common_notes(
        choices, "TensorRT-LLM", numbered=_NUMBERED, mixes=True, prefix_option="enable_block_reuse: false"
    )
    if model_setting(choices, _QUANTIZATION, script):
        script.notes.append("the checkpoint says how its weights are quantised: no option does")
    if choices.latent:
        script.notes.append(
            f"TensorRT-LLM chooses the blocks of latents itself; the plan has {choices.load.block_tokens}"
        )
    for pool in choices.pools:
        file = f"{pool.name}.yaml"
        document = heredoc(file, _yaml(_settings(choices, pool, script)))
        words, nodes = 'trtllm-serve serve "$MODEL"', choices.nodes(pool.layout)
        if nodes > 1:
            each = choices.problem.cluster.chip.chips_per_host
            words = (
                f"srun --mpi pmix --nodes {nodes} --ntasks {pool.layout.engine_chips} --ntasks-per-node {each} "
                f"trtllm-llmapi-launch {words}"
            )
        script.add(pool.name, pool.words, document, run=command(words, _options(choices, pool, file)))
    if choices.apart:
        _add_router(choices, script)
    url = '"${URL:-http://127.0.0.1:8000}"'
    bench = {"--backend": "openai", "--base-url": url, **serving_benchmark(choices)}
    apart = length_spreads(choices)
    if apart is None or apart["input"] != apart["output"]:
        script.notes.append(mean_note(choices))
    else:
        bench["--random-range-ratio"] = apart["input"]
    bench |= {"--random-ids": None, "--tokenize-on-client": None}
    module = "python3 -m tensorrt_llm.serve.scripts.benchmark_serving"
    add_measurement(choices, script, command(module, bench))
    return script


#: What its options cannot say.
RULES: EngineRules = (
    vendors(("nvidia",), "--to jetstream on TPUs, --to vllm on AMD's"),
    *ON_GPUS,
    Rule(
        lambda c: c.published in ("fp8", "mxfp4") and DType.FP8 not in c.chip.flops_per_s,
        "weights={c.formats[0].value}", "it reads such checkpoints on chips with fp8 units alone", "bf16",
    ),
    *formats_of(_QUANTIZATION, _CACHE, none="no method of it has these formats", kv="kv=fp8", loads=_LOADS),
    Rule(
        lambda c: c.layout.cache > 1 and c.layout.cache_split == "sequence",
        "cache={c.layout.cache}",
        "of its engines only those with latents split positions (Helix), which is not handed over",
        "tensor={c.weight_chips}, --to sglang, or plan serve --forbid cache",
    ),
    Rule(
        lambda c: c.layout.context > 1,
        "context={c.layout.context}", "it splits prompts for few models, which is not handed over",
        lambda c: f"tensor={c.layout.tensor * c.layout.context}, or plan serve --forbid context",
    ),
    Rule(
        lambda c: c.layout.expert > 1 and c.layout.tensor > 1,
        "expert={c.layout.expert},tensor={c.layout.tensor}", "data-parallel attention takes every rank there",
        lambda c: f"expert={c.layout.expert * c.layout.tensor}, or tensor={c.layout.expert * c.layout.tensor}",
    ),
    whole_experts(lambda c: c.layout.expert * c.layout.tensor if c.splits_experts else 1),
    Rule(
        lambda c: not c.latent and c.load.block_tokens.bit_count() > 1,
        "block_tokens={c.load.block_tokens}", "its blocks are powers of two",
        lambda c: f"--block-tokens {1 << c.load.block_tokens.bit_length()}",
    ),
)  # fmt: skip


def _options(choices: ServingChoices, pool: Pool, file: str) -> Options:
    layout = pool.layout
    out: dict[str, str | int | float | None] = {
        "--backend": "pytorch",
        "--host": '"${BIND:-0.0.0.0}"',
        "--port": '"${PORT:-8000}"',
        "--tp_size": layout.tensor * layout.expert,
    }
    if layout.stage > 1:
        out["--pp_size"] = layout.stage
    if choices.mixture:
        whole = layout.expert > 1 or (layout.tensor > 1 and not layout.expert_tensor_parallel)
        out["--ep_size"] = layout.tensor * layout.expert if whole else 1
    if choices.nodes(layout) > 1:
        out["--gpus_per_node"] = choices.problem.cluster.chip.chips_per_host
    return out | {
        "--max_batch_size": pool.requests_per_rank,
        "--max_num_tokens": max(pool.step_tokens, pool.requests_per_rank),
        "--max_seq_len": choices.longest,
        "--extra_llm_api_options": file,
    }


def _settings(choices: ServingChoices, pool: Pool, script: Script) -> dict[str, Any]:
    """What the YAML says."""
    load, formats = choices.load, choices.load.formats
    cache: dict[str, Any] = {
        "enable_block_reuse": bool(load.cached_prefix),
        "free_gpu_memory_fraction": _free_fraction(choices, pool),
    }
    if not choices.latent:
        cache["tokens_per_block"] = load.block_tokens
    cache["dtype"] = _CACHE.get(formats.kv, "auto")
    out: dict[str, Any] = {"kv_cache_config": cache}
    if choices.setup.chunk is not None and pool.name != "decode":
        out["enable_chunked_prefill"] = True
    if pool.layout.expert > 1:
        out["enable_attention_dp"] = True
    if load.draft_tokens:
        out["speculative_config"] = _speculative(choices, script)
    if choices.apart:
        if pool.name == "prefill":
            out["disable_overlap_scheduler"] = True
        out["cache_transceiver_config"] = {"backend": "DEFAULT", "max_tokens_in_buffer": choices.longest_prompt}
    return out


def _free_fraction(choices: ServingChoices, pool: Pool) -> float:
    """The share of what weights and activations leave, that is not reserved."""
    held = sum(pool.memory[name] for name in ("weights", "activations", "workspace"))
    free = choices.estimate.hbm_capacity - held
    return round(1 - pool.memory["reserve"] / free, 3)


def _speculative(choices: ServingChoices, script: Script) -> dict[str, Any]:
    count = choices.load.draft_tokens
    if choices.predicts_tokens:
        return {"decoding_type": "MTP", "num_nextn_predict_layers": count}
    script.notes.append("DRAFT_MODEL in the YAML stands for a draft model of yours")
    return {"decoding_type": "Draft_Target", "max_draft_len": count, "speculative_model_dir": "DRAFT_MODEL"}


def _yaml(value: dict[str, Any], indent: str = "") -> str:
    """Write nested settings, a key a line."""
    out = ""
    for key, inner in value.items():
        if isinstance(inner, dict):
            out += f"{indent}{key}:\n{_yaml(inner, indent + '  ')}"
        else:
            out += f"{indent}{key}: {json.dumps(inner)}\n"
    return out


def _add_router(choices: ServingChoices, script: Script) -> None:
    setup = choices.setup
    prefill, decode = router_urls(choices, "host:port")
    document = [
        "    {",
        '        echo "hostname: 0.0.0.0"',
        '        echo "port: ${PORT:-8000}"',
        f"        printf 'context_servers:\\n  num_instances: {setup.prefill.replicas}\\n  urls:\\n'",
        f"        printf '    - \"%s\"\\n' $(echo {prefill})",
        f"        printf 'generation_servers:\\n  num_instances: {setup.decode.replicas}\\n  urls:\\n'",
        f"        printf '    - \"%s\"\\n' $(echo {decode})",
        "    } >router.yaml",
    ]
    run = command("trtllm-serve disaggregated", {"--config_file": "router.yaml"})
    script.add("router", "what requests are sent to", document, run=run)
