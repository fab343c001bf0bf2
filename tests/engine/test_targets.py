"""Steps of the engine compiled for chips that are not there: every bucket compiles, and the pool is not copied."""

import pytest

from meshwise.compiler.compiling import target_devices
from meshwise.compiler.targets import Target
from meshwise.core.dtypes import DType
from meshwise.engine.executor import plan_buckets
from meshwise.hardware import parse_cluster
from meshwise.models import read_dimensions
from meshwise.runtime.steps import paged_model
from meshwise.scheduling import Scheduling
from meshwise.sharding.serving import ServingLayout

PAGES = 16384


@pytest.mark.slow  # real compilers, eleven programs a chip: each compiles, temporaries are under 10 % of the pool
@pytest.mark.parametrize(("cluster", "tensor"), [("v5e:2x2", 4), ("v5p:2x2x1", 4), ("h100:2", 2)])
def test_every_bucket_compiles_for_chips_that_are_not_there(cluster, tensor):
    model = read_dimensions("D=1024 F=2048 L=8 N=16 K=8 H=128 V=8192", name="small")
    devices = target_devices(Target.of(parse_cluster(cluster)))
    made = paged_model(
        model, ServingLayout(tensor=tensor), devices[:tensor], pages=PAGES, page_tokens=16, dtype=DType.BF16
    )
    pool = made.page_bytes * PAGES / tensor
    for bucket in plan_buckets(Scheduling("chunked", 4, 64), 64):
        program = made.compile(bucket, 128)
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes < pool / 10, bucket
        assert memory.alias_size_in_bytes == pytest.approx(pool, rel=0.01)
        assert ("attend_pages" in program.as_text()) == cluster.startswith("h100"), "by a kernel where there is one"
