"""What measurements of several engines have in common: requests of the plan's lengths, as many at once.

Sources of the options: vLLM 0.33.0, `vllm/benchmarks/serve.py` and `datasets/datasets.py`; TensorRT-LLM,
`tensorrt_llm/serve/scripts/benchmark_serving.py` at commit 0228a71, which has the same names.
Not here: SGLang's and MaxText's (`sglang`, `jetstream`).
"""

from __future__ import annotations

from meshwise.exports.serving.choices import ServingChoices
from meshwise.exports.serving.script import Script
from meshwise.jobs.traffic import Fixed, Uniform, parse_lengths

#: How a measurement is to be read.
_MEASURED = (
    "'bench' keeps as many requests on their way as the plan has; the first ones come at once and wait for each other, "
    "so compare medians of TTFT and TPOT"
)


def drawn_alike(choices: ServingChoices) -> dict[str, float] | None:
    """How far lengths are from their means at most, as shares of these, where they are alike or uniform; else None.

    Of prompts without what is cached, which is the same for all.
    """
    load = choices.load
    if load.mix is None:
        return {"input": 0.0, "output": 0.0}
    if load.mix.prompt is None or load.mix.output is None:
        return None
    out = {}
    for name, text, cached in (("input", load.mix.prompt, load.cached_prefix), ("output", load.mix.output, 0.0)):
        lengths = parse_lengths(text)
        if not isinstance(lengths, Uniform | Fixed) or lengths.most is None:
            return None
        out[name] = round((lengths.most - lengths.least) / (lengths.most + lengths.least - 2 * cached), 6)
    return out


def mean_note(choices: ServingChoices) -> str:
    """Say that a measurement sends requests of the mean length."""
    words = choices.load.mix.words if choices.load.mix else ""
    return f"'bench' sends requests of the mean length, the plan has {words}"


def serving_benchmark(choices: ServingChoices) -> dict[str, str | int | float | None]:
    """Give the options of a closed loop of requests of the plan's lengths."""
    load = choices.load
    return {
        "--model": '"$MODEL"',
        "--dataset-name": "random",
        "--random-input-len": choices.new_tokens,
        "--random-prefix-len": int(load.cached_prefix),
        "--random-output-len": choices.output_tokens,
        "--random-range-ratio": "0.0",
        "--ignore-eos": None,
        "--num-prompts": choices.num_prompts,
        "--max-concurrency": choices.on_their_way,
        "--request-rate": "inf",
        "--seed": 0,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,90,99",
    }


def add_measurement(choices: ServingChoices, script: Script, run: list[str]) -> None:
    """End a script with the command that measures, how its numbers are to be read, and how the script is run."""
    script.add("bench", "measure what was predicted", run=run)
    script.notes.append(_MEASURED)
    first = "prefill, decode and router" if choices.apart else "serve"
    script.use = f"bash THIS_FILE {first}, each where it is to run; when they answer, bash THIS_FILE bench"
