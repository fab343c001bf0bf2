"""Chapter "All the Transformer Math You Need to Know"."""

import pytest

from meshwise.core.backward import backward
from meshwise.core.tensors import Attention, Block, Einsum
from meshwise.costs.operation import parse_operation
from meshwise.costs.rules import find_rule
from meshwise.models import load_model
from tests.book.book_rows import answered, check, decoder

PROJECTIONS = ("q", "k", "v", "o")
GATED_MLP = ("gate", "up", "down")


def flops_of(text):
    return lambda row: parse_operation(text).flops(row.sizes)


def training_over_forward(row):
    multiply = Einsum.parse("multiply", "x[N, P] * w[P, M] -> y[N, M]", weights=("w",))
    block = Block("block", (multiply,), outputs=("y",))
    forward = block.flops(row.sizes)
    return (forward + sum(op.flops(row.sizes) for op in backward(block))) / forward


def block_of(model, name="layer"):
    return next(b for b in model.train_program() if b.name == name)


def training_flops(row, operations, block="layer"):
    """FLOPs of some matmuls of one block for the row's tokens, forward and backward."""
    model = row.model
    one = block_of(model, block)
    sizes = model.train_program().bind(batch=row["B"], queries=row["T"])
    ops = [op for op in (*one.ops, *backward(one)) if isinstance(op, Einsum)]
    return sum(op.flops(sizes) for op in ops if any(op.name == o or op.name.startswith(f"d{o}.") for o in operations))


def attention_flops(row, count):
    """FLOPs of one layer's attention in the convention of MFU: three times forward, what is computed again left out."""
    sizes = row.model.train_program().bind(batch=row["B"], queries=row["T"])
    return sum(3 * count(op, sizes) for op in block_of(row.model).ops if isinstance(op, Attention))


def share_that_a_causal_mask_leaves(row):
    model = load_model("llama-3-70b")
    sizes = model.train_program().bind(batch=1, queries=4096)
    op = next(op for op in block_of(model).ops if isinstance(op, Attention))
    return op.flops(sizes) / op.full_flops(sizes)


def per_layer(model, part):
    """Parameters of a part in one layer: what a second layer adds."""
    count = model.parameters.by_part[part]
    assert model.num_layers == 80
    return count / 80


def norms_per_layer(row):
    two, one = (decoder(D=row["D"], L=layers).parameters.by_part["norms"] for layers in (2, 1))
    return two - one


def vocabulary_table(row):
    """The book's table has 12 B T D V FLOPs for the vocabulary; its text, and this model, 6: a lookup has none."""
    parameters = row.model.parameters.by_part["head"]
    return training_flops(row, ("lm_head",), "head") / find_rule("train-flops").value(
        P=parameters, tokens=row["B"] * row["T"]
    )


def saved(row):
    return find_rule("saved-activations").value(
        tokens=row["tokens"], D=row["D"], L=row["L"], arrays=row["per_layer"], b=row["bytes"]
    )


def full_rematerialisation(row):
    """The forward pass of a block runs twice."""
    multiply = Einsum.parse("multiply", "x[N, P] * w[P, M] -> y[N, M]", weights=("w",))
    block = Block("block", (multiply,), outputs=("y",))
    sizes = dict.fromkeys("NPM", 64)
    forward, back = block.flops(sizes), sum(op.flops(sizes) for op in backward(block))
    return (2 * forward + back) / (forward + back)


def length_where_attention_equals_projections(row):
    """Projections grow with T and full attention with T^2, so one length gives the other."""
    model = decoder(D=row["D"], N=row["D"] // 128)
    length = 1024
    sizes = model.train_program().bind(batch=1, queries=length)
    ops = block_of(model).ops
    projections = sum(op.flops(sizes) for op in ops if op.name in PROJECTIONS)
    attention = sum(op.full_flops(sizes) for op in ops if isinstance(op, Attention))
    return length * projections / attention


ANSWERS = {
    "dots.dot": flops_of("bf16[P] * bf16[P] -> bf16[]"),
    "dots.matvec": flops_of("bf16[N, P] * bf16[P] -> bf16[N]"),
    "dots.matmul": flops_of("bf16[N, P] * bf16[P, M] -> bf16[N, M]"),
    "dots.einsum": flops_of("bf16[G, H, I, J, K, L] * bf16[G, H, M, N, K, L] -> bf16[G, H, I, J, M, N]"),
    "dots.train_over_fwd": training_over_forward,
    "acct.mlp_flops": lambda row: training_flops(row, GATED_MLP),
    "acct.mlp_params": lambda row: per_layer(row.model, "mlp"),
    "acct.attn_params": lambda row: per_layer(row.model, "attention"),
    "acct.attn_proj_flops": lambda row: training_flops(row, PROJECTIONS),
    "acct.dot_flops": lambda row: attention_flops(row, Attention.full_flops),
    "acct.dot_causal": share_that_a_causal_mask_leaves,
    "acct.mha_params": lambda row: decoder(**row.sizes).parameters.by_part["attention"],
    "acct.norm_params": norms_per_layer,
    "acct.unembed_flops": lambda row: training_flops(row, ("lm_head",), "head"),
    "acct.vocab_table": vocabulary_table,
    "remat.none": saved,
    "remat.block": saved,
    "remat.big_matmuls": saved,
    "remat.flop_factor": full_rematerialisation,
    "q3.flops": flops_of("bf16[I, J, K, L] * bf16[I, J, M, N, O] -> bf16[K, L, M, N, O]"),
    "q5.T": length_where_attention_equals_projections,
}
LATER = {}


@answered("transformers", ANSWERS, LATER)
def test_answers_of_the_book(row, answer):
    check(row, answer)


def test_a_whole_model_counts_as_six_flops_per_parameter_and_token():
    """The book's rule for training FLOPs, up to attention and the lookup of embeddings."""
    model = load_model("llama-3-70b")
    matmuls = model.parameters.total - model.parameters.by_part["embedding"]
    assert model.train_flops_per_token(128) == pytest.approx(find_rule("train-flops").value(P=matmuls), rel=0.005)
