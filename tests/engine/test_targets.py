"""Steps of the engine compiled for chips that are not there: every bucket compiles, and the pool is not copied."""

import pytest

from meshwise.compiler.compiling import target_devices
from meshwise.compiler.targets import Target
from meshwise.core.dtypes import DType
from meshwise.engine.executor import plan_buckets
from meshwise.hardware import parse_cluster
from meshwise.models import read_dimensions
from meshwise.runtime.devices import lowering_for
from meshwise.runtime.layered import LayeredModel
from meshwise.runtime.steps import paged_model
from meshwise.scheduling import Scheduling
from meshwise.sharding.serving import ServingLayout

PAGES = 16384


@pytest.mark.slow  # real compilers, eleven programs a chip: each compiles, temporaries are under 10 % of the pool
@pytest.mark.parametrize(("cluster", "tensor"), [("v5e:2x2", 4), ("v5p:2x2x1", 4)])
def test_every_bucket_compiles_for_chips_that_are_not_there(cluster, tensor):
    model = read_dimensions("D=1024 F=2048 L=8 N=16 K=8 H=128 V=8192", name="small")
    devices = target_devices(Target.of(parse_cluster(cluster)))
    made = paged_model(
        model, ServingLayout(tensor=tensor), devices[:tensor], pages=PAGES, page_tokens=16, dtype=DType.BF16
    )
    pool = made.page_bytes * PAGES / tensor
    for bucket in plan_buckets(Scheduling("chunked", 4, 64), 64, made.fewest_rows):
        program = made.compile(bucket, 128)
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes < pool / 10, bucket
        assert memory.alias_size_in_bytes == pytest.approx(pool, rel=0.01)


@pytest.mark.slow  # real compilers, three programs a bucket: what runs on GPUs compiles, and copies no pages
@pytest.mark.parametrize("chip", ["h100", "a100"])
def test_every_bucket_compiles_layer_by_layer_for_gpus_that_are_not_there(chip):
    model = read_dimensions("D=1024 F=2048 L=8 N=16 K=4 H=256 V=8192", name="small")
    devices = target_devices(Target.of(parse_cluster(f"{chip}:2")))
    own = paged_model(model, ServingLayout(tensor=2), devices, pages=PAGES, page_tokens=16, dtype=DType.BF16)
    made = LayeredModel.where_faster(own)
    assert isinstance(made, LayeredModel)
    pool = made.page_bytes * PAGES / 2
    with lowering_for(devices[0]):
        for bucket in plan_buckets(Scheduling("chunked", 4, 32), 32, made.fewest_rows):
            step = made.compile(bucket, 128)
            memory = step.layers[0].memory_analysis()
            assert memory.temp_size_in_bytes < pool / 10, bucket
            assert len(step.layers) * memory.alias_size_in_bytes == pytest.approx(pool, rel=0.01)
            assert "attend_pages" in step.layers[0].as_text()
