"""An engine's step in seconds: the formula by hand, runs in closed form, and what JSON is refused."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.errors import ConfigError
from meshwise.costs.engine import AttentionCosts, EngineCosts, query_key_pairs

COSTS = EngineCosts(
    overhead_s=1e-3,
    per_request_s=1e-5,
    token_seconds=((1, 8e-3), (64, 8e-3), (1024, 40e-3)),
    attention=(AttentionCosts(2e-7, 3e-9), AttentionCosts(5e-7, 1e-9, window=128)),
    kv_blocks=1000,
    kv_bytes_per_token=1e5,
    transfer_bytes_per_s=1e9,
    swap_bytes_per_s=2e9,
)


def test_a_step_by_hand():
    # 2 requests, and 100 tokens of a prompt of which 50 are cached: 102 tokens
    by_tokens = 8e-3 + (102 - 64) / (1024 - 64) * 32e-3
    full = 2e-7 * (100 + 300) + 3e-9 * sum(range(51, 151))
    windowed = 5e-7 * (100 + 128) + 1e-9 * sum(min(k, 128) for k in range(51, 151))
    expected = 1e-3 + 2e-5 + by_tokens + full + windowed
    assert math.isclose(COSTS.step_seconds([100, 300], [(50, 100)]), expected, rel_tol=1e-12)


def test_tokens_go_on_beyond_the_points():
    assert COSTS.tokens_seconds(0) == COSTS.tokens_seconds(40) == 8e-3
    assert math.isclose(COSTS.tokens_seconds(1024), 40e-3)
    assert math.isclose(COSTS.tokens_seconds(2048), 40e-3 + 1024 * 32e-3 / 960)


@given(st.integers(0, 300), st.integers(0, 300), st.none() | st.integers(1, 400))
def test_pairs_are_counted_one_by_one(past, new, window):
    limit = math.inf if window is None else window
    assert query_key_pairs(past, new, window) == sum(min(past + k, limit) for k in range(1, new + 1))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(1, 300), st.integers(1, 400))
def test_a_run_is_the_sum_of_its_steps(contexts, steps, window):
    costs = COSTS.replace(attention=(AttentionCosts(2e-7), AttentionCosts(3e-7, window=window)))
    one_by_one = math.fsum(costs.step_seconds([c + k for c in contexts]) for k in range(steps))
    assert math.isclose(costs.run_seconds(contexts, steps), one_by_one, rel_tol=1e-12)


def test_moving_the_cache():
    assert COSTS.transfer_seconds(1000) == 0.1
    assert COSTS.swap_seconds(1000) == 0.05
    assert (COSTS.blocks(16), COSTS.blocks(17), COSTS.kv_tokens) == (1, 2, 16_000)
    with pytest.raises(ConfigError, match="needs swap_bytes_per_s; or preempt by recompute"):
        COSTS.replace(swap_bytes_per_s=None).swap_seconds(1)
    with pytest.raises(ConfigError, match="needs transfer_bytes_per_s"):
        COSTS.replace(transfer_bytes_per_s=None).transfer_seconds(1)


def test_json_goes_round():
    again = EngineCosts.from_json(COSTS.to_json())
    assert again == COSTS
    assert again.source == COSTS.source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_blocks": 0}, "kv_blocks: expected a whole number, at least 1, found 0"),
        ({"overhead_s": -1}, "overhead_s: expected a number, 0 or more, found -1"),
        ({"overhead_s": "1 ms"}, "overhead_s: expected a number, 0 or more, found '1 ms'"),
        ({"overhead_ms": 1}, "there is no field 'overhead_ms'; known: overhead_s"),
        ({"token_seconds": []}, "token_seconds: expected at least one pair"),
        ({"token_seconds": [1, 2]}, "token_seconds: expected pairs of tokens and seconds"),
        ({"token_seconds": [[8, 2.0], [1, 3.0]]}, "tokens that rise"),
        ({"token_seconds": [[1, 2.0], [8, 1.0]]}, "seconds that do not fall"),
        ({"attention": [{"window": 0}]}, "window: expected a whole number, at least 1"),
        ({"attention": [{"windows": 3}]}, "there is no field 'windows'"),
        ({"attention": 3}, "attention: expected a list"),
        ({"transfer_bytes_per_s": 0}, "transfer_bytes_per_s: expected a number, more than 0, found 0"),
    ],
)
def test_what_is_wrong_is_said(change, words):
    value = json.loads(COSTS.to_json())
    value["engine_costs"].update(change)
    with pytest.raises(ConfigError, match=words):
        EngineCosts.from_json(json.dumps(value), "costs.json")


def test_what_is_no_document_is_said():
    with pytest.raises(ConfigError, match=r"costs.json: not valid JSON: .* line 1"):
        EngineCosts.from_json("{", "costs.json")
    with pytest.raises(ConfigError, match="schema_version: expected '1', found 2"):
        EngineCosts.from_json('{"schema_version": 2, "engine_costs": {}}')
    with pytest.raises(ConfigError, match="kv_blocks is missing"):
        EngineCosts.from_json('{"schema_version": "1", "engine_costs": {}}')
    with pytest.raises(ConfigError, match="takes no time"):
        EngineCosts(0.0, ((1, 0.0),), 10)
