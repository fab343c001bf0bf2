"""`meshwise simulate serve`: requests over time, served by replicas of an engine."""

from __future__ import annotations

from pathlib import Path

import click

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.cli.progress import terminal_progress
from meshwise.commands.simulate_serve import SimulateServeRequest, read_served, serve_load
from meshwise.core.errors import MeshwiseError
from meshwise.report.serving import serving_report, serving_svg, serving_trace

_FILE = click.Path(dir_okay=False, path_type=Path)

#: Steps that a trace shows.
_SPANS = 20_000


@click.command()
@request_options(SimulateServeRequest, arguments=("costs",), flags={"costs": "PLAN|COSTS"})
@click.option("--svg", type=_FILE, help="Write the load over time to this file as SVG.")
@click.option("--trace", type=_FILE, help="Write the first 20,000 steps to this file, for Perfetto.")
@output_options
def serve(request: SimulateServeRequest, svg: Path | None, trace: Path | None, output: Output) -> None:
    """Serve requests over time by replicas of an engine.

    PLAN is what 'plan serve --save' wrote: its engines serve its load, but for what options say otherwise. Or COSTS, a
    JSON file of what a step of an engine takes. Requests arrive, wait, are batched, prefilled and
    generated, give way when the cache is full, and find prefixes that others left; the answer is what users notice,
    and how busy the replicas are. With --capacity it is the highest rate that keeps the targets.

    \b
      meshwise simulate serve engine.json --rate 6 --prompt 1024 --output 256
      meshwise simulate serve engine.json --capacity --ttft 500ms --tpot 30ms \\
        --prompt lognormal:1024:1:8192 --replicas 4
      meshwise simulate serve plan.json --rate 40
      meshwise simulate serve engine.json --csv requests.csv --policy chunked
    """  # noqa: D301  (click's mark for lines that stay as they are)
    with terminal_progress(quiet=output.as_json) as progress:
        served = serve_load(request, read_served(request.costs), spans=_SPANS if trace else 0, progress=progress)
    for flag, file, picture in (("--svg", svg, serving_svg), ("--trace", trace, serving_trace)):
        if file is not None:
            text = picture(served.result)
            try:
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise MeshwiseError(f"{flag} {file}: {error.strerror}") from None
    files = {"svg": None if svg is None else str(svg), "trace": None if trace is None else str(trace)}
    inputs = {**request.model_dump(), **files}
    output.show(serving_report(served.result, served.load, served.targets, served.capacity, inputs))
