"""Weights that others trained: read from published files, and put where a layout holds them."""

from meshwise.runtime.weights.loading import Weights, open_weights

__all__ = ["Weights", "open_weights"]
