"""Chapter "How to Profile TPU Programs": what is counted, and what measured times say."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.book.problems import Method

METHODS: Mapping[str, Method] = {
    "tile.padded": "shape(ceil(shape[0]/tile[0])*tile[0], ceil(shape[1]/tile[1])*tile[1])",
    "tile.overhead": "ceil(shape[0]/tile[0])*tile[0] * ceil(shape[1]/tile[1])*tile[1] / prod(shape)",
    "hlo.fusion3_bytes": "prod(shape)*bytes",
    "q1.mp": "len(group)",
    "q1.true_w": "shape(local[0]*mp, local[1])",
    "q2.speedup": "before / after",
    "ffw.global_x": "shape(local[0]*dp, local[1], local[2])",
    "ffw.global_w": "shape(local[0], local[1]*mp)",
    "ffw.tokens": "b*t",
    "ffw.time": "2*B*T*D*F / (cores*C_bf16)",
    "ffw.util": "2*B*T*D*F / (cores*C_bf16) / (measured_ms*1e-3)",
    "rs.shard": "2*B/dp*T*D",
    "rs.time": "2*B/dp*T*D / W_ici_bidi",
    "attn.q_proj": "2*B*T*D*N*H / (cores*C_bf16)",
}
