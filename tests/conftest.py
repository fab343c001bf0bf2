"""Eight fake devices for every test that runs JAX; they must be asked for before JAX looks for devices."""

import os

from hypothesis import settings

#: Compiling is nearly all that these tests do: LLVM need not try hard.
FLAGS = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"  # on a busy machine eight threads meet late
)

os.environ["JAX_PLATFORMS"] = "cpu"
#: XLA's threads on a CPU. A device that waits in a collective holds one, and devices may enter collectives that do not
#: depend on each other in any order: with eight threads for eight devices some runs wait for each other for ever.
os.environ["NPROC"] = "32"
if FLAGS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

# Machines are noisy; speed is measured in benchmarks.
settings.register_profile("meshwise", deadline=None)
settings.load_profile("meshwise")
