"""A step laid out in arrays: rank after rank, in each those that decode first, then prompts in whole rows.

Not here: the buckets to which steps are filled up (`executor`), or what reads the arrays (`runtime.steps`).
"""

from __future__ import annotations

import numpy as np

from meshwise.engine.engine import Chunk, Decode
from meshwise.engine.requests import EngineRequest
from meshwise.runtime.steps import ROW, Bucket, StepArrays


class StepLayout:
    """Arrays of a step, filled request by request.

    Args:
        bucket: sizes of each rank.
        ranks: of the engine.
        sequence_pages: of the longest sequence.
        page_tokens: of a page.
        rank_pages: pages of a rank, which are numbered on from rank to rank.

    Attributes:
        places: whose next token is asked for, in order, and its place among the logits.
        coming: of each token its place among the logits of the step before, where it is not here yet; else -1.
    """

    def __init__(self, bucket: Bucket, ranks: int, sequence_pages: int, page_tokens: int, rank_pages: int) -> None:
        self._bucket, self._page_tokens, self._rank_pages = bucket, page_tokens, rank_pages
        flat = bucket.tokens * ranks
        self._tokens, self._positions = np.zeros((2, flat), np.int32)
        self._pages, self.coming = np.full((2, flat), -1, np.int32)
        self._decode_tables = np.zeros((bucket.decoding * ranks, sequence_pages), np.int32)
        self._prefill_tables = np.zeros((bucket.prefill // ROW * ranks, sequence_pages), np.int32)
        self._last = np.zeros(bucket.logits * ranks, np.int32)
        self._decoding, self._rows, self._asking = [0] * ranks, [0] * ranks, [0] * ranks
        self.places: dict[EngineRequest, int] = {}

    @property
    def arrays(self) -> StepArrays:
        """Of the step."""
        tables = self._decode_tables, self._prefill_tables
        return StepArrays(self._tokens, self._positions, self._pages, *tables, self._last)

    def decode(self, decode: Decode, coming: int) -> None:
        """Add a request that decodes; its token is at a place of the step before, or here (-1)."""
        rank, table = decode.request.rank, self._own(decode.table)
        row = self._decoding[rank]
        self._decoding[rank] += 1
        at = rank * self._bucket.tokens + row
        self.coming[at] = coming
        self._tokens[at] = decode.request.tokens[decode.position] if coming < 0 else 0
        self._positions[at] = decode.position
        self._pages[at] = table[decode.position // self._page_tokens]
        self._decode_tables[rank * self._bucket.decoding + row, : len(table)] = table
        self._ask(decode.request, row)

    def chunk(self, chunk: Chunk) -> None:
        """Add a piece of a prompt, filled up to whole rows."""
        rank, table = chunk.request.rank, self._own(chunk.table)
        row, rows = self._rows[rank], -(-chunk.count // ROW)
        self._rows[rank] += rows
        begin = self._bucket.decoding + row * ROW
        at = rank * self._bucket.tokens + begin
        own, there = slice(at, at + chunk.count), np.arange(chunk.start, chunk.start + chunk.count)
        self._tokens[own] = chunk.request.tokens[chunk.start : chunk.start + chunk.count]
        self._positions[own] = there
        self._pages[own] = table[there // self._page_tokens]
        first = rank * (self._bucket.prefill // ROW) + row
        self._prefill_tables[first : first + rows, : len(table)] = table
        if chunk.last:
            self._ask(chunk.request, begin + chunk.count - 1)

    def _own(self, table: list[int]) -> np.ndarray:
        """Numbers of pages within their rank."""
        return np.asarray(table, np.int32) % self._rank_pages

    def _ask(self, request: EngineRequest, place: int) -> None:
        """Ask for the token that follows from a place in a rank's row."""
        rank = request.rank
        self.places[request] = at = rank * self._bucket.logits + self._asking[rank]
        self._asking[rank] += 1
        self._last[at] = place
