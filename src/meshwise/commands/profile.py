"""`profile`: where the time of a real run went, and why. Not here: reading traces (`profile`), words (`report`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from meshwise.commands.command import Screen, command, verb
from meshwise.commands.requests import Flag, Request
from meshwise.core.errors import MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.hardware import parse_cluster
from meshwise.profile import profile_traces, read_traces
from meshwise.profile.causes import find_causes
from meshwise.profile.diagnosis import Diagnosis
from meshwise.report.profile import profile_report


def _paths(value: Any) -> Any:
    """Paths as text; one stands for a list of one."""
    several = (value,) if isinstance(value, str | os.PathLike) else value
    return tuple(os.fspath(v) if isinstance(v, os.PathLike) else v for v in several)


class ProfileRequest(Request):
    """What `meshwise profile` is asked."""

    positional = ("traces",)

    traces: Annotated[
        tuple[str, ...],
        Flag("FILE", "TRACE..."),
        BeforeValidator(_paths, json_schema_input_type=str | os.PathLike[str] | Sequence[str]),
    ] = Field(min_length=1)
    """Traces of one job: files, folders or patterns; several ranks together."""
    on: Annotated[str | None, Flag("CLUSTER")] = Field(default=None, serialization_alias="cluster")
    """The cluster that was traced, h100:8; by default what the trace names."""
    step: Annotated[str | None, Flag("REGEX")] = None
    """Regular expression of the markers that are steps, instead of finding them."""


@command(ProfileRequest)
def profile(request: ProfileRequest) -> Diagnosis:
    """Say where the time of a real run went, and why: what `meshwise profile` answers, as values.

    Raises:
        ConfigError: a file that is no trace, is cut off or damaged; no step.
        MissingDependencyError: a format needs a library that is not installed.
        MeshwiseError: an argument that cannot be understood.
    """
    if not request.traces:
        raise MeshwiseError("expected a trace, found none")
    chip = None if request.on is None else parse_cluster(request.on).chip
    found = profile_traces(read_traces(request.traces), chip=chip, step=request.step)
    return Diagnosis(found, find_causes(found))


Answer.reports[Diagnosis] = lambda diagnosis: profile_report(diagnosis, {})


@verb(ProfileRequest)
def show_profile(screen: Screen, request: ProfileRequest) -> None:
    """Say where the time of a real run went, and why.

    TRACE is what a profiler wrote: *.xplane.pb of JAX (TPU, GPU, CPU), JSON of PyTorch's profiler, vLLM or SGLang
    (also .gz), a folder or zip file of nsys-jax; a folder, or several files of one job. Every instant of a step
    belongs to one part: compute, exposed collectives, exposed copies, waiting for other ranks, idle. Causes come
    with evidence and with what to change.

    \b
      meshwise profile profile_folder
      meshwise profile trace.json.gz --details
      meshwise profile rank0.json.gz rank1.json.gz
    """  # noqa: D301  (click's mark for lines that stay as they are)
    screen.show(profile_report(profile.answer(request), request.echo()))
