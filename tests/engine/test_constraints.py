"""Answers that keep to a JSON schema, by llguidance: whatever the model would rather say."""

import json

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, MissingDependencyError
from meshwise.engine import constraints
from meshwise.engine.constraints import Constraints
from meshwise.engine.engine import Engine
from meshwise.engine.executor import JaxExecutor
from meshwise.engine.http.protocol import Chat, HttpError, read
from meshwise.engine.requests import Collected, EngineRequest, Sampling, Token
from meshwise.engine.vocabulary import Vocabulary, numbers_only
from meshwise.runtime.layered import LayeredModel
from meshwise.runtime.steps import paged_model
from meshwise.scheduling import Scheduling
from meshwise.sharding.serving import ServingLayout
from tests.engine.test_http import Running
from tests.runtime.steps import dense

END = 256
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "ok": {"type": "boolean"}},
    "required": ["city", "ok"],
    "additionalProperties": False,
}


def letters():
    """A vocabulary of bytes and an end."""
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))} | {"<end>": END}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return Vocabulary(tokenizer, frozenset([END]), {"bos_token": "", "eos_token": "<end>"}, "{{ messages[0].content }}")


def is_whole(text):
    value = json.loads(text)
    return set(value) == {"city", "ok"} and value["city"] in ("Paris", "Rome") and isinstance(value["ok"], bool)


@pytest.mark.jax
def test_what_is_sampled_keeps_to_the_schema():
    """Three that keep to it, greedy, warm and penalised, beside one that may say anything, which changes by nothing."""
    vocabulary, scheduling = letters(), Scheduling("prefill-first", 4, 64)
    own = dense("D=32 F=64 L=2 N=4 K=2 H=8 V=264")
    model = LayeredModel.of(
        paged_model(own, ServingLayout(), jax.devices()[:1], pages=64, page_tokens=4, dtype=DType.FP32)
    )
    executor = JaxExecutor(model, model.initial_weights(3), scheduling, 96, constrained=True)
    made = Constraints(vocabulary, 264)

    def served(constrained):
        engine = Engine(scheduling, 64, executor, block_tokens=4)
        kinds = [Sampling(), Sampling(1.5, seed=4), Sampling(1.0, repetition_penalty=1.5, seed=5)]
        given = {"stops": vocabulary.stops, "block_tokens": 4}
        some = [
            EngineRequest([1, 2, k], 60, Collected(), sampling=how, constraint=made.of_schema(SCHEMA), **given)
            for k, how in enumerate(kinds)
        ]
        free = EngineRequest([5, 6], 20, Collected(), sampling=Sampling(0.7, seed=9), block_tokens=4)
        for request in [*(some if constrained else []), free]:
            engine.submit(request)
        while engine.step():
            pass
        assert engine.caches[0].used == 0
        return some, free

    some, free = served(constrained=True)
    for request in some:
        assert request.reason == "stop"
        assert is_whole(vocabulary.decode(request.sink.ids))
    assert free.sink.ids == served(constrained=False)[1].sink.ids
    assert len(free.sink.ids) == 20


class Allowed:
    """Says the last token that may come, whatever it is; an end first."""

    rows = 1

    def run(self, work):
        out = []
        for request in work.asking:
            bits = np.unpackbits(request.constraint.bits(9).view(np.uint8), bitorder="little")
            out.append(Token(END if bits[END] else int(np.flatnonzero(bits)[-1])))
        return out


def test_the_endpoint_answers_in_json():
    with Running(vocabulary=letters(), executor=Allowed()) as it:
        said = {"messages": [{"role": "user", "content": "where?"}], "max_tokens": 60}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        answer = it.post("/v1/chat/completions", **said, response_format=form, n=2)[1]
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            assert is_whole(choice["message"]["content"])
        wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
        status, told = it.post("/v1/chat/completions", **said, response_format=wrong)
        assert (status.status, told["error"]["message"]) == (
            400, "response_format: the schema cannot be kept to: Invalid type: nonsense"
        )  # fmt: skip
        status, told = it.post("/v1/chat/completions", **said, response_format=form, ignore_eos=True)
        assert (status.status, told["error"]["param"]) == (400, "ignore_eos")


def test_what_is_missing_is_said(monkeypatch):
    with pytest.raises(MeshwiseError, match="response_format: this model's tokenizer cannot be constrained"):
        Constraints(numbers_only(10), 10).of_schema(SCHEMA)
    monkeypatch.setattr(constraints, "is_installed", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"llguidance: pip install 'meshwise\[schema\]'"):
        Constraints(letters(), 264).of_schema(SCHEMA)


def test_a_schema_comes_with_its_type_and_nowhere_else():
    for form in ({"type": "json_schema"}, {"type": "text", "json_schema": {"schema": {}}}, {"type": "xml"}):
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": form}
        with pytest.raises(HttpError, match="response_format"):
            read(Chat, json.dumps(body).encode())
