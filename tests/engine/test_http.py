"""The endpoint over real sockets, with an engine that answers at once: protocol, bounds, streams, who goes away."""

import asyncio
import http.client
import json
import signal
import socket
import threading
import time

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import meshwise
from meshwise.cli.main import main
from meshwise.commands.load import LoadRequest
from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.costs.engine import EngineCosts
from meshwise.engine.client import find_model
from meshwise.engine.engine import Engine
from meshwise.engine.http.metrics import Metrics
from meshwise.engine.http.server import bind, make_server
from meshwise.engine.http.service import Service, Settings
from meshwise.engine.replicas import Replicas
from meshwise.engine.requests import Token
from meshwise.engine.vocabulary import Vocabulary
from meshwise.report.load import load_rows
from meshwise.scheduling import Scheduling

WORDS = {f"w{i}": i for i in range(50)} | {"<end>": 50}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content }} {% endfor %}{% if add_generation_prompt %}w1{% endif %}"
)


class Counting:
    """Says the word after the last one, and ends after w49; a step takes a little time."""

    rows = 1

    def __init__(self):
        self.pause, self.broken = 0.0005, False

    def run(self, work):
        time.sleep(self.pause)
        if self.broken:
            raise RuntimeError("a device is lost")
        asking = work.asking
        likely = [((r.tokens[-1] + 1, -0.5), (0, -1.5))[: r.sampling.logprobs or 0] for r in asking]
        return [Token(r.tokens[-1] + 1, -0.5, some) for r, some in zip(asking, likely, strict=True)]


class Running:
    def __init__(self, key=None, queue=32, timeout=20.0, longest=200, *, vocabulary=None, executor=None):
        tokenizer = Tokenizer(WordLevel(WORDS, unk_token="w0"))  # noqa: S106 -- no secret
        tokenizer.pre_tokenizer = WhitespaceSplit()
        words = Vocabulary(tokenizer, frozenset([50]), {"bos_token": "", "eos_token": "<end>"}, TEMPLATE)
        vocabulary = vocabulary or words
        self.executor, self.metrics = executor or Counting(), Metrics()
        self.engine = Engine(
            Scheduling(max_batch=8, prefix_cache=True), 200, self.executor, block_tokens=4, watcher=self.metrics
        )
        settings = Settings("counting", longest, queue, 4096, timeout, key)
        self.service = Service(Replicas([self.engine]), vocabulary, settings, self.metrics)
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.server = make_server(self.service, "127.0.0.1", drain=5, most=1000)
        self.server.install_signal_handlers = lambda: None
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.socket])))

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()

    def ask(self, path, body=None, method=None, headers=None, raw=None):
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        line.request(method or ("GET" if data is None else "POST"), path, data, headers or {})
        answer = line.getresponse()
        text = answer.read()
        line.close()
        return answer, (json.loads(text) if answer.headers["content-type"].startswith("application/json") else text)

    def post(self, path, **body):
        return self.ask(path, {"model": "counting", **body})

    def settled(self):
        end = time.monotonic() + 60
        while (self.engine.outstanding or self.service.active) and time.monotonic() < end:
            time.sleep(0.005)
        assert self.engine.caches[0].used == 0
        self.engine.caches[0].check()
        return True


@pytest.fixture(scope="module")
def running():
    with Running() as it:
        yield it


def test_a_completion(running):
    answer, said = running.post("/v1/completions", prompt="w3 w4", max_tokens=3)
    assert answer.status == 200
    (choice,) = said["choices"]
    assert (choice["text"].split(), choice["finish_reason"]) == (["w5", "w6", "w7"], "length")
    assert said["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    _, said = running.post("/v1/completions", prompt=[[46], [47]], max_tokens=9, n=2)
    assert [c["finish_reason"] for c in said["choices"]] == ["stop"] * 4
    assert [c["index"] for c in said["choices"]] == [0, 1, 2, 3]
    assert [c["text"].split() for c in said["choices"]] == [["w47", "w48", "w49"]] * 2 + [["w48", "w49"]] * 2


def test_a_chat_its_stop_string_and_its_logprobs(running):
    _, said = running.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": [{"type": "text", "text": "w9"}]}],
        stop=["w5"],
        logprobs=True,
        top_logprobs=1,
    )
    (choice,) = said["choices"]
    assert choice["message"]["content"].split() == ["w2", "w3", "w4"]
    assert choice["finish_reason"] == "stop"
    assert [t["token"] for t in choice["logprobs"]["content"]][:3] == ["w2", "w3", "w4"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == [{"token": "w2", "logprob": -0.5, "bytes": [119, 50]}]


def test_a_stream_with_its_usage(running):
    _, text = running.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "w9"}],
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    lines = [line for line in text.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert said.split() == ["w2", "w3", "w4"]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert len({e["id"] for e in events}) == 1


def test_a_stream_that_tells_its_usage_all_along(running):
    """As guidellm asks, with its own words for the defaults."""
    _, text = running.post(
        "/v1/completions",
        prompt=["w9", "w3 w4"],
        max_tokens=3,
        stream=True,
        stop=None,
        ignore_eos=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    events = [json.loads(line.removeprefix("data: ")) for line in text.decode().split("\n\n") if line[6:7] == "{"]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 6)
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}


WRONG = {
    "no model": ({"prompt": "w1"}, 400, "model"),
    "another model": ({"model": "other", "prompt": "w1"}, 404, "model"),
    "unknown field": ({"model": "counting", "prompt": "w1", "logit_bias": {"5": 9}}, 400, "logit_bias"),
    "template": ({"model": "counting", "prompt": "w1", "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    "n": ({"model": "counting", "prompt": "w1", "n": 10**9}, 400, "n"),
    "best_of": ({"model": "counting", "prompt": "w1", "best_of": 10**9}, 400, "best_of"),
    "nan": (b'{"model": "counting", "prompt": "w1", "temperature": NaN}', 400, None),
    "text": ({"model": "counting", "prompt": "w1", "max_tokens": "9"}, 400, "max_tokens"),
    "empty": ({"model": "counting", "prompt": ""}, 400, "prompt"),
    "no prompts": ({"model": "counting", "prompt": []}, 400, "prompt"),
    "token": ({"model": "counting", "prompt": [51]}, 400, "prompt"),
    "negative": ({"model": "counting", "prompt": [-1]}, 400, "prompt"),
    "long": ({"model": "counting", "prompt": [1] * 200}, 400, "prompt"),
    "too many": ({"model": "counting", "prompt": [1] * 100, "max_tokens": 101}, 400, "max_tokens"),
    "stops": ({"model": "counting", "prompt": "w1", "stop": ["a"] * 5}, 400, "stop"),
    "logprobs": ({"model": "counting", "prompt": "w1", "logprobs": 21}, 400, "logprobs"),
    "no json": (b"{", 400, None),
    "deep": (b"[" * 4000, 400, None),
    "no object": (b"[1]", 400, None),
    "large": (b" " * 5000, 413, None),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_in_openais_shape(running, case):
    body, status, param = WRONG[case]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer, said = running.ask("/v1/completions", raw=raw)
    assert (answer.status, said["error"]["param"]) == (status, param)
    assert said["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert said["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}],
        [{"type": "text", "text": "w1", "url": "http://127.0.0.1:1/x"}],
    ],
)
def test_nothing_is_fetched(running, content):
    answer, said = running.post("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert answer.status == 400
    assert said["error"]["param"] == "messages"


def test_what_a_template_refuses(running):
    answer, said = running.post("/v1/chat/completions", messages=[{"role": "tool", "content": "w1"}])
    assert answer.status == 400
    assert "refuses them: no tools" in said["error"]["message"]


def test_the_other_routes(running):
    assert running.ask("/health")[1] == {"status": "ok"}
    assert running.ask("/ready")[1] == {"ready": True}
    (model,) = running.ask("/v1/models")[1]["data"]
    assert (model["id"], model["max_model_len"], model["vocab_size"]) == ("counting", 200, len(WORDS))
    assert running.post("/tokenize", prompt="w3 w4")[1] == {"tokens": [3, 4], "count": 2, "max_model_len": 200}
    assert running.post("/tokenize", messages=[{"role": "user", "content": "w3"}])[1]["tokens"] == [3, 1]
    assert running.post("/detokenize", tokens=[3, 4])[1] == {"prompt": "w3 w4"}
    running.post("/v1/completions", prompt="w3", max_tokens=2)
    running.settled()
    text = running.ask("/metrics")[1].decode()
    assert 'meshwise_requests_total{reason="length"}' in text
    assert "meshwise_ttft_seconds_count" in text
    answer, said = running.ask("/v2/nothing")
    assert (answer.status, said["error"]["type"]) == (404, "not_found_error")
    assert running.ask("/health", headers={"Host": "evil.example"})[0].status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_pages(running, stream):
    running.executor.pause = 0.05  # 40 steps are two seconds, in which a busy machine sees that the client has gone
    body = json.dumps({"model": "counting", "prompt": "w1", "max_tokens": 150, "ignore_eos": True, "stream": stream})
    line = socket.create_connection(("127.0.0.1", running.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    line.sendall(head.encode() + body.encode())
    while not running.engine.caches[0].used:
        time.sleep(0.002)
    steps = running.engine.running.steps
    line.close()
    running.settled()
    running.executor.pause = 0.0005
    assert running.engine.running.steps - steps < 40


def test_answers_do_not_wait_for_acknowledgements():
    taken = bind("127.0.0.1", 0)
    assert taken.proto == socket.IPPROTO_TCP  # what asyncio asks for before it turns Nagle's algorithm off
    taken.close()


def test_keys_queues_and_time():
    with Running(key="secret", queue=2, timeout=0.2) as it:
        assert it.ask("/v1/models")[0].status == 401
        assert it.ask("/v1/models", headers={"Authorization": "Bearer secre"})[0].status == 401
        mine = {"Authorization": "Bearer secret"}
        assert it.ask("/v1/models", headers=mine)[0].status == 200
        assert it.ask("/health")[0].status == 200
        body = {"model": "counting", "prompt": "w1", "n": 3, "max_tokens": 2}
        answer, said = it.ask("/v1/completions", body, headers=mine)
        assert (answer.status, said["error"]["type"], answer.headers["retry-after"]) == (429, "rate_limit_error", "1")
        it.executor.pause = 0.05
        body = {"model": "counting", "prompt": "w1", "max_tokens": 100, "ignore_eos": True}
        answer, said = it.ask("/v1/completions", body, headers=mine)
        assert (answer.status, said["error"]["type"]) == (504, "server_error")
        it.settled()


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGINT]])
def test_draining_finishes_what_was_asked_for(signals):
    """Also where whoever sends SIGTERM sends it to the group, too; a second Ctrl-C would end at once."""
    with Running() as it:
        it.executor.pause = 0.02
        found = []
        waiting = threading.Thread(target=lambda: found.append(it.post("/v1/completions", prompt="w1", max_tokens=20)))
        waiting.start()
        while not it.engine.outstanding:
            time.sleep(0.005)
        for number in signals:
            it.server.handle_exit(number, None)
        assert not it.server.force_exit
        waiting.join(timeout=60)
        assert found[0][0].status == 200
        assert found[0][1]["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_ctrl_c_while_it_drains_ends_it_at_once(first):
    with Running() as it:
        it.server.handle_exit(first, None)
        assert not it.server.force_exit
        it.server.handle_exit(signal.SIGINT, None)
        assert it.server.force_exit


def test_an_engine_that_fails_says_so():
    with Running() as it:
        it.executor.broken = True
        answer, said = it.post("/v1/completions", prompt="w1")
        assert (answer.status, said["error"]["type"]) == (503, "server_error")
        assert it.ask("/health")[0].status == 503
        assert it.post("/v1/completions", prompt="w1")[0].status == 503


def test_a_load_is_sent_and_simulated(running, tmp_path, capsys):
    """Lengths are exact, the simulation has the same requests, and rows are read by `score` and `calibrate`."""
    costs = tmp_path / "costs.json"
    costs.write_text(EngineCosts(0.001, ((1, 0.0),), 500, block_tokens=4).to_json())
    asked = {
        "rate": 200.0,
        "requests": 20,
        "prompt": "uniform:4-12",
        "output": "5",
        "prefix_tokens": 8,
    }
    hits = running.engine.scheduler.hit_tokens
    made = meshwise.load(f"http://127.0.0.1:{running.port}/v1", costs=str(costs), **asked)
    assert (made.model, made.requests, made.answered, made.output_tokens) == ("counting", 20, 20, 100)
    assert made.prompt_tokens == sum(d.prompt for d in LoadRequest(url="", **asked).simulated().load().requests())
    assert running.engine.scheduler.hit_tokens - hits >= 8 * 10
    assert len(made.simulated_ttft) == 20
    rows = tmp_path / "rows.csv"
    rows.write_text(load_rows(made, "h100-sxm", 1, "meshwise").replace("counting", "llama-3-8b"))
    assert main(["score", str(rows), "--json"]) in (0, 3)
    capsys.readouterr()
    main(["calibrate", str(rows)])  # whether one is slow enough for an H100 depends on this machine
    said = capsys.readouterr()
    assert "load-ttft" in said.out + said.err


def test_a_load_says_what_went_wrong(running):
    with pytest.raises(MeshwiseError, match=r"expected an address such as .*, found 'nowhere'"):
        meshwise.load("nowhere", rate=1.0)
    with pytest.raises(MeshwiseError, match="/v1/models: "):
        meshwise.load("http://127.0.0.1:9", rate=1.0)
    with pytest.raises(InfeasibleError, match="none of 3 requests was answered: 400: prompt: expected tokens"):
        meshwise.load(f"http://127.0.0.1:{running.port}", rate=100.0, requests=3, vocabulary=10_000)


def test_prompts_have_tokens_that_the_model_knows(running):
    """As many as the endpoint says, 1,000 where it says nothing or lists no models."""
    url = f"http://127.0.0.1:{running.port}"
    found = [asyncio.run(find_model(u, None, m)) for u, m in ((url, None), (url, "other"), (f"{url}/none", "mine"))]
    assert found == [("counting", len(WORDS)), ("other", 1000), ("mine", 1000)]
    with pytest.raises(MeshwiseError, match="404"):
        asyncio.run(find_model(f"{url}/none", None))


def test_the_official_client_works_against_it(running):
    """Models, a chat whole and streamed with its usage, a completion with logprobs, errors as its exceptions."""
    import openai  # noqa: PLC0415 -- hundreds of modules, not for whoever only collects this file

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0, timeout=20)
    assert [model.id for model in client.models.list()] == ["counting"]
    said = {"model": "counting", "messages": [{"role": "user", "content": "w7"}], "max_tokens": 3}
    whole = client.chat.completions.create(**said)
    assert (whole.choices[0].message.content.split(), whole.choices[0].finish_reason) == (["w2", "w3", "w4"], "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 3)
    chunks = list(client.chat.completions.create(**said, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (text.split(), chunks[-1].usage.completion_tokens) == (["w2", "w3", "w4"], 3)
    made = client.completions.create(model="counting", prompt="w3", max_tokens=2, logprobs=2)
    assert made.choices[0].logprobs.tokens == ["w4", "w5"]
    assert made.choices[0].logprobs.token_logprobs == [-0.5, -0.5]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**said, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(**{**said, "model": "other"})
