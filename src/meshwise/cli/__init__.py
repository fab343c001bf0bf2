"""The command line: parses text into typed requests, calls, prints. One file per verb.

Not here: arithmetic (`costs`, `planning`) and what a report looks like (`report`).
"""

__all__: list[str] = []
