"""Small models, clusters and layouts to draw at random, and complete enumerations to compare with."""

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from hypothesis import strategies as st

from meshwise.costs.calibration import CALIBRATIONS
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import SOFTWARE, fitted_calibration
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import Torus, TorusAxis, load_chip, parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import read_config
from meshwise.sharding.layout import MESH_AXES, Layout

#: Every calibration that a problem may have: families, and the fitted ones of each with each software.
ALL_CALIBRATIONS = CALIBRATIONS | {
    f"{chip}: {software}": fitted_calibration(load_chip(chip), software)
    for chip in ("a100-sxm-80gb", "h100-sxm", "v5e")
    for software in SOFTWARE
}

REMATS = ("none", "matmuls", "attention", "full")

#: Leaves few layouts, so that several searches take no time.
FEW = {
    "forbidden": (
        "ulysses",
        "context",
        "partial-remat",
        "offload",
        "zero-bubble",
        "interleaved",
        "dualpipe",
        "dualpipe-v",
    )
}

#: Fewer still, for searches that also try every part of a cluster.
FEWER = {"forbidden": (*FEW["forbidden"], "remat=attention", "remat=matmuls", "zero=0", "pipeline")}


@cache
def tiny(*, layers=4, width=256, heads=8, kv_heads=4, hidden=512, vocab=1024, tied=False):
    """A Llama of a few million parameters."""
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131072,
    }
    return read_config(config, name="tiny", where="tests")


#: Learned positions: a table of the sequence's own, whose gradient is summed over replicas in every microbatch.
LEARNED = read_config(
    {"model_type": "gpt2", "n_embd": 256, "n_head": 8, "n_layer": 2, "vocab_size": 1024, "n_positions": 1024},
    name="tiny-learned",
    where="tests",
)


@cache
def tiny_mixture(*, layers=4, width=1024, hidden=2048, vocab=1024, experts=8):
    """A Mixtral of two experts a token."""
    config = {
        "model_type": "mixtral",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    }
    return read_config(config, name="tiny-mixture", where="tests")


MIXTURE = tiny_mixture()


@cache
def tiny_latent(**sizes):
    """Latent attention, a leading dense layer, shared experts, a router that keeps a token's experts in few groups."""
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "vocab_size": 1024,
        "hidden_act": "silu",
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    }
    assert sizes.keys() <= config.keys()
    return read_config(config | sizes, name="tiny-node-limited", where="tests")


NODE_LIMITED = tiny_latent()


def torus(shape, *, wraps=True, chip="v5p"):
    """So many chips of a TPU on any box."""
    cluster = parse_cluster(f"{chip}:2x2x1" if chip == "v5p" else f"{chip}:2x2")
    axes = tuple(TorusAxis(n, wraps) for n in shape)
    network = Torus(axes, cluster.chip.link_bandwidth_one_way, cluster.chip.hop_latency)
    return cluster.replace(name=f"{chip}-box", network=network, num_chips=math.prod(shape))


def nodes(number, chips):
    """Nodes of so few H100 that meshes of small problems have several places on them."""
    cluster = parse_cluster("h100:16")
    inner, outer = cluster.network.levels
    levels = replace(inner, degree=chips), replace(outer, degree=number)
    return cluster.replace(
        name="small nodes", network=replace(cluster.network, levels=levels), num_chips=number * chips
    )


CLUSTERS = {
    "v5e 4x4 mesh": lambda: parse_cluster("v5e:4x4"),
    "v5e 4x16, one axis wraps": lambda: parse_cluster("v5e:4x16"),
    "v5p 2x2x4 mesh": lambda: parse_cluster("v5p:2x2x4"),
    "v5p 4x4x4 torus": lambda: parse_cluster("v5p:4x4x4"),
    "3x4 torus": lambda: torus((3, 4)),
    "5x2x3 torus": lambda: torus((5, 2, 3)),
    "6x6 mesh": lambda: torus((6, 6), wraps=False),
    "two slices of v5e 4x4": lambda: parse_cluster("v5e:4x4*2"),
    "three slices of v5p 2x2x4": lambda: parse_cluster("v5p:2x2x4*3"),
    "8 H100": lambda: parse_cluster("h100:8"),
    "48 H100": lambda: parse_cluster("h100:48"),
    "64 H100, switches add": lambda: parse_cluster("h100:64+sharp"),
    "one chip": lambda: parse_cluster("h100:1"),
}
clusters = st.sampled_from(sorted(CLUSTERS)).map(lambda name: CLUSTERS[name]())


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def factorings(draw, room, parts):
    """[parts, dimensions] extents whose product over parts is `room`: every chip in use."""
    columns = []
    for size in room:
        left, column = size, []
        for _ in range(parts - 1):
            f = draw(st.sampled_from(divisors(left)))
            column.append(f)
            left //= f
        column.append(left)
        columns.append(draw(st.permutations(column)))
    return [tuple(column[i] for column in columns) for i in range(parts)]


@st.composite
def layouts(draw, fabric, *, max_tensor=8, max_stage=4):
    """A complete layout with wires; extents are drawn, and axes that are too large give what they have to fsdp."""
    extents = dict(zip(MESH_AXES, draw(factorings(fabric.sizes, len(MESH_AXES))), strict=True))
    for axis, most in (("tensor", max_tensor), ("stage", max_stage), ("context", 16)):
        if math.prod(extents[axis]) > most:
            extents["fsdp"] = tuple(a * b for a, b in zip(extents["fsdp"], extents[axis], strict=True))
            extents[axis] = (1,) * len(fabric.sizes)
    sizes = {a: math.prod(e) for a, e in extents.items()}
    return Layout(
        **sizes,
        zero=draw(st.sampled_from((0, 1, 2))),
        sequence_parallel=draw(st.booleans()),
        remat=draw(st.sampled_from(REMATS)),
        micro_batch=draw(st.integers(1, 4)),
        num_microbatches=draw(st.integers(1, 8)),
        wires=tuple(extents.items()),
    )


class Case(NamedTuple):
    """A problem and a complete layout; shows itself in a few lines."""

    problem: TrainingProblem
    fabric: Fabric
    layout: Layout

    def __repr__(self):
        p = self.problem
        sizes = {k: v for k, v in p.model.sizes.items() if k in "DFNKV"} | {"L": p.model.num_layers}
        wires = {a: e for a, e in self.layout.wires or () if self.layout.sizes[a] > 1}
        job = f"{p.job.seq_len:.0f} {p.job.precision} {p.calibration.name}"
        return f"<{sizes} {job} {p.cluster.name} {self.layout} {wires}>"


#: Models of cases: every two values of two sizes meet in one. Few, because each is lowered once under every choice.
MODELS = tuple(
    tiny(layers=4 + (i + 2 * j) % 3, width=width, hidden=hidden, kv_heads=(1, 4, 8)[(i + j) % 3], tied=(i + j) % 2 == 1)
    for i, width in enumerate((256, 1024, 4096))
    for j, hidden in enumerate((512, 1000, 16384))
)


@st.composite
def cases(draw):
    """(problem, fabric, layout), everything at random."""
    cluster = draw(clusters)
    model = draw(st.sampled_from(MODELS))
    calibration = ALL_CALIBRATIONS[draw(st.sampled_from(sorted(ALL_CALIBRATIONS)))]
    fabric = Fabric.of(cluster, flat_rings=calibration.flat_rings)
    layout = draw(layouts(fabric))
    seq_len = draw(st.sampled_from((1920, 8192, 32768)))
    job = TrainingJob(
        batch_tokens=str(layout.sequences * seq_len),
        seq_len=str(seq_len),
        precision=draw(st.sampled_from(("bf16", "mixed"))),
    )
    return Case(TrainingProblem(model, job, cluster, calibration), fabric, layout)


def case(cluster, calibration, layout, *, precision="bf16", **model):
    """One case, of sequences of 1,920, whose wires have the extents given."""
    fabric = Fabric.of(CLUSTERS[cluster](), flat_rings=CALIBRATIONS[calibration].flat_rings)
    job = TrainingJob(batch_tokens=str(layout.sequences * 1920), seq_len="1920", precision=precision)
    return Case(TrainingProblem(tiny(**model), job, CLUSTERS[cluster](), CALIBRATIONS[calibration]), fabric, layout)


def structure_of(layout):
    return LayoutChoices.of(layout)


def all_factorings(n, parts):
    """Every tuple of `parts` factors of `n`."""
    if parts == 1:
        yield (n,)
        return
    for d in divisors(n):
        for rest in all_factorings(n // d, parts - 1):
            yield (d, *rest)


def all_placements(room, sizes):
    """Every way to give each of `sizes` a factor of each of `room`, straight from the definition."""
    per_dimension = [list(all_factorings(size, len(sizes))) for size in room]
    for columns in itertools.product(*per_dimension):
        rows = tuple(zip(*columns, strict=True))
        if tuple(math.prod(r) for r in rows) == tuple(sizes):
            yield rows
