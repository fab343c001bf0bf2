"""Several processes, each with devices of its own, run one step together."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.endpoint import free_port
from tests.conftest import FLAGS
from tests.runtime.steps import alone, dense


@pytest.mark.slow  # two processes that start and compile JAX; it proves that no array is assumed to be at hand
def test_two_processes_give_the_loss_and_gradients_of_one_device():
    address = f"localhost:{free_port()}"
    command = [sys.executable, "-m", "tests.runtime.run_process", address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[2]}
    processes = [subprocess.Popen([*command, str(n)], **pipes) for n in range(2)]  # noqa: S603
    try:
        ended = [p.communicate(timeout=300) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], ended
    found = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    loss, gradients = alone(dense("D=32 F=64 L=2 N=4 K=2 H=8 V=64"), 8)
    assert found[0] == found[1]
    assert found[0]["loss"] == pytest.approx(loss, rel=1e-5)
    for path, gradient in gradients.items():
        block, _, name = path.partition("/")
        assert found[0]["sizes"][block][name] == pytest.approx(np.sqrt((gradient**2).sum()), rel=1e-4)


TINY = "D=8 F=16 L=2 N=2 K=2 H=4 V=32"
JOB = ["--on", "h100:4", "--batch-tokens", "64", "--seq-len", "8", "--precision", "fp32", "--learning-rate", "0.01"]
LAYOUT = "fsdp=2,data=2,remat=full,micro_batch=2,num_microbatches=1"


def command(devices, *words):
    return [sys.executable, "-m", "meshwise", "run", TINY, *JOB, "--layout", LAYOUT, "--cpu-devices", str(devices),
            "--json", *words]  # fmt: skip


@contextlib.contextmanager
def two(folder, *words):
    """Two processes of two devices each, started as a user does."""
    together = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2"]
    processes = []
    try:
        for n in range(2):
            with (folder / f"{n}.out").open("w") as out, (folder / f"{n}.err").open("w") as err:
                line = command(2, *together, "--process-id", str(n), *words)
                processes.append(subprocess.Popen(line, stdout=out, stderr=err))  # noqa: S603
        yield processes
    finally:
        for p in processes:
            p.kill()
            p.wait()


def answer_of_two(folder, *words):
    with two(folder, *words) as processes:
        codes = [p.wait(timeout=400) for p in processes]
    assert codes == [0, 0], (folder / "0.err").read_text() + (folder / "1.err").read_text()
    assert (folder / "1.out").read_text() == ""  # the first speaks for both
    return json.loads((folder / "0.out").read_text())


@pytest.mark.slow  # seven processes that start and compile JAX: that no process's part of a saved state is lost
def test_two_processes_save_and_go_on_after_a_kill(tmp_path, monkeypatch):
    flags = (f for f in FLAGS.split() if "device_count" not in f)  # which the command asks for
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    # The same programs seven times: the first of two processes keeps what it compiled.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    saved = tmp_path / "steps"
    keep = ["--checkpoint", str(saved), "--every", "2"]
    with two(tmp_path, "--steps", "1000000", *keep):
        deadline = time.monotonic() + 400
        while not (saved / "step-00000002").exists():
            assert time.monotonic() < deadline, (tmp_path / "0.err").read_text()
            time.sleep(0.05)
    latest = max(int(p.name[5:]) for p in saved.glob("step-*") if not p.suffix)
    last = latest + 2
    resumed = answer_of_two(tmp_path, "--steps", str(last), *keep)
    whole = answer_of_two(tmp_path, "--steps", str(last))
    assert (resumed["first_step"], resumed["num_devices"]) == (latest + 1, 4)
    assert resumed["losses"] == whole["losses"][latest:]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    line = command(4, "--steps", str(last + 1), *keep)
    alone = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)  # noqa: S603
    assert json.loads(alone.stdout)["first_step"] == last + 1  # one process reads what two have written
