"""The fitted calibration: what chips sustain in whole steps, and what generations of software make of them; its files.

A calibration is a chip family's constants with those of a software; both are shared by all models, layouts and sizes.
`docs/accuracy.md` says how well they predict. Not here: single operations (`calibration`), fitting (`scoring`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.core.files import parse_json, read_whole
from meshwise.costs.calibration import CALIBRATIONS, Calibration, default_calibration
from meshwise.hardware import Chip, load_chip


@dataclass(frozen=True, slots=True)
class Software:
    """What a generation of training software does, whatever the chip.

    Args:
        name: what users type after "fitted+".
        meaning: what it is, for people.
        flash: generation of fused attention, 0 for none, 1 for kernels before 2023-07 (FlashAttention 1, its Triton
            version), 2 for those since.
        elementwise_passes, late_exchange, collective_matmul: as in `Calibration`; None keeps the family's. Inputs that
            are gathered once more come late in all of them.
        graphs: whether layers with experts are launched as graphs, so that the host is never waited for.
        source: where the numbers are from.
        gap: seconds between operations; None for `_GAP`.
        beside_exchanges, late_sends, scattered_sends, adds_gradients: as in `Calibration`.
        rests_on: sources of measured steps by which its numbers, or that it is a software of its own, were decided.
    """

    name: str
    meaning: str
    flash: int
    elementwise_passes: float
    late_exchange: bool
    collective_matmul: bool | None
    graphs: bool
    source: str
    gap: float | None = None
    beside_exchanges: bool = False
    late_sends: int = 0
    scattered_sends: bool = False
    adds_gradients: bool = False
    rests_on: tuple[str, ...] = ()


_STEPS = "fitted to whole steps"

#: By name; the first is what is assumed where nothing is said, on GPUs.
SOFTWARE = {
    s.name: s
    for s in (
        Software(
            "megatron", "Megatron Core and NeMo with Transformer Engine, 2024 and later",
            flash=2, elementwise_passes=1.23, late_exchange=False, collective_matmul=True, graphs=False,
            source=f"{_STEPS} of NeMo on H100; collectives of tensor parallelism run with the matmuls (userbuffers)",
            rests_on=("nemo2407", "mbridge"),
        ),
        Software(
            "megatron-graphs", "the same on Blackwell in NeMo containers from 26.06 on: the host is not waited for",
            flash=2, elementwise_passes=1.16, late_exchange=False, collective_matmul=True, graphs=True,
            source=f"{_STEPS} of mixtures, which became a third faster with that release",
            gap=1.9e-6, beside_exchanges=True,
            rests_on=("mbridge",),
        ),
        Software(
            "megatron-beside", "`megatron`, where tokens are exchanged beside another microbatch's compute",
            flash=2, elementwise_passes=1.23, late_exchange=False, collective_matmul=True, graphs=False,
            source="`megatron`'s; as NVIDIA's recipes do where experts are spread over nodes",
            beside_exchanges=True,
            rests_on=("mbridge",),
        ),
        Software(
            "megatron-2021", "Megatron-LM before FlashAttention",
            flash=0, elementwise_passes=1.02, late_exchange=True, collective_matmul=False, graphs=False,
            source=f"{_STEPS} on A100; gradients are reduced after the last backward pass",
            late_sends=1, scattered_sends=True,
            rests_on=("sc21", "korthikanti", "vtrain"),
        ),
        Software(
            "megatron-deepspeed", "Megatron-DeepSpeed before FlashAttention, as BLOOM was trained: launches block",
            flash=0, elementwise_passes=1.6, late_exchange=True, collective_matmul=False, graphs=False,
            source=f"{_STEPS} of the BLOOM pre-study on A100 with CUDA_LAUNCH_BLOCKING=1, without which it hung",
            gap=75e-6, late_sends=2, scattered_sends=True, adds_gradients=True,
            rests_on=("bloomprequel",),
        ),
        Software(
            "eager-2023", "PyTorch FSDP, elementwise operations not fused, FlashAttention 1",
            flash=1, elementwise_passes=1.74, late_exchange=False, collective_matmul=False, graphs=False,
            source=f"{_STEPS} of LLM Foundry; attention: Dao 2023 on its predecessor",
            rests_on=("llmfoundry",),
        ),
        Software(
            "xla", "JAX: elementwise operations fused by XLA, a step launched as one program",
            flash=2, elementwise_passes=1.0, late_exchange=False, collective_matmul=None, graphs=True, source=_STEPS,
            rests_on=("maxtext", "jaxtoolbox"),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Chips:
    """What a family of chips does in whole steps.

    Args:
        sustained: share of the matmul rate of milliseconds that is kept for minutes, where power limits clocks.
        narrow: as in `Calibration`, of whole steps.
        attention: share of the dense FLOP/s over long sequences, second generation of fused kernels.
        half_attention, half_depth, half_output, mixture_launch: as in `Calibration`.
        memory, links: share of the bandwidth of HBM, and of links for large messages.
        flash_1: the same share for kernels of the first generation, forward, and backward over it.
        source: where the numbers are from.
    """

    sustained: float
    narrow: tuple[tuple[DType, float], ...]
    attention: float | None
    half_attention: float
    half_depth: float
    half_output: float
    memory: float
    links: float
    mixture_launch: float
    flash_1: tuple[float, float]
    source: str


_MICRO = (
    "half_depth and attention: matmuls of K = 1,024 to 16,384 and causal attention over 512 to 16,384 keys, NVIDIA "
    "AIConfigurator database; the others: fitted to whole steps, around single operations"
)


def _waves(units: int) -> float:
    """A tenth of what one wave of tiles of 128 x 256 on all compute units makes: what partly idle waves cost."""
    return 0.1 * units * 128 * 256


#: By family; a chip of no family inherits Hopper's.
_CHIPS = {
    "ampere": _Chips(0.969, (), 0.57, 600.0, 200.0, _waves(108), 0.82, 0.81, 82e-6, (0.46, 0.58), _MICRO),
    "hopper": _Chips(0.81, ((DType.FP8, 0.65),), 0.52, 1000.0, 200.0, _waves(132), 0.87, 0.74, 82e-6, (0.24, 0.65),
                     _MICRO),
    "blackwell": _Chips(0.906, ((DType.FP8, 0.603), (DType.FP4, 0.413)), 0.52, 1900.0, 50.0, _waves(148), 0.91, 0.75,
                        82e-6, (0.24, 0.65), _MICRO),
    "cdna": _Chips(0.90, (), None, 1000.0, 200.0, _waves(304), 0.85, 0.74, 82e-6, (0.24, 0.65),
                   f"inherited from Hopper and Ampere; {_MICRO}"),
    "tpu": _Chips(0.875, (), None, 0.0, 0.0, 0.0, 0.85, 0.97, 0.0, (0.24, 0.65),
                  "sustained, interference: fitted to whole steps of MaxText on v4, v5e and v5p (2023)"),
}  # fmt: skip

#: Families of which whole steps were measured.
_MEASURED = ("ampere", "hopper", "blackwell", "tpu")

#: Seconds between operations of GPUs, and share of hidden communication that the compute beside it loses.
_GAP, _INTERFERENCE = 8.2e-6, 0.253

#: Backward over forward rate of attention in kernels of the second generation (Dao 2023, figures 4 to 7).
_FLASH_2_BACKWARD = 0.8


def fitted_calibration(chip: Chip, software: str | None = None) -> Calibration:
    """The fitted calibration of a chip's family with a software's constants.

    >>> from meshwise.hardware import load_chip
    >>> found = fitted_calibration(load_chip("h100-sxm"), "eager-2023")
    >>> found.name, found.elementwise_passes, round(found.matmul_efficiency, 2)
    ('fitted+eager-2023', 1.74, 0.65)

    Args:
        chip: of the cluster.
        software: a name of `SOFTWARE`; by default the newest for such chips.

    Returns: of a machine whose own rates were measured (`meshwise bench machine`) its own: nothing else is known of it.

    Raises:
        UnknownNameError: with the names there are.
        MeshwiseError: a software on such a machine.
    """
    family = default_calibration(chip)
    if family.name == "cpu":
        if software is not None:
            raise MeshwiseError(
                f"--calibration fitted+{software}: its constants are of GPUs and TPUs, and the rates of {chip.name} "
                "were measured; expected fitted or operations, which take these, or none"
            )
        return family
    usual = "xla" if family.name == "tpu" else "megatron"
    name = software or usual
    if name not in SOFTWARE:
        raise UnknownNameError("software", name, SOFTWARE)
    return replace(_with(family, SOFTWARE[name]), name="fitted" if name == usual else f"fitted+{name}")


def _with(family: Calibration, software: Software) -> Calibration:
    """The constants of a family and of a software together."""
    own = _CHIPS.get(family.name, _CHIPS["hopper"])
    forward, backward = own.flash_1 if software.flash == 1 else (own.attention, _FLASH_2_BACKWARD)
    gap = 0.0 if family.name == "tpu" else _GAP  # a program of XLA runs on a TPU without the host between operations
    matmul = software.collective_matmul if family.name != "tpu" else None
    return replace(
        family,
        matmul_efficiency=family.matmul_efficiency * own.sustained,
        narrow=own.narrow or family.narrow,
        attention_efficiency=forward,
        attention_backward=backward,
        half_attention=own.half_attention if software.flash == 2 else 0.0,
        unfused_attention=software.flash == 0,
        half_depth=own.half_depth,
        elementwise_passes=software.elementwise_passes,
        gap=gap if software.gap is None else software.gap,
        mixture_launch=0.0 if software.graphs else own.mixture_launch,
        interference=_INTERFERENCE,
        hbm_efficiency=own.memory,
        links=replace(family.links, efficiency=own.links),
        late_exchange=software.late_exchange,
        compiled=software.name == "xla",
        late_gathers=True,
        beside_exchanges=software.beside_exchanges,
        late_sends=software.late_sends,
        scattered_sends=software.scattered_sends,
        adds_gradients=software.adds_gradients,
        repeats_whole=software.name != "xla",
        half_output=own.half_output,
        collective_matmul=family.collective_matmul if matmul is None else matmul,
        doubts=() if family.name in _MEASURED else ("family",),
        source=f"{family.source}; {own.source}; {software.meaning}: {software.source}",
    )


def find_calibration(name: str, chip: Chip) -> Calibration:
    """Read `--calibration`: operations, none, a family by name, fitted, fitted+SOFTWARE, or a file (.json).

    Raises:
        UnknownNameError: with the names there are.
        MeshwiseError: a file that cannot be read, or is of another chip.
    """
    if is_file_name(name):
        return _of_file(name, chip)
    word, plus, software = name.partition("+")
    if word == "fitted":
        return fitted_calibration(chip, software if plus else None)
    if name == "operations":
        return default_calibration(chip)
    if name not in CALIBRATIONS:
        known = ["operations", *CALIBRATIONS, "fitted", *(f"fitted+{s}" for s in SOFTWARE)]
        raise UnknownNameError("calibration", name, known)
    return CALIBRATIONS[name]


def _of_file(name: str, chip: Chip) -> Calibration:
    """The calibration of a file that `meshwise calibrate` wrote."""
    file = read_calibration_file(Path(name))
    if default_calibration(load_chip(file.chip)).name != default_calibration(chip).name:
        raise MeshwiseError(f"--calibration {name}: it is of {file.chip}, another family than {chip.name}'s")
    if is_file_name(file.base):
        raise MeshwiseError(f"--calibration {name}: its base is a file, {file.base!r}; expected a calibration by name")
    return file.applied(find_calibration(file.base, chip), name)


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
}
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
    """

    chip: str
    base: str
    constants: Mapping[str, float]
    source: str

    def applied(self, base: Calibration, name: str) -> Calibration:
        """The base with the file's constants, called `name`."""
        plain: dict[str, Any] = {n: v for n, v in self.constants.items() if n in _CONSTANTS}
        narrow = dict(base.narrow) | {_FORMATS[n]: v for n, v in self.constants.items() if n in _FORMATS}
        links = replace(base.links, efficiency=self.constants.get(_LINKS, base.links.efficiency))
        source = f"{base.source}; refined: {self.source}"
        found = replace(base, name=name, narrow=tuple(narrow.items()), links=links, source=source)
        found = replace(found, refined=tuple(self.constants), doubts=())
        if plain.get("attention_efficiency", 0.0) > plain.get("matmul_efficiency", base.matmul_efficiency):
            raise MeshwiseError(f"{name}: attention_efficiency is more than matmul_efficiency")
        return replace(found, **plain)


def is_file_name(name: str) -> bool:
    """Whether `--calibration` names a file: it ends in .json."""
    return name.endswith(".json")


def changed_constants(base: Calibration, refined: Calibration) -> dict[str, float]:
    """Constants in which two calibrations differ, as files name them."""
    found = {n: getattr(refined, n) for n in _CONSTANTS if getattr(refined, n) != getattr(base, n)}
    before, after = dict(base.narrow), dict(refined.narrow)
    found |= {n: after[d] for n, d in _FORMATS.items() if d in after and after[d] != before.get(d)}
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
    rows = document.get("measured", {}).get("rows", "?") if isinstance(document.get("measured"), dict) else "?"
    return CalibrationFile(document["chip"], document["base"], constants, f"{rows} rows, {path.name}")


def _check(path: Path, name: str, value: object) -> None:
    if name not in _CONSTANTS and name not in _FORMATS and name != _LINKS:
        known = ", ".join((*_CONSTANTS, *_FORMATS, _LINKS))
        raise MeshwiseError(f"--calibration {path}: {name!r} is no constant; expected some of {known}")
    most = _CONSTANTS.get(name, 1.0)
    least = 1.0 if name == "elementwise_passes" else 0.0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= float(value) <= most:  # type: ignore[arg-type]
        raise MeshwiseError(f"--calibration {path}: {name} is a number from {least:g} to {most:g}, found {value!r}")
