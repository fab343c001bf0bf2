"""Ahead-of-time compilation for accelerators that are not there, and reading what the compiler made.

Not here: the program that is compiled (a lowered or jitted JAX object is handed in), verbs and words.
"""

__all__: list[str] = []
