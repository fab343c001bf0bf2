"""Puts the folder of the small problems on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "costs"))
