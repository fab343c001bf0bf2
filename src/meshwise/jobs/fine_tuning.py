"""What of a model is trained: all of it, or low-rank adapters beside frozen weights, which are added to its program."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.core.tensors import Block, Convert, Einsum, Elementwise, Format, Kind, Op, Program, Tensor
from meshwise.jobs.precision import is_projection

#: Method -> what it is.
METHODS = {
    "full": "every parameter is trained",
    "lora": "low-rank adapters are trained beside frozen weights (Hu et al. 2021)",
    "qlora": "as lora, the frozen weights of projections stored in 4 bits (Dettmers et al. 2023)",
}

#: Storage of frozen weights by name: nf4 by blocks of 64, whose fp32 scales are themselves stored in 8 bits by blocks
#: of 256 (double quantisation); int4 by blocks of 128 with a bf16 scale.
_STORAGE = {
    "nf4": Format(DType.FP4, 1 / 64 + 4 / (64 * 256)),
    "int4": Format(DType.INT4, 2 / 128),
}

#: Names of targets: groups of projections, or one projection of attention or of a feed-forward network.
_GROUPS = ("all", "attention", "mlp", "experts", "shared")
_ONES = ("q", "k", "v", "o", "gate", "up", "down")
_MLP = ("gate", "up", "down")
_LARGEST_RANK = 65536


@dataclass(frozen=True, slots=True)
class FineTuning:
    """What is trained.

    Args:
        name: what users type.
        method: of `METHODS`.
        rank: inner width of the adapters.
        alpha: what they give is scaled by alpha / rank; 0 as the rank, so that it is not scaled.
        targets: projections that get one: groups or single ones.
        storage: "nf4" or "int4" for frozen weights of projections, or "" as the precision's role says.
    """

    name: str
    method: str
    rank: int = 0
    targets: tuple[str, ...] = ()
    storage: str = ""
    alpha: float = 0.0

    @property
    def full(self) -> bool:
        """Whether everything is trained."""
        return self.method == "full"

    @property
    def scale(self) -> float:
        """By which what adapters give is multiplied: y = x W + scale (x A) B."""
        return self.alpha / self.rank if self.alpha else 1.0

    @property
    def stored(self) -> Format | None:
        """The format of frozen projections, or None as the precision says."""
        return _STORAGE[self.storage] if self.storage else None

    @property
    def meaning(self) -> str:
        """One line for reports."""
        if self.full:
            return METHODS["full"]
        frozen = f"frozen projections in {self.storage}" if self.storage else "frozen weights"
        scaled = f", scaled by {self.scale:g}," if self.scale != 1 else ""
        return f"adapters of rank {self.rank}{scaled} on {', '.join(self.targets)} beside {frozen}"

    def adapts(self, weight: str) -> bool:
        """Whether the projection with the weight named `weight` ("w_q", "w_expert.up") gets an adapter."""
        stem = weight.removeprefix("w_")
        group = stem.partition(".")[0]
        kind = {"expert": "experts", "shared": "shared"}.get(group, "mlp" if stem in _MLP else "attention")
        return bool({"all", kind, stem} & set(self.targets))


FULL = FineTuning("full", "full")


def parse_fine_tuning(text: str) -> FineTuning:
    """Read "full", "lora", "lora:rank=16,alpha=32,targets=attention+mlp", "qlora:rank=64,storage=int4".

    >>> parse_fine_tuning("lora:rank=8,targets=q+v").targets
    ('q', 'v')
    >>> parse_fine_tuning("lora:rank=8,alpha=16").scale
    2.0
    >>> parse_fine_tuning("qlora").storage
    'nf4'

    Raises:
        UnknownNameError: an unknown method, option, target or storage.
        MeshwiseError: an option that is given twice, or without its value.
    """
    method, colon, rest = (p.strip() for p in text.partition(":"))
    if method not in METHODS:
        raise UnknownNameError(
            "fine-tuning", method, METHODS, "Such as lora:rank=16,targets=attention+mlp.", list_all=True
        )
    options = _options(method, rest, text) if colon else {}
    if method == "full":
        return FULL
    targets = tuple(t.strip() for t in options.get("targets", "all").split("+"))
    for target in targets:
        if target not in (*_GROUPS, *_ONES):
            raise UnknownNameError("fine-tuning target", target, (*_GROUPS, *_ONES), list_all=True)
    storage = options.get("storage", "nf4") if method == "qlora" else ""
    if storage and storage not in _STORAGE:
        raise UnknownNameError("storage of frozen weights", storage, _STORAGE, list_all=True)
    rank = options.get("rank", "16")
    if not (rank.isascii() and rank.isdigit()) or not 1 <= int(rank) <= _LARGEST_RANK:
        raise MeshwiseError(f"expected a rank from 1 to {_LARGEST_RANK:,}, found {rank!r}")
    return FineTuning(text, method, int(rank), targets, storage, _alpha(options.get("alpha")))


def _alpha(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not (math.isfinite(alpha) and alpha > 0):
        raise MeshwiseError(f"expected alpha to be a number above 0, found {text!r}")
    return alpha


def _options(method: str, rest: str, text: str) -> dict[str, str]:
    known = {"full": (), "lora": ("rank", "alpha", "targets"), "qlora": ("rank", "alpha", "targets", "storage")}[method]
    found: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not value:
            raise MeshwiseError(f"expected name=value after {method}:, found {part!r} in {text!r}")
        if name not in known:
            raise UnknownNameError(f"option of {method}", name, known, list_all=True)
        if name in found:
            raise MeshwiseError(f"{name} is given twice in {text!r}")
        found[name] = value
    return found


#: The axis of an adapter's rank.
RANK = "Ra"


def is_adapter(t: Tensor) -> bool:
    """Whether a weight is one of an adapter's two."""
    return t.kind is Kind.WEIGHT and RANK in t.axes


def with_adapters(program: Program, tuning: FineTuning) -> Program:
    """Freeze all weights; give each targeted projection y = x W an adapter, y = x W + (x A) B, scaled as tuning says.

    Norms, biases, embedding, head and router stay as they are. An expert has adapters of its own.

    Raises:
        MeshwiseError: the targets name no projection of the model.
    """
    if tuning.full:
        return program
    assert RANK not in program.sizes, "the axis of the rank is taken"
    blocks = tuple(
        replace(b, ops=tuple(_adapt(b, tuning)), idle=tuple(replace(t, frozen=True) for t in b.idle)) for b in program
    )
    adapted = replace(program, blocks=blocks, sizes={**program.sizes, RANK: tuning.rank})
    if not trainable_parameters(adapted):
        raise MeshwiseError(
            f"fine_tune {tuning.name!r}: the model has no projection of {', '.join(tuning.targets)}; use targets=all"
        )
    return adapted


def trainable_parameters(program: Program) -> int:
    """Parameters that are not frozen.

    >>> from meshwise.jobs import parse_fine_tuning
    >>> attention = Einsum.parse("q", "x[B, D] * w_q[D, H] -> q[B, H]", weights=("w_q",))
    >>> program = Program("train", (Block("layer", (attention,), repeat=2),), {"D": 64, "H": 32})
    >>> trainable_parameters(with_adapters(program, parse_fine_tuning("lora:rank=4")))
    768
    """
    return int(sum(b.repeat * t.elements(program.sizes) for b in program for t in b.weights if not t.frozen))


def _adapt(block: Block, tuning: FineTuning) -> list[Op]:
    ops: list[Op] = []
    for op in block.ops:
        frozen = replace(op, inputs=tuple(replace(t, frozen=True) if t.kind is Kind.WEIGHT else t for t in op.inputs))
        if block.role != "layer" or not isinstance(frozen, Einsum) or not is_projection(frozen):
            ops.append(frozen)
            continue
        weight = next(t for t in frozen.inputs if t.kind is Kind.WEIGHT)
        adapted = tuning.adapts(weight.name)
        base = replace(frozen, output=replace(op.output, name=f"{op.output.name}.base")) if adapted else frozen
        ops += _stored(base, weight, tuning)
        if adapted:
            ops += _adapter(frozen, weight, base.output)
    return ops


def _stored(op: Einsum, weight: Tensor, tuning: FineTuning) -> list[Op]:
    """`op` on the weight as stored: a quantized weight is widened before each multiplication."""
    if tuning.stored is None:
        return [op]
    few = tuning.stored.storing(weight)
    wide = Tensor(f"wide.{weight.name}", weight.axes, frozen=True)
    widen = Convert(name=f"widen.{weight.name}", inputs=(few,), output=wide, lasting=False)
    return [widen, replace(op, inputs=tuple(wide if t is weight else t for t in op.inputs))]


def _adapter(op: Einsum, weight: Tensor, base: Tensor) -> list[Op]:
    """The adapter's (x A) B, added to the frozen weight's output, and scaled there."""
    (x,) = (t for t in op.inputs if t is not weight)
    y = op.output
    rows = tuple(a for a in weight.axes if a not in y.axes)
    stack = tuple(a for a in weight.axes if a in y.axes and a in x.axes)
    columns = tuple(a for a in weight.axes if a in y.axes and a not in x.axes)
    down = Tensor(f"{weight.name}.a", (*stack, *rows, RANK), Kind.WEIGHT)
    up = Tensor(f"{weight.name}.b", (*stack, RANK, *columns), Kind.WEIGHT)
    low = Tensor(f"{y.name}.low", (*(a for a in x.axes if a not in rows), RANK))
    added = Tensor(f"{y.name}.adapter", y.axes)
    return [
        Einsum(name=f"{op.name}.a", inputs=(x, down), output=low),
        Einsum(name=f"{op.name}.b", inputs=(low, up), output=added),
        Elementwise(name=f"{op.name}.add", inputs=(base, added), output=y, linear=True, joins=True),
    ]
