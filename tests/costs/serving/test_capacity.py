"""One accounting of memory: what is said to fit most just fits, and one more does not; of all kinds of caches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.costs.engines import find_serving_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.costs.serving.memory import engine_memory, frontier, largest_batch, longest_context
from meshwise.hardware import parse_cluster
from meshwise.jobs import ServingLoad
from meshwise.models import load_model
from meshwise.sharding.serving import parse_serving_layout

#: Grouped queries, windows, latents, states beside attention, experts.
CASES = (
    ("llama-3-8b", "h100:2", ("tensor=1", "tensor=2", "stage=2")),
    ("gemma-3-12b", "h100:2", ("tensor=2",)),
    ("deepseek-v3", "h200:8", ("tensor=8,expert_tensor_parallel=off", "expert=8")),
    ("jamba-v0.1", "h200:2", ("tensor=2",)),
    ("mixtral-8x7b", "h200:2", ("tensor=2", "expert=2")),
)

problems = st.builds(
    lambda case, prompt, output, precision, block_tokens: (case, (prompt, output, precision, block_tokens)),
    st.sampled_from(CASES),
    st.integers(1, 8000),
    st.integers(1, 2000),
    st.sampled_from(["bf16", "fp8", "int8-weights", "fp8-kv8"]),
    st.sampled_from([1, 16, 64]),
)


def made(case, load):
    (model, on, layouts), (prompt, output, precision, block) = case, load
    cluster = parse_cluster(on)
    given_load = ServingLoad(prompt=prompt, output=output, precision=precision, block_tokens=block)
    calibration = find_serving_calibration("fitted", cluster.chip)
    return ServingProblem(load_model(model), given_load, cluster, calibration), layouts


def fits(problem, setup):
    return engine_memory(problem, setup, "decode")["total"] <= problem.cluster.chip.hbm_usable


@given(problems, st.sampled_from([None, 256, 2048]), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_what_fits_most_fits_and_one_more_does_not(asked, chunk, batch):
    problem, layouts = made(*asked)
    for text in layouts:
        layout = parse_serving_layout(text, num_chips=8)
        setup = ServingSetup("aggregated", layout, layout, batch, 1, chunk)

        def many(requests, layout=layout, problem=problem):
            return fits(problem, ServingSetup("aggregated", layout, layout, requests, 1, chunk))

        most = largest_batch(problem, setup)
        assert most == 0 or many(most)
        assert not many(most + 1)

        def long(tokens, setup=setup, problem=problem):
            output = max(min(problem.load.output, tokens - 1), 1)
            load = problem.load.model_copy(update={"prompt": max(tokens - output, 1.0), "output": float(output)})
            return fits(ServingProblem(problem.model, load, problem.cluster, problem.calibration), setup)

        longest = longest_context(problem, setup)
        assert longest == 0 or long(longest)
        assert not long(longest + 1)


@given(problems)
@settings(max_examples=10, deadline=None)
def test_the_frontier_has_its_points_from_the_same_accounting(asked):
    problem, layouts = made(*asked)
    layout = parse_serving_layout(layouts[0], num_chips=8)
    points = frontier(problem, ServingSetup("aggregated", layout, layout, 1))
    assert [tokens for _, tokens in points] == sorted((tokens for _, tokens in points), reverse=True)
    for batch, tokens in points:
        assert tokens == longest_context(problem, ServingSetup("aggregated", layout, layout, batch))


def test_one_request_is_held_once():
    """A prompt takes the place of a request that ended: its cache is not counted besides those of the batch."""
    problem, _ = made(CASES[0], (4096, 256, "bf16", 16))
    layout = parse_serving_layout("tensor=1", num_chips=8)
    e = estimate_serving(problem, ServingSetup("aggregated", layout, layout, 1))
    per_token = problem.model.kv_cache.bytes_per_token(problem.load.formats.kv)
    assert e.memory["kv_cache"] == pytest.approx((4096 + 256) * per_token)
    other = parse_serving_layout("tensor=2", num_chips=8)
    assert estimate_serving(problem, ServingSetup("aggregated", other, other, 1)).memory[
        "kv_cache"
    ] * 2 == pytest.approx(e.memory["kv_cache"])
