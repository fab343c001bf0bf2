"""Rotary positions: frequencies, stretched as a model's authors did, and the rotation of a head's width.

Not here: where a model says so (`models.numerics`).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshwise.models.numerics import Rotary, Scaling


def frequencies(rotary: Rotary, width: int) -> NDArray[np.float64]:
    """Angle per position of each pair of the `width` dimensions that are rotated: theta ** (-2 i / width).

    Source: Su et al. 2021, RoFormer; stretched as `Scaling` says.
    """
    plain: NDArray[np.float64] = rotary.theta ** (-np.arange(0, width, 2) / width)
    scaling = rotary.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        rotations = scaling.original * plain / (2 * math.pi)
        smooth = np.clip((rotations - scaling.low) / (scaling.high - scaling.low), 0, 1)
        return plain * (smooth + (1 - smooth) / scaling.factor)
    return _yarn(plain, scaling, rotary.theta, width)


def _yarn(plain: NDArray[np.float64], scaling: Scaling, theta: float, width: int) -> NDArray[np.float64]:
    """Keep dimensions that rotate often, divide those that rotate seldom, pass linearly between (Peng et al. 2023)."""

    def dimension(rotations: float) -> float:
        """Where a dimension makes so many rotations within the original positions."""
        return width * math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.high), dimension(scaling.low)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    stretched: NDArray[np.float64] = plain * (1 - ramp) + plain / scaling.factor * ramp
    return stretched


def rotate(x: jax.Array, rotary: Rotary, positions: jax.Array) -> jax.Array:
    """Rotate the first `share` of the last dimension by position.

    Args:
        x: [B, T, ..., H].
        rotary: see there.
        positions: [T].
    """
    width = int(x.shape[-1] * rotary.share)
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(frequencies(rotary, width), jnp.float32)
    angles = angles.reshape(1, positions.shape[0], *[1] * (x.ndim - 3), width // 2)
    temperature = 1.0 if rotary.scaling is None else rotary.scaling.attention
    cos, sin = jnp.cos(angles) * temperature, jnp.sin(angles) * temperature
    rotated, rest = x[..., :width].astype(jnp.float32), x[..., width:]
    if rotary.interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = (
        jnp.stack(turned, axis=-1).reshape(rotated.shape) if rotary.interleaved else jnp.concatenate(turned, axis=-1)
    )
    return jnp.concatenate([joined.astype(x.dtype), rest], axis=-1)
