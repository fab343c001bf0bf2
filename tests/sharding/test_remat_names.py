"""What users write after remat=, in our words, in JAX's and in Megatron-LM's."""

from __future__ import annotations

import pytest

from meshwise.core.errors import LayoutError, UnknownNameError
from meshwise.sharding.layout import Layout, parse_layout
from meshwise.sharding.remat_names import RematRequest, parse_remat


@pytest.mark.parametrize(
    ("text", "policy", "layers"),
    [
        ("full", "full", None),
        ("full:40", "full", 40),
        ("Matmuls:3", "matmuls", 3),
        ("selective", "selective", None),
        ("selective:12", "selective", 12),
        ("selective:core_attn+moe_act", "recompute:core_attn+moe_act", None),
        ("selective:mlp:5", "recompute:mlp", 5),
        ("save:q+k,v", "save:q+k+v", None),
        ("recompute:act+norm.attn:7", "recompute:act+norm.attn", 7),
        ("uniform", "full", None),
        ("uniform:1", "full", None),
        ("everything_saveable", "none", None),
        ("nothing_saveable", "full", None),
        ("dots_saveable", "matmuls", None),
        ("dots_with_no_batch_dims_saveable", "projections", None),
        ("save_only_these_names('q', 'k', \"attention\")", "save:q+k+attention", None),
        ("save_any_names_but_these(act):9", "recompute:act", 9),
    ],
)
def test_names(text: str, policy: str, layers: int | None) -> None:
    assert parse_remat(text) == RematRequest(policy, layers)


def test_block_counts_layers_of_each_stage() -> None:
    assert parse_remat("block:3") == RematRequest("full", 3, of_each_stage=True)
    read = parse_layout("stage=4,remat=block:3", num_chips=4).choices
    assert (read["remat"], read["remat_layers"]) == ("full", 12)
    read = parse_layout("stage=2,schedule=interleaved,vpp=3,recompute=block:2", num_chips=4).choices
    assert read["remat_layers"] == 2 * 2 * 3  # Megatron-LM counts those of each piece of a stage


def test_saving_and_offloading_names() -> None:
    read = parse_layout("fsdp=4,remat=save_and_offload_only_these_names('q', 'attention'),mbs=2", num_chips=4).choices
    assert read == {"remat": "save:q+attention", "offload": ("activations",), "micro_batch": 2}
    both = parse_layout("fsdp=4,remat=save_and_offload_only_these_names(q),offload=optimizer", num_chips=4).choices
    assert both["offload"] == ("optimizer", "activations")


def test_commas_within_a_list_belong_to_it() -> None:
    read = parse_layout("fsdp=4,remat=save:q,k,attention,micro_batch=2", num_chips=4).choices
    assert read == {"remat": "save:q+k+attention", "micro_batch": 2}
    read = parse_layout("remat=recompute:act , norm.mlp, fsdp:4", num_chips=4)
    assert (read.choices, read.sizes["fsdp"]) == ({"remat": "recompute:act+norm.mlp"}, 4)


def test_what_is_printed_reads_back() -> None:
    layout = Layout(fsdp=4, remat="recompute:act+norm.mlp", remat_layers=3, offload=("optimizer", "activations"))
    read = parse_layout(str(layout), num_chips=4)
    assert Layout(**read.sizes, **read.choices) == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("remat=uniform:4", "keeps one input for every 4 layers, which is not modelled"),
        ("remat=block", "remat=block needs the layers of each stage"),
        ("remat=full:x", "expected a number of layers after remat=full:, found 'x'"),
        ("remat=full:4:4", "expected remat=POLICY or remat=POLICY:LAYERS"),
        ("remat=none:4", "remat_layers=4 of remat=none recompute nothing"),
        ("remat=full:0", "remat_layers must be a whole number of at least 1, found 0"),
        ("remat=full:4,remat_layers=4", "remat_layers is given twice"),
        ("remat=save:", "expected names of operations"),
        ("offload=optimizer+optimizer", "offload names a part twice"),
    ],
)
def test_words_for_what_has_no_meaning(text: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        parse_layout(text, num_chips=4)


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="unknown remat policy 'dots_savable'"):
        parse_remat("dots_savable")
