"""What measurements of several engines have in common: requests of the plan's lengths, as many at once.

Sources of the options: vLLM 0.33.0, `vllm/benchmarks/serve.py` and `datasets/datasets.py`; TensorRT-LLM,
`tensorrt_llm/serve/scripts/benchmark_serving.py` at commit 0228a71, which has the same names.
Not here: SGLang's and MaxText's (`sglang`, `jetstream`).
"""

from __future__ import annotations

from meshwise.handover.serving.choices import ServingChoices

__all__ = ["MEASURED", "serving_benchmark"]

#: How a measurement is to be read.
MEASURED = (
    "'bench' keeps as many requests on their way as the plan has; the first ones come at once and wait for each other, "
    "so compare medians of TTFT and TPOT"
)


def serving_benchmark(choices: ServingChoices) -> dict[str, str | int | float | None]:
    """Give the options of a closed loop of requests of the plan's lengths."""
    load = choices.load
    return {
        "--model": '"$MODEL"',
        "--dataset-name": "random",
        "--random-input-len": int(load.computed),
        "--random-prefix-len": int(load.cached_prefix),
        "--random-output-len": int(load.output),
        "--random-range-ratio": "0.0",
        "--ignore-eos": None,
        "--num-prompts": choices.num_prompts,
        "--max-concurrency": choices.on_their_way,
        "--request-rate": "inf",
        "--seed": 0,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,90,99",
    }
