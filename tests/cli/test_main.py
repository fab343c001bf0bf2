"""The error boundary, the list of commands, and what every command has in common."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest

from meshwise import __version__
from meshwise.cli import main as entry
from meshwise.cli.main import COMMANDS
from meshwise.core.errors import InfeasibleError, MissingDependencyError
from tests.cli import endpoint
from tests.each import each

MATMUL = "bf16[B, D] * int8[D, F] -> bf16[B, F]"

TRAIN = ["llama-3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "1Mi", "--seq-len", "4096", "--tokens", "1T"]

SERVE = ["llama-3-70b", "--on", "h100:8", "--prompt", "1024", "--output", "256", "--precision", "fp8"]

ENGINE = str(Path(__file__).parents[1] / "data" / "serving" / "engine.json")

HLO = str(Path(__file__).parents[1] / "data" / "compiled" / "v5p_4x4x4_fsdp16_tensor4.hlo.gz")
PLAN = str(Path(__file__).parents[1] / "data" / "export" / "plan.json")

#: The questions of a sweep, in a folder that takes its rows.
SWEEP = Path(tempfile.mkdtemp()) / "sweep.toml"
SWEEP.write_text('command = "fit"\nmodel = "llama-3-8b"\non = "h100:1"\n', encoding="utf-8")

SMALL = "D=8 F=16 L=1 N=2 K=2 H=4 V=32"

#: One working call of every command; a new command must be added here.
WORKING = {
    "plan train": TRAIN,
    "estimate train": [*TRAIN, "--layout", "fsdp=-1,tensor=4"],
    "plan serve": SERVE,
    "estimate serve": [*SERVE, "--batch", "64", "--layout", "tensor=8"],
    "export": [PLAN, "--to", "megatron"],
    "simulate train": [PLAN],
    "simulate serve": [ENGINE, "--rate", "4", "--requests", "200", "--ttft", "200ms"],
    "hlo": [HLO, "--on", "v5p:4x4x4", "--mesh", "fsdp=16,tensor=4"],
    "run": [
        SMALL,
        "--on",
        "v5e:1x1",
        "--batch-tokens",
        "64",
        "--seq-len",
        "8",
        "--layout",
        "remat=none,micro_batch=8",
        "--steps",
        "2",
    ],
    "serve": [SMALL, "--port", "0", "--max-len", "32", "--max-batch", "2", "--duration", "200ms"],
    "load": [endpoint.start(), "--rate", "500", "--requests", "5"],
    "fit": ["llama-3-8b", "--on", "h100:1"],
    "sweep": [str(SWEEP), "--out", str(SWEEP.with_name("rows.csv")), "--jobs", "1"],
    "model": ["llama-3-70b"],
    "models": [],
    "chips": [],
    "clusters": ["v5p-128"],
    "roofline": [MATMUL, "--on", "v5e", "--set", "B=128,D=8Ki,F=32Ki"],
    "shard": ["A[I, J_X] * B[J, K] -> C[I, K]", "--mesh", "X=4", "--set", "I=1Ki,J=8Ki,K=8Ki", "--on", "v5e:4x4"],
    "collective": ["all-gather", "bf16[1024, 4096_X]", "--mesh", "X=16", "--on", "v5e:16x16"],
    "verify": [
        "D=64 F=128 L=2 N=2 K=2 V=256",
        "--on",
        "h100:2",
        "--batch-tokens",
        "1Ki",
        "--seq-len",
        "128",
        "--layout",
        "fsdp=2,remat=full",
    ],
    "profile": [str(Path(__file__).parents[1] / "data" / "traces" / "sglang_decode.json.gz")],
    "rule": ["critical-batch", "--on", "v5e", "--set", "w=1"],
    "score": [str(Path(__file__).parents[1] / "data" / "measured" / "runs.csv")],
    "calibrate": [str(Path(__file__).parents[1] / "data" / "measured" / "runs.csv")],
    "book": ["roofline.q2", "--set", "W_hbm=1.6e12"],
    "ui": ["--views"],
    "bench": ["matmul", "--dtype", "fp32", "--sizes", "64x64x64", "--seconds", "1ms"],
}


#: Those that start JAX, compile or measure.
JAX = ("run", "serve", "verify", "bench")
ALL = [pytest.param(name, marks=[pytest.mark.jax] if name in JAX else []) for name in WORKING]


def test_every_command_has_a_working_call_here():
    assert {name.split()[0] for name in WORKING} == set(COMMANDS) - {"completion", "mcp"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_what_a_shell_reads(run, shell):
    done = run("completion", shell)
    assert done.code == 0
    assert f"_MESHWISE_COMPLETE={shell}_complete" in done.out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("meshwise plan train llama-3-", "llama-3-8b"),
        ("meshwise plan train llama-3-8b --on h100:8,h2", "h100:8,h200:8"),
        ("meshwise plan train llama-3-8b --on v5", "v5e:4x4"),
        ("meshwise plan train llama-3-8b --precision mi", "mixed"),
        ("meshwise plan serve llama-3-8b --precision fp8,pub", "fp8,published"),
        ("meshwise plan serve llama-3-8b --tool v", "vllm"),
        ("meshwise plan train llama-3-8b --tool mesh", "meshwise"),
        ("meshwise chips h2", "h200"),
        ("meshwise plan serve llama-3-8b --max-t", "--max-ttft"),
    ],
)
def test_words_are_completed(capsys, monkeypatch, words, found):
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_MESHWISE_COMPLETE": "bash_complete"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        entry.app.main(args=[], prog_name="meshwise", standalone_mode=False)
    assert found in [line.partition(",")[2] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "breaks", "found"),
    [  # readline replaces what stands behind the last break
        ("meshwise plan train llama-3-8b --on h100:8,mi355", ":=", "8,mi355x:8"),
        ("meshwise plan train llama-3-8b --on h100:8,mi355", "", "h100:8,mi355x:8"),
        ("meshwise plan serve llama-3-8b --max-ttft ", ":=", None),
        ("meshwise plan ", ":=", "train"),
    ],
)
def test_bash_completes_words_with_colons(run, tmp_path, line, breaks, found):
    script, program = tmp_path / "completion", tmp_path / "meshwise"
    script.write_text(run("completion", "bash").out)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwise "$@"\n')
    program.chmod(0o755)
    ask = f'source {script}; COMP_WORDBREAKS="{breaks}"; COMP_LINE="{line}"; COMP_POINT={len(line)}'
    ask += f'; _meshwise_completion {program}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    bash = shutil.which("bash") or ""
    done = subprocess.run([bash, "-c", ask], capture_output=True, text=True, check=False)  # noqa: S603
    words = done.stdout.split()
    assert found in words if found else not words


def warned(done):
    """What stderr says besides progress on a slow machine, and which devices were looked for in vain."""
    usual = (
        "searching ",
        "trying ",
        "what fits of ",
        "compiling",
        "reading weights",
        "step ",
        "scoring: ",
        "constant ",
        "no GPU driver found",
    )
    lines = done.err.splitlines()
    told = [line for line in lines if not line.startswith(usual) and "Ctrl-C ends" not in line]
    return [line for line in told if not re.fullmatch(r"\d+ of \d+ requests are over.*|.* \(\d+ of \d+\)", line)]


@each("name", COMMANDS)
def test_summary_in_help_is_the_commands_own(name):
    command = COMMANDS[name].load()
    assert COMMANDS[name].summary == command.get_short_help_str(limit=200)
    for verb in getattr(command, "lazy", {}).values():
        assert verb.summary == verb.load().get_short_help_str(limit=200)


@pytest.mark.parametrize("name", ALL)
def test_text_output_fits_80_columns_and_has_no_colour(run, name):
    done = run(*name.split(), *WORKING[name], "--explain")
    assert (done.code, warned(done)) == (0, [])
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out
    assert done.first_line.strip()


@pytest.mark.parametrize("name", ALL)
def test_json_has_one_envelope(run, name):
    done = run(*name.split(), *WORKING[name], "--json")
    assert (done.code, warned(done)) == (0, [])
    assert list(done.json)[:4] == ["schema_version", "command", "inputs", "answer"]
    assert done.json["schema_version"] == "1"
    assert done.json["command"] == name
    assert "explanations" not in done.json


@pytest.mark.parametrize("name", ["model", "roofline", "shard", "collective", "plan train", "estimate train"])
def test_explain_gives_formula_substitution_result_and_source(run, name):
    workings = run(*name.split(), *WORKING[name], "--json", "--explain").json["explanations"]
    assert workings
    for working in workings:
        assert set(working) == {"name", "formula", "substitution", "result", "source"}
        assert all(working.values()), working


def test_version(run):
    assert run("--version").out == f"meshwise {__version__}\n"


def test_no_command_says_so_and_shows_the_help(run):
    done = run()
    assert done.code == 2
    assert done.err.startswith("error: a command is missing\n\nUsage: meshwise")


def test_unknown_command_suggests_the_nearest(run):
    done = run("rofline")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: unknown command 'rofline'. Nearest: roofline, profile, rule. See 'meshwise --help'.\n"


def test_unknown_option_names_the_help(run):
    done = run("chips", "--foo")
    assert done.code == 2
    assert done.err == "error: No such option '--foo'.\nSee 'meshwise chips --help'.\n"


def test_missing_argument(run):
    done = run("roofline", "--on", "v5e")
    assert done.code == 2
    assert done.err == "error: Missing argument 'EXPRESSION'.\nSee 'meshwise roofline --help'.\n"


def test_errors_are_json_on_stderr_when_json_is_asked_for(run):
    done = run("chips", "v5q", "--json")
    assert (done.code, done.out) == (2, "")
    told = json.loads(done.err)
    assert told["schema_version"] == "1"
    assert told["error"]["kind"] == "UnknownNameError"
    assert told["error"]["exit_code"] == 2
    assert told["error"]["message"].startswith("unknown chip 'v5q'. Nearest: ")


def raising(error: BaseException) -> click.Command:
    @click.command()
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InfeasibleError("nothing fits"), 3, "error: nothing fits\n"),
        (MissingDependencyError("needs x"), 4, "error: needs x\n"),
        (KeyboardInterrupt(), 130, "\nerror: interrupted\n"),
        (
            MemoryError("x"),
            2,
            "error: this machine has too little free memory (x): ask for less at once, or run it where there is more\n",
        ),
        (
            ZeroDivisionError("division\nby zero"),
            1,
            "error: this is a bug in meshwise: ZeroDivisionError: division by zero (MESHWISE_DEBUG=1 shows where)\n",
        ),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_exit_codes_and_words(run, monkeypatch, error, code, words):
    monkeypatch.delenv("MESHWISE_DEBUG", raising=False)
    monkeypatch.setattr(entry.os, "dup2", lambda *_: None)
    monkeypatch.setattr(entry.sys.stdout, "fileno", lambda: 1, raising=False)
    monkeypatch.setattr(type(COMMANDS["chips"]), "load", lambda _: raising(error))
    done = run("chips")
    assert (done.code, done.err) == (code, words)


def test_debug_shows_the_traceback_of_a_bug(run, monkeypatch):
    monkeypatch.setenv("MESHWISE_DEBUG", "1")
    monkeypatch.setattr(type(COMMANDS["chips"]), "load", lambda _: raising(ZeroDivisionError("x")))
    done = run("chips")
    assert done.code == 1
    assert "Traceback (most recent call last)" in done.err


def test_a_closed_pipe_is_not_an_error():
    script = f"{sys.executable} -m meshwise chips --json | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {script}"], capture_output=True, text=True, check=False)  # noqa: S603, S607
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_a_closed_stdout_is_no_bug():
    done = subprocess.run(  # noqa: S603
        ["bash", "-c", f"{sys.executable} -m meshwise chips >&-"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "error: the answer cannot be written: stdout is closed\n")


def test_a_poor_encoding_is_not_an_error():
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "meshwise", "roofline", MATMUL, "--on", "v5e"],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")


#: Standard output on a disk with no room, in a process of its own, so that the interpreter's last flush is tried too.
FULL_DISK = """
import errno, io, os, sys, tempfile
class FullDisk(io.RawIOBase):
    def __init__(self):
        self.file = tempfile.TemporaryFile()
        self.disk = os.fstat(self.file.fileno())
    def writable(self):
        return True
    def fileno(self):
        return self.file.fileno()
    def write(self, data):
        if os.path.samestat(os.fstat(self.fileno()), self.disk):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(self.fileno(), data)
sys.stdout = io.TextIOWrapper(io.BufferedWriter(FullDisk()), encoding="utf-8")
from meshwise.cli.main import main
sys.exit(main(["chips"]))
"""


def test_a_full_disk_is_no_bug():
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", FULL_DISK], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: the answer cannot be written: no space left on the device\n"


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("memory llama-3-8b", "'meshwise fit'"),
        ("compare h100:8 v5e:8", "--on h100:64,v5p:4x4x4"),
        ("plan train llama-3-8b --on 8xH100 --batch-tokens 1Mi --seq-len 4096", "did you mean h100:8?"),
        ("plan train llama-3-8b --on 8*h100 --batch-tokens 1Mi --seq-len 4096", "did you mean h100:8?"),
        ("plan train llama-3-8b --on h100x16 --batch-tokens 1Mi --seq-len 4096", "did you mean h100:16?"),
        ("plan train llama-3-8b --on rtx4090:2 --batch-tokens 1Mi --seq-len 4096", "did you mean rtx-4090"),
        ("plan train llama-3-8b --on h100:8 --batch-size 64 --seq-len 4096", "--batch-tokens"),
        ("plan train llama-3-8b --gpus 8", "--on h100:64"),
        ("estimate train llama-3-8b --on h100:8 --tp 8", "--layout tp=8"),
        ("plan serve --model llama-3-8b", "stands by itself"),
        ("plan serve llama-3-8b --on h100:8 --dtype fp8", "--precision"),
        ("plan serve llama-3-8b --on h100:8 --input 1024", "--prompt"),
        ("8xH100", "'meshwise fit MODEL --on 8xH100 ...'"),
        ("llama-3-8b", "'meshwise fit llama-3-8b ...'"),
        ("plan llama-3-8b --on h100:8", "'meshwise plan train llama-3-8b ...' or 'meshwise plan serve"),
        ("fit llama-3-8b h100", "a cluster is --on"),
        ("list", "'meshwise models'"),
    ],
)
def test_a_wrong_first_guess_leads_to_the_right_word(run, words, right):
    told = run(*words.split())
    assert told.code == 2
    assert right in told.err


def test_guesses_are_no_words_of_ours():
    from meshwise.cli import main, options  # noqa: PLC0415

    assert not set(main.GUESSES) & set(COMMANDS)
    own = {flag for command in COMMANDS.values() for verb in (command, *command.verbs.values()) if not verb.verbs
           for param in verb.load().params for flag in param.opts}  # fmt: skip
    named = {flag for text in options.GUESSES.values() for flag in re.findall(r"--[a-z-]+", text)}
    assert named <= own
