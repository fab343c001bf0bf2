"""Why the winner wins, in the book's terms: its batch against the network, the mix against its optimum, memory.

Arithmetic of `costs.rules` with the plan's own numbers. Not here: why others lose (`baselines`).
"""

from __future__ import annotations

import math

from meshwise.core.units import format_bytes, format_duration, format_percent, format_time
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import make_group_link
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.rules import find_rule
from meshwise.search.plan import Plan


def winner_reasons(plan: Plan, whole: Fabric) -> tuple[str, ...]:
    """What decided, one sentence each."""
    of_plan = (_busiest, _pipeline, _experts, _positions, _offload, _memory, _rule_of_thumb)
    lines = _batch(plan, whole), _mix(plan, whole), *(reason(plan) for reason in of_plan)
    return tuple(line for line in lines if line)


def _batch(plan: Plan, whole: Fabric) -> str:
    """Tokens per chip against the critical batch of FSDP over the whole network."""
    chips = math.prod(whole.sizes)
    if chips == 1:
        return ""
    needed = critical_tokens_per_chip(plan.problem, whole)
    asked = plan.problem.job.tokens_per_chip(chips)
    verdict = "enough for FSDP alone" if asked >= needed else "too few for FSDP alone"
    parameters = plan.problem.model.parameters
    sparse = ", times total over active parameters" if parameters.total != parameters.active else ""
    return (
        f"{asked:,.0f} tokens per chip are {verdict}, which needs {needed:,.0f} on this network "
        f"(FLOP/s over its bytes/s{sparse})"
    )


def critical_tokens_per_chip(problem: TrainingProblem, whole: Fabric) -> float:
    """Tokens per chip from which FSDP over all of a network hides behind the arithmetic.

    The book's C / W for the bytes of the weights' format, times total over active parameters: a mixture sends all its
    experts and computes with few. Source: book, Training, "FSDP", and GPUs, "expert parallelism".
    """
    wire = make_group_link(whole, {"fsdp": [float(d.size) for d in whole.dimensions]}, ("fsdp",))
    formats, parameters = problem.job.formats, problem.model.parameters
    # The rule is stated for values of two bytes.
    bandwidth = 2 / (float(wire.gather) * formats.gathered_weight_bytes)
    peak = problem.cluster.chip.peak(formats.compute)
    return find_rule("fsdp").value(C=peak, W=bandwidth, E=parameters.total, k=parameters.active)


def _mix(plan: Plan, whole: Fabric) -> str:
    """The book's optimum of FSDP and tensor parallelism on a torus, before rounding."""
    problem, estimate = plan.problem, plan.estimate
    torus = [d for d in whole.dimensions if d.torus and d.size > 1]
    widths = [v for k, v in problem.model.sizes.items() if k.partition(".")[0] == "F"]
    if len(torus) < 2 or len(widths) != 1 or plan.layout.tensor == 1:
        return ""
    d_ff, chips, axes = float(widths[0]), math.prod(whole.sizes), len(torus) - 1
    tokens = problem.job.sequences * problem.job.seq_len
    fsdp = find_rule("mixed-ways").value(tokens=tokens, F=d_ff, chips=chips, MX=axes)
    ways = math.prod(plan.layout.sizes[a] for a in ("data", "fsdp", "expert", "context", "ulysses"))
    bandwidth = 2 * torus[0].bandwidth_one_way
    needed = find_rule("mixed").value(F=d_ff, C=estimate.peak_flops_per_s, W=bandwidth, MX=axes)
    return (
        f"mixed with tensor parallelism {needed:,.0f} tokens per chip would do; the optimum before rounding is "
        f"{fsdp:,.0f} ways of FSDP (here every axis but tensor and stage: {ways:,}) "
        f"by {chips / fsdp:.1f} of tensor (here {plan.layout.tensor})"
    )


def _busiest(plan: Plan) -> str:
    """The two busiest resources at data-sheet rates."""
    found = {name: seconds for name, seconds in plan.estimate.resources.items() if name != "in_turn"}
    busy = sorted(found.items(), key=lambda item: -item[1])
    words = {"compute": "the matrix units", "hbm": "HBM", "stage": "the stage network"}
    (first, most), (second, next_most) = busy[:2]
    names = [words.get(n, f"the {n} network") for n in (first, second)]
    if next_most == 0:
        return f"{names[0]} are the only busy part" if first == "compute" else f"{names[0]} is the only busy part"
    verb = "are" if first == "compute" else "is"
    return (
        f"{names[0]} {verb} busiest at data-sheet rates: {format_time(most)} a step, "
        f"then {names[1]} with {format_time(next_most)}"
    )


def _pipeline(plan: Plan) -> str:
    layout = plan.layout
    if layout.stage == 1:
        return ""
    estimate = plan.estimate
    idle = estimate.terms.get("pipeline_bubble", 0.0) / estimate.step_time.expected
    plain = find_rule("pipeline-bubble").value(p=layout.stage, m=layout.num_microbatches)
    plain_words = f"under 1f1b it would be {format_percent(plain / (1 + plain))}; " if layout.schedule != "1f1b" else ""
    return (
        f"{layout.stage} pipeline stages under {layout.schedule} wait for {format_percent(idle)} of the step; "
        f"{plain_words}they divide what each chip holds and reduces"
    )


def _experts(plan: Plan) -> str:
    """How experts are dealt out, and what their exchange takes."""
    layout = plan.layout
    if layout.expert == 1:
        return ""
    exposed, hidden = (of.get("expert", 0.0) for of in (plan.estimate.terms, plan.estimate.hidden))
    width, ways = "", layout.expert
    if layout.tensor > 1 and layout.expert_tensor_parallel:
        width = f", the width of each over {layout.tensor} chips"
    elif layout.tensor > 1:
        width, ways = f", dealt out over tensor={layout.tensor}, too", ways * layout.tensor
    return (
        f"experts are dealt out over {layout.expert} chips{width}, which leaves 1/{ways} of the weights of "
        f"experts to a group; sending tokens to them and back takes {format_time(exposed)} a step, "
        f"{format_time(hidden)} more is hidden"
    )


def _positions(plan: Plan) -> str:
    """How positions of a sequence are split, and what that takes."""
    layout = plan.layout
    ways = [f"context={layout.context} ({layout.context_method})"] if layout.context > 1 else []
    ways += [f"ulysses={layout.ulysses}"] if layout.ulysses > 1 else []
    if not ways:
        return ""
    exposed, hidden = (of.get("context", 0.0) for of in (plan.estimate.terms, plan.estimate.hidden))
    return (
        f"positions are split over {' and '.join(ways)}, which lets more chips share a batch of "
        f"{plan.layout.sequences:,} sequences; it takes {format_time(exposed)} a step, {format_time(hidden)} more is "
        "hidden"
    )


def _offload(plan: Plan) -> str:
    """What lives on the host, and what its streams take."""
    layout, estimate = plan.layout, plan.estimate
    if not layout.offload:
        return ""
    away, exposed = estimate.host_memory.get("total", 0.0), estimate.terms.get("offload", 0.0)
    return (
        f"{' and '.join(layout.offload)} live in the host's memory ({format_bytes(away)} for each chip); the streams "
        f"take {format_time(exposed)} a step that nothing hides"
    )


def _memory(plan: Plan) -> str:
    estimate = plan.estimate
    share = estimate.memory["total"] / estimate.hbm_capacity
    away = estimate.host_memory.get("total", 0.0)
    if estimate.host_capacity and away > estimate.host_capacity:
        share = away / estimate.host_capacity
        return (
            f"{format_bytes(away)} are needed on the host for each chip, {share:.2f} x its share of "
            f"{format_bytes(estimate.host_capacity)}"
        )
    if not estimate.fits:
        needed = format_bytes(estimate.memory["total"])
        return f"{needed} are needed, {share:.2f} x the {format_bytes(estimate.hbm_capacity)} of HBM"
    some = "" if plan.layout.remat_layers is None else f" in {plan.layout.remat_layers} layers"
    again = (
        "nothing is computed twice" if plan.layout.remat == "none" else f"remat={plan.layout.remat}{some} makes room"
    )
    held, whole = format_bytes(estimate.memory["total"]), format_bytes(estimate.hbm_capacity)
    host = f", {format_bytes(away)} are on the host" if away else ""
    return f"{held} of {whole} HBM ({format_percent(share)}): {again}{host}"


def _rule_of_thumb(plan: Plan) -> str:
    """The time at the utilisation that the book assumes, for comparison with what is published."""
    tokens = plan.problem.job.tokens
    if tokens is None:
        return ""
    peak = plan.estimate.peak_flops_per_s * plan.estimate.num_chips
    active = plan.problem.model.parameters.active
    seconds = find_rule("train-time").value(P=active, tokens=tokens, C=peak, chips=1, mfu=0.4)
    return f"at 40 % MFU, a usual result of real runs, 6 x parameters x tokens take {format_duration(seconds)} here"
