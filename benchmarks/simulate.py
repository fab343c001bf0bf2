"""How fast the simulator of serving is: requests per CPU-second of one process, and memory, as loads grow.

    python benchmarks/simulate.py [REQUESTS ...]

Prompts of 1,024 tokens, 256 generated, Poisson arrivals at eight a second, which about 47 decode at once; the best of
several runs of smaller loads, because other work only slows. Then policies, many replicas, and a search for capacity.
"""

from __future__ import annotations

import resource
import sys

from rich.console import Console
from rich.table import Table

from meshwise.costs.engine import AttentionCosts, EngineCosts
from meshwise.jobs.lengths import parse_lengths
from meshwise.jobs.traffic import DrawnLoad, SharedPrefixes, parse_arrivals
from meshwise.simulation.serving import (
    PrefillPool,
    Scheduling,
    ServingSystem,
    Speculation,
    Targets,
    find_capacity,
    simulate_serving,
)

#: Round numbers for a 70B model on eight GPUs.
COSTS = EngineCosts(
    overhead_s=2e-3,
    token_seconds=((1, 12e-3), (256, 14e-3), (2048, 80e-3)),
    attention=(AttentionCosts(8e-9, 1e-10),),
    kv_blocks=30_000,
    kv_bytes_per_token=3.2768e5,
    transfer_bytes_per_s=5e10,
    swap_bytes_per_s=2e10,
)
RATE = 8.0
REPEATS = 3


def load(count: int, rate: float = RATE, prefixes: SharedPrefixes | None = None) -> DrawnLoad:
    """1,024 tokens in, 256 out."""
    return DrawnLoad(
        parse_arrivals("poisson", rate), parse_lengths("1024"), parse_lengths("256"), count, prefixes=prefixes
    )


def speed(system: ServingSystem, demand: DrawnLoad) -> float:
    """Requests per CPU-second."""
    repeats = REPEATS if demand.num_requests <= 50_000 else 1
    return max(demand.num_requests / simulate_serving(system, demand).cpu_s for _ in range(repeats))


def main() -> None:
    """Print three tables."""
    counts = [int(word) for word in sys.argv[1:]] or [10_000, 100_000, 1_000_000]
    console = Console()
    one = ServingSystem(COSTS)
    sizes = Table("requests", "requests per CPU-second", "peak memory, MiB", title="one replica, prefill-first")
    for count in counts:
        rate = speed(one, load(count))
        sizes.add_row(f"{count:,}", f"{rate:,.0f}", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f}")
    console.print(sizes)
    count = min(counts)
    systems = {
        "decode-first": ServingSystem(COSTS, scheduling=Scheduling("decode-first")),
        "chunked, 2,048 tokens a step": ServingSystem(COSTS, scheduling=Scheduling("chunked")),
        "speculative": ServingSystem(COSTS, scheduling=Scheduling(speculation=Speculation(0.7, 4, 1e-3))),
        "cache that is too small, recompute": ServingSystem(COSTS.replace(kv_blocks=3000)),
        "eight replicas, least loaded": ServingSystem(COSTS, 8, routing="least-loaded"),
        "prefill and generation apart, 4 + 4": ServingSystem(COSTS, 4, prefill=PrefillPool(COSTS, 4)),
    }
    kinds = Table("what", "requests per CPU-second", title=f"{count:,} requests")
    for name, system in systems.items():
        kinds.add_row(name, f"{speed(system, load(count, RATE * system.replicas * 0.9)):,.0f}")
    prefixes = ServingSystem(COSTS, 8, Scheduling(prefix_cache=True), "affinity")
    shared = load(count, RATE * 8, SharedPrefixes(2048, groups=64))
    kinds.add_row("eight replicas, affinity to 64 prefixes", f"{speed(prefixes, shared):,.0f}")
    console.print(kinds)
    capacity = find_capacity(one, load(4000), Targets(ttft_s=0.5, tpot_s=0.03))
    tried = len(capacity.tried)
    console.print(f"capacity {capacity.rate:.3g}/s found in {capacity.cpu_s:.2f} CPU-seconds, {tried} loads of 4,000")


if __name__ == "__main__":
    main()
