"""What is wanted of a serving plan besides the load: targets, a rate, an objective. Not here: the search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.costs.serving.answer import Mode
from meshwise.sharding.serving import SERVING_AXES

Objective = Literal["throughput", "tpot", "ttft"]


@dataclass(frozen=True, slots=True)
class ServingConstraints:
    """Targets of a serving plan.

    Args:
        objective: most output tokens a second and chip, least time per output token, or least time to the first.
        max_ttft, max_tpot: seconds that no plan may exceed; None for any.
        rate: requests per second that must be served, on as few chips as possible; None for as many as possible.
        mode: of engines that may be used; None for both.
        max_batch: requests that one engine decodes for at once, at most.
        forbid: mesh axes that no plan may use.
        chunks: tokens of a prompt in one step that are tried besides whole prompts, on engines that do both.

    Raises:
        UnknownNameError: for an axis that does not exist.
        MeshwiseError: for a chunk of less than one token.
    """

    objective: Objective = "throughput"
    max_ttft: float | None = None
    max_tpot: float | None = None
    rate: float | None = None
    mode: Mode | None = None
    max_batch: int = 4096
    forbid: tuple[str, ...] = ()
    chunks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if chunk < 1:
                raise MeshwiseError(f"chunks: expected whole numbers of tokens, at least 1, found {chunk}")
        for axis in self.forbid:
            if axis not in SERVING_AXES:
                raise UnknownNameError("serving mesh axis", axis, SERVING_AXES)
