"""Inputs of the fuzzers: working commands and files of every kind, each made wrong in one to four places.

Input number K of seed N is always the same one, so a run goes on where it stopped. Not here: running them (`running`).
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from meshwise.cli.main import COMMANDS, LazyCommand
from meshwise.hardware.cluster_file import TEMPLATE
from meshwise.models import load_model, model_names
from tests.answers.golden_cases import GROUPS

DATA = Path(__file__).parents[1] / "data"

#: Groups of working commands, and how many of each hundred inputs start from one.
_COMMANDS = {"training": 30, "serving": 25, "simulations": 15, "small": 25, "refusals": 5}

_TYPED = """\
0 -1 1 2 3 7 0.5 nan inf -inf 1e308 1e400 1e-300 1e-9 1Ki 4Mi 1T 1Ti 50% 100% 101% 1ms 1ns 1e-9s 0x10 1_000 é ½ ² ٣
= , ,, : a=b a=1,a=2 [ h100:8 h100:0 v5e:4x4 v5p:1x1x1 v5e: :8 h100:8@nowhere h100:8,h100:8 llama-3-8b ../x /dev/null .
tensor=8 fsdp=-1 bf16 fp8 int4 none {} -- - %s {0} p99: p200:1s"""

#: Text where a value is expected.
_WORDS = (
    *_TYPED.split(),
    *("", " ", "\n", "\0", "\u202e", str(2**63), "9" * 400, "9" * 5000, "a" * 3000, "(" * 500),
)

#: Values where JSON has one.
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 0.5, 1e308, 1e-300, -1e9, 2**31, 2**63, 10**30, float("nan"), float("inf"), "",
    "1", "bf16", "é", "\0", [], [1], [[]], {}, {"a": 1}, "x" * 3000,
)  # fmt: skip


@dataclass(frozen=True)
class Input:
    """One command, and the files that it reads in the folder where it runs.

    Args:
        kind: of fuzzer.
        words: after `meshwise`.
        files: name -> text.
    """

    kind: str
    words: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)


def make(seed: int, number: int) -> Input:
    """Input `number` of a seed."""
    random_ = random.Random(f"{seed}:{number}")  # noqa: S311  (not a secret)
    return random_.choice(tuple(KINDS.values()))(random_)


# Text and values made wrong


def torn(rng: random.Random, text: str) -> str:
    """Text with a number, a word or a few characters changed."""
    parts = re.findall(r"\d+|[A-Za-z_]+|.", text, re.DOTALL)
    if not parts:
        return rng.choice(_WORDS)
    at = rng.randrange(len(parts))
    match rng.randrange(6):
        case 0:
            del parts[at]
        case 1:
            parts.insert(at, parts[rng.randrange(len(parts))])
        case 2:
            parts[at] = rng.choice(_WORDS)
        case 3:
            parts.insert(at, rng.choice("[](){}_,=*>-.:+/\\'\"\0é@x "))
        case 4:
            numbers = map(str, (0, 1, 2, 3, 5, 7, 16, 1000, 10**6, 2**31, 10**12, 10**30))
            parts[at] = rng.choice([*numbers, "9" * 400, "9" * 5000])
        case _:
            other = rng.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
    return "".join(parts)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def torn_json(rng: random.Random, text: str) -> str:
    """A JSON file with values replaced, dropped, copied to other places; or no longer JSON."""
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            break
        where, key = rng.choice(places)
        match rng.randrange(8):
            case 0 if isinstance(where, dict):
                del where[key]
            case 1:
                other, name = rng.choice(places)
                where[key] = json.loads(json.dumps(other[name]))
            case 2 if isinstance(where, dict):
                where[rng.choice(_WORDS[:60])] = copy.deepcopy(rng.choice(_VALUES))
            case 3 if isinstance(where[key], int | float) and not isinstance(where[key], bool):
                where[key] *= rng.choice((-1, 0, 2, 3, 0.5, 1e6, 1e-6, 1e30))
            case 4 if isinstance(where[key], str):
                where[key] = torn(rng, where[key])
            case 5 if isinstance(where[key], list) and where[key]:
                where[key] = where[key] * rng.choice((0, 2, 50)) + [rng.choice(where[key])]
            case _:
                where[key] = copy.deepcopy(rng.choice(_VALUES))
    made = json.dumps(value)
    return made if rng.random() < 0.95 else _torn_file(rng, made)


def _torn_file(rng: random.Random, text: str) -> str:
    """A file that is cut, nested too deep, doubled, or of another kind."""
    cut = rng.randrange(len(text) + 1)
    deep = "[" * 5000, '{"a":' * 5000
    return rng.choice((text[:cut], *deep, text + text, "", "\ufeff" + text, text[:cut] + "\0", "\n"))


def torn_lines(rng: random.Random, text: str) -> str:
    """CSV or TOML with lines, fields or characters changed."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        fields = lines[at].split(",")
        match rng.randrange(5):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines.insert(at, rng.choice(lines))
            case 2 | 3:
                fields[rng.randrange(len(fields))] = rng.choice(_WORDS)
                lines[at] = ",".join(fields)
            case _:
                lines[at] = torn(rng, lines[at])
    made = "\n".join(lines) + "\n"
    return made if rng.random() < 0.97 else _torn_file(rng, made)


def renumbered(rng: random.Random, text: str) -> str:
    """Text with a few of its numbers changed."""
    chosen = rng.sample(list(re.finditer(r"\d+", text)), rng.choice((1, 1, 2, 4)))
    for found in sorted(chosen, key=lambda match: -match.start()):
        text = text[: found.start()] + str(rng.choice((0, 1, 2, 3, 7, 1000, 2**31, 2**63))) + text[found.end() :]
    return text


# Kinds of inputs


@cache
def _options(verb: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """Options of a verb: name -> what it takes; None for a flag, () for any text."""
    found: LazyCommand = COMMANDS[verb[0]]
    if len(verb) > 1:
        found = found.verbs[verb[1]]
    made = []
    for option in found.load().params:
        name = option.opts[0]
        if name.startswith("--") and name not in ("--verify", "--save-cluster", "--save", "--svg", "--trace"):
            kind: Any = option.type
            made.append((name, None if getattr(option, "is_flag", False) else tuple(getattr(kind, "choices", ()))))
    return tuple(made)


def _verb(words: list[str]) -> tuple[str, ...]:
    return tuple(words[:2]) if COMMANDS[words[0]].verbs else (words[0],)


@cache
def _working(group: str) -> tuple[str, ...]:
    return tuple(islice(dict.fromkeys(GROUPS[group]()), 400))


def options(rng: random.Random) -> Input:
    """A working command with values replaced, and options dropped, doubled and added."""
    group = rng.choices(tuple(_COMMANDS), tuple(_COMMANDS.values()))[0]
    words = shlex.split(rng.choice(_working(group)).format(engine="engine.json"))
    if words[0] not in COMMANDS or words[:1] in (["run"], ["verify"], ["bench"]):
        return notation(rng)
    verb = _verb(words)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if len(words) <= len(verb):
            break
        at = rng.randrange(len(verb), len(words))
        match rng.randrange(5):
            case 0:
                del words[at]
            case 1:
                words[at] = rng.choice(_WORDS)
            case 2:
                words[at] = torn(rng, words[at])
            case _:
                name, values = rng.choice(_options(verb))
                value = rng.choice(values) if values and rng.random() < 0.7 else rng.choice(_WORDS)
                words += [name] if values is None else [name, value]
    return Input("options", tuple(words), {"engine.json": _text("serving/engine.json")})


def _text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


@cache
def _configs() -> tuple[str, ...]:
    return tuple(json.dumps(dict(load_model(name).config)) for name in model_names())


_READ_MODELS = (
    "model config.json",
    "model config.json --seq-len 1Mi --explain",
    "fit config.json --on h100:8",
    "estimate train config.json --batch-tokens 1Mi --seq-len 4096 --on v5p:4x4x4",
)


def configs(rng: random.Random) -> Input:
    """A published configuration, changed, in what reads one."""
    words = rng.choice(_READ_MODELS).split()
    return Input("configs", tuple(words), {"config.json": torn_json(rng, rng.choice(_configs()))})


_NOTATION = tuple(
    tuple(shlex.split(line))
    for line in """\
shard "A[I, J_X] * B[J, K] -> C[I, K]" --mesh X=4 --set I=1Ki,J=8Ki,K=8Ki --on v5e:4x4
shard "bf16[B_X, D] * int8[D, F_Y] -> bf16[B_X, F_Y]" --mesh X=2,Y=2 --set B=8,D=64,F=64
shard "A[I_XY, J] -> A[I, J_X]" --mesh X=4,Y=2 --set I=1Ki,J=8Ki
collective all-gather "bf16[1024, 4096_X]" --mesh X=16 --on v5e:16x16
collective all-reduce "fp32[8Mi]" --over X --mesh X=8,Y=8 --on h100:64 --wires X=8
roofline "bf16[B, D] * int8[D, F] -> bf16[B, F]" --on v5e --set B=128,D=8Ki,F=32Ki
roofline "bf16[B, D] * bf16[D, F] -> bf16[B, F]" --on h100 --set D=8Ki,F=8Ki --vary B=1..4Ki
model "D=4096 F=14336 L=32 N=32 K=8 H=128 V=128256"
estimate train "D=64 F=128 L=2 N=2 K=2 V=256" --on h100:2 --batch-tokens 1Ki --seq-len 128
clusters v5p:4x4x8
clusters 2xv5e:16x16
clusters h100:64@dgx-h100
fit llama-3-8b --on h100:1 --context 8Ki
simulate serve engine.json --rate 4 --requests 50 --prompt 100..2000 --output lognormal:200,0.5""".splitlines()
)


def notation(rng: random.Random) -> Input:
    """Products, collectives, meshes, dimensions, names of clusters and lengths, changed character by character."""
    words = list(rng.choice(_NOTATION))
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(1, len(words))
        words[at] = torn(rng, words[at])
    return Input("notation", tuple(words), {"engine.json": _text("serving/engine.json")})


def files(rng: random.Random) -> Input:
    """Clusters, engines and measured rows."""
    match rng.randrange(4):
        case 0:
            words = rng.choice((("estimate", "train"), ("fit",)))
            asked = (*words, "llama-3-8b", "--cluster", "cluster.toml")
            if len(words) > 1:
                asked += ("--batch-tokens", "1Mi", "--seq-len", "4096")
            return Input("files", asked, {"cluster.toml": torn_lines(rng, TEMPLATE)})
        case 1:
            asked = ("simulate", "serve", "engine.json", "--rate", "4", "--requests", "50")
            return Input("files", asked, {"engine.json": torn_json(rng, _text("serving/engine.json"))})
        case 2:
            return Input("files", ("score", "runs.csv"), {"runs.csv": torn_lines(rng, _text("measured/runs.csv"))})
        case _:
            return Input("files", ("calibrate", "runs.csv"), {"runs.csv": torn_lines(rng, _text("measured/runs.csv"))})


def plans(rng: random.Random) -> Input:
    """Saved plans, changed, in what reads one."""
    to = rng.choice(("maxtext", "megatron", "torchtitan", "deepspeed", "jax"))
    words = rng.choice((("simulate", "train", "plan.json"), ("export", "plan.json", "--to", to)))
    return Input("plans", words, {"plan.json": torn_json(rng, _text("export/plan.json"))})


def traces(rng: random.Random) -> Input:
    """Recorded traffic, changed, and served."""
    rows = [f"{k * 0.1:.1f},{rng.randrange(1, 2000)},{rng.randrange(1, 300)}" for k in range(rng.randrange(1, 30))]
    text = "\n".join(["arrival,prompt,output", *rows])
    words = ["simulate", "serve", "engine.json", "--csv", "trace.csv"]
    for _ in range(rng.randrange(3)):
        name, values = rng.choice(_options(("simulate", "serve")))
        words += [name] if values is None else [name, rng.choice(values or _WORDS)]
    read = {"trace.csv": torn_lines(rng, text), "engine.json": _text("serving/engine.json")}
    return Input("traces", tuple(words), read)


_SWEEP = """\
command = "estimate train"
model = ["llama-3-8b", "qwen3-8b"]
batch-tokens = "512Ki"
seq-len = 4096
layout = ["fsdp=-1", "tensor=8,fsdp=-1"]
[[case]]
on = ["h100:8", "h100:16"]
price = 2.5
"""

#: Of `serve`, what never listens: no machine here has the address.
_NOWHERE = ("--host", "192.0.2.1")

_SERVED = tuple(
    tuple(shlex.split(line))
    for line in """\
serve "D=64 F=128 L=2 N=2 K=2 V=256" --replicas 2 --routing affinity --quantization int8 --cpu-devices 2
serve llama-3-8b --replicas 4 --quantization fp8 --tensor 2 --max-batch 64 --policy chunked --cache-memory 8GiB
serve serving-plan.json --replicas 2 --routing round-robin --costs engine.json
load http://127.0.0.1:9 --rate 4 --requests 20 --prompt 100..200 --output 30 --timeout 1s
load http://127.0.0.1:9/v1 --costs engine.json --arrivals on-off:10s/50s --prefix-tokens 64 --prefix-groups 3
plan serve llama-3-8b --on h100:8 --prompt 1024 --output 256 --time-limit 5s --tool meshwise""".splitlines()
)


def served(rng: random.Random) -> Input:
    """Endpoints, and loads sent to one that is not there."""
    words = list(rng.choice(_SERVED))
    verb = _verb(words)
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.5:
            at = rng.randrange(len(verb), len(words))
            words[at] = torn(rng, words[at])
        else:
            name, values = rng.choice([o for o in _options(verb) if o[0] not in _ELSEWHERE])
            words += [name] if values is None else [name, rng.choice(values or _WORDS)]
    files = {"engine.json": _text("serving/engine.json"), "serving-plan.json": _text("serving/plan.json")}
    if rng.random() < 0.5:
        files["serving-plan.json"] = torn_json(rng, files["serving-plan.json"])
    return Input("served", tuple([*words, *_NOWHERE] if words[0] == "serve" else words), files)


#: Options that reach beyond this process: other hosts, folders, a cluster of processes.
_ELSEWHERE = ("--host", "--compile-cache", "--log", "--ray", "--jobs", "--patch", "--out")

_BOOK = tuple(
    tuple(shlex.split(line))
    for line in """\
book roofline.q2 --set W_hbm=1.6e12
book roofline.q2 --answer 120 --hint
book roofline.q2 --constants catalog
book training.q1 --answer "5.3 ms"
book --all --set W_hbm=1.6e12
book --errata""".splitlines()
)


def books(rng: random.Random) -> Input:
    """Problems of the book with other numbers, answers and names."""
    words = list(rng.choice(_BOOK))
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.6:
            at = rng.randrange(1, len(words))
            words[at] = torn(rng, words[at])
        else:
            name, values = rng.choice([o for o in _options(("book",)) if o[0] not in _ELSEWHERE])
            words += [name] if values is None else [name, rng.choice(values or _WORDS)]
    return Input("books", tuple(words))


@cache
def _unpacked(name: str) -> str:
    return gzip.decompress((DATA / name).read_bytes()).decode()


def recorded(rng: random.Random) -> Input:
    """Profiles, compiled programs and tables of questions."""
    match rng.randrange(3):
        case 0:
            trace = rng.choice(("traces/gloo_cpu_only.json.gz", "traces/sglang_decode.json.gz"))
            more = rng.choice(((), ("--step", rng.choice(_WORDS)), ("--on", "h100:8"), ("--against", "trace.json")))
            return Input("recorded", ("profile", "trace.json", *more), {"trace.json": torn_json(rng, _unpacked(trace))})
        case 1:
            more = rng.choice(
                ((), ("--on", "v5p:4x4x4"), ("--mesh", "fsdp=16,tensor=4"), ("--mesh", rng.choice(_WORDS)))
            )
            text = rng.choice((torn_lines, renumbered))(rng, _unpacked("compiled/v5p_4x4x4_fsdp16_tensor4.hlo.gz"))
            return Input("recorded", ("hlo", "module.txt", *more), {"module.txt": text})
        case _:
            words = ("sweep", "sweep.toml", "--jobs", "1", *rng.choice(((), ("--keep-going",), ("--y", "mfu"))))
            return Input("recorded", words, {"sweep.toml": torn_lines(rng, _SWEEP)})


#: The fuzzers.
KINDS: dict[str, Callable[[random.Random], Input]] = {
    "options": options,
    "configs": configs,
    "notation": notation,
    "files": files,
    "plans": plans,
    "traces": traces,
    "served": served,
    "books": books,
    "recorded": recorded,
}
