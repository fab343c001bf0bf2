"""Eight fake devices for every test of this folder; they must be asked for before JAX looks for devices."""

import os

#: Compiling is nearly all that these tests do: LLVM need not try hard.
FLAGS = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"  # on a busy machine eight threads meet late
)

os.environ["JAX_PLATFORMS"] = "cpu"
if FLAGS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
