"""Verifies plans with XLA's compilers and prints one row each: the table of docs/verify.md.

`python benchmarks/verify_plans.py gpu` (a minute a row on two cores) or `tpu` (ten minutes a row); rows that were
compiled before come from the cache. Not here: a verdict, which is for the reader of the table.
"""

from __future__ import annotations

import sys
import time

from meshwise.errors import MeshwiseError
from meshwise.verbs.verify import verify

PLANS = {
    "gpu": [
        ("llama-3-8b", "h100:8", "64Ki", 4096, "fsdp=8,remat=full"),
        ("llama-3-8b", "h100:8", "64Ki", 4096, "fsdp=8,remat=matmuls"),
        ("llama-3-8b", "h100:8", "64Ki", 4096, "fsdp=8,remat=none"),
        ("llama-3-8b", "h100:8", "128Ki", 4096, "fsdp=4,tensor=2,remat=full,micro_batch=2"),
        ("llama-3-8b", "h100:8", "64Ki", 4096, "fsdp=2,tensor=4,remat=full"),
        ("llama-3-8b", "h100:8", "64Ki", 4096, "tensor=8,remat=full"),
        ("llama-3-8b", "h100:8", "64Ki", 4096, "fsdp=4,context=2,remat=full,context_method=gather"),
        ("llama-3-8b", "h100:8", "64Ki", 4096, "fsdp=4,ulysses=2,remat=full"),
        ("llama-3-8b", "h100:8", "64Ki", 4096, "data=2,fsdp=4,zero=1,remat=full"),
        ("llama-3-70b", "h100:64", "512Ki", 4096, "fsdp=64,remat=full"),
        ("llama-3-70b", "h100:64", "512Ki", 4096, "fsdp=16,tensor=4,remat=full"),
        ("llama-3-70b", "h100:64", "512Ki", 4096, "fsdp=8,tensor=8,remat=full"),
        ("gemma-3-27b", "h100:64", "512Ki", 4096, "fsdp=32,tensor=2,remat=full"),
        ("mixtral-8x7b", "h100:64", "512Ki", 4096, "fsdp=8,expert=8,remat=full"),
    ],
    "tpu": [
        ("llama-3-8b", "v5p:2x2x2", "64Ki", 4096, "fsdp=4,tensor=2,remat=full"),
        ("llama-3-8b", "v5e:4x8", "128Ki", 4096, "fsdp=32,remat=full"),
        ("llama-3-70b", "v5p:4x4x4", "256Ki", 4096, "fsdp=16,tensor=4,remat=full"),
        ("gemma-3-27b", "v6e:8x8", "256Ki", 4096, "fsdp=16,tensor=4,remat=full"),
    ],
}


def row(model: str, on: str, batch: str, seq_len: int, layout: str) -> str:
    """Verify one plan."""
    begun = time.monotonic()
    try:
        found = verify(model, on=on, batch_tokens=batch, seq_len=seq_len, layout=layout)
    except MeshwiseError as error:
        return f"| {model} | {on} | `{layout}` | {str(error).splitlines()[0][:110]} |"
    if not found.lines:
        return f"| {model} | {on} | `{layout}` | does not fit |"
    lines = {line.name: line for line in found.lines}
    received = [line for line in found.lines if line.group == "collectives"]
    flops = [line for line in found.lines if line.group == "flops" and "attention" not in line.name]
    same = sum(min(x.predicted, x.compiled) for x in received) / max(sum(x.compiled for x in received), 1.0)
    cells = [
        model,
        on,
        f"`{layout}`",
        f"{lines['arguments'].predicted / 2**30:.2f} / {lines['arguments'].compiled / 2**30:.2f}",
        f"{lines['peak'].predicted / 2**30:.1f} / {lines['peak'].compiled / 2**30:.1f}",
        f"{100 * (lines['peak'].compiled / lines['peak'].predicted - 1):+.0f} %",
        f"{sum(x.predicted for x in received) / 2**30:.2f} / {sum(x.compiled for x in received) / 2**30:.2f}",
        f"{100 * same:.0f} %",
        f"{100 * found.unexplained_share:.1f} %",
        f"{sum(x.compiled for x in flops) / max(sum(x.predicted for x in flops), 1.0):.3f}",
    ]
    sys.stderr.write(f"{time.monotonic() - begun:.0f} s {found.copies}\n")
    for x in (*received, *flops, lines["temporaries"]):
        why = ", ".join(f"{d.reason} {d.amount / 2**20:+,.1f}" for d in x.differences)
        sys.stderr.write(f"    {x.name:32} {x.predicted / 2**20:14,.1f} {x.compiled / 2**20:14,.1f}  {why}\n")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for plan in PLANS[sys.argv[1]]:
        print(row(*plan), flush=True)
