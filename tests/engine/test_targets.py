"""Steps of the engine compiled for chips that are not there: every bucket compiles, and the pool is not copied."""

import re

import pytest

from meshwise.compiler.compiling import target_devices
from meshwise.compiler.targets import Target
from meshwise.core.dtypes import DType
from meshwise.engine.executor import plan_buckets
from meshwise.hardware import parse_cluster
from meshwise.models import read_dimensions
from meshwise.runtime.devices import lowering_for
from meshwise.runtime.layered import LayeredModel
from meshwise.runtime.steps import Bucket, paged_model
from meshwise.scheduling import Scheduling
from meshwise.sharding.serving import ServingLayout

PAGES = 16384
EXPERTS = "E=8 top_k=2 Fe=512"
KERNEL = "ragged_paged_attention_kernel"


def on_tpus(cluster, layout, dimensions):
    devices = target_devices(Target.of(parse_cluster(cluster)))[: layout.engine_chips]
    model = read_dimensions(f"D=1024 L=8 V=8192 {dimensions}", name="small")
    return paged_model(model, layout, devices, pages=PAGES, page_tokens=16, dtype=DType.BF16)


def compiled(made, bucket):
    """A step, whose pool is neither copied nor as large again."""
    program = made.compile(bucket, 128)
    memory, pool = program.memory_analysis(), made.page_bytes * PAGES / made.stack.placement.mesh.size
    assert memory.temp_size_in_bytes < pool / 10, bucket
    assert memory.alias_size_in_bytes == pytest.approx(pool, rel=0.01)
    text = program.as_text()
    for page in made.abstract_pool["layer"].values():
        pages = page.sharding.shard_shape(page.shape)[0]
        assert not re.search(rf" = \w+\[{pages},[^ ]* copy\(", text), bucket
    return text


SPREAD = "a page is on several devices"


@pytest.mark.slow  # real compilers, eleven programs, and three of other layouts: each compiles, and copies no pool
@pytest.mark.parametrize(
    ("cluster", "layout", "refused", "apart"),
    [
        ("v5e:2x2", ServingLayout(tensor=4), set(), 1),
        ("v5p:2x2x1", ServingLayout(tensor=4), set(), 4),
        ("v5p:2x2x1", ServingLayout(tensor=2, cache=2, cache_split="sequence"), {SPREAD}, 4),
        ("v5p:2x2x1", ServingLayout(tensor=2, expert=2), set(), 4),
    ],
)
def test_every_bucket_compiles_for_chips_that_are_not_there(cluster, layout, refused, apart):
    made = on_tpus(cluster, layout, "N=16 K=8 H=128 " + ("F=2048" if layout.expert == 1 else EXPERTS))
    assert made.refusals == refused
    limits = Scheduling("chunked", 4 * layout.ranks, 64, ranks=layout.ranks)
    for bucket in plan_buckets(limits, 64, made.fewest_rows)[::apart]:
        assert (KERNEL in compiled(made, bucket)) == (not refused)


@pytest.mark.slow  # real compilers, two programs a case: shapes with the kernel, and without it, where it is said why
@pytest.mark.parametrize(
    ("cluster", "tensor", "dimensions", "refused"),
    [
        ("v5p:2x2x1", 1, "N=4 K=1 H=256", ""),
        ("v5e:2x2", 4, "N=16 K=4 H=256", ""),
        ("v5e:2x2", 1, "N=9 K=3 H=64", "heads of 64 are no multiple of 128"),
        ("v5p:2x2x1", 2, "N=8 K=2 H=64", "heads of 64 are no multiple of 128"),
        ("v5e:2x2", 1, "N=9 K=3 H=128", "3 heads of keys on a device fill no tiles"),
        ("v5e:2x2", 1, "N=8 K=4 H=256", "4 heads of 256 in bfloat16 are read in strides"),
    ],
)
def test_heads_of_any_width_compile_without_copies(cluster, tensor, dimensions, refused):
    made = on_tpus(cluster, ServingLayout(tensor=tensor), f"F=2048 {dimensions}")
    assert [words.startswith(refused) for words in made.refusals] == [True] * bool(refused)
    for bucket in (Bucket(8, 0, 8), Bucket(4, 128, 8)):
        assert (KERNEL in compiled(made, bucket)) == (not refused)


@pytest.mark.slow  # real compilers, three programs a bucket: what runs on GPUs compiles, and copies no pages
@pytest.mark.parametrize(
    ("chip", "layout", "attends", "apart"),
    [
        ("h100", ServingLayout(tensor=2), "attend_pages", 2),
        ("a100", ServingLayout(tensor=2), "attend_pages", 4),
        ("h100", ServingLayout(cache=2, cache_split="sequence"), "positions of a page are on several devices", 4),
        ("h100", ServingLayout(expert=2), "ragged-all-to-all", 4),
    ],
)
def test_buckets_of_each_kind_compile_layer_by_layer_for_gpus_that_are_not_there(chip, layout, attends, apart):
    experts = "F=2048" if layout.expert == 1 else EXPERTS
    model = read_dimensions(f"D=1024 {experts} L=2 N=16 K=4 H=256 V=8192", name="small")
    devices = target_devices(Target.of(parse_cluster(f"{chip}:2")))
    own = paged_model(model, layout, devices, pages=PAGES, page_tokens=16, dtype=DType.BF16)
    made = LayeredModel.where_faster(own)
    assert isinstance(made, LayeredModel)
    pool = made.page_bytes * PAGES / 2
    with lowering_for(devices[0]):
        limits = Scheduling("chunked", 4 * layout.ranks, 32, ranks=layout.ranks)
        for bucket in plan_buckets(limits, 32, made.fewest_rows)[::apart]:
            step = made.compile(bucket, 128)
            memory = step.layers[0][0].memory_analysis()
            assert memory.temp_size_in_bytes < pool / 10, bucket
            whole = sum(program.memory_analysis().alias_size_in_bytes for program, _ in step.layers)
            assert whole == pytest.approx(pool, rel=0.01)
            assert attends in step.layers[0][0].as_text()
