"""The documentation site: these pages, the book's chapters and the Python functions, by Sphinx.

Build it with `python -m sphinx -W --keep-going -b html docs site`. It needs `pip install 'meshwise[docs]'` and no
network; its search works from files.
"""

from __future__ import annotations

import sys
from pathlib import Path

from meshwise import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "meshwise"
release = version = __version__
author = "the authors of meshwise"
project_copyright = author
extensions = ["myst_parser", "site_pages"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "site"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 5
html_theme = "furo"
html_title = "meshwise"
html_show_sphinx = False
html_copy_source = False
html_extra_path = ["llms.txt"]
html_static_path = ["_static"]
smartquotes_action = "qe"  # two hyphens are an option's, no dash
# Console blocks hold what commands print, which no lexer knows.
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]
