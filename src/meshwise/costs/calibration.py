"""What share of its data sheet a chip achieves: the few constants that turn a bound into an expectation.

The identity leaves bounds as they are. Each constant carries the measurements it came from; `Links` is the curve of
achieved bandwidth over message sizes. Not here: the data sheets (`hardware`), and what overlaps with what (`step`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwise.core.dtypes import DType
from meshwise.costs.arithmetic import Condition, Num, maximum, minimum
from meshwise.hardware import Chip


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds of a collective from the seconds of its hops and of its bytes at full bandwidth.

    Ideal links overlap hops and bytes: the longer decides. Real ones add them to a start-up, and pass the bytes by one
    of two protocols: one that reaches `efficiency` of the bandwidth and takes `bulk_startup` longer to begin, and for
    small messages one that begins at once but reaches less. Half of `efficiency` is reached at about `half_size` bytes.

    Args:
        efficiency: share of the bandwidth that large messages reach.
        startup: seconds before the first byte; counted where a group has more than one member.
        bulk_startup: seconds that the protocol for large messages takes besides.
        small_efficiency: share that the protocol for small messages reaches; None where there is but one.
        overlapped: whether hops and bytes overlap (and nothing else takes time).
        direct: whether kernels for small AllReduces read what all other chips of a node have, so that `startup` is all
            that they wait for.
    """

    efficiency: float
    startup: float = 0.0
    bulk_startup: float = 0.0
    small_efficiency: float | None = None
    overlapped: bool = False
    direct: bool = False

    def __post_init__(self) -> None:
        """Check that the shares are shares."""
        for share in (self.efficiency, self.small_efficiency or self.efficiency):
            assert 0 < share <= 1, f"{share} is no share of a bandwidth"
        assert not (self.overlapped and (self.startup or self.bulk_startup or self.small_efficiency))

    def seconds(self, hops: Num, transfer: Num, busy: Num | Condition, fill: Num = 0.0) -> Num:
        """Time of one collective.

        Args:
            hops: seconds of hops.
            transfer: seconds of the bytes at full bandwidth.
            busy: whether anything moves.
            fill: seconds that the protocol for large messages takes besides over these links.
        """
        return self.seconds_after(self.start(hops, busy), transfer, fill)

    def start(self, hops: Num, busy: Num | Condition) -> Num:
        """Seconds that a collective takes however small; arguments as in `seconds`."""
        return hops if self.overlapped else hops + self.startup * busy

    def seconds_after(self, start: Num, transfer: Num, fill: Num = 0.0) -> Num:
        """The same as `seconds`, once `start` is known."""
        moving = transfer / self.efficiency
        if self.overlapped:
            return maximum(start, moving)
        if self.small_efficiency is not None:
            moving = minimum(transfer / self.small_efficiency, self.bulk_startup + fill + moving)
        return start + moving

    def half_size(self, bandwidth: float) -> float:
        """Bytes that a chip sends at which it reaches half of what it reaches with large messages, hops aside.

        >>> round(Links(0.5, startup=1e-5).half_size(4e11))
        2000000
        """
        full = self.efficiency * bandwidth
        if self.small_efficiency is None:
            return full * self.startup
        small = self.small_efficiency * bandwidth
        by_small = self.startup / (2 / full - 1 / small) if small > full / 2 else float("inf")
        return min(by_small, full * (self.startup + self.bulk_startup))


#: Every link at its data-sheet rate, hops hidden behind bytes or bytes behind hops (book, Sharded matrices).
IDEAL_LINKS = Links(1.0, overlapped=True)


#: What may wait for all compute of a step: gathers of new "weights", sums of "gradients", of weights that every replica
#: holds "whole" alone, in "pipelines" alone, of those "accumulated" over microbatches alone.
LATE_ONCE = ("weights", "gradients", "whole", "pipelines", "accumulated")

#: Sides of the few weights and the many of `Calibration.few_rows`, as `bench machine` measures them.
FEW_ROWS_SIDES = (512, 1024)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Achieved shares of a chip's rates.

    Args:
        name: what users type.
        matmul_efficiency: of the dense FLOP/s, for large matmuls.
        hbm_efficiency: of the HBM bandwidth, for streaming.
        links: of the link bandwidth, by size of message.
        collective_matmul: whether collectives over the tensor axis run as collective matmuls, hidden behind the
            matmul that needs them as far as that lasts. XLA does so on TPUs (Wang et al. 2023, "Overlap communication
            with dependent computation via decomposition"); NCCL calls on GPUs stand on the critical path.
        flat_rings: whether the algorithms are those of NCCL and RCCL: AllGather and ReduceScatter as flat rings, an
            AllReduce as a ring, along trees, or by NVLink switches that add; rather than level by level, which is what
            the bound assumes.
        distinct_dispatch: whether a token is sent once to each destination that holds experts of its choice (DeepEP),
            not once for each of them (AllToAll).
        source: the measurements behind the numbers.
        exchange_cores: share of the compute units that is set aside while exchanges of tokens run beside compute.
        attention_efficiency: of the dense FLOP/s, for attention over long sequences, and other kernels of many small
            matmuls; None where only large matmuls were measured.
        overlap: share of compute time that collectives can run beside: none where the same cores do both.
        narrow: format -> share of its own dense FLOP/s, where it is not `matmul_efficiency`: matrix units that are
            twice as fast are harder to feed.
        half_depth: terms of a sum (K of a matmul) at which filling and emptying the pipeline takes as long as the sum.
        half_attention: keys at which attention reaches half of its rate: diagonal tiles are half masked, short rows
            leave compute units idle.
        attention_backward: rate of attention's backward pass over that of its forward pass.
        unfused_attention: whether scores are written to memory, all pairs of them, as before FlashAttention.
        elementwise_passes: times the bytes of elementwise operations move that one fusion of each would.
        gap: seconds between operations: launches, first and last waves.
        mixture_launch: seconds that the host takes for an operation of a layer with experts, at least: what routing
            decides cannot be launched ahead.
        interference: share of hidden communication's time that the compute beside it loses.
        chained_startup: seconds before the first byte of a collective inside a compiled step of serving, where a
            collective on its own takes longer (`links`); None for the same.
        late_exchange: whether what is exchanged once a step over the data axis waits for the last backward pass.
        in_turn: whether collectives on the critical path run beside nothing at all, so that the bound from below adds
            them to compute; else software is taken to hide them at best.
        sums_alone: whether sums of gradients of weights in a slice run beside nothing, as those of TPUs do that have no
            other cores to take them to.
        late_gathers: whether inputs of matmuls that are gathered once more for gradients of weights come beside the
            matmuls of the other gradients (Korthikanti et al. 2022, section 4.2.2).
        beside_sums: whether sums of gradients of inputs over the tensor axis run beside the gradients of the same
            weights (`--no-async-tensor-model-parallel-allreduce` of Megatron-LM turns it off).
        repeats_whole: whether full recomputation repeats all of a layer's forward pass, as checkpoints of PyTorch do,
            and not only what gradients read.
        beside_exchanges: whether an interleaved pipeline, or one stage, exchanges tokens of a microbatch while those of
            another are computed with, so that exchanges cost what compute loses by them (`interference`).
        late_sends: how many sends between stages a device waits for at each exchange with a neighbour: none where they
            run beside compute, one where both directions go at once, two where one follows the other.
        late_schedules: schedules in which they are waited for; () for all.
        late_once: what of the exchanges once a step over the data axis waits for all compute besides (`LATE_ONCE`).
        fused_sequences: whether collective matmuls need sequence parallelism: an AllReduce has no pieces that one
            product could wait for.
        software: whose constants they are (`fitted.SOFTWARE`); "" for those of single operations.
        scattered_sends: whether chips that hold the same activations send a part each, and gather the rest from their
            neighbours (Narayanan et al. 2021, section 4.1).
        adds_gradients: whether gradients of weights are added to those of earlier microbatches by an operation of its
            own, and not by the matmul that makes them.
        slice_sums: chips of a slice, over all of which gradients are summed by AllReduces; 0 where by ReduceScatters.
        whole_sums: highest stage of ZeRO under which gradients are summed on all replicas (AllReduce) that share out a
            part each: with 1 after the backward pass, with 2 those of ZeRO-2 with every microbatch, too.
        compute_units: of the chip, each of which makes a tile of a matmul's product at a time, so that the last wave of
            tiles leaves some idle; 0 where no waves are counted.
        compiled: whether a compiler does what is elementwise where its result is read, and gathers weight by weight, so
            that memory holds neither such results nor a whole layer's weights; else it is as with eager software.
        power_ratio: power of the chip over its dense FLOP/s in 16 bits, over that of the chip whose shares the family's
            are: matmuls that last are limited by power.
        score_flops: operations of the vector unit for a score of attention, forward and backward, where the matrix unit
            may wait for them; (0, 0) where attention's measured rate holds them.
        uneven_ring: whether the devices of a ring of attention hold positions in order, so that under causality the
            last has most to do; else they are dealt out evenly.
        grouped_efficiency: rate of products with experts over that of products with other weights.
        permute_passes: times the bytes of moving tokens to the slots of their experts and back that one copy would.
        uncertainty_sources: causes in `spread.SPREADS` that its whole steps have besides the usual ones; None where
            they were not compared with measured steps, so that there is no interval.
        measured_formats: formats of matmuls in which whole steps of such chips were measured; None where nothing says.
        refined: constants that a file of own measurements gave, as files name them.
        weight_reads: format of weights -> share of the HBM bandwidth at which steps of serving read them, where it is
            not `hbm_efficiency`: products with few rows stream weights, and those in narrow formats are widened.
        expert_reads: bandwidth at which weights of experts are read over that of other weights.
        cache_reads: share of the HBM bandwidth at which attention of serving reads its cache; None for
            `hbm_efficiency`.
        cache_start: seconds that attention over a cache takes besides: its parts are computed apart, then put together.
        host_step, host_request: seconds that the host adds to a step of serving, and to it for each of its requests:
            scheduling, launching, sampling, streaming tokens out.
        few_rows: format -> (rows, share of its dense FLOP/s with the few weights of `FEW_ROWS_SIDES` or less, with the
            many or more) of products of so few rows; between, by the logarithms of both. Weights that are read by the
            way are counted in it.
        launch: seconds of the host to launch an operation with weights or a cache, and what is fused with it, in a step
            of serving that no graph replays: one that has prompts takes at least as long as its launches.
        query_bandwidth: bytes/s at which decode steps read keys and values anew for each query head, from the memory on
            the chip; 0 where their kernels serve all query heads of a group at once, as of `grouped_heads` they do.
        grouped_heads: query heads of a group, of 128 each, for which such kernels are there.
        narrow_cache: bandwidth at which attention of serving reads a cache in 8 bits over that of one in 16.
        fused: which operations of a step of serving are no kernels of their own (`fusions.FUSIONS`).
        pcie: whether chips of a host meet over PCIe, in steps of serving.
    """

    name: str
    matmul_efficiency: float
    hbm_efficiency: float
    links: Links
    collective_matmul: bool
    flat_rings: bool
    distinct_dispatch: bool
    source: str
    exchange_cores: float = 0.0
    attention_efficiency: float | None = None
    narrow: tuple[tuple[DType, float], ...] = ()
    overlap: float = 1.0
    half_depth: float = 0.0
    half_attention: float = 0.0
    attention_backward: float = 1.0
    unfused_attention: bool = False
    elementwise_passes: float = 1.0
    gap: float = 0.0
    mixture_launch: float = 0.0
    interference: float = 0.0
    late_exchange: bool = False
    compiled: bool = False
    in_turn: bool = False
    sums_alone: bool = False
    chained_startup: float | None = None
    late_gathers: bool = False
    beside_sums: bool = False
    repeats_whole: bool = False
    beside_exchanges: bool = False
    late_sends: int = 0
    late_schedules: tuple[str, ...] = ()
    late_once: tuple[str, ...] = ()
    fused_sequences: bool = False
    software: str = ""
    scattered_sends: bool = False
    adds_gradients: bool = False
    slice_sums: int = 0
    whole_sums: int = 0
    compute_units: float = 0.0
    power_ratio: float = 1.0
    score_flops: tuple[float, float] = (0.0, 0.0)
    uneven_ring: bool = False
    grouped_efficiency: float = 1.0
    permute_passes: float = 1.0
    uncertainty_sources: tuple[str, ...] | None = None
    measured_formats: tuple[DType, ...] | None = None
    refined: tuple[str, ...] = ()
    weight_reads: tuple[tuple[DType, float], ...] = ()
    expert_reads: float = 1.0
    cache_reads: float | None = None
    cache_start: float = 0.0
    host_step: float = 0.0
    host_request: float = 0.0
    few_rows: tuple[tuple[DType, tuple[tuple[int, float, float], ...]], ...] = ()
    launch: float = 0.0
    narrow_cache: float = 1.0
    query_bandwidth: float = 0.0
    grouped_heads: tuple[int, ...] = ()
    fused: tuple[str, ...] = ()
    pcie: bool = False

    def matmul(self, dtype: DType) -> float:
        """Achieved share of the dense FLOP/s of a format.

        >>> CALIBRATIONS["hopper"].matmul(DType.BF16), CALIBRATIONS["hopper"].matmul(DType.FP8)
        (0.8, 0.62)
        """
        return dict(self.narrow).get(dtype, self.matmul_efficiency)

    def attention(self, dtype: DType) -> float:
        """Achieved share of the dense FLOP/s of a format in attention.

        >>> CALIBRATIONS["hopper"].attention(DType.BF16), CALIBRATIONS["none"].attention(DType.BF16)
        (0.51, 1.0)
        """
        return self.matmul(dtype) if self.attention_efficiency is None else self.attention_efficiency

    def __post_init__(self) -> None:
        for field in ("matmul_efficiency", "hbm_efficiency", "grouped_efficiency"):
            assert 0 < getattr(self, field) <= 1, f"{self.name}: {field} is a share"
        # The search bounds a step by its FLOPs at the rate of large matmuls.
        assert (self.attention_efficiency or 0) <= self.matmul_efficiency, f"{self.name}: attention beats matmuls"
        assert 0 <= self.overlap <= 1, f"{self.name}: overlap is a share"
        assert set(self.late_once) <= set(LATE_ONCE), f"{self.name}: {self.late_once} has others than {LATE_ONCE}"
        assert 0 <= self.exchange_cores < 1, f"{self.name}: exchange_cores is a share"
        # Bounds of the search leave these out, so they may only cost time.
        assert 0 < self.attention_backward <= 1, f"{self.name}: attention_backward is a share"
        passes = min(self.elementwise_passes, self.permute_passes)
        assert passes >= 1, f"{self.name}: an elementwise operation moves its bytes once at least"
        assert 0 <= self.interference < 1, f"{self.name}: interference is a share"
        least = (self.half_depth, self.half_attention, self.compute_units, self.gap, self.mixture_launch)
        assert min(*least, self.cache_start, self.host_step, self.host_request) >= 0, f"{self.name}: nothing is below 0"

    def sends_waited_for(self, schedule: str) -> int:
        """How many sends a device waits for at each pass under a schedule."""
        return self.late_sends if schedule in (self.late_schedules or (schedule,)) else 0

    def of_slices(self, count: int) -> Calibration:
        """The same on so many slices: what goes over the network between them runs beside compute in any case."""
        if not self.sums_alone or count > 1:
            return self
        return replace(self, late_once=(*self.late_once, "gradients"))

    @property
    def sums_alone_once(self) -> bool:
        """Whether nothing runs beside sums of gradients once a step, either."""
        return self.sums_alone and "gradients" in self.late_once

    def sums_at_end(self, zero: int) -> bool:
        """Whether gradients under a stage of ZeRO are summed after the backward pass, as without ZeRO ("whole")."""
        return "whole" in self.late_once and zero <= min(self.whole_sums, 1)

    @property
    def least_dispatch(self) -> bool:
        """Whether bounds count a token once at each destination: unless they are of a schedule that sends more."""
        return self.distinct_dispatch or not self.in_turn

    @property
    def in_steps(self) -> Calibration:
        """The same for a step of serving, where collectives follow each other closely and hide behind no product."""
        links = self.links
        if self.chained_startup is not None:
            links = replace(links, startup=self.chained_startup)
        return replace(self, links=links, collective_matmul=False, late_gathers=False, beside_sums=False)

    def slower(self, times: float) -> Calibration:
        """The same where all that is expected takes `times` as long, as far as shares can: none is above 1.

        >>> half = CALIBRATIONS["hopper"].slower(2)
        >>> half.matmul_efficiency, half.matmul(DType.FP8), half.links.startup
        (0.4, 0.31, 1.6e-05)
        """

        def share(value: float) -> float:
            return min(value / times, 1.0)

        links, matmul = self.links, share(self.matmul_efficiency)
        return replace(
            self,
            matmul_efficiency=matmul,
            narrow=tuple((d, share(value)) for d, value in self.narrow),
            attention_efficiency=self.attention_efficiency and min(share(self.attention_efficiency), matmul),
            hbm_efficiency=share(self.hbm_efficiency),
            links=replace(
                links,
                efficiency=share(links.efficiency),
                startup=links.startup * times,
                bulk_startup=links.bulk_startup * times,
                small_efficiency=links.small_efficiency and share(links.small_efficiency),
            ),
            gap=self.gap * times,
            mixture_launch=self.mixture_launch * times,
        )

    @property
    def link_efficiency(self) -> float:
        """Achieved share of the link bandwidth, for large messages."""
        return self.links.efficiency


#: Every rate of the data sheet achieved, nothing overlapped but weights and gradients.
IDENTITY = Calibration("none", 1.0, 1.0, IDEAL_LINKS, False, False, False, "data-sheet rates, nothing measured")

_GEMM = "median of eight bf16 matmuls with all sizes >= 4096, NVIDIA AIConfigurator database, TensorRT-LLM 1.0 (2025)"
_NARROW = "narrow formats: six of TensorRT-LLM 1.3"
_NCCL = "NCCL collectives of 1 KiB to 512 MiB in one NVLink domain (same database)"
_EXCHANGE = "exchanges beside compute take 20 SMs (DeepSeek-V3 report, 3.2.2) of"
_ATTENTION = "median of causal attention over 4,096 to 16,384 positions (same database)"
_KV = "largest key/value reads of generation attention (same database)"

#: By family. A chip of no family inherits the one named for it in `default_calibration`.
CALIBRATIONS = {
    c.name: c
    for c in (
        IDENTITY,
        Calibration("ampere", 0.84, 0.77, Links(0.68, 10e-6, 19e-6, 0.40), False, True, False,
                    f"A100: {_GEMM}; {_KV}; {_NCCL}; {_ATTENTION}; {_EXCHANGE} 108", 20 / 108, 0.55),
        Calibration("hopper", 0.80, 0.89, Links(0.74, 8e-6, 19e-6, 0.35), False, True, True,
                    f"H100: {_GEMM} ({_NARROW}); {_KV}; {_NCCL}; {_ATTENTION}; {_EXCHANGE} 132",
                    20 / 132, 0.51, ((DType.FP8, 0.62),)),
        Calibration("blackwell", 0.66, 0.89, Links(0.68, 12e-6, 19e-6, 0.25), False, True, True,
                    f"B200: {_GEMM} ({_NARROW}); {_KV}; {_NCCL}; {_ATTENTION}; {_EXCHANGE} 148",
                    20 / 148, 0.43, ((DType.FP8, 0.53), (DType.FP4, 0.39))),
        Calibration("cdna", 0.51, 0.77, Links(0.70, 31e-6, 27e-6, 0.12), False, True, False,
                    "MI300X best bf16 matmul, stas00/ml-engineering (2025); BabelStream, fp8 matmul of 8192^3, RCCL "
                    "AllReduces of 1 KiB to 8 GiB on 8 MI300X: Azure AI-benchmarking-guide (2025), near AMD's own "
                    "acceptance tests; exchanges inherited from Hopper",
                    20 / 132, narrow=((DType.FP8, 0.44),)),
        Calibration("tpu", 0.90, 0.85, Links(0.97, 12e-6), True, False, False,
                    "v6e bf16 matmul of 8192^3 and HBM copy, TPU7x HBM copy and 4-way AllGathers of 1.6 to 400 MB, "
                    "accelerator-microbenchmarks in tpu-recipes (2025); collectives inside a step: generation with "
                    "PaLM 540B on 64 v4 (Pope et al. 2022, tables 2 and D.3)", chained_startup=6e-6),
        Calibration("cpu", 1.0, 1.0, Links(1.0), False, False, False,
                    "the rates of its chips are measured ones (meshwise bench machine), with all devices at work; the "
                    "cores that compute also move the bytes of collectives", overlap=0.0),
    )
}  # fmt: skip

#: Family -> how names of its chips begin.
_NAMES = {
    "ampere": ("a100",),
    "hopper": ("h100", "h200", "h800", "h20", "gh200"),
    "blackwell": ("b200", "b300", "gb200", "gb300"),
}
_VENDOR_FAMILY = {
    "google": "tpu",
    "nvidia": "ampere",
    "amd": "cdna",
    "aws": "cdna",  # inherited, for want of published measurements
    "intel": "cdna",
    "cpu": "cpu",
}


def default_calibration(chip: Chip) -> Calibration:
    """The family of `chip`: by its name, else its vendor's.

    >>> from meshwise.hardware import load_chip
    >>> default_calibration(load_chip("h100-sxm")).name, default_calibration(load_chip("v5p")).name
    ('hopper', 'tpu')
    """
    by_name = next((family for family, prefixes in _NAMES.items() if chip.name.startswith(prefixes)), None)
    return CALIBRATIONS[by_name or _VENDOR_FAMILY.get(chip.vendor, "none")]


def anchored(base: Calibration, factor: float) -> Calibration:
    """A calibration where all takes `factor` times as long, as measured steps of the machine and model said."""
    name, sources = f"{base.name}*{factor:.4g}", None if base.uncertainty_sources is None else ("anchored",)
    source = f"{base.source}; all times {factor:.4g} times as long, by measured steps"
    return replace(base.slower(float(f"{factor:.4g}")), name=name, uncertainty_sources=sources, source=source)
