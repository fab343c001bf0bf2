"""Strategies: what the tables say, and that the collectives that follow from them are those of the papers."""

from __future__ import annotations

import pytest

from meshwise.models import load_model, model_names
from meshwise.sharding import Sharding
from meshwise.sharding.placed import LocalOp, PlacedBlock, Purpose, Transfer
from meshwise.sharding.strategy import (
    Rule,
    Strategy,
    apply_rules,
    context,
    data,
    expert,
    fsdp,
    tensor,
    training_strategy,
    ulysses,
)
from tests.each import each as every
from tests.sharding.placed_cases import make_case

AXES = {"data": 2, "fsdp": 2, "context": 2, "ulysses": 2, "expert": 2, "tensor": 2}
MATRICES = ["w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down"]
WEIGHTS = ["norm.attn", *MATRICES[:4], "norm.mlp", *MATRICES[4:]]


def placed(name: str, strategy: Strategy, policy: str = "none") -> PlacedBlock:
    return make_case(name, strategy, AXES, policy).placed()


def moves(items: tuple[LocalOp | Transfer, ...], *purposes: Purpose) -> list[str]:
    """As "all-gather x over tensor", in order."""
    chosen = [t for t in items if isinstance(t, Transfer) and t.purpose in (purposes or tuple(Purpose))]
    return [f"{t.collective.kind} {t.tensor.name} over {','.join(t.collective.mesh_axes)}" for t in chosen]


def each(kind: str, names: list[str], axis: str, prefix: str = "") -> list[str]:
    return [f"{kind} {prefix}{name} over {axis}" for name in names]


# Collectives of the well-known strategies, on a LLaMA layer.


def test_plain_data_parallelism_all_reduces_each_gradient_once_a_step() -> None:
    p = placed("llama", data())
    assert moves(p.forward) == []
    assert moves(p.backward) == []
    assert moves(p.step) == each("all-reduce", WEIGHTS, "data", "d_")


def test_zero_1_scatters_gradients_and_gathers_new_weights_once_a_step() -> None:
    """Rajbhandari et al. 2020, ZeRO, section 5.1: optimizer state partitioned."""
    p = placed("llama", data(zero=1))
    assert moves(p.forward) == []
    assert moves(p.backward) == []
    assert moves(p.step, Purpose.GRADIENTS) == each("reduce-scatter", WEIGHTS, "data", "d_")
    assert moves(p.step, Purpose.WEIGHTS) == each("all-gather", WEIGHTS, "data")


def test_zero_2_scatters_gradients_in_every_backward_pass() -> None:
    p = placed("llama", data(zero=2))
    assert moves(p.forward) == []
    assert sorted(moves(p.backward)) == sorted(each("reduce-scatter", WEIGHTS, "data", "d_"))
    assert moves(p.step) == each("all-gather", WEIGHTS, "data")


@pytest.mark.parametrize("policy", ["none", "full"])
def test_fsdp_gathers_weights_twice_and_scatters_gradients_once(policy: str) -> None:
    """Zhao et al. 2023, PyTorch FSDP, section 3.1; book, Training, fully sharded data parallelism."""
    p = placed("llama", fsdp(), policy)
    assert moves(p.forward) == each("all-gather", WEIGHTS, "fsdp")
    # A layer that is computed again does so with the weights that its backward pass gathers anyway.
    assert sorted(moves(p.backward, Purpose.WEIGHTS)) == sorted(each("all-gather", WEIGHTS, "fsdp"))
    assert sorted(moves(p.backward, Purpose.GRADIENTS)) == sorted(each("reduce-scatter", WEIGHTS, "fsdp", "d_"))
    assert moves(p.backward, Purpose.ACTIVATIONS) == []
    assert moves(p.step) == []


def test_tensor_parallelism_all_reduces_twice_in_each_pass() -> None:
    """Shoeybi et al. 2019, Megatron-LM, figure 4: f and g of attention and of the feed-forward network."""
    p = placed("llama", tensor(sequence=False))
    assert moves(p.forward) == each("all-reduce", ["o", "down"], "tensor")
    assert moves(p.backward) == each("all-reduce", ["d_x.mlp", "d_x.attn"], "tensor")
    assert moves(p.step) == []


def test_sequence_parallelism_makes_gathers_and_scatters_of_them() -> None:
    """Korthikanti et al. 2022, figure 5; inputs are gathered again for the weights' gradients (section 4.2.2)."""
    p = placed("llama", tensor(sequence=True))
    assert moves(p.forward) == [
        "all-gather x.attn over tensor",
        "reduce-scatter o over tensor",
        "all-gather x.mlp over tensor",
        "reduce-scatter down over tensor",
    ]
    assert moves(p.backward) == [
        "all-gather d_down over tensor",
        "all-gather x.mlp over tensor",
        "reduce-scatter d_x.mlp over tensor",
        "all-gather d_o over tensor",
        "all-gather x.attn over tensor",
        "reduce-scatter d_x.attn over tensor",
    ]
    # Norms see other positions on every device: their gradients are summed, once a step.
    assert moves(p.step) == each("all-reduce", ["norm.attn", "norm.mlp"], "tensor", "d_")


def test_a_parallel_block_reduces_both_branches_at_once() -> None:
    """Wang and Komatsuzaki 2021, GPT-J: one all-reduce a layer and pass where a serial block has two."""
    p = placed("falcon (parallel)", tensor(sequence=False))
    assert moves(p.forward) == ["all-reduce x_out.parts over tensor"]
    assert moves(p.backward) == ["all-reduce d_x.attn over tensor"]


def test_context_parallelism_gathers_keys_and_values() -> None:
    """Dubey et al. 2024, Llama 3, section 3.3.2: K and V are gathered; their gradients are scattered back."""
    p = placed("llama", context())
    assert moves(p.forward, Purpose.ACTIVATIONS) == each("all-gather", ["k.rope", "v"], "context")
    assert moves(p.backward, Purpose.ACTIVATIONS) == [
        *each("all-gather", ["k.rope", "v"], "context"),
        *each("reduce-scatter", ["d_k.rope", "d_v"], "context"),
    ]
    assert moves(p.forward, Purpose.WEIGHTS) == each("all-gather", WEIGHTS, "context")  # stored as in FSDP


def test_a_ring_moves_the_same_keys_and_values_beside_attention() -> None:
    """Liu et al. 2023, Ring Attention, section 3: blocks of K and V go round; in the backward pass, gradients too."""
    gathered, ring = placed("llama", context()), placed("llama", context(ring=True))
    assert moves(ring.forward, Purpose.RING) == moves(gathered.forward, Purpose.ACTIVATIONS)
    assert moves(ring.backward, Purpose.RING) == moves(gathered.backward, Purpose.ACTIVATIONS)
    assert moves(ring.forward, Purpose.ACTIVATIONS) == moves(ring.backward, Purpose.ACTIVATIONS) == []


def test_ulysses_exchanges_positions_for_heads_four_times_a_pass() -> None:
    """Jacobs et al. 2023, DeepSpeed Ulysses, section 3.2: q, k and v before attention, its output after.

    What attention read is kept as it read it; its output as it wrote it, and w_o's gradient fetches that once more.
    """
    p = placed("llama", ulysses())
    before, after = ["q.rope", "k.rope", "v"], ["attention"]
    assert moves(p.forward, Purpose.ACTIVATIONS) == each("all-to-all", [*before, *after], "ulysses")
    assert sorted(moves(p.backward, Purpose.ACTIVATIONS)) == sorted(
        each("all-to-all", after, "ulysses") + each("all-to-all", [*before, *after], "ulysses", "d_")
    )


def test_ulysses_before_context_parallelism_exchanges_and_then_gathers_fewer_heads() -> None:
    """Fang and Zhao 2024, USP, section 3: AllToAlls around a ring of the heads that are here."""
    p = placed("llama", context(ring=True) | ulysses())
    (gather,) = (t for t in p.forward if isinstance(t, Transfer) and t.purpose is Purpose.RING and t.tensor.name == "v")
    assert gather.collective.before == Sharding(((), ("context",), ("ulysses",), ()))
    assert gather.collective.after == Sharding(((), (), ("ulysses",), ()))


def test_expert_parallelism_sends_tokens_to_their_experts_and_back_in_each_pass() -> None:
    """Lepikhin et al. 2020, GShard, section 3.2: two AllToAlls, and two for their gradients. Slots are kept there.

    Gates go with the tokens, where their experts weigh what they make.
    """
    p = placed("mixtral", expert())
    there, back = ["slots", "slot_gates"], ["expert.down"]
    assert moves(p.forward, Purpose.ACTIVATIONS) == each("all-to-all", [*there, *back], "expert")
    assert moves(p.backward, Purpose.ACTIVATIONS) == each("all-to-all", [*back, *reversed(there)], "expert", "d_")


def test_experts_of_which_tensor_parallelism_has_parts_gather_slots_where_they_are() -> None:
    """Megatron-LM's dispatcher: AllToAll over experts, AllGather over tensor; ReduceScatter and AllToAll back."""
    p = placed("mixtral", expert() | tensor(experts=("Fe", "C")))
    there, back = (
        ["all-to-all {} over expert", "all-gather {} over tensor"],
        [
            "reduce-scatter {} over tensor",
            "all-to-all {} over expert",
        ],
    )

    def routed(items: tuple[LocalOp | Transfer, ...]) -> list[str]:
        return [m for m in moves(items, Purpose.ACTIVATIONS) if "slots" in m or "expert" in m.partition(" over ")[0]]

    assert routed(p.forward) == [m.format("slots") for m in there] + [m.format("expert.down") for m in back]
    assert routed(p.backward) == [
        *(m.format("d_expert.down") for m in there),
        "all-gather slots over tensor",  # as sequence parallelism gathers again what a weight's gradient reads
        *(m.format("d_slots") for m in back),
    ]


def test_whole_experts_dealt_over_tensor_too_need_one_exchange_over_both() -> None:
    """Megatron-LM with expert-tensor-parallel size 1: the tensor group's devices hold other experts."""
    p = placed("mixtral", expert() | tensor(experts=("E", "C")))
    both = [m for m in moves(p.forward, Purpose.ACTIVATIONS) if "expert,tensor" in m]
    assert both == each("all-to-all", ["slots", "slot_gates", "expert.down"], "expert,tensor")
    back = [m for m in moves(p.backward, Purpose.ACTIVATIONS) if "expert,tensor" in m]
    assert back == each("all-to-all", ["expert.down", "slot_gates", "slots"], "expert,tensor", "d_")


def test_gradients_of_experts_are_reduced_over_the_replicas_of_each_expert_only() -> None:
    """Expert data parallelism: the axis of the experts takes no part, as all its devices' tokens came to them."""
    p = placed("mixtral", data() | expert(sharded=False))
    experts = ["w_expert.gate", "w_expert.up", "w_expert.down"]
    others = ["norm.attn", *MATRICES[:4], "norm.mlp", "w_router"]
    assert sorted(moves(p.step)) == sorted(
        [*each("all-reduce", experts, "data", "d_"), *each("all-reduce", others, "data,expert", "d_")]
    )


def test_hybrid_sharding_scatters_inside_and_all_reduces_the_shards_once_a_step() -> None:
    """Zhao et al. 2023, PyTorch FSDP, section 3.2.2: reduce-scatter in a group, all-reduce among groups."""
    p = placed("llama", fsdp() | data())
    assert moves(p.step) == each("all-reduce", WEIGHTS, "data", "d_")
    for t in p.step:
        assert t.collective.before.splits == t.collective.after.splits
        assert any("fsdp" in split for split in t.collective.before.splits)


def test_fsdp_with_tensor_parallelism_gathers_only_the_own_part_of_a_weight() -> None:
    """Book, Training, mixed FSDP and tensor parallelism: In[B_X, D_Y], W[D_X, F_Y]."""
    p = placed("llama", fsdp() | tensor())
    (up,) = (t for t in p.forward if isinstance(t, Transfer) and t.tensor.name == "w_up")
    assert up.collective.before == Sharding((("fsdp",), ("tensor",)))
    assert up.collective.after == Sharding(((), ("tensor",)))
    assert [m for m in moves(p.forward) if "over tensor" in m] == moves(placed("llama", tensor()).forward)
    assert [m for m in moves(p.forward) if "over fsdp" in m] == moves(placed("llama", fsdp()).forward)


def test_the_vocabulary_is_split_and_the_loss_summed() -> None:
    """Shoeybi et al. 2019, section 3: the embedding is reduced, logits are never gathered, their loss is summed."""
    plain = tensor(sequence=False)
    assert moves(placed("embed", plain).forward) == ["all-reduce x over tensor"]
    assert moves(placed("embed", plain).backward) == []
    assert moves(placed("head", plain).forward) == ["all-reduce loss over tensor"]
    assert moves(placed("head", plain).backward) == ["all-reduce d_x.final over tensor"]


def test_gradients_of_learned_positions_are_summed_once_a_step() -> None:
    """They are partial over sequences as gradients of other weights are, though no axis of theirs says so."""
    replicas = placed("embed gpt-2", data())
    assert moves(replicas.backward) == []
    assert moves(replicas.step) == ["all-reduce d_w_embed over data", "all-reduce d_w_positions over data"]
    assert moves(placed("embed gpt-2", data(zero=2)).backward) == [
        "reduce-scatter d_w_positions over data",
        "reduce-scatter d_w_embed over data",
    ]
    assert moves(placed("embed gpt-2", fsdp()).backward) == [
        "reduce-scatter d_w_positions over fsdp",
        "reduce-scatter d_w_embed over fsdp",
    ]


def test_latent_attention_is_split_by_its_heads() -> None:
    """DeepSeek-V2, section 2.1: latents are small and shared; what is expanded from them is split."""
    p = placed("deepseek", tensor(sequence=False))
    assert moves(p.forward) == each("all-reduce", ["o", "down"], "tensor")


def test_experts_of_a_mixture_take_tokens_as_the_feed_forward_network_does() -> None:
    """One gather before the router's dispatch, one scatter of what comes back; slots never move."""
    p = placed("mixtral", tensor(sequence=False))
    assert moves(p.forward) == each("all-reduce", ["o", "combine"], "tensor")


def test_the_gradient_of_a_tied_table_is_left_where_its_owner_accumulates() -> None:
    strategy = training_strategy(zero=1, sequence=True)
    head, embed = placed("head tied", strategy), placed("embed", strategy)
    assert [(h.tensor.name, h.sharding) for h in head.tied_gradients] == [
        (h.tensor.name, h.sharding) for h in embed.gradients
    ]
    assert all("w_embed" not in move for move in moves(head.step))


# The tables.


def test_a_rule_splits_the_first_of_its_axes_that_is_there() -> None:
    rule = (Rule(("B", "C"), "X"),)
    assert apply_rules(rule, ("B", "T", "D")) == {"B": ("X",)}
    assert apply_rules(rule, ("E", "C", "D")) == {"C": ("X",)}
    assert apply_rules(rule, ("D", "F")) == {}


def test_a_rule_covers_variants_of_an_axis() -> None:
    assert apply_rules((Rule(("F",), "Y"),), ("D", "F.1")) == {"F.1": ("Y",)}


def test_a_mesh_axis_is_used_once_and_earlier_rules_are_major() -> None:
    rules = (Rule(("D",), "X"), Rule(("D",), "Y"), Rule(("F",), "X"))
    assert apply_rules(rules, ("D", "F")) == {"D": ("X", "Y")}


def test_composing_keeps_the_order_and_nothing_is_the_neutral_element() -> None:
    first, second = fsdp("X"), tensor("Y")
    assert (first | second).compute == first.compute + second.compute
    assert (first | second).weights == first.weights
    assert (first | second).fallback == second.fallback
    assert Strategy() | first == first == first | Strategy()
    assert (first | second) | data("Z") == first | (second | data("Z"))


def test_activations_live_where_tokens_are_and_split_positions_only_where_nothing_else_is() -> None:
    s = training_strategy(zero=0, sequence=True)
    batch, positions = ("fsdp", "expert", "data"), ("context", "ulysses")
    assert s.home(("B", "T", "D")) == Sharding((batch, (*positions, "tensor"), ()))
    assert s.home(("B", "T", "F")) == Sharding((batch, positions, ("tensor",)))
    assert s.home(("B", "T", "N", "H")) == Sharding((batch, positions, ("tensor",), ()))
    plain = training_strategy(zero=0, sequence=False)
    assert plain.home(("B", "T", "D")) == Sharding((batch, positions, ()))


SHARED = ("fsdp", "context", "ulysses", "expert")


@pytest.mark.parametrize(
    ("zero", "gradients", "optimizer"),
    [
        (0, SHARED, SHARED),
        (1, SHARED, (*SHARED, "data")),
        (2, (*SHARED, "data"), (*SHARED, "data")),
    ],
)
def test_what_zero_shares_out(zero: int, gradients: tuple[str, ...], optimizer: tuple[str, ...]) -> None:
    s = training_strategy(zero=zero, sequence=True)
    assert s.stored(("D", "F"), "weights") == Sharding((SHARED, ("tensor",)))
    assert s.stored(("D", "F"), "gradients") == Sharding((gradients, ("tensor",)))
    assert s.stored(("D", "F"), "optimizer") == Sharding((optimizer, ("tensor",)))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_axes_that_are_not_fully_sharded_follow_zero_as_data_does(zero: int) -> None:
    s = training_strategy(zero=zero, fully_sharded=False)
    everything = (*SHARED, "data")
    assert s.stored(("D", "F"), "weights") == Sharding((("fsdp",), ("tensor",)))
    assert s.stored(("D", "F"), "gradients") == Sharding((everything if zero == 2 else ("fsdp",), ("tensor",)))
    assert s.stored(("D", "F"), "optimizer") == Sharding((everything if zero else ("fsdp",), ("tensor",)))


@pytest.mark.parametrize(
    ("experts", "split"),
    [
        (("Fe",), (("expert",), ("fsdp", "context", "ulysses"), ("tensor",))),
        (("Fe", "C"), (("expert",), ("fsdp", "context", "ulysses"), ("tensor",))),
        (("E", "C"), (("expert", "tensor"), ("fsdp", "context", "ulysses"), ())),
    ],
)
def test_experts_are_dealt_out_and_shared_by_the_other_replicas(
    experts: tuple[str, ...], split: tuple[tuple[str, ...], ...]
) -> None:
    """Expert data parallelism: all replicas but those along the axis of the experts themselves."""
    assert training_strategy(experts=experts).stored(("E", "D", "Fe"), "weights") == Sharding(split)


def test_a_mesh_axis_may_have_any_name() -> None:
    assert (fsdp("X") | tensor("Y")).stored(("F", "D"), "weights") == Sharding((("Y",), ("X",)))


@every("name", model_names())
def test_nearly_all_of_a_real_model_is_shared_out(name: str) -> None:
    """What stays whole on every device of an FSDP group is vectors: less than 0.1 % of the parameters."""
    program = load_model(name).train_program()
    s = training_strategy(zero=1, sequence=True)
    whole = shared = 0.0
    for block in program:
        for t in block.weights:
            split = {m for axes in s.stored(t.axes, "weights").splits for m in axes}
            size = block.repeat * t.elements(program.sizes)
            if "fsdp" in split:
                shared += size
            else:
                whole += size
    assert whole < 1e-3 * shared
