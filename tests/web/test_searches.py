"""Searches in processes of their own: progress, cancelling, and what becomes of a process that ends."""

import asyncio
import signal

import pytest
from starlette.testclient import TestClient

from meshwise.web.answers import answer
from meshwise.web.app import make_app
from meshwise.web.links import parse_command
from meshwise.web.searches import Searches
from tests.web.conftest import untimed

QUICK = parse_command("meshwise plan serve llama-3-8b --on h100:1 --prompt 128 --output 32")
#: Takes minutes.
LONG = parse_command("meshwise plan train deepseek-v3 --on h100:2048 --batch-tokens 16Mi --seq-len 4096")


async def found(searches, asked):
    with searches.job((*asked, True)).listened() as job:
        await job.done.wait()
        return job


@pytest.mark.slow  # 5 CPU-seconds: a process is started, and a search of minutes begun three times
def test_a_search_is_answered_cancelled_and_survived():
    """All in one process, because starting one takes a second."""

    async def all_of_it():
        searches = Searches()
        first, second = await asyncio.gather(found(searches, QUICK), found(searches, QUICK))
        assert first is second
        assert untimed(first.answered.json_of(explain=True)) == untimed(answer(*QUICK).json_of(explain=True))
        assert searches.known((*QUICK, True)) is first.answered

        job = searches.job((*LONG, True))
        with job.listened():
            async for line in job.lines():
                if "best possible within" in line:
                    break
            await searches.cancel(job.id)
        process, told = job.process, job.answered
        assert job.interrupted
        assert told.envelope["answer"].startswith("Best possible within")
        assert told.envelope["search"]["complete"] is False
        assert searches.known((*LONG, True)) is told, "who reloads the page sees what was found"
        searches.forget((*LONG, True))
        assert searches.known((*LONG, True)) is None

        again = searches.job((*LONG, True))
        with again.listened():  # the reader goes: the search is cancelled, and nothing is kept
            assert await again.within(0.2) is False
        await again.done.wait()
        assert again.process is process
        assert searches.known((*LONG, True)) is None

        last = searches.job((*LONG, True))
        with last.listened():
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGKILL)
            await last.done.wait()
        assert last.answered.kind == "Ended"
        assert "has ended (-9)" in last.answered.message
        await searches.close()
        assert process.returncode == -9

    asyncio.run(all_of_it())


def test_a_search_that_waits_for_a_process_can_be_cancelled(monkeypatch):
    monkeypatch.setattr("meshwise.web.searches.MOST", 0)

    async def cancelled():
        searches = Searches()
        job = searches.job((*QUICK, True))
        waiting = asyncio.create_task(searches.cancel(job.id))
        await asyncio.sleep(0)
        searches._places.release()
        await waiting
        return job

    job = asyncio.run(cancelled())
    assert job.answered.message == "cancelled before it began"
    assert job.process is None


def test_a_process_that_cannot_be_started_is_said_in_words(monkeypatch):
    async def refused(*_words, **_options):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("meshwise.web.searches.asyncio.create_subprocess_exec", refused)
    job = asyncio.run(found(Searches(), QUICK))
    assert "no process can be started for the search: Resource temporarily unavailable" in job.answered.message


@pytest.mark.parametrize("back", ["https://evil.example/", "//evil.example", "/\\evil.example", "/train"])
def test_cancelling_leads_back_to_this_server(page, back):
    sent = page.post("/cancel", data={"job": "none", "back": back})
    assert sent.status_code == 303
    assert sent.headers["location"] == (back if back == "/train" else "/")


def test_a_search_is_asked_again(page):
    sent = page.post("/again", data={"command": "meshwise plan train llama-3-8b --on v5e:4x8"})
    assert sent.headers["location"] == "/train?model=llama-3-8b&on=v5e:4x8"
    assert page.post("/again", data={"command": "rm"}).status_code == 400
    other = {"origin": "http://evil.example"}
    assert page.post("/again", data={"command": "meshwise models"}, headers=other).status_code == 403


@pytest.mark.slow  # 3 CPU-seconds: a process is started
def test_a_page_that_begins_before_its_answer_is_200_and_has_the_answers_status_when_it_is_opened_again(monkeypatch):
    """The status is sent first; programs ask /api/, which waits."""
    monkeypatch.setattr("meshwise.web.app._PATIENCE", 0.0)
    path = "/serve?model=llama-3-70b&on=h100:1&prompt=1024&output=16"
    with TestClient(make_app(), base_url="http://127.0.0.1:8765") as client:
        begun = client.get(path)
        assert begun.status_code == 200
        assert "Searching" in begun.text
        assert "No answer" in begun.text
        assert client.get(path).status_code == 422
        asked = client.get(f"/api/plan{path}")
        assert (asked.status_code, asked.headers["x-exit-code"]) == (422, "3")
