"""Blocks take parts of what was lowered before: of other policies, of plain storage, of gathers instead of a ring."""

from dataclasses import replace
from itertools import product

import pytest

from meshwise.costs.activation_plan import Compiled
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.lower import LoweredTrainingBlock, Symbolic
from meshwise.costs.relevant import relevant_choices
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.place import place_block
from meshwise.sharding.remat import remat_policy

POLICIES = ("none", "matmuls", "attention", "full")
WAYS = tuple(product(POLICIES, (0, 1, 2), (True, False), ("gather", "ring"), ("compiler", "bidirectional")))


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-oss-20b", "gemma-2-9b"])
def test_what_is_shared_is_what_would_be_read_of_the_block_alone(name):
    job = TrainingJob(batch_tokens=1 << 20, seq_len=4096, precision="mixed")
    shared, shares = Symbolic(job.formats, job.optimizer_kind), 0
    for block in load_model(name).train_program():
        copy = shared.copies(replace(block, repeat=1))
        for remat, zero, sharded, method, matmul in WAYS:
            asked = LayoutChoices(zero, True, remat, sharded, context_method=method, collective_matmul=matmul)
            choices = relevant_choices(asked, block)
            found = shared.training(copy, choices)
            placed = place_block(shared.copies.values[copy], choices.strategy, remat_policy(choices.remat))
            alone = LoweredTrainingBlock(placed, shared)
            assert found.placed == placed
            for part in ("items", "passes", "collectives", "state", "update", "activations"):
                assert getattr(found, part) == getattr(alone, part)
            assert found.activations.buffers == alone.activations.buffers
            for compiled in (None, Compiled(), Compiled(overwrites=True), Compiled(stay=True)):
                assert found.activations.operations(compiled) == alone.activations.operations(compiled)
            shares += found.computes_as is not None and found.stores_as is not None
    assert shares
