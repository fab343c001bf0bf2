"""Commands that start engines as planned, and the one that measures what was predicted; one file an engine."""
