"""What of a model is trained: all of it, or low-rank adapters beside frozen weights. Not here: making them."""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.core.tensors import Format

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
        targets: projections that get one: groups or single ones.
        storage: "nf4" or "int4" for frozen weights of projections, or "" as the precision's role says.
    """

    name: str
    method: str
    rank: int = 0
    targets: tuple[str, ...] = ()
    storage: str = ""

    @property
    def full(self) -> bool:
        """Whether everything is trained."""
        return self.method == "full"

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
        return f"adapters of rank {self.rank} on {', '.join(self.targets)} beside {frozen}"

    def adapts(self, weight: str) -> bool:
        """Whether the projection with the weight named `weight` ("w_q", "w_expert.up") gets an adapter."""
        stem = weight.removeprefix("w_")
        group = stem.partition(".")[0]
        kind = {"expert": "experts", "shared": "shared"}.get(group, "mlp" if stem in _MLP else "attention")
        return bool({"all", kind, stem} & set(self.targets))


FULL = FineTuning("full", "full")


def parse_fine_tuning(text: str) -> FineTuning:
    """Read "full", "lora", "lora:rank=16,targets=attention+mlp", "qlora:rank=64,storage=int4".

    >>> parse_fine_tuning("lora:rank=8,targets=q+v").targets
    ('q', 'v')
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
    return FineTuning(text, method, _rank(options.get("rank", "16")), targets, storage)


def _options(method: str, rest: str, text: str) -> dict[str, str]:
    known = {"full": (), "lora": ("rank", "targets"), "qlora": ("rank", "targets", "storage")}[method]
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


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= _LARGEST_RANK:
        raise MeshwiseError(f"expected a rank from 1 to {_LARGEST_RANK:,}, found {text!r}")
    return int(text)
