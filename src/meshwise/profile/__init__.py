"""Real traces: read, divided into what each instant was spent on, put beside a plan, and why a step is slow.

Profilers' files of several formats become one data model (`trace`, `reading`); steps are found (`steps`) and divided
exactly (`partition`). Not here: words and pictures (`report.profile`).
"""

from meshwise.profile.profile import Profile, profile_traces
from meshwise.profile.reading import read_trace, read_traces

__all__ = ["Profile", "profile_traces", "read_trace", "read_traces"]
