"""What every measured run says: its model, a named one or one of its dimensions, and its cluster.

What a row does not say is chosen by a stated rule, and said. Not here: reading rows (`reading`), jobs, loads and
layouts (`training`, `serving_scenario`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from meshwise.core.errors import MeshwiseError
from meshwise.costs.problem import ServingProblem, TrainingProblem
from meshwise.hardware import Chip, Cluster, Fabric, chips, load_chip, load_cluster_file, parse_cluster
from meshwise.hardware.chip import Source
from meshwise.hardware.names import assemble
from meshwise.hardware.network import Level
from meshwise.hardware.trees import FabricLevel, build_tree
from meshwise.models import Model, built_in, model_names, read_dimensions
from meshwise.scoring.rows import Row, TrainingRun, first_match


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A row as it can be estimated.

    Args:
        run: the row.
        problem: model, job or load, cluster, calibration.
        assumed: what was read into the row, one phrase each.
    """

    run: Row
    problem: TrainingProblem | ServingProblem
    assumed: tuple[str, ...]


#: Vocabulary by family, where sources leave it out: Megatron-LM's GPT-2 vocabulary, padded to 128 x 8 ways; BLOOM's.
_USUAL_VOCABULARY = {"bloom": 250_880, "gpt": 51_200, "megatron": 51_200}

#: First word of a name -> family; longer names first where one begins with another.
_FAMILIES = (
    ("maxtext gpt", "MaxText GPT"), ("megatron gpt", "Megatron GPT"), ("vtrain gpt", "Megatron GPT"),
    ("korthikanti", "Megatron GPT"), ("mt-nlg", "Megatron GPT"), ("megatron", "Megatron GPT"), ("gpt-oss", "GPT-OSS"),
    ("gpt-j", "GPT-J"), ("gpt-neox", "GPT-NeoX"),
    ("gpt", "GPT"), ("mpt", "MPT"), ("bloom", "BLOOM"), ("llama", "Llama"), ("mixtral", "Mixtral"),
    ("mistral", "Mistral"), ("deepseek", "DeepSeek"), ("qwen", "Qwen"), ("gemma", "Gemma"), ("nemotron", "Nemotron"),
    ("kimi", "Kimi"), ("grok", "Grok"), ("glm", "GLM"), ("opt", "OPT"), ("palm", "PaLM"), ("falcon", "Falcon"),
)  # fmt: skip

#: Families with a plain feed-forward of two matrices, layer norms and biases (GPT-2 and its relatives).
_PLAIN = ("MaxText GPT", "Megatron GPT", "GPT", "MPT", "BLOOM", "OPT")
#: Of those, the ones without biases.
_NO_BIAS = ("MPT", "MaxText GPT")
#: Other families whose feed-forward is gated.
_GATED = ("Llama", "Mixtral", "Mistral", "DeepSeek", "Qwen", "Gemma", "Kimi", "GLM")
#: Families whose two branches both read the layer's input, so that tensor parallelism sums their results once.
_PARALLEL = ("GPT-J", "GPT-NeoX", "Falcon", "PaLM")
#: Software that sums each branch's results nevertheless (models/falcon/model.py of NVIDIA/TensorRT-LLM at 027cd51, not
#: that of later releases).
_SUMS_TWICE = r"tensorrt-llm v0\.[56]"
#: Families whose head is the table of tokens, whatever their size.
_TIED = ("Gemma",)


def family_of(run: Row) -> str:
    """The family of a run's model, for tables; the first word of its name if none is known.

    >>> from meshwise.scoring import TrainingRun
    >>> family_of(TrainingRun(id="1", n_chips=1, global_batch_seqs=1, seq_len=1, measured_metric="step_time",
    ...     measured_value=1.0, unit="s", model="vTrain GPT 18.4B"))
    'Megatron GPT'
    """
    name = run.model.lower()
    known = next((family for start, family in _FAMILIES if name.startswith(start)), None)
    return known or (re.split(r"[\s-]", run.model.strip())[0] if run.model.strip() else "dimensions")


def model_of(run: Row) -> tuple[Model, tuple[str, ...]]:
    """The model of a run, and what was assumed of it.

    A built-in of that name whose dimensions are those of the row; else a decoder of these dimensions, with the switches
    of its family; where the family is not known, those whose count of parameters is nearest `params_b`.

    Raises:
        MeshwiseError: neither a known name nor enough dimensions.
    """
    named = _named(run.model)
    if named is not None and _agrees(named, run):
        return named, ()
    if run.moe_topk is not None and run.moe_experts is None:
        raise MeshwiseError(f"moe_topk is {run.moe_topk}, and moe_experts is blank: fill in both or none")
    missing = [n for n in ("layers", "d_model", "n_heads") if getattr(run, n) is None]
    if missing and named is not None:
        raise MeshwiseError(_contradiction(named, run, missing))
    if missing:
        raise MeshwiseError(
            f"model {run.model!r} is not a name that is known, and {', '.join(missing)} are blank: fill them in"
        )
    if named is not None and named.mixtures and run.moe_experts is None:
        raise MeshwiseError(f"model {run.model!r} has experts, and moe_experts and moe_topk are blank: fill them in")
    if run.vocab is not None:
        return _of_dimensions(run, run.vocab)
    vocab = next((v for word, v in _USUAL_VOCABULARY.items() if word in run.words), None)
    if vocab is None:
        raise MeshwiseError(f"vocab is blank, and none is usual for models such as {run.model!r}: fill it in")
    model, notes = _of_dimensions(run, vocab)
    return model, (f"vocabulary of {vocab:,} taken, as usual for {family_of(run)}", *notes)


@cache
def _named(name: str) -> Model | None:
    """The built-in that a source's name means."""
    plain = _plain(name)
    return built_in(next((known for known in model_names() if _plain(known) == plain), name))


def names_a_model(name: str) -> bool:
    """Whether a source's name is that of a built-in model."""
    return _named(name) is not None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


#: Share by which tables of tokens are padded, or cut, by who trains a model.
_PADDING = 0.01


def _agrees(model: Model, run: Row) -> bool:
    """Whether what a row says of the dimensions is true of a model."""
    return all(
        said is None or said in known or (name == "vocab" and abs(said / model.vocab_size - 1) < _PADDING)
        for name, said, known in _dimensions(model, run)
    )


def _dimensions(model: Model, run: Row) -> list[tuple[str, int | None, set[int]]]:
    """Columns of dimensions, what a row says there, and what is true of a model; those without a meaning left out."""
    by_axis: defaultdict[str, set[int]] = defaultdict(set)
    for axis, size in model.sizes.items():
        by_axis[axis.partition(".")[0]].add(int(size))
    known = {"layers": {model.num_layers}, "d_model": {model.d_model}, "vocab": {model.vocab_size}}
    known |= {"moe_experts": by_axis["E"], "moe_topk": by_axis["top_k"]}
    # Latent attention has neither key/value heads nor one width of a head; a source may give either width of mixtures.
    heads = {"n_heads": by_axis["N"], "n_kv_heads": by_axis["K"], "head_dim": by_axis["H"]}
    where_there = heads | {"d_ff": by_axis["F"] | by_axis["Fe"]}
    known |= {name: sizes for name, sizes in where_there.items() if sizes}
    return [(name, getattr(run, name), sizes) for name, sizes in known.items()]


def _contradiction(model: Model, run: Row, missing: Sequence[str]) -> str:
    """Which dimension of a row is not that of the model that it names."""
    column, said, known = next(d for d in _dimensions(model, run) if d[1] is not None and d[1] not in d[2])
    true = " or ".join(f"{n:,}" for n in sorted(known)) or "none"
    return (
        f"{column} is {said:,}, and that of {model.name} is {true}: leave it blank, or fill in "
        f"{', '.join(missing)} too for a model of these dimensions"
    )


def _of_dimensions(run: Row, vocab: int) -> tuple[Model, tuple[str, ...]]:
    """A decoder of these dimensions, with its family's switches."""
    assert run.d_model is not None
    said = {"D": run.d_model, "L": run.layers, "N": run.n_heads, "K": run.n_kv_heads or run.n_heads, "V": vocab}
    if run.head_dim is not None:
        said["H"] = run.head_dim
    width = run.d_ff or 4 * run.d_model
    said |= {"F": width} if run.moe_experts is None else {"E": run.moe_experts, "Fe": width, "top_k": run.moe_topk}
    family = family_of(run)
    switches = _switches(run, family)
    open_ones = [name for name in ("gated", "tied") if name not in switches]
    tried: list[tuple[float, Model, dict[str, str]]] = []
    usual = {"gated": ("yes", "no"), "tied": ("no", "yes")}  # of several that are as near, the first
    for values in itertools.product(*(usual[name] for name in open_ones)):
        chosen = dict(zip(open_ones, values, strict=True))
        model = _decoder(" ".join(f"{k}={v}" for k, v in {**said, **switches, **chosen}.items() if v is not None))
        off = abs(model.parameters.total / 1e9 / run.params_b - 1) if run.params_b else 0.0
        tried.append((round(off, 9), model, chosen))
    off, model, chosen = min(tried, key=lambda each: each[0])
    notes = []
    if open_ones:
        words = ", ".join(f"{name}={value}" for name, value in chosen.items())
        notes.append(f"{words}: not said, " + ("nearest to params_b" if run.params_b else "taken as usual"))
    if off > 0.1:
        notes.append(f"{model.parameters.total / 1e9:,.1f}B parameters by its dimensions, {run.params_b:,}B stated")
    return model, tuple(notes)


@lru_cache(maxsize=512)
def _decoder(dimensions: str) -> Model:
    """A model of some dimensions: rows of one source often have the same."""
    return read_dimensions(dimensions, name=dimensions)


def _switches(run: Row, family: str) -> dict[str, str]:
    """What its family, or the row's own words, say of a decoder."""
    if family in _PLAIN:
        found = {"gated": "no", "norm": "rms" if family == "MaxText GPT" else "layer"}
        found |= {"bias": "no" if family in _NO_BIAS else "yes", "tied": "yes"}
        return found if family in {"MaxText GPT", "BLOOM"} else found | {"positions": str(run.positions)}
    words, found = run.words, dict[str, str]()
    if family in _PARALLEL and not ((run.tp or 1) > 1 and re.search(_SUMS_TWICE, words)):
        found["parallel"] = "yes"
    if "2-matrix" in words or "gelu 4x" in words:
        found["gated"] = "no"
    if "tied" in words:
        found["tied"] = "no" if "untied" in words else "yes"
    elif family in _TIED:
        found["tied"] = "yes"
    return found | {"gated": "yes"} if family in _GATED else found


#: Seconds that a message takes to cross a network of nodes: NCCL's constant for InfiniBand and RoCE; TCP, assumed.
_LATENCY, _TCP_LATENCY = 2.7e-6, 20e-6

#: Share of the rate of Omni-Path ports that NCCL has, which has no plugin for them: AllReduces of 4 GB over four A100
#: nodes of Jean Zay go at 40.5 Gb/s a port of 100 (bigscience, experiments/bandwidth, 2021-22), over the 84 % that
#: links of other networks reach there.
_OMNI_PATH = 0.405 / 0.84


def cluster_of(run: Row) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster of a run, and what was assumed of it.

    Raises:
        MeshwiseError: a blank chip, one that no catalog holds, or a count that cannot be.
    """
    if not run.chip:
        raise MeshwiseError(f"chip is blank; the catalog has none for {run.hardware or 'this hardware'!r}")
    if run.chip.endswith(".toml"):
        return _of_file(run.chip, run.n_chips)
    chip, changed = as_described(load_chip(run.chip), run.hardware)
    if chip.vendor == "google":
        slices, notes = _slices(run)
        text = f"{chip.name}:{run.n_chips // slices}" + (f"*{slices}" if slices > 1 else "")
        return parse_cluster(text).replace(chip=chip), (*notes, *changed)
    node = math.prod(level.degree for level in chip.scale_up)
    bandwidth = node_bandwidth(run.hardware, chip.chips_per_host)
    if run.n_chips <= node or bandwidth is None:
        beyond = (f"network between nodes: the usual one of {chip.title}",) if run.n_chips > node else ()
        return parse_cluster(f"{chip.name}:{run.n_chips}").replace(chip=chip), (*beyond, *changed)
    return _on_network(chip, run, bandwidth / chip.chips_per_host), changed


def _of_file(path: str, num_chips: int) -> tuple[Cluster, tuple[str, ...]]:
    """As many chips as a file describes one of, on the network that such chips usually have."""
    chip = load_cluster_file(path).chip
    if chip.vendor != "google":
        return assemble(f"{chip.name}:{num_chips}", chip, num_chips, chip.network), ()
    like = next(name for name, known in chips().items() if known.network == chip.network)
    return parse_cluster(f"{like}:{num_chips}").replace(chip=chip), ("one slice: none are mentioned",)


def as_described(chip: Chip, words: str) -> tuple[Chip, tuple[str, ...]]:
    """The chip with the power and the memory that a source's words give it, and what of it is another than usual.

    >>> found, said = as_described(load_chip("h100-sxm"), "H100 96GB SXM (500 W, HBM2e 2.4 TB/s, 8 per node)")
    >>> found.power, found.hbm_bandwidth, said
    (500.0, 2400000000000.0, ('H100 SXM of 500 W, 96 GB, 2.4 TB/s',))
    >>> as_described(load_chip("h100-sxm"), "H100 80GB SXM (DGX)")[1]
    ()
    """
    changes: dict[str, float] = {}
    said = []
    if (found := re.search(r"\b(\d{3,4}) ?W\b", words)) and float(found[1]) != chip.power:
        changes["power"] = float(found[1])
        said.append(f"{found[1]} W")
    capacity = re.search(r"\b(\d{2,3}) ?GB\b(?!/)", words)
    if capacity and abs(float(capacity[1]) * 1e9 / chip.hbm_capacity - 1) > _OTHER:
        changes |= {"hbm_capacity": float(capacity[1]) * 1e9, "hbm_reported": float(capacity[1]) * 1e9}
        said.append(f"{capacity[1]} GB")
    speed = re.search(r"HBM\w*[^,;)]{0,12}?([\d.]+) ?TB/s|([\d.]+) ?TB/s[^,;)]{0,8}HBM", words)
    if speed and abs(float(speed[1] or speed[2]) * 1e12 / chip.hbm_bandwidth - 1) > _OTHER:
        changes["hbm_bandwidth"] = float(speed[1] or speed[2]) * 1e12
        said.append(f"{speed[1] or speed[2]} TB/s")
    return (chip.replace(**changes), (f"{chip.title} of {', '.join(said)}",)) if changes else (chip, ())


#: Share by which memory is another than the catalog's, not the same in other units.
_OTHER = 0.1


#: A rate in bits, as sources write it, and what may stand before the thing that it is of.
_BITS = r"([\d,.]*\d)\s*([GTgt])b(?:it)?(?:ps|/s)\b[^,;)]{0,24}?"

#: Bits/s above which a rate that says neither of what is that of a node: ports have 800 Gb/s at most.
_PORT = 800e9


#: Names of chips after their number, and links within a node: neither is the network between nodes.
_NO_CHIP = r"(?![A-Za-z ]*?\b(?:A|B|H|L|V|GB|GH|MI)\d)"
_INSIDE = r"[^,;()]*(?:NV-?Link|NV-?Switch|xGMI|Infinity Fabric)[^,;()]*"

#: Gb/s of a port of each generation of InfiniBand.
_GENERATIONS = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}

#: Nodes of clouds whose ports are others than such chips usually have -> Gb/s of a node for traffic between GPUs.
#: Source: the providers' own pages of machine types (of A3 without the port of the host).
_NODES_OF_CLOUDS = (
    (r"\bp3dn\b|\ba2-(?:high|mega|ultra)gpu", 100),
    (r"\bp4de?\b", 400),
    (r"\ba3[- ]?high", 800),
    (r"\ba3[- ]?mega", 1600),
)


def node_bandwidth(words: str, chips: int = 8) -> float | None:
    """Bytes/s, one way, that a node of GPUs has to others, as a source puts it; None where it says nothing.

    Of Omni-Path, what NCCL has of it.

    >>> node_bandwidth("A100 SXM (8 per node, 4x InfiniBand 100)"), node_bandwidth("1600 Gbps RoCE")
    (50000000000.0, 200000000000.0)
    >>> node_bandwidth("8x HDR200 IB per node"), node_bandwidth("H100 80GB SXM")
    (200000000000.0, None)
    >>> node_bandwidth("EFA, 3.2 Tb/s per node"), node_bandwidth("400 Gb/s per GPU, NVLink 900 GB/s")
    (400000000000.0, 400000000000.0)
    >>> node_bandwidth("p4d.24xlarge"), node_bandwidth("4x HDR per node"), node_bandwidth("200 Gb/s x 8 NICs")
    (50000000000.0, 100000000000.0, 200000000000.0)

    Args:
        words: of the source.
        chips: of a node.
    """
    words = re.sub(_INSIDE, "", words, flags=re.IGNORECASE)
    ports = rf"(\d+)\s*x\s*{_NO_CHIP}(?:ConnectX-\d|[A-Za-z -]*)\s*(\d{{2,3}})(?:\s*Gb/s)?(?![\d.]*\s*GB)"
    if found := re.search(ports, words):
        share = _OMNI_PATH if re.search(r"omni-?path|\bopa\b", words.lower()) else 1.0
        return share * int(found[1]) * int(found[2]) * 1e9 / 8
    if found := re.search(r"(\d+)\s*x\s*(EDR|HDR|NDR|XDR)\b", words):
        return int(found[1]) * _GENERATIONS[found[2]] * 1e9 / 8
    if found := re.search(r"\b(\d{2,3})\s*Gb(?:it)?(?:ps|/s)\s*x\s*(\d+)\b", words):
        return int(found[1]) * int(found[2]) * 1e9 / 8
    for found in re.finditer(
        rf"{_BITS}[^,;)]{{0,24}}?(?:(?:per|an?|each|/) ?((?i:node|host|server|GPU|chip))|$|[,;)])", words
    ):
        rate = float(found[1].replace(",", "")) * {"G": 1e9, "T": 1e12}[found[2].upper()] / 8
        if (found[3] or "").lower() in ("gpu", "chip"):
            return rate * chips
        if found[3] or 8 * rate > _PORT or "EFA" in words:  # of EFA, a node's is said
            return rate
    of_cloud = first_match(_NODES_OF_CLOUDS, words.lower())
    return None if of_cloud is None else of_cloud * 1e9 / 8


def _on_network(chip: Chip, run: Row, per_chip: float) -> Cluster:
    """Nodes on one network of switches without oversubscription, each chip with its share of the node's ports."""
    latency = _TCP_LATENCY if "TCP" in run.hardware else _LATENCY
    nodes = FabricLevel(Level("network", 1 << 16, per_chip, latency), "nodes")
    domain = math.prod(level.degree for level in chip.scale_up)
    fabric = Fabric("as measured", run.hardware, (domain,), (nodes,), False, False, Source(run.source, ""))
    tree, notes = build_tree(chip, run.n_chips, fabric)
    return Cluster(f"{chip.name}:{run.n_chips}", chip, run.n_chips, tree, notes=notes)


def _slices(run: Row) -> tuple[int, tuple[str, ...]]:
    """Slices of TPUs: as the row says, else one."""
    of_replicas = run.fsdp_or_zero_stage if isinstance(run, TrainingRun) else ""
    words = f"{of_replicas} {run.notes} {run.hardware}"
    for pattern in (r"(\d+)\s*slice\(?s?\)?", r"DP=(\d+) across slices"):
        if found := re.search(pattern, words):
            slices = int(found[1])
            if run.n_chips % slices:
                raise MeshwiseError(f"n_chips {run.n_chips} is no multiple of the {slices} slices that the row names")
            return slices, ()
    return 1, ("one slice: none are mentioned",)
