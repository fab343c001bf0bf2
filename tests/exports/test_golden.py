"""What is handed over: word for word as kept, and parsed back, equal to the plan."""

import ast
import json
import re
import shlex

import pytest

from meshwise.exports import TARGETS, hand_over
from tests.exports.kept import hold_header, hold_kept
from tests.exports.plans import CASES, DATA, HANDED

KNOWN = {
    name: set(table["options"].split())
    for name, table in json.loads((DATA / "known_options.json").read_text(encoding="utf-8")).items()
}


def handed(case, tool):
    plan = CASES[case][0]()
    return plan, hand_over(plan, tool)


@pytest.mark.parametrize(("case", "tool"), HANDED)
def test_the_text_is_as_kept_and_its_header_names_plan_version_and_notes(case, tool):
    plan, done = handed(case, tool)
    hold_kept(done, f"{case}.{tool}")
    hold_header(done, str(plan.layout))


def test_every_tool_has_a_case():
    assert {tool for _, tool in HANDED} == set(TARGETS)


def cases_of(tool):
    return [case for case, other in HANDED if other == tool]


def settings(text):
    """Read the YAML that is written: one `key: JSON value` a line."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [line.split(": ", 1) for line in lines]
    assert len({key for key, _ in pairs}) == len(pairs)
    return {key: json.loads(value) for key, value in pairs}


@pytest.mark.parametrize("case", cases_of("maxtext"))
def test_maxtext_adds_up(case):
    plan, done = handed(case, "maxtext")
    layout, read = plan.layout, settings(done.text)
    sizes = {k: v for k, v in read.items() if k.endswith("_parallelism")}
    inside, between = ({k[4:]: v for k, v in sizes.items() if k.startswith(p)} for p in ("ici_", "dcn_"))
    product = 1
    for name in inside:
        product *= inside[name] * between[name]
    assert product == layout.num_chips
    slices = plan.problem.cluster.num_slices
    assert slices == between["data_parallelism"]
    assert inside["data_parallelism"] * between["data_parallelism"] == layout.data
    for name in ("fsdp", "expert", "context"):
        assert inside[f"{name}_parallelism"] * between[f"{name}_parallelism"] == layout.sizes[name]
    assert inside["tensor_sequence_parallelism"] == layout.tensor
    assert inside["pipeline_parallelism"] == layout.stage
    passes = read["gradient_accumulation_steps"]
    assert read["per_device_batch_size"] * layout.num_chips * passes == layout.sequences
    assert read["max_target_length"] == plan.problem.job.seq_len


def arguments(text):
    """Read the shell array: argument -> its values."""
    body = text[text.index("MEGATRON_ARGS=(") + len("MEGATRON_ARGS=(") : text.rindex(")")]
    read, name = {}, None
    for word in shlex.split(body, comments=True):
        if word.startswith("--"):
            name = word
            assert name not in read
            read[name] = []
        else:
            read[name].append(word)
    return read


@pytest.mark.parametrize("case", cases_of("megatron"))
def test_megatron_adds_up(case):
    plan, done = handed(case, "megatron")
    layout, read = plan.layout, arguments(done.text)

    def number(name, default=1):
        return int(read[name][0]) if name in read else default

    tensor, stage = number("--tensor-model-parallel-size"), number("--pipeline-model-parallel-size")
    context = number("--context-parallel-size")
    assert (tensor, stage, context) == (layout.tensor, layout.stage, layout.context * layout.ulysses)
    ranks = layout.num_chips // (tensor * stage * context)
    assert ranks == layout.data * layout.fsdp * layout.expert
    assert number("--global-batch-size") == ranks * number("--micro-batch-size") * layout.num_microbatches
    assert number("--global-batch-size") == layout.sequences
    experts = number("--expert-model-parallel-size") * number("--expert-tensor-parallel-size", tensor)
    assert layout.num_chips % (experts * stage) == 0
    assert ("--use-megatron-fsdp" in read) == (layout.fsdp > 1)
    assert ("--sequence-parallel" in read) == (layout.tensor > 1)
    model = plan.problem.model
    assert number("--num-layers") == model.num_layers
    assert number("--hidden-size") == model.d_model
    assert number("--seq-length") == plan.problem.job.seq_len


def stages_of(text):
    """Layers of each stage, in Megatron's notation."""
    text = re.sub(r"\((.*?)\)\*(\d+)", lambda m: m[1] * int(m[2]), text.replace(",", ""))
    text = re.sub(r"t\*(\d+)", lambda m: "t" * int(m[1]), text)
    assert text[0] == "E"
    assert text[-1] == "L"
    return [stage.count("t") for stage in text.split("|")]


def test_uneven_stages_are_spelled_out():
    plan, done = handed("mixture", "megatron")
    stages = stages_of(arguments(done.text)["--pipeline-model-parallel-layout"][0])
    assert len(stages) == plan.layout.stage
    assert sum(stages) == plan.problem.model.num_layers
    assert max(stages) == -(-plan.problem.model.num_layers // plan.layout.stage)


def test_virtual_stages_and_layers_that_repeat_are_counted_by_piece():
    plan, done = handed("interleaved", "megatron")
    layout, read = plan.layout, arguments(done.text)
    pieces = layout.stage * layout.virtual_stages
    assert int(read["--num-layers-per-virtual-pipeline-stage"][0]) * pieces == plan.problem.model.num_layers
    assert read["--recompute-method"] == ["block"]
    assert int(read["--recompute-num-layers"][0]) * pieces == layout.remat_layers


def keywords(text, name):
    """Read the literal keywords of the call of `name`."""
    (call,) = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == name)
    return {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}


@pytest.mark.parametrize("case", cases_of("torchtitan"))
def test_torchtitan_adds_up(case):
    plan, done = handed(case, "torchtitan")
    layout = plan.layout
    degrees, training = keywords(done.text, "ParallelismConfig"), keywords(done.text, "TrainingConfig")
    ranks = degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
    others = degrees["tensor_parallel_degree"] * degrees["context_parallel_degree"]
    assert ranks * others * degrees.get("pipeline_parallel_degree", 1) == layout.num_chips
    assert degrees["tensor_parallel_degree"] == layout.tensor
    shards = degrees["data_parallel_shard_degree"] * others
    assert shards % degrees.get("expert_parallel_degree", 1) == 0
    assert set(degrees) <= KNOWN["torchtitan ParallelismConfig"]
    assert set(training) | {"steps", "max_norm"} <= KNOWN["torchtitan TrainingConfig"]
    compiled = keywords(done.text, "CompileConfig")
    assert set(compiled) <= KNOWN["torchtitan CompileConfig"]
    assert compiled["enable_async_tensor_parallel"] == (layout.tensor > 1 and layout.sequence_parallel)
    assert training["seq_len"] == plan.problem.job.seq_len
    assert training["global_batch_size"] == layout.sequences == ranks * layout.micro_batch * layout.num_microbatches
    local, micro_batch = training["local_batch_size"], degrees.get("pipeline_parallel_microbatch_size", 1)
    assert training["global_batch_size"] % (local * ranks) == 0
    if layout.stage > 1:
        assert (local // micro_batch, local * ranks) == (layout.num_microbatches, layout.sequences)
        assert training["disable_cuda_graphs"], "it refuses pipelines with them"


@pytest.mark.parametrize("case", cases_of("torchtitan"))
def test_the_torchtitan_function_sets_a_configuration(case):
    """Run it, with stand-ins for torchtitan's classes that hold what they are given."""
    plan, done = handed(case, "torchtitan")

    class Holder:
        def __init__(self, **given):
            self.__dict__.update(given)

        @classmethod
        def Config(cls, **given):
            return cls(**given)

    configs = "CompileConfig", "ParallelismConfig", "TrainingConfig"
    names = dict.fromkeys((*configs, "FullAC", "CrossEntropyLoss", "ChunkedLossWrapper"), Holder)
    tree = ast.parse(done.text)
    tree.body = [n for n in tree.body if not isinstance(n, ast.ImportFrom)]
    exec(compile(tree, "planned.py", "exec"), names)  # noqa: S102  (the text is under test)
    config = Holder(training=Holder(steps=7, max_norm=1.0))
    assert names["planned"](config) is config
    assert config.training.steps == 7
    assert config.parallelism.tensor_parallel_degree >= 1
    assert config.loss.global_vocab_size == plan.problem.model.vocab_size


@pytest.mark.parametrize("case", cases_of("deepspeed"))
def test_deepspeed_adds_up(case):
    plan, done = handed(case, "deepspeed")
    layout, read = plan.layout, json.loads(done.text)
    tensor = read.get("tensor_parallel", {}).get("autotp_size", 1)
    ranks = layout.num_chips // (tensor * read.get("sequence_parallel_size", 1) * layout.stage)
    assert ranks == layout.data * layout.fsdp * layout.expert
    batch = read["train_micro_batch_size_per_gpu"] * read["gradient_accumulation_steps"] * ranks
    assert batch == read["train_batch_size"] == layout.sequences
    assert read["zero_optimization"]["stage"] == (3 if layout.fsdp > 1 else layout.zero)
    assert ("offload_optimizer" in read["zero_optimization"]) == ("optimizer" in layout.offload)
