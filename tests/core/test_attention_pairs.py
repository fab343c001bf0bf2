"""The closed forms of computed query-key pairs, against counting them one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.tensors import Attention, Tensor


def attention(**kind: object) -> Attention:
    return Attention(
        name="attention",
        inputs=(
            Tensor("q", ("B", "T", "N", "H")),
            Tensor("k", ("B", "S", "K", "H")),
            Tensor("v", ("B", "S", "K", "Hv")),
        ),
        output=Tensor("o", ("B", "T", "N", "Hv")),
        **kind,  # type: ignore[arg-type]
    )


def counted(queries: int, keys: int, window: int | None, chunk: int | None, causal: bool) -> int:
    """Count pairs one by one; the queries are the last of the keys' positions."""
    pairs = 0
    for q in range(keys - queries, keys):
        for k in range(keys):
            seen = not causal or k <= q
            seen = seen and (window is None or q - k < window)
            pairs += seen and (chunk is None or q // chunk == k // chunk)
    return pairs


spans = st.one_of(
    st.just({"window": None, "chunk": None}),
    st.integers(1, 20).map(lambda w: {"window": w, "chunk": None}),
    st.integers(1, 20).map(lambda c: {"window": None, "chunk": c}),
)


@given(queries=st.integers(1, 16), before=st.integers(0, 16), span=spans)
def test_pairs_are_what_counting_finds(queries: int, before: int, span: dict[str, int | None]) -> None:
    sizes = {"T": queries, "S": queries + before}
    assert attention(**span).pairs(sizes) == counted(queries, queries + before, **span, causal=True)


@given(queries=st.integers(1, 16), keys=st.integers(1, 16))
def test_without_causality_every_query_sees_every_key(queries: int, keys: int) -> None:
    assert attention(causal=False).pairs({"T": queries, "S": keys}) == queries * keys


@pytest.mark.parametrize("span", [{}, {"window": 7}, {"chunk": 5}])
def test_pairs_of_arrays_are_pairs_of_their_entries(span: dict[str, int]) -> None:
    lengths = np.array([1.0, 5.0, 12.0, 40.0])
    op = attention(**span)
    together = op.pairs({"T": lengths, "S": lengths})
    assert together.tolist() == [op.pairs({"T": n, "S": n}) for n in lengths]


def test_flops_are_two_per_pair_and_dimension_of_scores_and_of_values() -> None:
    sizes = {"B": 3, "T": 4, "S": 4, "N": 2, "K": 1, "H": 8, "Hv": 6}
    assert attention().flops(sizes) == 2 * (8 + 6) * 10 * 3 * 2
    assert attention().full_flops(sizes) == 2 * (8 + 6) * 16 * 3 * 2
    assert attention(gradient=True).flops(sizes) == 2.5 * attention().flops(sizes)
