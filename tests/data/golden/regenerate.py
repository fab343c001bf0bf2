"""The weights of a golden model, drawn from the names of its tensors: alike wherever they are drawn.

NumPy promises the numbers of `RandomState` for good (NEP 19), so that only logits need to be stored.
"""

import math
import zlib

import numpy as np


def draw(name, shape):
    """Draw the tensor of this published name: fp32, norms around one, matrices by the width that they end in."""
    normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) > 1:
        return (normal * 1.5 / math.sqrt(shape[-1])).astype(np.float32)
    is_norm = any(part in name for part in ("norm", "ln_")) and not name.endswith("bias")
    return (normal * 0.3 + is_norm).astype(np.float32)
