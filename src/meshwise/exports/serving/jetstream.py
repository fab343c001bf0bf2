"""A plan as commands of JetStream with MaxText's engine: a server, and MaxText's measurement of its two steps.

Sources: MaxText, `src/maxtext/inference/maxengine/maxengine_server.py` at commit 5505348 (the server),
`configs/inference/inference.yml` at commit 106ee59 (what each mesh axis splits), `configs/models` (names of models),
`inference/inference_microbenchmark.py` at commit 0143f05 and the scripts of `inference/mlperf` (options).
JetStream's own `benchmarks/benchmark_serving.py` sends prompts of published data sets, not of a given length, which is
why MaxText's measurement is used. Not here: checkpoints, and how they are converted.
"""

from __future__ import annotations

import json
import math
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.errors import UnknownNameError
from meshwise.core.units import format_time
from meshwise.exports.choices import exact
from meshwise.exports.exported import Rule
from meshwise.exports.serving.choices import (
    Engine,
    EngineRules,
    ServingChoices,
    formats_of,
    vendors,
    whole_experts,
    whole_heads,
)
from meshwise.exports.serving.script import (
    Script,
    command,
    common_notes,
    mean_note,
)
from meshwise.sharding.serving import ServingLayout

VERSION = "MaxText's maxengine_server.py at commit 5505348, inference.yml at commit 106ee59"

#: Built-in model -> MaxText's name (`configs/models`).
_MODELS = {
    **{f"llama-2-{size}": f"llama2-{size}" for size in ("7b", "13b", "70b")},
    **{f"llama-3-{size}": f"llama3-{size}" for size in ("8b", "70b")},
    **{f"llama-3.1-{size}": f"llama3.1-{size}" for size in ("8b", "70b", "405b")},
    "llama-3.3-70b": "llama3.3-70b",
    "gemma-2b": "gemma-2b",
    "gemma-7b": "gemma-7b",
    **{f"gemma-2-{size}": f"gemma2-{size}" for size in ("2b", "9b", "27b")},
    **{f"gemma-3-{size}": f"gemma3-{size}" for size in ("4b", "12b", "27b")},
    "mistral-7b": "mistral-7b",
    "mixtral-8x7b": "mixtral-8x7b",
    "mixtral-8x22b": "mixtral-8x22b",
    "deepseek-v3": "deepseek3-671b",
    **{f"gpt-oss-{size}": f"gpt-oss-{size}" for size in ("20b", "120b")},
}

#: (weights, operands) -> MaxText's name of the recipe.
_QUANTIZATION = {
    (DType.INT8, DType.INT8): "int8",
    (DType.INT8, DType.BF16): "int8w",
    (DType.INT4, DType.BF16): "int4w",
    (DType.FP8, DType.FP8): "fp8",
}
_DTYPES = {DType.BF16: "bfloat16", DType.FP32: "float32"}
_CACHE = {DType.INT8: "int8", DType.INT4: "int4", DType.FP8: "fp8"}

#: How its axes nest (`data_sharding` of inference.yml), innermost first.
_NUMBERED = (("expert",), ("tensor",), ("fsdp",))


def jetstream(choices: ServingChoices) -> Script:
    """Write the commands."""
    script = Script(VERSION)
    layout = choices.setup.decode
    script.notes += common_notes(
        choices, "MaxText", numbered=_NUMBERED, mixes=False, prefix_option="enable_prefix_caching=False"
    )
    _add_notes(choices, layout, script)
    hub = choices.model.hub_names[0] if choices.model.hub_names else ""
    script.settings["TOKENIZER"] = f'"${{TOKENIZER:-{hub}}}"' if hub else '"${TOKENIZER:?a tokenizer}"'
    script.settings["CHECKPOINT"] = '"${CHECKPOINT:?a checkpoint for inference (unscanned)}"'
    script.settings["CONFIG"] = '"${CONFIG:-maxtext/configs/inference/inference.yml}"'
    settings = _settings(choices, layout)
    lines = [f"{key}={value if str(value).startswith(chr(34)) else _word(value)}" for key, value in settings.items()]
    server = 'python3 -m maxtext.inference.maxengine.maxengine_server "$CONFIG"'
    script.add("serve", "one engine, on port 9000", run=command(server, {}, last=lines))
    measured = [
        "inference_microbenchmark_stages=prefill,generate",
        f"inference_microbenchmark_prefill_lengths={choices.new_tokens}",
    ]
    bench = 'python3 -m maxtext.inference.inference_microbenchmark "$CONFIG"'
    script.add(
        "bench", "measure what was predicted, without a server", run=command(bench, {}, last=[*lines, *measured])
    )
    script.use = "bash THIS_FILE serve; or bash THIS_FILE bench"
    return script


def _word(value: Any) -> str:
    return str(value) if isinstance(value, str | bool) else json.dumps(value)


def _add_notes(choices: ServingChoices, layout: ServingLayout, script: Script) -> None:
    load, estimate = choices.load, choices.estimate
    script.notes += [
        (
            f"the cache is {choices.setup.batch:,} slots of {choices.longest:,} tokens; the plan's is in blocks of "
            f"{load.block_tokens}, and leaves {load.reserve:.0%} of HBM alone, for which there is no option"
        ),
        (
            "'bench' measures the two steps: prefill, predicted "
            f"{format_time(estimate.prefill.seconds.expected)}, and decode, predicted "
            f"{format_time(estimate.decode.seconds.expected)}; of a slot all positions are read, of the plan's those "
            "that are filled"
        ),
        "JetStream's benchmark_serving.py has no prompts of a given length",
    ]
    length = choices.new_tokens
    if length & (length - 1):
        script.notes.append(f"prompts are padded to a power of two: {1 << length.bit_length():,} tokens")
    if load.mix is not None:
        script.notes.append(mean_note(choices))
    if layout.expert > 1:
        script.notes.append("over the expert axis other weights are stored in parts and gathered; the plan has copies")


def _no_axis(name: str) -> Rule[Engine]:
    def size(c: Engine) -> int:
        return int(getattr(c.layout, name))

    return Rule(
        lambda c: size(c) > 1,
        lambda c: f"{name}={size(c)}",
        "its engine has no axis that does the same",
        lambda c: (
            f"tensor={math.gcd(c.layout.tensor * size(c), c.kv_heads)} with replicas, or plan serve --forbid {name}"
        ),
    )


#: What its options cannot say.
RULES: EngineRules = (
    vendors(("google",), "--to vllm on GPUs"),
    whole_heads(copies=False),
    whole_experts(lambda c: c.layout.expert),
    Rule(
        lambda c: c.apart,
        "mode=disaggregated", "its servers with engines apart are experimental", "--mode aggregated",
    ),
    Rule(
        lambda c: c.chip.devices_per_chip > 1,
        "chip {c.chip.title}", "JAX sees several devices in each", "a chip with one device",
    ),
    *map(_no_axis, ("width", "cache", "context", "stage")),
    Rule(
        lambda c: c.mixture and c.layout.tensor > 1 and not c.layout.expert_tensor_parallel,
        "expert_tensor_parallel=off", "its tensor axis splits the width of experts", "expert_tensor_parallel=on",
    ),
    Rule(
        lambda c: c.prefill_batch > 1,
        "prefill_batch={c.prefill_batch}", "it prefills one prompt at a time", "--prefill-batch 1",
    ),
    Rule(
        lambda c: c.chunk is not None,
        "chunk={c.chunk}", "its chunks go in steps of their own, not with what is generated",
        "no --chunk",
    ),
    Rule(
        lambda c: c.chunk is None and c.load.cached_prefix > 0,
        "cached_prefix={c.load.cached_prefix:g}", "it keeps prefixes only where prompts go in chunks",
        "no prefix",
    ),
    Rule(
        lambda c: c.load.draft_tokens > 0,
        "draft_tokens={c.load.draft_tokens}", "it does not speculate", "--draft-tokens 0",
    ),
    Rule(
        lambda c: c.model.name not in _MODELS,
        "model {c.model.name}", "MaxText has no configuration of it that is known here",
        lambda c: str(UnknownNameError("model", c.model.name, _MODELS)),
    ),
    Rule(
        lambda c: c.load.formats.activations not in _DTYPES,
        "activations={c.load.formats.activations.value}", "it computes in bf16 or fp32 throughout", "bf16",
    ),
    Rule(
        lambda c: c.load.formats.activations in _DTYPES and c.load.formats.head != c.load.formats.activations,
        "head={c.load.formats.head.value}", "it computes in one format throughout",
        "head={c.load.formats.activations.value}",
    ),
    *formats_of(_QUANTIZATION, _CACHE, none="no recipe of it has these", kv="kv=int8"),
)  # fmt: skip


def _settings(choices: ServingChoices, layout: ServingLayout) -> dict[str, Any]:
    formats = choices.load.formats
    out: dict[str, Any] = {
        "model_name": _MODELS[choices.model.name],
        "tokenizer_path": '"$TOKENIZER"',
        "tokenizer_type": "huggingface",
        "load_parameters_path": '"$CHECKPOINT"',
        "scan_layers": False,
        "ici_tensor_parallelism": layout.tensor,
        "ici_fsdp_parallelism": layout.fsdp,
        "ici_expert_parallelism": layout.expert,
        "ici_autoregressive_parallelism": 1,
        "max_prefill_predict_length": choices.longest_prompt,
        "max_target_length": choices.longest,
        "per_device_batch_size": exact(choices.setup.batch / layout.engine_chips),
        "enable_prefix_caching": False,
    }
    out |= dict.fromkeys(("dtype", "weight_dtype"), _DTYPES[formats.activations])
    if not choices.wide:
        out |= {"quantization": _QUANTIZATION[choices.formats], "checkpoint_is_quantized": True}
    if formats.kv in _CACHE:
        out |= {"quantize_kvcache": True, "kv_quant_dtype": _CACHE[formats.kv]}
    return out
