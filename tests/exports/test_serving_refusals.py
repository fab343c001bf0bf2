"""No choice of serving is dropped in silence: it changes the text, or it is an error that names it and a way out."""

import re
from dataclasses import fields

import pytest

from meshwise.core.errors import HandoverError, UnknownNameError
from meshwise.costs.serving.answer import ServingSetup
from meshwise.exports.serving import SERVING_TARGETS, choices, hand_over_serving
from meshwise.jobs import ServingLoad
from meshwise.jobs.lengths import parse_lengths
from meshwise.jobs.mix import mix_lengths
from meshwise.sharding.serving import ServingLayout
from tests.exports.serving_plans import make_serving_plan

GPUS, TPUS = "h100:16", "v6e:16"

#: Field of a layout -> layouts, first without it, then with it.
VARIED = {
    "tensor": ["tensor=8", "tensor=4"],
    "cache": ["tensor=8", "tensor=8,cache=2,cache_split=sequence"],
    "cache_split": ["tensor=8,cache=2,cache_split=sequence", "tensor=8,cache=2,cache_split=batch"],
    "width": ["tensor=8", "tensor=4,width=2"],
    "fsdp": ["tensor=8", "tensor=4,fsdp=2"],
    "stage": ["tensor=8", "tensor=4,stage=2"],
    "replicas": ["tensor=8", "tensor=8,replicas=2"],
    "sequence_parallel": ["tensor=8", "tensor=8,sequence_parallel=on"],
}
MIXTURES = {
    "expert": ["tensor=8", "expert=8"],
    "expert_tensor_parallel": ["tensor=8", "tensor=8,expert_tensor_parallel=off"],
}

#: Field of a load -> values.
LOADS = {
    "prompt": [1024, 2048],
    "output": [256, 128],
    "cached_prefix": [0, 256],
    "precision": ["bf16", "fp8", "fp8-kv8", "int8", "int8-weights", "int4-weights", "kv=int8", "head=fp8"],
    "block_tokens": [16, 32],
    "reserve": [0.1, 0.2],
    "draft_tokens": [0, 2],
}


#: What follows from the prediction, and so from every choice, even one that is dropped.
PREDICTED = re.compile(
    r"predicted [\d.]+ \w+|(mem-fraction-static|free_gpu_memory_fraction:|max-concurrency|num-prompts|prompts-per-group"
    r"|max-num-seqs|max-running-requests|max_batch_size) [\d.]+"
)


def said(plan, engine, *, predictions=False):
    """The text without its header, which repeats the plan, but with the notes; or the error."""
    try:
        handed = hand_over_serving(plan, engine)
    except HandoverError as error:
        return str(error)
    text = handed.text[handed.text.index("set -eu") :] + "\n".join(handed.notes)
    return text if predictions else PREDICTED.sub("#", text)


def chips_of(engine):
    return TPUS if engine == "jetstream" else GPUS


def check_varied(texts):
    """Each text is another, or an error whose lines all name a way out."""
    for number, text in enumerate(texts):
        if "cannot express" not in text:
            assert text not in texts[:number]
        else:
            lines = text.splitlines()[1:]
            assert lines
            assert all("; nearest: " in line for line in lines)


@pytest.mark.parametrize("engine", SERVING_TARGETS)
@pytest.mark.parametrize("field", [*VARIED, *MIXTURES])
def test_a_layout_changes_the_text_or_is_refused(engine, field):
    model = "mixtral-8x7b" if field in MIXTURES else "llama-3-8b"
    layouts = (VARIED | MIXTURES)[field]
    check_varied([said(make_serving_plan(model, chips_of(engine), x, 16), engine) for x in layouts])


@pytest.mark.parametrize("engine", SERVING_TARGETS)
@pytest.mark.parametrize("field", LOADS)
def test_a_load_changes_the_text_or_is_refused(engine, field):
    plans = (make_serving_plan("llama-3-8b", chips_of(engine), "tensor=8", 16, **{field: v}) for v in LOADS[field])
    check_varied([said(plan, engine, predictions=field == "reserve") for plan in plans])


@pytest.mark.parametrize("engine", SERVING_TARGETS)
@pytest.mark.parametrize(("field", "value"), [("batch", 32), ("prefill_batch", 2), ("chunk", 256)])
def test_a_batch_changes_the_text_or_is_refused(engine, field, value):
    given = [{"batch": 16}, {"batch": 16, field: value}]
    plans = (make_serving_plan("llama-3-8b", chips_of(engine), "tensor=8", **g) for g in given)
    check_varied([said(plan, engine, predictions=field == "batch") for plan in plans])


@pytest.mark.parametrize("engine", SERVING_TARGETS)
def test_plain_plans_are_expressed(engine):
    plan = make_serving_plan("llama-3-8b", chips_of(engine), "tensor=8", 16)
    assert "cannot express" not in said(plan, engine)


def test_every_field_is_varied_or_named_here():
    assert {f.name for f in fields(ServingLayout)} == {*VARIED, *MIXTURES, "context", "context_method", "wires"}
    assert set(ServingLoad.model_fields) == {*LOADS, "mix", "context", "acceptance", "expert_imbalance"}
    assert {f.name for f in fields(ServingSetup)} == {
        "mode", "prefill", "decode", "batch", "prefill_batch", "chunk",
    }  # fmt: skip


def test_a_field_that_nobody_answers_for_is_refused(monkeypatch):
    plan = make_serving_plan("llama-3-8b", GPUS, "tensor=8", 16, block_tokens=32)
    monkeypatch.setitem(choices._ANSWERED, "layout", "")
    monkeypatch.setitem(choices._ANSWERED, "load", "")
    with pytest.raises(HandoverError) as error:
        hand_over_serving(plan, "vllm")
    for part in ("tensor=8: it is not handed over yet", "block_tokens=32: it is not handed over yet"):
        assert part in str(error.value)


def refused(engine, *args, **kwargs):
    with pytest.raises(HandoverError) as error:
        hand_over_serving(make_serving_plan(*args, **kwargs), engine)
    return str(error.value)


@pytest.mark.parametrize(
    ("engine", "layout", "words"),
    [
        ("vllm", "tensor=4,width=2", ("width=2: its weights are split one way", "nearest: tensor=8")),
        ("vllm", "fsdp=8", ("fsdp=8: it never gathers weights", "nearest: tensor=8")),
        ("sglang", "tensor=4,cache=2,cache_split=batch", ("cache_split=batch", "nearest: cache_split=sequence")),
        ("vllm", "tensor=4,cache=2,cache_split=sequence", ("8 key/value heads", "nearest: tensor=8 with cache")),
        ("tensorrt-llm", "tensor=4,cache=2,cache_split=sequence", ("Helix", "nearest: tensor=8")),
        ("jetstream", "tensor=4,stage=2", ("stage=2: its engine has no axis", "nearest: tensor=8")),
        ("jetstream", "tensor=16", ("8 of keys and values, do not divide over it", "nearest: tensor=8")),
        ("vllm", "tensor=5", ("32 heads", "nearest: tensor=4")),
    ],
)
def test_a_layout_is_refused_by_name_with_the_nearest(engine, layout, words):
    text = refused(engine, "llama-3-8b", "v5e:4x4" if engine == "jetstream" else "h100:40", layout, 16)
    for part in words:
        assert part in text


def test_chips_that_an_engine_is_not_written_for():
    assert "nearest: --to jetstream" in refused("vllm", "llama-3-8b", "v5e:8", "tensor=8", 16)
    assert "nearest: --to vllm" in refused("jetstream", "llama-3-8b", "h100:8", "tensor=8", 16)
    assert "nearest: --to jetstream on TPUs, --to vllm" in refused(
        "tensorrt-llm", "llama-3-8b", "mi300x:8", "tensor=8", 16
    )


def test_a_plan_that_does_not_fit():
    text = refused("vllm", "llama-3-8b", "h100:1", "tensor=1", 4096)
    assert "batch=4096: it does not fit in memory; nearest: --batch" in text


def test_two_layouts_in_one_engine():
    plan = make_serving_plan("llama-3-8b", "h100:8", "tensor=8", 16)
    other = make_serving_plan("llama-3-8b", "h100:8", "fsdp=8", 16)
    setup = ServingSetup("aggregated", other.setup.decode, plan.setup.decode, 16)
    object.__setattr__(plan.estimate, "setup", setup)
    with pytest.raises(HandoverError, match="its engines have one layout for both; nearest: estimate serve --layout"):
        hand_over_serving(plan, "vllm")


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", "NIXL hands caches to engines without a pipeline"),
        (
            "jetstream",
            "mode=disaggregated: its servers with engines apart are experimental; nearest: --mode aggregated",
        ),
    ],
)
def test_engines_apart(engine, words):
    on = "v5e:4x4" if engine == "jetstream" else GPUS
    assert words in refused(engine, "llama-3-8b", on, "tensor=4,stage=2", 16, prefill="tensor=4")


def test_context_splits_prompts_of_engines_apart():
    plan = make_serving_plan("llama-3-8b", GPUS, "tensor=4", 16, prefill="tensor=4,context=2")
    assert "--prefill-context-parallel-size 2" in hand_over_serving(plan, "vllm").text
    for engine in ("sglang", "tensorrt-llm"):
        with pytest.raises(HandoverError, match=r"context=2: .*; nearest: tensor=8"):
            hand_over_serving(plan, engine)
    ring = make_serving_plan("llama-3-8b", GPUS, "tensor=4", 16, prefill="tensor=4,context=2,context_method=ring")
    with pytest.raises(HandoverError, match="it gathers keys and values"):
        hand_over_serving(ring, "vllm")


def test_experts_and_tensor_together():
    both = "expert=4,tensor=2"
    text = refused("vllm", "mixtral-8x7b", GPUS, both, 16)
    assert "expert_tensor_parallel=on" in text
    assert "nearest: expert_tensor_parallel=off" in text
    assert "nearest: expert=8, or tensor=8" in refused("tensorrt-llm", "mixtral-8x7b", GPUS, both, 16)
    plan = make_serving_plan("mixtral-8x7b", GPUS, f"{both},expert_tensor_parallel=off", 16)
    assert "--enable-expert-parallel" in hand_over_serving(plan, "vllm").text
    notes = " ".join(hand_over_serving(plan, "sglang").notes)
    assert "parts without experts over all ranks" in notes


def test_experts_that_do_not_divide():
    assert "8 experts do not divide" in refused("sglang", "mixtral-8x7b", "h100:6", "expert=3", 16)


def test_an_engine_that_is_not_known():
    plan = make_serving_plan("llama-3-8b", "h100:8", "tensor=8", 16)
    with pytest.raises(UnknownNameError, match="vllm"):
        hand_over_serving(plan, "vlm")


def test_every_choice_of_both_kinds_of_engines_is_named_once():
    text = refused("vllm", "llama-3-8b", GPUS, "tensor=4,width=2", 16, prefill="tensor=4,width=2")
    assert text.count("width=2: its weights") == 1


def test_what_a_checkpoint_must_be():
    bf16 = make_serving_plan("deepseek-v3", "h200:32", "expert=16", 64)
    text = hand_over_serving(bf16, "sglang").text
    assert "--quantization" not in text
    assert 'MODEL="${MODEL:?a checkpoint in bf16}"' in text
    fp8 = make_serving_plan("deepseek-v3", "h200:16", "expert=16", 64, precision="fp8")
    assert "${MODEL:-deepseek-ai/DeepSeek-V3}" in hand_over_serving(fp8, "sglang").text
    int4 = make_serving_plan("deepseek-v3", "h200:16", "expert=16", 64, precision="int4-weights")
    assert "the published one is fp8" in hand_over_serving(int4, "vllm").text
    dense = make_serving_plan("llama-3-8b", "h100:8", "tensor=8", 16, precision="fp8")
    assert "--quantization fp8_per_tensor" in hand_over_serving(dense, "vllm").text


def test_drafts():
    own = make_serving_plan("deepseek-v3", "h200:16", "expert=16", 64, precision="fp8", draft_tokens=1)
    assert '"method": "mtp"' in hand_over_serving(own, "vllm").text
    assert "--speculative-algorithm NEXTN" in hand_over_serving(own, "sglang").text
    assert 'decoding_type: "MTP"' in hand_over_serving(own, "tensorrt-llm").text
    other = make_serving_plan("llama-3-8b", "h100:8", "tensor=8", 16, draft_tokens=2, acceptance=0.5)
    assert 'DRAFT="${DRAFT:?a draft model}"' in hand_over_serving(other, "vllm").text
    notes = " ".join(hand_over_serving(other, "vllm").notes)
    assert '"synthetic_acceptance_rates": [0.5, 0.25]' in notes
    with pytest.raises(HandoverError, match="draft_tokens=2: it does not speculate"):
        hand_over_serving(make_serving_plan("llama-3-8b", "v5e:8", "tensor=8", 16, draft_tokens=2), "jetstream")
    stages = make_serving_plan("llama-3-8b", "h100:8", "tensor=4,stage=2", 16, draft_tokens=2)
    with pytest.raises(HandoverError, match="drafts of EAGLE's kind"):
        hand_over_serving(stages, "sglang")


def mixed(prompt, output, on="h100:8", **load):
    mix = mix_lengths(parse_lengths(prompt), parse_lengths(output))
    lengths = {"prompt": mix.mean_prompt, "output": mix.mean_output, "mix": mix}
    return make_serving_plan("llama-3-8b", on, "tensor=8", 16, **lengths, **load)


def test_lengths_that_are_uniform_are_drawn_by_vllm():
    handed = hand_over_serving(mixed("uniform:512-1536", "uniform:64-192", cached_prefix=256), "vllm")
    assert "--max-model-len 1728" in handed.text
    assert "--random-input-len 768" in handed.text
    assert "--random-output-len 128" in handed.text
    # 256 ... 1280 new tokens are 768 (1 - r) ... 768 (1 + r)
    assert """--random-range-ratio '{"input": 0.666667, "output": 0.5}'""" in handed.text
    assert not any("mean length" in note for note in handed.notes)
    equal = hand_over_serving(mixed("uniform:512-1536", "uniform:64-192"), "tensorrt-llm")
    assert "--random-range-ratio 0.5" in equal.text


@pytest.mark.parametrize("engine", SERVING_TARGETS)
def test_lengths_that_cannot_be_drawn_are_noted(engine):
    plan = mixed("lognormal:1024:1.0:4096", "256", on="v6e:8" if engine == "jetstream" else "h100:8")
    handed = hand_over_serving(plan, engine)
    assert any("requests of the mean length, the plan has prompts lognormal" in note for note in handed.notes)
    assert str(plan.problem.load.longest)[:-2] in handed.text
    if engine == "jetstream":
        assert "max_prefill_predict_length=4096" in handed.text


def test_many_requests_of_a_rank_are_told_to_deepep():
    plan = make_serving_plan("deepseek-v3", "h200:16", "expert=16", 16 * 160, precision="fp8")
    assert "MAX_DISPATCH_TOKENS_PER_RANK=160 " in hand_over_serving(plan, "sglang").text


def test_ranks_that_lie_otherwise_are_noted():
    plan = make_serving_plan("llama-3-70b", "h100:16", "tensor=2,stage=8", 16)
    wired = plan.setup.decode.replace(wires=(("tensor", (1, 2)), ("stage", (8, 1))))
    assert wired.wires != plan.setup.decode.wires
    setup = ServingSetup("aggregated", wired, wired, 16)
    object.__setattr__(plan.estimate, "setup", setup)
    assert "order the hosts so" in " ".join(hand_over_serving(plan, "vllm").notes)


def test_jetstream_refuses_the_format_that_differs():
    plan = make_serving_plan("llama-3-8b", TPUS, "tensor=8", 16, precision="weights=bf16,head=fp32")
    assert "head=fp32: it computes in one format throughout; nearest: head=bf16" in said(plan, "jetstream")
