"""What a layer keeps under each policy, against the formulas of Korthikanti et al. 2022.

Theirs: 34 sbh + 5 a s^2 b in 16 bits, of which two sbh are masks of dropout, which nobody trains with here, and the
terms in s^2 are scores, their softmax and its mask, which fused attention never keeps.
"""

import pytest

from meshwise.costs.calibration import IDENTITY
from meshwise.costs.explain import work_out
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
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


def kept_of(model: str, block: str, policy: str, **layout: int) -> dict[str, float]:
    """Tensor -> bytes that a chip keeps of one layer and microbatch, of sequences of 1,024."""
    cluster = parse_cluster("h100:8")
    whole = Layout(**{"fsdp": 8, "micro_batch": 2, **layout}, remat=policy)
    whole = whole.replace(wires=tuple((a, (n,)) for a, n in whole.sizes.items() if n > 1))
    job = TrainingJob(batch_tokens=str(whole.sequences * 1024), seq_len="1024", expert_imbalance=1.0)
    problem = TrainingProblem(load_model(model), job, cluster, IDENTITY)
    w = work_out(problem, Fabric.of(cluster), whole)
    return {held.partition("[")[0]: size for held, size in w.kept[block]}


def kept(policy: str, **layout: int) -> float:
    return sum(kept_of("gpt-2", "layer", policy, **layout).values())


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


#: Model -> its layer with experts, D, width of an expert, copies of a token.
EXPERTS = {
    "qwen3-30b-a3b": ("layer", 2048, 768, 8),
    "mixtral-8x7b": ("layer", 4096, 14336, 2),
    "deepseek-v3": ("layer.moe", 7168, 2048, 8),
}


@pytest.mark.parametrize("model", EXPERTS)
@pytest.mark.parametrize("layout", [{}, {"fsdp": 1, "expert": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}])
def test_what_experts_keep(model: str, layout: dict[str, int]) -> None:
    """Of each copy of a token: what the first product reads and makes, and what the second reads: no more.

    Megatron-LM weighs the activation between them by the gate ("weighted SwiGLU"), and so has nothing of what the
    second product makes to keep (TransformerEngine, pull request 1468). Two bytes each, and two of the gate.
    """
    block, width, hidden, copies = EXPERTS[model]
    found = kept_of(model, block, "none", **layout)
    of_experts = {n: size for n, size in found.items() if n.startswith(("expert.", "slot"))}
    one = 2 * 1024 * copies * 2 / layout.get("tensor", 1)
    assert of_experts == {
        "slots": one * width,
        **dict.fromkeys(("expert.gate", "expert.up", "expert.act"), one * hidden),
        "slot_gates": one,
    }
    assert "combine" not in found


def test_what_qwen3_keeps_of_a_token() -> None:
    """111 KiB of a token and layer: the stream's, those of 32 heads of 128 and 4 of keys and values, of experts."""
    found = kept_of("qwen3-30b-a3b", "layer", "none")
    stream = 4 * 2048  # both norms' inputs and outputs
    heads = 32 * 128 * 3 + 4 * 128 * 3  # q and k before their norms and after their rotation, v, attention's output
    experts = 8 * (2048 + 3 * 768)
    scores = 128 + 8 + 8  # of all experts; the chosen gates, there and here
    assert sum(found.values()) == pytest.approx(2 * 1024 * 2 * (stream + heads + experts + scores), rel=1e-12)
