"""What requests may say, in OpenAI's words, and errors in its shape.

Every field is read or refused: a field that is not known here is an error that names it. Not here: answers (`answers`).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from meshwise.engine.requests import Sampling
from meshwise.runtime.limits import MOST_LOGPROBS

R = TypeVar("R", bound=BaseModel)

#: Bounds of a request, whatever the engine's are.
MOST_CHOICES, MOST_STOPS, LONGEST_STOP, MOST_PROMPTS, MOST_MESSAGES = 8, 4, 256, 32, 1024


class HttpError(Exception):
    """An error that a client is told.

    Args:
        status: of HTTP.
        message: what was expected, what was found.
        param: the field, if it is one's.
        retry_after: seconds.
    """

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI writes errors."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": None}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Probability = Annotated[float, Field(ge=0, le=1)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)]


class StreamOptions(_Strict):
    """How a stream is written: the usage at its end, or, as vLLM writes it, in each chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(_Strict):
    """A schema that an answer keeps to."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: Annotated[str, Field(max_length=256)] = ""
    description: Annotated[str, Field(max_length=2**16)] | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The form of an answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_is_one(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(f"expected json_schema with type json_schema and nowhere else, found type {self.type}")
        return self

    @property
    def schema_of(self) -> Mapping[str, Any] | None:
        """What an answer keeps to; None: nothing."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class Generation(_Strict):
    """What both kinds of requests may say."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, le=10**6)] | None = 0
    min_p: Probability | None = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1
    max_tokens: Annotated[int, Field(ge=1, le=10**7)] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)] | Stops | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    # What says nothing about the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """The JSON schema that answers keep to; None: any text."""
        return None

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Logprobs to tell beside each token's own; None: none at all."""

    def sampling(self, seed: int) -> Sampling:
        """How tokens are chosen; `seed` where the request has none."""

        def value(given: float | None, default: float) -> float:
            return default if given is None else given

        return Sampling(
            temperature=value(self.temperature, 1.0),
            top_p=value(self.top_p, 1.0),
            top_k=max(self.top_k or 0, 0),
            min_p=value(self.min_p, 0.0),
            presence_penalty=value(self.presence_penalty, 0.0),
            frequency_penalty=value(self.frequency_penalty, 0.0),
            repetition_penalty=value(self.repetition_penalty, 1.0),
            seed=(seed if self.seed is None else self.seed) % 2**32,
            logprobs=self.alternatives,
        )


class Completion(Generation):
    """A request to go on from prompts."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1, le=10**7)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def alternatives(self) -> int | None:
        """As in `Generation`."""
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One or more, each a text or its tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]  # pydantic has seen to it: all are


class TextPart(_Strict):
    """A part of a message: text only, so that nothing is ever fetched."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None

    def plain(self) -> dict[str, str]:
        """As templates read it."""
        parts = self.content if isinstance(self.content, list) else None
        text = "".join(p.text for p in parts) if parts is not None else (self.content or "")
        said = {"role": "system" if self.role == "developer" else self.role, "content": str(text)}
        return said if self.name is None else {**said, "name": self.name}


class Chat(Generation):
    """A request to answer in a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=10**7)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def alternatives(self) -> int | None:
        """As in `Generation`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """As in `Generation`."""
        return None if self.response_format is None else self.response_format.schema_of

    @property
    def limit(self) -> int | None:
        """Tokens of the output, in either spelling."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


class Tokenize(_Strict):
    """A text, or a chat, whose tokens are asked for."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool = True


class Detokenize(_Strict):
    """Tokens whose text is asked for."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=10**6)]

    @field_validator("tokens", mode="before")
    @classmethod
    def _no_truth(cls, value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(v, bool) for v in value):
            raise ValueError("expected whole numbers, found true or false")
        return value


def read(kind: type[R], body: bytes) -> R:
    """Read a request.

    Raises:
        HttpError: with the first field that is wrong.
    """
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is no JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise HttpError(400, f"expected a JSON object, found {type(value).__name__}")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        words = "is not known here, or cannot be asked for" if first["type"] == "extra_forbidden" else first["msg"]
        raise HttpError(400, f"{where}: {words}", where.split(".")[0] or None) from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
