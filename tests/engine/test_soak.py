"""The endpoint under clients that come and go: no page is lost, no request forgotten, everyone else is served."""

import asyncio
import json
import random
from collections import Counter

import pytest

from tests.engine.test_http import Running

SECONDS, CLIENTS = 20, 200


async def say(port, body, path="/v1/completions"):
    """Send a request, and give both ends of its connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


def fuzzed(draw):
    """A body that is wrong, or nearly right."""
    whole = json.dumps(
        {"model": "counting", "prompt": "w1 w2", "max_tokens": 5, "stream": draw.random() < 0.5}
    ).encode()
    place = draw.randrange(len(whole))
    kinds = [
        whole[:place],
        whole[:place] + bytes([draw.randrange(256)]) + whole[place + 1 :],
        whole * 3,
        b"",
        b"\xff" * 50,
    ]
    return draw.choice(kinds)


async def client(port, draw, end, counts):
    loop = asyncio.get_running_loop()
    while loop.time() < end:
        kind = draw.choice(["whole", "stream", "gone", "slow", "fuzz", "half"])
        tokens = draw.randint(1, 40)
        body = {"model": "counting", "prompt": [1] * draw.randint(1, 20), "max_tokens": tokens, "ignore_eos": False}
        body["stream"] = kind in ("stream", "slow") or draw.random() < 0.5
        data = fuzzed(draw) if kind == "fuzz" else json.dumps(body).encode()
        reader, writer = await say(port, data[:-1] if kind == "half" else data)
        try:
            if kind in ("gone", "half"):
                await asyncio.sleep(draw.random() * 0.05)
                continue
            if kind == "slow":
                while await reader.read(64):
                    await asyncio.sleep(0.01)
                counts["slow"] += 1
                continue
            answer = await asyncio.wait_for(reader.read(), 30)
            status = int(answer.split(b" ", 2)[1]) if answer else 0
            counts[status] += 1
            if kind == "stream" and status == 200:
                assert answer.rstrip().endswith((b"data: [DONE]", b"0")), answer[-80:]
        except ConnectionError:
            counts["reset"] += 1
        finally:
            writer.close()


@pytest.mark.slow  # 200 connections for 20 seconds: clients that leave, read slowly or talk nonsense harm nobody
def test_clients_that_come_and_go_lose_no_page():
    counts = Counter()

    async def all_clients(port):
        end = asyncio.get_running_loop().time() + SECONDS
        await asyncio.gather(*(client(port, random.Random(k), end, counts) for k in range(CLIENTS)))  # noqa: S311

    with Running(queue=64) as it:
        asyncio.run(all_clients(it.port))
        it.settled()
        assert it.ask("/health")[0].status == 200
        assert it.post("/v1/completions", prompt="w3", max_tokens=2)[1]["choices"][0]["text"].split() == ["w4", "w5"]
    assert counts[200] > 100
    assert counts[400] > 20
    assert set(counts) <= {200, 400, 404, 408, 413, 429, "slow", "reset"}
