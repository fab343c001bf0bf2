"""Words for rematerialisation and offloading, as sources write them, as choices of a layout."""

import pytest

from meshwise.core.errors import MeshwiseError
from meshwise.models import load_model
from meshwise.scoring import TrainingRun
from meshwise.scoring.recompute import read_recompute
from tests.each import each

BASE = {"id": "x", "n_chips": 8, "global_batch_seqs": 64, "seq_len": 8192, "measured_metric": "step_time",
        "measured_value": 2.0, "unit": "s", "chip": "h100-sxm"}  # fmt: skip


ONE = "names_which_can_be_offloaded=['decoder_layer_input']"


def read(words, model="llama-3-8b", **cells):
    choices, notes = {}, []
    read_recompute(TrainingRun(**BASE, recompute=words, **cells), load_model(model), choices, notes)
    return choices, notes


@each(
    "words, remat",
    [
        ("selective (config default)", "recompute:core_attn"),
        ("selective", "recompute:core_attn"),
        ("selective (core_attn, mlp)", "recompute:core_attn+mlp"),
        ("selective: core_attn, layernorm + sequence parallelism", "recompute:core_attn+layernorm"),
        ("core_attn, mlp", "recompute:core_attn+mlp"),
        ("recompute_modules=['layernorm', 'mlp']", "recompute:layernorm+mlp"),
        ("recompute: moe_act, mlp", "recompute:mlp"),  # a dense model has no moe_act
        ("selective op", "save:q+v+gate+down+attention"),
        ("selective (every 2 layers)", "full"),
        ("MaxText remat_policy=save_out_proj", "save:o"),
        ("MaxText remat_policy=save_dot_with_context_except_mlp", "save:q+k+v+attention+o"),
        ("save: q, k, v", "save:q+k+v"),
        ("full (block)", "full"),
        ("none [scripts @v0.3.0]", "none"),
        ("selective [layernorm, core_attn]", "recompute:layernorm+core_attn"),
        ("op-level selective AC", "save:q+v+gate+down+attention"),
        ("full AC", "full"),
        ("full activation checkpointing", "full"),
        ("activation checkpointing", "full"),
        ("granularity=full method=uniform num_layers=1", "full"),
        ("yes", "full"),
        ("no AC", "none"),
        ("without gradient checkpointing", "none"),
        ("off", "none"),
    ],
)
def test_lists_of_modules_and_of_operations(words, remat):
    choices, _ = read(words)
    assert choices["remat"] == remat
    assert "offload" not in choices


def test_every_second_layer_is_half_of_them():
    assert read("selective (every 2 layers)")[0]["remat_layers"] == 16


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("full, 12 of 32 layers", 12),
        ("last 20 of 32 layers", 20),
        ("25% of layers", 8),
        ("full (block, 2 layers)", 8),
        ("full: 3 layers per stage", 12),
        ("block 8", None),
    ],
)
def test_layers_that_are_counted_in_each_stage(words, layers):
    """Megatron-LM's method `block` counts in each piece of the pipeline: four here, of eight layers."""
    choices, notes = read(words, pp=4)
    assert (choices["remat"], choices.get("remat_layers")) == ("full", layers)
    assert ("4 pieces" in " ".join(notes)) == ("of" not in words)
    with pytest.raises(MeshwiseError, match="has 32 layers, found 40"):
        read("full, 12 of 40 layers")


def test_offloading_of_all_that_is_kept():
    assert read("selective + CPU offload")[0] == {"remat": "recompute:core_attn", "offload": ("activations",)}
    assert read("activation offloading")[0] == {"remat": "none", "offload": ("activations",)}
    assert read("full; offload activations of 8 layers")[0] == {
        "remat": "full", "offload": ("activations",), "offload_layers": 8
    }  # fmt: skip
    assert read("selective, no CPU offload")[0] == {"remat": "recompute:core_attn"}


def test_selective_of_torchtitan_chooses_operations():
    words = "save:q+v+gate+down+attention"
    assert read("selective (config default)", software="torchtitan 0.1")[0]["remat"] == words
    assert read("selective", software="torchtitan 0.1")[0]["remat"] == words


def test_modules_that_no_layer_has_are_left_out_and_said():
    assert "moe_act" in read("recompute: moe_act, mlp")[1][0]
    assert read("moe_act", "mixtral-8x7b") == ({"remat": "recompute:moe_act"}, [])
    assert read("moe_act")[0]["remat"] == "none"


@pytest.mark.parametrize(
    "words",
    [
        "custom(decoder_layer_input:offload, query_proj:remat, mlpwo:remat)",
        "MaxText remat_policy=custom (decoder_layer_input: offload)",
        f"save_and_offload_only_these_names(names_which_can_be_saved=[], {ONE}, offload_src='device')",
    ],
)
def test_only_inputs_of_layers_on_the_host_is_full_recomputation_with_all_that_is_kept_offloaded(words):
    assert read(words)[0] == {"remat": "full", "offload": ("activations",)}


def test_tensors_on_the_host_beside_others_are_as_many_layers():
    """LLaMA-3-8B: q, k, v are 6,144 values of a token, the input of the layer 4,096: 0.6 of 32 layers."""
    choices, notes = read("custom(qkv_proj:offload, decoder_layer_input:device)")
    assert choices == {"remat": "save:q+k+v", "offload": ("activations",), "offload_layers": 19}
    assert "19 of 32" in notes[0]
    assert read("MaxText remat_policy=qkv_proj_offloaded")[0] == choices
    choices, _ = read("save_and_offload_only_these_names(attention)")  # as wide as the input, which stays
    assert choices == {"remat": "save:attention", "offload": ("activations",), "offload_layers": 16}


def test_saved_and_offloaded_lists_are_told_apart():
    lists = "names_which_can_be_saved=['out_proj'], names_which_can_be_offloaded=['mlpwo']"
    choices, _ = read(f"save_and_offload_only_these_names({lists})")
    assert choices["remat"] == "save:o+down"
    assert choices["offload_layers"] == 11  # of three tensors of one width one goes


def test_a_budget_of_memory_leaves_it_to_the_compiler():
    choices, notes = read("activation memory budget 0.5")
    assert "remat" not in choices
    assert "chosen by the compiler" in notes[0]


@pytest.mark.parametrize("words", ["custom(anything:offload)", "custom(query_proj:disk)", "half"])
def test_words_without_a_meaning_are_refused(words):
    with pytest.raises(MeshwiseError, match="recompute"):
        read(words)
