"""Refuse sequences that a model cannot read at all. Not here: those that are merely longer than it was made for."""

from __future__ import annotations

from meshwise.core.errors import LayoutError
from meshwise.models.model import Model


def check_length(model: Model, seq_len: float) -> None:
    """Refuse sequences longer than the model's table of learned positions (its axis P).

    >>> import meshwise
    >>> check_length(meshwise.model("gpt2"), 1024)
    >>> check_length(meshwise.model("gpt2"), 1025)
    Traceback (most recent call last):
    ...
    meshwise.core.errors.LayoutError: seq_len: gpt2 has learned positions for 1,024 tokens, found 1,025; ...

    Raises:
        LayoutError: with the longest length that it can read.
    """
    if "P" not in model.sizes:
        return
    longest = model.max_seq_len or int(model.sizes["P"])
    if seq_len > longest:
        raise LayoutError(
            f"seq_len: {model.name} has learned positions for {longest:,} tokens, "
            f"found {seq_len:,.0f}; use {longest:,} or less"
        )
