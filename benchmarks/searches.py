"""Whether searches always answer: forty jobs, each in its own process, with CPU-seconds and memory.

    python benchmarks/searches.py            all of them, and a summary
    python benchmarks/searches.py --check    the same; exit code 1 where a bar is missed
    python benchmarks/searches.py 3 17       some, by their numbers
    python benchmarks/searches.py --serve    `plan serve` on the largest networks: CPU-seconds and memory alone

For each job, in CPU-seconds of `plan train` since its process began, imports included: until the search knew a first
complete plan, until it knew one within 1 % of the best, and until it proved the best (and had found the simplest plan
as good, and what lost). Where nothing fits, the answer is the proof of that. Memory is the most that the process held.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import meshwise
from meshwise.core.errors import InfeasibleError
from meshwise.search.ranking import Found, Ranking

#: The bars: CPU-seconds to the first plan and to one within 1 %, for all; to the proof, for so many; bytes, for all.
FIRST, NEAR, PROVED, MOST_PROVED, MEMORY = 3.0, 10.0, 30.0, 36, 1e9

#: No job takes more CPU-seconds.
_LIMIT = 100


@dataclass(frozen=True)
class Job:
    """What is asked of `plan train`."""

    model: str
    on: str
    batch_tokens: str
    seq_len: int
    more: Mapping[str, str] | None = None

    @property
    def words(self) -> str:
        """In words, for the table."""
        given = {"on": self.on} | dict(self.more or {})
        on = given.pop("on") or Path(given.pop("cluster")).stem
        more = "".join(f", {name} {value}" for name, value in given.items())
        return f"{self.model} on {on}, {self.batch_tokens} of {self.seq_len:,}{more}"


#: More chips than any network of the catalog holds.
_LARGEST = Path(__file__).parent / "h100-98304.toml"

JOBS = (
    # The four that once did not end, or took gigabytes.
    Job("deepseek-v3", "h100:64", "64Ki", 128, {"max_memory": "5%"}),
    Job("mixtral-8x7b", "v6e:4x4", "262144", 8192),
    Job("deepseek-v3", "h100:4096@meta-roce", "64Mi", 4096),
    Job("deepseek-v3", "v5p:16x20x28", "64Mi", 4096),
    # Dense, from a node to the largest clusters there are.
    Job("llama-3-8b", "h100:8", "512Ki", 8192),
    Job("qwen2.5-7b", "rtx-4090:8", "64Ki", 2048),
    Job("gemma-3-27b", "v6e:16x16", "2Mi", 8192),
    Job("llama-3-8b", "v5e:4x4", "256Ki", 4096),
    Job("llama-3-70b", "v5e:16x16", "1Mi", 4096),
    Job("llama-3-70b", "h100:1024", "8Mi", 8192),
    Job("llama-3-70b", "v5p:16x20x28", "4Mi", 4096),
    Job("llama-3.1-405b", "h100:16384@meta-roce", "16Mi", 8192),
    Job("llama-3.1-405b", "h100:24576@meta-roce", "16Mi", 8192),
    Job("palm-540b", "v4:8x16x16*2", "4Mi", 2048),
    Job("gpt-3-175b", "a100:1024", "3Mi", 2048),
    Job("llama-3.1-405b", "tpu7x:4x4x576", "32Mi", 8192),
    Job("llama-3.1-405b", "", "256Mi", 8192, {"cluster": str(_LARGEST)}),
    Job("mistral-large", "gb200-nvl72:576", "8Mi", 8192),
    Job("llama-3.1-8b", "h100:128", "4Mi", 131072),
    Job("qwen2.5-32b", "mi300x:64", "2Mi", 32768),
    Job("olmo-3.1-32b", "h100:192@dgx-h100", "4Mi", 8192),
    Job("llama-3-70b", "b200:512@gcp-roce", "8Mi", 8192),
    # Mixtures.
    Job("mixtral-8x7b", "h100:256", "4Mi", 4096),
    Job("mixtral-8x22b", "v5p:8x8x8", "8Mi", 4096),
    Job("qwen3-30b-a3b", "h100:8", "512Ki", 4096),
    Job("qwen3-235b-a22b", "h100:512", "16Mi", 4096),
    Job("deepseek-v3", "h800:2048", "62914560", 4096, {"precision": "fp8-block"}),
    Job("gpt-oss-120b", "gb200-nvl72:144", "4Mi", 8192),
    Job("kimi-k2", "h100:2048", "64Mi", 4096),
    Job("llama-4-maverick", "v5p:16x16x16", "64Mi", 8192),
    Job("glm-4.5", "h200:1024", "32Mi", 4096),
    Job("deepseek-v3", "", "512Mi", 4096, {"cluster": str(_LARGEST)}),
    Job("qwen3-30b-a3b", "v6e:4x8", "1Mi", 4096),
    # Hybrids, and state spaces.
    Job("nemotron-h-8b", "h100:64", "2Mi", 8192),
    Job("jamba-v0.1", "h100:128", "4Mi", 8192),
    Job("granite-4.0-h-tiny", "v5e:8x8", "1Mi", 8192),
    Job("nemotron-3-nano", "h100:512", "8Mi", 8192),
    # Little memory: what fits is recomputed, offloaded, or there is nothing.
    Job("llama-3-70b", "h100:16", "512Ki", 4096, {"max_memory": "50%"}),
    Job("mixtral-8x22b", "a100-40gb:64", "1Mi", 4096, {"max_memory": "60%"}),
    Job("llama-3.1-405b", "h100:64", "256Ki", 8192),
)


#: What is asked of `plan serve`: engines of every number of chips that divides the cluster's, on tori of three unequal
#: dimensions, of mixtures whose experts take an axis.
SERVED = tuple(
    line.strip()
    for line in f"""\
    gpt-oss-120b --on tpu7x:4x4x576 --prompt 1024 --output 256
    deepseek-v3 --on tpu7x:4x4x576 --prompt 1024 --output 256
    llama-3-70b --on v5p:16x20x28 --prompt 1024 --output 256
    qwen3-235b-a22b --on v5p:16x20x28 --prompt 2048 --output 512
    kimi-k2 --on v5p:8x8x16 --prompt 32768 --output 1024
    llama-4-maverick --on v5p:16x16x16 --prompt 1024 --output 256 --max-batch 4096
    mixtral-8x22b --on v6e:16x16 --prompt 1024 --output 256 --chunk 512
    qwen3-30b-a3b --on v4:8x16x16*2 --prompt uniform:128-2048 --output 256 --tool vllm
    deepseek-v3 --on h100:1024 --prompt 4096 --output 512
    deepseek-v3 --on gb200-nvl72:576 --prompt uniform:512-8192 --output lognormal:400:1:4000
    deepseek-v3 --on h100:16384@meta-roce --prompt 1024 --output 256 --max-ttft 1s --max-tpot 30ms
    llama-3.1-405b --on h100:4096 --prompt 8192 --output 1024 --mode disaggregated
    glm-4.5 --on h200:1024 --prompt 100000 --output 2000 --max-ttft 5s --max-tpot 30ms
    llama-3-8b --on h100:16384@meta-roce --prompt 1024 --output 256
    nemotron-3-nano --on h100:4096@meta-roce --prompt 1024 --output 256
    gpt-oss-120b --on gb200-nvl72:576,h100:1024,tpu7x:4x4x64 --prompt 1024 --output 256
    llama-3-70b --cluster {_LARGEST} --prompt 1024 --output 256
    deepseek-v3 --cluster {_LARGEST} --prompt 1024 --output 256""".splitlines()
)


@dataclass(frozen=True)
class Measured:
    """CPU-seconds and bytes of one job; what there was not is None.

    Args:
        first, near, proved: until the first plan, one within 1 %, and the end.
        memory: bytes.
        answer: the best plan, or why there is none.
    """

    first: float | None
    near: float | None
    proved: float | None
    memory: float
    answer: str


def run(job: Job) -> Measured:
    """Plan, in this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT, _LIMIT))
    entered: list[tuple[float, float]] = []
    enter = Ranking.enter

    def noted(self: Ranking, kind: tuple[int, ...], found: Found) -> None:
        entered.append((time.process_time(), found.score))
        enter(self, kind, found)

    Ranking.enter = noted  # type: ignore[method-assign]  # to note when
    request: dict[str, Any] = {
        "on": job.on or None,
        "batch_tokens": job.batch_tokens,
        "seq_len": job.seq_len,
        **(job.more or {}),
    }
    first = near = None
    try:
        result = meshwise.plan_train(job.model, **request)
    except InfeasibleError as error:
        answer = str(error).splitlines()[0]
    else:
        best = result.search.best[0].score
        first, near = entered[0][0], next(at for at, score in entered if score <= 1.01 * best)
        plan = result.plans[0]
        answer = f"{plan.line}: {plan.estimate.step_time.expected:.4g} s"
    memory = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Measured(first, near, time.process_time(), memory, answer)


def measured(number: int) -> Measured:
    """The same, in a process of its own."""
    command = [sys.executable, __file__, "--alone", str(number)]
    try:
        done = subprocess.run(command, capture_output=True, check=True)  # noqa: S603 -- our own words
    except subprocess.CalledProcessError as error:
        if error.returncode not in (-signal.SIGKILL, -signal.SIGXCPU):
            raise RuntimeError(error.stderr.decode()) from None
        return Measured(None, None, None, 0.0, f"no answer in {_LIMIT} CPU-seconds")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def missed(found: Sequence[Measured]) -> list[str]:
    """The bars that are missed, in words."""
    proved = sum(m.proved is not None and m.proved <= PROVED for m in found)
    fewest = len(found) - (len(JOBS) - MOST_PROVED)
    bars = (
        ("first plan", FIRST, "s", [m.first for m in found]),
        ("within 1 %", NEAR, "s", [m.near for m in found]),
        ("memory", MEMORY / 1e9, "GB", [m.memory / 1e9 for m in found]),
    )
    words = [
        f"{name}: {sum(v > most for v in values if v is not None)} of {len(found)} above {most:g} {unit}, "
        f"the most {max((v for v in values if v is not None), default=0.0):.2f} {unit}"
        for name, most, unit, values in bars
        if any(v is not None and v > most for v in values)
    ]
    return words + ([f"proved: {proved} of {len(found)} in {PROVED:g} s"] if proved < fewest else [])


def serve(numbers: Sequence[int]) -> bool:
    """Plan serving, each in a process of its own, and print a line each; whether all stay within the memory."""
    fits = True
    print(f"{'':>2} {'CPU-s':>6} {'MB':>5}  asked, answer")
    for number in numbers:
        asked = SERVED[number - 1]
        command = [sys.executable, "-m", "meshwise", "plan", "serve", *asked.split()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:  # noqa: S603 -- our own words
            assert process.stdout is not None
            answer = process.stdout.read().partition("\n")[0]
            _, _, used = os.wait4(process.pid, 0)
            process.returncode = 0  # known by now
        num_bytes = 1024.0 * used.ru_maxrss
        fits &= num_bytes <= MEMORY
        print(
            f"{number:>2} {used.ru_utime + used.ru_stime:>6.1f} {num_bytes / 1e6:>5.0f}  {asked}: {answer}", flush=True
        )
    return fits


def main() -> int:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(description="Forty searches: CPU-seconds and memory.")
    parser.add_argument("numbers", nargs="*", type=int, help="jobs, from 1; all by default")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help="the searches of `plan serve`")
    given = parser.parse_args()
    if given.serve:
        return 0 if serve(given.numbers or range(1, len(SERVED) + 1)) or not given.check else 1
    if given.alone is not None:
        print(json.dumps(asdict(run(JOBS[given.alone - 1]))))
        return 0
    found = []
    print(f"{'':>2} {'first':>6} {'1 %':>6} {'proved':>6} {'MB':>5}  job, answer")
    for number in given.numbers or range(1, len(JOBS) + 1):
        m = measured(number)
        found.append(m)
        times = " ".join(f"{'-' if t is None else f'{t:.1f}':>6}" for t in (m.first, m.near, m.proved))
        print(f"{number:>2} {times} {m.memory / 1e6:>5.0f}  {JOBS[number - 1].words}: {m.answer}", flush=True)
    words = missed(found)
    print("\n".join(words) or f"all {len(found)} within the bars")
    return 1 if given.check and words else 0


if __name__ == "__main__":
    sys.exit(main())
