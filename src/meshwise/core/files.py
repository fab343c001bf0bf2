"""Files of users: JSON and TOML read without trust, and texts written so that a file is never torn.

Not here: what is in them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from meshwise.core.errors import ConfigError, quoted

#: What JSON and TOML hold; those that read it check what they take.
Value: TypeAlias = object

#: Values may stand in so many others: more than any configuration has, fewer than a recursive function can follow.
_DEEPEST = 100
#: No whole number that means anything has more digits.
_MOST_DIGITS = 40

_Node: TypeAlias = "tuple[object, object, _Node | None, int]"  # value, its key, what holds it, how deep it stands


def parse_json(text: str, where: str, *, finite: bool = True) -> Value:
    """Read JSON.

    >>> parse_json('{"a": [1, 2.5]}', "mine.json")
    {'a': [1, 2.5]}

    Args:
        text: of the file.
        where: what errors call it.
        finite: whether NaN and infinities are refused.

    Raises:
        ConfigError: torn, with line and column; a key twice, nested too deeply, a number that is none.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ConfigError(f"{where}: key {quoted(twice)} appears twice; keep one")
        return found

    try:
        value: object = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        place = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where}: not valid JSON: {place}; is the file complete?") from None
    except ConfigError:
        raise
    except ValueError:  # Python's limit on the digits of a whole number
        raise ConfigError(f"{where}: a number has thousands of digits") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply; expected at most {_DEEPEST} levels") from None
    _check(value, where, finite=finite)
    return value


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Read TOML.

    >>> parse_toml("a = 1", "mine.toml")
    {'a': 1}

    Args:
        text: of the file.
        where: what errors call it.

    Raises:
        ConfigError: no TOML, with line and column; nested too deeply, a number that is none.
    """
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply; expected at most {_DEEPEST} levels") from None
    except ValueError as error:
        if not isinstance(error, tomllib.TOMLDecodeError):  # Python's limit on the digits of a whole number, a date
            raise ConfigError(f"{where}: not TOML: a value that cannot be: {error}") from None
        raise ConfigError(f"{where} is not TOML: {error}") from None
    _check(value, where, finite=True)
    return value


def _check(value: object, where: str, *, finite: bool) -> None:
    """Refuse what stands too deep, and numbers that are none or are too long; visits every value once."""
    todo: list[_Node] = [(value, "", None, 1)]
    while todo:
        node = todo.pop()
        found, _, _, depth = node
        if isinstance(found, dict | list):
            if depth > _DEEPEST:
                raise ConfigError(f"{where}: nested too deeply; expected at most {_DEEPEST} levels")
            inside = found.items() if isinstance(found, dict) else enumerate(found)
            todo += [(v, key, node, depth + 1) for key, v in inside]
        elif isinstance(found, float) and finite and not math.isfinite(found):
            raise ConfigError(f"{where}: {_path(node)}: expected a finite number, found {found}")
        elif isinstance(found, int) and abs(found) >= 10**_MOST_DIGITS:
            raise ConfigError(f"{where}: {_path(node)}: expected a number of at most {_MOST_DIGITS} digits")


def _path(node: _Node | None) -> str:
    """Where a value stands: `model.layers.3`."""
    keys = []
    while node is not None and node[2] is not None:
        keys.append(str(node[1]))
        node = node[2]
    return quoted(".".join(reversed(keys)))[1:-1] or "value"


def read_whole(path: str | os.PathLike[str], encoding: str = "utf-8") -> str:
    """The text of a file.

    Raises:
        OSError: it cannot be read, or no file can have such a name.
        UnicodeDecodeError: it holds no text.
    """
    name = os.fspath(path)
    if "\0" in name:
        raise OSError(errno.EINVAL, "no file has a zero byte in its name")
    return Path(name).read_text(encoding=encoding)


def write_whole(path: Path, data: str | bytes, *, new: bool = False) -> None:
    """Write a file that is never seen torn: aside, to the disk, then renamed; until then the old one is kept.

    What is no regular file, such as a pipe or a device, is written to as it is.

    Args:
        path: where to; a link stays one.
        data: bytes, or text that is written in UTF-8.
        new: whether there may be no such file yet.

    Raises:
        OSError: it cannot be written; an old file is as it was, and nothing is left beside it.
    """
    written = data.encode() if isinstance(data, str) else data
    target = Path(os.path.realpath(path))
    mode = target.stat().st_mode if target.exists() else None
    if mode is not None and not new and not stat.S_ISREG(mode):
        with target.open("wb") as stream:
            stream.write(written)
        return
    if mode is not None and not new and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with _aside(target.parent, written) as part:
        if new:
            _link(part, target)
        else:
            if mode is not None:
                part.chmod(stat.S_IMODE(mode))
            part.replace(target)
    with contextlib.suppress(OSError):  # not every file system knows how
        _sync(target.parent)


def _link(part: Path, target: Path) -> None:
    """Give a written file its name, which no other may have, not even since a moment ago."""
    try:
        os.link(part, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        part.replace(target)


@contextlib.contextmanager
def _aside(folder: Path, data: bytes) -> Iterator[Path]:
    """A new file in a folder that holds `data`, on the disk; it is gone afterwards unless it was renamed."""
    part = folder / f".meshwise-{secrets.token_hex(6)}.part"
    try:
        with part.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        yield part
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
