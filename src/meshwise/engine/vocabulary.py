"""A model's own text files: its tokenizer, its chat template, and the tokens that end an answer.

They lie beside the weights, or in a GGUF file. Not here: text as it comes, token by token (`text`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwise.core.errors import ConfigError, MeshwiseError, MissingDependencyError
from meshwise.core.files import parse_json, read_whole


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and text of a model.

    Args:
        tokenizer: of the library `tokenizers`.
        stops: tokens that end an answer.
        special: names of a template's variables -> tokens: bos_token, eos_token.
        template: of chats, in Jinja; None: the model has none.
    """

    tokenizer: Any
    stops: frozenset[int]
    special: Mapping[str, str]
    template: str | None = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text; `special` adds what the model begins texts with."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a chat that the model is to go on with.

        Raises:
            MeshwiseError: the model has no template, or it refuses these messages.
        """
        if self._compiled is None:
            raise MeshwiseError("this model has no chat template: send a prompt to /v1/completions instead")
        import jinja2  # noqa: PLC0415 -- an optional extra

        try:
            text = self._compiled.render(messages=list(messages), add_generation_prompt=True, **self.special)
        except jinja2.TemplateError as error:
            raise MeshwiseError(f"messages: the model's chat template refuses them: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise MeshwiseError(f"messages: the model's chat template cannot take them: {error}") from None
        return self.encode(text, special=False)

    @cached_property
    def _compiled(self) -> Any:
        """The template, in a sandbox that neither changes values nor reaches what is private."""
        if self.template is None:
            return None
        if importlib.util.find_spec("jinja2") is None:
            raise MissingDependencyError("a chat template needs the library jinja2: pip install 'meshwise[serve]'")
        import jinja2  # noqa: PLC0415
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        def to_json(value: Any, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)

        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        sandbox.filters["tojson"] = to_json
        sandbox.globals |= {
            "raise_exception": refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        try:
            return sandbox.from_string(self.template)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is no Jinja that can be read: {error}") from None


def read_vocabulary(weights: Path | None, tokenizer: Path | None) -> Vocabulary:
    """Find a model's text files: beside the tokenizer that was given, else beside or in the weights.

    Raises:
        MissingDependencyError: a library is missing.
        MeshwiseError: there is no tokenizer, or a file that cannot be read.
    """
    if tokenizer is None and weights is not None and weights.suffix == ".gguf":
        from meshwise.engine.gguf_text import read_gguf_vocabulary  # noqa: PLC0415 -- an optional extra

        return read_gguf_vocabulary(weights)
    folder = None if weights is None else weights if weights.is_dir() else weights.parent
    file = tokenizer or (None if folder is None else folder / "tokenizer.json")
    if file is None or not file.is_file():
        raise MeshwiseError(
            "text needs the model's tokenizer.json: beside the --weights, or as --tokenizer FILE"
            if file is None
            else f"there is no {file}; give the model's tokenizer.json as --tokenizer FILE"
        )
    from meshwise.runtime.data import read_tokenizer  # noqa: PLC0415 -- an optional extra

    return _beside(read_tokenizer(file)[0], file.parent)


def numbers_only(size: int) -> Vocabulary:
    """Tokens written as their numbers, for weights that were drawn and know no words; no token ends an answer.

    >>> numbers_only(10).encode("3 7"), numbers_only(10).decode([3, 7])
    ([3, 7], '3 7')
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 -- an optional extra
    from tokenizers.models import WordLevel  # noqa: PLC0415
    from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: PLC0415

    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(size)}, unk_token="0"))  # noqa: S106 -- no password
    tokenizer.pre_tokenizer = WhitespaceSplit()
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    return Vocabulary(tokenizer, frozenset(), {"bos_token": "", "eos_token": ""}, template)


def _beside(tokenizer: Any, folder: Path) -> Vocabulary:
    """What the configurations beside a tokenizer say."""
    says = {name: _read(folder / f"{name}.json") for name in ("tokenizer_config", "generation_config", "config")}
    own = says["tokenizer_config"]
    special = {name: _content(own.get(name)) for name in ("bos_token", "eos_token")}
    ids = {tokenizer.token_to_id(special["eos_token"])}
    for name in ("generation_config", "config"):
        said = says[name].get("eos_token_id")
        ids |= set(said if isinstance(said, list) else [said])
    template = own.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        template = read_whole(folder / "chat_template.jinja")
    stops = frozenset(i for i in ids if isinstance(i, int))
    return Vocabulary(tokenizer, stops, special, template if isinstance(template, str) else None)


def _read(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    value = parse_json(read_whole(file), str(file), finite=False)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _content(token: Any) -> str:
    """A special token, which some files hold with its properties."""
    return str((token.get("content") if isinstance(token, Mapping) else token) or "")
