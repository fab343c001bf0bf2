"""Compiled programs on disk, found by what went in: the lowered text, the target, the order of devices, versions.

In `$MESHWISE_CACHE`, else `$XDG_CACHE_HOME/meshwise`, else `~/.cache/meshwise`. An entry is written whole or not at
all; one that cannot be read counts as absent. Not here: compiling.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Changes when entries are written differently.
_FORMAT = 1


def cache_folder() -> Path:
    """Where compiled programs are kept."""
    own = os.environ.get("MESHWISE_CACHE")
    if own:
        return Path(own) / "compiled"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwise" / "compiled"


def content_key(text: str, facts: Mapping[str, Any]) -> str:
    """Name an entry by all that its content depends on.

    >>> content_key("a", {"x": 1}) == content_key("a", {"x": 1}), content_key("a", {"x": 1}) == content_key("a", {})
    (True, False)
    """
    digest = hashlib.sha256()
    digest.update(json.dumps({"format": _FORMAT, **facts}, sort_keys=True).encode())
    digest.update(text.encode())
    return digest.hexdigest()


def read_entry(key: str, folder: Path | None = None) -> dict[str, Any] | None:
    """Read an entry, None where there is none that can be read."""
    path = (folder or cache_folder()) / f"{key}.json.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, EOFError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get("key") == key else None


def write_entry(key: str, value: Mapping[str, Any], folder: Path | None = None) -> Path | None:
    """Write an entry; give its file, or None where the folder cannot be written: a cache is never a must."""
    home = folder or cache_folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home, prefix=".new-", delete=False) as raw:
            try:
                with gzip.open(raw, "wt", encoding="utf-8", compresslevel=5) as file:
                    json.dump({**value, "key": key}, file)
            except BaseException:
                Path(raw.name).unlink(missing_ok=True)
                raise
        return Path(raw.name).replace(home / f"{key}.json.gz")
    except OSError:
        return None
