"""How many serving layouts are priced in a CPU-second, and how long a whole search takes.

python benchmarks/serving_search.py
"""

from __future__ import annotations

import time

from meshwise.costs.calibration import default_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import ServingLoad
from meshwise.models import load_model
from meshwise.search.serving import ServingConstraints, plan_serving
from meshwise.search.serving.tables import Tables

CASES = (("llama-3-70b", "h100:64", "fp8"), ("llama-3-70b", "v5e:8x8", "weights=int8,kv=int8"),
         ("deepseek-v3", "h200:64", "fp8"))  # fmt: skip


def main() -> None:
    """Print a line a case: its first search, which also places programs, and a second one."""
    for model, on, precision in CASES:
        cluster = parse_cluster(on)
        load = ServingLoad(prompt=1024, output=256, precision=precision)
        problem = ServingProblem(load_model(model), load, cluster, default_calibration(cluster.chip))
        constraints = ServingConstraints(max_ttft=2.0, max_tpot=0.05)
        first = plan_serving(problem, constraints=constraints).search
        began = time.process_time()
        tables = Tables.priced(problem, problem.network)
        priced = time.process_time() - began
        search = plan_serving(problem, constraints=constraints).search
        rows = sum(t.priced for t in tables.both)
        print(f"{model} on {on}: {rows:,} layouts with batches priced, {rows / priced:,.0f} a CPU-second; "
              f"search {first.cpu_s:.2f} CPU-seconds, again {search.cpu_s:.2f}; {search.pairs:,} pairs")  # fmt: skip


if __name__ == "__main__":
    main()
