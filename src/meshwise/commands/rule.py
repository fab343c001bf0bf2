"""`rule`: the book's named rules, worked out and solved. Not here: the rules (`costs.rules`), or words (`report`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from meshwise.commands.command import Screen, command, verb
from meshwise.commands.requests import Flag
from meshwise.commands.where import Where
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.core.explanation import Answer
from meshwise.core.units import (
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_flops_per_s,
    parse_fraction,
    parse_money,
)
from meshwise.costs.rules import LETTERS, Rule, check, find_rule
from meshwise.hardware import Chip, Cluster, Fabric, SliceRules, Torus, Tree, networks
from meshwise.models import Model, load_model
from meshwise.report.rule import Given, RuleAnswer, described_report, rule_report, rules_report

#: Unit of a letter -> how a number with a unit is read; a number without one is in the base unit.
_PARSERS: Mapping[str, Callable[[str, str], float]] = {
    "s": parse_duration,
    "bytes": parse_bytes,
    "bytes/s": parse_bandwidth,
    "FLOP/s": parse_flops_per_s,
    "%": parse_fraction,
    "$": parse_money,
}


def _pairs(value: Any) -> Any:
    """Read `("tokens=4Mi,axes=3", "W=90GB/s")` as name -> text; of a dict the values are written as text."""
    if isinstance(value, Mapping):
        return {str(name): str(number) for name, number in value.items()}
    found: dict[str, str] = {}
    for text in (value,) if isinstance(value, str) else value if isinstance(value, Iterable) else (str(value),):
        for pair in str(text).split(","):
            name, _, number = map(str.strip, pair.partition("="))
            if not name or not number:
                raise MeshwiseError(f"expected LETTER=NUMBER such as tokens=4Mi, found {pair[:80]!r}")
            if name in found:
                raise MeshwiseError(f"{name} is given twice")
            found[name] = number
    return found


class RuleRequest(Where):
    """What `meshwise rule` is asked."""

    positional = ("name",)

    name: str | None = None
    """The rule; without one all are listed."""
    values: Annotated[
        dict[str, str],
        Flag("LETTER=NUMBER", "--set"),
        BeforeValidator(_pairs, json_schema_input_type=str | Mapping[str, float]),
    ] = Field(default={})
    """Letters of the rule, tokens=4Mi,W=180GB/s, also its result; they go before the chip's and the model's."""
    solve: Annotated[str | None, Flag("LETTER")] = None
    """The letter to solve for; by default the one that nothing gives."""
    model: Annotated[str | None, Flag("MODEL")] = None
    """Model whose sizes are taken."""
    dtype: DType = DType.BF16
    """Number format of the arithmetic: which of the chip's peaks C is."""


@command(RuleRequest)
def rule(request: RuleRequest) -> RuleAnswer:
    """Work out a rule of the book, or solve it for any of its letters: what `meshwise rule` answers, as values.

    >>> import meshwise
    >>> meshwise.rule("critical-batch", on="v5e", values={"w": 1}).value.__round__()
    120
    >>> answer = meshwise.rule("train-time", on="v5p", values="P=70e9,tokens=15T,mfu=40%,t=44d")
    >>> answer.unknown, round(answer.value)
    ('chips', 9026)

    Raises:
        UnknownNameError: there is no such rule or letter.
        MeshwiseError: letters are missing, or there is nothing to solve for; no number gives the result.
    """
    if request.name is None:
        raise MeshwiseError("which rule? 'meshwise rule' lists them, such as rule('critical-batch', on='v5e')")
    return _found(find_rule(request.name), request)


def _found(chosen: Rule, request: RuleRequest) -> RuleAnswer:
    letters = _letters(chosen, request)
    unknown = _unknown(chosen, request, letters)
    known = {name: given.value for name, given in letters.items() if name != unknown}
    if unknown == chosen.result and unknown not in chosen.letters:
        value = chosen.formula.value(chosen.complete(known))
        exact = () if isinstance(value, str) else ((float(value), float(value)),)
        return RuleAnswer(chosen, unknown, value, exact, _used(chosen, letters, unknown))
    target = known.pop(chosen.result)
    if isinstance(target, list) or LETTERS[unknown].unit == "sizes":
        raise MeshwiseError(f"{chosen.name}: {unknown} is not one number, and cannot be solved for")
    chosen.complete({**known, unknown: 1.0})
    ranges = chosen.formula.solutions(unknown, target, known)
    return RuleAnswer(chosen, unknown, ranges[0][0] or ranges[0][1], ranges, _used(chosen, letters, unknown))


def _used(chosen: Rule, letters: Mapping[str, Given], unknown: str) -> tuple[Given, ...]:
    return tuple(letters[n] for n in (*chosen.letters, chosen.result) if n != unknown and n in letters)


def _unknown(chosen: Rule, request: RuleRequest, letters: Mapping[str, Given]) -> str:
    """The letter to be found.

    Raises:
        MeshwiseError: more than it are missing, or none is.
    """
    every = (*chosen.letters, chosen.result)
    if request.solve is not None and request.solve not in every:
        raise UnknownNameError("letter", request.solve, every, list_all=True)
    if request.solve is not None and request.solve in request.values:
        raise MeshwiseError(f"--solve {request.solve}: it is also given by --set; leave it out there")
    missing = [name for name in every if name not in letters and name != request.solve]
    if request.solve is None and chosen.result not in request.values:
        missing = [name for name in missing if name != chosen.result]
        wanted: str | None = chosen.result
    else:
        wanted = request.solve or (missing.pop() if len(missing) == 1 else None)
    if missing:
        raise MeshwiseError("\n".join(f"{chosen.name}: {name} is missing: {_hint(name)}" for name in missing))
    if wanted is None:
        raise MeshwiseError(
            f"{chosen.name}: {chosen.result} is given, and so is all else; --solve says what to find instead: "
            f"{', '.join(chosen.letters)}"
        )
    return wanted


#: Letters that a chip or a cluster gives, and those that a model gives.
_OF_CLUSTER = "C HBM W_hbm W_host price W W_link W_node W_spine W_dcn hop hops links node chips longest counts slices"
_OF_MODEL = "P active D F L N K H V E k kv"


def _hint(name: str) -> str:
    flags = "".join(f", --on {'CLUSTER' if name in ('chips', 'hops') else 'CHIP'}" * (name in _OF_CLUSTER.split()))
    flags += ", --model MODEL" * (name in _OF_MODEL.split())
    example = "2x4" if LETTERS[name].unit == "sizes" else "..."
    return f"{LETTERS[name].words} (--set {name}={example}{flags})"


def _letters(chosen: Rule, request: RuleRequest) -> dict[str, Given]:
    """What is given, by whom: by the reader, the cluster, the model, or by default."""
    every = dict.fromkeys((*chosen.letters, chosen.result))
    for name in request.values:
        if name not in every:
            raise UnknownNameError("letter", name, every, list_all=True)
    found: dict[str, Given] = {}
    for name in chosen.letters:
        default = chosen.defaults.get(name, LETTERS[name].default)
        if default is not None:
            found[name] = Given(name, default, "default")
    cluster = request.find()
    if request.model is not None:
        model = load_model(request.model)
        found |= {n: Given(n, v, model.name) for n, v in _of_model(model, chosen).items() if n in chosen.letters}
    if cluster is not None:
        of = _of_cluster(cluster, request.dtype, counts="counts" in chosen.letters)
        found |= {name: Given(name, *of[name]) for name in chosen.letters if name in of}
    for name, text in request.values.items():
        found[name] = Given(name, _number(chosen, name, text), "given")
    return found


def _number(chosen: Rule, name: str, text: str) -> float | list[float]:
    """Read a letter's number: in its base unit, or with a unit."""
    letter = LETTERS[name]
    if letter.unit == "sizes":
        numbers = [parse_count(part, name) for part in text.strip("[]").replace("x", " ").replace(",", " ").split()]
        value: float | list[float] = [int(n) if n == int(n) else n for n in numbers]
    else:
        try:
            value = float(text)
        except ValueError:
            value = _PARSERS.get(letter.unit, parse_count)(text, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise MeshwiseError(f"{name}: expected a finite number, found {text!r}")
    check(chosen.name, name, letter, value)
    return value


def _of_model(model: Model, chosen: Rule) -> dict[str, float]:
    """Letters of a model; those that its layers do not share are missing."""
    sizes, counts = model.sizes, model.parameters
    found = {n: float(sizes[n]) for n in "DFNKHVL" if n in sizes}
    mixtures = model.mixtures
    if "Fe" in sizes:
        found["F"] = float(sizes["Fe"])
    if len(mixtures) == 1:
        found |= {"E": float(sizes["E"]), "k": float(sizes["top_k"])}
    found["P"] = float(counts.active if chosen.counts_active else counts.total)
    found |= {"active": counts.active / counts.total, "kv": float(model.kv_cache_bytes_per_token())}
    return {"L": float(model.num_layers), "D": float(model.d_model), "V": float(model.vocab_size), **found}


#: A letter's value, its source in a word, and the document where it stands.
_Filled = tuple[float | list[float], str, str]


def _of_cluster(cluster: Cluster, dtype: DType, *, counts: bool) -> dict[str, _Filled]:
    """Letters of a chip, of its networks, and where it is more than one chip, of the cluster."""
    chip = cluster.chip
    found: dict[str, _Filled] = {
        "C": (chip.peak(dtype), f"{chip.title}, {dtype.value}", _document(chip, "flops_per_s")),
        "HBM": _of_chip(chip, "hbm_capacity"),
        "W_hbm": _of_chip(chip, "hbm_bandwidth"),
        "W_host": _of_chip(chip, "host_link_bandwidth"),
        "W_link": _of_chip(chip, "link_bandwidth_one_way"),
        "hop": _of_chip(chip, "hop_latency"),
    }
    if cluster.price_per_chip_hour is not None:
        found["price"] = cluster.price_per_chip_hour, chip.title, chip.price_source.title if chip.price_source else ""
    if cluster.num_chips > 1:
        found |= {"chips": (cluster.num_chips, cluster.name, ""), "slices": (cluster.num_slices, cluster.name, "")}
    if cluster.dcn_bandwidth_per_chip_one_way:
        found["W_dcn"] = cluster.dcn_bandwidth_per_chip_one_way, cluster.name, ""
    rules = networks().get(chip.network)
    if counts and isinstance(rules, SliceRules):
        found["counts"] = list(rules.slice_counts()), rules.title, rules.source.title
    return found | (_of_torus(cluster, cluster.network) if isinstance(cluster.network, Torus) else _of_tree(cluster))


def _document(chip: Chip, field: str) -> str:
    source = chip.source(field)
    return f"{chip.title}: {source.title}, {source.date}"


def _of_chip(chip: Chip, field: str) -> _Filled:
    return getattr(chip, field), chip.title, _document(chip, field)


def _of_torus(cluster: Cluster, torus: Torus) -> dict[str, _Filled]:
    document = _document(cluster.chip, "link_bandwidth_one_way")
    found: dict[str, _Filled] = {"W": (2 * torus.link_bandwidth_one_way, cluster.chip.title, document)}
    if torus.num_chips > 1:
        long = [axis for axis in torus.axes if axis.size > 1]
        hops = sum(axis.size // 2 if axis.wraps else axis.size - 1 for axis in long)
        found["longest"] = max(axis.size for axis in long), cluster.name, ""
        found |= {"hops": (hops, f"corners of {cluster.name}", ""), "links": (len(long), cluster.name, "")}
    return found


def _of_tree(cluster: Cluster) -> dict[str, _Filled]:
    chip = cluster.chip
    assert isinstance(cluster.network, Tree)
    inner, levels = cluster.network.levels[: len(chip.scale_up)], cluster.network.levels[len(chip.scale_up) :]
    fabric, document = networks().get(chip.network), ""
    if not levels and isinstance(fabric, Fabric):  # one node, or less: what joins such nodes by default
        inner, levels = chip.scale_up, tuple(item.level for item in fabric.levels)
        document = f"{fabric.title}: {fabric.source.title}, {fabric.source.date}"
    node = math.prod(level.degree for level in inner)
    found: dict[str, _Filled] = {"W": _of_chip(chip, "link_bandwidth_one_way"), "node": (node, chip.title, "")}
    if levels:
        for letter, level in (("W_node", levels[0]), ("W_spine", levels[-1])):
            found[letter] = level.bandwidth_per_chip_one_way * node, f"{level.name} of {cluster.name}", document
    return found


Answer.reports[RuleAnswer] = lambda answer: rule_report(answer, {})


@verb(RuleRequest)
def show_rule(screen: Screen, request: RuleRequest) -> None:
    """Work out a rule of "How To Scale Your Model", or solve it for any of its letters.

    Without NAME the rules are listed; with it alone, its formula and letters are shown. A chip, a cluster and a model
    give the letters that they know; --set gives others. The letter that is left out is the answer.

    \b
      meshwise rule critical-batch --on v5e --set w=1
      meshwise rule fsdp --on v5p --set tokens=4Mi,axes=3 --solve chips
      meshwise rule decode-batch --on v5e:4x4 --model llama-3-8b \\
        --set context=8192
      meshwise rule train-time --on h100 --model llama-3-70b \\
        --set tokens=15T,mfu=40%,t=30d
    """  # noqa: D301  (click's mark for lines that stay as they are)
    if request.name is None:
        screen.show(rules_report(request.echo()))
        return
    chosen = find_rule(request.name)
    if request.find() is None and not request.values and request.model is None and request.solve is None:
        screen.show(described_report(chosen, request.echo()))
        return
    screen.show(rule_report(rule.answer(request), request.echo()))
