"""What is trained: how it is written, what is refused, and exact counts of adapters' parameters."""

import pytest
from pydantic import ValidationError

from meshwise.core.backward import backward
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.core.tensors import Einsum, Elementwise, Kind
from meshwise.jobs import TrainingJob, narrowed, parse_fine_tuning, parse_precision, trainable_parameters, with_adapters
from meshwise.models import load_model, model_names


def adapted(model, text):
    return with_adapters(load_model(model).train_program(), parse_fine_tuning(text))


def test_defaults():
    t = parse_fine_tuning("lora")
    assert (t.method, t.rank, t.targets, t.storage, t.full) == ("lora", 16, ("all",), "", False)
    assert parse_fine_tuning("qlora").storage == "nf4"
    assert parse_fine_tuning(" full ").full


@pytest.mark.parametrize(
    ("model", "text", "count"),
    [
        # Published counts of the same adapters: LLaMA-3-8B and 70B on all linear layers, LLaMA-2-7B on q and v.
        ("llama-3-8b", "lora:rank=16", 41_943_040),
        ("llama-3-70b", "qlora:rank=16", 207_093_760),
        ("llama-2-7b", "lora:rank=8,targets=q+v", 4_194_304),
        ("llama-2-7b", "lora:rank=64", 159_907_840),
        # By hand: 32 layers of q, k, v, o; and of gate, up, down.
        ("llama-3-8b", "lora:rank=4,targets=attention", 32 * 4 * (2 * 8192 + 2 * 5120)),
        ("llama-3-8b", "lora:rank=4,targets=mlp", 32 * 4 * 3 * (4096 + 14336)),
        ("llama-3-8b", "lora:rank=4,targets=o+down", 32 * 4 * (8192 + 14336 + 4096)),
        # Every expert has adapters of its own; the router has none.
        ("mixtral-8x7b", "lora:rank=16,targets=experts", 32 * 8 * 16 * 3 * (4096 + 14336)),
        ("mixtral-8x7b", "lora:rank=16", 32 * 16 * (8 * 3 * (4096 + 14336) + 2 * 8192 + 2 * 5120)),
    ],
)
def test_trainable_parameters(model, text, count):
    assert trainable_parameters(adapted(model, text)) == count


def test_the_model_itself_stays_as_it_is():
    model = load_model("llama-3-8b")
    program = model.train_program()
    assert with_adapters(program, parse_fine_tuning("full")) is program
    assert trainable_parameters(program) == model.parameters.total
    for text in ("lora", "qlora"):
        assert adapted("llama-3-8b", text).parameters() == model.parameters.total + 41_943_040


@pytest.mark.parametrize("text", ["lora:rank=8", "qlora:rank=8", "lora:rank=8,targets=q+down"])
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gpt2"])
def test_only_adapters_have_gradients(model, text):
    if model == "gpt2" and "q+" in text:
        text = "lora:rank=8,targets=mlp"
    for block in adapted(model, text):
        adapters = {t.name for t in block.weights if not t.frozen}
        gradients = {op.output.name for op in backward(block) if op.output.kind is Kind.GRADIENT}
        assert gradients == {f"d_{name}" for name in adapters}
        assert bool(adapters) == (block.role == "layer")


@pytest.mark.parametrize("name", model_names())
def test_every_model_of_the_catalog_takes_adapters_and_narrow_formats(name):
    program = load_model(name).train_program()
    jobs = [with_adapters(program, parse_fine_tuning(text)) for text in ("lora", "qlora")]
    for changed in (*jobs, narrowed(program, parse_precision("fp8-block"))):
        for block in changed:
            read = {t.name: t for op in block.ops for t in op.inputs if t.kind is Kind.WEIGHT}
            gradients = {op.output.name for op in backward(block) if op.output.kind is Kind.GRADIENT}
            assert {f"d_{n}" for n, t in read.items() if not t.frozen} <= gradients


def test_a_frozen_projection_costs_four_of_six():
    program = adapted("llama-3-8b", "lora:rank=8")
    sizes = program.bind(batch=1, queries=64)
    (layer,) = (b for b in program if b.role == "layer")

    def flops(ops, adapters):
        found = [op for op in ops if isinstance(op, Einsum) and adapters == any("Ra" in t.axes for t in op.tensors)]
        return sum(op.flops(sizes) for op in found)

    back = backward(layer)
    assert flops(back, adapters=False) == flops(layer.ops, adapters=False)
    assert flops(back, adapters=True) == 2 * flops(layer.ops, adapters=True)
    assert flops(layer.ops, adapters=True) == 2 * 64 * 41_943_040 / 2 / 32
    joins = [op for op in layer.ops if isinstance(op, Elementwise) and op.joins]
    assert [op.output.name for op in joins] == ["q", "k", "v", "o", "gate", "up", "down"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lroa", r"unknown fine-tuning 'lroa'\..*Known: full, lora, qlora\. Such as lora:rank=16"),
        ("lora:rank=16,storage=nf4", r"unknown option of lora 'storage'"),
        ("full:rank=4", r"unknown option of full 'rank'"),
        ("lora:rank", r"expected name=value after lora:, found 'rank' in 'lora:rank'"),
        ("lora:", r"expected name=value after lora:, found ''"),
        ("lora:rank=0", r"expected a rank from 1 to 65,536, found '0'"),
        ("lora:rank=1.5", r"expected a rank from 1 to 65,536, found '1\.5'"),
        ("lora:rank=4,rank=8", r"rank is given twice in 'lora:rank=4,rank=8'"),
        ("lora:alpha=0", r"expected alpha to be a number above 0, found '0'"),
        ("lora:alpha=inf", r"expected alpha to be a number above 0, found 'inf'"),
        ("lora:targets=router", r"unknown fine-tuning target 'router'"),
        ("qlora:storage=nf5", r"unknown storage of frozen weights 'nf5'\. .*nf4"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises((MeshwiseError, UnknownNameError), match=words):
        parse_fine_tuning(text)


def test_targets_must_exist():
    with pytest.raises(MeshwiseError, match=r"the model has no projection of experts; use targets=all"):
        adapted("llama-3-8b", "lora:targets=experts")


def test_a_narrow_precision_is_refused():
    with pytest.raises(
        ValidationError, match=r"fine_tune 'lora': frozen weights .* found precision 'fp8'; use bf16 or"
    ):
        TrainingJob(batch_tokens="4Mi", seq_len="4096", precision="fp8", fine_tune="lora")


def test_a_tower_is_frozen_beside_adapters() -> None:
    program = with_adapters(load_model("qwen3-vl-8b").train_program(), parse_fine_tuning("lora:rank=4"))
    towers = [t for block in program for t in block.idle]
    assert towers
    assert all(t.frozen for t in towers)
