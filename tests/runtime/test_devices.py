"""Which platforms JAX looks for: those whose hardware is there; and what is said of the others."""

import importlib.util
import logging
import os
import subprocess
import sys

import jax
import pytest

from meshwise.runtime import devices
from meshwise.runtime.devices import Hardware, looking_for_devices

PLUGIN = "jax_plugins.xla_cuda12"
NOTHING = Hardware(gpu=False, tpu=False)
BOTH = ["jax_plugins.xla_cuda12", "jax_plugins.other"]


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    """No plugin is imported yet, whatever the tests before in this process have compiled for."""
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)


@pytest.fixture
def unset(monkeypatch):
    """JAX as a user has it: with no platform named, and no plugin loaded by an earlier test."""
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(
    ("hardware", "plugins", "expected", "said"),
    [
        (NOTHING, [PLUGIN], "cpu", "no GPU driver found; running on CPU"),
        (NOTHING, [], "cpu", None),
        (Hardware(gpu=True, tpu=False), [PLUGIN], "cuda,cpu", None),
        (Hardware(gpu=True, tpu=False), [], "cpu", "a GPU driver was found, and JAX runs without it"),
        (Hardware(gpu=False, tpu=True), [PLUGIN], None, "no GPU driver found"),
        (NOTHING, BOTH, None, "no GPU driver found"),
        (Hardware(gpu=True, tpu=False), BOTH, None, None),
    ],
)
def test_only_what_can_be_there_is_looked_for(monkeypatch, hardware, plugins, expected, said):
    monkeypatch.setattr(devices, "_plugins", lambda: plugins)
    lines = []
    with looking_for_devices(lines.append, hardware):
        assert jax.config.jax_platforms == expected
        if PLUGIN in plugins and importlib.util.find_spec(PLUGIN):
            left_out = PLUGIN in sys.modules and not hasattr(sys.modules[PLUGIN], "__file__")
            assert left_out != hardware.gpu
    assert len(lines) == (said is not None)
    assert said is None or lines[0].startswith(said)
    assert ("running on CPU" in "".join(lines)) == (expected == "cpu" and PLUGIN in plugins)
    assert PLUGIN not in sys.modules  # to be loaded by a compiler


def test_what_a_user_has_set_stays():
    assert jax.config.jax_platforms == "cpu"
    lines = []
    with looking_for_devices(lines.append, Hardware(gpu=True, tpu=True)):
        assert jax.config.jax_platforms == "cpu"
    assert lines == []


def test_a_plugin_that_fails_is_said_in_one_line(monkeypatch, unset, caplog):
    monkeypatch.setattr(devices, "_plugins", lambda: [PLUGIN])
    lines, logger = [], logging.getLogger("jax._src.xla_bridge")
    with looking_for_devices(lines.append, Hardware(gpu=True, tpu=False)):
        error = RuntimeError("Outdated cuDNN installation found.\nVersion JAX was built against: 90800")
        logger.error("Jax plugin configuration error", exc_info=error)
    assert lines == ["Outdated cuDNN installation found. Version JAX was built against: 90800"]
    assert not caplog.records
    logger.warning("heard again")
    assert [r.getMessage() for r in caplog.records] == ["heard again"]


def test_hardware_is_known_by_its_device_file_and_driver(tmp_path):
    assert Hardware.find(tmp_path, "libc.so.6") == NOTHING
    (tmp_path / "nvidia0").touch()
    assert Hardware.find(tmp_path, "libc.so.6").gpu
    assert not Hardware.find(tmp_path, "libno-such-driver.so.1").gpu
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()
    assert not Hardware.find(tmp_path).tpu
    (tmp_path / "vfio" / "0").touch()
    assert Hardware.find(tmp_path).tpu


@pytest.mark.jax
@pytest.mark.skipif(Hardware.find() != NOTHING or not importlib.util.find_spec(PLUGIN), reason="a GPU, or no plugin")
def test_nothing_else_reaches_a_user_without_a_gpu():
    words = ["bench", "matmul", "--sizes", "8x8x8", "--seconds", "1ms"]
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-m", "meshwise", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)  # noqa: S603
    lines = [line for line in done.stderr.splitlines() if not line.endswith("(1 of 1)")]
    assert lines == ["no GPU driver found; running on CPU"]
