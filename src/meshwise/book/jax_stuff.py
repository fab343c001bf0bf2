"""Chapter "Programming TPUs in JAX": the shardings that it works out, and what they take."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.book.problems import Method
from meshwise.book.sharding import implied, local_shape, verdict, ways

METHODS: Mapping[str, Method] = {
    "auto.local_*": local_shape,
    "auto.collective": verdict,
    "auto.ways": ways,
    "auto.ar_bytes": "prod(shape)*bytes",
    "explicit.*": implied,
    "shmap.local": "n / (x*y)",
    # Every device's first element, n / devices apart.
    "shmap.mean": "n/devices * (devices - 1)/2",
    "cmm.speedup": "base_us / cmm_us",
    "cmm.overhead": "cmm_us/floor_us - 1",
    "cmm.local_a": local_shape,
    "cmm.flops": "2*B*D*F / devices",
}
