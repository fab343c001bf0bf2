"""What a device holds of activations is alike for all layouts that differ only in what they store where."""

import pytest

from meshwise.costs.fitted import find_calibration
from meshwise.costs.layout_choices import LocalSizes
from meshwise.costs.local import evaluate_local_memory, local_prices
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.search.candidates import Choices, compute_variants

SIZES = LocalSizes(micro_batch=2.0, tensor=2.0, context=2.0, ulysses=1.0, expert=2.0)


@pytest.mark.parametrize("model", ["llama-3.2-1b", "gemma-3-1b", "deepseek-v2", "gpt-oss-20b", "jamba-v0.1"])
@pytest.mark.parametrize("on", ["h100:16", "v5e:4x4"])
def test_activations_do_not_depend_on_what_is_stored_where(model, on):
    cluster = parse_cluster(on)
    job = TrainingJob(batch_tokens="1Mi", seq_len="4096")
    problem = TrainingProblem(load_model(model), job, cluster, find_calibration("fitted", cluster.chip))
    for variant in compute_variants(problem.model, Choices()):
        prices = local_prices(problem, variant.own, SIZES)
        held = {str(evaluate_local_memory(problem, stored, prices)) for stored in variant.stored}
        assert len(held) == 1
        assert len(variant.stored) == 6
