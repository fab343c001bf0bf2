"""Smaller copies of models: the same kinds of layers, growing evenly to the whole."""

import pytest

from meshwise.compiler.reduction import Reduction, reduce_layers, reduction_of
from meshwise.core.errors import CompilerError
from meshwise.models import load_model
from meshwise.sharding.layout import Layout


@pytest.mark.parametrize(
    ("model", "layout", "sizes"),
    [
        ("llama-3-70b", Layout(), (2, 4)),
        ("llama-3-70b", Layout(remat_layers=20), (4, 8)),
        ("llama-3-70b", Layout(stage=4, num_microbatches=8), (8, 12)),  # several layers in each stage, as in the whole
        ("D=64 F=128 L=6 N=2 K=2 V=256", Layout(stage=2, num_microbatches=8), (2, 4)),
        ("gemma-3-27b", Layout(), None),  # local and global layers: loops of another structure
        ("gpt-oss-120b", Layout(), None),
        ("deepseek-v3", Layout(), None),  # the first three are dense
        ("D=64 F=128 L=2 N=2 K=2 V=256", Layout(), None),
        ("D=64 F=128 L=6 N=2 K=2 V=256", Layout(), (2, 4)),
    ],
)
def test_two_copies_from_which_the_whole_follows(model, layout, sizes):
    whole = load_model(model)
    found = reduction_of(whole, layout)
    if sizes is None:
        assert found is None
        return
    assert (found.small, found.large) == sizes
    small, large = (reduce_layers(whole, layout, n) for n in sizes)
    assert [m.num_layers for m, _ in (small, large)] == list(sizes)
    counts = [{g.name: g.repeat for g in m.spec.groups} for m in (small[0], large[0], whole)]
    assert set(counts[0]) == set(counts[1]) == set(counts[2])
    for name, number in counts[2].items():
        assert found.whole(counts[0][name], counts[1][name]) == number
    parameters = [m.parameters.total for m in (small[0], large[0], whole)]
    if not whole.spec.mtp_modules:
        assert found.whole(parameters[0], parameters[1]) == parameters[2]


def test_the_share_of_recomputed_layers_is_kept():
    whole = load_model("llama-3-8b")
    _, layout = reduce_layers(whole, Layout(remat_layers=8), 4)
    assert layout.remat_layers == 1
    assert reduction_of(whole, Layout(remat_layers=7)) is None


def test_a_line_through_both():
    assert Reduction(2, 4, 38.0).whole(10.0, 16.0) == 244.0


def test_a_model_that_cannot_be_cut_is_named():
    whole = load_model("llama-3-8b")
    hidden = type(whole)(whole.name, whole.family, whole.spec, {"model_type": "llama"}, whole.source)
    with pytest.raises(CompilerError, match="llama-3-8b: its 32 layers are not in its configuration"):
        reduce_layers(hidden, Layout(), 2)
