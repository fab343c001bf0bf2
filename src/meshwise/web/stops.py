"""What can be varied beside an answer: for each quantity the values around its own, each a link.

A browser without JavaScript shows them as links; with it, as a slider over the same links.
Not here: what a value does to the answer (`commands`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.book import Problem, catalog_constants, problems, solve
from meshwise.core.errors import MeshwiseError
from meshwise.core.units import parse_count
from meshwise.models import load_model
from meshwise.sharding.layout import MESH_AXES, axis_of
from meshwise.sharding.serving import ServingLayout
from meshwise.web.answers import Answered
from meshwise.web.front import along
from meshwise.web.links import Pairs
from meshwise.web.moves import shared
from meshwise.web.views import changed, link

_Json = Mapping[str, Any]


@dataclass(frozen=True)
class Stops:
    """A quantity that can be varied.

    Args:
        name: of the quantity.
        values: text -> link, in order.
        own: the text that is shown.
        kind: a class; `along` of the points of a chart, which a pointer drags along.
    """

    name: str
    values: Mapping[str, str]
    own: str
    kind: str = ""


def stops_of(answered: Answered, page: Mapping[str, str]) -> list[Stops]:
    """What can be varied beside an answer.

    Args:
        answered: the answer.
        page: options of the page alone, such as the point of the front that is shown.
    """
    find = _FOUND.get(answered.verb)
    if find is None or answered.envelope is None:
        return []
    found = [*find(answered, answered.envelope)]
    if answered.verb == "plan serve":
        found.insert(0, Stops("along the front", *along(answered, page), "along"))
    return [s for s in found if len(s.values) > 1]


def count_text(number: float) -> str:
    """A count as users type it.

    >>> count_text(4194304), count_text(24576), count_text(1000)
    ('4Mi', '24Ki', '1000')
    """
    whole = int(number)
    for unit, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if whole % size == 0:
            return f"{whole // size}{unit}"
    return str(whole)


def _around(number: float, *, down: int = 3, up: int = 3, least: int = 1) -> list[int]:
    """Halves and doubles of a whole number."""
    lower = [int(number) // 2**k for k in range(down, 0, -1) if int(number) % 2**k == 0]
    return [n for n in (*lower, *(int(number) * 2**k for k in range(up + 1))) if n >= least]


def _counts(verb: str, pairs: Pairs, key: str, own: float, name: str, *, most: float = math.inf, **extra: str) -> Stops:
    """Halves and doubles of an option that is a count, those that are not above `most`."""
    values = {
        count_text(n): link(verb, changed(verb, pairs, **{key: count_text(n), **extra}))
        for n in _around(own)
        if n <= max(most, own)
    }
    return Stops(name, values, count_text(own))


def _train(answered: Answered, data: _Json) -> Iterator[Stops]:
    """Of a layout: its axes, then batch and length. After a search the same of the best layout."""
    if "plans" not in data:  # of several clusters, or of more and more chips
        return
    best, pairs = data["plans"][0], answered.pairs
    text = dict(pairs).get("layout") or _axes_text(best["layout"])
    allowed = shared(pairs, "estimate train")
    for axis in ("data", "fsdp", "tensor", "context", "expert", "stage"):
        if axis == "expert" and best["layout"]["expert"] == 1:
            continue
        values: dict[str, str] = {}
        for size in _powers(best["num_chips"]):
            sizes = resized(best["layout"], axis, size, best["num_chips"])
            if sizes is not None:
                new = text if sizes == best["layout"] else _relayout(text, sizes)
                values[str(size)] = link("estimate train", changed("estimate train", allowed, layout=new, changes="no"))
        yield Stops(axis, values, str(best["layout"][axis]))
    held = changed("estimate train", allowed, layout=text, changes="no")
    yield _counts("estimate train", held, "batch_tokens", data["inputs"]["batch_tokens"], "batch tokens")
    yield _counts("estimate train", held, "seq_len", data["inputs"]["seq_len_tokens"], "sequence length")


def _powers(chips: int) -> list[int]:
    """Sizes of an axis that divide the chips, powers of two."""
    return [2**k for k in range(chips.bit_length()) if chips % 2**k == 0]


def resized(sizes: Mapping[str, int], axis: str, size: int, chips: int) -> dict[str, int] | None:
    """The sizes with one axis changed and others made to fit: replicas first, then FSDP, ...; None if they cannot.

    >>> resized({"tensor": 4, "fsdp": 1, "data": 16}, "tensor", 8, 64)
    {'tensor': 8, 'fsdp': 1, 'data': 8}
    """
    new = {**sizes, axis: size}
    fillers = [a for a in ("data", "fsdp", "context", "ulysses", "expert", "stage", "tensor") if a in new and a != axis]
    for filler in fillers:
        used = math.prod(new.values())
        if used > chips:
            factor = math.gcd(new[filler], used // chips) if used % chips == 0 else 1
            new[filler] //= factor
    if math.prod(new.values()) < chips and fillers:
        new[fillers[0]] *= chips // math.prod(new.values())
    return new if math.prod(new.values()) == chips else None


def _axes_text(sizes: Mapping[str, int]) -> str:
    used = [f"{axis}={sizes[axis]}" for axis in reversed(MESH_AXES) if sizes.get(axis, 1) > 1]
    return ",".join(used) or "data=1"


#: Choices that go with the sizes they were made for.
_TIED = frozenset({"schedule", "virtual_stages", "micro_batch", "num_microbatches"})


def _relayout(text: str, sizes: Mapping[str, int]) -> str:
    """A layout's text with other sizes; choices are kept, those of the pipeline are made anew."""
    parts = [part.strip() for part in text.split(",") if "=" in part]
    names = [(part.partition("=")[0].strip(), part) for part in parts]
    kept = [part for name, part in names if axis_of(name) is None and name.lower() not in _TIED]
    return ",".join([_axes_text(sizes), *kept])


def _serve(answered: Answered, data: _Json) -> Iterator[Stops]:
    """Of a search the lengths of requests; of a layout also its batch and its axes."""
    verb, pairs = answered.verb, answered.pairs
    typed = dict(pairs)
    if verb == "estimate serve":
        yield _counts(verb, pairs, "batch", data["inputs"]["batch"], "batch", changes="no")
        yield from _serving_axes(pairs, data)
    extra = {"changes": "no"} if verb == "estimate serve" else {}
    lengths = {key: _whole(typed.get(key)) for key in ("prompt", "output")}
    longest = load_model(typed["model"]).max_seq_len or math.inf
    for key, other in (("prompt", "output"), ("output", "prompt")):
        if (own := lengths[key]) is not None:
            most = longest - (lengths[other] or 0)
            yield _counts(verb, pairs, key, own, f"{key} tokens", most=most, **extra)


def _serving_axes(pairs: Pairs, data: _Json) -> Iterator[Stops]:
    plan = data["plans"][0]
    fields, chips = plan["decode"]["layout_fields"], plan["num_chips"]
    sizes = {axis: fields[axis] for axis in ServingLayout.FIELDS.axes}
    for axis in ("tensor", "replicas"):
        values: dict[str, str] = {}
        for size in _powers(chips):
            new = {**sizes, axis: size}
            other = "replicas" if axis == "tensor" else "tensor"
            rest = math.prod(n for name, n in new.items() if name != other)
            if chips % rest == 0:
                new[other] = chips // rest
                text = ",".join(f"{name}={n}" for name, n in new.items() if n > 1) or "tensor=1"
                values[str(size)] = link("estimate serve", changed("estimate serve", pairs, layout=text, changes="no"))
        yield Stops(axis, values, str(sizes[axis]))


def _whole(text: str | None) -> float | None:
    """A count that is no distribution."""
    try:
        found = parse_count(text or "")
    except MeshwiseError:
        return None
    return found if found == int(found) else None


def _sized(answered: Answered, sizes: Mapping[str, int], key: str, names: Sequence[str]) -> Iterator[Stops]:
    """Halves and doubles of each size in an option such as B=64,D=8Ki."""
    for name in names:
        values = {}
        for n in _around(sizes[name], down=5, up=5):
            text = ",".join(f"{a}={count_text(n if a == name else s)}" for a, s in sizes.items())
            values[count_text(n)] = link(answered.verb, changed(answered.verb, answered.pairs, **{key: text}))
        yield Stops(name, values, count_text(sizes[name]))


def _roofline(answered: Answered, data: _Json) -> Iterator[Stops]:
    sizes = data["inputs"]["sizes"]
    yield from _sized(answered, sizes, "set", list(sizes))


def _shard(answered: Answered, data: _Json) -> Iterator[Stops]:
    sizes = data["inputs"]["sizes"]
    yield from _sized(answered, sizes, "set", list(sizes))


def _model(answered: Answered, data: _Json) -> Iterator[Stops]:
    yield _counts(answered.verb, answered.pairs, "seq_len", data["inputs"]["seq_len_tokens"], "sequence length")


#: Factors by which a number of a problem is varied.
_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)


def _book(answered: Answered, data: _Json) -> Iterator[Stops]:
    """Of a problem each number of its question; whole numbers stay whole."""
    if "given" not in data or data["inputs"]["hint"]:
        return
    changes, problem = dict(data["inputs"]["changes"]), problems()[data["id"]]
    printed = {**problem.given, **problem.constants}
    if data["inputs"]["constants"] == "catalog":
        printed |= catalog_constants(problem.constants)
    for name, base in printed.items():
        if isinstance(base, bool) or not isinstance(base, int | float) or not base:
            continue
        numbers = {base * factor for factor in _FACTORS}
        if isinstance(base, int) or base == int(base) < _WHOLE:
            numbers = {n for n in numbers if n == int(n)}
        own = float(changes.get(name, base)) if _is_number(changes.get(name, "0")) else base
        others = {key: text for key, text in changes.items() if key != name}
        if not _counts_in(problem, others, name, numbers):
            continue
        values = {}
        for number in sorted({*numbers, own}):
            new = others | ({} if number == base else {name: _plain(number)})
            asked = ",".join(f"{key}={text}" for key, text in new.items()) or None
            values[_plain(number)] = link("book", changed("book", answered.pairs, set=asked, answer=None))
        yield Stops(name, values, _plain(own))


def _counts_in(problem: Problem, others: Mapping[str, str], name: str, numbers: Iterable[float]) -> bool:
    """Whether a number of a problem is in its working; several questions often share what they give."""
    found = set()
    for number in numbers:
        try:
            how = solve(problem, {**others, name: _plain(number)}).explanation
        except MeshwiseError:
            return True
        found.add((how.substitution, how.result))
    return len(found) > 1


def _rule(answered: Answered, data: _Json) -> Iterator[Stops]:
    """Of a rule each letter that is a number."""
    given = dict(data["inputs"]["values"])
    for name, letter in data.get("letters", {}).items():
        own = letter["value"]
        if isinstance(own, bool) or not isinstance(own, int | float) or not own:
            continue
        most = 1.0 if letter["unit"] == "%" else math.inf
        values = {}
        for number in sorted({own * factor for factor in _FACTORS}):
            if number <= max(most, own) and (number == int(number) or own != int(own) or own >= _WHOLE):
                new = given if number == own else {**given, name: _plain(number)}
                asked = ",".join(f"{key}={text}" for key, text in new.items()) or None
                values[_plain(number)] = link("rule", changed("rule", answered.pairs, set=asked))
        yield Stops(name, values, _plain(own))


#: Numbers below it that are whole count something.
_WHOLE = 2**24


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) and abs(number) < _WHOLE else f"{number:.6g}"


_FOUND: Mapping[str, Callable[[Answered, _Json], Iterator[Stops]]] = {
    "plan train": _train,
    "estimate train": _train,
    "plan serve": _serve,
    "estimate serve": _serve,
    "roofline": _roofline,
    "shard": _shard,
    "model": _model,
    "book": _book,
    "rule": _rule,
}
