"""Blocks of a serving step are placed alike under all rules and under those alone that mean something to them."""

from __future__ import annotations

import itertools

import pytest

from meshwise.costs.relevant import relevant_rules
from meshwise.sharding.place import place_forward
from meshwise.sharding.serving import CACHE_SPLITS, ServingLayoutChoices, serving_strategy
from tests.costs.serving.cases import problem

#: What a strategy takes together: the residual stream is split by its width where weights are, and slots are not then.
STANDS = [
    *({"residual": "whole", "wide": False, "experts": e} for e in (("Fe",), ("E",))),
    *({"residual": "positions", "wide": False, "experts": e} for e in (("Fe",), ("E", "C"))),
    {"residual": "width", "wide": True, "experts": ("Fe",)},
]


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3", "jamba-v0.1", "gemma-2-9b-it", "qwen3-next-80b-a3b"])
def test_rules_that_mean_nothing_to_a_block_place_it_alike(model):
    given = problem(model, "h100:8")
    left_out = 0
    every = itertools.product(("prefill", "decode"), CACHE_SPLITS, (True, False), STANDS)
    for step, split, ring, stands in every:
        strategy = serving_strategy(cache_split=split, ring=ring, **stands)
        for block in given.lowered(step, ServingLayoutChoices(wide=stands["wide"])).program:
            own = relevant_rules(strategy, block)
            left_out += own != strategy
            assert place_forward(block, own) == place_forward(block, strategy)
    assert left_out
