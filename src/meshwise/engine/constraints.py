"""Outputs that keep to a JSON schema: which tokens may come next, by the library llguidance.

Not here: sampling among them (`runtime.sampling`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.errors import MeshwiseError, MissingDependencyError
from meshwise.engine.vocabulary import Vocabulary


def is_installed() -> bool:
    """Whether outputs can be constrained here."""
    return importlib.util.find_spec("llguidance") is not None


class Constraint:
    """What one output may go on with.

    Args:
        matcher: of llguidance.
        schema: of its JSON.
    """

    def __init__(self, matcher: Any, schema: Mapping[str, Any]) -> None:
        self._matcher, self.schema = matcher, schema

    def bits(self, words: int) -> NDArray[np.uint32]:
        """A bit a token of the vocabulary, set where it may come next: uint32 [words]."""
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[:words]
        return np.concatenate([found, np.zeros(words - len(found), np.uint32)])

    def take(self, token: int) -> str | None:
        """Take the token that came; "stop" where the output is whole, "error" where the library gives up."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            return "error"
        return "stop" if self._matcher.is_stopped() else None


class Constraints:
    """Makes constraints for a vocabulary.

    Args:
        vocabulary: of the model.
        size: tokens that the model knows.
    """

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        self._vocabulary, self._size = vocabulary, size

    @cached_property
    def _tokenizer(self) -> Any:
        """The library's view of the tokenizer.

        Raises:
            MissingDependencyError: the library is missing.
            MeshwiseError: a tokenizer that it cannot read.
        """
        if not is_installed():
            raise MissingDependencyError(
                "response_format: JSON schemas need the library llguidance: pip install 'meshwise[schema]'"
            )
        import llguidance  # noqa: PLC0415 -- an optional extra

        tokenizer, stops = self._vocabulary.tokenizer, sorted(self._vocabulary.stops)
        size = max(self._size, tokenizer.get_vocab_size())
        try:
            return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=stops)
        except ValueError as error:
            raise MeshwiseError(f"response_format: this model's tokenizer cannot be constrained: {error}") from None

    def of_schema(self, schema: Mapping[str, Any]) -> Constraint:
        """A constraint to JSON of a schema.

        Raises:
            MissingDependencyError, MeshwiseError: see `_tokenizer`; a schema that the library cannot take.
        """
        tokenizer = self._tokenizer
        import llguidance  # noqa: PLC0415 -- an optional extra

        try:
            # No white space between: else a model may say it for ever.
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), defaults={"whitespace_flexible": False}
            )
            wrong = llguidance.LLMatcher.validate_grammar(grammar, tokenizer)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise MeshwiseError(f"response_format: the schema cannot be kept to: {wrong:.300}")
        return Constraint(llguidance.LLMatcher(tokenizer, grammar, log_level=0), schema)
