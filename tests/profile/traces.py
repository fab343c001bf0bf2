"""Real traces of tests/data/traces, and what tests do to them."""

import gzip
import json
from functools import cache
from pathlib import Path

from meshwise.profile import profile_traces, read_traces
from meshwise.profile.causes import find_causes
from meshwise.profile.diagnosis import Diagnosis

TRACES = Path(__file__).parents[1] / "data" / "traces"
PAX = [str(TRACES / "pax" / name) for name in ("proc0", "proc1")]
DLRM = [str(TRACES / f"dlrm_rank{rank}.json.gz") for rank in (0, 1)]
RESNET, QWEN, SGLANG = (
    str(TRACES / f"{name}.json.gz") for name in ("resnet_ddp_checkpoint", "qwen_h100", "sglang_decode")
)
TE, CPU, GRAPHS = (str(TRACES / f"{name}.xplane.pb.gz") for name in ("te_attention", "jax_cpu", "own_h100"))


@cache
def kept(path):
    """The traces of tests/data, read once."""
    return read_traces([path])


def traces_of(*paths):
    own = str(TRACES)
    return [t for path in map(str, paths) for t in (kept(path) if path.startswith(own) else read_traces([path]))]


def diagnose(*paths, step=None):
    profile = profile_traces(traces_of(*paths), step=step)
    return Diagnosis(profile, find_causes(profile))


def load(path):
    """A JSON trace."""
    return json.loads(gzip.decompress(Path(path).read_bytes()))


def save(document, path):
    path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    return str(path)


def on_device(event):
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def milliseconds(diagnosis, name):
    """Of all causes of a name."""
    return 1e3 * sum(c.seconds for c in diagnosis.causes if c.name == name)
