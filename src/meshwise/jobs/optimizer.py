"""What an optimizer keeps per parameter, and what it computes besides. Not here: bytes of a shard (`costs.update`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps.

    Args:
        name: what users type.
        moments: values kept per parameter, in the format of the precision's role `moments`.
        meaning: one line for help.
        factored: whether the second moment of a matrix is kept as sums over its rows and its columns, besides
            `moments`; that of a vector is kept whole.
        block_scaled: values that share one fp32 scale, each stored in one byte instead of the role's format; 0 for
            none.
        orthogonal_iterations: of Newton-Schulz on the momentum of every matrix of the layers; what is no such matrix
            (embedding, head, norms, biases) keeps `other_moments` and follows AdamW. 0 for none.
        other_moments: see there.
    """

    name: str
    moments: int
    meaning: str
    factored: bool = False
    block_scaled: int = 0
    orthogonal_iterations: int = 0
    other_moments: int = 0


#: Optimizers by name. Sources: Loshchilov & Hutter 2019 (AdamW), Dettmers et al. 2022 (8-bit states), Shazeer & Stern
#: 2018 (Adafactor), Chen et al. 2023 (Lion), Jordan et al. 2024 and Liu et al. 2025 (Muon).
OPTIMIZERS = {
    o.name: o
    for o in (
        Optimizer("adamw", 2, "Adam with decoupled weight decay: two moments"),
        Optimizer("adamw-8bit", 2, "AdamW with both moments in one byte and a scale a block of 256", block_scaled=256),
        Optimizer(
            "adafactor", 0, "Adafactor without momentum: row and column sums of the second moment", factored=True
        ),
        Optimizer("lion", 1, "Lion: one moment"),
        Optimizer("lion-8bit", 1, "Lion with its moment in one byte and a scale a block of 256", block_scaled=256),
        Optimizer(
            "muon",
            1,
            "Muon: one moment of the layers' matrices, made orthogonal by 5 Newton-Schulz iterations; else AdamW",
            orthogonal_iterations=5,
            other_moments=2,
        ),
        Optimizer("momentum", 1, "SGD with momentum: one moment"),
        Optimizer("sgd", 0, "plain SGD: no state"),
    )
}

_ALIASES = {"adam": "adamw", "adam-8bit": "adamw-8bit", "adam8bit": "adamw-8bit", "adamw8bit": "adamw-8bit"}


def parse_optimizer(text: str) -> Optimizer:
    """Find an optimizer.

    Raises:
        UnknownNameError: with the names there are.
    """
    key = text.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in OPTIMIZERS:
        raise UnknownNameError("optimizer", text, OPTIMIZERS)
    return OPTIMIZERS[key]


def newton_schulz_flops(rows: Any, columns: Any, iterations: int) -> Any:
    """FLOPs that make a [rows, columns] matrix nearly orthogonal, m being the smaller and n the larger.

    Each iteration multiplies A = X X^T (2 m^2 n), A A (2 m^3) and (b A + c A A) X (2 m^2 n). Source: Jordan et al.
    2024, Muon, whose bound of 6 m^2 n an iteration is that of square matrices.

    >>> newton_schulz_flops(1024, 1024, 5) == 5 * 6 * 1024**3
    True
    """
    m, n = min(rows, columns), max(rows, columns)
    return iterations * (4 * m * m * n + 2 * m**3)
