"""Arrays of attention scores in a program that does not fuse attention: rows x columns for each head.

Not here: what they cost (`causes.compute`).
"""

from __future__ import annotations

from meshwise.profile.optimes import OpTime

#: Rows and columns from which an array of scores is worth fusing; heads are no wider than this.
_FEWEST_SCORES, _WIDEST_HEAD = 128, 576


def score_sizes(ops: tuple[OpTime, ...]) -> dict[int, tuple[int, int]]:
    """Elements of score arrays -> (rows, columns): results of batched products over a head's width."""
    found = {}
    for time in ops:
        if time.kind.matmul is not None and time.kind.category == "matmul":
            batch, m, k, n = time.kind.matmul
            if batch > 1 and k <= _WIDEST_HEAD and min(m, n) >= max(_FEWEST_SCORES, k):
                found[batch * m * n] = m, n
    return found
