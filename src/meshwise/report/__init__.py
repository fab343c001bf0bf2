"""Values to words and pictures: tables, JSON dicts, terminal charts, SVG. Returns them; prints nothing.

Not here: computing any of the values, and parsing or printing (`cli`).
"""

from meshwise.report.report import SCHEMA_VERSION, Report

__all__ = ["SCHEMA_VERSION", "Report"]
