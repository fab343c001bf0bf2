"""Verifies plans with XLA's compilers, all layers of each, and prints one row each: the table of docs/verify.md.

`python benchmarks/verify_plans.py [WORD ...]` takes rows that have all words in model, target or layout (`v5e`,
`llama-3-70b h100`), all without. A program for GPUs takes a quarter of a minute on two quiet cores, one for TPUs one to
four; what was compiled before comes from the cache, so that a run that was broken off goes on. `--details` adds every
line. Not here: a verdict, which is for the reader of the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from meshwise.commands.verify import verify
from meshwise.compiler.step_floor import StepFloor
from meshwise.compiler.verification import Verification
from meshwise.core.errors import MeshwiseError
from meshwise.models import load_model

_GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A plan: sequences of 4,096 tokens, bf16, AdamW, all recomputed where the layout does not say what is kept.

    Mixtures have as many slots as tokens choose on average.
    """

    model: str
    on: str
    batch: str
    layout: str

    @property
    def words(self) -> str:
        """What it is found by."""
        return f"{self.model} {self.on} {self.layout}"

    def verify(self) -> Verification:
        """Compile and compare."""
        slots: dict[str, Any] = {"capacity_factor": 1} if load_model(self.model).mixtures else {}
        layout = self.layout if "remat=" in self.layout else f"{self.layout},remat=full"
        return verify(self.model, on=self.on, batch_tokens=self.batch, seq_len=4096, layout=layout, **slots)


ROWS = [
    Row("llama-3-8b", "h100:64", "256Ki", "fsdp=64"),
    Row("llama-3-8b", "h100:64", "256Ki", "fsdp=16,tensor=4"),
    Row("llama-3-8b", "h100:64", "256Ki", "fsdp=8,tensor=8,sequence_parallel=false"),
    Row("llama-3-8b", "h100:64", "256Ki", "fsdp=16,ulysses=4"),
    Row("llama-3-8b", "h100:64", "256Ki", "fsdp=16,context=4,context_method=gather"),
    Row("llama-3-8b", "h100:64", "256Ki", "fsdp=64,remat=none"),
    Row("llama-3-8b", "h100:64", "256Ki", "fsdp=16,tensor=4,remat=matmuls"),
    Row("llama-3-8b", "h100:64", "512Ki", "data=8,fsdp=8,zero=2,micro_batch=1"),
    Row("llama-3-8b", "h100:64", "512Ki", "data=8,fsdp=8,zero=1,micro_batch=1"),
    Row("llama-3-8b", "h100:64", "512Ki", "stage=4,fsdp=16,num_microbatches=8,schedule=1f1b"),
    Row("llama-3-8b", "h100:64", "512Ki", "stage=4,fsdp=16,num_microbatches=8,schedule=interleaved,virtual_stages=2"),
    Row("llama-3-70b", "h100:64", "256Ki", "fsdp=64"),
    Row("llama-3-70b", "h100:64", "256Ki", "fsdp=16,tensor=4"),
    Row("llama-3-70b", "h100:64", "256Ki", "fsdp=32,context=2,context_method=ring"),
    Row("llama-3-70b", "h100:64", "512Ki", "fsdp=16,tensor=4,micro_batch=4"),
    Row("llama-3-70b", "h100:64", "512Ki", "stage=4,fsdp=16,num_microbatches=8,schedule=1f1b"),
    Row("llama-3-70b", "b200:64", "256Ki", "fsdp=64"),
    Row("llama-3-70b", "b200:64", "256Ki", "fsdp=16,tensor=4"),
    Row("phi-4", "h100:16", "256Ki", "fsdp=16"),
    Row("phi-4", "h100:16", "256Ki", "fsdp=8,tensor=2"),
    Row("qwen3-8b", "h100:16", "256Ki", "fsdp=16"),
    Row("qwen3-8b", "h100:16", "256Ki", "data=2,fsdp=8"),
    Row("mixtral-8x7b", "h100:64", "256Ki", "fsdp=64"),
    Row("mixtral-8x7b", "h100:64", "256Ki", "fsdp=8,expert=8"),
    Row("mixtral-8x7b", "b200:32", "256Ki", "fsdp=4,expert=8"),
    Row("qwen3-30b-a3b", "h100:16", "64Ki", "fsdp=2,expert=8"),
    Row("gpt-oss-120b", "h100:64", "256Ki", "fsdp=8,expert=8"),
    Row("gemma-3-27b", "h100:64", "256Ki", "fsdp=64"),
    Row("gemma-3-27b", "h100:64", "256Ki", "fsdp=32,tensor=2"),
    Row("gemma-3-27b", "b200:32", "256Ki", "fsdp=32"),
    Row("llama-3-8b", "v5p:4x4x4", "256Ki", "fsdp=64"),
    Row("llama-3-8b", "v5p:4x4x4", "256Ki", "fsdp=16,tensor=4"),
    Row("llama-3-8b", "v5e:8x8", "256Ki", "fsdp=64"),
    Row("llama-3-8b", "v6e:8x8", "512Ki", "data=4,fsdp=16,zero=2,micro_batch=1"),
    Row("llama-3-70b", "v5p:4x4x4", "512Ki", "fsdp=32,tensor=2"),
    Row("llama-3-70b", "v5e:16x16", "1Mi", "fsdp=256"),
    Row("llama-3-70b", "v6e:8x8", "256Ki", "fsdp=64"),
    Row("mixtral-8x7b", "v5p:4x4x4", "256Ki", "fsdp=8,expert=8"),
    Row("mixtral-8x7b", "v5e:8x16", "512Ki", "fsdp=16,expert=8"),
    Row("mixtral-8x7b", "v6e:8x8", "256Ki", "fsdp=64"),
    Row("gemma-3-27b", "v5p:4x4x4", "256Ki", "fsdp=32,context=2,context_method=gather"),
    Row("gemma-3-27b", "v5e:8x16", "512Ki", "fsdp=128"),
    Row("gemma-3-27b", "v6e:8x8", "256Ki", "fsdp=64"),
    Row("phi-4", "v5p:2x2x4", "256Ki", "fsdp=16"),
]


def show(row: Row, *, details: bool) -> str:
    """Verify one plan: a row of the table."""
    begun = time.monotonic()
    name = f"| {row.model} | `{row.on}` | `{row.layout}` |"
    try:
        found = row.verify()
    except MeshwiseError as error:
        return f"{name} {str(error).splitlines()[0][:110]} |"
    sys.stderr.write(f"{row.words}: {time.monotonic() - begun:.0f} s\n")
    if not found.lines:
        return f"{name} does not fit |"
    if details:
        for x in found.lines:
            why = ", ".join(f"{d.reason} {d.amount / 2**20:+,.1f}" for d in x.differences)
            sys.stderr.write(f"    {x.name:32} {x.predicted / 2**20:14,.1f} {x.compiled / 2**20:14,.1f}  {why}\n")
    return f"{name} {' | '.join(_cells(found))} |"


def _cells(found: Verification) -> list[str]:
    """Arguments (what is there for another reason than the plan apart), peak, set aside, bytes received, seconds."""
    lines = {line.name: line for line in found.group("memory")}
    arguments, peak = lines["arguments"], lines["peak"]
    received = found.group("collectives")
    sums = sum(x.predicted for x in received), sum(x.compiled for x in received)
    known = [d for d in arguments.differences if d.reason != "batch" and abs(d.amount) > 0.01 * arguments.predicted]
    own = arguments.compiled - sum(d.amount for d in known)
    reasons = "".join(f" + {d.amount / _GIB:.2f} {d.reason}" for d in known)
    return [
        f"{arguments.predicted / _GIB:.2f} / {own / _GIB:.2f}{reasons}",
        f"{peak.predicted / _GIB:.2f} / {peak.compiled / _GIB:.2f}",
        f"{100 * (peak.compiled / peak.predicted - 1):+.0f} %",
        f"{(found.set_aside or 0.0) / _GIB:.1f}",
        f"{sums[0] / _GIB:.1f} / {sums[1] / _GIB:.1f}",
        f"{100 * found.unexplained_share:.1f} %",
        *_times(found.floor),
    ]


def _times(floor: StepFloor | None) -> list[str]:
    """The plan's lower bound, the program's least time and the plan's expected time; the share that is hidden."""
    assert floor is not None, "programs that fit have one"
    seconds = (floor.planned_lower, floor.compiled, floor.planned_expected)
    return [" / ".join(f"{s:.3g}" for s in seconds), f"{100 * floor.hidden_share:.0f} %"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--details", action="store_true")
    asked = parser.parse_args()
    for chosen in (row for row in ROWS if all(word in row.words for word in asked.words)):
        print(show(chosen, details=asked.details), flush=True)
