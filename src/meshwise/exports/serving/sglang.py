"""A plan as commands of SGLang: `sglang.launch_server` for its engines, `sglang.benchmark.serving` to measure it.

Written for the release 0.5.23. Sources: its `sglang/srt/arg_groups/fields/` (names of the options),
`arg_groups/parallel_hook.py` and `overrides.py` (a chunk is shared out over ranks of attention; exchanges between
experts span all ranks), `configs/model_config.py` (how decode context parallelism splits heads and positions),
`arg_groups/choices.py` (methods and formats), `benchmark/serving.py` and `benchmark/datasets/common.py` (a range ratio
of 1 is exact lengths); and sglang-router 0.3.2. Not here: `--help`'s other options, which stay as they are.
"""

from __future__ import annotations

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
    add_router,
    command,
    common_notes,
    format_options,
    mean_note,
)

VERSION, ROUTER = "0.5.23", "sglang-router 0.3.2"

#: Tokens of a rank that DeepEP exchanges at once with low latency, unless told (`environ.py`).
_DISPATCHED = 128

#: Its methods, by formats of weights and of operands.
_QUANTIZATION: Methods = {
    (DType.FP8, DType.FP8): ("fp8", ("fp8",), ""),
    (DType.INT8, DType.INT8): ("w8a8_int8", ("compressed-tensors",), "int8 weights and operands (W8A8)"),
    (DType.INT8, DType.BF16): ("gptq_marlin", ("gptq",), "int8 weights alone (GPTQ, 8 bits)"),
    (DType.INT4, DType.BF16): ("awq_marlin", ("awq",), "int4 weights by groups of 128 (AWQ)"),
    (DType.FP4, DType.FP4): ("modelopt_fp4", ("modelopt",), "NVFP4"),
}
#: Methods of published checkpoints that it reads as they are.
_LOADS = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "awq", "gptq")
_CACHE = {DType.FP8: "fp8_e4m3", DType.FP4: "nvfp4"}

#: How its ranks nest, innermost first.
_NUMBERED = (("tensor", "cache"), ("context",), ("expert",), ("stage",))


def sglang(choices: ServingChoices) -> Script:
    """Write the commands."""
    script = Script(f"{VERSION}, {ROUTER}" if choices.apart else VERSION)
    script.notes += common_notes(
        choices, "SGLang", numbered=_NUMBERED, mixes=False, prefix_option="--disable-radix-cache"
    )
    if choices.latent:
        script.notes.append(f"SGLang chooses the pages of latents itself; the plan has {choices.load.block_tokens}")
    for pool in choices.pools:
        options = _options(choices, pool, script)
        words = "python3 -m sglang.launch_server"
        if options.get("--moe-a2a-backend") == "deepep" and pool.positions > _DISPATCHED:
            words = f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK={pool.positions} {words}"
        script.add(pool.name, pool.words, run=command(words, options))
    if any(pool.ranks > 1 and pool.weight_chips > 1 for pool in choices.pools):
        script.notes.append("SGLang splits feed-forward parts without experts over all ranks; the plan over tensor")
    if choices.apart:
        words = "python3 -m sglang_router.launch_router"
        add_router(choices, script, words, switch="--pd-disaggregation", port=30000, bootstrap="8998 ")
    if choices.load.mix is not None:
        script.notes.append(mean_note(choices))
    add_measurement(choices, script, _benchmark(choices))
    return script


#: What its options cannot say.
RULES: EngineRules = (
    vendors(("nvidia", "amd"), "--to jetstream on TPUs"),
    *ON_GPUS,
    *formats_of(_QUANTIZATION, _CACHE, none="no method of it has these formats", kv="kv=fp8", loads=_LOADS),
    whole_experts(lambda c: c.ranks * c.weight_chips if c.splits_experts else 1),
    Rule(
        lambda c: c.layout.stage > 1 and c.load.draft_tokens > 0 and not c.predicts_tokens,
        "stage={c.layout.stage} with draft_tokens={c.load.draft_tokens}",
        "its pipelines take drafts of EAGLE's kind only",
        lambda c: f"tensor={c.layout.tensor * c.layout.stage}, or --draft-tokens 0",
    ),
    Rule(
        lambda c: c.layout.context > 1,
        "context={c.layout.context}", "what splits a prompt splits the other weights, too",
        lambda c: f"tensor={c.layout.tensor * c.layout.context}, or plan serve --forbid context",
    ),
    Rule(
        lambda c: c.layout.expert > 1 and c.weight_chips > 1 and c.layout.expert_tensor_parallel,
        "expert_tensor_parallel=on", "its exchange of tokens with experts spans all ranks, each with whole experts",
        "expert_tensor_parallel=off",
    ),
)  # fmt: skip


def _options(choices: ServingChoices, pool: Pool, script: Script) -> Options:
    load = choices.load
    out: dict[str, str | int | float | None] = {
        "--model-path": '"$MODEL"',
        "--host": '"${BIND:-0.0.0.0}"',
        "--port": '"${PORT:-30000}"',
        **_parallel(choices, pool),
        **format_options(choices, _QUANTIZATION, _CACHE, script),
    }
    if not choices.latent:
        out["--page-size"] = load.block_tokens
    left = 1 - load.reserve - pool.memory["activations"] / choices.estimate.hbm_capacity
    out |= {"--mem-fraction-static": f"{left:.3f}", "--context-length": choices.longest}
    if pool.name != "prefill":
        out["--max-running-requests"] = pool.requests
    if pool.prefill_tokens:
        whole = choices.setup.chunk is None
        # A chunk is shared out over the ranks of attention.
        out["--chunked-prefill-size"] = -1 if whole else pool.prefill_tokens * pool.ranks
        out["--max-prefill-tokens"] = pool.prefill_tokens
        if not whole and not choices.apart:
            out["--enable-mixed-chunk"] = None
    if not load.cached_prefix:
        out["--disable-radix-cache"] = None
    elif pool.name == "decode":
        out["--disaggregation-decode-enable-radix-cache"] = None
    if load.draft_tokens:
        out |= _speculative(choices, script)
    if choices.apart:
        out |= {"--disaggregation-mode": pool.name, "--disaggregation-transfer-backend": "nixl"}
    return out


def _parallel(choices: ServingChoices, pool: Pool) -> dict[str, str | int | float | None]:
    layout, nodes = pool.layout, choices.nodes(pool.layout)
    ranks = pool.weight_chips * layout.expert
    out: dict[str, str | int | float | None] = {"--tp-size": ranks}
    if layout.cache > 1:
        out["--dcp-size"] = layout.cache
    if layout.stage > 1:
        out["--pp-size"] = layout.stage
    if layout.expert > 1:
        out |= {
            "--attn-dp-size": layout.expert,
            "--ep-size": ranks,
            "--moe-a2a-backend": "deepep" if choices.problem.cluster.chip.vendor == "nvidia" else "mori",
            "--enable-dp-lm-head": None,
        }
        if pool.weight_chips == 1:
            out["--moe-dense-tp-size"] = 1
    elif choices.mixture and ranks > 1 and not layout.expert_tensor_parallel:
        out["--ep-size"] = ranks
    if nodes > 1:
        out |= {
            "--nnodes": nodes,
            "--node-rank": '"${NODE:?0 on the first node, then 1, ...}"',
            "--dist-init-addr": '"${HEAD:?address of the first node}:5000"',
        }
    return out


def _speculative(choices: ServingChoices, script: Script) -> dict[str, str | int | float | None]:
    count = choices.load.draft_tokens
    chain: dict[str, str | int | float | None] = {
        "--speculative-num-steps": count,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": count + 1,
    }
    if choices.predicts_tokens:
        return {"--speculative-algorithm": "NEXTN", **chain}
    script.settings["DRAFT"] = '"${DRAFT:?a draft model}"'
    return {"--speculative-algorithm": "STANDALONE", "--speculative-draft-model-path": '"$DRAFT"', **chain}


def _benchmark(choices: ServingChoices) -> list[str]:
    load = choices.load
    if load.cached_prefix:
        data: Options = {
            "--dataset-name": "generated-shared-prefix",
            "--gsp-num-groups": 1,
            "--gsp-prompts-per-group": choices.num_prompts,
            "--gsp-system-prompt-len": int(load.cached_prefix),
            "--gsp-question-len": choices.new_tokens,
            "--gsp-output-len": choices.output_tokens,
            "--gsp-range-ratio": "1.0",
        }
    else:
        data = {
            "--dataset-name": "random-ids",
            "--random-input-len": choices.new_tokens,
            "--random-output-len": choices.output_tokens,
            "--random-range-ratio": "1.0",
        }
    options: Options = {
        "--backend": "sglang",
        "--base-url": '"${URL:-http://127.0.0.1:30000}"',
        "--model": '"$MODEL"',
        **data,
        "--tokenize-prompt": None,
        "--num-prompts": choices.num_prompts,
        "--max-concurrency": choices.on_their_way,
        "--request-rate": "inf",
        "--seed": 0,
    }
    return command("python3 -m sglang.benchmark.serving", options)
