"""Sixty jobs: whether a tool runs the plans that are found, and what asking for that costs.

    python benchmarks/tool_jobs.py [NAME...]

Of each job: by default the first plan exports to every tool that it is said to run in, and there is one; under each
tool that takes the job, every plan of the ranking exports to it; the simplest plan (`--within`) costs less than 2 % of
the fastest; and a search for a tool takes no more CPU time than one for none that hides as much as the tool does, which
is how long the tool's conditions take. Searches that seem slower are run again, as other work on the machine only
slows. Exits with 1 where one of these does not hold.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

import meshwise
from meshwise.core.errors import HandoverError, MeshwiseError
from meshwise.costs.problem import ServingProblem
from meshwise.exports import runs_in, tools_for
from meshwise.exports.serving import SERVING_TOOLS, serving_runs_in, serving_tools_for
from meshwise.exports.targets import USUAL
from meshwise.search import Plan, plan_training
from meshwise.search.serving import ServingPlan

#: What the simplest plan may cost, a share of the fastest.
WITHIN = 0.02

#: Our own runtime and engine, which read plans as they are: nothing is exported to them.
OWN = "meshwise"

#: CPU seconds by which two runs of one search differ, and their share; and how often each is run at most.
NOISE_S, NOISE, RUNS = 0.1, 0.05, 4


@dataclass(frozen=True)
class Job:
    """One question to the planner.

    Args:
        model, on: by name.
        asked: the options of `plan_train`, or of `plan_serve` if there is a prompt.
    """

    model: str
    on: str
    asked: dict[str, Any]

    @property
    def serves(self) -> bool:
        """Whether it is a job of serving."""
        return "prompt" in self.asked

    @property
    def name(self) -> str:
        """As the table has it."""
        sizes = f"{self.asked['prompt']}+{self.asked['output']}" if self.serves else f"{self.asked['batch_tokens']} of "
        return f"{self.model} {self.on} {sizes}{'' if self.serves else self.asked['seq_len']}"


def _training(text: str) -> list[Job]:
    rows = (line.split() for line in text.strip().splitlines())
    return [Job(m, on, {"batch_tokens": batch, "seq_len": int(length)}) for m, on, batch, length in rows]


def _serving(text: str) -> list[Job]:
    names = "prompt", "output", "precision"
    rows = (line.split() for line in text.strip().splitlines())
    asked = ((m, on, dict(zip(names, (int(p), int(o), *formats), strict=False))) for m, on, p, o, *formats in rows)
    return [Job(*job) for job in asked]


#: Model, cluster, tokens of a batch, tokens of a sequence.
TRAINING = _training("""
    llama-3.2-1b        rtx-4090:8        256Ki   2048
    qwen3-0.6b          rtx-pro-6000:8    512Ki   4096
    qwen3-1.7b          l40s:16           512Ki   4096
    llama-3-8b          h100:8            512Ki   8192
    llama-3-8b          h100:16           1Mi     8192
    qwen2.5-7b          mi300x:24         768Ki   4096
    llama-2-7b          a100:64           4Mi     4096
    llama-3.1-8b        h100:64           1Mi     131072
    gemma-2-9b          a100:32           1Mi     8192
    gemma-3-1b          v5e:4x4           512Ki   4096
    qwen3-14b           b200:64           4Mi     4096
    qwen3-32b           mi300x:128        4Mi     8192
    mistral-7b-v0.1     h800:32           1Mi     8192
    olmo-2-13b          a100:256          4Mi     4096
    olmo-3-7b           h100:128          4Mi     8192
    llama-3-70b         h100:512          4Mi     8192
    llama-3.3-70b       b200:256          8Mi     8192
    llama-3-70b         mi300x:512        4Mi     8192
    llama-3.1-405b      h100:16384        16Mi    8192
    llama-3.1-405b      b200:4096         16Mi    8192
    gpt-3-175b          a100:1024         3Mi     2048
    mixtral-8x7b        h100:64           1Mi     4096
    mixtral-8x7b        h800:256          4Mi     4096
    mixtral-8x22b       b200:128          4Mi     8192
    qwen3-30b-a3b       h100:128          4Mi     4096
    qwen3-30b-a3b       mi300x:64         2Mi     4096
    deepseek-v2         h200:256          8Mi     4096
    deepseek-v3         h800:2048         60Mi    4096
    gpt-oss-20b         h100:32           1Mi     8192
    jamba-v0.1          h100:64           1Mi     4096
    granite-4.0-h-tiny  h100:32           1Mi     4096
    nemotron-h-8b       h100:64           2Mi     8192
    mamba2-2.7b         a100:16           512Ki   2048
    llama-3-8b          v5e:16x16         2Mi     8192
    llama-3-8b          v5p:4x4x4         1Mi     8192
    llama-3-70b         v5p:16x20x28      4Mi     4096
    gemma-3-27b         v6e:16x16         2Mi     8192
    mixtral-8x7b        v5p:4x4x8         2Mi     4096
    llama-3-70b         tpu7x:4x8x8       4Mi     8192
    qwen3-30b-a3b       v6e:8x16          2Mi     4096
""")

#: Model, cluster, tokens of a prompt, tokens of an answer, number formats if others than the published ones.
SERVING = _serving("""
    llama-3.2-3b        rtx-4090:8        512     128
    qwen3-8b            l40s:8            2048    256
    qwen3-4b            rtx-pro-6000:8    1024    256
    llama-3-8b          h100:8            1024    256
    llama-3-8b          a100:8            4096    256
    llama-3-70b         h100:64           2048    256
    llama-3.1-70b       b200:16           8192    512
    llama-3.1-8b        h100:16           65536   512
    llama-3.1-405b      h200:16           2048    512
    qwen2.5-7b          mi300x:8          1024    256
    qwen3-32b           mi300x:16         2048    512
    mixtral-8x7b        h100:8            1024    256
    qwen3-30b-a3b       h100:16           1024    512
    qwen3-235b-a22b     b200:16           2048    512
    deepseek-v3         h200:32           4096    1024
    gpt-oss-120b        h100:8            1024    1024
    gemma-3-27b         h800:8            4096    256
    llama-3-8b          v5e:2x4           1024    256
    llama-2-70b         v5e:4x8           1024    128    int8
    gemma-2-9b          v6e:2x4           2048    256
""")

JOBS = (*TRAINING, *SERVING)


@dataclass
class Answer:
    """What is known of one job.

    Args:
        name: the job's.
        first: tools that the first plan runs in.
        cost: by which share of the fastest plan the simplest is worse.
        seconds: tool -> CPU seconds of its search; "none" for the search without.
        hidden: tool -> CPU seconds of its search, and of one for none that hides as much.
        faults: what does not hold, in words.
    """

    name: str
    first: tuple[str, ...] = ()
    cost: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, tuple[float, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def _exports(plan: Plan | ServingPlan, tool: str) -> str | None:
    """Why a plan cannot be exported to a tool; None where it can."""
    try:
        return None if meshwise.export(plan, to=tool).text else "an empty text"
    except HandoverError as error:
        return str(error)


def _search(job: Job, **asked: Any) -> tuple[list[Plan | ServingPlan], float]:
    """The ranking, and the CPU seconds that it took, none of them to collect the garbage of others."""
    gc.collect()
    start = time.process_time()
    if not job.serves:
        found = meshwise.plan_train(job.model, on=job.on, **job.asked, **asked)
        return list(found.plans), time.process_time() - start
    served = meshwise.plan_serve(job.model, on=job.on, **job.asked, **asked)
    seconds = time.process_time() - start
    return [ServingPlan(served.problem, e) for e in served.plans], seconds


def _score(plan: Plan | ServingPlan) -> float:
    """What the search makes least: seconds a token, of all chips together."""
    if isinstance(plan, ServingPlan):
        return 1 / plan.estimate.output_tokens_per_s
    assert plan.estimate is not None
    return plan.estimate.step_time.expected / plan.estimate.tokens  # batches are rounded to what divides


def _tools(plan: Plan | ServingPlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tools that the plan is said to run in, and those that take the job."""
    problem = plan.problem
    if isinstance(problem, ServingProblem):
        assert isinstance(plan, ServingPlan)
        names = serving_runs_in(problem, plan.setup), tuple(t.name for t in serving_tools_for(problem, SERVING_TOOLS))
    else:
        assert isinstance(plan, Plan)
        names = runs_in(plan), tuple(t.name for t in tools_for(problem, (*USUAL, OWN)))
    return names


def _hidden(job: Job, tool: str, plan: Plan | ServingPlan) -> Iterator[float]:
    """CPU seconds of the searches for a tool and for none: where they train, with what the tool of the plan hides."""
    for name in (tool, "none"):
        if isinstance(plan, ServingPlan):
            yield _search(job, tool=name)[1]
        else:
            gc.collect()
            start = time.process_time()
            plan_training(plan.problem, tools=tools_for(plan.problem, (tool,)) if name == tool else (), within=WITHIN)
            yield time.process_time() - start


def _slower(job: Job, tool: str, plan: Plan | ServingPlan, answer: Answer) -> bool:
    """Whether the search for a tool takes longer than the one for none, each at its best of several runs."""
    own = none = math.inf
    for _ in range(RUNS):
        own, none = map(min, (own, none), _hidden(job, tool, plan))
        answer.hidden[tool] = own, none
        if own <= none:
            return False
    return own > none * (1 + NOISE) + NOISE_S


def check(job: Job, *, timed: bool = True) -> Answer:
    """Ask the planner, export what it finds, and write down what does not hold; `timed`, of its speed as well."""
    answer = Answer(job.name)
    plans, _ = _search(job)
    answer.first, able = _tools(plans[0])
    exported = [tool for tool in answer.first if tool != OWN]
    if not answer.first or ({*able} - {OWN} and not exported):
        answer.faults.append("the first plan runs in no tool that takes the job")
    refused = [f"{tool}: {why}" for tool in exported if (why := _exports(plans[0], tool))]
    answer.cost = _score(plans[0]) / _score(_search(job, within=0)[0][0]) - 1
    if answer.cost >= WITHIN:
        answer.faults.append(f"the simplest costs {answer.cost:.1%}")
    _, answer.seconds["none"] = _search(job, tool="none")
    for tool in able:
        found, answer.seconds[tool] = _search(job, tool=tool)
        for i, plan in enumerate(found if tool != OWN else (), 1):
            if why := _exports(plan, tool):
                refused.append(f"plan {i} of --tool {tool}: {why}")
        if timed and _slower(job, tool, found[0], answer):
            own, none = answer.hidden[tool]
            answer.faults.append(f"--tool {tool} takes {own:.2f} CPU-s, {none:.2f} for none that hides as much")
    answer.faults += refused
    return answer


def _compared(answers: Sequence[Answer]) -> Iterator[str]:
    """How many searches for a tool took longer than those for none, in words."""
    plain = [(s, a.seconds["none"], t, a.name) for a in answers for t, s in a.seconds.items() if t != "none"]
    hidden = [(*pair, tool, a.name) for a in answers for tool, pair in a.hidden.items()]
    for found, which in ((hidden, "none that hides as much"), (plain, "--tool none")):
        slower = sorted((own / none, own, none, tool, name) for own, none, tool, name in found if own > none)
        most = "; by most --tool {3} of {4}, {1:.3f} for {2:.3f} CPU-s".format(*slower[-1]) if slower else ""
        yield f"{len(slower)} of {len(found)} searches for a tool take longer than for {which}{most}"


def _checked(job: Job) -> Answer:
    try:
        return check(job)
    except MeshwiseError as error:
        return Answer(job.name, faults=[str(error)])


def main(names: Sequence[str], told: Callable[[str], None]) -> bool:
    """Check the jobs whose names hold one of `names`, or all; print a table, and say whether all is as it should be."""
    table = Table("job", "first plan runs in", "simplest", "CPU-s, none", "CPU-s by tool", box=None)
    answers = []
    for job in (j for j in JOBS if not names or any(n in j.name for n in names)):
        a = _checked(job)
        answers.append(a)
        by_tool = ", ".join(f"{t} {s:.2f}" for t, s in a.seconds.items() if t != "none")
        table.add_row(a.name, " ".join(a.first), f"{a.cost:+.2%}", f"{a.seconds.get('none', 0):.2f}", by_tool)
        told(f"{a.name}: {'; '.join(a.faults) or 'as it should be'}")
    Console(width=160).print(table)
    faults = [f"{a.name}: {fault}" for a in answers for fault in a.faults]
    told("\n".join((*_compared(answers), f"{len(answers)} jobs, {len(faults)} faults", *faults)))
    return bool(answers) and not faults


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:], lambda line: print(line, file=sys.stderr, flush=True)) else 1)
