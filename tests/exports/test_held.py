"""What a program holds tensor by tensor: as it is placed, whatever the remat policy."""

import math
from itertools import product

import pytest

from meshwise.core.tensors import Attention
from meshwise.exports.held import divisors, placed_tensors, split_axes
from meshwise.models import load_model
from meshwise.sharding.place import place_block
from meshwise.sharding.placed import LocalOp
from meshwise.sharding.remat import REMAT_POLICIES
from meshwise.sharding.strategy import training_strategy

MODELS = ("llama-3-8b", "deepseek-v2", "jamba-v0.1")
STRATEGIES = [
    training_strategy(zero=zero, fully_sharded=sharded, experts=experts, ring=ring, exchanges=exchanges)
    for zero, sharded, experts, ring, exchanges in product(
        (0, 1, 2), (True, False), (("Fe",), ("Fe", "C"), ("E", "C")), (True, False), (True, False)
    )
]


def walked(block, strategy, policy):
    """Names and splits of what one placed block holds: weights, gradients, optimizer state, activations."""
    placed = place_block(block, strategy, policy)
    stacked = ((),) * (block.repeat > 1)
    for held in (placed.weights, placed.gradients, placed.optimizer):
        for h in held:
            yield h.tensor.name.removeprefix("d_"), (*stacked, *h.sharding.splits)
    read = {t.name: t for op in block.ops for t in op.inputs if t.name in block.inputs}
    for t in read.values():
        yield t.name, strategy.home(t.axes).splits
    for item in placed.forward:
        if isinstance(item, LocalOp):
            if isinstance(item.op, Attention):
                for h in item.inputs:
                    yield f"{item.op.name}.{h.tensor.name}", h.sharding.splits
            own = item.output.sharding
            whole = strategy.home(item.output.tensor.axes) if own.unreduced else own
            yield item.output.tensor.name, whole.splits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", REMAT_POLICIES.values(), ids=REMAT_POLICIES)
def test_every_remat_policy_holds_what_is_listed(name, policy):
    program = load_model(name).train_program()
    for strategy in STRATEGIES[:: 1 if policy.name == "full" else 7]:
        listed = {(h.name, h.sharding.splits) for h in placed_tensors(program, strategy, 4096).all}
        found = {(f"{b.name}/{n}", splits) for b in program for n, splits in walked(b, strategy, policy)}
        assert listed == found


@pytest.mark.parametrize("name", MODELS)
def test_what_divides_all_sizes_is_the_largest_that_does(name):
    program = load_model(name).train_program()
    for strategy in STRATEGIES[::7]:
        every = [one for held in placed_tensors(program, strategy, 4096).all for one in split_axes(held)]
        found = {}
        for part in ("", "weights", "gradients", "optimizer"):
            for split, size in divisors(program, 4096, strategy, part).items():
                found[split] = math.gcd(found.get(split, 0), size)
        assert found == {split: math.gcd(*(n for _, n, s in every if s == split)) for _, _, split in every}
