"""Files of calibrations, which `meshwise calibrate` writes: a base by name, and the constants that steps moved.

Not here: what constants mean (`calibration`), or where bases come from (`fitted`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.core.files import parse_json, read_whole
from meshwise.costs.calibration import Calibration

#: What `schema` says in such a file.
SCHEMA = "meshwise-calibration-1"

#: Constants that a file may hold, besides formats of matmuls and the links' share; each with the most it can be.
_CONSTANTS = {
    "matmul_efficiency": 1.0,
    "attention_efficiency": 1.0,
    "hbm_efficiency": 1.0,
    "elementwise_passes": 100.0,
    "gap": 1.0,
    "mixture_launch": 1.0,
    "interference": 0.99,
    "host_step": 1.0,
    "host_request": 1.0,
    "chained_startup": 1.0,
    "cache_reads": 1.0,
    "cache_start": 1.0,
    "expert_reads": 10.0,
}
#: What rows were of, where they were no steps.
ALONE = "single operations"

#: Shares of the HBM bandwidth at which weights of a format are read in serving.
_READS = {f"weight_reads.{d.value}": d for d in DType}
_FORMATS = {f"matmul_efficiency.{d.value}": d for d in (DType.FP8, DType.FP4, DType.INT8)}
_LINKS = "links.efficiency"


@dataclass(frozen=True, slots=True)
class CalibrationFile:
    """What a file says.

    Args:
        chip: its name.
        base: the calibration that was refined, as `--calibration` takes it.
        constants: name -> value.
        source: the measurements, in words.
        alone: whether these were single operations, which leave open what steps differ by.
    """

    chip: str
    base: str
    constants: Mapping[str, float]
    source: str
    alone: bool = False

    def applied(self, base: Calibration, name: str) -> Calibration:
        """The base with the file's constants, called `name`."""
        plain: dict[str, Any] = {n: v for n, v in self.constants.items() if n in _CONSTANTS}
        narrow = dict(base.narrow) | {_FORMATS[n]: v for n, v in self.constants.items() if n in _FORMATS}
        reads = dict(base.weight_reads) | {_READS[n]: v for n, v in self.constants.items() if n in _READS}
        links = replace(base.links, efficiency=self.constants.get(_LINKS, base.links.efficiency))
        source = f"{base.source}; refined: {self.source}"
        found = replace(
            base, name=name, narrow=tuple(narrow.items()), links=links, source=source, weight_reads=tuple(reads.items())
        )
        found = replace(found, refined=tuple(self.constants))
        if not self.alone:
            found = replace(found, uncertainty_sources=(), measured_formats=None)
        matmul = plain.get("matmul_efficiency", base.matmul_efficiency)
        if plain.get("attention_efficiency", 0.0) > matmul:
            raise MeshwiseError(f"{name}: attention_efficiency is more than matmul_efficiency")
        if (attention := plain.get("attention_efficiency", base.attention_efficiency)) is not None:
            plain["attention_efficiency"] = min(attention, matmul)  # the base's may be more than was measured
        return replace(found, **plain)


def is_file_name(name: str) -> bool:
    """Whether `--calibration` names a file: it ends in .json."""
    return name.endswith(".json")


def changed_constants(base: Calibration, refined: Calibration) -> dict[str, float]:
    """Constants in which two calibrations differ, as files name them."""
    found = {n: getattr(refined, n) for n in _CONSTANTS if getattr(refined, n) != getattr(base, n)}
    for names, before, after in (
        (_FORMATS, dict(base.narrow), dict(refined.narrow)),
        (_READS, dict(base.weight_reads), dict(refined.weight_reads)),
    ):
        found |= {n: after[d] for n, d in names.items() if d in after and after[d] != before.get(d)}
    if refined.links.efficiency != base.links.efficiency:
        found[_LINKS] = refined.links.efficiency
    return found


def calibration_text(chip: str, base: Calibration, refined: Calibration, measured: Mapping[str, Any]) -> str:
    """Write a file; `measured` says what the constants were fitted to, and how well."""
    constants = changed_constants(base, refined)
    document = {"schema": SCHEMA, "chip": chip, "base": base.name, "constants": constants, "measured": dict(measured)}
    return json.dumps(document, indent=2) + "\n"


def read_calibration_file(path: Path) -> CalibrationFile:
    """Read a file that `meshwise calibrate` wrote.

    Raises:
        MeshwiseError: it cannot be read, or holds what no calibration has.
    """
    try:
        document = parse_json(read_whole(path), f"--calibration {path}")
    except OSError as error:
        raise MeshwiseError(f"--calibration {path}: {error.strerror}; meshwise calibrate writes such files") from None
    except UnicodeDecodeError:
        raise MeshwiseError(f"--calibration {path}: not JSON: it holds no text") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise MeshwiseError(f"--calibration {path}: expected the schema {SCHEMA!r}, as meshwise calibrate writes it")
    constants = document.get("constants")
    if not isinstance(constants, dict) or not all(isinstance(document.get(k), str) for k in ("chip", "base")):
        raise MeshwiseError(f"--calibration {path}: expected chip, base and constants")
    for name, value in constants.items():
        _check(path, name, value)
    said = document.get("measured")
    measured = said if isinstance(said, dict) else {}
    source, alone = f"{measured.get('rows', '?')} rows, {path.name}", measured.get("of") == ALONE
    return CalibrationFile(document["chip"], document["base"], constants, source, alone)


def _check(path: Path, name: str, value: object) -> None:
    if name not in (known_names := (*_CONSTANTS, *_FORMATS, *_READS, _LINKS)):
        known = ", ".join(known_names)
        raise MeshwiseError(f"--calibration {path}: {name!r} is no constant; expected some of {known}")
    most = _CONSTANTS.get(name, 1.0)
    least = 1.0 if name == "elementwise_passes" else 0.0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= float(value) <= most:  # type: ignore[arg-type]
        raise MeshwiseError(f"--calibration {path}: {name} is a number from {least:g} to {most:g}, found {value!r}")
