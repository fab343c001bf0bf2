"""A plan's step beside its compiled program, line by line: memory, collectives, FLOPs.

Not here: compiling, and what reasons of traffic are (`traffic_reasons`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwise.compiler.compiling import Compiled
from meshwise.compiler.expected import Expected, Operation
from meshwise.compiler.hlo.bytes_moved import Matmul, Movement, matmuls, movements
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.rewrites import meant_collectives
from meshwise.compiler.lines import Difference, Line, explained
from meshwise.compiler.memory import CompiledMemory
from meshwise.compiler.traffic_reasons import traffic_lines

#: Classes of an estimate's memory that are passed to the step, and those that live within it.
STATE = ("parameters", "master_copies", "optimizer")
WITHIN = ("gradients", "activations", "logits_and_loss", "workspace", "gathered_weights", "communication_buffers")

_WORD = re.compile(r"[\w.]+")


def compare(expected: Expected, compiled: Compiled, mesh: DeviceMesh) -> tuple[Line, ...]:
    """Compare what was expected with what was compiled.

    Args:
        expected: of the plan, for the model that was compiled.
        compiled: that fits.
        mesh: that it was compiled for.
    """
    assert compiled.memory is not None, "programs that do not fit have nothing to compare"
    return (
        *_memory_lines(expected, compiled.memory, compiled),
        *traffic_lines(expected, meant_collectives(compiled.module, mesh)),
        *_flops_lines(expected, matmuls(compiled.module)),
        *_moved_lines(expected.moved, movements(compiled.module)),
    )


def _memory_lines(expected: Expected, memory: CompiledMemory, compiled: Compiled) -> Iterator[Line]:
    state = sum(expected.memory[name] for name in STATE) - expected.streamed
    padding = sum(a.padded_bytes - a.num_bytes for p in compiled.module.main.parameters for a in p.shape.arrays)
    passed, held = (_differences(expected.more_memory.get(name, {})) for name in ("arguments", "temporaries"))
    yield explained(
        Line("memory", "arguments", state, memory.arguments),
        (Difference("batch", expected.batch), Difference("tiles", padding), *passed),
        exact=0.001 * state,
    )
    if expected.host:
        away, beyond = sum(expected.host.values()), _differences(expected.more_memory.get("host", {}))
        yield explained(Line("memory", "host", away, memory.host_arguments), beyond, exact=0.001 * away)
    if expected.host_kept:
        yield _memory_line("host temporaries", expected.host_kept, memory.host_temporaries, ())
    within = sum(expected.memory[name] for name in WITHIN) + expected.streamed
    both = _joined((*passed, *held))
    yield _memory_line("temporaries", within, memory.alive - memory.arguments, held)
    yield _memory_line("peak", state + within, memory.alive, both)
    if compiled.checks_alive:
        return
    gaps = Difference("gaps", memory.total - memory.alive)
    reserve = expected.memory["reserve"]
    aside = (*both, gaps, Difference("reserve", -reserve))
    yield _memory_line("set aside", state + within + reserve, memory.total, aside)


def _memory_line(name: str, predicted: float, compiled: float, known: Sequence[Difference]) -> Line:
    """Beyond what is known: what XLA needs more or less than the estimate counts as alive at once."""
    line = Line("memory", name, predicted, compiled)
    rest = compiled - predicted - sum(d.amount for d in known)
    return explained(line, [*known, Difference("reuse" if rest < 0 else "scratch", rest)])


def _differences(amounts: Mapping[str, float]) -> tuple[Difference, ...]:
    return tuple(Difference(reason, amount) for reason, amount in amounts.items())


def _joined(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Add up those of equal reason."""
    amounts: dict[str, float] = defaultdict(float)
    for d in differences:
        amounts[d.reason] += d.amount
    return _differences(amounts)


def _flops_lines(expected: Expected, found: Sequence[Matmul]) -> Iterator[Line]:
    keys = list(dict.fromkeys([*expected.flops, *expected.more_flops]))
    compiled: dict[Operation, float] = defaultdict(float)
    for matmul in found:
        compiled[_operation(matmul.scope, keys)] += matmul.flops_per_step
    small = 0.001 * sum(expected.flops.values())
    every = [key for key in dict.fromkeys([*keys, *compiled]) if expected.flops.get(key) or compiled[key]]
    lines = {
        k: Line("flops", "/".join(k).strip("/") or "elsewhere", expected.flops.get(k, 0.0), compiled[k]) for k in every
    }
    known = {key: _differences(expected.more_flops.get(key, {})) for key in every}
    missing = {k: x.compiled - x.predicted - sum(d.amount for d in known[k]) for k, x in lines.items()}
    fused = {_operation(matmul.scope, keys) for matmul in found if matmul.kernel}
    reasons = {key: _flops_reasons(key, missing[key], expected, fused=key in fused) for key in every}
    for block in {key[0] for key in every}:
        own = {key: n for key, n in missing.items() if key[0] == block and not _of_experts(reasons[key])}
        reasons |= _one_matmul(own, expected, small)
    for key, line in lines.items():
        yield explained(line, (*known[key], *reasons[key]), exact=small)


def _moved_lines(expected: Mapping[str, float], found: Sequence[Movement]) -> Iterator[Line]:
    """Bytes read and written, by block: no reasons, since programs differ in what they fuse."""
    compiled: dict[str, float] = defaultdict(float)
    for movement in found:
        words = _WORD.findall(movement.scope)
        compiled[next((block for block in expected if block in words), "")] += movement.bytes_per_step
    for block, num_bytes in expected.items():
        yield Line("moved", block or "elsewhere", num_bytes, compiled[block])


def _of_experts(reasons: Iterable[Difference]) -> bool:
    return any(d.reason in ("slots", "part blocks") for d in reasons)


def _one_matmul(missing: dict[Operation, float], expected: Expected, small: float) -> dict[Operation, list[Difference]]:
    """Products of one block that have more, and others that have less, by as much: they are one matmul."""
    missing = {k: amount for k, amount in missing.items() if k not in expected.attentions and abs(amount) >= small}
    if len(missing) < 2 or abs(sum(missing.values())) >= small:
        return {}
    return {key: [Difference("one matmul", amount)] for key, amount in missing.items()}


def _operation(scope: str, keys: Sequence[Operation]) -> Operation:
    """Find block and operation in a path of scopes: `.../layer/q/dot_general`."""
    words = _WORD.findall(scope)
    for block, operation in keys:
        if block in words and operation in words[words.index(block) + 1 :]:
            return block, operation
    return "", ""


def _flops_reasons(key: Operation, missing: float, expected: Expected, *, fused: bool) -> list[Difference]:
    forward = expected.forward_flops.get(key, 0.0)
    more = (expected.slots.get(key, 1.0) - 1) * expected.flops.get(key, 0.0)
    if 0 < missing <= 1.001 * more:
        return [Difference("slots", missing)]
    if key in expected.attentions and missing > 0:
        # One kernel finds the gradients of queries, another those of keys and values: two of five products twice.
        twice = min(forward, missing) if fused else 0.0
        return [Difference("scores twice", twice), Difference("masked pairs", missing - twice)]
    if forward and abs(missing + forward) < 0.02 * forward:
        return [Difference("not again", missing)]
    if forward and abs(missing - forward) < 0.02 * forward:
        return [Difference("again", missing)]
    if fused and 0 < missing <= 0.5 * expected.flops.get(key, 0.0):
        return [Difference("part blocks", missing)]
    return []
