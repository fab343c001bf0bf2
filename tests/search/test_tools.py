"""What masks of a whole table say of a candidate is what a tool says of its layout."""

import math

import numpy as np
import pytest

from meshwise.exports import tools_for
from meshwise.models import load_model
from meshwise.search.asked import SearchSpace
from meshwise.search.candidates import Choices, candidate_table, compute_variants
from meshwise.search.completed import training_limits
from meshwise.search.network import LocalTables, SearchedNetwork
from meshwise.search.pricing import Pricing
from meshwise.search.space import meshes, placements
from meshwise.search.tools import Tool, possible_variants
from meshwise.sharding.layout import Layout
from tests.search.test_search_exact import large


@pytest.mark.parametrize("names", [("megatron", "torchtitan", "deepspeed", "meshwise"), ("megatron",)])
def test_masks_of_many_conditions_say_what_tools_say_of_layouts(names):
    problem = large(chips="h100:16", changes={"precision": "mixed"}, layers=8, heads=8)
    tools = tools_for(problem, names)
    space = SearchSpace(training_limits(problem), tools=tools)
    table = candidate_table(problem, meshes(math.prod(problem.network.sizes), space.limits))
    network = SearchedNetwork(LocalTables(problem), space, problem.network, table)
    pricing, generator = Pricing(network), np.random.default_rng(1)
    batch = pricing.taken(pricing.bounds.members_of(pricing.bounds.all_groups(lambda bound, _: bound >= 0)))
    taken = table.meshes[np.unique(table.mesh_id[batch.at])]
    assert {*map(tuple, network.local.meshes(space, table.meshes))} == {*map(tuple, taken)}
    assert len(names) > 1 or len(taken) < len(table.meshes)
    batch = batch.take(generator.integers(len(batch), size=400))  # those that some tool takes with some saving
    said = 0
    for saving in range(len(network.savings)):
        runs = network.runs(batch.choices, batch.schedule, batch.at, saving)
        said += int(runs.sum())
        for i in range(len(batch)):
            layout = layout_of(network, batch, i, saving)
            assert runs[i] == any(t.runs(layout) for t in tools), layout
    assert 0 < said < runs.size * len(network.savings)
    assert len(names) == 1 or network.masks._flags[0].number > 64


def layout_of(network, batch, i, saving):
    """A candidate in words that a tool reads, placed somehow."""
    mesh = network.table.mesh_id[batch.at[i]]
    sizes = {a: int(n) for a, n in network.table.axes(mesh).items()}
    where = placements(network.fabric.sizes, tuple(sizes.values()))[0]
    return Layout(
        **sizes,
        **network.layout_choices(int(batch.choices[i]), int(batch.schedule[i]), saving),
        micro_batch=int(network.table.micro_batch[batch.at[i]]),
        num_microbatches=int(network.table.num_microbatches[batch.at[i]]),
        wires=tuple((a, tuple(int(e) for e in extents)) for a, extents in zip(sizes, where, strict=True)),
    )


def test_ways_to_attend_that_no_tool_takes_over_any_context_are_left_out():
    model = load_model("llama-3-8b")
    variants = compute_variants(model, Choices())
    no_rings = Tool("no rings", (lambda c: (c.context_method == "ring") & (c.context > 1),))
    odd_rings = Tool("odd rings", (lambda c: (c.context_method == "ring") & (c.context % 2 == 0),))
    methods = [
        {v.own.context_method for v in possible_variants(tools, variants)}
        for tools in ((no_rings,), (odd_rings,), (no_rings, odd_rings))
    ]
    assert methods == [{"gather"}, {"gather", "ring"}, {"gather", "ring"}]
    rings_first = compute_variants(model, Choices(context_method=("ring", "gather")))
    assert possible_variants((no_rings,), rings_first) == rings_first  # it stands for meshes without context, too
