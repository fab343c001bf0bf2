"""No choice is dropped in silence: it changes the text, or it is an error that names it and the nearest there is."""

from dataclasses import fields, replace

import pytest

from meshwise.core.errors import HandoverError, UnknownNameError
from meshwise.exports import TARGETS, choices, hand_over, shape
from meshwise.models import load_model, read_config
from meshwise.models.spec import (
    Architecture,
    Embedding,
    Head,
    LatentAttention,
    Layer,
    Mixture,
    Mlp,
    SelfAttention,
)
from meshwise.sharding.layout import Layout
from tests.each import each
from tests.exports.plans import TINY, TINY_MIXTURE, make_plan, tiny

#: For every tool a plan that it can express, on 64 chips.
PLAIN = {
    "maxtext": {"on": "v5p:4x4x4", "fsdp": 16, "tensor": 2, "data": 2, "remat": "matmuls"},
    "megatron": {"on": "h100-sxm:64", "tensor": 2, "data": 32, "zero": 1, "remat": "full"},
    "torchtitan": {"on": "h100-sxm:64", "fsdp": 16, "tensor": 2, "data": 2, "remat": "full"},
    "deepspeed": {"on": "h100-sxm:64", "data": 64, "zero": 1, "remat": "full"},
    "jax": {"on": "v5p:4x4x4", "fsdp": 16, "tensor": 2, "data": 2, "remat": "matmuls"},
}

#: Field of a layout -> changes of the plain plan in which it has an effect, first without it, then with it.
VARIED = {
    "data": [{"data": 64}, {"data": 32, "fsdp": 2}],
    "fsdp": [{"data": 64}, {"fsdp": 64}],
    "context": [{"fsdp": 64}, {"fsdp": 32, "context": 2}],
    "ulysses": [{"fsdp": 64}, {"fsdp": 32, "ulysses": 2}],
    "tensor": [{"fsdp": 64}, {"fsdp": 32, "tensor": 2}],
    "stage": [{"data": 64}, {"data": 32, "stage": 2, "num_microbatches": 2}],
    "zero": [{"data": 64, "zero": zero} for zero in (0, 1, 2)],
    "fully_sharded": [{"fsdp": 16, "context": 4, "fully_sharded": on} for on in (True, False)],
    "sequence_parallel": [{"fsdp": 32, "tensor": 2, "sequence_parallel": on} for on in (True, False)],
    "context_method": [{"fsdp": 16, "context": 4, "context_method": how} for how in ("gather", "ring")],
    "schedule": [
        {"data": 32, "stage": 2, "num_microbatches": 2, "schedule": schedule}
        for schedule in ("1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")
    ],
    "virtual_stages": [
        {"data": 32, "stage": 2, "num_microbatches": 2, "schedule": "interleaved", "virtual_stages": n} for n in (1, 2)
    ],
    "remat": [
        {"data": 64, "remat": remat} for remat in ("none", "matmuls", "attention", "full", "save:q+k", "recompute:mlp")
    ],
    "remat_layers": [{"data": 64, "remat": "full"}, {"data": 64, "remat": "full", "remat_layers": 2}],
    "offload": [
        {"fsdp": 64, "remat": "full", "offload": o} for o in ((), ("optimizer",), ("parameters",), ("activations",))
    ],
    "offload_layers": [
        {"fsdp": 64, "remat": remat, "offload": ("activations",), "offload_layers": n}
        for n, remat in ((4, "none"), (3, "none"), (2, "none"), (3, "full"))
    ],
    "loss": [{"fsdp": 64, "loss": way} for way in ("whole", "chunked")],
    "micro_batch": [{"fsdp": 64, "micro_batch": n} for n in (1, 2)],
    "num_microbatches": [{"fsdp": 64, "num_microbatches": n} for n in (1, 2)],
}  # fmt: skip
MIXTURES = {
    "expert": [{"fsdp": 64}, {"fsdp": 16, "expert": 4}],
    "expert_tensor_parallel": [
        {"fsdp": 16, "expert": 2, "tensor": 2, "expert_tensor_parallel": on} for on in (True, False)
    ],
}  # fmt: skip


def said(tool, model, changes):
    """The text without the header, which repeats the layout; or the error."""
    plain = {"on": PLAIN[tool]["on"], "remat": PLAIN[tool]["remat"]}
    plan = make_plan(model, **{**plain, **changes})
    try:
        text = hand_over(plan, tool).text
    except HandoverError as error:
        return str(error)
    return text.replace(str(plan.layout), "")


@each("tool", TARGETS)
@each("field", [*VARIED, *MIXTURES])
def test_a_choice_changes_the_text_or_is_refused(tool, field):
    model = tiny({**TINY_MIXTURE, "hidden_size": 1024}) if field in MIXTURES else tiny({**TINY, "hidden_size": 1024})
    texts = [said(tool, model, changes) for changes in (VARIED | MIXTURES)[field]]
    for number, text in enumerate(texts):
        if "cannot express" not in text:
            assert text not in texts[:number], f"{tool} drops {field} in silence"
        else:
            lines = text.splitlines()[1:]
            assert lines
            assert all("; nearest: " in line for line in lines)


@pytest.mark.parametrize("field", ["fully_sharded", "expert_tensor_parallel", "schedule", "context_method"])
def test_a_refusal_names_the_choice(field):
    refused = [
        text
        for tool in TARGETS
        for changes in (VARIED | MIXTURES)[field]
        if "cannot express" in (text := said(tool, tiny({**TINY_MIXTURE, "hidden_size": 1024}), changes))
    ]
    assert any(f"  - {field}=" in text for text in refused)


@pytest.mark.parametrize("tool", TARGETS)
def test_plain_plans_are_expressed(tool):
    plan = make_plan(tiny({**TINY, "hidden_size": 1024}), **PLAIN[tool])
    assert hand_over(plan, tool).text


def test_a_chip_that_a_tool_does_not_run_on_is_refused():
    plan = make_plan("llama-3-8b", "v5p:4x4x4", fsdp=64, remat="full")
    with pytest.raises(HandoverError, match="chip TPU v5p: it runs on chips of nvidia; nearest: --to maxtext, jax"):
        hand_over(plan, "megatron")
    assert hand_over(plan, "maxtext").text


def test_every_field_of_a_layout_is_answered_or_refused(monkeypatch):
    names = {f.name for f in fields(Layout)}
    assert names >= choices._ANSWERED
    assert {*VARIED, *MIXTURES, "wires"} == choices._ANSWERED
    monkeypatch.setattr(choices, "_ANSWERED", choices._ANSWERED - {"micro_batch"})
    plan = make_plan(tiny(), "h100-sxm:8", data=8, micro_batch=2)
    for tool in TARGETS:
        with pytest.raises(HandoverError, match="micro_batch=2: it is not handed over yet"):
            hand_over(plan, tool)


def test_a_field_of_a_job_that_nobody_answers_for_is_refused(monkeypatch):
    monkeypatch.setattr(choices, "_ANSWERED_OF_JOBS", choices._ANSWERED_OF_JOBS - {"optimizer"})
    plan = make_plan(tiny(), "h100-sxm:8", data=8, optimizer="sgd")
    with pytest.raises(HandoverError, match="optimizer=sgd: it is not handed over yet"):
        hand_over(plan, "jax")


@each("precision", ["bf16", "mixed", "fp16", "fp32", "bf16,gradients=fp32", "fp8", "fp8-block", "int8"])
@each("tool", TARGETS)
def test_a_precision_is_said_or_refused(tool, precision):
    plan = make_plan(tiny({**TINY, "hidden_size": 1024}), precision=precision, **PLAIN[tool])
    mixed = hand_over(make_plan(tiny({**TINY, "hidden_size": 1024}), **PLAIN[tool]), tool).text
    try:
        text = hand_over(plan, tool).text
    except HandoverError as error:
        text = str(error)
    assert ("cannot express" in text) == (f"  - precision={precision}: " in text)
    assert (text == mixed) == (precision == "mixed")


@pytest.mark.parametrize("tool", TARGETS)
def test_an_optimizer_is_said_or_refused(tool):
    def text(optimizer):
        plan = make_plan(tiny({**TINY, "hidden_size": 1024}), optimizer=optimizer, **PLAIN[tool])
        try:
            return hand_over(plan, tool).text
        except HandoverError as error:
            return str(error)

    texts = [text(o) for o in ("adamw", "adamw-8bit", "adafactor", "lion", "muon", "momentum", "sgd")]
    assert len(set(texts)) == len(texts)
    assert all("  - optimizer=" in t for t in texts if "cannot express" in t)


def test_megatron_shares_out_what_narrow_weights_need():
    narrow = {"on": "h100-sxm:8", "data": 8, "precision": "fp8"}
    assert "--fp8-param-gather" in hand_over(make_plan(tiny(), zero=1, **narrow), "megatron").text
    with pytest.raises(HandoverError, match="precision=fp8: it needs an optimizer whose state is shared out"):
        hand_over(make_plan(tiny(), zero=0, **narrow), "megatron")
    with pytest.raises(HandoverError, match="precision=fp16: its grouped experts need bf16"):
        hand_over(make_plan(tiny(TINY_MIXTURE), "h100-sxm:8", data=8, zero=1, precision="fp16"), "megatron")


def test_roles_that_make_up_a_preset_are_that_preset():
    spelled = make_plan(tiny(), "h100-sxm:8", data=8, precision="bf16,gradients=fp32,master=fp32")
    assert "--bf16" in hand_over(spelled, "megatron").text


def test_several_refusals_are_one_error():
    plan = make_plan(tiny(), "h100-sxm:8", data=4, stage=2, schedule="zb-h1", num_microbatches=2, precision="bf16")
    with pytest.raises(HandoverError) as caught:
        hand_over(plan, "torchtitan")
    message = str(caught.value)
    assert message.startswith("torchtitan cannot express 2 choices of this plan:\n")
    assert "schedule=zb-h1: of ours it runs" in message
    assert "nearest: schedule=zb-v" in message
    assert "precision=bf16" in message


def test_wires_that_ranks_do_not_follow_are_a_note_with_the_places():
    plan = make_plan(tiny(), "h100-sxm:16", data=4, tensor=4)
    swapped = replace(plan, layout=plan.layout.replace(wires=(("tensor", (2, 2)), ("data", (4, 1)))))
    assert not any("order the hosts" in note for note in hand_over(plan, "megatron").notes)
    (note,) = (n for n in hand_over(swapped, "megatron").notes if "order the hosts" in n)
    assert "tensor on nvlink 2 x" in note
    inner = make_plan(tiny(), "h100-sxm:16", data=2, tensor=4, stage=2, num_microbatches=2)
    crossed = (("tensor", (4, 1)), ("stage", (2, 1)), ("data", (1, 2)))
    assert "--use-tp-pp-dp-mapping" not in hand_over(inner, "megatron").text
    inner = replace(inner, layout=inner.layout.replace(wires=crossed))
    assert "--use-tp-pp-dp-mapping" in hand_over(inner, "megatron").text


@pytest.mark.parametrize(
    ("model", "tool", "why"),
    [
        ("gemma-3-27b", "megatron", "its layers are of several kinds"),
        ("gemma-3-27b", "maxtext", "its layers are of several kinds"),
        ("llama-4-maverick", "megatron", "kinds|take turns"),
        ("falcon-40b", "megatron", "it has parallel branches"),
        ("gpt-oss-120b", "maxtext", "kinds|decoder_block"),
        ("t5-11b", "megatron", "Architecture.encoder"),
        ("phi-4", "maxtext", "there is no decoder_block for phi3"),
    ],
)
def test_models_that_a_tool_cannot_describe_are_refused(model, tool, why):
    on = PLAIN[tool]["on"]
    with pytest.raises(HandoverError, match=why):
        hand_over(make_plan(model, on, fsdp=64, remat="full"), tool)


def test_what_a_description_of_a_model_has_beyond_the_tools_layers_is_refused():
    for kind in (Architecture, Embedding, Head, Layer, SelfAttention, LatentAttention, Mlp, Mixture):
        assert set(shape._ANSWERED[kind.__name__].split()) <= {f.name for f in fields(kind)}
    known = SelfAttention(heads=8, kv_heads=8, head_dim=8)
    assert shape._unanswered(known) == []
    assert shape._unanswered(replace(known, causal=False)) == ["SelfAttention.causal"]


def test_experts_on_a_dense_model_are_refused():
    with pytest.raises(HandoverError, match="expert=2: tiny has no experts"):
        hand_over(make_plan(tiny(), "h100-sxm:8", data=4, expert=2), "megatron")


def test_chips_of_two_devices_share_sequences_or_are_refused():
    for tool in ("jax", "maxtext"):
        with pytest.raises(HandoverError, match="2 devices of a chip split its sequences; nearest: micro_batch=2"):
            hand_over(make_plan(tiny(), "tpu7x:2x2x2", fsdp=8), tool)
    plan = make_plan(tiny(), "tpu7x:2x2x2", fsdp=4, tensor=2, micro_batch=2)
    code = hand_over(plan, "jax").text
    assert "AXES = {\n    'fsdp': 8,\n    'tensor': 2,\n}" in code
    assert "FACTORS = (('fsdp', 2), ('tensor', 2), ('fsdp', 4),)" in code
    with pytest.raises(HandoverError, match=r"fsdp on D = 64: .* is split into 128 equal parts"):
        hand_over(make_plan(tiny(), "tpu7x:4x4x4", fsdp=64, micro_batch=2), "jax")
    done = hand_over(plan, "maxtext")
    assert "ici_fsdp_parallelism: 8\n" in done.text
    assert "ici_tensor_sequence_parallelism: 2\n" in done.text
    assert "per_device_batch_size: 0.5\n" in done.text, "eight sequences on sixteen devices"
    with pytest.raises(HandoverError, match="it runs on chips of google"):
        hand_over(make_plan(tiny(), "trn2:16", fsdp=16), "maxtext")


@pytest.mark.parametrize(
    ("tool", "on", "layout", "why"),
    [
        ("maxtext", "v5p:4x4x4", {"data": 8, "fsdp": 8, "zero": 1}, "zero=1 with fsdp: replicas share out"),
        ("maxtext", "h100-sxm:64", {"fsdp": 32, "ulysses": 2}, "Ulysses is for TPUs, rings for TPUs and GPUs"),
        ("maxtext", "v5p:4x4x4", {"fsdp": 8, "ulysses": 8}, "ulysses=8: it divides key/value heads"),
        (
            "maxtext",
            "v5p:2x2x4*4",
            {"data": 4, "fsdp": 8, "ulysses": 2},
            "it stays inside a slice, of which",
        ),
        ("maxtext", "h100-sxm:24", {"fsdp": 8, "context": 3}, "context is even, and sequences divide by 6 and by 3"),
        ("deepspeed", "h100-sxm:64", {"data": 8, "fsdp": 8}, "ZeRO-3 shares them out over all data-parallel ranks"),
    ],
)
def test_what_releases_of_tools_refuse_is_refused(tool, on, layout, why):
    model = tiny({**TINY, "hidden_size": 1024})
    with pytest.raises(HandoverError, match=why):
        hand_over(make_plan(model, on, remat="full", **layout), tool)


def test_ulysses_goes_with_experts_or_with_zero_3():
    plan = make_plan(tiny(TINY_MIXTURE), "h100-sxm:64", fsdp=8, expert=4, ulysses=2, remat="full")
    with pytest.raises(HandoverError, match="ulysses=2 with ZeRO 3: AutoEP goes with one of them"):
        hand_over(plan, "deepspeed")


def test_pipelines_of_maxtext_have_layers_of_one_kind():
    plan = make_plan("deepseek-v3", "v5p:4x4x4", expert=32, stage=2, num_microbatches=2, schedule="gpipe")
    with pytest.raises(HandoverError, match="its pipelines leave out the layers before those with experts"):
        hand_over(plan, "maxtext")


@pytest.mark.parametrize(
    ("on", "layout", "said"),
    [
        ("v5p:4x4x4", {"fsdp": 32, "context": 2, "context_method": "gather"}, {"context_parallel_strategy"}),
        (
            "v5p:4x4x4", {"fsdp": 32, "context": 2, "context_method": "ring"},
            {"context_parallel_strategy", "attention", "use_tokamax_splash"},
        ),
        (
            "v5p:4x4x4", {"fsdp": 32, "ulysses": 2},
            {"context_parallel_strategy", "attention", "use_tokamax_splash", "context_parallel_load_balance"},
        ),
        (
            "h100-sxm:64", {"fsdp": 32, "context": 2, "context_method": "ring"},
            {"hardware", "context_parallel_strategy", "attention", "max_segments_per_seq"},
        ),
        (
            "h100-sxm:64", {"fsdp": 32, "context": 2, "context_method": "gather"},
            {"hardware", "context_parallel_strategy", "attention", "packing"},
        ),
    ],
)  # fmt: skip
def test_maxtext_has_the_attention_that_goes_with_the_chip_and_the_split(on, layout, said):
    def keys(on, **layout):
        text = hand_over(make_plan(tiny({**TINY, "hidden_size": 1024}), on, remat="full", **layout), "maxtext").text
        return {line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha()}

    assert keys(on, **layout) - keys("v5p:4x4x4", fsdp=64) == said


def test_megatron_says_what_it_wants_of_the_environment():
    def line(on, **layout):
        text = hand_over(make_plan(tiny(), on, **layout), "megatron").text
        return next((line for line in text.splitlines() if "CUDA_DEVICE" in line), "")

    assert line("h100-sxm:8", data=4, tensor=2, zero=1) == "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    assert line("h100-sxm:8", fsdp=4, tensor=2) == "unset CUDA_DEVICE_MAX_CONNECTIONS"
    assert line("h100-sxm:8", data=8, zero=1) == line("b200:8", data=4, tensor=2, zero=1) == ""


def test_an_uneven_split_is_refused_by_jax():
    with pytest.raises(HandoverError, match=r"tensor on K = 4: layer/w_k is split into 8 equal parts"):
        hand_over(make_plan(tiny(), "v5p:2x2x2", tensor=8), "jax")


def test_an_unknown_tool_is_named():
    with pytest.raises(UnknownNameError, match="unknown tool 'megatrn'"):
        hand_over(make_plan(tiny(), "h100-sxm:8", data=8), "megatrn")


ROUTER_KEYS = ("scoring_func", "topk_method", "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob")


@pytest.mark.parametrize(("tool", "on"), [("megatron", "h100-sxm:64"), ("maxtext", "v5p:4x4x4")])
def test_a_router_that_the_file_does_not_describe_is_exported_as_it_is_priced(tool: str, on: str) -> None:
    whole = load_model("deepseek-v3")
    bare = read_config({k: v for k, v in whole.config.items() if k not in ROUTER_KEYS}, name=whole.name)
    said, unsaid = (hand_over(make_plan(m, on, fsdp=16, expert=4), tool).text for m in (whole, bare))
    assert said == unsaid
    assert "2.5" in said


def test_scores_that_are_not_normalised_are_said_or_refused() -> None:
    deepseek = hand_over(make_plan(load_model("deepseek-v2"), "h100-sxm:64", data=8, expert=8), "megatron").text
    assert "--moe-router-pre-softmax" in deepseek
    glm = read_config({**load_model("glm-4.5-air").config, "norm_topk_prob": False}, name="glm")
    with pytest.raises(HandoverError, match="sigmoid scores that are not normalised"):
        hand_over(make_plan(glm, "h100-sxm:64", data=8, expert=8), "megatron")
