"""What each verb answers, end to end; the numbers are the book's where it has them."""
# ruff: noqa: E501 - one case a line

import math

import pytest

from meshwise.commands import plan_train
from meshwise.core.units import format_bytes
from meshwise.hardware import load_chip
from meshwise.search import Plan

MATMUL = "bf16[B, D] * int8[D, F] -> bf16[B, F]"


def test_model_fields_are_exact(run):
    told = run("model", "llama-3-70b", "--json").json
    assert told["parameters"]["total"] == 70553706496
    assert told["parameters"]["language"] == 70553706496
    assert told["parameters"]["active"] == 70553706496
    assert sum(told["parameters"]["by_part"].values()) == 70553706496
    assert told["kv_cache"]["bytes_per_token"] == 327680  # 2 x 80 layers x 8 heads x 128 x 2 bytes
    assert told["inputs"] == {"model": "llama-3-70b", "seq_len_tokens": 4096, "kv_dtype": "bf16"}
    # 2 FLOPs a parameter that multiplies (all but the embedding table and the norms), and causal attention.
    matrices = 70553706496 - told["parameters"]["by_part"]["embedding"] - told["parameters"]["by_part"]["norms"]
    attention = 4 * 80 * 64 * 128 * (4096 + 1) / 2
    assert told["flops"]["forward_per_token"] == pytest.approx(2 * matrices + attention, rel=1e-12)
    assert told["flops"]["training_per_token"] == pytest.approx(3 * told["flops"]["forward_per_token"], rel=1e-12)


def test_model_answers_in_the_first_line(run):
    assert run("model", "llama-3-70b").first_line == "llama-3-70b: 70,553,706,496 parameters (70.6B)"


def test_model_kv_dtype_halves_the_cache(run):
    assert run("model", "llama-3-70b", "--kv-dtype", "int8", "--json").json["kv_cache"]["bytes_per_token"] == 163840


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model", "llama-4-70c"], "unknown model 'llama-4-70c'"),
        (["model", "llama-3-70b", "--seq-len", "0"], "--seq-len: expected more than zero, found '0'"),
        (["model", "llama-3-70b", "--seq-len", "1.5"], "--seq-len: "),
        (["model", "missing.json"], "model 'missing.json': there is no such file"),
        (["chips", "v5x"], "unknown chip 'v5x'"),
        (["clusters", "v5p:7x7x7x7"], ""),
        (["clusters", "nowhere:8"], ""),
        (["roofline", MATMUL, "--on", "v5e", "--set", "B"], "--set: expected NAME=SIZE such as B=1024, found 'B'"),
        (["roofline", MATMUL, "--on", "v5e", "--set", "B=1,B=2"], "--set: B is given twice"),
        (["roofline", MATMUL, "--on", "v5e", "--set", "B=0"], "--set: B: expected more than zero, found '0'"),
        (["roofline", MATMUL, "--on", "v5e", "--set", "B=1.5"], "--set: B: expected a whole number from 1 to 1e+15"),
        (["roofline", MATMUL, "--on", "v5e", "--set", "B=1e300"], "--set: B: expected a whole number from 1 to 1e+15"),
        (["roofline", MATMUL, "--on", "v5e", "--set", "X=8"], "unknown axis 'X'. Known: B, D, F."),
        (["roofline", MATMUL, "--on", "v5e", "--vary", "X"], "unknown axis 'X'. Known: B, D, F."),
        (["roofline", MATMUL], "--on is missing"),
        (["roofline", MATMUL, "--on", "v5e", "--memory-bandwidth", "5"], "--memory-bandwidth: '5' has no unit; write"),
        (["roofline", MATMUL, "--on", "v5e", "--memory-bandwidth", "-5GB/s"], "--memory-bandwidth: expected more than"),
        (["roofline", "tf32[B, D] * tf32[D, F] -> fp32[B, F]", "--on", "v5e"], "unknown matmul dtype on v5e 'tf32'."),
        (["shard", "A[I_X, J] * B[J, K] -> C[I_X, K]", "--on", "v5e:4x4"], "a time on v5e:4x4 needs the mesh"),
        (["shard", "A[I_X, J] * B[J, K] -> C[I_X, K]", "--on", "v5e:4x4", "--mesh", "X=4"], "a time on v5e:4x4 needs the sizes of I, J, K"),
        (["shard", "A[I_X, J] * B[J, K] -> C[I_X, K]", "--mesh", "Y=4"], "unknown mesh axis X; the mesh is Y=4"),
        (["shard", "A[I_X, J_X] * B[J, K] -> C[I, K]"], "mesh axis X is used twice in one tensor"),
        (["shard", "A[I_X, J * B[J, K] -> C[I, K]"], ""),
        (["shard", "A[4_X, 8] * B[8, 2] -> C[4, 2]"], ""),
        (["collective", "all-gather", "bf16[1024, 4096]", "--mesh", "X=4", "--on", "v5e:4x4"], "all-gather: expected an array that is split over X"),
        (["collective", "all-gather", "bf16[1024, 4096_X]", "--mesh", "X=7", "--on", "v5e:4x4"], "mesh X=7 of 7 devices cannot be laid on x 4 x y 4 (16 chips)"),
        (["collective", "all-gather", "bf16[1024, J_X]", "--mesh", "X=4", "--on", "v5e:4x4"], "bf16[1024, J_X]: no size is known for J"),
        (["collective", "all-gather", "bf16[8_X]", "--mesh", "X=4"], "on which cluster? --on v5e:4x8, --on h100:64, or --cluster my.toml"),
        (["collective", "all-gather", "bf16[8_X]", "--mesh", "X=4", "--on", "v5e", "--cluster", "a.toml"], "--on v5e and --cluster a.toml: give one of them"),
        (["collective", "all-gather", "bf16[8_X]", "--mesh", "X=4", "--cluster", "missing.toml"], "cluster file 'missing.toml' does not exist"),
        (["collective", "gather", "bf16[1024, 4096_X]", "--mesh", "X=4", "--on", "v5e:4x4"], "KIND: expected 'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all' or 'permute', found 'gather'"),
        (["collective", "all-gather", "bf16[8_X] -> bf16[8_X]", "--mesh", "X=4", "--on", "v5e:4x4"], "bf16[8_X] -> bf16[8_X]: this is not one all-gather but nothing that moves data"),
        (["collective", "all-gather", "bf16[8_X]", "--mesh", "X=4", "--on", "v5e:4x4", "--wires", "X=3x1"], "wires: the extents of X must multiply to 4, found (3, 1)"),
        (["collective", "all-gather", "bf16[8_X]", "--mesh", "X=4", "--on", "v5e:4x4", "--wires", "X=4"], "wires: expected AXIS=xxy in numbers, with an axis of X=4; found 'X=4'"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_clear_message(run, words, message):
    done = run(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")
    assert "Traceback" not in done.err


def test_chips_carry_a_source_for_every_number(run):
    for chip in run("chips", "--json").json["chips"]:
        assert chip["sources"]["*"]["title"], chip["name"]
        assert all(s["title"] and s["date"] for s in chip["sources"].values())


def test_one_chip_by_an_alias(run):
    assert run("chips", "h100").first_line == "h100-sxm: H100 SXM by nvidia"


def test_cluster_resolution_is_echoed(run):
    assert run("clusters", "v5p-128").first_line == "v5p-128 -> 64 x TPU v5p, 4x4x4 torus (all axes wrap), 16 hosts"


def test_the_memory_of_a_cluster_is_what_programs_see(run):
    out = run("clusters", "h100-sxm:8").out
    chip = load_chip("h100-sxm")
    assert chip.hbm_usable != chip.hbm_capacity
    (line,) = [line for line in out.splitlines() if line.startswith("HBM ")]
    seen = (format_bytes(8 * chip.hbm_usable), format_bytes(chip.hbm_usable))
    assert line.split("  ")[-1] == f"{seen[1]} a chip, as programs see it"
    assert seen[0] in line


def test_in_a_group_of_one_nothing_moves(run):
    words = ("collective", "all-gather", "bf16[1024, 4096_X]", "--mesh", "X=1", "--on", "v5e:4x4")
    done = run(*words)
    assert done.first_line == "all-gather bf16[1024, 4096_X] over X: nothing moves, the group is one chip"
    told = run(*words, "--json").json
    assert (told["time_s"], told["bound"]) == (0, "nothing")


def test_roofline_answers_in_the_first_line(run):
    done = run("roofline", MATMUL, "--on", "v5e", "--set", "B=16,D=8Ki,F=32Ki")
    assert done.first_line == "TPU v5e: 329 us to 373 us, memory-bound (compute-bound from B = 125)"
    assert run("roofline", MATMUL, "--on", "v5e").first_line == "TPU v5e: compute-bound from B = 121 (D, F large)"


def test_roofline_in_other_memories(run):
    def time(*more: str) -> float:
        told = run("roofline", MATMUL, "--on", "v5p", "--set", "B=8,D=8Ki,F=8Ki", "--json", *more).json
        return told["time_s"]["memory"]

    hbm, host = time(), time("--memory", "host")
    onchip = time("--memory", "vmem", "--memory-bandwidth", "20TB/s")
    assert host > hbm > onchip
    moved = 2 * 8 * 8192 + 8192 * 8192 + 2 * 8 * 8192
    assert onchip == pytest.approx(moved / 20e12, rel=1e-12)


def test_onchip_memory_without_a_published_bandwidth_says_so(run):
    done = run("roofline", MATMUL, "--on", "v5p", "--set", "B=8,D=8Ki,F=8Ki", "--memory", "vmem")
    assert done.code == 2
    assert done.err.startswith("error: TPU v5p: no bandwidth is published for its on-chip memory; give one")


def test_roofline_picture_as_svg(run, tmp_path):
    file = tmp_path / "roof.svg"
    assert run("roofline", MATMUL, "--on", "v5e", "--set", "B=8,D=8Ki,F=8Ki", "--svg", str(file)).code == 0
    text = file.read_text(encoding="utf-8")
    assert text.startswith("<?xml")
    assert "FLOPs/byte" in text


def test_svg_without_matplotlib_says_how_to_install_it(run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    done = run("roofline", MATMUL, "--on", "v5e", "--svg", str(tmp_path / "roof.svg"))
    assert (done.code, done.err) == (4, "error: --svg needs matplotlib: pip install 'meshwise[plot]'\n")
    assert not (tmp_path / "roof.svg").exists()


def test_a_size_of_an_axis_that_the_expression_lacks_is_refused(run):
    done = run("shard", "A[I_X, J] -> A[I, J]", "--mesh", "X=2", "--set", "Q=3")
    assert (done.code, done.err) == (
        2,
        "error: unknown axis 'Q'. Known: I, J. Axes are the names in the expression.\n",
    )


def test_a_deadline_of_no_run_is_refused(run):
    job = ("--on", "v5e:2x2", "--batch-tokens", "64Ki", "--seq-len", "1024")
    done = run("plan", "train", "gpt2", *job, "--deadline", "1d")
    assert done.code == 2
    assert "--tokens" in done.err


def test_svg_into_a_folder_that_is_not_there(run, tmp_path):
    done = run("roofline", MATMUL, "--on", "v5e", "--svg", str(tmp_path / "no" / "roof.svg"))
    assert done.code == 2
    assert done.err == f"error: --svg {tmp_path / 'no' / 'roof.svg'}: No such file or directory\n"


def test_sequences_longer_than_the_model_was_made_for_are_said(run):
    words = "exceed the 8,192 that llama-3-8b was trained for"
    assert (
        f"sequences of 16,384 tokens {words}"
        in run("model", "llama-3-8b", "--seq-len", "16Ki", "--json").json["assumed"]
    )
    where = ("llama-3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "1Mi", "--layout", "fsdp=64")
    told = run("estimate", "train", *where, "--seq-len", "16Ki", "--json").json["assumed"]
    assert f"sequences of 16,384 tokens {words}" in told
    assert words not in " ".join(run("estimate", "train", *where, "--seq-len", "8Ki", "--json").json["assumed"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "train", "gpt2", "--on", "v5e", "--batch-tokens", "64Ki", "--seq-len", "8192"], "gpt2 has learned positions for 1,024 tokens, found 8,192; use 1,024 or less"),
        (["model", "opt-6.7b", "--seq-len", "2049"], "opt-6.7b has learned positions for 2,048 tokens, found 2,049; use 2,048 or less"),
    ],
)  # fmt: skip
def test_sequences_that_the_model_cannot_read_are_refused(run, words, message):
    done = run(*words)
    assert (done.code, done.out, done.err) == (2, "", f"error: seq_len: {message}\n")


def test_what_a_model_suggests_can_be_run(run, tmp_path):
    assert run("model", "gpt2").out.endswith("--batch-tokens 4Mi --seq-len 1024\n")
    folder = tmp_path / "my model"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    config = {"model_type": "llama", **sizes}
    (folder / "config.json").write_text(__import__("json").dumps(config), encoding="utf-8")
    tip = " ".join(run("model", str(folder)).out.split("Try next:")[1].split())
    assert f"meshwise plan train '{folder}' --on" in tip


def test_padding_can_be_left_out(run):
    def told(*more: str):
        return run("roofline", MATMUL, "--on", "v5e", "--set", "B=1,D=8Ki,F=8Ki", "--json", *more).json

    assert told()["padding"] == 8  # one row fills an eighth of the rows that stream through the matrix unit
    assert told("--no-padding")["padding"] == 1


# The book, Sharded matrices, quiz on AllGather: bf16[2048, 8192] over the axis of 4 of a v5e 8x4 slice, which does not wrap.
def test_book_all_gather_quiz(run):
    words = [
        "collective",
        "all-gather",
        "bf16[2048_X, 8192]",
        "--mesh",
        "Y=8,X=4",
        "--on",
        "v5e:8x4",
        "--wires",
        "Y=8x1,X=1x4",
    ]
    told = run(*words, "--json").json
    assert told["time_s"] == pytest.approx(560e-6, rel=0.01)
    assert told["bound"] == "bandwidth"
    small = run("collective", "all-gather", "bf16[256_X, 256]", *words[3:], "--json").json
    assert small["time_s"] == pytest.approx(3e-6, rel=0.01)
    assert small["bound"] == "latency"


# The book, Sharded matrices, question 3: AllGather of bf16[128] on a v4 ring of 4.
def test_book_tiny_all_gather(run):
    told = run("collective", "all-gather", "bf16[128_X]", "--mesh", "X=4", "--on", "v4:4x4x4", "--json").json
    assert (told["time_s"], told["bound"]) == (pytest.approx(2e-6, rel=0.001), "latency")


def test_all_reduce_is_twice_an_all_gather(run):
    def time(kind: str, array: str) -> float:
        return run("collective", kind, array, "--mesh", "X=16", "--on", "v5e:16x16", "--json").json["time_s"]

    gather = time("all-gather", "bf16[8192, 8192_X]")
    assert time("reduce-scatter", "bf16[8192, 8192_X]") == pytest.approx(gather, rel=1e-12)
    assert time("reduce-scatter", "bf16[8192, 8192]{U_X} -> bf16[8192, 8192_X]") == pytest.approx(gather, rel=1e-12)
    assert time("all-reduce", "bf16[8192, 8192]") == pytest.approx(2 * gather, rel=1e-12)
    assert time("all-to-all", "bf16[8192, 8192_X] -> bf16[8192_X, 8192]") == pytest.approx(gather / 4, rel=1e-12)


# The book, Sharded matrices, the four cases, and question 6 (v5e 4x4, no axis wraps, I = J = K = 8192).
@pytest.mark.parametrize(
    ("expression", "case", "collectives"),
    [
        ("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]", 1, []),
        ("A[I, J_X] * B[J, K] -> C[I, K]", 2, None),
        ("A[I, J_X] * B[J_X, K] -> C[I, K]", 3, [("all-reduce", "C", ["X"])]),
        ("A[I_X, J] * B[J, K_X] -> C[I_X, K]", 4, None),
        ("A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K]", 3, [("all-reduce", "C", ["Y"])]),
    ],
)
def test_book_cases(run, expression, case, collectives):
    told = run("shard", expression, "--json").json
    assert told["book_case"] == case
    if collectives is not None:
        found = [(c["kind"], c["tensor"], c["mesh_axes"]) for c in told["collectives"]]
        assert found == collectives
    else:
        assert told["collectives"]


def test_book_question_6(run):
    where = ["--mesh", "X=4,Y=4", "--on", "v5e:4x4", "--set", "I=8192,J=8192,K=8192", "--json"]
    a = run("shard", "A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K]", *where).json
    assert a["compute_time_s"] == pytest.approx(348.8e-6, rel=0.01)
    assert a["communication_time_s"] == pytest.approx(1118e-6, rel=0.01)
    b = run("shard", "A[I_X, J] * B[J_X, K_Y] -> C[I_X, K_Y]", *where).json
    assert b["communication_time_s"] == pytest.approx(559e-6, rel=0.01)
    assert [(c["kind"], c["tensor"], c["mesh_axes"]) for c in b["collectives"]] == [("all-gather", "B", ["X"])]


def test_shard_marks_the_cheapest_and_its_time_is_least(run):
    told = run(
        "shard", "A[I, J_X] * B[J, K] -> C[I, K]", "--mesh", "X=4", "--set", "I=1Ki,J=8Ki,K=8Ki", "--on", "v5e:4x4", "--json"
    ).json  # fmt: skip
    ways = told["alternatives"]
    assert [w["cheapest"] for w in ways] == [True] + [False] * (len(ways) - 1)
    times = [w["compute_time_s"] + w["communication_time_s"] for w in ways]
    assert len(times) > 1
    assert times == sorted(times)
    assert all(math.isfinite(t) for t in times)


OWN = """
chip = "h100-sxm"
num_chips = 16
[[network.levels]]
name = "nvlink"
degree = 8
bandwidth_per_chip_one_way = "450GB/s"
latency = "0.6us"
[[network.levels]]
name = "ethernet"
degree = 2
bandwidth_per_chip_one_way = "100Gbit/s"
latency = "10us"
"""


def test_a_cluster_file_with_own_numbers(run, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(OWN, encoding="utf-8")
    assert run("clusters", str(file)).first_line == "my -> 16 x H100 SXM, nvlink 8 x ethernet 2, 2 hosts"
    told = run("collective", "all-gather", "bf16[1048576_X]", "--mesh", "X=16", "--cluster", str(file), "--json").json
    # Half of the array comes from the other node, an eighth of that through each GPU's own 12.5 GB/s.
    assert told["bandwidth_time_s"] == pytest.approx(2 * 1048576 / 2 / 8 / 12.5e9, rel=1e-9)
    assert told["latency_s"] == pytest.approx(3 * 0.6e-6 + 10e-6, rel=1e-9)
    assert (told["time_s"], told["bound"]) == (told["latency_s"], "latency")


TRAIN = ["llama-3-8b", "--on", "v5p:4x4x4", "--batch-tokens", "1Mi", "--seq-len", "4096"]


def test_plan_answers_and_its_json_has_the_promised_names(run, tmp_path):
    told = run(
        "plan", "train", *TRAIN, "--tokens", "1T", "--price", "2", "--json", "--save", str(tmp_path / "p.json")
    ).json
    times = [p["estimate"]["step_time_s"]["expected"] / p["tokens_per_step"] for p in told["plans"]]
    assert times == sorted(times)
    best = told["plans"][0]
    assert math.prod(best["layout"].values()) == best["num_chips"] == 64
    time = best["estimate"]["step_time_s"]
    assert 0 < time["lower"] <= time["expected"] <= time["upper"]
    assert sum(best["estimate"]["terms"].values()) == pytest.approx(time["expected"], rel=1e-9)
    assert best["training"]["cost_usd"] == pytest.approx(2 * best["training"]["chip_hours"], rel=1e-12)
    assert told["search"]["strategies"] > 100
    assert told["search"]["cpu_s"] > 0
    assert {"name", "reason"} <= set(told["rejected"][0])
    assert told["inputs"]["batch_slack"] == 0.1
    assert told["inputs"]["calibration"] == "fitted"
    saved = Plan.from_json((tmp_path / "p.json").read_text(encoding="utf-8"))
    assert saved.estimate.step_time.expected == pytest.approx(time["expected"], rel=1e-12)


def test_a_folder_to_save_in_is_looked_for_before_the_search(run, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_train, "plan_training", lambda *_, **__: pytest.fail("searched"))
    file = tmp_path / "no" / "x.json"
    done = run("plan", "train", *TRAIN, "--save", str(file))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: --save {file}: there is no folder {str(file.parent)!r}; make it first\n"


def test_an_answer_that_cannot_be_saved_is_shown(run, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_train, "check_save", lambda _: None)
    done = run("plan", "train", *TRAIN, "--top", "1", "--save", str(tmp_path / "no" / "x.json"))
    assert done.code == 2
    assert done.first_line.startswith("Best: ")
    assert done.err.endswith("x.json: No such file or directory\n")


def test_what_plan_found_is_what_estimate_says(run):
    best = run("plan", "train", *TRAIN, "--json").json["plans"][0]
    again = run("estimate", "train", *TRAIN, "--layout", best["layout_text"], "--json").json["plans"][0]
    assert again["layout"] == best["layout"]
    assert again["estimate"]["step_time_s"] == best["estimate"]["step_time_s"]
    assert best["training"] is None


@pytest.mark.parametrize(
    ("words", "share", "sentence"),
    [
        ([], 0.9, "plans fill at most 90.0 % of the HBM (--max-memory), because activations"),
        (["--max-memory", "90%"], 0.9, "plans fill at most 90.0 % of the HBM, as --max-memory asks; activations"),
        (["--max-memory", "100%"], 1.0, "plans fill at most 100.0 % of the HBM, as --max-memory asks; activations"),
    ],
)
def test_what_memory_may_be_filled_is_echoed(run, words, share, sentence):
    told = run("plan", "train", *TRAIN, "--top", "1", *words, "--json").json
    assert told["inputs"]["max_memory"] == share
    assert sum(line.startswith(sentence) for line in told["assumed"]) == 1


def test_fixed_axes_are_kept(run):
    for plan in run("plan", "train", *TRAIN, "--fix", "tensor=2,stage=2", "--json").json["plans"]:
        assert (plan["layout"]["tensor"], plan["layout"]["stage"]) == (2, 2)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["plan", "train", "llama-3-8b", "--batch-tokens", "1Mi", "--seq-len", "4096"], 2, "on which cluster?"),
        (["plan", "train", "llama-3-8b", "--on", "v5e"], 2, "--batch-tokens is missing\n--seq-len is missing"),
        (["plan", "train", *TRAIN, "--batch-tokens", "1000.5"], 2, "--batch-tokens: expected a whole number of tokens"),
        (["plan", "train", *TRAIN, "--batch-slack", "2"], 2, "--batch-slack: expected a share from 0 to 1"),
        (["plan", "train", *TRAIN, "--precision", "fp7"], 2, "--precision: unknown precision 'fp7'"),
        (["plan", "train", *TRAIN, "--optimizer", "adan"], 2, "--optimizer: unknown optimizer 'adan'. Nearest: adamw"),
        (["plan", "train", *TRAIN, "--calibration", "mine"], 2, "unknown calibration 'mine'"),
        (["plan", "train", *TRAIN, "--fix", "tensr=2"], 2, "--fix: unknown layout axis or choice 'tensr'. Nearest: tensor"),
        (["plan", "train", *TRAIN, "--fix", "remat=fully"], 2, "--fix: unknown remat policy 'fully'"),
        (["plan", "train", *TRAIN, "--fix", "tensr=x"], 2, "--fix: unknown layout axis or choice 'tensr'. Nearest: tensor"),
        (["plan", "train", *TRAIN, "--fix", "tensor"], 2, "--fix: expected name=value (such as fsdp=64 or remat=full), found 'tensor'"),
        (["plan", "train", *TRAIN, "--objective", "chips"], 2, "objective chips: expected a deadline"),
        (["plan", "train", *TRAIN, "--deadline", "30"], 2, "--deadline: '30' has no unit"),
        (["plan", "train", *TRAIN, "--price", "-3"], 2, "--price: expected more than zero, found '-3'"),
        (["plan", "train", *TRAIN, "--fix", "fsdp=128"], 2, "--fix: these axes need 128 chips, v5p:4x4x4 has 64"),
        (["plan", "train", *TRAIN, "--batch-tokens", "1"], 2, "batch_tokens 1 is less than one sequence of seq_len 4,096"),
        (["plan", "train", *TRAIN, "--top", "x"], 2, "--top: expected a whole number, found 'x'"),
        (["plan", "train", *TRAIN, "--top", "1.5"], 2, "--top: expected a whole number, found '1.5'"),
        (["plan", "train", *TRAIN, "--top", "0"], 2, "--top: expected at least 1, found '0'"),
        (["plan", "train", "llama-3-70b", "--on", "v5e", "--batch-tokens", "64Ki", "--seq-len", "4096"], 3, "llama-3-70b does not fit on v5e"),
        (["plan", "train", *TRAIN, "--fix", "stage=1,remat=full", "--max-memory", "1%"], 3, "llama-3-8b does not fit on v5p:4x4x4 in 1.0 % of the HBM (--max-memory): the leanest of"),
        (["plan", "tune", *TRAIN], 2, "unknown command 'tune'. Known: serve, train."),
        (["plan", "serve", *TRAIN], 2, "No such option '--batch-tokens'"),
        (["estimate", "train", *TRAIN], 2, "--layout is missing"),
        (["estimate", "train", *TRAIN, "--layout", "fsdp"], 2, "layout: expected name=value"),
        (["estimate", "train", *TRAIN, "--layout", "fsdp=128"], 2, "layout 'fsdp=128' needs 128 chips, the cluster has 64"),
        (["estimate", "train", *TRAIN, "--layout", "vpp=2"], 2, "layout: virtual_stages=2 is for schedule=interleaved"),
    ],
)  # fmt: skip
def test_bad_training_input_gets_one_clear_message(run, words, code, message):
    done = run(*words)
    told = [line for line in done.err.splitlines() if not line.startswith("searching ")]  # on a slow machine
    assert "\n".join(told).startswith(f"error: {message}")
    assert (done.code, done.out) == (code, "")


def test_a_layout_that_does_not_fit_is_estimated_and_says_so(run):
    done = run(
        "estimate",
        "train",
        "llama-3-70b",
        "--on",
        "v5p:4x4x4",
        "--batch-tokens",
        "256Ki",
        "--seq-len",
        "4096",
        "--layout",
        "data=64",
    )
    assert done.code == 3
    assert done.first_line.startswith("does not fit in memory: data=64: ")


def test_a_ragged_all_to_all_sends_a_copy_to_each_distinct_member(run):
    dense = run("collective", "all-to-all", "bf16[65536_X, 7168]", "--mesh", "X=64", "--on", "h100:64", "--json")
    ragged = run(
        "collective", "all-to-all", "bf16[65536_X, 7168]", "--mesh", "X=64", "--on", "h100:64", "--choices", "8", "--json"
    )  # fmt: skip
    distinct = 64 * (1 - (63 / 64) ** 8)
    assert ragged.json["bytes"] == pytest.approx(dense.json["bytes"] * distinct)
    assert ragged.json["time_s"] == pytest.approx(dense.json["time_s"] * distinct)
    wrong = run(
        "collective", "all-gather", "bf16[65536_X, 7168]", "--mesh", "X=64", "--on", "h100:64", "--choices", "8"
    )
    assert wrong.code == 2
    assert "only an all-to-all is ragged" in wrong.err


@pytest.mark.parametrize("chips", [4, 8])
def test_a_gather_on_a_ring_has_its_bound_beside_the_time_of_whole_shards(run, chips):
    """V/W in whole shards (the book), (n-1)/n of it with that of the member opposite in two halves."""
    on = ("--on", f"v5p:{chips}x{chips}x{chips}", "--mesh", f"X={chips}")
    told = run("collective", "all-gather", "bf16[268435456_X]", *on, "--json").json
    assert told["time_s"] == pytest.approx(2 * 268435456 / 180e9)
    assert told["bound_time_s"] == pytest.approx(told["time_s"] * (chips - 1) / chips)
    line = run("collective", "all-gather", "bf16[1024_X, 16]", "--on", "v5e:4x4", "--mesh", "X=4")
    assert "at least" not in line.out, "a line's end has one link, which all shards pass"


def test_a_collective_names_its_algorithm_and_prices_the_others(run):
    words = ("--mesh", "X=64", "--on", "h100:64", "--calibration", "operations")
    small = run("collective", "all-reduce", "bf16[512]", *words, "--json").json
    large = run("collective", "all-reduce", "bf16[65536, 65536]", *words, "--json").json
    for told in (small, large):
        times = {a["name"]: a["time_s"] for a in told["algorithms"] if a["offered"]}
        assert told["calibration"] == "hopper"
        assert set(times) == {"flat ring", "switches add"}
        assert told["time_s"] == times[told["algorithm"]] == min(times.values())
        assert {a["name"] for a in told["algorithms"] if not a["offered"]} == {"level by level", "trees"}
    assert small["bound"] == "latency"
    assert large["busbw_bytes_per_s"] > 100 * small["busbw_bytes_per_s"]
    text = run("collective", "all-reduce", "bf16[65536, 65536]", *words, "--explain").out
    assert "level by level" in text
    assert "(not offered)" in " ".join(text.split())
    ideal = run("collective", "all-reduce", "bf16[65536, 65536]", *words[:4], "--json").json
    assert ideal["algorithm"] == "level by level"
    assert ideal["time_s"] < large["time_s"]


def test_shard_ranks_by_the_rule_that_is_asked_for(run):
    asked = (
        "shard",
        "A[I, J_X] * B[J, K] -> C[I, K]",
        "--mesh",
        "X=4",
        "--set",
        "I=1Ki,J=8Ki,K=8Ki",
        "--on",
        "v5e:4x4",
    )
    for words, rule in (((), sum), (("--overlap",), max)):
        ways = run(*asked, *words, "--json").json["alternatives"]
        times = [rule((way["compute_time_s"], way["communication_time_s"])) for way in ways]
        assert times == sorted(times)
        assert len(set(times)) > 2
    assert "overlap" not in str(run(*asked, "--overlap", "--json").json["not_modelled"])


def test_sums_are_written_as_sums(run):
    layout = ("--layout", "fsdp=16,tensor=4", "--no-changes")
    told = run("estimate", "train", *TRAIN, *layout, "--json", "--explain").json
    written = [op["signature"] for block in told["workings"]["blocks"] for op in block["operations"]]
    assert any(" + " in s and " * " not in s for s in written), "the residual stream"
    assert any(" * " in s and " + " not in s for s in written)
    asked = ("estimate", "train", "mamba2-2.7b", "--on", "h100:1", "--batch-tokens", "8Ki", "--seq-len", "1024")
    biased = run(*asked, "--layout", "data=1", "--no-changes", "--explain").out
    assert "ssm.step[B, T, Nr], b_ssm.dt[Nr] -> ssm.dt[B, T, Nr]" in biased, "a bias is added within a function"
