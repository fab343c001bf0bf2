"""Reads traces of several profilers into one data model (`profile.trace`)."""

from meshwise.profile.reading.files import read_trace, read_traces

__all__ = ["read_trace", "read_traces"]
