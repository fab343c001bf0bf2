"""The fitted calibration: what chips sustain in whole steps, and what generations of software make of them.

A calibration is a chip family's constants with those of a software; both are shared by all models, layouts and sizes.
`docs/accuracy.md` says how well they predict. Not here: single operations (`calibration`), files (`calibration_files`),
fitting (`scoring`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.costs.calibration import CALIBRATIONS, Calibration, anchored, default_calibration
from meshwise.costs.calibration_files import is_file_name, read_calibration_file
from meshwise.hardware import Chip, load_chip


@dataclass(frozen=True, slots=True)
class Software:
    """What a generation of training software does, whatever the chip.

    Args:
        name: what users type after "fitted+".
        meaning: what it is, for people.
        flash: generation of fused attention, 0 for none, 1 for kernels before 2023-07 (FlashAttention 1, its Triton
            version), 2 for FlashAttention 2, 3 for what is made for the chip (cuDNN 9, FlashAttention 3).
        elementwise_passes, late_exchange, collective_matmul: as in `Calibration`; None keeps the family's. Inputs that
            are gathered once more come late in all of them.
        graphs: whether layers with experts are launched as graphs, so that the host is never waited for.
        source: where the numbers are from.
        gap: seconds between operations; None for `_GAP`.
        beside_exchanges, late_sends, late_schedules, late_once, fused_sequences: as in `Calibration`.
        scattered_sends, adds_gradients, whole_sums, beside_sums: likewise.
        uneven_ring: as in `Calibration`.
        measured: whether steps of it, or of what differs in kernels alone, were compared with measured ones.
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
    late_schedules: tuple[str, ...] = ()
    late_once: tuple[str, ...] = ()
    fused_sequences: bool = False
    scattered_sends: bool = False
    adds_gradients: bool = False
    whole_sums: int = 0
    beside_sums: bool = False
    uneven_ring: bool = False
    measured: bool = True
    rests_on: tuple[str, ...] = ()


_STEPS = "fitted to whole steps"

#: Schedules of PyTorch in which sends are waited for at each pass (`torch.distributed.pipelining.schedules`): others
#: are run from a list of actions, on their way before they are needed. XLA runs these and GPipe as loops
#: that end each turn with a permutation (`pipeline_delay_activation_forwarding` of MaxText, off by default).
_WAITING = ("1f1b", "interleaved")

#: Those of Megatron Core, which overlaps sends under interleaving alone.
_UNLESS_INTERLEAVED = ("1f1b", "gpipe")

#: By name; the first is what is assumed where nothing is said, on GPUs.
SOFTWARE = {
    s.name: s
    for s in (
        Software(
            "megatron", "Megatron Core and NeMo with Transformer Engine, 2024 and later",
            flash=3, elementwise_passes=1.39, late_exchange=False, collective_matmul=True, graphs=False,
            source=f"{_STEPS} of NeMo on H100; collectives of tensor parallelism run with the matmuls (userbuffers)",
            late_sends=1, late_schedules=_UNLESS_INTERLEAVED, fused_sequences=True, beside_sums=True,
            rests_on=("nemo2407", "mbridge"),
        ),
        Software(
            "megatron-graphs", "the same where one CUDA graph is a whole step, so that the host is never waited for",
            flash=3, elementwise_passes=1.39, late_exchange=False, collective_matmul=True, graphs=True,
            source="`megatron-beside`'s; NVIDIA's MXFP8 recipes of mixtures on GB200, GB300 and B300 from NeMo "
            "26.06 on (`cuda_graph_impl=full_iteration`, `overlap_moe_expert_parallel_comm`; its `perf_recipes`)",
            gap=2.0e-6, beside_exchanges=True,
            late_sends=1, late_schedules=_UNLESS_INTERLEAVED, fused_sequences=True, beside_sums=True,
        ),
        Software(
            "megatron-beside", "`megatron`, where tokens are exchanged beside another microbatch's compute",
            flash=3, elementwise_passes=1.39, late_exchange=False, collective_matmul=True, graphs=False,
            source="`megatron`'s; as NVIDIA's recipes do where experts of interleaved pipelines are spread over nodes",
            beside_exchanges=True,
            late_sends=1, late_schedules=_UNLESS_INTERLEAVED, fused_sequences=True, beside_sums=True,
        ),
        Software(
            "megatron-2021", "Megatron-LM before FlashAttention",
            flash=0, elementwise_passes=1.16, late_exchange=True, collective_matmul=False, graphs=False,
            source=f"{_STEPS} on A100; gradients are reduced after the last backward pass",
            late_sends=1, scattered_sends=True,
            rests_on=("sc21", "korthikanti", "vtrain"),
        ),
        Software(
            "megatron-deepspeed", "Megatron-DeepSpeed and GPT-NeoX before FlashAttention",
            flash=0, elementwise_passes=1.16, late_exchange=True, collective_matmul=False, graphs=False,
            source="megatron-2021's operations; sends and sums of gradients of DeepSpeed's engine",
            late_sends=2, scattered_sends=True, adds_gradients=True, whole_sums=1, measured=False,
        ),
        Software(
            "megatron-deepspeed-blocking", "the same as BLOOM was trained: each launch waits for its kernel",
            flash=0, elementwise_passes=1.16, late_exchange=True, collective_matmul=False, graphs=False,
            source=f"{_STEPS} of the BLOOM pre-study on A100 with CUDA_LAUNCH_BLOCKING=1, without which it hung",
            gap=65e-6, late_sends=2, scattered_sends=True, adds_gradients=True, whole_sums=1,
            rests_on=("bloomprequel",),
        ),
        Software(
            "eager-2023", "PyTorch FSDP, elementwise operations not fused, FlashAttention 1",
            flash=1, elementwise_passes=1.94, late_exchange=False, collective_matmul=False, graphs=False,
            source=f"bytes: {_STEPS} of LLM Foundry; attention: Dao 2023 on its predecessor",
        ),
        Software(
            "pytorch", "PyTorch FSDP, DeepSpeed and the like, 2024 and later: eager, FlashAttention 2",
            flash=2, elementwise_passes=1.94, late_exchange=False, collective_matmul=False, graphs=False,
            source="eager-2023's operations; attention: the first that SDPA tries (later than cuDNN 9.15, releases "
            "2.11 on, cuDNN's on Hopper and Blackwell); until 2.6 its rings of attention hold positions in order",
            late_sends=1, late_schedules=_WAITING, uneven_ring=True, measured=False,
        ),
        Software(
            "pytorch-compiled", "the same under torch.compile: elementwise operations fused",
            flash=2, elementwise_passes=1.39, late_exchange=False, collective_matmul=False, graphs=False,
            source="pytorch's kernels of attention, with operations fused as in Transformer Engine", uneven_ring=True,
            late_sends=1, late_schedules=_WAITING, measured=False,
        ),
        Software(
            "torchtitan", "`pytorch-compiled` with asynchronous tensor parallelism, as exports set torchtitan up",
            flash=2, elementwise_passes=1.39, late_exchange=False, collective_matmul=True, graphs=False,
            source="pytorch-compiled's; attention: FlexAttention, release 0.3.0's default, in Triton, taken for as "
            "fast as FlashAttention 2; collectives of tensor parallelism run in pieces beside the matmuls",
            late_sends=1, late_schedules=_WAITING, fused_sequences=True, measured=False,
        ),
        Software(
            "deepspeed", "`pytorch` under DeepSpeed's engines, as exports set them up",
            flash=2, elementwise_passes=1.94, late_exchange=False, collective_matmul=False, graphs=False,
            source="pytorch's operations; ZeRO-2 sums gradients on all replicas (from 0.12.4 on), beside the backward "
            "pass but for pipelines; ZeRO-1 too, at the end, as without ZeRO; new weights and sends are waited for",
            late_sends=2, late_once=("weights", "whole", "pipelines"), whole_sums=2, measured=False,
        ),
        Software(
            "xla", "JAX: elementwise operations fused by XLA, a step launched as one program",
            flash=3, elementwise_passes=1.0, late_exchange=False, collective_matmul=None, graphs=True, source=_STEPS,
            late_sends=1, late_schedules=("gpipe", *_WAITING),
            rests_on=("maxtext", "jaxtoolbox"),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Chips:
    """What a family of chips does in whole steps.

    Args:
        usual: the chip whose shares these are; "" where chips do not differ by power.
        matmul: of its dense FLOP/s in 16 bits, in matmuls for minutes: power limits clocks. Other chips of the family
            keep as many FLOP/s for each watt, as far as matmuls of milliseconds allow.
        narrow: the same of narrower formats.
        attention: share of the dense FLOP/s over long sequences, of fused kernels that are made for the chip.
        half_attention, half_depth, compute_units, mixture_launch: as in `Calibration`.
        memory, links: share of the bandwidth of HBM, and of links for large messages.
        flash_1: the same share for kernels of the first generation, forward, and backward over it.
        flash_2: the share and `half_attention` of the second; None where those made for the chip are of the second.
        source: where the numbers are from.
    """

    usual: str
    matmul: float
    narrow: tuple[tuple[DType, float], ...]
    attention: float | None
    half_attention: float
    half_depth: float
    compute_units: float
    memory: float
    links: float
    mixture_launch: float
    flash_1: tuple[float, float]
    source: str
    flash_2: tuple[float, float] | None = None


_MICRO = (
    "half_depth: matmuls of K = 1,024 to 16,384, NVIDIA AIConfigurator database; attention: likewise on Ampere, on "
    "Hopper and Blackwell causal attention over 2,048 to 32,768 keys, cuDNN 9.19 (cudnn-frontend, 2026); "
    "FlashAttention 2: on H100 causal, heads of 128 (Shah et al. 2024, figure 5), on B200 as many FLOP/s (assumed; "
    "tritonbench's pull request 171: 331 to 362 TFLOP/s); the others: fitted to whole steps, around single operations"
)

#: By family; a chip of no family inherits Hopper's.
_CHIPS = {
    "ampere": _Chips("a100-sxm-80gb", 0.814, (), 0.57, 600.0, 200.0, 108.0, 0.79, 0.674, 86e-6, (0.46, 0.58),
                     _MICRO),
    "hopper": _Chips("h100-sxm", 0.645, ((DType.FP8, 0.605),), 0.633, 850.0, 200.0, 132.0, 0.86, 0.724, 86e-6,
                     (0.24, 0.65), _MICRO, (0.36, 500.0)),
    "blackwell": _Chips("b200-sxm", 0.476, ((DType.FP8, 0.529), (DType.FP4, 0.390)), 0.65, 1400.0, 50.0, 148.0,
                        0.89, 0.677, 86e-6, (0.24, 0.65), _MICRO, (0.158, 500.0)),
    "cdna": _Chips("", 0.46, ((DType.FP8, 0.41),), 0.37, 1000.0, 200.0, 304.0, 0.77, 0.70, 86e-6, (0.24, 0.65),
                   "fp8: mean of soaked matmuls of 4,096 to 32,768 rows, memory, links: BabelStream and RCCL on MI300X "
                   "(Azure AI-benchmarking-guide, 2025); attention: eight tenths of the rate of matmuls; the "
                   f"others: inherited from Hopper and Ampere; {_MICRO}"),
    "tpu": _Chips("", 0.792, (), 0.646, 512.0, 0.0, 0.0, 0.85, 0.966, 0.0, (0.24, 0.65),
                  "matmul, interference: fitted to whole steps of MaxText on v4, v5e and v5p (2023)"),
}  # fmt: skip

#: Matmuls of milliseconds, of chips that differ from their family: best of a search of shapes (stas00/ml-engineering,
#: 2025), and of 16384^3 (tpu-recipes, 2025).
BEST_MATMULS = {"mi325x": 0.60, "mi355x": 0.62, "gaudi3": 0.68, "tpu7x": 0.83}

#: Operations of the vector unit for a score of attention on TPUs, forward and backward: scale, mask, maximum,
#: difference, exponential (four), sum and cast; backward also the product with the gradient and two differences.
_SCORE_FLOPS = (10.0, 12.0)

#: Of mixtures on TPUs: rate of ragged products over plain ones, and passes over tokens that are sorted by expert (the
#: order is found, rows are gathered one by one, weighted and added up; megablox in MaxText).
_GROUPED, _PERMUTES = 0.7, 4.0

#: Families of which whole steps were measured, by their chips.
_MEASURED = {
    "ampere": ("a100-sxm-40gb", "a100-sxm-80gb"),
    "hopper": ("h100-sxm",),
    "blackwell": ("b200-sxm", "b300-sxm", "gb200-nvl72", "gb300-nvl72"),
    "tpu": ("v4", "v5e", "v5p"),
}

#: Formats of matmuls of these steps. Of Blackwell in 16 bits there are two, both of a mixture: none of dense models.
_MEASURED_FORMATS = {
    "ampere": (DType.BF16, DType.FP16),
    "hopper": (DType.BF16, DType.FP8),
    "blackwell": (DType.FP8, DType.FP4),
    "tpu": (DType.BF16,),
}

#: TPUs whose SparseCores take sums: on others nothing runs beside a ReduceScatter or an AllReduce, whatever options XLA
#: is given. In our own programs little does on these, either (`TrainingProblem.on_slices`, docs/verify.md).
_TAKE_SUMS = ("v5p", "v6e", "tpu7x")

#: Seconds between operations of GPUs, and share of hidden communication that the compute beside it loses.
_GAP, _INTERFERENCE = 8.2e-6, 0.232

#: Share of the dense FLOP/s of a narrow format that no matmul of milliseconds exceeds (stas00/ml-engineering, 2025).
_MOST_NARROW = 0.76

#: Backward over forward rate of attention in kernels of the second generation (Dao 2023, figures 4 to 7).
_FLASH_2_BACKWARD = 0.8


@cache
def fitted_calibration(chip: Chip, software: str | None = None) -> Calibration:
    """The fitted calibration of a chip's family with a software's constants.

    >>> from meshwise.hardware import load_chip
    >>> found = fitted_calibration(load_chip("h100-sxm"), "eager-2023")
    >>> found.name, found.elementwise_passes, round(found.matmul_efficiency, 2)
    ('fitted+eager-2023', 1.94, 0.65)

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
    found = _with(chip, family, SOFTWARE[name])
    if name == "xla" and name != usual:  # as programs compiled for GPUs are scheduled (docs/verify.md)
        found = replace(found, in_turn=True, late_once=("accumulated", "weights"), distinct_dispatch=False)
    if name == "xla" and family.name == "tpu" and not chip.name.startswith(_TAKE_SUMS):
        found = replace(found, sums_alone=True)
    return replace(found, name="fitted" if name == usual else f"fitted+{name}")


def _with(chip: Chip, family: Calibration, software: Software) -> Calibration:
    """The constants of a chip, its family and a software together."""
    own = _CHIPS.get(family.name, _CHIPS["hopper"])
    forward, backward, half = _attention(own, software.flash)
    on_tpu = family.name == "tpu"
    gap = 0.0 if on_tpu else _GAP  # a program of XLA runs on a TPU without the host between operations
    overlapped = software.collective_matmul if chip.vendor == "nvidia" else None
    ratio, best = _power_ratio(chip, own), BEST_MATMULS.get(chip.name, family.matmul_efficiency)
    better = best / family.matmul_efficiency
    matmul = min(own.matmul * better * ratio, best)
    narrow = tuple((d, min(share * better * ratio, _MOST_NARROW)) for d, share in own.narrow)
    return replace(
        family,
        matmul_efficiency=matmul,
        narrow=narrow or family.narrow,
        power_ratio=ratio,
        attention_efficiency=None if forward is None else min(forward * better, matmul),
        attention_backward=backward,
        half_attention=half,
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
        late_schedules=software.late_schedules,
        late_once=software.late_once,
        fused_sequences=software.fused_sequences,
        software=software.name,
        scattered_sends=software.scattered_sends,
        adds_gradients=software.adds_gradients,
        whole_sums=software.whole_sums,
        beside_sums=software.beside_sums,
        repeats_whole=software.name != "xla",
        compute_units=own.compute_units,
        score_flops=_SCORE_FLOPS if on_tpu else (0.0, 0.0),
        grouped_efficiency=_GROUPED if on_tpu else 1.0,
        permute_passes=_PERMUTES if on_tpu else 1.0,
        uneven_ring=software.uneven_ring,
        collective_matmul=family.collective_matmul if overlapped is None else overlapped,
        measured_formats=_MEASURED_FORMATS.get(family.name),
        uncertainty_sources=_causes(chip, family.name, software),
        source=f"{family.source}; {own.source}; {software.meaning}: {software.source}",
    )


def _attention(own: _Chips, generation: int) -> tuple[float | None, float, float]:
    """Of a generation of fused kernels: share of the dense FLOP/s, backward rate over forward, keys at half of it."""
    if generation == 1:
        return (*own.flash_1, 0.0)
    if generation == 2 and own.flash_2 is not None:
        return own.flash_2[0], _FLASH_2_BACKWARD, own.flash_2[1]
    return own.attention, _FLASH_2_BACKWARD, own.half_attention if generation else 0.0


def _causes(chip: Chip, family: str, software: Software) -> tuple[str, ...]:
    """Causes of uncertainty; software before FlashAttention-2 (2023 and earlier) has no more releases."""
    known = _MEASURED.get(family)
    found = {"family": known is None, "chip": known is not None and chip.name not in known}
    found |= {"unnamed": not software.measured, "finished": software.flash < 2}
    return tuple(cause for cause, holds in found.items() if holds)


def _power_ratio(chip: Chip, own: _Chips) -> float:
    """Watts for a FLOP/s of the data sheet in 16 bits, over those of the chip that the family's shares are of."""
    if not own.usual:
        return 1.0
    watts = [c.power / c.peak(_wide(c)) for c in (chip, load_chip(own.usual))]
    return watts[0] / watts[1]


def _wide(chip: Chip) -> DType:
    """The format of 16 bits that a chip multiplies."""
    return DType.BF16 if DType.BF16 in chip.flops_per_s else DType.FP16


def find_calibration(name: str, chip: Chip) -> Calibration:
    """Read `--calibration`: operations, none, a family by name, fitted, fitted+SOFTWARE, or a file (.json).

    Each but none may have `*FACTOR` after it, which measured steps of the machine gave (`--anchor`): all that is
    expected takes so many times as long.

    >>> from meshwise.hardware import load_chip
    >>> find_calibration("fitted*1.25", load_chip("h100-sxm")).uncertainty_sources
    ('anchored',)

    Raises:
        UnknownNameError: with the names there are.
        MeshwiseError: a file that cannot be read, or is of another chip.
    """
    base, star, factor = name.partition("*")
    if star:
        return anchored(find_calibration(base, chip), _factor(name, factor))
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


def _factor(name: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0.1 <= factor <= 10 or name.startswith("none"):
        raise MeshwiseError(f"--calibration {name}: expected a factor from 0.1 to 10 after *, of one that is achieved")
    return factor


def check_family(name: str, own: str, chip: Chip) -> None:
    """Refuse a file, called `name`, that is of a chip (`own`) of another family.

    Raises:
        MeshwiseError: names both.
    """
    if default_calibration(load_chip(own)).name != default_calibration(chip).name:
        raise MeshwiseError(f"--calibration {name}: it is of {own}, another family than {chip.name}'s")


def _of_file(name: str, chip: Chip) -> Calibration:
    """The calibration of a file that `meshwise calibrate` wrote."""
    file = read_calibration_file(Path(name))
    check_family(name, file.chip, chip)
    if is_file_name(file.base):
        raise MeshwiseError(f"--calibration {name}: its base is a file, {file.base!r}; expected a calibration by name")
    if file.base.startswith("fitted+") and file.base.removeprefix("fitted+") not in SOFTWARE:
        raise MeshwiseError(
            f"--calibration {name}: it was refined by measured serving under {file.base}, whose constants are not "
            "those of training; expected fitted, fitted+SOFTWARE, operations, none, a family, or a file of training"
        )
    return file.applied(find_calibration(file.base, chip), name)
