"""Whether a search for a named tool takes longer than the default one, as users see it: CPU seconds of whole commands.

    python benchmarks/tool_commands.py [NAME...]

Of each of the sixty jobs of `tool_jobs` (those whose names hold one of the given): seconds of `meshwise plan` by
default, and how many times as long it takes under each tool that takes the job. A command of a second varies by some
per cent, more beside other work; each has the best of several runs, one after the other.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from collections.abc import Iterator

from tool_jobs import JOBS, Job

from meshwise.exports.serving import SERVING_TOOLS
from meshwise.exports.targets import USUAL

#: Runs of each command; tools of training.
RUNS, TOOLS = 4, (*USUAL, "meshwise")

#: A ratio up to which no difference is told.
NOISE = 1.03


def command(job: Job, tool: str) -> list[str]:
    """What a user types; by default without a tool."""
    options = [part for name, value in job.asked.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    kind = "serve" if job.serves else "train"
    return ["meshwise", "plan", kind, job.model, "--on", job.on, *options, *(["--tool", tool] if tool else [])]


def seconds(asked: list[str]) -> float:
    """CPU seconds of a command, infinite where it is refused."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(asked, capture_output=True, check=False)  # noqa: S603  (our own words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return math.inf if done.returncode else spent


def compared(job: Job) -> Iterator[tuple[str, float]]:
    """Seconds by tool, "" for the default, of those that take the job."""
    tools = ["", *(SERVING_TOOLS if job.serves else TOOLS)]
    best = dict.fromkeys(tools, math.inf)
    for _ in range(RUNS):
        for tool in [t for t in tools if t in best]:
            best[tool] = min(best[tool], seconds(command(job, tool)))
            if math.isinf(best[tool]):
                del best[tool]
    yield from best.items()


def main(names: list[str]) -> None:
    """Print a line a job, and how often each tool took longer."""
    ratios: dict[str, list[float]] = {}
    for job in (j for j in JOBS if not names or any(n in j.name for n in names)):
        found = dict(compared(job))
        default = found.pop("")
        each = {tool: spent / default for tool, spent in found.items()}
        for tool, ratio in each.items():
            ratios.setdefault(tool, []).append(ratio)
        listed = "  ".join(f"{tool} {ratio:.2f}" for tool, ratio in each.items())
        print(f"{job.name:44} {default:6.2f} s  {listed}", flush=True)
    for tool, of in ratios.items():
        longer = sum(ratio > NOISE for ratio in of)
        print(f"--tool {tool}: longer in {longer} of {len(of)} jobs, {max(of):.2f} times at most")


if __name__ == "__main__":
    main(sys.argv[1:])
