"""Attention that no fused kernel of our own runtime takes: its programs compute it in blocks of plain JAX.

They multiply all pairs of a query and a key, in blocks, and move their scores through memory, which nothing counts.
Not here: what kernels take (`hardware.kernels`), words (`report`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwise.core.tensors import Attention
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware.kernels import ATTENTION, AttentionKernel
from meshwise.sharding.layout import Layout


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """An operation without a kernel.

    Args:
        blocks: of the model that have it.
        refusal: why no kernel takes it.
        pairs: of a query and a key that are multiplied, over those that are counted.
        seq_len: the next longer one that a kernel takes; None where the length is not what is refused.
    """

    blocks: tuple[str, ...]
    refusal: str
    pairs: float
    seq_len: int | None


def plain_attentions(problem: TrainingProblem, layout: Layout) -> tuple[PlainAttention, ...]:
    """Find what our own program of a layout computes without a kernel, each reason once; empty for other software."""
    kernel = ATTENTION.get(problem.cluster.chip.vendor)
    if kernel is None or not problem.own_program:
        return ()
    found: dict[tuple[str, float, int | None], list[str]] = {}
    for block, refusal, pairs, longer in _refused(problem, int(problem.job.seq_len), layout, kernel):
        found.setdefault((refusal, pairs, longer), []).append(block)
    return tuple(PlainAttention(tuple(dict.fromkeys(blocks)), *one) for one, blocks in found.items())


def _refused(
    problem: TrainingProblem, seq_len: int, layout: Layout, kernel: AttentionKernel
) -> Iterator[tuple[str, str, float, int | None]]:
    program = problem.train_program()
    sizes = program.bind(batch=1, queries=seq_len)
    every = [(block.name, op) for block in program.blocks for op in block.ops if type(op) is Attention]
    even = all(op.causal and op.chunk is None for _, op in every)
    queries, keys = _runs(seq_len, layout, kernel, even=even)
    for name, op in every:
        width = int(sizes[op.inputs[0].axes[-1]])
        if refusal := kernel.refusal(queries, keys, width, chunked=op.chunk is not None):
            fits = not kernel.refusal(kernel.least, kernel.least, width, chunked=op.chunk is not None)
            ways = layout.context * kernel.least
            yield name, refusal, float(seq_len**2 / op.pairs(sizes)), -(-seq_len // ways) * ways if fits else None


def _runs(seq_len: int, layout: Layout, kernel: AttentionKernel, *, even: bool) -> tuple[int, int]:
    """Queries and keys of a run of positions (`runtime.zigzag`): two runs a device where these fill a kernel's blocks.

    Keys that are gathered are in their own order again.
    """
    devices = layout.context
    runs = devices * (2 if devices > 1 and even and seq_len % (2 * devices * kernel.least) == 0 else 1)
    queries = seq_len // runs
    return queries, queries if layout.context_method == "ring" else seq_len
