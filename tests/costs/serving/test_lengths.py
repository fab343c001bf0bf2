"""Requests of different lengths: closed forms are averages over requests, and the simulator agrees with them."""

import numpy as np
import pytest

from meshwise.costs.calibration import default_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.hardware import parse_cluster
from meshwise.jobs import ServingLoad
from meshwise.jobs.lengths import parse_lengths
from meshwise.jobs.mix import mix_lengths
from meshwise.models import load_model
from meshwise.sharding.serving import ServingLayout


def problem(load, model="llama-3-8b"):
    cluster = parse_cluster("h100:1")
    return ServingProblem(load_model(model), load, cluster, default_calibration(cluster.chip))


def alone(chunk=None):
    return ServingSetup("aggregated", ServingLayout(), ServingLayout(), 32, 1, chunk)


def of_a_prompt(e):
    """Seconds that an engine spends on a prompt beside decoding."""
    return e.prefill_share / e.requests_per_s


@pytest.mark.parametrize(("chunk", "within"), [(None, 0.005), (512, 0.05)])
@pytest.mark.parametrize("first", [0, 512])
def test_a_prefill_of_different_prompts_takes_their_mean(chunk, within, first):
    prompts = parse_lengths("uniform:1024-7168")
    mix = mix_lengths(prompts, parse_lengths("65"))
    mean = estimate_serving(problem(ServingLoad.of_mix(mix, cached_prefix=first)), alone(chunk))
    each = [
        estimate_serving(problem(ServingLoad(prompt=prompts.quantile(s), output=65, cached_prefix=first)), alone(chunk))
        for s in (np.arange(12) + 0.5) / 12
    ]
    assert of_a_prompt(mean) == pytest.approx(np.mean([of_a_prompt(e) for e in each]), rel=within)
    assert mean.decode.seconds.expected == pytest.approx(np.mean([e.decode.seconds.expected for e in each]), rel=within)
    of_mean = estimate_serving(problem(ServingLoad(prompt=4096, output=65, cached_prefix=first)), alone(chunk))
    assert of_a_prompt(mean) > 1.005 * of_a_prompt(of_mean)


def test_memory_is_for_long_requests_but_not_for_all_of_them():
    mix = mix_lengths(parse_lengths("uniform:512-1536"), parse_lengths("256"))
    few, many = (
        estimate_serving(problem(load), alone())
        for load in (ServingLoad.of_mix(mix), ServingLoad(prompt=1536, output=256))
    )
    mean = estimate_serving(problem(ServingLoad(prompt=1024, output=256)), alone())
    assert mean.memory["kv_cache"] < few.memory["kv_cache"] < many.memory["kv_cache"]
    assert mean.largest_batch > few.largest_batch > many.largest_batch
