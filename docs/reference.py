"""The page of reference: every command with its help, every field of JSON with its meaning.

Not here: the tables of chips, models and the like (`declared_tables`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from functools import cache
from typing import Any

import click
from declared_tables import code, table, tables

from meshwise.cli.main import COMMANDS, LazyGroup, main

__all__ = ["commands", "json_rows", "reference_page"]

_TRAIN = ("llama-3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "1Mi", "--seq-len", "4096", "--tokens", "1T")

#: What is searched decides no field of the answer: a small space has them all.
_FORBIDDEN = "pipeline,ulysses,context,offload,partial-remat,remat=attention,remat=matmuls"

#: Fields that every verb's JSON has.
ENVELOPE = {
    "schema_version": 'changes when a field changes its meaning or goes away, not when one is added; now "1"',
    "command": "the verb",
    "inputs.*": "what was asked, defaults included; text with units is parsed, units are in the names",
    "answer": "the first line that a terminal shows",
    "assumed[]": "what was assumed, one sentence each",
    "not_modelled[]": "what the numbers leave out",
    "explanations[].*": "with `--explain`: name, formula, substitution, result, source",
}

_PLAN = {
    "plans[].layout.*": "mesh axis -> size; all seven axes, 1 where unused",
    "plans[].layout_text": "the layout as `--layout` reads it",
    "plans[].choices.zero": "what `data` replicas share: 0 nothing, 1 optimizer state, 2 also gradients",
    "plans[].choices.fully_sharded": "whether `context`, `ulysses` and `expert` share out the weights that all their "
    "devices use, as `fsdp` does",
    "plans[].choices.sequence_parallel": "whether the residual stream is split over `tensor` between matmuls",
    "plans[].choices.expert_tensor_parallel": "whether `tensor` splits the width of an expert, else their number",
    "plans[].choices.context_method": "how keys and values of other positions reach attention over `context`",
    "plans[].choices.collective_matmul": "whether the compiler or the program runs collectives of `tensor` "
    "beside their products",
    "plans[].choices.expert_dispatch": "whether tokens are given to experts in slots, or ragged: as many as there are",
    "plans[].choices.loss": "whether the head makes the logits of a microbatch at once, or chunk by chunk",
    "plans[].choices.schedule": "the order in which pipeline stages work through microbatches",
    "plans[].choices.virtual_stages": "pieces of the model that each pipeline stage holds",
    "plans[].choices.remat": "what is computed again in the backward pass",
    "plans[].choices.remat_layers": "how many layers do so, the others keep everything; null for all",
    "plans[].choices.offload[]": "what lives in the host's memory",
    "plans[].choices.offload_layers": "of how many layers activations are offloaded; null for all",
    "plans[].choices.micro_batch": "sequences that one group of data x fsdp x expert works on at a time",
    "plans[].choices.num_microbatches": "microbatches a step",
    "plans[].estimate.host_capacity_bytes": "a chip's share of its host's memory; null where it is not known",
    "plans[].estimate.host_memory_bytes.*": "bytes in the host's memory for one chip, by class",
    "plans[].choices.wires.*": "mesh axis -> its extent on each dimension of the network",
    "plans[].network[].name": "dimensions of the network, innermost first",
    "plans[].network[].size": "chips along it that the plan uses",
    "plans[].runs_in[]": "tools that take the plan as it is (--tool, export --to)",
    "plans[].num_chips": "chips that the plan uses; fewer than the cluster's where that is better",
    "plans[].tokens_per_step": "the batch after rounding to what divides",
    "plans[].estimate.step_time_s.*": "lower (data-sheet rates, perfect overlap), expected, upper (no overlap, but the "
    "rates of `expected`); unless the calibration is of single operations alone, interval_80: low and high of four of "
    "five steps, which may end above `upper`: rates may be lower than expected",
    "plans[].estimate.terms.*": "exposed seconds by term; they add up to the expected step time",
    "plans[].estimate.hidden_s.*": "seconds of communication hidden behind compute, by mesh axis",
    "plans[].estimate.resources_s.*": "seconds that each resource is busy at data-sheet rates; the largest is `lower`",
    "plans[].estimate.tokens_per_s": "of the whole layout, expected",
    "plans[].estimate.mfu": "model FLOPs over expected time x chips x peak",
    "plans[].estimate.hfu": "the same with recomputed FLOPs",
    "plans[].estimate.model_flops": "of a step: 6 x active parameters x tokens, plus attention",
    "plans[].estimate.recompute_flops": "of a step, done again because of remat",
    "plans[].estimate.peak_flops_per_s_per_chip": "the denominator's rate",
    "plans[].estimate.memory_bytes.*": "bytes by class on the fullest chip, and their total",
    "plans[].estimate.hbm_capacity_bytes": "of one chip",
    "plans[].estimate.fits": "whether the total is within it",
    "plans[].estimate.bound": "the busiest resource: compute, hbm, or a mesh axis",
    "plans[].estimate.collectives[].block": "layer, embed or head",
    "plans[].estimate.collectives[].pass": "forward, recompute, backward, or once a step",
    "plans[].estimate.collectives[].kind": "all-gather, reduce-scatter, all-reduce, all-to-all, permute",
    "plans[].estimate.collectives[].tensors[]": "what moves",
    "plans[].estimate.collectives[].mesh_axes[]": "the group it runs over",
    "plans[].estimate.collectives[].purpose": "activations, weights or gradients",
    "plans[].estimate.collectives[].term": "the term of the step's time that it counts under",
    "plans[].estimate.collectives[].count_per_step": "how often",
    "plans[].estimate.collectives[].bytes": "of one of them, in the convention of `meshwise collective`",
    "plans[].estimate.collectives[].seconds_each": "expected",
    "plans[].estimate.collectives[].seconds_per_step": "expected; hidden and exposed together",
    "plans[].estimate.collectives[].exposed_s": "a step",
    "plans[].estimate.collectives[].hidden_s": "a step",
    "plans[].estimate.padding[]": "axes that do not divide evenly, and what they are padded to",
    "plans[].cost_usd_per_billion_tokens": "expected; null where no price is known",
    "plans[].training.steps": "steps of the whole run; `training` is null without `--tokens`",
    "plans[].training.days": "expected",
    "plans[].training.days_interval.*": "lower, expected, upper",
    "plans[].training.chip_hours": "expected",
    "plans[].training.cost_usd": "chip-hours x price; null where no price is known",
    "plans[].training.energy_kwh": "chips at their rated power, hosts and cooling left out",
    "calibration.name": "achieved rates that times were priced at; there unless they are of single operations alone",
    "calibration.source": "where they are from",
    "calibration.constants[].*": "each of them: name, value, unit, source",
    "reasons[]": "why the best is best",
    "workings.rules.*": "with `--explain`: the rule of the expected time, by number",
    "workings.blocks[].*": "with `--explain`: each block's operations: FLOPs, bytes, seconds, what binds, padding; of "
    "each pass FLOPs, seconds and `least_bytes`, the HBM traffic that the lower bound counts",
    "workings.collectives[].*": "with `--explain`: each collective with its wire, latency, and the rule that hides it",
    "workings.memory[].*": "with `--explain`: each class of memory as the sum of its parts",
    "workings.kept_activations.*": "with `--explain`: what a block keeps for its backward pass",
    "workings.weights[].*": "with `--explain`: each weight and how many ways it is split",
    "workings.schedule": "with `--explain`: the pipeline's schedule",
    "workings.host_streams[]": "with `--explain`: streams between chip and host, with what hides them",
    "workings.chunks_s.*": "with `--explain`: passes of one microbatch in the first, a middle and the last chunk of "
    "the model, exposed communication included",
    "workings.boundary_bytes": "with `--explain`: what one stage sends to the next",
    "workings.send_s": "with `--explain`: seconds of one such send",
    "workings.optimizer_bytes": "with `--explain`: training state read and written by the optimizer",
    "workings.optimizer_matmul_s": "with `--explain`: matmuls of the optimizer at the data-sheet rate",
}

_ENGINE = {
    "layout": "as `--layout` reads it",
    "layout_fields.*": "every axis and choice, and where the axes lie on the network",
    "batch": "prompts that are prefilled together, or requests that decode at once, on one engine",
    "seconds.*": "lower (data-sheet rates, perfect overlap), expected, upper (no overlap): of all steps of a prefill, "
    "of one decode step",
    "terms.*": "exposed seconds by term; they add up to the expected time",
    "hidden_s.*": "seconds of communication that were hidden, by network",
    "resources_s.*": "seconds that each resource is busy at data-sheet rates",
    "memory_bytes.*": "bytes by class on the fullest chip, and their total",
    "bound": "the busiest resource: compute, hbm, or a network",
}

_SERVING = {
    "plans[].runs_in[]": "engines that take the plan as it is (--tool, export --to)",
    "plans[].mode": "aggregated engines prefill and decode in turn, disaggregated ones do one of the two",
    "plans[].num_chips": "of all engines",
    "plans[].idle_chips": "of the cluster, in no engine",
    "plans[].batch": "requests that decode at once on one engine",
    **{f"plans[].{step}.{name}": what for step in ("prefill", "decode") for name, what in _ENGINE.items()},
    "plans[].prefill.chunk_tokens": "tokens of a prompt that are prefilled in one step; null for all",
    "plans[].gathering_s": "mean seconds that a prompt waits for the others that are prefilled with it",
    "plans[].handover_s": "seconds in which a prompt's cache gets to where it is read",
    "plans[].ttft_s": "time to first token, expected; its definition is printed",
    "plans[].ttft_interval_s.*": "lower, expected, upper",
    "plans[].tpot_s": "time per output token after the first, expected; its definition is printed",
    "plans[].tpot_interval_s.*": "lower, expected, upper",
    "plans[].end_to_end_s": "from a request's arrival to its last token, without queueing",
    "plans[].requests_per_s": "of all engines, kept full",
    "plans[].output_tokens_per_s": "of all engines",
    "plans[].throughput_tokens_per_s": "the same",
    "plans[].throughput_tokens_per_s_per_chip": "the same over all chips",
    "plans[].prefill_share": "of the time of aggregated engines, or of the chips of disaggregated ones",
    "plans[].cost_usd_per_million_output_tokens": "all dollars over output tokens; null where no price is known",
    "plans[].cost_usd_per_million_input_tokens": "prefill's share of the dollars over the tokens that it computes",
    "plans[].memory_bytes.*": "bytes by class on the fullest chip of the engines that decode",
    "plans[].hbm_capacity_bytes": "of one chip",
    "plans[].fits": "whether the fullest chips suffice",
    "plans[].largest_batch": "requests of this length that would fit on one engine",
    "plans[].bound": "the busiest resource of the decode step",
}

_SERVE = ("llama-3-70b", "--on", "h100:8", "--prompt", "1024", "--output", "256", "--precision", "fp8")

#: Verb -> the words that produce its JSON, and what each field means.
FIELDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "model": (
        ("model", "llama-3-70b"),
        {
            "model.name": "as asked, or the file's folder",
            "model.family": "the architecture that the configuration names",
            "model.num_layers": "blocks",
            "model.max_seq_len_tokens": "longest sequence the configuration allows; null where it says nothing",
            "model.hub_names[]": "other names of a built-in",
            "model.source.*": "where the configuration was read, and when",
            "axis_sizes.*": "axis letter -> size (see docs/sharding.md)",
            "parameters.total": "all parameters",
            "parameters.language": "without vision and audio towers",
            "parameters.active": "those that one token meets (all, unless experts are chosen)",
            "parameters.by_part.*": "they add up to the total",
            "parameters.multi_token_prediction": "extra modules, not in the total",
            "kv_cache.dtype": "the format the bytes are in",
            "kv_cache.bytes_per_token": "no window full yet",
            "kv_cache.growing_bytes_per_token": "once every window is full",
            "kv_cache.windowed_bytes_per_token": "of layers with a window",
            "kv_cache.windowed_bytes_max": "what those layers hold at most",
            "kv_cache.index_bytes_per_token": "more, by which indexers find keys",
            "kv_cache.state_bytes": "states of recurrences, of one sequence of any length",
            "kv_cache.bytes_per_sequence": "at the length of `flops.seq_len_tokens`",
            "flops.seq_len_tokens": "the sequence that FLOPs are counted for",
            "flops.forward_per_token": "matrix products, attention as computed (causal, windowed)",
            "flops.forward_per_token_attention_full": "with attention over every pair",
            "flops.training_per_token": "three times forward; recomputation not counted",
            "notes[]": "what the reader of the configuration has to say",
        },
    ),
    "plan train": (
        ("plan", "train", *_TRAIN, "--on", "v5p:2x2x2", "--front", "--sensitivity", "--forbid", _FORBIDDEN),
        {
            **_PLAN,
            "rejected[].name": "a well-known alternative",
            "rejected[].reason": "why it loses, with its number",
            "rejected[].slowdown": "expected time per token over the best plan's; null where it cannot be priced",
            "rejected[].memory_bytes": "of its fullest chip",
            "rejected[].fits": "whether that fits in what plans may fill",
            "pareto_front[].layout.*": "layouts that no other undercuts in both time and memory, fastest first",
            "pareto_front[].layout_text": "the same as text",
            "pareto_front[].num_chips": "chips it uses",
            "pareto_front[].time_s_per_token": "expected",
            "pareto_front[].memory_bytes": "of its fullest chip",
            "sensitivity[].name": "with `--sensitivity`: what is less",
            "sensitivity[].change": "by which share, negative",
            "sensitivity[].slowdown": "time per token of the best plan then over that before; null where there is none",
            "sensitivity[].kept_slowdown": "that of the plan as it was; null where it cannot be, or does not fit",
            "sensitivity[].same_plan": "whether the best plan has the layout as it was",
            "sensitivity[].layout_text": "the best layout then",
            "sensitivity[].reason": "why there is none",
            "search.strategies": "layouts examined: their arithmetic evaluated, or priced in full",
            "search.priced": "layouts priced in full, in time and memory",
            "search.covered": "complete layouts that were laid out on the network, also placements that another beats",
            "search.infeasible": "of the priced ones, those that do not fit",
            "search.cpu_s": "CPU seconds",
            "search.complete": "whether the search came to its end; false after Ctrl-C or --time-limit",
            "search.gap": "share by which the best may still be from the optimum; 0 when that is proved",
            "search.interrupted_on_chips": "chips of the network that was searched when it was interrupted, else null",
            "search.most_speedup": "how many times as fast as the best a plan could be whose chips only computed",
        },
    ),
    "estimate train": (
        ("estimate", "train", *_TRAIN, "--layout", "fsdp=16,tensor=4", "--measured", "1s"),
        {
            **_PLAN,
            "changes[].change": "one thing changed that gains, or with which it fits (two where one is too little)",
            "changes[].layout_text": "the layout so changed",
            "changes[].speedup": "its tokens per second over those of the layout",
            "changes[].step_time_s": "expected",
            "changes[].memory_bytes": "of its fullest chip",
            "measured.seconds": "with `--measured`: your own step time",
            "measured.verdict": "impossible (under the lower bound), expected (within the interval), fast or slow",
            "measured.excess_s": "over the expected step time",
            "measured.terms[].term": "a term of the step",
            "measured.terms[].exposed_s": "expected seconds that the step waits for it",
            "measured.terms[].hidden_s": "expected seconds of it that compute hides",
            "measured.terms[].factor": "times its own seconds that it would take to explain the difference alone",
            "measured.terms[].verdict": "hidden (if nothing hides it), spread (in the interval), slow, or no",
        },
    ),
    "fit": (
        ("fit", "llama-3-8b", "--on", "h100:2"),
        {
            "context_tokens": "of a request, and of a training sequence",
            "serving[].precision": "number formats",
            "serving[].layout": "of one engine",
            "serving[].num_chips": "of one engine",
            "serving[].engines": "that the cluster holds",
            "serving[].weight_bytes": "on the fullest chip",
            "serving[].largest_batch": "requests of the context at once on one engine; 0 where one does not fit",
            "serving[].longest_context_tokens": "of a single request that fits, no more than the model reads",
            "training[].precision": "number formats",
            "training[].fine_tune": "what is trained",
            "training[].layout_text": "the split, in its leanest form",
            "training[].state_bytes": "on the fullest chip, whatever the batch",
            "training[].memory_bytes": "in all, with one sequence",
            "training[].largest_micro_batch": "most sequences in a microbatch; 0 where one does not fit",
            "training[].longest_sequence_tokens": "of a single sequence that fits, no more than the model reads",
        },
    ),
    "plan serve": (
        ("plan", "serve", *_SERVE),
        {
            **_SERVING,
            "neighbours[].name": "an alternative to the best plan",
            "neighbours[].reason": "why it loses, with its number",
            "pareto[].tpot_s": "plans that no other beats in both time per output token and throughput, fastest first",
            "pareto[].ttft_s": "time to first token",
            "pareto[].output_tokens_per_s": "of all engines",
            "pareto[].throughput_tokens_per_s_per_chip": "the same over the chips that it uses",
            "pareto[].mode": "aggregated or disaggregated",
            "pareto[].batch": "requests that decode at once on one engine",
            "pareto[].num_chips": "of all engines",
            "pareto[].prefill_layout": "as text",
            "pareto[].decode_layout": "as text",
            "search.configurations": "layouts with a place on the network and a batch, of both steps, each priced",
            "search.pairs": "of prefill and generation that were put together",
            "search.complete": "whether the search came to its end; false after Ctrl-C or --time-limit",
            "search.gap": "share by which the best may still be from the optimum; 0 when complete, 1 when not known",
            "search.cpu_s": "CPU seconds",
        },
    ),
    "estimate serve": (
        ("estimate", "serve", *_SERVE, "--layout", "tensor=8", "--batch", "64"),
        {
            **_SERVING,
            "reasons[]": "why it does not fit, and which axes leave the innermost switch",
            "changes[].change": "one thing changed that gains most tokens, or with which it fits",
            "changes[].layout_text": "the layout so changed; of engines apart, the one that decodes",
            "changes[].speedup": "its tokens per second over those of the layout",
            "changes[].ttft_s": "expected",
            "changes[].tpot_s": "expected",
            "changes[].memory_bytes": "of its fullest chip",
            "frontier[].batch": "requests on one engine",
            "frontier[].longest_request_tokens": "tokens that each may have, prompt and output together, to just fit",
        },
    ),
}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every verb with its click command; of a group, its verbs."""
    for name, entry in COMMANDS.items():
        command = entry.load()
        if isinstance(command, LazyGroup):
            for verb, inner in command.lazy.items():
                yield f"{name} {verb}", inner.load()
        else:
            yield name, command


def _help(name: str) -> str:
    """What `meshwise NAME --help` prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main([*name.split(), "--help"]) == 0
    return out.getvalue()


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """Yield every path of a JSON value, `a.b[].c`; empty lists and mappings end a path."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        for inner in value:
            yield from _leaves(inner, f"{path}[]")
    elif isinstance(value, list):
        yield f"{path}[]"
    else:
        yield path


def _matches(pattern: str, path: str) -> bool:
    return path == pattern or (pattern.endswith(".*") and f"{path}.".startswith(pattern[:-1]))


def json_rows(verb: str) -> list[tuple[str, str]]:
    """List the fields of a verb's JSON, each with its meaning.

    Raises:
        AssertionError: a field without a meaning, or a meaning without its field.
    """
    words, meanings = FIELDS[verb]
    known = {**ENVELOPE, **meanings}
    found = set(_leaves(_answer(tuple(words))))
    unexplained = sorted(p for p in found if not any(_matches(k, p) for k in known))
    assert not unexplained, f"{verb}: JSON fields without a meaning in docs/reference.py: {unexplained}"
    gone = sorted(k for k in known if not any(_matches(k, p) for p in found))
    assert not gone, f"{verb}: docs/reference.py explains fields that are not there: {gone}"
    return list(meanings.items())


@cache
def _answer(words: tuple[str, ...]) -> Any:
    out = io.StringIO()
    with redirect_stdout(out):
        main([*words, "--json", "--explain"])
    return json.loads(out.getvalue())


_HEAD = """# Reference

Written by `python docs/generate.py` from the declarations in the code; a test fails when it is stale.

Exit codes of every command: 0 ok, 1 a bug of meshwise, 2 usage, 3 nothing feasible or a failed check, 4 an optional
dependency is missing, 130 interrupted. Errors go to stderr; with `--json` as `{"schema_version": "1", "error": {"kind",
"message", "exit_code"}}`.

"""

_JSON = """## JSON

With `--json` a command prints one object. Numbers are finite and in base units: bytes, seconds, FLOPs, tokens, dollars;
the unit stands in the name where it is not a count. Fields of every command:

"""


def reference_page() -> str:
    """Write the whole of reference.md."""
    t = tables()
    parts = [_HEAD, "## Commands\n\n"]
    for name, _ in commands():
        parts.append(f"### meshwise {name}\n\n```text\n{_help(name)}```\n\n")
    parts += [_JSON, table(("field", "meaning"), ((code(k), v) for k, v in ENVELOPE.items())), "\n"]
    for verb in FIELDS:
        rows = table(("field", "meaning"), ((code(k), v) for k, v in json_rows(verb)))
        parts.append(f"### {verb} --json\n\n{rows}\n")
    parts.append(f"Terms of a step's time, and classes of memory:\n\n{t['terms']}\n{t['memory']}\n")
    parts.append(
        "## Chips\n\nDense rates of one whole chip. `meshwise chips NAME` gives every number with its own source.\n\n"
        f"{t['chips']}\n"
    )
    parts.append(f"## Networks\n\n{t['networks']}\n## Machines\n\n{t['machines']}\n")
    parts.append(f"## Calibrations\n\n{t['calibrations']}\n")
    parts.append(f"## Models\n\nAny other model is read from its `config.json`.\n\n{t['models']}")
    return "".join(parts)
