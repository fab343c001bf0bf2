"""Adapters beside frozen weights, on any layout: the losses and gradients of one device, which the full model gives.

With y = x W + s (x A) B a model is that of the weights W + s A B, and by the chain rule the gradients of A and B are
s dW B^T and s A^T dW, where dW is the gradient of those weights: so no code of adapters stands on the expected side.
"""

import re
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

import meshwise
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.runtime import generator
from meshwise.runtime.saved import find_weights, saved_weights
from meshwise.runtime.weights import open_weights
from meshwise.sharding.layout import Layout
from tests.runtime import test_chunked_loss, test_models, test_pipeline
from tests.runtime.steps import batch_of, by_path, dense, make, state_of, weights_of, worst
from tests.runtime.test_ragged import MIXTURE
from tests.runtime.test_strategies import LAYOUTS

TUNING = "lora:rank=4,alpha=8"
SCALE = 2.0


def sides(up, w, a, b):
    """W, A and B as matrices in one stack: [layers x experts, in, out], [.., in, rank], [.., rank, out]; B is `up`."""
    stack = len(up.stack) + up.tensor.axes.index("Ra")
    lead, entering, rank = (int(np.prod(sizes)) for sizes in (a.shape[:stack], a.shape[stack:-1], a.shape[-1:]))
    return w.reshape(lead, entering, -1), a.reshape(lead, entering, rank), b.reshape(lead, rank, -1)


def adapted_weights(step):
    """As `weights_of`, with what adapters give a part of what their weights do: nothing but rounding is to differ."""
    drawn = weights_of(step)
    return {key: {n: w / 4 if n.endswith(".b") else w for n, w in run.items()} for key, run in drawn.items()}


@cache
def expected(model, sequences, fine_tune=TUNING, length=16):
    """Loss and gradients of the adapters, by the full model of one device and the merged weights."""
    step = make(model, Layout(micro_batch=sequences, remat="none"), length, fine_tune=fine_tune)
    full = make(model, Layout(micro_batch=sequences, remat="none"), length)
    own = jax.tree.map(np.asarray, adapted_weights(step))
    adapted = [(key, name) for key, run in own.items() for name in run if f"{name}.a" in run]
    merged = {key: {n: w for n, w in run.items() if n[-2:] not in (".a", ".b")} for key, run in own.items()}
    for key, name in adapted:
        w, a, b = sides(
            step.parameters[key][f"{name}.b"],
            *(own[key][n].astype(np.float64) for n in (name, f"{name}.a", f"{name}.b")),
        )
        merged[key][name] = (w + SCALE * a @ b).reshape(own[key][name].shape).astype(np.float32)
    loss, gradients = full.gradients(merged, batch_of(full))
    found = {}
    for key, name in adapted:
        made = np.asarray(gradients[key][name], np.float64)
        dw, a, b = sides(step.parameters[key][f"{name}.b"], made, own[key][f"{name}.a"], own[key][f"{name}.b"])
        for letter, value in (("a", SCALE * dw @ b.swapaxes(1, 2)), ("b", SCALE * a.swapaxes(1, 2) @ dw)):
            found.setdefault(key, {})[f"{name}.{letter}"] = value.reshape(own[key][f"{name}.{letter}"].shape)
    return float(loss), by_path(step, found)


def check(model, layout, fine_tune=TUNING, **job):
    step = make(model, layout, fine_tune=fine_tune, **job)
    loss, gradients = step.gradients(adapted_weights(step), batch_of(step))
    least, wanted = expected(model, layout.sequences, fine_tune)
    assert float(loss) == pytest.approx(least, rel=1e-5)
    assert worst(by_path(step, gradients), wanted) < 2e-5  # of products of gradients, rounded once more


#: Slow because each is a compiled program, and proves the same of another way to split.
QUICK = ("replicas",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in LAYOUTS])
def test_loss_and_gradients_of_adapters_are_those_of_one_device(name):
    check(dense(), Layout(**LAYOUTS[name]))


#: Three of stages, then every kind of attention and of mixture; each is a compiled program.
SPLIT = {
    **{name: (dense(test_pipeline.FOUR), test_pipeline.LAYOUTS[name]) for name in ("1f1b-fsdp", "gpipe-whole")},
    "interleaved": (dense(test_pipeline.FOUR.replace("L=4", "L=8")), test_pipeline.LAYOUTS["interleaved"]),
    "stages-of-experts": (test_models.model("gpt_oss"), {"stage": 2, "expert": 2, "fsdp": 2, "num_microbatches": 2}),
    "chunked": (test_models.model("gemma3"), {**test_chunked_loss.LAYOUTS["capped-tied"][1], "loss": "chunked"}),
    "ragged": (dense(MIXTURE), {"fsdp": 2, "tensor": 2, "expert_dispatch": "ragged"}),
    **{name: (test_models.model(of), choices) for name, (of, choices) in test_models.SPLIT.items()},
}


@pytest.mark.slow  # more compiled programs: stages, windows, latents, sinks and experts have code of their own
@pytest.mark.parametrize("name", SPLIT)
def test_adapters_of_every_kind_of_layer_and_of_stages(name):
    model, choices = SPLIT[name]
    check(model, Layout(**choices))


@pytest.mark.slow  # three more: targets that some layers lack, and projections without adapters between others
@pytest.mark.parametrize(
    ("of", "targets", "choices"),
    [
        ("deepseek_v3", "experts", {"expert": 4, "tensor": 2, "expert_tensor_parallel": False, "num_microbatches": 2}),
        ("gpt_oss", "q+v", {"fsdp": 4, "tensor": 2, "num_microbatches": 2}),
        ("gpt2", "down", {"stage": 2, "fsdp": 2, "tensor": 2, "num_microbatches": 4}),
    ],
)
def test_some_projections_alone(of, targets, choices):
    check(test_models.model(of), Layout(**choices), f"{TUNING},targets={targets}")


def mixed(**choices):
    return make(dense(), Layout(**choices), fine_tune=TUNING, precision="mixed")


def test_frozen_weights_are_held_as_the_plan_counts_them():
    """In the format of weights, split as these are; without master copy and moments."""
    state = mixed(fsdp=4, tensor=2).abstract_state
    assert {a.dtype.name for a in jax.tree.leaves(state["weights"])} == {"bfloat16"}
    assert state["weights"]["layer"]["w_gate"].sharding.shard_shape((3, 32, 64)) == (3, 8, 32)
    own = {"layer": {f"w_{n}.{side}" for n in ("q", "k", "v", "o", "gate", "up", "down") for side in "ab"}}
    for tree in (state["master"], *state["moments"].values()):
        assert {key: set(run) for key, run in tree.items()} == own
        assert {a.dtype.name for a in jax.tree.leaves(tree)} == {"float32"}


def test_adapters_begin_as_none():
    """A is drawn by the width that it sums, B is zero (Hu et al. 2021, 4.1): the first loss is the model's own."""
    step, full = mixed(fsdp=2), make(dense(), Layout(fsdp=2), precision="mixed")
    state = step.initial_state(3)
    own, master = state["weights"]["layer"], state["master"]["layer"]
    assert not np.any(np.asarray(master["w_q.b"]))
    assert np.asarray(master["w_down.a"]).std() == pytest.approx(64**-0.5, rel=0.1)
    np.testing.assert_array_equal(np.asarray(own["w_down.a"]), np.asarray(master["w_down.a"].astype(own["w_q"].dtype)))
    batch = batch_of(step)
    assert float(step.loss(state["weights"], batch)) == float(full.loss(full.initial_state(3)["weights"], batch))


@pytest.mark.jax
@pytest.mark.parametrize(
    "choices", [{"fsdp": 2, "tensor": 2, "num_microbatches": 2}, {"stage": 3, "fsdp": 2, "num_microbatches": 3}]
)
def test_steps_change_adapters_and_not_a_bit_of_anything_else(choices):
    step = mixed(**choices)
    step = replace(step, constants=replace(step.constants, clip=0.5, learning_rate=0.01))
    before = jax.tree.map(np.asarray, state_of(step)["weights"])
    state, batch, losses = state_of(step), batch_of(step), []
    for _ in range(3):
        state, metrics = step.jitted(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert float(metrics["gradient_norm"]) > 0
    for key, run in state["weights"].items():
        for name, w in run.items():
            same = np.array_equal(np.asarray(w), before[key][name])
            assert same is step.parameters[key][name].tensor.frozen, name
    shardings = jax.tree.map(lambda a: a.sharding, step.abstract_state)
    assert jax.tree.all(jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), state, shardings))


@pytest.mark.jax
def test_a_program_makes_no_gradients_of_frozen_weights():
    """What it holds besides its arguments is less than one more copy of the weights."""
    step = make(dense("D=64 F=256 L=8 N=4 K=4 H=16 V=64"), Layout(num_microbatches=4), fine_tune="lora:rank=2")
    held = step.jitted.lower(step.abstract_state, step.abstract_batch).compile().memory_analysis()
    weights = sum(4 * w.size for w in jax.tree.leaves(step.abstract_state["weights"]))
    assert held.alias_size_in_bytes > weights, "updated and passed on where they are"
    assert held.temp_size_in_bytes < 0.3 * weights


@pytest.mark.jax
def test_of_gradients_of_adapters_the_narrow_side_travels():
    """Streams are gathered as often as in full training: not again for an adapter whose result is split otherwise."""
    model, layout = dense("D=48 F=96 L=3 N=8 K=4 H=8 V=64"), Layout(fsdp=2, tensor=4, remat="full")
    steps = [make(model, layout, 40, fine_tune=tuning) for tuning in ("full", "lora:rank=4")]
    texts = [s.jitted.lower(s.abstract_state, s.abstract_batch).compile().as_text() for s in steps]
    full, own = (len(re.findall(r"= f32\[1,40,48\]\S* all-gather", text)) for text in texts)
    assert 0 < own <= full
    assert "= f32[1,40,4]" in texts[1]


TINY = "D=8 F=16 L=2 N=2 K=2 H=4 V=32"


def planned(fine_tune="lora:rank=2,alpha=4"):
    layout = "fsdp=2,remat=full,micro_batch=4,num_microbatches=1"
    asked = {"on": "h100:2", "batch_tokens": 64, "seq_len": 8, "layout": layout, "precision": "mixed"}
    return meshwise.estimate_train(TINY, **asked, fine_tune=fine_tune).plans[0]


@pytest.mark.jax
def test_a_plan_of_adapters_runs_resumes_generates_and_leaves_merged(tmp_path):
    plan, given = planned(), {"learning_rate": 0.05, "clip_gradients": 1.0}
    whole = meshwise.run_plan(plan, steps=6, **given)
    assert whole.losses[-1] < whole.losses[0]
    said = "fine-tuning: adapters of rank 2, scaled by 2, on all beside frozen weights; 544 trainable parameters"
    assert said in " ".join(str(whole).split())
    steps = tmp_path / "steps"
    first = meshwise.run_plan(plan, steps=3, checkpoint=str(steps), every=3, **given)
    second = meshwise.run_plan(plan, steps=6, checkpoint=str(steps), every=3, **given)
    assert first.losses + second.losses == whole.losses  # to the last bit
    with pytest.raises(MeshwiseError, match="fine_tune"):
        meshwise.run_plan(planned("lora:rank=2"), steps=9, checkpoint=str(steps), **given)
    saved = saved_weights(steps)
    names = ["w_q", "w_down", "norm.attn", "w_embed"]
    base, own = (saved.stored(n, "weights") for n in (names, [f"{n}.{s}" for n in names[:2] for s in "ab"]))
    merged = saved.arrays(names, "weights")
    for (block, name, number), w in base.items():
        found = merged[block, name, number]
        if name[2:] not in ("q", "down"):
            np.testing.assert_array_equal(found, w)
            continue
        a, b = (own[block, f"{name}.{side}", number].astype(np.float64) for side in "ab")
        expected = w.astype(np.float64) + 2 * np.tensordot(a, b, 1)
        assert np.abs(found.astype(np.float64) - expected).max() <= 2**-8 * np.abs(expected).max()
        assert not np.array_equal(found, w)
    meshwise.export_weights(steps, output=tmp_path / "model")
    made = generator(plan.problem.model, Layout(), jax.devices()[:1], sequences=1, length=8, dtype=DType.BF16)
    ours = made.load(find_weights(steps, plan.problem.model))
    published = made.load(open_weights(tmp_path / "model", plan.problem.model))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2**-7), ours, published)
    told = meshwise.generate(plan, tokens=4, prompt_tokens="1,2,3", weights=str(steps))
    again = meshwise.generate(plan, tokens=4, prompt_tokens="1,2,3", weights=str(tmp_path / "model"))
    assert told.tokens == again.tokens


@pytest.mark.jax
def test_a_run_begins_with_published_weights_in_which_nothing_changes(tmp_path):
    full = planned("full")
    meshwise.run_plan(full, steps=1, checkpoint=str(tmp_path / "base"), every=1)
    meshwise.export_weights(tmp_path / "base", output=tmp_path / "model")
    given = {"weights": str(tmp_path / "model"), "learning_rate": 0.05, "checkpoint": str(tmp_path / "steps")}
    meshwise.run_plan(planned(), steps=2, every=2, **given)
    base, tuned = (saved_weights(tmp_path / name) for name in ("base", "steps"))
    names = {t.name for block in full.problem.train_program() for t in block.weights}
    was, now = (saved.stored(names, "weights") for saved in (base, tuned))
    assert was.keys() == now.keys()
    for key, w in was.items():
        np.testing.assert_array_equal(now[key], w, err_msg=str(key))


def test_searches_offer_plans_of_adapters_and_say_why_not_of_four_bits():
    asked = {"on": "h100:8", "batch_tokens": "64Ki", "seq_len": 4096, "precision": "mixed", "tool": "meshwise"}
    found = meshwise.plan_train("llama-3.2-1b", **asked, fine_tune="lora:rank=8")
    assert found.plans[0].problem.job.fine_tune == "lora:rank=8"
    with pytest.raises(MeshwiseError, match="frozen weights in nf4 are planned, but not yet executed; use lora"):
        meshwise.plan_train("llama-3.2-1b", **asked, fine_tune="qlora:rank=8")
