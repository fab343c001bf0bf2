"""Which number format plays which role in serving, and a serving program in these formats.

Weight-only quantisation widens weights as they are read; full quantisation multiplies narrow operands. Not here: what
any of it costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.core.tensors import Block, Format, Kind, Op, Program, Tensor
from meshwise.jobs.precision import PRECISIONS, Precision, Recipe, is_projection, narrowed, read_roles

#: Bytes of scales per element of weights in four bits: one e4m3 number for 16 (NVFP4), one e8m0 number for 32 (MXFP4).
_SCALES = {DType.FP4: 1 / 16, DType.MXFP4: 1 / 32}

#: Bytes of the fp16 or bf16 number that scales a group of int4 weights (AWQ, GPTQ), and elements of such a group.
_INT4_SCALE, _INT4_GROUP = 2, 128

_WIDE = (DType.BF16, DType.FP16, DType.FP32)


@dataclass(frozen=True, slots=True)
class ServingPrecision:
    """Formats by role in serving.

    Args:
        name: what users type.
        weights: of the projections of layers (the router stays as activations are).
        activations: of everything between matmuls; of embedding, head, norms and router too unless `head` says more.
        kv: of the cache of keys and values (or latents).
        compute: of the operands of projections: `activations` for weight-only quantisation.
        head: of the embedding and the head.
        meaning: one line for help and reports.
        attention: of the projections of attention and of what stands in its place (states); None: as `weights`.
        experts: of routed experts' weights; None: as `weights`.
        group: int4 weights that share one scale.
    """

    name: str
    weights: DType
    activations: DType
    kv: DType
    compute: DType
    head: DType
    meaning: str
    attention: DType | None = None
    experts: DType | None = None
    group: int = _INT4_GROUP

    @property
    def stored(self) -> Mapping[str, DType]:
        """Format of the projections' weights by what they are part of: "attention", "experts", "mlp" (the rest)."""
        attention, experts = self.attention or self.weights, self.experts or self.weights
        return {"attention": attention, "experts": experts, "mlp": self.weights}

    @property
    def uniform(self) -> bool:
        """Whether all projections' weights have one format."""
        return set(self.stored.values()) == {self.weights}

    @property
    def wide(self) -> bool:
        """Whether weights and operands are as activations are: nothing is quantised."""
        return {self.compute, *self.stored.values()} == {self.activations}

    def weight_format(self, name: str) -> Format:
        """Of a projection's weights by their name, scales included."""
        dtype = self.stored[_part_of(name)]
        return Format(dtype, _INT4_SCALE / self.group if dtype is DType.INT4 else _SCALES.get(dtype, 0.0))

    @property
    def quantises_activations(self) -> bool:
        """Whether operands are brought into a narrower format before they are multiplied."""
        return self.compute != self.activations

    @property
    def formats(self) -> Precision:
        """The same as the cost model takes it."""
        recipe = None
        if self.quantises_activations:
            scales = _SCALES.get(self.compute, 0.0)
            recipe = Recipe(Format(self.compute, scales), None, needs=(self.compute,))
        return replace(
            PRECISIONS["bf16"],
            name=self.name,
            weights=self.activations,
            activations=self.activations,
            compute=self.compute,
            other_compute=self.activations,
            meaning=self.meaning,
            recipe=recipe,
        )


def _part_of(name: str) -> str:
    """What a projection's weight is part of, by its name in programs."""
    if name.startswith("w_expert."):
        return "experts"
    return "mlp" if name in {"w_gate", "w_up", "w_down"} or name.startswith("w_shared.") else "attention"


def _preset(name: str, weights: DType, kv: DType, compute: DType, meaning: str) -> ServingPrecision:
    return ServingPrecision(name, weights, DType.BF16, kv, compute, DType.BF16, meaning)


_F32 = DType.FP32

#: Presets by name.
SERVING_PRECISIONS = {
    p.name: p
    for p in (
        _preset("bf16", DType.BF16, DType.BF16, DType.BF16, "weights, activations and cache in bf16"),
        ServingPrecision("fp32", _F32, _F32, _F32, _F32, _F32, "weights, activations and cache in fp32"),
        _preset("fp8", DType.FP8, DType.BF16, DType.FP8, "fp8 weights and operands (W8A8), bf16 cache"),
        _preset("fp8-kv8", DType.FP8, DType.FP8, DType.FP8, "fp8 weights, operands and cache"),
        _preset("int8", DType.INT8, DType.BF16, DType.INT8, "int8 weights and operands (W8A8), bf16 cache"),
        _preset("int8-weights", DType.INT8, DType.BF16, DType.BF16, "int8 weights (W8A16), bf16 else"),
        _preset("int4-weights", DType.INT4, DType.BF16, DType.BF16, "int4 weights by groups of 128 (W4A16), bf16 else"),
        _preset("fp4", DType.FP4, DType.FP8, DType.FP4, "fp4 weights and operands by blocks of 16, fp8 cache"),
        _preset(
            "nvfp4", DType.FP4, DType.BF16, DType.FP4, "fp4 weights and operands by blocks of 16 (NVFP4), bf16 cache"
        ),
        _preset("mxfp4", DType.MXFP4, DType.BF16, DType.BF16, "fp4 weights by blocks of 32 (MXFP4), bf16 else"),
    )
}

#: What asks for the formats of a model's published checkpoint.
PUBLISHED = "published"

_ROLES = ("weights", "activations", "kv", "compute", "head", "attention", "experts")
#: What `--precision` takes, in words.
FORMATS = (
    f"{', '.join(SERVING_PRECISIONS)}, or roles such as weights=int8,kv=int8 ({', '.join(_ROLES)}; group=32 of int4)"
)
_ALIASES = {"w": "weights", "weight": "weights", "act": "activations", "a": "activations", "cache": "kv"}


def parse_serving_precision(text: str) -> ServingPrecision:
    """Read a preset, roles, or a preset with changed roles: "fp8", "weights=int8,kv=int8", "fp8,kv=fp8".

    Operands are multiplied as activations are unless `compute` says otherwise.

    >>> parse_serving_precision("weights=int8,kv=int8").kv
    <DType.INT8: 'int8'>

    Raises:
        UnknownNameError: for an unknown preset, role or dtype.
        MeshwiseError: for a role that is given twice, or formats that cannot go together.
    """
    hint = "Roles are given as weights=int8,kv=int8,compute=int8."
    named, group = _take_group(text)
    base, found = read_roles(named, SERVING_PRECISIONS, "serving precision", hint, roles=_ROLES, aliases=_ALIASES)
    changes = {role: dtype for role, dtype in found.items() if dtype is not None}
    if not changes and group is None:
        return base
    if "activations" in changes:
        changes.setdefault("head", changes["activations"])
        if not base.quantises_activations:
            changes.setdefault("compute", changes["activations"])
    meaning = f"{base.name} with {', '.join(changes)} changed"
    made = replace(base, name=text, meaning=meaning, group=group or base.group, **changes)
    if group is not None and DType.INT4 not in made.stored.values():
        raise MeshwiseError(f"precision: group={group} is of int4 weights, found none in {text!r}; leave it out")
    if made.activations not in _WIDE:
        raise MeshwiseError(
            f"precision: activations between matmuls are kept in 16 bits or more, found {made.activations.value}; "
            f"write compute={made.activations.value} for narrow operands"
        )
    if made.quantises_activations and min(d.bits for d in made.stored.values()) > made.compute.bits:
        raise MeshwiseError(
            f"precision: operands in {made.compute.value} need weights as narrow, found {made.weights.value}; "
            f"write weights={made.compute.value}"
        )
    return made


def _take_group(text: str) -> tuple[str, int | None]:
    """The text without `group=N`, and N."""
    parts = text.split(",")
    given = [p.partition("=")[2].strip() for p in parts if p.partition("=")[0].strip() == "group"]
    if not given:
        return text, None
    if len(given) > 1 or not given[0].isdecimal() or not int(given[0]):
        raise MeshwiseError(f"precision: expected group=32, int4 weights that share a scale, found {text!r}")
    rest = [p for p in parts if p.partition("=")[0].strip() != "group"]
    return ",".join(rest) or "bf16", int(given[0])


def quantised(program: Program, precision: ServingPrecision) -> Program:
    """A serving program in its formats: weights, operands of projections, caches."""
    program = replace(program, blocks=tuple(_in_formats(b, precision) for b in program))
    return narrowed(program, precision.formats) if precision.quantises_activations else program


def _in_formats(block: Block, precision: ServingPrecision) -> Block:
    def tensor(t: Tensor, op: Op) -> Tensor:
        if t.kind is Kind.KV_CACHE and t.dtype is None:
            return Format(precision.kv).storing(t)  # narrow caches have one scale a tensor, which is nothing
        if t.kind is not Kind.WEIGHT:
            return t
        if block.role == "layer" and is_projection(op):
            return precision.weight_format(t.name).storing(t)
        if block.role != "layer" and len(t.axes) > 1:
            return replace(t, dtype=precision.head)
        return t

    ops = tuple(
        replace(op, inputs=tuple(tensor(t, op) for t in op.inputs), output=tensor(op.output, op)) for op in block.ops
    )
    return replace(block, ops=ops)
