"""The answer of `estimate serve`: latencies, throughput, where a step's time and memory go, what would fit.

Not here: the numbers (`costs.serving`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.units import format_bytes, format_money, format_percent, format_time
from meshwise.costs.calibration import Calibration
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import Engine, ServingAnswer, ServingEstimate, ServingSetup
from meshwise.costs.serving.memory import CLASSES
from meshwise.costs.serving.step import TERMS
from meshwise.exports.serving import serving_runs_in
from meshwise.report.chart import Bars, Beside, bars_svg
from meshwise.report.report import Details, Report, listed
from meshwise.report.serve_breakdown import serve_explanations
from meshwise.report.serve_diagnosis import serving_change_data, serving_change_words, serving_reasons
from meshwise.report.table import Columns, counted, picked, said, spaced, table
from meshwise.search.diagnosis import Change
from meshwise.search.plan import SimulatedPlan
from meshwise.search.serving import ServingPlan
from meshwise.simulation.serving import Quantiles

NOT_MODELLED = (
    "queues: latencies are those of a request that finds its engine ready; 'meshwise simulate serve' has arrivals",
    "tokenisation, and what the host does beside a step",
    "a draft model's own time (the tokens that it proposes are computed)",
)


def estimate_serve_report(
    answer: ServingAnswer, inputs: Mapping[str, Any], changes: Sequence[Change[ServingPlan]] = ()
) -> Report:
    """What one serving layout would do.

    Args:
        answer: the estimate and what else would fit.
        inputs: what was asked, with defaults.
        changes: single ones that gain, or with which it fits.
    """
    e, problem = answer.estimate, answer.problem
    why = serving_reasons(ServingPlan(problem, e))
    idle = idle_words(problem, e.setup, searched=False, rate=None)
    fits = "" if e.fits else "does not fit in memory: "
    return Report(
        command="estimate serve",
        inputs=inputs,
        answer=f"{fits}{serving_words(e)}",
        data={
            "plans": [serving_plan_data(problem, e)],
            "frontier": [{"batch": batch, "longest_request_tokens": tokens} for batch, tokens in answer.frontier],
            "reasons": list(why),
            "changes": serving_change_data(changes),
        },
        brief=said(brief_subject(problem, e, idle), *serving_bars(e), _fitting(answer)),
        reasons=why,
        body=said(
            Text(subject(problem, e.setup)),
            Text(idle) if idle else None,
            *(latency_table(e), term_table(e), memory_table(e)),
            _fitting(answer),
            listed("Why", why),
            listed("Definitions", definitions(e.setup)),
        ),
        assumed=assumed(problem, e.setup),
        not_modelled=NOT_MODELLED,
        next_steps=(*serving_change_words(changes, e), *(() if changes and not e.fits else _next_steps(answer))),
        details=lambda: Details(explanations=serve_explanations(problem, e)),
    )


def layouts_words(setup: ServingSetup) -> str:
    """How engines are organized, and the layouts of both phases."""
    both = f"{setup.decode}" if setup.one_layout else f"prefill {setup.prefill}; decode {setup.decode}"
    return f"{setup.mode}: {spaced(both)}"


@dataclass(frozen=True, slots=True)
class Served:
    """What a ranking says of a plan: of engines that are always full, or of simulated requests (times are p99).

    Args:
        tokens: output tokens per second of all chips.
        tpot, ttft: seconds; None of answers of one token, of none at all.
        usd: of a million output tokens; None without a price.
    """

    tokens: float
    tpot: float | None
    ttft: float | None
    usd: float | None

    @classmethod
    def of(cls, e: ServingEstimate, simulated: Sequence[SimulatedPlan] = ()) -> Served:
        """As simulated where the plan was."""
        sent = next((p for p in simulated if p.estimate is e), None)
        if sent is None:
            return cls(e.output_tokens_per_s, e.tpot.expected, e.ttft.expected, e.usd_per_million_output_tokens)
        found = (Quantiles.of(values) for values in (sent.result.tpot_s, sent.result.ttft_s))
        tpot, ttft = (None if each is None else each.p99 for each in found)
        return cls(sent.tokens_per_s, tpot, ttft, sent.usd_per_million_output_tokens)


#: Columns of tables of serving plans, whose rows have a `sign`, a `plan`, and what is `served`.
RANKED: Columns = {
    "": "sign",
    ">$/M out": ("served.usd", format_money),
    ">tokens/s": ("served.tokens", "{:,.0f}".format),
    ">tokens/s/chip": lambda row: f"{row['served'].tokens / row['plan'].setup.num_chips:,.1f}",
    ">TPOT": ("served.tpot", format_time),
    ">TTFT": ("served.ttft", format_time),
    ">chips": ("plan.setup.num_chips", "{:,}".format),
    ">batch": ("plan.setup.batch", "{:,}".format),
}


def serving_words(e: ServingEstimate) -> str:
    """How fast it is, in one line."""
    dollars = e.usd_per_million_output_tokens
    cost = "" if dollars is None else f", {format_money(dollars)} per million output tokens"
    return (
        f"TTFT {format_time(e.ttft.expected)}, TPOT {format_time(e.tpot.expected)}, "
        f"{e.output_tokens_per_s:,.0f} output tokens/s ({e.throughput_per_chip:,.1f} a chip){cost}"
    )


def serving_bars(e: ServingEstimate) -> tuple[RenderableType, ...]:
    """Where the time of both steps goes, and the memory of a chip."""
    prefill, decode, *held = _bars(e)
    return Beside(prefill, decode), Beside(*held) if len(held) > 1 else held[0]


def serving_estimate_report(e: ServingEstimate) -> Report:
    """What an estimate says without its problem."""
    fits = "" if e.fits else "does not fit in memory: "
    tables = (latency_table(e), term_table(e), memory_table(e))
    return Report(
        command="estimate serve",
        inputs={},
        answer=f"{fits}{serving_words(e)}",
        data=serving_data(e),
        brief=(latency_table(e), *serving_bars(e)),
        body=tables,
    )


def _bars(e: ServingEstimate) -> list[Bars]:
    """Of both steps' times, then of the memory of a chip of each kind of engine."""
    steps = {"a prefill": e.prefill, "a decode step": e.decode}
    times = [Bars(f"time of {name}: {format_time(x.seconds.expected)}", x.terms, x.seconds.expected, format_time)
             for name, x in steps.items()]  # fmt: skip
    roles = {"prefill": e.prefill, "decode": e.decode} if e.setup.mode == "disaggregated" else {"": e.decode}
    held = []
    for role, engine in roles.items():
        total, parts = engine.memory["total"], {n: b for n, b in engine.memory.items() if n != "total"}
        whole = max(total, e.hbm_capacity)
        share = format_percent(total / e.hbm_capacity)
        held.append(Bars(f"{role or 'memory of a'} chip: {format_bytes(total)} ({share})", parts, whole, format_bytes))
    return times + held


def estimate_serve_svg(answer: ServingAnswer) -> str:
    """Draw where the time of both steps and the memory of a chip go.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    return bars_svg(f"{answer.problem.model.name}: {answer.estimate.setup.decode}", _bars(answer.estimate))


def brief_subject(problem: ServingProblem, e: ServingEstimate, idle: str | None) -> RenderableType:
    """Name what is served, the layouts, who runs them, the bounds, and what a user has to know of the model."""
    takers = f"runs in {', '.join(serving_runs_in(problem, e.setup)) or 'no tool yet'}"
    bounds = "bounds: " + ", ".join(
        f"{name} {format_time(t.lower)} to {format_time(t.upper)}" for name, t in (("TTFT", e.ttft), ("TPOT", e.tpot))
    )
    notes = (f"note: {note}" for note in problem.notes[:1])
    return Text("\n".join(said(subject(problem, e.setup), idle, takers, bounds, *notes)))


def idle_words(problem: ServingProblem, setup: ServingSetup, *, searched: bool, rate: float | None) -> str | None:
    """How many chips of the cluster a plan leaves idle, and why; None where it uses all.

    Args:
        problem, setup: of the plan.
        searched: whether it is the best of a search, and not what a user wrote.
        rate: requests per second that are to be served, if so.
    """
    idle = problem.cluster.num_chips - setup.num_chips
    if not idle:
        return None
    engine = min(setup.prefill.engine_chips, setup.decode.engine_chips)
    why = "another engine of one kind alone serves no more" if setup.mode == "disaggregated" else "others do better"
    if rate is not None:
        why = f"{rate:g} requests/s need no more"
    elif not searched:
        why = "the layout leaves them"
    elif idle < engine:
        why = f"too few for another engine of {engine:,}"
    return f"idle: {counted(idle, 'chip')} of {problem.cluster.num_chips:,}: {why}"


def subject(problem: ServingProblem, setup: ServingSetup) -> str:
    """Name what is served, and the layouts."""
    load = problem.load
    mean = "" if load.mix is None else " on average"
    requests = f"{load.prompt:,.0f} tokens in, {load.output:,.0f} out{mean}, {setup.batch:,} at once on each engine"
    on = f"{setup.num_chips:,} x {problem.cluster.chip.title}"
    lines = [f"{problem.model.name} in {load.precision} on {on}, {requests}"]
    if setup.one_layout:
        lines.append(f"layout: {spaced(setup.decode)}")
    else:
        lines += [f"prefill: {spaced(setup.prefill)}", f"decode: {spaced(setup.decode)}"]
    return "\n".join(lines)


def latency_table(e: ServingEstimate) -> RenderableType:
    """Lay out latencies and steps with their intervals."""
    rows = {"TTFT": e.ttft, "TPOT": e.tpot, "prefill": e.prefill.seconds, "decode step": e.decode.seconds}
    cells = ((name, *map(format_time, (t.lower, t.expected, t.upper))) for name, t in rows.items())
    return table(["", ">lower", ">expected", ">upper"], cells)


def term_table(e: ServingEstimate) -> RenderableType:
    """Lay out where the time of both steps goes."""
    rows = []
    for name in TERMS:
        seconds = [engine.terms[name] for engine in (e.prefill, e.decode)]
        hidden = [engine.hidden.get(name, 0.0) for engine in (e.prefill, e.decode)]
        if any(seconds) or any(hidden):
            rows.append((name, *(_term(s, h) for s, h in zip(seconds, hidden, strict=True)), TERMS[name]))
    rows.append(("bound", e.prefill.bound, e.decode.bound, "the resource that is busiest at data-sheet rates"))
    return table(["term", ">!prefill", ">!decode", "what"], rows)


def _term(seconds: float, hidden: float) -> str:
    words = format_time(seconds) if seconds else "-"
    return f"{words} (+{format_time(hidden)} hidden)" if hidden > 0.01 * seconds else words


def memory_table(e: ServingEstimate) -> RenderableType:
    """Lay out the memory of the fullest chips by class."""
    disaggregated = e.setup.mode == "disaggregated"
    engines = (e.prefill, e.decode) if disaggregated else (e.decode,)
    columns = [">prefill", ">decode"] if disaggregated else [">bytes"]
    rows = [
        (name, *(format_bytes(engine.memory[name]) for engine in engines), what)
        for name, what in CLASSES.items()
        if any(engine.memory[name] for engine in engines)
    ]
    total = f"of {format_bytes(e.hbm_capacity)}"
    rows.append(("total", *(format_bytes(engine.memory["total"]) for engine in engines), total))
    return table(["memory of a chip", *columns, "what"], rows)


def _fitting(answer: ServingAnswer) -> RenderableType | None:
    e = answer.estimate
    lines = [f"{counted(e.largest_batch, 'request')} of this length, on each engine"] if e.largest_batch else []
    lines += [f"{counted(b, 'request')} of {tokens:,} tokens each" for b, tokens in answer.frontier]
    chunks = "" if answer.chunk is None else f" (prompts in chunks of {answer.chunk:,})"
    return listed(
        f"At most fit, on each engine{chunks}", lines or ["nothing: the weights and one request are too much"]
    )


def definitions(setup: ServingSetup) -> tuple[str, ...]:
    """What TTFT and TPOT mean here."""
    if setup.mode == "aggregated":
        waits = "half of the decode step that is running, and the prefill of its prompt"
        between = "a decode step, and its share of the prefills that come between"
    else:
        waits = "the prefill of its prompt, and sending its cache to an engine that decodes"
        between = "a decode step"
    if setup.prefill_batch > 1:
        waits += f"; and the wait for the others of {setup.prefill_batch} prompts that are prefilled together"
    return (
        f"TTFT: from a request's arrival to its first token, without queueing: {waits}",
        f"TPOT: (end-to-end - TTFT) / (output tokens - 1), the mean of a request: {between}",
    )


def assumed(problem: ServingProblem, setup: ServingSetup) -> tuple[str, ...]:
    """What the numbers rest on."""
    load, formats = problem.load, problem.load.formats
    engine = "engines always full: a new request takes the place of each that ends"
    longest = f"memory for all at their longest, in blocks of {load.block_tokens} tokens"
    roles = (
        f"{formats.name}: weights {formats.weights.value}, activations {formats.activations.value}, cache "
        f"{formats.kv.value}, multiplied in {formats.compute.value}; embedding and head {formats.head.value}"
    )
    return said(
        roles,
        f"calibration {problem.calibration.name}: {problem.calibration.source}"
        if problem.calibration.name != "none"
        else "data-sheet rates",
        _host(problem.calibration),
        *(_lengths(problem, setup) or (f"{engine}; {longest}",)),
        _speculation(problem),
        _together(setup),
        *problem.notes,
        None if setup.mode == "aggregated" else _NETWORK,
    )


_NETWORK = "caches travel over the cluster's slowest network, all chips of the smaller engine sending at once"


def _lengths(problem: ServingProblem, setup: ServingSetup) -> tuple[str, ...]:
    """What is assumed of requests of different lengths."""
    load, mix = problem.load, problem.load.mix
    if mix is None:
        return ()
    kept, read = load.kept(float(setup.batch)), f"{mix.mean_context:,.0f} tokens of each, the mean over steps"
    attended = f"{load.prompt:,.0f} tokens with attention as of {load.attended_prompt:,.0f} (root mean square)"
    memory = f"memory for {kept:,.0f} tokens of each request at its end, in blocks of {load.block_tokens}"
    return (
        f"{mix.words}; engines always full: a new request takes the place of each that ends",
        f"latencies are means over requests: a decode step reads {read}; a prefill computes {attended}",
        "layers with a window, and prefills that wait for their weights, are priced at the mean length",
        f"{memory}: {setup.batch:,} together need more once in 100 times; the longest has {mix.longest:,}",
    )


def _host(calibration: Calibration) -> str:
    """What the host adds to a step."""
    if not calibration.host_step and not calibration.host_request:
        return "the host adds nothing to a step"
    each = format_time(calibration.host_request)
    return f"the host adds {format_time(calibration.host_step)} to a step, and {each} for each of its requests"


def _speculation(problem: ServingProblem) -> str | None:
    load = problem.load
    if not load.draft_tokens:
        return None
    proposed = f"{load.draft_tokens} proposed tokens a step, each accepted with chance {load.acceptance:g}"
    return f"{proposed}: {load.tokens_per_step:.2f} tokens a step"


def _together(setup: ServingSetup) -> str | None:
    number = setup.prefill_batch
    if number == 1:
        return None
    return f"engines wait until {number} prompts are there; those of 'simulate serve' take prompts as they come"


def _next_steps(answer: ServingAnswer) -> tuple[str, ...]:
    e = answer.estimate
    if e.fits:
        return ("'meshwise plan serve' searches layouts and batches",)
    if e.largest_batch:
        return (f"--batch {e.largest_batch} fits",)
    return (
        "more chips an engine (tensor=, width=, expert=, stage=), or narrower formats (--precision fp8, int4-weights)",
    )


def serving_plan_data(problem: ServingProblem, e: ServingEstimate) -> dict[str, Any]:
    """A plan as JSON values: the estimate, who runs it, and what of the cluster it leaves out."""
    idle = problem.cluster.num_chips - e.setup.num_chips
    return {"runs_in": list(serving_runs_in(problem, e.setup)), "idle_chips": idle, **serving_data(e)}


_ENGINE = "seconds terms hidden_s=hidden resources_s=resources memory_bytes=memory bound"


def serving_data(e: ServingEstimate) -> dict[str, Any]:
    """An estimate as JSON values."""
    setup = e.setup
    return {
        **picked(setup, "mode num_chips batch"),
        "prefill": {
            **_engine_data(e.prefill, setup.prefill),
            **picked(setup, "batch=prefill_batch chunk_tokens=chunk"),
        },
        "decode": {**_engine_data(e.decode, setup.decode), "batch": setup.batch},
        **picked(
            e,
            "handover_s gathering_s ttft_s=ttft.expected ttft_interval_s=ttft tpot_s=tpot.expected",
            "tpot_interval_s=tpot end_to_end_s requests_per_s output_tokens_per_s",
            "throughput_tokens_per_s=output_tokens_per_s",
            "throughput_tokens_per_s_per_chip=throughput_per_chip prefill_share",
            "cost_usd_per_million_output_tokens=usd_per_million_output_tokens",
            "cost_usd_per_million_input_tokens=usd_per_million_input_tokens",
            "memory_bytes=memory hbm_capacity_bytes=hbm_capacity fits largest_batch bound",
        ),
    }


def _engine_data(engine: Engine, layout: Any) -> dict[str, Any]:
    return {"layout": str(layout), "layout_fields": layout.to_json(), **picked(engine, _ENGINE)}
