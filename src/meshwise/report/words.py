"""Small matters of grammar that several reports share. Not here: units (`meshwise.core.units`)."""

from __future__ import annotations

from meshwise.models import Model


def counted(number: int, noun: str) -> str:
    """Write a number of things.

    >>> counted(1, "chip"), counted(8960, "chip"), counted(0, "slice")
    ('1 chip', '8,960 chips', '0 slices')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def length_words(model: Model, seq_len: float) -> tuple[str, ...]:
    """Say that sequences are longer than a model was made for, nothing where they are not.

    >>> from meshwise.models import load_model
    >>> length_words(load_model("llama-3-8b"), 16384), length_words(load_model("llama-3-8b"), 8192)
    (('sequences of 16,384 tokens are longer than the 8,192 that llama-3-8b was made for',), ())
    """
    longest = model.max_seq_len
    if longest is None or seq_len <= longest:
        return ()
    return (f"sequences of {seq_len:,.0f} tokens are longer than the {longest:,} that {model.name} was made for",)
