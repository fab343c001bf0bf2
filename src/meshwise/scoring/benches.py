"""Results of serving benchmarks, in the JSON that people have, as measured rows: time per output token under its load.

Of vLLM (`vllm bench serve`), SGLang (`bench_serving`), guidellm and inference-perf. Requests that decode at once follow
from Little's law, however they came: requests a second times the seconds that one decodes. So bursts, closed loops and
Poisson arrivals are one. Not here: the columns (`rows`), or predicting them (`serving`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.core.files import parse_json
from meshwise.hardware import parse_cluster
from meshwise.scoring.rows import ServingRun, UnreadRow
from meshwise.scoring.scenario import names_a_model

#: What a result may be of, for messages.
_KNOWN = "a result of vllm bench serve, SGLang's bench_serving, guidellm or inference-perf"


@dataclass(frozen=True)
class Served:
    """What results do not say of a run.

    Args:
        on: chips, as `--on` takes them.
        model: a name; "" for that of the result.
        tensor: chips of an engine; None for all.
        weights: format of weights; "" for 16 bits.
    """

    on: str
    model: str = ""
    tensor: int | None = None
    weights: str = ""


@dataclass(frozen=True)
class _Result:
    """One run of a benchmark.

    Args:
        model, engine: as it says; "" where it does not.
        tpot: seconds of an output token after the first, mean.
        rate: requests a second that ended.
        prompt, output: tokens, mean.
    """

    model: str
    engine: str
    tpot: float
    rate: float
    prompt: float
    output: float


def is_bench(text: str) -> bool:
    """Whether a text is JSON, not CSV."""
    return text.lstrip()[:1] in ("{", "[")


def read_bench(text: str, where: str, served: Served) -> tuple[ServingRun | UnreadRow, ...]:
    """Read the text of a file of results: one, a list, or one a line. Errors call it `where`.

    Returns: a row for each result; one that lacks a number says so.

    Raises:
        MeshwiseError: no JSON, or of no benchmark that is known; chips that are not.
    """
    cluster = parse_cluster(served.on)
    tensor = served.tensor or cluster.num_chips
    if cluster.num_chips % tensor:
        raise MeshwiseError(
            f"--tensor {tensor}: expected a divisor of the {cluster.num_chips} chips of --on {served.on}"
        )
    rows: list[ServingRun | UnreadRow] = []
    for number, document in enumerate(_documents(text, where), 1):
        name = f"result {number}"
        try:
            found = _result(document)
            rows.append(_row(found, name, served, cluster.chip.name, (cluster.num_chips, tensor)))
        except MeshwiseError as error:
            rows.append(UnreadRow(name, f"{where}, {name}: {error}"))
    return tuple(rows)


def _documents(text: str, where: str) -> Iterator[Mapping[str, Any]]:
    """Each result of a file; guidellm keeps several in one."""
    try:
        whole = [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError:
        whole = [parse_json(text, where)]
    for document in (d for one in whole for d in (one if isinstance(one, list) else [one])):
        if not isinstance(document, dict):
            raise MeshwiseError(f"{where}: expected {_KNOWN}, found {type(document).__name__}")
        benchmarks = document.get("benchmarks")
        yield from benchmarks if isinstance(benchmarks, list) else [document]


def _row(found: _Result, name: str, served: Served, chip: str, sizes: tuple[int, int]) -> ServingRun:
    model = served.model or _published(found.model)
    num_chips, tensor = sizes
    decoding = found.rate * found.tpot * max(found.output - 1, 0)
    return ServingRun(
        id=name,
        source="own",
        chip=chip,
        model=model,
        n_chips=num_chips,
        tp=tensor,
        engine=found.engine,
        weights_dtype=served.weights,
        serving_mode="continuous batching",
        phase="prefill+decode",
        batch=max(round(decoding / (num_chips // tensor)), 1),
        prompt_len=max(round(found.prompt), 1),
        output_len=max(round(found.output), 1),
        measured_metric="tpot",
        measured_value=found.tpot,
        unit="s",
    )


def _published(name: str) -> str:
    """The model that a name of a checkpoint, or its path, means: without its owner, and what it was tuned for.

    Raises:
        MeshwiseError: no built-in is meant.
    """
    last = name.rstrip("/").rpartition("/")[2]
    plain = re.sub(r"(?i)^meta-|-(?:instruct|chat|it|hf|base|fp8|awq|gptq|nvfp4|w8a8|dynamic|kv)\b", "", last)
    if found := next((known for known in (last, plain) if known and names_a_model(known)), None):
        return found
    raise MeshwiseError(f"its model is {name!r}, which is not a name that is known here; give --model")


def _result(document: Any) -> _Result:
    """What one result says, whichever benchmark wrote it."""
    if not isinstance(document, dict):
        raise MeshwiseError(f"expected {_KNOWN}, found {type(document).__name__}")
    if "mean_tpot_ms" in document:
        return _of_engines(document)
    if isinstance(document.get("successes"), dict):
        return _of_inference_perf(document["successes"])
    if isinstance(document.get("metrics"), dict):
        return _of_guidellm(document)
    raise MeshwiseError(f"expected {_KNOWN}; found the keys {', '.join(map(str, list(document)[:6])) or 'none'}")


def _of_engines(d: Mapping[str, Any]) -> _Result:
    """Of vLLM and SGLang, whose keys are the same."""
    done = _number(d, "completed")
    return _Result(
        model=str(d.get("model_id") or d.get("model") or ""),
        engine=str(d.get("backend") or d.get("endpoint_type") or ""),
        tpot=_number(d, "mean_tpot_ms") / 1e3,
        rate=done / _number(d, "duration"),
        prompt=_number(d, "total_input_tokens") / done,
        output=_number(d, "total_output_tokens") / done,
    )


def _of_inference_perf(d: Mapping[str, Any]) -> _Result:
    """Of inference-perf: what its requests that succeeded took."""
    return _Result(
        model="",
        engine="",
        tpot=_number(d, "latency", "time_per_output_token", "mean"),
        rate=_number(d, "throughput", "requests_per_sec"),
        prompt=_number(d, "prompt_tokens" if "prompt_tokens" in d else "prompt_len", "mean"),
        output=_number(d, "output_tokens" if "output_tokens" in d else "output_len", "mean"),
    )


def _of_guidellm(d: Mapping[str, Any]) -> _Result:
    """Of guidellm, whose time between tokens leaves the first one out (its time per token does not)."""
    metrics = d["metrics"]
    return _Result(
        model=str(_found(d, "worker", "backend_model") or _found(d, "config", "backend", "model") or ""),
        engine="",
        tpot=_number(metrics, "inter_token_latency_ms", "successful", "mean") / 1e3,
        rate=_number(metrics, "requests_per_second", "successful", "mean"),
        prompt=_number(metrics, "prompt_token_count", "successful", "mean"),
        output=_number(metrics, "output_token_count", "successful", "mean"),
    )


def _found(d: object, *path: str) -> object:
    for key in path:
        d = d.get(key) if isinstance(d, dict) else None
    return d


def _number(d: Mapping[str, Any], *path: str) -> float:
    value = _found(d, *path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise MeshwiseError(f"{'.'.join(path)}: expected a number above 0, found {value!r}")
    return float(value)
