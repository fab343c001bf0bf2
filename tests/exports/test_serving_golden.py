"""What engines are handed: word for word as kept, run by bash with stand-ins for the engines, equal to the plan."""

import json
import math
import os
import re
import subprocess

import pytest

from meshwise.exports.serving import SERVING_TARGETS, hand_over_serving
from tests.exports.kept import hold_header, hold_kept
from tests.exports.plans import DATA
from tests.exports.serving_plans import SERVED, serving_plan

KNOWN = {
    command: set(table["options"].split())
    for command, table in json.loads((DATA / "known_options.json").read_text(encoding="utf-8")).items()
}

#: Programs that the scripts run.
PROGRAMS = ("vllm", "vllm-router", "python3", "trtllm-serve", "srun")

#: What the scripts ask of those who run them.
ASKED = {
    "MODEL": "/models/some",
    "DRAFT": "/models/draft",
    "CHECKPOINT": "gs://bucket/model",
    "HOST": "10.0.0.1",
    "HEAD": "10.0.0.1",
    "NODE": "0",
    "PREFILL_URLS": "http://a:1 http://b:1",
    "DECODE_URLS": "http://c:1",
}


def handed(case, engine):
    plan = serving_plan(case)
    return plan, hand_over_serving(plan, engine)


def functions(text):
    return re.findall(r"^(\w+)\(\) \{$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run one function of a script; give the words of its command, and the folder that it ran in."""
    programs = tmp_path_factory.mktemp("programs")
    for name in PROGRAMS:
        (programs / name).write_text('#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)

    def run(text, *name, **asked):
        folder = tmp_path_factory.mktemp("here")
        (folder / "script.sh").write_text(text, encoding="utf-8")
        env = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **ASKED, **asked}
        done = subprocess.run(  # noqa: S603  (the text is under test)
            ["/bin/bash", "script.sh", *name], cwd=folder, env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.rstrip("\0").split("\0"), folder

    return run


def options_of(words):
    """Read flags and their values; a flag that is given several times keeps all of them."""
    read, name = {}, None
    for word in words:
        if re.match(r"--?[a-z]", word):
            name = word
            read.setdefault(name, [])
        elif name is not None:
            read[name].append(word)
    return read


def command_of(words):
    """Split a command into what it is called in the table of known options, and its options."""
    if words[0] == "srun":
        words = words[words.index("trtllm-serve") :]
    if words[0] == "python3":
        return words[2], words[3:]
    length = {"vllm": 3 if words[1] == "bench" else 2, "vllm-router": 1, "trtllm-serve": 2}[words[0]]
    return " ".join(words[:length]), words[length:]


@pytest.mark.parametrize(("case", "engine"), SERVED)
def test_the_text_is_as_kept_and_its_header_names_plan_version_and_notes(case, engine):
    plan, done = handed(case, engine)
    hold_kept(done, f"{case}.{engine}")
    hold_header(done, str(plan.setup.decode), str(plan.setup.prefill))


def test_every_engine_has_a_case():
    assert {engine for _, engine in SERVED} == set(SERVING_TARGETS)


@pytest.mark.parametrize(("case", "engine"), SERVED)
def test_every_option_is_one_of_the_version(case, engine, ran):
    """Against the names in the sources of that version, which tests/data/export/known_options.json lists."""
    _, done = handed(case, engine)
    for name in functions(done.text):
        words, _ = ran(done.text, name)
        if engine == "jetstream":
            used, known = {w.partition("=")[0] for w in words if re.match(r"[a-z_]+=", w)}, KNOWN["maxtext"]
        else:
            command, options = command_of(words)
            used, known = set(options_of(options)), KNOWN[command] | {"--no-enable-prefix-caching"}
        assert used
        assert not used - known


#: Commands of which the types of options are known, from the sources that the table of names says.
TYPES = {
    command: table["types"]
    for command, table in json.loads((DATA / "known_options.json").read_text(encoding="utf-8")).items()
    if "types" in table
}


def hold_type(kind, values):
    """Hold that what follows an option is one value of its type, or nothing for a flag."""
    assert len(values) == (kind != "flag")
    if isinstance(kind, list):
        assert values[0] in kind
    elif kind in {"int", "float", "json"}:
        {"int": int, "float": float, "json": json.loads}[kind](*values)


def hold_setting(kind, text):
    """Hold that a setting's text is a value of its type."""
    value = json.loads(text)
    if isinstance(kind, list):
        assert value in kind
    elif kind == "share":
        assert 0 <= value <= 1
    else:
        assert type(value) is {"int": int, "bool": bool, "text": str}[kind]


def hold_types(text, ran):
    """Hold that what follows each option, and each setting of a file, is of its type; give how many there are."""
    held = 0
    for name in functions(text):
        words, folder = ran(text, name)
        command, words = command_of(words)
        for flag, values in options_of(words).items() if command in TYPES else ():
            hold_type(TYPES[command][flag], values)
            held += 1
        if command == "trtllm-serve serve":
            for key, value in nested_keys((folder / f"{name}.yaml").read_text(encoding="utf-8")).items():
                hold_setting(TYPES["trtllm yaml"][key], value)
    return held


@pytest.mark.parametrize(("case", "engine"), [(c, e) for c, e in SERVED if e != "jetstream"])
def test_every_value_has_the_type_of_its_option(case, engine, ran):
    assert hold_types(handed(case, engine)[1].text, ran) > 7


def number(read, flag, default=1):
    return int(read[flag][0]) if flag in read else default


def served(done, ran, name):
    words, folder = ran(done.text, name)
    return options_of(words), folder


def pools(plan):
    """Name of a function -> (layout, requests of an engine at once, tokens of prompts in its step)."""
    setup, load = plan.setup, plan.problem.load
    chunk = int(min(setup.chunk or load.computed, load.computed))
    if setup.mode == "aggregated":
        return {"serve": (setup.decode, setup.batch, setup.prefill_batch * chunk)}
    return {
        "prefill": (setup.prefill, setup.prefill_batch, setup.prefill_batch * chunk),
        "decode": (setup.decode, setup.batch, 0),
    }


def cases_of(engine):
    return [case for case, other in SERVED if other == engine]


@pytest.mark.parametrize("case", cases_of("vllm"))
def test_vllm_adds_up(case, ran):
    plan, done = handed(case, "vllm")
    load = plan.problem.load
    for name, (layout, requests, tokens) in pools(plan).items():
        read, _ = served(done, ran, name)
        ranks = number(read, "--data-parallel-size")
        assert number(read, "--tensor-parallel-size") == layout.tensor * layout.cache
        assert number(read, "--decode-context-parallel-size") == layout.cache
        assert number(read, "--pipeline-parallel-size") == layout.stage
        assert ranks == layout.expert
        chips = number(read, "--tensor-parallel-size") * number(read, "--pipeline-parallel-size") * ranks
        assert chips == layout.engine_chips
        at_once = number(read, "--max-num-seqs") * ranks
        assert requests <= at_once < requests + plan.estimate.requests_per_s * plan.estimate.ttft.expected + 1 + ranks
        generated = math.ceil(requests / ranks) * int(load.positions_per_step) if name != "prefill" else 0
        assert number(read, "--max-num-batched-tokens") >= math.ceil(tokens / ranks) + generated
        assert float(read["--gpu-memory-utilization"][0]) == pytest.approx(1 - load.reserve)
        assert number(read, "--max-model-len") == load.longest + load.draft_tokens
        assert ("--enable-prefix-caching" in read) == bool(load.cached_prefix)
        if load.draft_tokens:
            draft = json.loads(read["--speculative-config"][0])
            assert draft["num_speculative_tokens"] == load.draft_tokens
        if "--data-parallel-size-local" in read:
            nodes = layout.engine_chips // plan.problem.cluster.chip.chips_per_host
            assert number(read, "--data-parallel-size-local") * nodes == ranks


def test_workers_of_vllm_know_their_ranks(ran):
    _, done = handed("serve-apart", "vllm")
    words, _ = ran(done.text, "decode", NODE="3")
    read = options_of(words)
    assert "--headless" in read
    assert number(read, "--data-parallel-start-rank") == 24
    assert "--headless" not in options_of(ran(done.text, "decode", NODE="0")[0])


@pytest.mark.parametrize("case", cases_of("sglang"))
def test_sglang_adds_up(case, ran):
    plan, done = handed(case, "sglang")
    load, setup = plan.problem.load, plan.setup
    for name, (layout, requests, tokens) in pools(plan).items():
        read, _ = served(done, ran, name)
        assert number(read, "--tp-size") * number(read, "--pp-size") == layout.engine_chips
        assert number(read, "--attn-dp-size") == layout.expert
        assert number(read, "--dcp-size") == layout.cache
        assert number(read, "--pp-size") == layout.stage
        split = layout.expert > 1 or not layout.expert_tensor_parallel
        mixture = bool(plan.problem.model.mixtures)
        assert number(read, "--ep-size") == (layout.expert * layout.tensor if split and mixture else 1)
        if name != "prefill":
            assert number(read, "--max-running-requests") >= requests
        if tokens:
            chunk = number(read, "--chunked-prefill-size")
            assert chunk == (-1 if setup.chunk is None else tokens)
            assert number(read, "--max-prefill-tokens") * layout.expert == tokens
        assert float(read["--mem-fraction-static"][0]) <= 1 - load.reserve
        assert ("--disable-radix-cache" in read) == (not load.cached_prefix)


@pytest.mark.parametrize("case", cases_of("tensorrt-llm"))
def test_tensorrt_llm_adds_up(case, ran):
    plan, done = handed(case, "tensorrt-llm")
    load = plan.problem.load
    for name, (layout, requests, _) in pools(plan).items():
        read, folder = served(done, ran, name)
        assert number(read, "--tp_size") * number(read, "--pp_size") == layout.engine_chips
        yaml = (folder / f"{name}.yaml").read_text(encoding="utf-8")
        keys = nested_keys(yaml)
        assert set(keys) <= KNOWN["trtllm yaml"]
        assert keys.get("enable_attention_dp", "false") == ("true" if layout.expert > 1 else "false")
        assert number(read, "--max_batch_size") * layout.expert >= requests
        assert number(read, "--max_seq_len") == load.longest + load.draft_tokens
        free = float(keys["kv_cache_config.free_gpu_memory_fraction"])
        memory = (plan.estimate.prefill if name == "prefill" else plan.estimate.decode).memory
        left = plan.estimate.hbm_capacity - memory["weights"] - memory["activations"] - memory["workspace"]
        assert (1 - free) * left == pytest.approx(memory["reserve"], rel=0.01)


def nested_keys(yaml):
    """Read settings with one level of nesting: key or outer.key -> text of the value."""
    out, outer = {}, ""
    for line in yaml.splitlines():
        key, _, value = line.partition(":")
        outer = outer if line.startswith("  ") else ""
        if not value.strip():
            outer = f"{key}."
        else:
            out[outer + key.strip()] = value.strip()
    return out


def test_the_router_of_tensorrt_llm_knows_all_engines(ran):
    _, done = handed("serve-apart", "tensorrt-llm")
    _, folder = ran(done.text, "router")
    lines = (folder / "router.yaml").read_text(encoding="utf-8").splitlines()
    assert '    - "http://a:1"' in lines
    assert lines.index('    - "http://c:1"') > lines.index("generation_servers:")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_routers_know_all_engines(engine, ran):
    _, done = handed("serve-apart", engine)
    words, _ = ran(done.text, "router")
    text = " ".join(words)
    assert "--prefill http://a:1" in text
    assert "--prefill http://b:1" in text
    assert "--decode http://c:1" in text


@pytest.mark.parametrize("case", cases_of("jetstream"))
def test_jetstream_adds_up(case, ran):
    plan, done = handed(case, "jetstream")
    layout, load = plan.setup.decode, plan.problem.load
    words, _ = ran(done.text, "serve")
    read = dict(w.split("=", 1) for w in words if re.match(r"[a-z_]+=", w))
    sizes = [int(v) for k, v in read.items() if k.startswith("ici_")]
    assert math.prod(sizes) == layout.engine_chips
    assert int(read["ici_tensor_parallelism"]) == layout.tensor
    assert float(read["per_device_batch_size"]) * layout.engine_chips == plan.setup.batch
    assert int(read["max_target_length"]) == load.longest
    assert read["load_parameters_path"] == ASKED["CHECKPOINT"]
    assert ("quantize_kvcache" in read) == (load.formats.kv != load.formats.activations)


@pytest.mark.parametrize(("case", "engine"), [(c, e) for c, e in SERVED if e != "jetstream"])
def test_measurements_send_what_was_predicted(case, engine, ran):
    plan, done = handed(case, engine)
    load, setup, estimate = plan.problem.load, plan.setup, plan.estimate
    read = options_of(ran(done.text, "bench")[0][1:])
    if "--gsp-question-len" in read:
        prompt = number(read, "--gsp-question-len") + number(read, "--gsp-system-prompt-len")
        assert number(read, "--gsp-output-len") == load.output
    else:
        prompt = number(read, "--random-input-len") + number(read, "--random-prefix-len", 0)
        assert number(read, "--random-output-len") == load.output
    assert prompt == load.prompt
    engines = setup.decode.replicas if setup.mode == "disaggregated" else 1
    share = engines / setup.decode.replicas
    # Little's law: requests on their way are those of the batch, and as many as come until a first token.
    waiting = estimate.requests_per_s * share * estimate.ttft.expected
    assert number(read, "--max-concurrency") == pytest.approx(setup.batch * engines + waiting, abs=2)
    assert number(read, "--num-prompts") >= 5 * number(read, "--max-concurrency")


def test_a_script_without_a_word_says_what_it_has(ran):
    _, done = handed("serve-apart", "vllm")
    with pytest.raises(subprocess.CalledProcessError) as error:
        ran(done.text)
    assert error.value.returncode == 2
    assert error.value.stderr == "which one: prefill, decode, router, bench?\n"
