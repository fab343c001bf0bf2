"""Measures this machine, then runs a dense model and a mixture on it in several layouts. Run as a script.

Prints JSON: name -> predicted and measured seconds of a step, in the order of `PLANS`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.pop("XLA_FLAGS", None)

import meshwise
from meshwise.commands.bench_operations import Operations

#: Nothing here generates: steps of an engine, which take longest to compile, are not measured.
Operations._serving = lambda _: iter(())

DEVICES, STEPS = 4, 7
#: Large enough that products and bytes fill a step: plans gather a layer in one piece, XLA:CPU array by array, and each
#: array has its latency.
DENSE = "D=512 F=2048 L=2 N=4 K=4 H=64 V=512"
MIXTURE = "D=512 Fe=1024 L=2 N=4 K=4 H=64 V=512 E=8 top_k=2"
ONE = "remat=none,num_microbatches=1"
PLANS = {
    "fsdp": (DENSE, f"fsdp=4,micro_batch=8,{ONE}"),
    "fsdp in eight microbatches": (DENSE, "fsdp=4,remat=none,micro_batch=1,num_microbatches=8"),
    "tensor": (DENSE, f"tensor=4,micro_batch=32,{ONE}"),
    "expert": (MIXTURE, f"expert=4,micro_batch=8,{ONE}"),
}
JOB = {"batch_tokens": 32 * 12, "seq_len": 12, "precision": "fp32"}

bench = meshwise.bench("machine", dtype="fp32", cpu_devices=DEVICES, seconds="0.2s")
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "machine.toml"
    file.write_text(bench.document)
    found = {}
    for name, (model, layout) in PLANS.items():
        slots = {"capacity_factor": 1} if model is MIXTURE else {}  # of balanced routing, which is what is priced
        plan = meshwise.estimate_train(model, layout=layout, cluster=str(file), **JOB, **slots).plans[0]
        ran = meshwise.run_plan(plan, steps=STEPS)
        assert ran.is_planned_chip, f"{ran.chip} is not {plan.problem.cluster.chip.name}"
        assert ran.mfu is not None
        found[name] = {"predicted": plan.estimate.step_time.expected, "measured": ran.step_seconds}
json.dump(found, sys.stdout)
