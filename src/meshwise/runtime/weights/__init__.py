"""Weights that others trained, read from published files and put where a layout holds them; and written as such."""

from meshwise.runtime.weights.loading import LoadableWeights, Weights, open_weights

__all__ = ["LoadableWeights", "Weights", "open_weights"]
