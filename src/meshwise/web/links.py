"""Links and commands: both are a verb with the same options, so that each can be written as the other.

Not here: what the options mean (`commands`), or which page shows a verb (`views`).
"""

from __future__ import annotations

import difflib
import importlib
import shlex
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from pydantic.fields import FieldInfo

from meshwise.commands.command import Verb, in_order
from meshwise.commands.requests import Flag, Request, bare_type, choices, marker
from meshwise.commands.typed import build, typed_name
from meshwise.core.errors import MeshwiseError, UnknownNameError

#: Option names and their texts, in the order of the verb's help.
Pairs = tuple[tuple[str, str], ...]

#: Verb that the page answers -> where in `commands` it is.
VERBS: Mapping[str, str] = {
    "plan train": "plan_train:show_plans",
    "plan serve": "plan_serve:show_plans",
    "estimate train": "estimate_train:show_estimate",
    "estimate serve": "estimate_serve:show_estimate",
    "simulate train": "simulate_train:show_timeline",
    "fit": "fit:show_fit",
    "model": "catalogs:show_model",
    "models": "catalogs:show_models",
    "chips": "catalogs:show_chips",
    "clusters": "catalogs:show_clusters",
    "roofline": "roofline:show_roofline",
    "shard": "shard:show_product",
    "collective": "collective:show_collective",
    "book": "book:show_book",
    "rule": "rule:show_rule",
}

#: Options that say how a terminal shows an answer; a page shows it in all these ways.
_SHOWN = ("--json", "--details", "--explain")

_SAFE = ":,=*/@"


@dataclass(frozen=True)
class Option:
    """One option of a verb, as links and forms have it.

    Args:
        key: its name in a link.
        typed: its name on the command line, `--on` or `MODEL`.
        number: of the verb's request that it belongs to.
        request: the request's kind.
        name: of the field.
        info: what the field says of itself.
    """

    key: str
    typed: str
    number: int
    request: type[Request]
    name: str
    info: FieldInfo

    @property
    def positional(self) -> bool:
        """Whether it stands without a flag."""
        return self.name in self.request.positional

    @property
    def switch(self) -> bool:
        """Whether it is yes or no."""
        return bare_type(self.info.annotation) is bool

    @property
    def many(self) -> bool:
        """Whether it may be repeated."""
        return typing.get_origin(bare_type(self.info.annotation)) in (tuple, list, dict)

    @property
    def metavar(self) -> str:
        """What stands for its value in the help, where its type does not say it."""
        return (marker(self.info, Flag) or Flag()).metavar

    @property
    def words(self) -> list[str]:
        """The words that it may be, if these are a closed set."""
        return ["yes", "no"] if self.switch else choices(bare_type(self.info.annotation))

    @property
    def default(self) -> str | None:
        """Its default as text, where a link may leave it out for that."""
        value = self.info.default
        if self.switch:
            return "yes" if value else "no"
        if self.words:
            return None if value is None or self.info.is_required() else str(getattr(value, "value", value))
        return None


@cache
def load(verb: str) -> Verb:
    """Import a verb of VERBS."""
    module, name = VERBS[verb].split(":")
    found: Verb = getattr(importlib.import_module(f"meshwise.commands.{module}"), name)
    return found


@cache
def options(verb: str) -> Mapping[str, Option]:
    """Key -> option of a verb, those given by position first; what writes files is left out."""
    return {o.key: o for o in _all_options(verb) if bare_type(o.info.annotation) is not Path and o.key != "template"}


def _all_options(verb: str) -> Iterator[Option]:
    found = load(verb)
    for number, request in enumerate(found.requests):
        for name, info in in_order(request).items():
            typed = typed_name(found, request, name)
            key = name.replace("_", "-") if name in request.positional else typed.split("/")[0].removeprefix("--")
            yield Option(key, typed.split("/")[0], number, request, name, info)


def read_pairs(verb: str, given: Iterable[tuple[str, str]]) -> Pairs:
    """Check the names of options and put them in order; what is empty or the default is left out.

    >>> read_pairs("roofline", [("on", "v5e"), ("memory", "hbm"), ("expression", "f32[N] + f32[N] -> f32[N]")])
    (('expression', 'f32[N] + f32[N] -> f32[N]'), ('on', 'v5e'))

    Raises:
        MeshwiseError: an option that the verb lacks, that writes a file, or that is given twice.
    """
    known = options(verb)
    found: dict[str, list[str]] = {key: [] for key in known}
    for key, text in given:
        if key not in known:
            raise _unknown(verb, key)
        if text.strip():
            found[key].append(text.strip())
    for key, texts in found.items():
        if len(texts) > 1 and not known[key].many:
            raise MeshwiseError(f"{known[key].typed} is given twice: {texts[0]!r} and {texts[1]!r}")
    return tuple((key, text) for key, texts in found.items() for text in texts if text != known[key].default)


def _unknown(verb: str, key: str) -> MeshwiseError:
    if any(o.key == key for o in _all_options(verb)):
        return MeshwiseError(f"--{key} writes a file or prints one, which a link does not: use the command line")
    return UnknownNameError("option", key[:80], options(verb), hint=f"They are those of 'meshwise {verb}'.")


def requests_of(verb: str, pairs: Pairs) -> list[Request | str]:
    """Build a verb's requests.

    Raises:
        MeshwiseError: in the words of the command line.
    """
    found, known = load(verb), options(verb)
    typed: list[dict[str, Any]] = [{} for _ in found.requests]
    for key, text in pairs:
        option = known[key]
        values = typed[option.number]
        if option.many:
            values[option.name] = (*values.get(option.name, ()), text)
        else:
            values[option.name] = _switched(option, text) if option.switch else text
    return [build(found, request, values) for request, values in zip(found.requests, typed, strict=True)]


def _switched(option: Option, text: str) -> bool:
    if text not in ("yes", "no"):
        raise MeshwiseError(f"{option.typed}: expected yes or no, found {text!r}")
    return text == "yes"


def query(pairs: Iterable[tuple[str, str]]) -> str:
    """Write options as the query of a link.

    >>> query((("on", "v5e:4x8"), ("set", "B=1Ki")))
    'on=v5e:4x8&set=B=1Ki'
    """
    return urlencode(list(pairs), safe=_SAFE, quote_via=quote)


def command(verb: str, pairs: Pairs) -> str:
    """Write the command of a link.

    >>> command("plan train", (("model", "llama-3-8b"), ("on", "v5e:4x8"), ("front", "yes")))
    'meshwise plan train llama-3-8b --on v5e:4x8 --front'
    """
    return shlex.join(["meshwise", *words(verb, pairs)])


def words(verb: str, pairs: Pairs) -> list[str]:
    """What follows `meshwise`."""
    known = options(verb)
    positional = [text for key, text in pairs if known[key].positional]
    flags = [word for key, text in pairs if not known[key].positional for word in _flagged(known[key], text)]
    if any(text.startswith("-") for text in positional):
        return [*verb.split(), *flags, "--", *positional]
    return [*verb.split(), *positional, *flags]


def _flagged(option: Option, text: str) -> list[str]:
    if option.switch:
        return [option.typed if text == "yes" else f"--no-{option.typed.removeprefix('--')}"]
    return [option.typed, text]


def parse_command(text: str) -> tuple[str, Pairs]:
    """Read a command as a verb and its options.

    >>> parse_command("meshwise plan train llama-3-8b --on v5e:4x8 --front")
    ('plan train', (('model', 'llama-3-8b'), ('on', 'v5e:4x8'), ('front', 'yes')))

    Raises:
        MeshwiseError: no command of meshwise that the page can show.
    """
    try:
        typed = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise MeshwiseError(f"the command cannot be read ({str(error).lower()}): {text[:200]!r}") from None
    typed = typed[typed[:1] in (["meshwise"], ["$"]) :]
    typed = typed[typed[:1] == ["meshwise"] :]
    two = " ".join(typed[:2])
    if two in VERBS:
        return two, read_pairs(two, _parsed(two, typed[2:]))
    if typed[:1] == ["simulate"]:
        return "simulate train", read_pairs("simulate train", _parsed("simulate train", typed[1:]))
    if typed and typed[0] in VERBS:
        return typed[0], read_pairs(typed[0], _parsed(typed[0], typed[1:]))
    near = difflib.get_close_matches(two, VERBS, 3)
    raise MeshwiseError(
        f"the page shows no command {two[:80]!r}{f'; nearest: {chr(44).join(near)}' if near else ''}; it shows "
        f"{', '.join(VERBS)}"
    )


def parse_options(verb: str, text: str) -> Pairs:
    """Read options alone, `--on h200:64 --seq-len 8192`.

    Raises:
        MeshwiseError: options that the verb lacks.
    """
    return read_pairs(verb, _parsed(verb, shlex.split(text)))


def _parsed(verb: str, typed: Sequence[str]) -> list[tuple[str, str]]:
    """Options and their texts of the words of a command."""
    flags = {o.typed: o for o in _all_options(verb) if not o.positional}
    places = iter([o.key for o in options(verb).values() if o.positional])
    found: list[tuple[str, str]] = []
    rest, only_words = list(typed), False
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word == "--" and not only_words:
            only_words = True
        elif only_words or not word.startswith("--"):
            if (key := next(places, None)) is None:
                raise MeshwiseError(f"'meshwise {verb}' takes no further word {word[:80]!r}; options begin with --")
            found.append((key, word))
        elif name.startswith("--no-") and (option := flags.get(f"--{name[5:]}")) and option.switch:
            found.append((option.key, "no"))
        elif name in flags and flags[name].switch:
            found.append((flags[name].key, "yes"))
        elif word not in _SHOWN:
            if name not in flags:
                raise _unknown(verb, name.removeprefix("--"))
            if not equals and not rest:
                raise MeshwiseError(f"{name} is the last word of the command: its value is missing")
            found.append((flags[name].key, value if equals else rest.pop(0)))
    return found
