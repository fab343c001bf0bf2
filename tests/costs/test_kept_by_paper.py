"""What a layer keeps under each policy, against the formulas of Korthikanti et al. 2022.

Theirs: 34 sbh + 5 a s^2 b in 16 bits, of which two sbh are masks of dropout, which nobody trains with here, and the
terms in s^2 are scores, their softmax and its mask, which fused attention never keeps.
"""

import pytest

from meshwise.costs.calibration import IDENTITY
from meshwise.costs.evaluate import TrainingProblem
from meshwise.costs.network import Fabric
from meshwise.costs.workings import work_out
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import Layout

#: Policy -> bytes over sbh. LayerNorm inputs 4, input of q, k and v 2, q, k, v 6, input of the projection (attention's
#: output) 2, input of the feed-forward part 2, of GeLU 8, of its second product 8.
KEPT = {
    "none": 4 + 2 + 6 + 2 + 2 + 8 + 8,
    "selective": 4 + 2 + 6 + 2 + 8 + 8,  # attention runs again, and its output is made again
    "matmuls": 2 + 6 + 2 + 2 + 8,  # x, q k v, attention, its projection, the first product of the feed-forward part
    "projections": 2 + 6 + 2 + 8,
    "attention": 2 + 6 + 2 + 2,
    "full": 2,
    "recompute:layernorm": 4 + 6 + 2 + 8 + 8,  # what norms make is made again
    "recompute:core_attn": 4 + 2 + 6 + 2 + 8 + 8,
    "recompute:mlp": 4 + 2 + 6 + 2 + 2,
    "recompute:act": 4 + 2 + 6 + 2 + 2 + 8,  # GeLU of its input
}


def kept(policy: str, **layout: int) -> float:
    cluster = parse_cluster("h100:8")
    whole = Layout(**{"fsdp": 8, "micro_batch": 2, **layout}, remat=policy)
    whole = whole.replace(wires=tuple((a, (n,)) for a, n in whole.sizes.items() if n > 1))
    job = TrainingJob(batch_tokens=str(whole.sequences * 1024), seq_len="1024")
    problem = TrainingProblem(load_model("gpt-2"), job, cluster, IDENTITY)
    w = work_out(problem, Fabric.of(cluster), whole)
    return sum(size for _, size in w.kept["layer"])


@pytest.mark.parametrize("policy", KEPT)
def test_a_layer_of_gpt_2(policy: str) -> None:
    assert kept(policy) == KEPT[policy] * 1024 * 2 * 768


@pytest.mark.parametrize("policy", KEPT)
def test_tensor_and_sequence_parallelism_divide_all_of_it(policy: str) -> None:
    """Their table 2: with sequence parallelism every term is divided by t."""
    assert kept(policy, fsdp=2, tensor=4) == KEPT[policy] * 1024 * 2 * 768 / 4


def test_without_sequence_parallelism_ten_sbh_stay_whole() -> None:
    """Their 10 sbh less the two masks: inputs of both norms, and of the products that read them."""
    split = kept("none", fsdp=2, tensor=4, sequence_parallel=False)
    assert split == (8 + (KEPT["none"] - 8) / 4) * 1024 * 2 * 768
