"""Tables of what is declared in the code: chips, networks, machines, models, calibrations, precisions, rules, tools.

Not here: commands and JSON fields (`reference`), strategies (`strategy_tables`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwise.cli.main import VERBS
from meshwise.cli.mcp import input_schema, tools
from meshwise.core.dtypes import DType
from meshwise.costs.calibration import CALIBRATIONS, Calibration
from meshwise.costs.hidden import SENT
from meshwise.costs.memory import MEMORY_CLASSES
from meshwise.costs.rules import RULES
from meshwise.costs.step import TERMS
from meshwise.exports import TOOLS
from meshwise.exports.targets import overlap_of
from meshwise.hardware import Chip, Fabric, SliceRules, chips, machines, networks
from meshwise.jobs import OPTIMIZERS, PRECISIONS, Precision
from meshwise.models import catalog, load_model
from meshwise.sharding.remat import REMAT_POLICIES

__all__ = ["COMMAND_LINES", "code", "table", "tables"]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [tuple(head), *(tuple(r) for r in rows)]
    body = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]
    body.insert(1, "|" + " --- |" * len(lines[0]))
    return "\n".join(body) + "\n"


def code(text: str) -> str:
    """Text as code."""
    return f"`{text}`"


def _tera(chip: Chip, *formats: DType) -> str:
    return next((f"{chip.flops_per_s[f] / 1e12:,.4g}" for f in formats if f in chip.flops_per_s), "-")


def _chip_table() -> str:
    """One row a chip, with the document that most of its numbers are from."""
    rates = ("bf16 (fp16) TFLOP/s", "fp8 (int8)", "HBM GB", "HBM GB/s", "link GB/s one way", "links", "$/h")
    rows = (
        (
            f"`{c.name}` {c.title}",
            _tera(c, DType.BF16, DType.FP16),
            _tera(c, DType.FP8, DType.INT8),
            f"{c.hbm_capacity / 1e9:,.4g}",
            f"{c.hbm_bandwidth / 1e9:,.4g}",
            f"{c.link_bandwidth_one_way / 1e9:,.4g}",
            str(c.num_links),
            "-" if c.price_per_chip_hour is None else f"{c.price_per_chip_hour:.2f}",
            f"{c.sources['*'].title}, {c.sources['*'].date}",
        )
        for c in chips().values()
    )
    return table(("chip", *rates, "source"), rows)


def _network_table() -> str:
    rows = []
    for name, n in networks().items():
        if isinstance(n, SliceRules):
            between = n.dcn_bandwidth_per_chip_one_way / 1e9
            text = f"torus up to {'x'.join(map(str, n.largest))}; between slices {between:g} GB/s a chip"
        else:
            assert isinstance(n, Fabric)
            levels = (f"{f.level.name} {f.level.bandwidth_per_chip_one_way / 1e9:.3g} GB/s" for f in n.levels)
            text = f"{n.title}; a chip one way: {', '.join(levels)}"
        rows.append((code(name), text, f"{n.source.title}, {n.source.date}"))
    return table(("network", "what it is", "source"), rows)


def _machine_table() -> str:
    return table(
        ("machine", "chips", "network", "source"),
        (
            (code(name), f"{m.num_chips} x `{m.chip}`", code(m.network), f"{m.source.title}, {m.source.date}")
            for name, m in machines().items()
            if name == m.name
        ),
    )


def _model_table() -> str:
    rows = []
    for entry in catalog():
        m = load_model(entry.name)
        p = m.parameters
        source = ", ".join(part for part in (entry.source.text, entry.source.date) if part)
        rows.append((code(entry.name), f"{p.total:,}", f"{p.active:,}" if p.active != p.total else "all", source))
    return table(("model", "parameters", "active", "source"), rows)


def _shares(c: Calibration) -> tuple[float, ...]:
    return (c.matmul_efficiency, c.attention(DType.BF16), c.hbm_efficiency, c.link_efficiency, c.exchange_cores)


def _precision_table() -> str:
    head = ("precision", "weights", "gradients", "master", "moments", "narrow matmuls", "what it is")

    def row(p: Precision) -> tuple[str, ...]:
        weights = p.weights.value
        if p.recipe is not None and p.recipe.weights is not None:
            weights = f"{p.recipe.weights.dtype.value}, {weights}"
        master = "-" if p.master is None else p.master.value
        narrow = "-" if p.recipe is None else p.compute.value
        return (code(p.name), weights, p.gradients.value, master, p.moments.value, narrow, p.meaning)

    return table(head, (row(p) for p in PRECISIONS.values()))


def _calibration_table() -> str:
    return table(
        (
            "name",
            "of peak in matmuls",
            "in attention",
            "of HBM bandwidth",
            "of link bandwidth",
            "set aside for exchanges",
            "from",
        ),
        ((code(c.name), *(f"{share:.0%}" for share in _shares(c)), c.source) for c in CALIBRATIONS.values()),
    )


def tables() -> Mapping[str, str]:
    """Name -> table, for the markers in the pages."""
    return {
        "terms": table(("term", "what it is"), ((code(k), v) for k, v in TERMS.items())),
        "memory": table(("class", "what it holds"), ((code(k), v) for k, v in MEMORY_CLASSES.items())),
        "remat": table(("policy", "what is kept"), ((code(k), _meaning(k)) for k in REMAT_POLICIES)),
        "calibrations": _calibration_table(),
        "precisions": _precision_table(),
        "optimizers": table(("optimizer", "what it is"), ((code(k), o.meaning) for k, o in OPTIMIZERS.items())),
        "chips": _chip_table(),
        "networks": _network_table(),
        "machines": _machine_table(),
        "models": _model_table(),
        "rules": _rule_table(),
        "tools": _tool_table(),
        "overlap": _overlap_table(),
    }


def _tool_table() -> str:
    """The tools of `meshwise mcp`, with the fields that each needs."""
    rows = []
    for name, verb in tools().items():
        needed = ", ".join(map(code, input_schema(verb)["required"]))
        rows.append((code(name), needed or "-", COMMAND_LINES[name.replace("_", " ")]))
    return table(("tool", "needs", "what it does"), rows)


def _overlap_table() -> str:
    """What each tool hides, with the option that makes it so and its source."""
    alike = [[t for t in TOOLS if overlap_of(t) is overlap_of(tool)] for tool in TOOLS]
    rows = (
        (", ".join(map(code, tools)), code(f"fitted+{overlap_of(tools[0]).software[0]}"), SENT[what], said)
        for tools in (tools for i, tools in enumerate(alike) if tools not in alike[:i])
        for what, said in overlap_of(tools[0]).options.items()
    )
    return table(("tool", "priced by", "hides", "by"), rows)


#: Verb -> its line of the help.
COMMAND_LINES = {name: summary for name, (_, summary) in VERBS.items()}


def _rule_table() -> str:
    """Every rule with its formula."""
    return table(
        ("rule", "formula", "what it gives"),
        ((code(r.name), code(f"{r.result} = {r.formula.text}"), r.words) for r in RULES.values()),
    )


def _meaning(policy: str) -> str:
    return REMAT_POLICIES[policy].meaning
