"""How fast the planner is: strategies per CPU-second, one warm estimate, and commands from a cold start.

    python benchmarks/speed.py

Strategies are complete layouts (mesh, microbatches, ZeRO stage, remat, wires), each with all terms of its time and all
classes of its memory; of what a search examines, only those that it prices in full count. Rates are per CPU-second of
one process; the best of several runs, because other work only slows.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from meshwise.costs.calibration import default_calibration
from meshwise.costs.estimate import estimate_training
from meshwise.costs.evaluate import Candidates, Structure, TrainingProblem, evaluate
from meshwise.costs.network import Fabric
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.planning import SearchResult, SearchSpace, plan_training, search, training_limits
from meshwise.planning.space import WireTable, meshes, placements
from meshwise.sharding.layout import MESH_AXES

ROWS = 1 << 16
CHUNK = 1 << 13
PLAN = ["plan", "train", "llama-3-70b", "--on", "v5p:16x20x28", "--batch-tokens", "4Mi", "--seq-len", "4096"]


def problem() -> TrainingProblem:
    """LLaMA-3-70B on a whole pod of 8,960 TPU v5p."""
    cluster = parse_cluster("v5p:16x20x28")
    job = TrainingJob(batch_tokens="4Mi", seq_len="4096", tokens="15T")
    return TrainingProblem(load_model("llama-3-70b"), job, cluster, default_calibration(cluster.chip))


def best_of(runs: int, function: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Give the seconds of the fastest run."""
    seconds = []
    for _ in range(runs):
        begin = clock()
        function()
        seconds.append(clock() - begin)
    return min(seconds)


def random_layouts(p: TrainingProblem, fabric: Fabric) -> tuple[np.ndarray, np.ndarray]:
    """Draw [rows, axes] sizes and [rows, axes, dimensions] extents of complete layouts, with a fixed seed."""
    generator = np.random.default_rng(0)
    table = meshes(math.prod(fabric.sizes), training_limits(p))
    some = table[generator.choice(len(table), size=64, replace=False)]
    ways = [placements(fabric.sizes, tuple(int(n) for n in mesh)) for mesh in some]
    factors = np.concatenate([w[generator.integers(len(w), size=ROWS // 64)] for w in ways])
    return np.repeat(some, ROWS // 64, axis=0).astype(float), factors


def evaluation_rate(p: TrainingProblem) -> float:
    """Strategies per CPU-second of the evaluator alone: nothing shared between rows, every wire its own."""
    fabric = Fabric.of(p.cluster)
    mesh, factors = random_layouts(p, fabric)
    micro = np.random.default_rng(1).integers(1, 5, size=ROWS).astype(float)

    def run() -> None:
        for i in range(0, ROWS, CHUNK):
            part = slice(i, i + CHUNK)
            columns = {a: mesh[part, k] for k, a in enumerate(MESH_AXES)}
            candidates = Candidates(**columns, micro_batch=micro[part], num_microbatches=micro[part][::-1])
            evaluate(p, Structure(1, True, "attention"), candidates, WireTable(fabric, factors[part]))

    return ROWS / best_of(5, run)


def whole_search(p: TrainingProblem) -> tuple[SearchResult, float]:
    """Search once; give what was found, and the CPU-seconds."""
    fabric, space = Fabric.of(p.cluster), SearchSpace(training_limits(p))
    placements.cache_clear()  # as for a cluster that was not searched before
    begin = time.process_time()
    result = search(p, [fabric], space, top=5)
    seconds = time.process_time() - begin
    return result, seconds


def one_estimate(p: TrainingProblem) -> float:
    """Milliseconds of one warm estimate of one complete layout, wires made anew."""
    plan = plan_training(p, top=1).plans[0]
    return 1e3 * best_of(20, lambda: [estimate_training(p, plan.fabric, plan.layout) for _ in range(10)]) / 10


def command(arguments: list[str], runs: int = 5) -> str:
    """Wall and CPU seconds of a command from a cold start, Python included."""
    walls, cpus = [], []
    for _ in range(runs):
        before, begin = os.times(), time.perf_counter()
        done = subprocess.run([sys.executable, *arguments], capture_output=True, check=False)  # noqa: S603 -- our own words
        walls.append(time.perf_counter() - begin)
        after = os.times()
        cpus.append(after.children_user + after.children_system - before.children_user - before.children_system)
        if done.returncode:
            return f"failed: {done.stderr.decode().strip().splitlines()[-1]}"
    return f"{min(walls):.2f} s ({min(cpus):.2f} s of CPU)"


def main() -> None:
    """Print the table."""
    p = problem()
    result, seconds = min((whole_search(p) for _ in range(5)), key=lambda found: found[1])
    rows = [
        ("evaluator, strategies per CPU-second", f"{evaluation_rate(p):,.0f}", "200,000; aim at 1,000,000"),
        ("whole search, strategies per CPU-second", f"{result.priced / seconds:,.0f}", ""),
        ("whole search", f"{result.strategies:,} examined, {result.priced:,} priced, {seconds:.2f} CPU-seconds", ""),
        ("one warm estimate", f"{one_estimate(p):.2f} ms", "1 ms"),
        ("import meshwise", command(["-c", "import meshwise"]), ""),
        ("meshwise --help", command(["-m", "meshwise", "--help"]), "0.3 s"),
        ("meshwise plan train, 70B on 8,960 chips", command(["-m", "meshwise", *PLAN]), "2 s"),
    ]
    table = Table("what", "found", "wanted", title="LLaMA-3-70B, 4Mi tokens of 4,096, TPU v5p 16x20x28")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
