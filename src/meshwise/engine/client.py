"""A load sent to an endpoint of OpenAI's protocol: each request at its time, whoever has not been answered yet.

Latencies count from the time at which a request was due, so that a client that falls behind cannot flatter the server.
Prompts are numbers of tokens, so that lengths are exact. Not here: what the load is (`jobs.traffic`).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from meshwise.core.errors import MeshwiseError
from meshwise.jobs.traffic import Demand, Load

#: Tokens from which prompts are drawn: most vocabularies have them, and few give them a meaning of their own.
_LEAST, _MOST = 300, 1000


@dataclass(frozen=True, slots=True)
class Target:
    """Where a load is sent.

    Args:
        url: of the endpoint, without /v1.
        model: as it is called there.
        vocabulary: prompts have tokens below it.
        api_key: that it asks for; None: none.
        ignore_eos: whether outputs are as long as the load says, which vLLM, SGLang and meshwise understand.
        timeout: seconds for one request.
    """

    url: str
    model: str
    vocabulary: int
    api_key: str | None = None
    ignore_eos: bool = True
    timeout: float = 600.0


@dataclass(slots=True)
class Sent:
    """A request that was sent, and what came of it.

    Args:
        demand: as the load says; its arrival is when it was due.
        late: seconds after that at which it was really sent.
        first, done: seconds after it was due.
        tokens: of its output.
        error: in words; None: it was answered.
    """

    demand: Demand
    late: float = 0.0
    first: float | None = None
    done: float | None = None
    tokens: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        if self.first is None or self.done is None or self.tokens < 2:
            return None
        return (self.done - self.first) / (self.tokens - 1)


async def find_model(url: str, api_key: str | None, name: str | None = None) -> tuple[str, int]:
    """A model that an endpoint serves, by default the first, and below which number prompts have their tokens.

    The number is smaller where the endpoint says that the model knows fewer (`vocab_size`, a field of meshwise).

    Raises:
        MeshwiseError: it cannot be reached; it says nothing of models, and none was named.
    """
    try:
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await client.get(f"{url}/v1/models", headers=_headers(api_key))
            if name is not None and answer.is_error:
                return name, _MOST
            answer.raise_for_status()
            models = answer.json()["data"]
            one = models[0] if name is None else next((m for m in models if m["id"] == name), {"id": name})
            return str(one["id"]), min(int(one.get("vocab_size", _MOST)), _MOST)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise MeshwiseError(f"{url}/v1/models: {error or type(error).__name__}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        if name is not None:
            return name, _MOST
        raise MeshwiseError(f"{url}/v1/models: expected a list of models, found another answer; give --model") from None


@dataclass
class Client:
    """Sends a load.

    Args:
        target: see there.
        load: requests over time.
        seed: of the tokens of prompts.
        told: hears of each request that is over.
    """

    target: Target
    load: Load
    seed: int = 0
    told: Callable[[int], None] = lambda _: None
    _made: dict[str, list[int]] = field(default_factory=dict)
    _over: int = 0

    async def send(self) -> list[Sent]:
        """Send all, and wait for the last; in the order of the load."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        async with httpx.AsyncClient(timeout=self.target.timeout, limits=limits) as client:
            loop = asyncio.get_running_loop()
            begun, tasks, sent = loop.time(), [], []
            for number, demand in enumerate(self.load.requests()):
                prompt = self.prompt(number, demand)
                await asyncio.sleep(max(begun + demand.arrival - loop.time(), 0))
                sent.append(Sent(demand))
                tasks.append(asyncio.create_task(self._one(client, begun + demand.arrival, prompt, sent[-1])))
            await asyncio.gather(*tasks)
        return sent

    def prompt(self, number: int, demand: Demand) -> list[int]:
        """The tokens of a prompt: those of its prefix by their names, the rest its own."""
        parts = [(name if isinstance(name, str) else name.hex(), size) for name, size in demand.prefix]
        own = demand.prompt - sum(size for _, size in parts)
        tokens: list[int] = []
        for name, size in parts:
            if name not in self._made:
                self._made[name] = self._drawn(f"prefix {name}", size)
            tokens += self._made[name][:size]
        return tokens + self._drawn(f"own {number}", own)

    def _drawn(self, name: str, count: int) -> list[int]:
        draw = random.Random(f"{self.seed} {name}")  # noqa: S311 -- no secret
        most = self.target.vocabulary
        return draw.choices(range(min(_LEAST, most // 2), most), k=count)

    async def _one(self, client: httpx.AsyncClient, due: float, prompt: list[int], sent: Sent) -> None:
        body: dict[str, Any] = {
            "model": self.target.model,
            "prompt": prompt,
            "max_tokens": sent.demand.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.target.ignore_eos:
            body["ignore_eos"] = True
        loop = asyncio.get_running_loop()
        sent.late = loop.time() - due
        try:
            url = f"{self.target.url}/v1/completions"
            async with client.stream("POST", url, json=body, headers=_headers(self.target.api_key)) as answer:
                if answer.status_code != 200:
                    sent.error = f"{answer.status_code}: {_message(await answer.aread())}"
                else:
                    await self._read(answer, due, sent)
        except httpx.HTTPError as error:
            sent.error = type(error).__name__
        self._over += 1
        self.told(self._over)

    async def _read(self, answer: httpx.Response, due: float, sent: Sent) -> None:
        """Read a stream: when its first text came, and its last."""
        loop = asyncio.get_running_loop()
        async for line in answer.aiter_lines():
            text = line.removeprefix("data:").strip()
            if not line.startswith("data:") or text == "[DONE]":
                continue
            event = json.loads(text)
            if "error" in event:
                sent.error = _words(event)
                return
            if event.get("choices"):
                sent.done = loop.time() - due
                sent.first = sent.done if sent.first is None else sent.first
            if event.get("usage"):
                sent.tokens = int(event["usage"].get("completion_tokens", 0))
        if sent.first is None:
            sent.error = "the stream ended without text"


def _headers(api_key: str | None) -> dict[str, str]:
    """Of every request."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _message(body: bytes) -> str:
    try:
        return _words(json.loads(body))
    except ValueError:
        return body[:100].decode(errors="replace")


def _words(event: Mapping[str, Any]) -> str:
    error = event.get("error", event)
    return str(error.get("message", error) if isinstance(error, Mapping) else error)[:200]
