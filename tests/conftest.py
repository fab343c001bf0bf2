"""Eight fake devices for every test that runs JAX, and which process of several runs which tests."""

import gc
import os

import pytest
from hypothesis import settings

#: Compiling is nearly all that these tests do: LLVM need not try hard, XLA's older loops for fused operations are
#: compiled in a third of the time that its newer ones take, and a program in one piece sooner than in 32.
FLAGS = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"  # on a busy machine eight threads meet late
)

# What is imported and collected stays: looking through it for garbage took a tenth of the time.
gc.disable()

#: Asked for before JAX looks for devices.
os.environ["JAX_PLATFORMS"] = "cpu"
#: XLA's threads on a CPU. A device that waits in a collective holds one, and devices may enter collectives that do not
#: depend on each other in any order: with eight threads for eight devices some runs wait for each other for ever.
os.environ["NPROC"] = "32"
# Hundreds of processes are started: each would compile the whole package anew, and xdist's all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if FLAGS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

# Machines are noisy; speed is measured in benchmarks. The same cases in every run: what fails for a change is due to
# it. `--hypothesis-profile anew` draws others.
settings.register_profile("anew", deadline=None)
settings.register_profile("meshwise", deadline=None, derandomize=True)
settings.load_profile("meshwise")

#: Folders that take longest, first; the others follow as they stand.
LONG = ("search", "runtime", "engine", "commands", "costs", "cli", "sharding", "answers", "docs", "scoring", "models")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each process gets whole folders, so that what their tests share is imported, placed and priced once."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 -- not there without xdist

    class Folders(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.split("::")[0].split("/")[1]

    config.option.loadscopereorder = False
    return Folders(config, log)


def pytest_collection_modifyitems(items):
    """Put long folders first, lest one begins last."""
    rank = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("/")[1], len(LONG)))


def pytest_collection_finish():
    """From here on only what tests make is looked through, and less often."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
