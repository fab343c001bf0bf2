"""What a tool hides of communication: the row of its table that the cost, the export and the answer's words read.

The cost reads `software`, a calibration's name; the export writes the options of what that calibration hides. Not here:
the rules of what hides behind what (`costs.step`), any tool's own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import Calibration, default_calibration
from meshwise.costs.fitted import SOFTWARE, fitted_calibration
from meshwise.hardware import Chip


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far a tool overlaps.

    Args:
        software: names of `costs.fitted.SOFTWARE` that it can be, as its options are set; the first is what exports
            set up.
        options: what is hidden (keys of `costs.hidden.SENT`) -> the option that makes it so, with its source.
    """

    software: tuple[str, ...]
    options: Mapping[str, str]

    def calibration(self, chip: Chip) -> str:
        """The name of the calibration that prices what is planned for the tool on a chip."""
        return "fitted" if _is_measured(chip) else fitted_calibration(chip, self.software[0]).name

    def of(self, calibration: Calibration, chip: Chip) -> Calibration:
        """The calibration that a plan is exported as: its own if it is of the tool, else the tool's."""
        known = calibration.software in self.software or _is_measured(chip)
        return calibration if known else fitted_calibration(chip, self.software[0])


def _is_measured(chip: Chip) -> bool:
    """Whether a chip's rates were measured on it: nothing else is known of its software."""
    return default_calibration(chip).name == "cpu"


def _claims(calibration: Calibration) -> frozenset[str]:
    """What a calibration hides of some layout, that another may not."""
    claims = {
        "tensor parallelism's collectives behind their matmuls": calibration.collective_matmul,
        "tokens to their experts beside another microbatch": calibration.beside_exchanges,
        "sums of gradients in pipelines": not calibration.late_exchange and "pipelines" not in calibration.late_once,
        "sums of gradients without ZeRO": not calibration.late_exchange and "whole" not in calibration.late_once,
        "gathers of new weights": not calibration.late_exchange and "weights" not in calibration.late_once,
        **{f"sends of {s}": not calibration.sends_waited_for(s) for s in ("1f1b", "interleaved")},
    }
    return frozenset(claim for claim, holds in claims.items() if holds)


def check_overlap(tool: str, overlap: Overlap, asked: str, calibration: Calibration, chip: Chip) -> None:
    """Refuse constants of another software that hides what a tool cannot.

    Raises:
        MeshwiseError: with what it hides, and the names that go with the tool.
    """
    if not calibration.software or calibration.software in overlap.software:
        return
    able: Iterable[frozenset[str]] = (_claims(fitted_calibration(chip, name)) for name in overlap.software)
    beyond = sorted(_claims(calibration) - frozenset().union(*able))
    if beyond:
        known = ", ".join(f"fitted+{name}" for name in overlap.software)
        raise MeshwiseError(
            f"--calibration {asked}: {SOFTWARE[calibration.software].name} hides what {tool} cannot "
            f"({'; '.join(beyond)}); expected fitted, which takes {tool}'s own overlap, or one of {known}"
        )
