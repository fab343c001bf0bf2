"""Models that others trained, served: the reference library's greedy tokens, also where a prompt is found in the cache.

Slow because both are run whole; they need `tests/data/golden/checkpoints.txt`.
"""

import jax
import pytest

from meshwise.core.dtypes import DType
from meshwise.engine.engine import Engine
from meshwise.engine.executor import JaxExecutor, plan_buckets
from meshwise.engine.requests import Collected, EngineRequest
from meshwise.runtime.steps import paged_model
from meshwise.runtime.weights import open_weights
from meshwise.scheduling import Scheduling
from meshwise.sharding.serving import ServingLayout
from tests.engine.test_engine import largest
from tests.runtime.golden import Golden
from tests.runtime.test_real_checkpoints import gemma3, smollm2

PAGE, PAGES = 4, 48


@pytest.mark.slow  # 135 and 270 million weights: windows, tied heads, prefixes that are gone on from
@pytest.mark.parametrize(("find", "name"), [(smollm2, "smollm2-135m"), (gemma3, "gemma-3-270m")])
def test_greedy_tokens_are_those_of_the_reference_library(find, name, tmp_path):
    golden = Golden.of(name)
    prompt, expected = golden.tokens.tolist(), golden.said["greedy"][:16]
    longest = len(prompt) + len(expected)
    model = paged_model(
        golden.model, ServingLayout(), jax.devices()[:1], pages=PAGES, page_tokens=PAGE, dtype=DType.FP32
    )
    weights = model.load(open_weights(find(tmp_path), golden.model))
    scheduling = Scheduling("chunked", 2, 24, prefix_cache=True)
    buckets = largest(plan_buckets(scheduling, longest, model.fewest_rows))
    executor = JaxExecutor(model, weights, scheduling, longest, buckets=buckets, sampled=False)
    engine = Engine(scheduling, PAGES, executor, block_tokens=PAGE)
    for _ in range(2):  # the second finds the first one's prompt, and both go side by side
        requests = [EngineRequest(prompt, len(expected), Collected(), block_tokens=PAGE) for _ in range(2)]
        for request in requests:
            engine.submit(request)
            engine.step()
        while engine.step():
            pass
        assert [request.sink.ids for request in requests] == [expected] * 2
    assert engine.scheduler.hit_tokens >= len(prompt) // PAGE * PAGE - PAGE > 0
