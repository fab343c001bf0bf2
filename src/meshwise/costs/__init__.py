"""The first place where models, shardings and hardware meet: rooflines, collectives on a network, memory, step time.

Import from the modules: each holds one noun. Not here: searching (`planning`) and words (`report`).
"""

__all__: list[str] = []
