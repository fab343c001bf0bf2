"""The verbs as Python functions: a validated request in, values out. Command line and `import meshwise` share them.

Not here: flags and printing (`cli`), words and pictures (`report`). One file a verb; loaded when a verb is first used.
"""

__all__: list[str] = []
