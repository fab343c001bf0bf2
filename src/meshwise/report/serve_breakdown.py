"""The workings of a serving estimate: formula, substitution, result and source of each number.

Not here: the numbers (`costs.serving`).
"""

from __future__ import annotations

from meshwise.core.explanation import Explanation
from meshwise.core.units import format_bytes, format_count, format_flops, format_money, format_percent, format_time
from meshwise.costs.problem import ServingProblem, Step
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.costs.serving.engine import SlowOperation, slowest_operations

_OWN = "meshwise, docs/serving.md"
_BOOK = "book, Inference"
_NOTHING = 1e-12  # seconds
_RESERVE = "--reserve; engines leave a tenth by default (vLLM's gpu_memory_utilization 0.9)"


def serve_explanations(problem: ServingProblem, e: ServingEstimate) -> tuple[Explanation, ...]:
    """Explain latencies, throughput, cost, memory, and the operations that take most of each step."""
    return (
        *_latency(e),
        *_rate(e),
        *_operations(problem, e),
        *_memory(problem, e),
    )


def _latency(e: ServingEstimate) -> tuple[Explanation, ...]:
    setup = e.setup
    aggregated = setup.mode == "aggregated"
    further = e.output - 1
    prefill, step = format_time(e.prefill.seconds.expected), format_time(e.decode.seconds.expected)
    together = setup.prefill_batch
    first = f"{prefill} + {format_time(e.handover_s)}" + (f" + {step} / 2" if aggregated else "")
    first += f" + {format_time(e.gathering_s)}" if together > 1 else ""
    ttft = Explanation(
        "TTFT",
        "prefill + handover of the cache"
        + (" + half a decode step" if aggregated else "")
        + (f" + (prompts together - 1) / 2 x gap between requests, {together} together" if together > 1 else ""),
        first,
        format_time(e.ttft.expected),
        _OWN,
    )
    per_prompt = e.prefill.interval / setup.prefill_batch
    others = setup.batch - 1
    between = f" + {others} / {further:g} x {format_time(per_prompt)}" if aggregated and further and others else ""
    gained = e.decode.seconds.expected / (e.tpot.expected - (per_prompt * others / further if between else 0))
    tpot = Explanation(
        "TPOT",
        "decode step / tokens a step gives"
        + (" + (batch - 1) / (output - 1) x prefill of a prompt" if between else ""),
        f"{step} / {gained:.3g}{between}",
        format_time(e.tpot.expected),
        _OWN,
    )
    return ttft, tpot


def _rate(e: ServingEstimate) -> tuple[Explanation, ...]:
    given = f"{e.requests_per_s:.4g}/s x {e.output:g} / {e.setup.num_chips}"
    rate = f"{e.throughput_per_chip:,.1f}"
    rows = (Explanation("throughput per chip", "requests/s x output tokens / chips", given, f"{rate} tokens/s", _OWN),)
    if e.usd_per_chip_hour is None or e.usd_per_million_output_tokens is None:
        return rows
    cost = Explanation(
        "cost of a million output tokens",
        "price of a chip-hour / 3600 / throughput per chip x 1e6",
        f"{format_money(e.usd_per_chip_hour)} / 3600 / {rate} x 1e6",
        format_money(e.usd_per_million_output_tokens),
        "the catalog's price, or --price",
    )
    return (*rows, cost)


def _operations(problem: ServingProblem, e: ServingEstimate) -> tuple[Explanation, ...]:
    steps: tuple[Step, Step] = ("prefill", "decode")
    return tuple(_operation(step, op) for step in steps for op in slowest_operations(problem, e.setup, step))


def _operation(step: str, op: SlowOperation) -> Explanation:
    slower = "its bytes" if op.memory >= op.compute else "its FLOPs"
    waits = op.seconds - max(op.compute, op.memory)  # for its kernel to start, for experts' host, for what adds up
    started = waits > _NOTHING
    and_start = ", + start of its kernel" if started else ""
    return Explanation(
        f"{step}: {op.name} of {op.block} ({op.copies:g} times)",
        f"the longer of FLOPs / rate and bytes / HBM bandwidth, as achieved{and_start}",
        f"max({format_flops(op.flops)} in {format_time(op.compute)}, {format_bytes(op.num_bytes)} in "
        f"{format_time(op.memory)}){f' + {format_time(waits)}' if started else ''}",
        f"{format_time(op.seconds)}, {slower}; {format_time(op.copies * op.seconds)} in all",
        f"{_BOOK}, linear operations and attention",
    )


def _memory(problem: ServingProblem, e: ServingEstimate) -> tuple[Explanation, ...]:
    load, setup = problem.load, e.setup
    per_token = problem.model.kv_cache.bytes_per_token(load.formats.kv)
    kv = Explanation(
        "memory: kv_cache",
        "sum over layers of requests x tokens in whole blocks x what a chip holds of a token",
        f"{setup.batch} requests x {load.kept(float(setup.batch)):,.0f} tokens in blocks of {load.block_tokens}, "
        f"{format_bytes(per_token)} a token over all chips and layers",
        format_bytes(e.memory["kv_cache"]),
        _BOOK,
    )
    weights = Explanation(
        "memory: weights",
        "sum over layers of parameters x bytes / ways that share them",
        f"{format_count(problem.model.parameters.total)} parameters in {load.formats.weights.value}, "
        f"{setup.decode.engine_chips} chips an engine",
        format_bytes(e.memory["weights"]),
        _BOOK,
    )
    share = f"{format_percent(load.reserve)} x {format_bytes(e.hbm_capacity)}"
    reserve = Explanation("memory: reserve", "share of HBM", share, format_bytes(e.memory["reserve"]), _RESERVE)
    return weights, kv, reserve
