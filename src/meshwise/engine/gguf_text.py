"""The tokenizer and the chat template that a GGUF file holds, of byte-level BPE. Not here: its weights (`runtime`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from meshwise.core.errors import ConfigError, MissingDependencyError
from meshwise.engine.vocabulary import Vocabulary

#: Words, numbers, signs and space: how newer tokenizers cut texts, but for how many digits go together.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: How texts are cut before they are merged -> whether digits stand alone, and the expression, None for GPT-2's own.
_CUTS: dict[str, tuple[bool, str | None]] = {
    "default": (False, None),
    "gpt-2": (False, None),
    "smollm": (True, None),
    "llama-bpe": (False, _CUT.replace("DIGITS", "{1,3}")),
    "qwen2": (False, _CUT.replace("DIGITS", "")),
}

#: Kinds of tokens in the file that are no text: control, and defined by a user.
_CONTROL, _USER = 3, 4


def read_gguf_vocabulary(file: Path) -> Vocabulary:
    """Read tokenizer, template and special tokens.

    Raises:
        MissingDependencyError: a library is missing.
        ConfigError: another kind of tokenizer.
    """
    for library in ("gguf", "tokenizers"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependencyError(f"a GGUF's tokenizer needs the library {library}: pip install 'meshwise[run]'")
    from gguf import GGUFReader  # noqa: PLC0415 -- an optional extra

    reader = GGUFReader(file)

    def said(name: str) -> Any:
        field = reader.get_field(f"tokenizer.{name}")
        return None if field is None else field.contents()

    kind, cut = said("ggml.model"), said("ggml.pre") or "default"
    if kind != "gpt2" or cut not in _CUTS:
        known = ", ".join(_CUTS)
        raise ConfigError(
            f"{file}: its tokenizer is {kind!r} with cuts {cut!r}; expected gpt2 with one of {known}: give the model's "
            "tokenizer.json as --tokenizer FILE"
        )
    tokens: list[str] = said("ggml.tokens")
    tokenizer = _byte_level(tokens, said("ggml.merges"), said("ggml.token_type") or [], cut)
    ids = {name: said(f"ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    special = {f"{n}_token": tokens[i] if isinstance(i := ids[n], int) else "" for n in ("bos", "eos")}
    if said("ggml.add_bos_token") and isinstance(ids["bos"], int):
        _begin_with(tokenizer, special["bos_token"], ids["bos"])
    stops = frozenset(i for name, i in ids.items() if name != "bos" and isinstance(i, int))
    return Vocabulary(tokenizer, stops, special, said("chat_template"))


def _byte_level(tokens: list[str], merges: list[str], kinds: list[int], cut: str) -> Any:
    """Make a byte-level BPE of the library."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers  # noqa: PLC0415
    from tokenizers.models import BPE  # noqa: PLC0415

    digits, pattern = _CUTS[cut]
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=cut == "llama-bpe"))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    added = [(t, k) for t, k in zip(tokens, kinds, strict=False) if k in (_CONTROL, _USER)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in added if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in added if k == _USER])
    return tokenizer


def _begin_with(tokenizer: Any, token: str, number: int) -> None:
    """Begin texts with a token."""
    from tokenizers.processors import TemplateProcessing  # noqa: PLC0415

    tokenizer.post_processor = TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 $B:0", special_tokens=[(token, number)]
    )
