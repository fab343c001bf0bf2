"""`load`: the planner's own load sent to an endpoint, and what its users would notice, beside the simulation of it.

Not here: words (`report`), sending (`engine.client`), what a load is (`jobs.traffic`).
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import Field

from meshwise.commands.command import Screen, Tell, command, silent, verb
from meshwise.commands.estimate_serve import Lengths
from meshwise.commands.requests import File, Flag, Request
from meshwise.commands.simulate_serve import Count, Seconds, SimulateServeRequest, simulate_serve
from meshwise.core.errors import InfeasibleError, MeshwiseError, MissingDependencyError, quoted
from meshwise.core.explanation import Answer
from meshwise.costs.machine import check_new, write_new
from meshwise.jobs.traffic import MOST_REQUESTS
from meshwise.report.load import LoadResult, load_report, load_rows

#: Fields that a simulation of the load has, too.
_SHARED = ("rate", "prompt", "output", "arrivals", "csv", "requests", "seed", "prefix_tokens", "prefix_groups")


class LoadRequest(Request):
    """What `meshwise load` is asked."""

    positional = ("url",)
    sections: ClassVar = {
        "Load": ("rate", "prompt", "output", "arrivals", "requests", "csv", "seed"),
        "Endpoint": ("model", "api_key"),
        "Prediction": ("costs",),
    }

    url: str
    """The endpoint, such as http://127.0.0.1:8000: meshwise, vLLM, SGLang, or another of OpenAI's protocol."""
    rate: float | None = Field(default=None, gt=0)
    """Mean requests per second; a CSV file has its own."""
    prompt: Lengths = "128"
    """Tokens per prompt: a number, uniform:128-2048, or lognormal:MEAN:VARIATION[:MOST]."""
    output: Lengths = "32"
    """Output tokens per request, written as --prompt."""
    arrivals: str = "poisson"
    """How requests arrive: poisson, constant, gamma:VARIATION (clumps), on-off:10s/50s (bursts)."""
    csv: File | None = None
    """CSV file of requests (instead of --prompt and --output), as for 'simulate serve'."""
    requests: Count | None = Field(default=None, ge=1, le=MOST_REQUESTS)
    """How many requests; by default 100, or all of a CSV file."""
    seed: int = Field(default=0, ge=0)
    """Seed of everything that is drawn at random, the tokens of prompts included."""
    prefix_tokens: int = Field(default=0, ge=0)
    """Tokens of a prefix shared between prompts, in addition to --prompt."""
    prefix_groups: int = Field(default=1, ge=1)
    """Number of distinct shared prefixes."""
    model: str | None = None
    """Name of the model there; by default the first that the endpoint lists."""
    api_key: str | None = Field(default=None, exclude=True)
    """Key that the endpoint asks for."""
    vocabulary: int | None = Field(default=None, ge=2, le=2**31 - 1)
    """Prompts are drawn from tokens below this number; by default 1,000, or fewer where the endpoint says so."""
    ignore_eos: bool = True
    """Ask for outputs of exactly the load's lengths (a field that vLLM, SGLang and meshwise know)."""
    timeout: Seconds = Field(default=600.0, gt=0)
    """Longest wait for one request."""
    costs: Annotated[str | None, Flag("PLAN|COSTS")] = None
    """Simulate the same requests by these step costs, or this plan of serving, and show both."""
    chip: str = ""
    """Chip that serves, for the rows of --save."""
    num_chips: int = Field(default=1, ge=1)
    """Chips that serve, for the rows of --save."""
    engine: str = "unknown"
    """Engine that serves, with its version, for the rows of --save."""

    def simulated(self) -> SimulateServeRequest:
        """The same load, as a simulation is asked."""
        given = {name: getattr(self, name) for name in _SHARED if name in self.model_fields_set or name != "requests"}
        if self.csv is not None:
            given = {n: v for n, v in given.items() if n in self.model_fields_set}
        elif self.requests is None:
            given["requests"] = 100
        return SimulateServeRequest(**given)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that are no IPv6 address
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


@command(LoadRequest)
def load(request: LoadRequest, *, progress: Tell = silent) -> LoadResult:
    """Send a load to an endpoint: what `meshwise load` answers, as values.

    Args:
        progress: told of the requests that are over.

    Raises:
        MissingDependencyError: the library that sends is missing.
        MeshwiseError: an argument that cannot be understood; no endpoint there.
        InfeasibleError: no request was answered.
    """
    if importlib.util.find_spec("httpx") is None:
        raise MissingDependencyError("load needs the library httpx: pip install 'meshwise[serve]'")
    from meshwise.engine.client import Client, Target, find_model  # noqa: PLC0415 -- an optional extra

    if not _is_address(request.url):
        raise MeshwiseError(f"expected an address such as http://127.0.0.1:8000, found {quoted(request.url)}")
    url = request.url.rstrip("/").removesuffix("/v1")
    asked = request.simulated()
    wanted = asked.load()
    served = None if request.costs is None else simulate_serve.answer(request.costs, asked).result
    total = wanted.num_requests
    model, known = asyncio.run(find_model(url, request.api_key, request.model))
    target = Target(url, model, request.vocabulary or known, request.api_key, request.ignore_eos, request.timeout)
    client = Client(target, wanted, request.seed, lambda over: progress(f"{over:,} of {total:,} requests are over"))
    sent = asyncio.run(client.send())
    errors = Counter(one.error for one in sent if one.error is not None)
    answered = [one for one in sent if one.error is None]
    if not answered:
        words = errors.most_common(1)[0][0]
        raise InfeasibleError(f"{url}: none of {total:,} requests was answered: {words}")
    return LoadResult(
        url=url,
        model=model,
        load=wanted.words(),
        requests=len(sent),
        answered=len(answered),
        errors=dict(errors),
        seconds=max(one.demand.arrival + (one.done or 0.0) for one in answered),
        prompt_tokens=sum(one.demand.prompt for one in answered),
        output_tokens=sum(one.tokens for one in answered),
        ttft=tuple(one.first for one in answered if one.first is not None),
        tpot=tuple(one.tpot for one in answered if one.tpot is not None),
        end_to_end=tuple(one.done for one in answered if one.done is not None),
        late=max(one.late for one in sent),
        simulated_ttft=None if served is None else tuple(served.ttft_s.tolist()),
        simulated_tpot=None if served is None else tuple(served.tpot_s.tolist()),
        simulated_end_to_end=None if served is None else tuple(served.end_to_end_s.tolist()),
    )


class _Files(Request):
    sections: ClassVar = {"Output": ("save",)}

    save: Path | None = None
    """Write the medians to this new file as CSV, which 'score' reads (docs/measurements.md)."""


Answer.reports[LoadResult] = lambda result: load_report(result, {})


@verb(LoadRequest, _Files)
def show_load(screen: Screen, request: LoadRequest, files: _Files) -> None:
    """Send a load to an endpoint, and say what its users would notice.

    The load is that of 'simulate serve': arrivals, lengths and shared prefixes are drawn alike from the same seed.
    Requests are sent when they are due, whether or not others were answered (open loop), as tokens, by streams. With
    --costs the same requests are simulated, too.

    \b
      meshwise load http://127.0.0.1:8000 --rate 2 --prompt 128 --output 32
      meshwise load http://127.0.0.1:8000 --csv requests.csv --costs plan.json
      meshwise load http://10.0.0.7:8000 --rate 8 --chip h100-sxm --num-chips 8 --save rows.csv
    """  # noqa: D301  (click's mark for lines that stay as they are)
    check_new(files.save)
    result = load.answer(request, progress=screen.progress)
    if files.save is not None:
        write_new(files.save, load_rows(result, request.chip, request.num_chips, request.engine))
    screen.show(load_report(result, request.echo() | files.echo()))
