"""The derived backward pass, on the layers of every kind of model: FLOPs, order, and one gradient a weight."""

from __future__ import annotations

from meshwise.core.backward import backward
from meshwise.core.tensors import Attention, Block, Einsum, Elementwise, Kind, Op
from meshwise.models import load_model
from tests.each import each

#: Dense, tied, biased, parallel, post-norm, windowed; mixtures with and without shared experts; latent attention.
MODELS = [
    "llama-3-8b",
    "gpt2",
    "falcon-7b",
    "opt-350m",
    "gemma-3-4b",
    "gpt-oss-120b",
    "glm-4.5-air",
    "deepseek-v3",
    "olmo-2-7b",
]


def blocks() -> list[tuple[str, Block, dict[str, float]]]:
    cases = []
    for name in MODELS:
        program = load_model(name).train_program()
        cases += [(f"{name}:{b.name}", b, program.bind(batch=2, queries=64)) for b in program]
    return cases


CASES = blocks()
every_block = each("block, sizes", [c[1:] for c in CASES])


def einsum_flops(ops: tuple[Op, ...], sizes: dict[str, float]) -> float:
    return sum(op.flops(sizes) for op in ops if isinstance(op, Einsum))


@every_block
def test_einsums_cost_twice_what_they_cost_forward(block: Block, sizes: dict[str, float]) -> None:
    assert einsum_flops(backward(block), sizes) == 2 * einsum_flops(block.ops, sizes)


@every_block
def test_attention_costs_two_and_a_half_times(block: Block, sizes: dict[str, float]) -> None:
    def cost(ops: tuple[Op, ...]) -> float:
        return sum(op.flops(sizes) for op in ops if isinstance(op, Attention))

    assert cost(backward(block)) == 2.5 * cost(block.ops)


@every_block
def test_every_weight_gets_exactly_one_gradient_of_its_shape(block: Block, sizes: dict[str, float]) -> None:
    weights = {t.name: t.axes for op in block.ops for t in op.inputs if t.kind is Kind.WEIGHT}
    gradients = [op.output for op in backward(block) if op.output.kind is Kind.GRADIENT]
    assert {g.name: g.axes for g in gradients} == {f"d_{name}": axes for name, axes in weights.items()}
    assert len(gradients) == len(weights)


@every_block
def test_a_gradient_is_made_before_it_is_read_and_once(block: Block, sizes: dict[str, float]) -> None:
    known = {t.name for op in block.ops for t in op.tensors} | {f"d_{name}" for name in block.outputs}
    made: set[str] = set()
    for op in backward(block):
        assert {t.name for t in op.inputs} <= known, f"{op.name} reads what nobody has made"
        assert op.output.name not in made, f"{op.output.name} is made twice"
        made.add(op.output.name)
        known.add(op.output.name)


@every_block
def test_every_gradient_of_an_activation_is_read_or_leaves_the_block(block: Block, sizes: dict[str, float]) -> None:
    ops = backward(block)
    read = {t.name for op in ops for t in op.inputs}
    leaving = {f"d_{name}" for name in block.inputs}
    for op in ops:
        assert op.output.kind is Kind.GRADIENT or op.output.name in read | leaving, f"{op.output.name} goes nowhere"


@every_block
def test_gradients_of_inputs_leave_the_block(block: Block, sizes: dict[str, float]) -> None:
    kinds = {t.name: t.kind for op in block.ops for t in op.inputs}
    made = {op.output.name for op in backward(block)}
    assert {f"d_{name}" for name in block.inputs if kinds[name] is not Kind.INDEX} <= made


def test_the_gradient_of_capped_logits_follows_from_what_the_cap_gave():
    (head,) = (b for b in load_model("gemma-2-2b").train_program() if b.role == "head")
    (op,) = (op for op in backward(head) if op.name.startswith("dscale.logits"))
    assert [t.name for t in op.inputs] == ["d_logits.scaled", "logits.scaled"]


def test_sums_pass_gradients_on_and_one_kernel_makes_those_of_an_activation():
    (layer,) = (b for b in load_model("gpt2").train_program() if b.role == "layer")
    made = {op.name: op for op in backward(layer) if isinstance(op, Elementwise)}
    free = {name for name, op in made.items() if op.free}
    assert {"dresidual.attn.x", "dresidual.mlp.x.mid", "dbias.up.up"} <= free
    assert not free & {"dbias.up.b_up", "add.x.mid", "dact.up.bias"}
    assert made["dnorm.attn.norm.attn.bias"].beside
    assert not made["dnorm.attn.norm.attn"].beside
    assert not made["dnorm.attn.x"].beside
    gated = {op.name: op for b in load_model("llama-3-8b").train_program() for op in backward(b)}
    assert [gated[f"dact.{name}"].beside for name in ("gate", "up")] == [False, True]
