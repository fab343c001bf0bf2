"""`meshwise verify`: with XLA's compilers, on small models; and what it refuses."""

import pytest

from meshwise.search import Plan

SMALL = "D=256 F=512 L=2 N=4 K=2 V=1024"
JOB = ["--batch-tokens", "8192", "--seq-len", "512", "--layout", "fsdp=2,tensor=2,remat=full"]


def check(done, products=9):
    """`products`: of attention that the program has, forward, again and backward; the plan counts nine."""
    assert done.code == 0, done.err
    memory = {line["name"]: line for line in done.json["memory"]}
    assert done.json["fits"] is True
    arguments = memory["arguments"]
    assert arguments["compiled_bytes"] == pytest.approx(arguments["predicted_bytes"], rel=0.01)
    assert done.json["unexplained_share_of_received"] < 0.05
    wanted = {line["name"]: line["predicted_flops"] for line in done.json["matmuls"]}
    found = {line["name"]: line["compiled_flops"] for line in done.json["matmuls"]}
    (line,) = (line for line in done.json["matmuls"] if line["name"] == "layer/attention")
    attention = wanted.pop("layer/attention"), found.pop("layer/attention")
    assert attention[1] == pytest.approx(attention[0] + sum(d["flops"] for d in line["differences"]))
    assert sum(found.values()) == pytest.approx(sum(wanted.values()), rel=1e-3)
    assert attention[0] < attention[1] < 2.01 * products / 9 * attention[0]  # whole blocks, half of them masked


@pytest.mark.jax
def test_a_step_is_compiled_for_gpus_that_are_not_there(run, monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWISE_CACHE", str(tmp_path / "cache"))
    done = run("verify", SMALL, "--on", "h100:4", *JOB, "--json")
    check(done)
    assert done.json["target"] == "h100-sxm:4"
    assert [c["cached"] for c in done.json["compiled"]] == [False]
    again = run("verify", SMALL, "--on", "h100:4", *JOB)
    assert again.first_line.startswith("Fits: compiled for h100-sxm:4 it takes")
    assert "(found in the cache of compiled programs)" in " ".join(again.out.split())
    assert len(list((tmp_path / "cache" / "compiled").iterdir())) == 1


@pytest.mark.jax
def test_what_is_in_the_hosts_memory_is_not_the_chips(run):
    done = run("verify", SMALL, "--on", "h100:4", *JOB[:5], "fsdp=4,remat=full,offload=optimizer", "--json")
    assert done.code == 0, done.err
    memory = {line["name"]: line for line in done.json["memory"]}
    for name in ("arguments", "host"):
        line = memory[name]
        explained = sum(d["bytes"] for d in line["differences"] if d["reason"] != "unexplained")
        assert line["compiled_bytes"] - explained == pytest.approx(line["predicted_bytes"], rel=1e-3), name
    assert memory["host"]["compiled_bytes"] > memory["arguments"]["compiled_bytes"]
    (compiled,) = (one["memory_bytes"] for one in done.json["compiled"])
    assert compiled["host_temporaries"] == 0, "a copy of the state"
    assert memory["peak"]["compiled_bytes"] <= compiled["arguments"] + compiled["temporaries"] + 2**12


@pytest.mark.slow  # XLA's TPU compiler takes a minute for any program; proves that it is asked right
def test_a_step_is_compiled_for_tpus_that_are_not_there(run):
    done = run("verify", SMALL, "--on", "v5e:2x2", *JOB, "--json")
    check(done, products=11)  # a kernel for the gradients of queries and one for those of keys: scores twice
    assert {"jax", "jaxlib", "libtpu"} == set(done.json["compiler_versions"])


#: A search whose best plan is compiled once for the two tests below.
SEARCH = ["plan", "train", SMALL, "--on", "h100:4", *JOB[:4], "--top", "2", "--fix", "remat=full",
          "--forbid", "pipeline,context,ulysses"]  # fmt: skip


@pytest.mark.jax
def test_a_saved_plan_is_verified_as_it_is(run, tmp_path):
    plan = tmp_path / "plan.json"
    run(*SEARCH, "--save", str(plan))
    saved = Plan.from_json(plan.read_text())
    assert run("verify", str(plan), "--json").json["layout"] == saved.line


@pytest.mark.jax
def test_the_best_plans_of_a_search_are_compiled(run):
    done = run(*SEARCH, "--verify", "1", "--json")
    assert done.code == 0, done.err
    (row,) = done.json["verified"]
    assert (row["rank"], row["fits"], row["refused"]) == (1, True, None)
    assert done.json["inputs"]["verify"] == 1
    assert run(*SEARCH, "--verify", "1", "--scaling").code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.json"], "plan 'nowhere.json'"),
        ([SMALL, "--on", "tpu7x:2x2x1", *JOB], "two devices"),
        ([SMALL, "--on", "h100:4", *JOB[:4]], "--layout is missing"),
        ([SMALL, "--on", "h100:4", *JOB, "--reduced"], "No such option '--reduced'"),
        pytest.param(  # what executes plans says so, which imports JAX
            [SMALL, "--on", "h100:4", *JOB[:5], "fsdp=4,offload=parameters"], "not yet executed", marks=pytest.mark.jax
        ),
    ],
)
def test_what_cannot_be_verified_is_said(run, arguments, words):
    done = run("verify", *arguments)
    assert done.code == 2
    assert words in done.err


def test_a_missing_compiler_is_named_with_the_line_that_installs_it(run, monkeypatch):
    monkeypatch.setattr("meshwise.compiler.environment.importlib.util.find_spec", lambda _: None)
    done = run("verify", SMALL, "--on", "v5e:2x2", *JOB)
    assert done.code == 4
    assert "pip install 'meshwise[tpu]'" in done.err
