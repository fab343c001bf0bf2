"""How fast the planner is: strategies per CPU-second, one warm estimate, and commands from a cold start.

    python benchmarks/speed.py

Strategies are complete layouts (mesh, microbatches, schedule, ZeRO stage, remat, wires), each with all terms of its
time and all classes of its memory; of what a search examines, those that it prices in full are counted apart. Rates are
per CPU-second of one process; the best of several runs, because other work only slows.
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
from meshwise.costs.evaluate import evaluate
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import find_calibration
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.search import MAX_MEMORY, SearchResult, SearchSpace, plan_training, search, training_limits
from meshwise.search.network import keep_freed_memory
from meshwise.search.space import WireTable, meshes, placements
from meshwise.sharding.layout import MESH_AXES

ROWS = 1 << 16
CHUNK = 1 << 13
PLAN = ["plan", "train", "llama-3-70b", "--on", "v5p:16x20x28", "--batch-tokens", "4Mi", "--seq-len", "4096"]
PLAN += ["--tokens", "15T"]


def dense() -> TrainingProblem:
    """LLaMA-3-70B on a whole pod of 8,960 TPU v5p."""
    cluster = parse_cluster("v5p:16x20x28")
    job = TrainingJob(batch_tokens="4Mi", seq_len="4096", tokens="15T")
    return TrainingProblem(load_model("llama-3-70b"), job, cluster, default_calibration(cluster.chip))


def mixture() -> TrainingProblem:
    """DeepSeek-V3 on 2,048 H800, as it was trained."""
    cluster = parse_cluster("h800:2048")
    job = TrainingJob(batch_tokens=str(15360 * 4096), seq_len="4096", tokens="14.8T", precision="fp8-block")
    return TrainingProblem(load_model("deepseek-v3"), job, cluster, default_calibration(cluster.chip))


def as_asked(p: TrainingProblem) -> TrainingProblem:
    """The same as `plan train` asks it: with the fitted calibration, under which bounds have more to tell."""
    return TrainingProblem(p.model, p.job, p.cluster, find_calibration("fitted", p.cluster.chip))


def small_mixture() -> TrainingProblem:
    """Mixtral 8x7B on 256 H100, with the fitted calibration."""
    cluster = parse_cluster("h100:256")
    job = TrainingJob(batch_tokens="4Mi", seq_len="4096")
    return TrainingProblem(load_model("mixtral-8x7b"), job, cluster, find_calibration("fitted", cluster.chip))


#: Structures whose layouts are evaluated, each with a schedule: without experts, and with them.
STRUCTURES = (
    (LayoutChoices(1, True, "attention"), "1f1b"),
    (LayoutChoices(2, True, "full", fully_sharded=False, context_method="ring", partial_remat=True), "zb-v"),
)
EXPERTS = (
    (LayoutChoices(1, True, "attention", exchanges=True), "dualpipe"),
    (LayoutChoices(2, True, "full", exchanges=True, expert_tensor_parallel=False, partial_remat=True), "1f1b"),
)


def best_of(runs: int, function: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of the fastest run."""
    seconds = []
    for _ in range(runs):
        begin = clock()
        function()
        seconds.append(clock() - begin)
    return min(seconds)


def random_layouts(p: TrainingProblem, fabric: Fabric, experts: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw [rows, axes] sizes and [rows, axes, dimensions] extents of complete layouts, with a fixed seed."""
    generator = np.random.default_rng(0)
    table = meshes(math.prod(fabric.sizes), training_limits(p))
    table = table[(table[:, MESH_AXES.index("expert")] > 1) == experts]
    some = table[generator.choice(len(table), size=64, replace=False)]
    ways = [placements(fabric.sizes, tuple(int(n) for n in mesh)) for mesh in some]
    factors = np.concatenate([w[generator.integers(len(w), size=ROWS // 64)] for w in ways])
    return np.repeat(some, ROWS // 64, axis=0).astype(float), factors


def evaluation_rate(p: TrainingProblem, structures: tuple[tuple[LayoutChoices, str], ...]) -> float:
    """Strategies per CPU-second of the evaluator alone: nothing shared between rows, every wire its own."""
    fabric = Fabric.of(p.cluster, flat_rings=p.calibration.flat_rings)
    mesh, factors = random_layouts(p, fabric, structures[0][0].exchanges)
    micro = np.random.default_rng(1).integers(1, 5, size=ROWS).astype(float)

    keep_freed_memory()  # as a search does

    def run() -> None:
        for structure, schedule in structures:
            share = 0.5 if structure.partial_remat else 1.0
            for i in range(0, ROWS, CHUNK):
                part = slice(i, i + CHUNK)
                columns = {a: mesh[part, k] for k, a in enumerate(MESH_AXES)}
                cuts = {"micro_batch": micro[part], "num_microbatches": 2 * columns["stage"] * micro[part][::-1]}
                candidates = Candidates(**columns, **cuts, remat_share=share, schedule=schedule)
                with np.errstate(all="ignore"):  # some schedules cannot run on some of them
                    evaluate(p, structure, candidates, WireTable(fabric, factors[part], p.routing), bounded=False)

    return ROWS * len(structures) / best_of(3, run)


def whole_search(p: TrainingProblem) -> tuple[SearchResult, float]:
    """Search once; give what was found, and the CPU-seconds."""
    fabric = Fabric.of(p.cluster, flat_rings=p.calibration.flat_rings)
    placements.cache_clear()  # as for a cluster that was not searched before
    begin = time.process_time()
    result = search(p, [fabric], SearchSpace(training_limits(p), memory_share=MAX_MEMORY), top=5)
    return result, time.process_time() - begin


def searched(p: TrainingProblem, runs: int) -> tuple[str, str]:
    """What a search looked at, and how many strategies that is per CPU-second."""
    result, seconds = min((whole_search(p) for _ in range(runs)), key=lambda found: found[1])
    counts = f"{result.strategies:,} examined, {result.priced:,} priced, {seconds:.2f} CPU-seconds"
    return counts, f"{result.strategies / seconds:,.0f}"


def planned(p: TrainingProblem, runs: int) -> str:
    """What `plan train` looks at, and its CPU-seconds: all that it says of the best plans included."""
    found = []
    for _ in range(runs):
        placements.cache_clear()
        begin = time.process_time()
        plan = plan_training(p, top=5)
        found.append((time.process_time() - begin, plan.search))
    seconds, result = min(found, key=lambda f: f[0])
    return f"{result.strategies:,} examined, {result.priced:,} priced, {seconds:.2f} CPU-seconds"


def one_estimate(p: TrainingProblem) -> float:
    """Milliseconds of one warm estimate of one complete layout, wires made anew."""
    plan = plan_training(p, top=1).plans[0]
    return 1e3 * best_of(20, lambda: [estimate_training(p, plan.fabric, plan.layout) for _ in range(10)]) / 10


def command(arguments: list[str], runs: int = 5) -> str:
    """Wall and CPU seconds of a command from a cold start, Python included."""
    walls, cpus = [], []
    # As where packages are installed: bytecode is there from the second run on.
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(runs):
        before, begin = os.times(), time.perf_counter()
        done = subprocess.run(  # noqa: S603 -- our own words
            [sys.executable, *arguments], capture_output=True, check=False, env=environment
        )
        walls.append(time.perf_counter() - begin)
        after = os.times()
        cpus.append(after.children_user + after.children_system - before.children_user - before.children_system)
        if done.returncode:
            return f"failed: {done.stderr.decode().strip().splitlines()[-1]}"
    return f"{min(walls):.2f} s ({min(cpus):.2f} s of CPU)"


def main() -> None:
    """Print the table."""
    p, m = dense(), mixture()
    (many, rate), (most, best) = searched(p, 3), searched(m, 1)
    rows = [
        ("evaluator, 70B: strategies per CPU-second", f"{evaluation_rate(p, STRUCTURES):,.0f}", "300,000"),
        ("evaluator, DeepSeek-V3: strategies per CPU-second", f"{evaluation_rate(m, EXPERTS):,.0f}", "200,000"),
        ("search, 70B", many, ""),
        ("search, 70B: strategies per CPU-second", rate, "200,000"),
        ("search, DeepSeek-V3", most, "10 s"),
        ("search, DeepSeek-V3: strategies per CPU-second", best, "200,000"),
        ("plan, 70B, fitted", planned(as_asked(p), 3), ""),
        ("plan, Mixtral 8x7B on 256 H100, fitted", planned(small_mixture(), 2), ""),
        ("plan, DeepSeek-V3 on 2,048 H800, fitted", planned(as_asked(m), 1), ""),
        ("one warm estimate", f"{one_estimate(p):.2f} ms", "1 ms"),
        ("import meshwise", command(["-c", "import meshwise"]), ""),
        ("meshwise --help", command(["-m", "meshwise", "--help"]), "0.15 s"),
        ("meshwise plan train, 70B on 8,960 chips", command(["-m", "meshwise", *PLAN], runs=4), "2 s"),
    ]
    title = "LLaMA-3-70B, 4Mi tokens of 4,096, TPU v5p 16x20x28; DeepSeek-V3, 15,360 x 4,096 tokens, 2,048 H800"
    table = Table("what", "found", "wanted", title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
