"""What is exported is read by the tools themselves: their dataclasses and parsers, installed without a GPU.

Slow because they need the packages of `tests/data/export/tools.txt`, and search plans for each tool.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import typing

import pytest
from pydantic import ConfigDict, TypeAdapter, ValidationError

from meshwise.core.errors import HandoverError
from meshwise.exports import hand_over
from meshwise.exports.serving import hand_over_serving
from meshwise.search.serving import ServingPlan
from tests.exports.plans import CASES, HANDED
from tests.exports.serving_plans import SERVED, serving_plan
from tests.exports.test_golden import arguments
from tests.exports.test_serving_golden import command_of, functions, ran  # noqa: F401 -- a fixture
from tests.exports.test_tools import JOBS, LOADS, plans, serving
from tests.exports.tool_packages import megatron_config, sglang_parser, torchtitan_configs

pytestmark = pytest.mark.slow


@functools.cache
def texts(tool):
    """What is exported to a tool: of the kept plans, and of the best three that are found for it, of each job."""
    found = [CASES[case][0]() for case, to in HANDED if to == tool]
    for job in JOBS:
        try:
            found += plans(job, tool=tool, top=3)
        except HandoverError:
            continue  # it does not take the job
    assert len(found) > 6
    return [hand_over(plan, tool).text for plan in found]


def read_strictly(kind, given):
    """An instance of a dataclass, made by itself, after all values had the types of their fields."""
    types = typing.get_type_hints(kind)
    for name, value in given.items():
        TypeAdapter(types[name], config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
    return kind(**given)


def test_torchtitan_makes_its_configuration():
    configs = torchtitan_configs()
    made = []

    class Policy:
        """Of recomputation: its own class needs torch."""

        Config = dict

    for text in texts("torchtitan"):
        tree = ast.parse(text)
        tree.body = [n for n in tree.body if not isinstance(n, ast.ImportFrom)]
        names = {
            name: lambda name=name, **given: read_strictly(getattr(configs, name), given)
            for name in ("ParallelismConfig", "TrainingConfig", "CompileConfig")
        } | {"FullAC": Policy}
        exec(compile(tree, "planned.py", "exec"), names)  # noqa: S102 -- the text is under test
        config = type("Config", (), {})()
        config.training = configs.TrainingConfig()
        made.append(names["planned"](config).parallelism)
    assert {type(p).__name__ for p in made} == {"ParallelismConfig"}
    with pytest.raises(ValidationError):
        read_strictly(configs.ParallelismConfig, {"tensor_parallel_degree": "2"})


#: Arguments of Megatron's script -> fields of its configuration, where their names differ.
RENAMED = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
}


def transformer_fields(kind, read):
    """The arguments that are fields of the configuration, as values of the fields' types."""
    types, given = {f.name: f.type for f in dataclasses.fields(kind)}, {}
    for flag, values in read.items():
        name = flag.removeprefix("--").replace("-", "_")
        name = RENAMED.get(name, name)
        if name not in types or name == "pipeline_model_parallel_layout":  # whose class needs torch
            continue
        value = values if len(values) > 1 else values[0] if values else True
        if name in {"moe_layer_freq", "window_size"}:
            value = eval(value)  # noqa: S307 -- as its own script does
        elif name in {"recompute_modules", "hierarchical_context_parallel_sizes"}:
            value = values
        given[name] = TypeAdapter(types[name]).validate_python(value)
    return given


@pytest.mark.filterwarnings("ignore::UserWarning")  # advice: deprecated defaults, a dtype of routers
def test_megatron_makes_its_configuration():
    config, seen = megatron_config(), set()
    for text in texts("megatron"):
        read = arguments(text)
        kind = config.MLATransformerConfig if "--multi-latent-attention" in read else config.TransformerConfig
        given = transformer_fields(kind, read)
        seen |= set(given)
        if int(read["--pipeline-model-parallel-size"][0]) > 1:
            given["pipeline_dtype"] = "bf16"  # its script takes it from --bf16
        if "--disable-bias-linear" in read:
            given["add_bias_linear"] = False
        if "--num-layers-per-virtual-pipeline-stage" in read:
            pieces = given["num_layers"] // int(read["--num-layers-per-virtual-pipeline-stage"][0])
            given["virtual_pipeline_model_parallel_size"] = pieces // given["pipeline_model_parallel_size"]
        kind(**given)  # checks by itself what goes together
    assert len(seen) > 30
    with pytest.raises(ValueError, match="multiple of tensor_model_parallel_size"):
        config.TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=8, tensor_model_parallel_size=3)


def test_sglang_parses_its_arguments(ran):  # noqa: F811 -- the fixture
    parser, parsed = sglang_parser(), []
    found = [serving_plan(case) for case, engine in SERVED if engine == "sglang"]
    for load in LOADS:
        try:
            planning = serving(load, tool="sglang", top=3)
        except HandoverError:
            continue
        found += [ServingPlan(planning.problem, e) for e in planning.plans]
    for plan in found:
        text = hand_over_serving(plan, "sglang").text
        for name in functions(text):
            command, options = command_of(ran(text, name)[0])
            if command == "sglang.launch_server":
                parsed.append((plan.setup, parser.parse_args(options)))
    assert len(parsed) > len(found)
    assert all(args.tp_size * args.pp_size in {s.prefill.engine_chips, s.decode.engine_chips} for s, args in parsed)
