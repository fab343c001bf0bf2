"""Plans that are run: losses, saved steps, what goes on after a kill, and words for what cannot be."""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import meshwise
from meshwise.core.errors import (
    ClusterError,
    ConfigError,
    InfeasibleError,
    LayoutError,
    MeshwiseError,
    MissingDependencyError,
)
from meshwise.core.units import format_bytes
from meshwise.runtime import loop, train_step
from meshwise.runtime.data import SyntheticTokens, read_text
from meshwise.runtime.devices import share_of_machine
from meshwise.runtime.optimizer import Hyperparameters

TINY = "D=8 F=16 L=2 N=2 K=2 H=4 V=32"
TOKENS, LENGTH = 64, 8


def plan_of(layout="fsdp=2,remat=full,micro_batch=4,num_microbatches=1", model=TINY, *, chips=2, tokens=TOKENS, **job):
    """The plan of a layout; a step has eight sequences."""
    given = {"precision": "fp32", **job}
    asked = {"on": f"h100:{chips}", "batch_tokens": tokens, "seq_len": LENGTH, "layout": layout}
    return meshwise.estimate_train(model, **asked, **given).plans[0]


#: Compiling is nearly all that these tests do, and the same few programs: they are compiled once.
CACHE = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of compiled programs for this process and those that it starts."""
    settings = {**CACHE, "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache"))}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
        del os.environ[name.upper()]
    compilation_cache.reset_cache()


def train(plan, **given):
    """Run a plan; the learning rate is part of the program."""
    return meshwise.run_plan(plan, **{"learning_rate": 0.01, **given})


@pytest.fixture(scope="module")
def alone():
    """Six steps without interruption."""
    return train(plan_of(), steps=6)


@pytest.mark.jax
def test_a_plan_trains_and_says_what_it_measured(alone):
    assert (alone.first, alone.last, len(alone.losses), alone.num_devices, alone.hardware) == (1, 6, 6, 2, "cpu")
    assert alone.losses[0] == pytest.approx(np.log(32), rel=0.3)
    assert alone.losses[-1] < alone.losses[0] - 0.02
    assert alone.timed == (2, 3, 4, 5)
    assert alone.step_seconds == sorted(alone.seconds[2:])[1] / 2 + sorted(alone.seconds[2:])[2] / 2
    assert alone.tokens_per_s == TOKENS / alone.step_seconds
    assert (alone.chip, alone.mfu, alone.peak_bytes_in_use, alone.is_planned_chip) == (None, None, None, False)
    parameters = alone.plan.problem.model.parameters.total
    assert alone.state_bytes == pytest.approx(3 * 4 * parameters / 2, rel=0.1)  # weights and moments over two
    assert alone.saved == ()


@pytest.mark.jax
def test_a_resumed_run_has_the_losses_of_one_that_was_never_stopped(alone, tmp_path):
    told = []
    given = {"checkpoint": str(tmp_path), "every": 2, "saved": told.append}
    first = train(plan_of(), steps=3, **given)
    second = train(plan_of(), steps=6, **given)
    assert (first.losses + second.losses, second.first) == (alone.losses, 4)
    assert (first.saved, second.saved, told) == ((2, 3), (4, 6), [2, 3, 4, 6])
    with pytest.raises(MeshwiseError, match="holds step 6 already; ask for a later one"):
        train(plan_of(), steps=6, **given)


@pytest.mark.jax
def test_loops_that_are_written_out_compute_the_same(alone):
    written = train(plan_of(), steps=3, unroll_layers=True)
    np.testing.assert_allclose(written.losses, alone.losses[:3], rtol=1e-6)


@pytest.mark.jax
def test_loops_that_are_written_out_compute_again_and_gather_again_what_loops_do():
    plan = plan_of("fsdp=2,remat=full,micro_batch=4,num_microbatches=1")
    step = train_step(plan.problem.model, plan.layout, plan.problem.job, jax.devices()[:2])
    written = replace(step, stack=replace(step.stack, unroll=True))
    texts = [s.jitted.lower(s.abstract_state, s.abstract_batch).compile().as_text() for s in (step, written)]
    again, gathers = (
        [len(re.findall(pattern, text)) for text in texts]
        for pattern in (r" dot\([^\n]*rematted_computation", r" all-gather(?:-start)?\(")
    )
    assert again[1] == 2 * again[0] > 0, "as often in two layers as in a loop over two"
    assert gathers[1] > gathers[0]


@pytest.mark.jax
def test_rates_are_of_the_step_and_go_on_where_they_were(alone, tmp_path):
    rates = {"warmup_steps": 2, "learning_rate_decay": "cosine", "decay_steps": 6, "final_learning_rate": 0.001}
    whole = train(plan_of(), steps=6, **rates)
    assert whole.learning_rate == "up to 0.01 in 2 steps, then as half a cosine to 0.001 at step 6"
    first = train(plan_of(), steps=3, checkpoint=str(tmp_path), **rates)
    second = train(plan_of(), steps=6, checkpoint=str(tmp_path), **rates)
    assert first.losses + second.losses == whole.losses
    assert whole.losses[0] == alone.losses[0]  # before any update
    assert whole.losses[1] > alone.losses[1]  # after one of half the rate
    with pytest.raises(ConfigError, match="run: decay_steps: it has 6, this run 8"):
        train(plan_of(), steps=8, checkpoint=str(tmp_path), **{**rates, "decay_steps": 8})


@pytest.mark.jax
def test_a_step_is_resharded_for_another_layout(alone, tmp_path):
    layout = "fsdp=2,data=2,zero=1,remat=full:1,micro_batch=1,num_microbatches=2"  # layers in two stacks
    given = {"checkpoint": str(tmp_path)}
    train(plan_of(), steps=3, **given)
    other = train(plan_of(layout, chips=4), steps=6, **given)
    assert other.first == 4
    np.testing.assert_allclose(other.losses, alone.losses[3:], rtol=1e-5)
    back = train(plan_of(), steps=7, **given)
    assert back.first == 7


def command(plan, folder, steps):
    """A run in a process of its own."""
    words = [str(plan), "--cpu-devices", "2", "--steps", str(steps), "--learning-rate", "0.01", "--json"]
    return [sys.executable, "-m", "meshwise", "run", *words, "--checkpoint", str(folder), "--every", "2"]


@pytest.mark.jax
def test_a_step_that_was_reported_saved_outlives_a_kill(alone, tmp_path):
    file, folder = tmp_path / "plan.json", tmp_path / "steps"
    file.write_text(plan_of().to_json())
    endless = command(file, folder, 10**6)
    with subprocess.Popen(endless, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        reported = next(line for line in process.stderr if line.startswith("saved step"))
        os.kill(process.pid, signal.SIGKILL)
    assert reported == "saved step 2\n"
    latest = max(int(p.name[5:]) for p in folder.glob("step-*") if p.suffix == "")
    last = max(latest + 2, 6)
    done = subprocess.run(command(file, folder, last), capture_output=True, text=True, check=True)  # noqa: S603
    resumed = json.loads(done.stdout)
    whole = alone if last == 6 else train(str(file), steps=last)
    assert resumed["first_step"] == latest + 1 >= 3
    assert resumed["losses"] == list(whole.losses[latest:])
    assert f"saved step {last}\n" in done.stderr
    assert (resumed["num_devices"], resumed["planned_chip"]) == (2, "h100-sxm")
    page = (Path(__file__).parents[2] / "docs" / "run.md").read_text()
    envelope = ("schema_version", "command", "inputs", "answer", "assumed", "not_modelled")
    fields = {*resumed, *resumed["measured"], *resumed["predicted"]} - {*envelope}
    assert not [name for name in fields if f"`{name}`" not in page]
    assert "the prediction is for h100-sxm, but this ran on cpu: do not compare them" in resumed["not_modelled"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with steps 1 and 2."""
    folder = tmp_path_factory.mktemp("kept")
    train(plan_of(), steps=2, checkpoint=str(folder), every=1)
    return folder


@pytest.mark.jax
@pytest.mark.parametrize(
    ("plan", "given", "words"),
    [
        ({"model": TINY.replace("F=16", "F=32")}, {}, "model 'D=8 F=16 .*: d_ff|F: it has .*16.*, this run .*32"),
        ({"precision": "mixed"}, {}, 'job: precision: it has "fp32", this run "mixed"'),
        (
            {"layout": "fsdp=2,micro_batch=2,num_microbatches=1", "tokens": 32},
            {},
            "job: sequences: it has 8, this run 4",
        ),
        ({}, {"learning_rate": 0.1}, "run: learning_rate: it has 0.01, this run 0.1"),
        ({}, {"seed": 1}, "run: seed: it has 0, this run 1"),
    ],
)
def test_steps_of_another_run_are_refused_by_name(kept, plan, given, words):
    with pytest.raises(ConfigError, match=words):
        train(plan_of(**plan), steps=3, checkpoint=str(kept), **given)


def torn(kept, tmp_path, hurt):
    folder = tmp_path / "torn"
    subprocess.run(["cp", "-r", str(kept), str(folder)], check=True)  # noqa: S603, S607
    hurt(folder / "step-00000002")
    return folder


def cut_largest(step):
    largest = max(
        (p for p in step.rglob("*") if p.is_file() and p.name != "meshwise.json"), key=lambda p: p.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-7])


def flip_a_byte(step):
    largest = max(
        (p for p in step.rglob("*") if p.is_file() and p.name != "meshwise.json"), key=lambda p: p.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def lose_a_file(step):
    next(p for p in sorted(step.rglob("*")) if p.is_file() and p.name != "meshwise.json").unlink()


def change(step, key, value):
    record = json.loads((step / "meshwise.json").read_text())
    (step / "meshwise.json").write_text(json.dumps({**record, key: value}))


@pytest.mark.jax
@pytest.mark.parametrize(
    ("hurt", "words"),
    [
        (cut_largest, "is not what was saved"),
        (flip_a_byte, "is not what was saved"),
        (lose_a_file, "is missing"),
        (lambda step: (step / "meshwise.json").write_text("{"), "meshwise.json: Expecting"),
        (lambda step: (step / "meshwise.json").unlink(), "No such file"),
        (lambda step: change(step, "model", "small"), "meshwise.json was changed"),
        (lambda step: change(step, "step", 7), "meshwise.json was changed"),
        (lambda step: change(step, "order", {}), "meshwise.json lacks 'embed'"),
    ],
)
def test_a_torn_step_is_said_and_the_one_before_it_is_there(kept, tmp_path, hurt, words):
    folder = torn(kept, tmp_path, hurt)
    with pytest.raises(ConfigError, match=f"step-00000002 is torn: .*{words}.*remove that folder"):
        train(plan_of(), steps=3, checkpoint=str(folder))


@pytest.mark.jax
def test_steps_of_another_version_are_said(kept, tmp_path):
    folder = torn(kept, tmp_path, lambda step: change(step, "format", "0"))
    with pytest.raises(ConfigError, match="expected format '1', found '0'; it was written by another version"):
        train(plan_of(), steps=3, checkpoint=str(folder))


@pytest.mark.parametrize(
    ("library", "given"),
    [("orbax", {"checkpoint": "steps"}), ("tokenizers", {"text": "a.txt", "tokenizer": "tokenizer.json"})],
)
def test_a_library_that_is_missing_is_said_with_the_line_that_installs_it(monkeypatch, library, given):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == library else found(name, *rest)
    )
    with pytest.raises(MissingDependencyError, match=rf"needs the library {library}: pip install 'meshwise\[run\]'"):
        train(plan_of(), steps=1, **given)


@pytest.mark.jax
def test_what_a_killed_run_left_is_no_step(kept, tmp_path):
    folder = torn(kept, tmp_path, lambda step: step.rename(step.with_name(step.name + ".unfinished")))
    assert train(plan_of(), steps=2, checkpoint=str(folder)).first == 2
    assert sorted(p.name for p in folder.iterdir()) == ["lock", "step-00000001", "step-00000002"]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(MeshwiseError, match=r"expected an empty folder or saved steps, found 'thesis.txt'"):
        train(plan_of(), steps=1, checkpoint=str(tmp_path))
    assert [p.name for p in tmp_path.iterdir() if p.name != "lock"] == ["thesis.txt"]


@pytest.mark.jax
def test_a_full_disk_is_said_before_a_part_is_written(tmp_path, monkeypatch):
    usage = type(shutil.disk_usage(tmp_path))(10**9, 10**9 - 5000, 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    plan = plan_of()
    needed = format_bytes(3 * 4 * plan.problem.model.parameters.total + 4)  # weights, two moments, the step's number
    with pytest.raises(MeshwiseError, match=f"step 1 takes {needed}, found 4.88 KiB free"):
        train(plan, steps=1, checkpoint=str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


@pytest.mark.jax
def test_a_folder_is_for_one_run_at_a_time(kept):
    with (kept / "lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MeshwiseError, match="another run uses it"):
            train(plan_of(), steps=3, checkpoint=str(kept))


def test_synthetic_tokens_depend_on_seed_and_step_and_can_be_learned():
    tokens = SyntheticTokens(50, 1)
    drawn = tokens.sequences(7, 64, 100)
    assert (drawn == tokens.sequences(7, 64, 100)).all()
    assert (drawn != tokens.sequences(8, 64, 100)).any()
    assert (drawn != SyntheticTokens(50, 2).sequences(7, 64, 100)).any()
    follows = (drawn[:, 1:] == (drawn[:, :-1] + 1) % 50).mean()
    assert follows == pytest.approx(7 / 8 + 1 / 8 / 50, abs=0.02)
    assert (drawn.min(), drawn.max(), drawn.dtype) == (0, 49, np.int32)


@pytest.fixture
def words(tmp_path):
    """A text, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    text, rules = tmp_path / "text.txt", tmp_path / "tokenizer.json"
    spoken = [f"w{n % 30}" for n in range(200)]
    text.write_text(" ".join(spoken))
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(30)}, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(rules))
    return text, rules


@pytest.mark.jax
def test_a_text_is_cut_by_its_tokenizer(words):
    text, rules = words
    source = read_text(text, rules, vocabulary=32, shortest=9, seed=0)
    assert source.ids.tolist() == [n % 30 for n in range(200)]
    drawn = source.sequences(1, 5, 9)
    assert ((drawn[:, 1:] - drawn[:, :-1]) % 30 == 1).all()
    apart = read_text(text, rules, vocabulary=32, shortest=9, seed=0, documents="w29").documents(1, 5, 40)
    assert (
        apart.tolist()
        == read_text(text, rules, vocabulary=32, shortest=9, seed=0, documents="29").documents(1, 5, 40).tolist()
    )
    assert apart.any()
    with pytest.raises(MeshwiseError, match="--documents w31: no token of the --tokenizer"):
        read_text(text, rules, vocabulary=32, shortest=9, seed=0, documents="w31")
    ran = train(plan_of(), steps=1, text=str(text), tokenizer=str(rules))
    assert ran.data == f"random windows of {text}"


def test_words_for_texts_that_cannot_be_read(words, tmp_path):
    text, rules = words
    latin, empty = tmp_path / "latin.txt", tmp_path / "empty.txt"
    latin.write_bytes(b"gr\xfc\xdfe")
    empty.write_text("")
    for given, message in [
        ({"text": tmp_path / "none", "tokenizer": rules}, "--text .*none: No such file"),
        ({"text": text, "tokenizer": tmp_path}, "--tokenizer .*: Is a directory"),
        ({"text": text, "tokenizer": text}, "--tokenizer .*: expected a tokenizer.json"),
        ({"text": latin, "tokenizer": rules}, "--text .*: expected UTF-8, found another byte at 2"),
        ({"text": empty, "tokenizer": rules}, "expected at least 9 tokens .*, found 0"),
    ]:
        with pytest.raises(MeshwiseError, match=message):
            read_text(**given, vocabulary=32, shortest=9, seed=0)
    with pytest.raises(MeshwiseError, match="token 29 is not among the 20 of the model"):
        read_text(text, rules, vocabulary=20, shortest=9, seed=0)


@pytest.mark.parametrize(
    ("plan", "given", "error", "words"),
    [
        ({"layout": "fsdp=16", "chips": 16, "tokens": 128}, {}, ClusterError, "found 8 x cpu; --cpu-devices 16"),
        ({}, {"cpu_devices": 4}, ClusterError, "--cpu-devices 4: the plan runs on 2 devices"),
        ({}, {"cpu_devices": 2}, MeshwiseError, "2 fake devices were asked for, but JAX has looked"),
        ({}, {"text": "x"}, MeshwiseError, "--text needs --tokenizer"),
        ({}, {"tokenizer": "x"}, MeshwiseError, "--tokenizer needs --text"),
        ({}, {"every": 2}, MeshwiseError, "--every needs --checkpoint"),
        ({}, {"decay_steps": 2}, MeshwiseError, "--decay-steps needs --learning-rate-decay linear or cosine"),
        ({}, {"final_learning_rate": 0}, MeshwiseError, "--final-learning-rate needs --learning-rate-decay"),
        ({}, {"learning_rate_decay": "linear", "warmup_steps": 20}, MeshwiseError,
         "--steps 20: expected more steps than --warmup-steps 20"),
        ({}, {"learning_rate_decay": "linear", "final_learning_rate": 1}, MeshwiseError,
         "--final-learning-rate 1: expected at most --learning-rate 0.01"),
        ({}, {"learning_rate_decay": "square"}, MeshwiseError, "expected 'none', 'linear' or 'cosine', found 'square'"),
        ({}, {"num_processes": 2}, MeshwiseError, "--num-processes needs --coordinator HOST:PORT"),
        ({}, {"coordinator": "localhost:1", "num_processes": 2}, MeshwiseError, "needs --num-processes and --pro"),
        ({}, {"coordinator": "auto", "process_id": 1}, MeshwiseError, "--process-id: with --coordinator auto JAX"),
        ({}, {"coordinator": "here", "num_processes": 2, "process_id": 0}, MeshwiseError,
         "--coordinator: expected HOST:PORT or auto, found 'here'"),
        ({}, {"coordinator": "localhost:1", "num_processes": 2, "process_id": 2}, MeshwiseError,
         "--process-id 2: expected less than --num-processes 2"),
        ({}, {"coordinator": "localhost:1", "num_processes": 2, "process_id": 0, "cpu_devices": 2}, ClusterError,
         "--cpu-devices 2: the plan runs on 2 devices .*; ask for as many in all 2 processes together"),
        ({}, {"steps": 0}, MeshwiseError, "steps: expected at least 1, found 0"),
        ({"precision": "fp8"}, {}, MeshwiseError, "precision 'fp8'"),
        ({"layout": "fsdp=2,offload=parameters"}, {}, LayoutError, "offload=parameters"),
        ({"model": "D=65536 F=262144 L=200 N=64 K=8 H=128 V=32"}, {}, InfeasibleError, "the training state alone"),
        ({}, {"model": "x"}, MeshwiseError, "a plan has its job in it, found model besides"),
        ("no.json", {}, MeshwiseError, "plan 'no.json': No such file"),
        (7, {}, MeshwiseError, "expected a plan or the file of one, found 7"),
    ],
)  # fmt: skip
def test_words_for_what_cannot_be_run(plan, given, error, words):
    jax.devices()
    with pytest.raises(error, match=words):
        train(plan_of(**plan) if isinstance(plan, dict) else plan, **given)


@pytest.mark.jax
def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    plan = plan_of()
    constants = Hyperparameters(learning_rate=0.01)
    step = train_step(plan.problem.model, plan.layout, plan.problem.job, jax.devices()[:2], constants)

    def load(step):
        state = step.initial_state(0)
        return 4, {**state, "weights": jax.tree.map(lambda w: w * np.nan, state["weights"])}

    with pytest.raises(InfeasibleError, match="step 5: the loss is nan; lower --learning-rate") as raised:
        loop.train(step, SyntheticTokens(32, 0), last=6, load=load)
    assert raised.value.exit_code == 3


@pytest.mark.jax
def test_a_profile_is_written(tmp_path):
    ran = train(plan_of(), steps=4, profile=str(tmp_path / "profile"))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert ran.timed == (2, 3)  # no step is left outside the profile
    (tmp_path / "file").write_text("")
    with pytest.raises(MeshwiseError, match=r"--profile .*file: File exists"):
        train(plan_of(), steps=1, profile=str(tmp_path / "file"))


@pytest.mark.jax
def test_a_plan_for_this_machine_is_compared_and_one_for_another_is_not(alone, tmp_path):
    def plan_on(title):
        file = tmp_path / "machine.toml"
        rows = "".join(
            f'{key} = "{value}"\n'
            for key, value in {
                "vector_flops_per_s": "1GFLOP/s", "hbm_capacity": "1GiB", "hbm_bandwidth": "1GB/s",
                "link_bandwidth_one_way": "1GB/s", "hop_latency": "1us", "host_link_bandwidth": "1GB/s",
            }.items()
        )  # fmt: skip
        level = 'name = "m"\ndegree = 2\nbandwidth_per_chip_one_way = "1GB/s"\nlatency = "1us"\n'
        file.write_text(
            f'num_chips = 2\n[[network.levels]]\n{level}[chip]\nname = "cpu-1of2"\ntitle = "{title}"\nvendor = "cpu"\n'
            f'flops_per_s = {{ fp32 = "2GFLOP/s" }}\nmatmul_tile = [1, 1, 1]\n'
            f"chips_per_host = 2\npower_watts = 1\n{rows}"
        )
        layout = "fsdp=2,remat=full,micro_batch=4,num_microbatches=1"
        asked = {"batch_tokens": TOKENS, "seq_len": LENGTH, "precision": "fp32", "layout": layout}
        return meshwise.estimate_train(TINY, cluster=str(file), **asked).plans[0]

    same = train(plan_on(share_of_machine(2)), steps=1)
    assert (same.is_planned_chip, same.chip, same.peak_flops_per_s) == (True, "cpu-1of2", 2e9)
    assert same.mfu == pytest.approx(same.plan.estimate.model_flops / (same.step_seconds * 2 * 2e9))
    assert same.losses[0] == alone.losses[0]
    other = train(plan_on("1/2 of another machine"), steps=1)
    assert (other.is_planned_chip, other.chip, other.mfu) == (False, None, None)
