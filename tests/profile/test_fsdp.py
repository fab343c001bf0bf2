"""Eight ranks of FSDP in PyTorch on MI300X, written here as its profiler writes them: RCCL's kernels have no names of
their own, weights are copied in and out, clocks of processes differ, and one rank is slower.
"""

import pytest

from meshwise.profile import profile_traces
from meshwise.profile.causes import find_causes
from tests.profile.faults import with_late_device
from tests.profile.traces import save, traces_of

RANKS, LAYERS, STEPS, SLOW, FACTOR = 8, 6, 3, 5, 1.08
GATHER, SCATTER, COPY, PRODUCT, ATTENTION, ADAM = 900, 1100, 60, 1500, 700, 400  # microseconds
#: What a layer computes: operation of the host, its inputs, kernel, microseconds.
FORWARD = (
    (
        "fsdp::split_with_sizes_copy",
        [[8192, 8192]],
        "at::native::split_with_sizes_copy_out_contiguous_kernel",
        COPY,
    ),
    ("aten::mm", [[4096, 8192], [8192, 8192]], "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64", PRODUCT),
    ("aiter::mha_fwd", [[1, 4096, 64, 128]] * 3, "aiter::fmha_fwd_hd128_bf16_causal_group", ATTENTION),
)
BACKWARD = (
    ("aten::_foreach_copy_", [[8192, 8192]], "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>>", COPY),
    ("aiter::mha_bwd", [[1, 4096, 64, 128]] * 3, "aiter::fmha_bwd_hd128_bf16_causal_a32_rtz_psskddv", 2 * ATTENTION),
    (
        "aten::mm",
        [[8192, 4096], [4096, 8192]],
        "Cijk_Ailk_Bjlk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256",
        2 * PRODUCT,
    ),
)


class Rank:
    """The events of one rank; `now` is when its compute stream is free."""

    def __init__(self, number):
        self.events, self.clock, self.now, self.ids = [], 1e9 + 7e5 * number, 0.0, 0

    def host(self, category, name, start, duration, **args):
        self.events.append({
            "ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": self.clock + start, "dur": duration,
            "args": args,
        })  # fmt: skip

    def launch(self, start, operation, kernel, *, begin, duration, stream=0, around="", **args):
        """An operation of the host that launches a kernel."""
        self.ids += 1
        dims, kind = args.pop("dims", []), args.pop("kind", "cpu_op")
        if around:
            self.host("cpu_op", around, start - 1, 8)
        self.host(kind, operation, start, 6, **{"External id": self.ids, "Input Dims": dims,
                                                "Input type": ["c10::BFloat16"] * len(dims)})  # fmt: skip
        self.host("cuda_runtime", "hipLaunchKernel", start + 1, 2, correlation=self.ids)
        self.events.append({
            "ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": stream, "ts": self.clock + begin,
            "dur": duration, "args": {"device": 0, "stream": stream, "correlation": self.ids} | args,
        })  # fmt: skip


def send(ranks, at, name, duration, elements):
    """A collective begins on each rank when it is ready, and ends on all together."""
    ends = max(rank.now for rank in ranks) + duration
    for rank in ranks:
        rank.launch(
            at, f"nccl:{name}", "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", begin=rank.now,
            duration=ends - rank.now, stream=1, kind="user_annotation",
            **{"Collective name": name, "In msg nelems": elements, "Out msg nelems": elements * 8, "Group size": 8,
               "dtype": "BFloat16", "Process Group Ranks": str(list(range(RANKS)))},
        )  # fmt: skip
        rank.now = ends


def compute(ranks, at, rows, around=""):
    for place, rank in enumerate(ranks):
        for number, (operation, dims, kernel, duration) in enumerate(rows):
            took = duration * (FACTOR if place == SLOW else 1)
            rank.launch(at + 10 * number, operation, kernel, begin=rank.now, duration=took, dims=dims, around=around)
            rank.now += took


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    ranks = [Rank(number) for number in range(RANKS)]
    for step in range(STEPS):
        at = max(rank.now for rank in ranks)
        for layer in range(LAYERS):
            send(ranks, at + 50 * layer, "_allgather_base", GATHER, 8192 * 8192 / 8)
            compute(ranks, at + 50 * layer + 15, FORWARD)
        for layer in range(LAYERS, 2 * LAYERS):
            compute(ranks, at + 50 * layer, BACKWARD, "autograd::engine::evaluate_function: MmBackward0")
            send(ranks, at + 50 * layer + 35, "_reduce_scatter_base", SCATTER, 8192 * 8192 / 8)
        adam = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>"
        compute(ranks, at + 700, [("aten::_fused_adamw_", [], adam, ADAM)])
        for rank in ranks:
            rank.host("user_annotation", f"ProfilerStep#{step + 4}", at, max(r.now for r in ranks) - at)
    folder = tmp_path_factory.mktemp("fsdp")
    paths = []
    for number, rank in enumerate(ranks):
        document = {
            "traceEvents": rank.events, "distributedInfo": {"rank": number, "world_size": RANKS},
            "deviceProperties": [{"id": 0, "name": "AMD Instinct MI300X"}],
        }  # fmt: skip
        paths.append(save(document, folder / f"rank{number}.json.gz"))
    return profile_traces(traces_of(*paths))


def test_steps_and_parts(profile):
    assert profile.steps_found == f"by {STEPS} markers ProfilerStep#"
    computes = LAYERS * sum(row[3] for row in (*FORWARD, *BACKWARD)) + ADAM
    assert 1e6 * profile.partition_s["exposed_collective"] == pytest.approx(LAYERS * (GATHER + SCATTER))
    assert 1e6 * profile.partition_s["compute"] == pytest.approx(computes * (1 + (FACTOR - 1) / RANKS))
    # Others wait for the slow rank but at the optimizer, after which the step of each begins anew.
    late = computes * (FACTOR - 1) * (RANKS - 1) / RANKS
    assert 1e6 * profile.partition_s["waiting"] == pytest.approx(late, rel=0.02)


def test_what_each_operation_is(profile):
    found = {(t.kind.parent, t.kind.phase): t.kind for t in profile.ops if t.kind.parent.startswith(("a", "f"))}
    assert {key: kind.category for key, kind in found.items()} == {
        ("fsdp::split_with_sizes_copy", ""): "layout", ("aten::mm", ""): "matmul", ("aiter::mha_fwd", ""): "attention",
        ("aten::_foreach_copy_", "backward"): "layout", ("aiter::mha_bwd", "backward"): "attention",
        ("aten::mm", "backward"): "matmul", ("aten::_fused_adamw_", "optimizer"): "optimizer",
    }  # fmt: skip
    sent = {t.kind.collective.kind: t.kind.collective for t in profile.ops if t.kind.collective}
    assert {kind: (c.group_size, c.num_bytes) for kind, c in sent.items()} == {
        "all-gather": (8, 2 * 8192 * 8192), "reduce-scatter": (8, 2 * 8192 * 8192),
    }  # fmt: skip


def test_the_slow_rank_is_first(profile):
    """What it costs is what it computes longer; the wire of collectives is told from waiting for it."""
    causes = find_causes(profile)
    lost = (FACTOR - 1) * (LAYERS * sum(row[3] for row in (*FORWARD, *BACKWARD)) + ADAM)
    assert (causes[0].name, 1e6 * causes[0].seconds) == ("straggler", pytest.approx(lost, rel=0.1))
    assert causes[0].what.startswith(f"rank {SLOW}")
    wires = {c.what.split()[0]: c.seconds for c in causes if c.name == "exposed-collective"}
    assert 1e6 * wires["reduce-scatter"] == pytest.approx(LAYERS * SCATTER)
    assert 1e6 * wires["all-gather"] == pytest.approx(LAYERS * GATHER)
    assert not {c.name for c in causes} & {"attention-not-fused", "waiting", "host-gap"}


@pytest.mark.parametrize("late", [2, SLOW])
def test_a_gap_of_one_rank_in_one_step_is_no_straggler(profile, late):
    """It is first, and named once; of the rank that is slow in all steps, too, both together make it a straggler."""
    causes = find_causes(profile_traces(with_late_device(profile.traces, late, 0.02)))
    gap = next(c for c in causes if c.name == "host-gap")
    assert (gap.seconds, gap.share) == (pytest.approx(0.02, rel=0.1), pytest.approx(1 / STEPS))
    assert f"on rank {late}" in gap.evidence
    slower = (FACTOR - 1) * (LAYERS * sum(row[3] for row in (*FORWARD, *BACKWARD)) + ADAM) / 1e6
    both = {c.name: c.seconds for c in causes if c.name == "straggler"}
    assert both == (pytest.approx({"straggler": slower + 0.02 / STEPS}, rel=0.1) if late == SLOW else {})
    assert causes[0].name == ("straggler" if late == SLOW else "host-gap")
