"""Compiled programs (HLO text) as values. Own reader, no library: any version's text reads without it installed.

Not here: compiling (`meshwise.compiler`), and what a plan expected (`meshwise.compiler.comparison`).
"""

__all__: list[str] = []
