"""Several processes, each with devices of its own, run one step together."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from steps import alone, dense


@pytest.mark.slow  # two processes that start and compile JAX; it proves that no array is assumed to be at hand
def test_two_processes_give_the_loss_and_gradients_of_one_device():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    script = Path(__file__).with_name("run_process.py")
    command = [sys.executable, str(script), address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
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
