"""The server: routes, and what it refuses. Everything is answered to GET; nothing is written or fetched.

Not here: the answers (`answers`), pages (`pages`), starting it (`serve`).
"""

from __future__ import annotations

import asyncio
import difflib
import json
import tempfile
import traceback
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwise import __version__
from meshwise.commands.export import export
from meshwise.commands.requests import refuse
from meshwise.core.errors import MeshwiseError
from meshwise.web import pages
from meshwise.web.answers import Answered, answer, failed
from meshwise.web.compare import other
from meshwise.web.links import VERBS, Pairs, parse_command, query, read_pairs
from meshwise.web.openapi import description
from meshwise.web.searches import Job, Searches
from meshwise.web.views import CARDS, COMPARED, VIEWS, View, link

#: Host names that the server answers to; another name is a page elsewhere that points here.
HOSTS = ("127.0.0.1", "localhost")

_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

#: Exit code of a command -> HTTP status of its failure.
_STATUS = {1: 500, 2: 400, 3: 422, 4: 501, 130: 503}


class Guard:
    """Adds the headers of the content policy; refuses requests that another site makes in the background."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        origin, host = headers.get("origin"), headers.get("host", "")
        foreign = headers.get("sec-fetch-site") == "cross-site" or (origin is not None and origin != f"http://{host}")
        if foreign and (headers.get("sec-fetch-mode") != "navigate" or scope["method"] != "GET"):
            refused = PlainTextResponse("another site may link to this page, not read it or post to it\n", 403)
            await refused(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = {"cache-control": "max-age=60"} if scope["path"].startswith("/static/") else {}
                own = [(key.encode(), value.encode()) for key, value in (_HEADERS | kept).items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        await self.app(scope, receive, guarded)


#: Verbs that answer at once, in this process.
_QUICK = frozenset({"roofline", "shard", "collective", "model", "models", "chips", "clusters", "book", "rule"})

#: Seconds that a page waits for a search before it shows progress, and between looks whether its reader has gone.
_PATIENCE, _LOOK = 0.4, 0.5

_LONGEST_PATH = 255
_remembered = lru_cache(maxsize=64)(answer)


def _is_quick(verb: str, pairs: Pairs) -> bool:
    return verb in _QUICK or (verb.startswith("estimate") and ("changes", "no") in pairs)


async def find_here(verb: str, pairs: Pairs, *, explained: bool = True) -> Answered:
    """Answer a question in a thread of this process."""
    if any(Path(text).exists() for _, text in pairs if len(text) < _LONGEST_PATH and "\0" not in text):
        return await run_in_threadpool(partial(answer, verb, pairs, explained=explained))  # a file may change
    return await run_in_threadpool(partial(_remembered, verb, pairs, explained=explained))


async def find(request: Request, verb: str, pairs: Pairs, *, waiting: bool = True) -> Answered:
    """Answer a question: at once, or by a search, which is cancelled when its reader goes.

    Args:
        request: whose reader waits.
        verb, pairs: the question.
        waiting: whether a search ends after a minute.
    """
    searches: Searches | None = request.app.state.searches
    if searches is None or _is_quick(verb, pairs):
        if "x-held" not in request.headers:
            return await find_here(verb, pairs)
        async with request.app.state.moving:  # one move after another; those that a later one has replaced are passed
            if await request.is_disconnected():
                return failed(verb, pairs, MeshwiseError("the slider has moved on"))
            return await find_here(verb, pairs, explained=False)
    key = (verb, pairs, waiting)
    if (known := searches.known(key)) is not None:
        return known
    with searches.job(key).listened() as job:
        while not await job.within(_LOOK) and not await request.is_disconnected():
            pass
        return job.answered or failed(verb, pairs, MeshwiseError("the reader has gone"))


def asked_of(view: View, given: Iterable[tuple[str, str]]) -> pages.Asked:
    """What a link of a view asks; an empty one asks the view's example.

    Raises:
        MeshwiseError: an option that there is not.
    """
    typed = [(key, text.strip()) for key, text in given if text.strip()]
    page = {key: text for key, text in typed if key in pages.PAGE_OPTIONS}
    own = [(key, text) for key, text in typed if key not in pages.PAGE_OPTIONS]
    verb = view.verb_of(key for key, _ in own)
    if verb == view.verb and view.layout_verb:  # of estimates alone, which the page's own links turn off
        own = [(key, text) for key, text in own if key != "changes"]
    pairs = read_pairs(verb, own)
    if not pairs and not page:
        return pages.Asked(view, verb, view.preset(), page, example=True)
    return pages.Asked(view, verb, pairs, page)


async def show_view(request: Request) -> Response:
    """The page of a view."""
    view = VIEWS[request.url.path.strip("/")]
    given = request.query_params.multi_items()
    try:
        asked = asked_of(view, given)
    except MeshwiseError as error:
        verb = view.verb_of(key for key, _ in given)
        return _page(pages.Asked(view, verb, (), {}), failed(verb, (), error))
    own = [*asked.pairs, *asked.page.items()]
    if not asked.example and len(own) < len(given):  # a form sends empty fields and defaults, too
        return RedirectResponse(f"/{view.name}?{query(own)}" if own else f"/{view.name}", 303)
    searches: Searches | None = request.app.state.searches
    key = (asked.verb, asked.pairs, True)
    if searches is not None and not _is_quick(asked.verb, asked.pairs) and searches.known(key) is None:
        job = searches.job(key)
        stack = ExitStack()
        stack.enter_context(job.listened())
        if not await job.within(_PATIENCE):
            return StreamingResponse(_searching(request, asked, job, stack), media_type="text/html")
        stack.close()
    answered = await find(request, asked.verb, asked.pairs)
    return _page(asked, answered, await _second(request, asked), held="x-held" in request.headers)


async def _searching(request: Request, asked: pages.Asked, job: Job, stack: ExitStack) -> AsyncIterator[str]:
    """A page that grows: the question, progress, then the answer."""
    with stack:
        yield pages.view_top(asked, job.id)
        async for line in job.lines():
            yield pages.progress(line)
        assert job.answered is not None, "it has ended"
        second = await _second(request, asked)
        try:
            yield pages.progress_end() + pages.view_rest(asked, job.answered, second)
        except Exception as error:  # noqa: BLE001  (the boundary: the page has begun, and says how it ends)
            traceback.print_exception(error)
            yield pages.progress_end() + pages.bug(error)


async def _second(request: Request, asked: pages.Asked) -> Answered | None:
    """The answer of B, if the link has one."""
    text = asked.page.get("b")
    if text is None:
        return None
    try:
        verb, pairs = other(asked.view.verb, asked.view.layout_verb, asked.pairs, text)
    except MeshwiseError as error:
        return failed(asked.verb, (), error)
    return await find(request, verb, pairs)


def _page(
    asked: pages.Asked, answered: Answered, second: Answered | None = None, *, held: bool = False
) -> HTMLResponse:
    status = _STATUS[answered.exit_code] if answered.message else 200
    return HTMLResponse(pages.view_top(asked) + pages.view_rest(asked, answered, second, held=held), status)


async def show_start(request: Request) -> Response:
    """The start page."""
    cards = {name: await find(request, VIEWS[name].verb, VIEWS[name].preset()) for name in CARDS}
    return HTMLResponse(pages.start_page(cards))


async def show_about(_request: Request) -> Response:
    """What stands behind the numbers."""
    return HTMLResponse(pages.text_page("about", "About", "about", version=__version__, verbs=list(VERBS)))


async def show_compare(request: Request) -> Response:
    """Two commands: where both are given, the view of the first with the second beside it."""
    a, b = (request.query_params.get(key, "").strip() for key in ("a", "b"))
    message = ""
    if a and b:
        try:
            verb, pairs = parse_command(a)
            return RedirectResponse(f"{link(verb, pairs)}&{query((('b', b),))}", 303)
        except MeshwiseError as error:
            message = str(error)
    examples = [(words, f"{link(*parse_command(one))}&{query((('b', two),))}") for words, one, two in COMPARED]
    body = pages.text_page("compare", "Compare", "compare", a=a, b=b, message=message, examples=examples)
    return HTMLResponse(body, 400 if message else 200)


async def go(request: Request) -> Response:
    """From a command to its link."""
    text = request.query_params.get("command", "")
    try:
        return RedirectResponse(link(*parse_command(text)), 303)
    except MeshwiseError as error:
        return _message("No such page", str(error), 400)


async def show_json(request: Request) -> Response:
    """What a command prints with `--json`."""
    verb = request.url.path.removeprefix("/api/").strip("/").replace("/", " ")
    given = request.query_params.multi_items()
    explain = ("explain", "yes") in given
    try:
        pairs = read_pairs(verb, [pair for pair in given if pair[0] != "explain"])
    except MeshwiseError as error:
        answered = failed(verb, (), error)
    else:
        answered = await find(request, verb, pairs, waiting=False)
    status = _STATUS[answered.exit_code] if answered.message else 200
    headers = {"x-exit-code": str(answered.exit_code)}
    text = json.dumps(answered.json_of(explain=explain), indent=2, allow_nan=False) + "\n"
    return Response(text, status, headers, "application/json")


async def cancel(request: Request) -> Response:
    """End a search; its page then shows the best so far."""
    form = dict(parse_qsl((await request.body()).decode("utf-8", "replace")))
    searches: Searches | None = request.app.state.searches
    if searches is not None:
        await searches.cancel(form.get("job", ""))
    return RedirectResponse(_local(form.get("back", "/")), 303)


async def again(request: Request) -> Response:
    """Search anew where a search was cancelled, or ended with its time."""
    form = dict(parse_qsl((await request.body()).decode("utf-8", "replace")))
    searches: Searches | None = request.app.state.searches
    try:
        verb, pairs = parse_command(form.get("command", ""))
    except MeshwiseError as error:
        return _message("No such page", str(error), 400)
    if searches is not None:
        searches.forget((verb, pairs, True))
    return RedirectResponse(link(verb, pairs), 303)


def _local(path: str) -> str:
    """A path on this server, not elsewhere."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) else "/"


async def show_openapi(_request: Request) -> Response:
    """The description of the API."""
    return JSONResponse(description())


async def show_file(request: Request) -> Response:
    """A file that the command would write: the plan, the trace, or the plan in the words of a tool."""
    name, given = request.path_params["name"], request.query_params.multi_items()
    verb = request.query_params.get("verb", "")
    try:
        refuse((verb not in VERBS, f"verb: expected one of {', '.join(VERBS)}, found {verb[:80]!r}"))
        answered = await find(request, verb, read_pairs(verb, [pair for pair in given if pair[0] != "verb"]))
        refuse((answered.message, answered.message))
        if name in answered.files:
            return _download(name, answered.files[name])
        written = name in pages.EXPORTED and "plan.json" in answered.files
        refuse((not written, f"'meshwise {verb}' writes no {name[:80]!r}"))
        exported = await run_in_threadpool(partial(_exported, answered.files["plan.json"], name))
    except MeshwiseError as error:
        return _message("No file", str(error), 400)
    return _download(*exported)


def _exported(plan: str, tool: str) -> tuple[str, str]:
    """Name and text of the file for a tool."""
    with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
        file = Path(folder) / "plan.json"
        file.write_text(plan, encoding="utf-8")
        handed = export(file, to=tool)
    return handed.file_name, handed.text


def _download(name: str, text: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(text, 200, headers, "application/json" if name.endswith(".json") else "text/plain; charset=utf-8")


def _message(title: str, message: str, status: int, near: tuple[str, ...] = ()) -> HTMLResponse:
    return HTMLResponse(pages.text_page("message", title, title=title, message=message, near=near), status)


async def broken(_request: Request, error: Exception) -> Response:
    """A bug, in words; the terminal of the server shows where."""
    page = pages.text_page("message", "A bug", title="A bug", message=pages.bug_words(error), near=())
    return HTMLResponse(page, 500, _HEADERS)  # it is made outside of the guard


async def not_found(request: Request, _error: Exception) -> Response:
    """No such page: the nearest ones."""
    path = request.url.path
    near = difflib.get_close_matches(path, [f"/{name}" for name in (*VIEWS, "compare", "about")], 3)
    return _message("No such page", f"there is no page {path[:80]!r}", 404, tuple(near))


async def wrong_method(request: Request, _error: Exception) -> Response:
    """Only reading."""
    return _message("Not so", f"{request.method} is not answered here; open the link instead", 405)


def make_app(*, processes: bool = True) -> Starlette:
    """The application.

    Args:
        processes: whether searches run in processes of their own.
    """
    routes = [
        Route("/", show_start),
        Route("/about", show_about),
        Route("/compare", show_compare),
        Route("/go", go),
        Route("/cancel", cancel, methods=["POST"]),
        Route("/again", again, methods=["POST"]),
        *(Route(f"/{name}", show_view) for name in VIEWS),
        Route("/api/openapi.json", show_openapi),
        *(Route(f"/api/{verb.replace(' ', '/')}", show_json) for verb in VERBS),
        Route("/files/{name}", show_file),
        Mount("/static", StaticFiles(directory=str(resources.files("meshwise.web") / "static"))),
    ]
    handlers: Any = {404: not_found, 405: wrong_method, 500: broken}
    guards = [Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS)), Middleware(Guard)]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.searches = searches = Searches() if processes else None
        app.state.moving = asyncio.Lock()
        if searches is not None:
            searches.warm()
            app.state.warming = asyncio.get_running_loop().create_task(_warm())
        yield
        if searches is not None:
            await searches.close()

    return Starlette(routes=routes, middleware=guards, exception_handlers=handlers, lifespan=lifespan)


#: What a slider may ask first.
_FIRST = (
    "meshwise roofline 'fp32[N] + fp32[N] -> fp32[N]' --on h100",
    "meshwise shard 'A[I_X] -> A[I]' --mesh X=2 --set I=8 --on v5e:2x1",
    "meshwise estimate train llama-3-8b --on h100:8 --batch-tokens 1Mi --seq-len 4096 --layout fsdp=8 --no-changes",
    "meshwise estimate serve llama-3-8b --on h100:8 --batch 8 --layout tensor=8 --prompt 64 --output 64 --no-changes",
    "meshwise book roofline.q2.Bcrit",
)


async def _warm() -> None:
    """Load what answers in this process, before a slider asks for it."""
    await asyncio.sleep(1)  # the first page goes before
    for command in _FIRST:
        await find_here(*parse_command(command))
