"""What is exported is read by the tools themselves: their dataclasses and parsers, installed without a GPU.

Slow because they need the packages of `tests/data/export/tools.txt`, and search plans for each tool.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import math
import typing
from types import SimpleNamespace

import pytest
from pydantic import ConfigDict, TypeAdapter, ValidationError

import meshwise
from meshwise.core.dtypes import DType
from meshwise.core.errors import HandoverError
from meshwise.exports import hand_over
from meshwise.exports.serving import hand_over_serving
from meshwise.search.serving import ServingPlan
from tests.exports.plans import CASES, HANDED
from tests.exports.serving_plans import SERVED, serving_plan
from tests.exports.test_golden import arguments, settings
from tests.exports.test_serving_golden import command_of, functions, hold_types, ran  # noqa: F401 -- a fixture
from tests.exports.test_tools import JOBS, LOADS, plans, serving
from tests.exports.tool_packages import (
    deepspeed_config,
    maxtext_config,
    megatron_arguments,
    sglang_parser,
    torchtitan_configs,
    torchtitan_losses,
)

pytestmark = pytest.mark.slow


#: What else is asked of each job in turn: formats and models in which tools differ.
MORE = (
    ("llama-3-70b", "h100:64", {"batch_tokens": "4Mi", "seq_len": 8192}),
    ("llama-3-70b", "b200:64", {"precision": "nvfp4"}),
    ("qwen3-30b-a3b", "b200:32", {"precision": "mxfp8"}),
    ("gpt-3-175b", "a100:512", {"seq_len": 2048}),
    ("deepseek-v3", "h800:512", {"precision": "fp8-block"}),
    ("llama-3-8b", "h100:8", {"precision": "fp8", "optimizer": "momentum"}),
    ("qwen3-32b", "mi300x:64", {}),
    ("mistral-7b-v0.1", "v5p:4x4x4", {}),
    ("qwen3-14b", "v6e:8x8", {"optimizer": "muon"}),
    ("mixtral-8x7b", "v5e:16x16", {"precision": "int8"}),
    ("llama-3-70b", "tpu7x:4x4x4", {}),
    ("llama-3-8b", "v5p:4x4x4*2", {}),
    ("smollm2-135m", "rtx-4090:4", {"precision": "fp32", "seq_len": 2048}),
)


@functools.cache
def exported(tool):
    """Plans and what is exported of them to a tool: those that are kept, and the best that are found for it."""
    found = [CASES[case][0]() for case, to in HANDED if to == tool]
    asked = [lambda job=job: plans(job, tool=tool, top=3) for job in JOBS]
    for model, on, more in MORE:
        sizes = {"batch_tokens": "2Mi", "seq_len": 4096, "tool": tool, "top": 2} | more
        asked.append(lambda model=model, on=on, sizes=sizes: meshwise.plan_train(model, on=on, **sizes).plans)
    for ask in asked:
        try:
            found += ask()
        except HandoverError:
            continue  # it does not take the job
    assert len(found) > 12
    return [(plan, hand_over(plan, tool).text) for plan in found]


def read_strictly(kind, given):
    """An instance of a dataclass, made by itself, after all values had the types of their fields."""
    types = typing.get_type_hints(kind)
    for name, value in given.items():
        TypeAdapter(types[name], config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
    return kind(**given)


def one_loss(name, fields):
    """Of a loss, whose own class needs torch: a configuration that takes its fields alone."""

    def config(**given):
        assert set(given) <= fields
        return {"kind": name, **given}

    return type(name, (), {"Config": staticmethod(config)})


def test_torchtitan_makes_its_configuration():
    configs = torchtitan_configs()
    made = []

    class Policy:
        """Of recomputation: its own class needs torch."""

        Config = dict

    losses = {name: one_loss(name, set(own)) for name, own in torchtitan_losses().items()}
    for _, text in exported("torchtitan"):
        tree = ast.parse(text)
        tree.body = [n for n in tree.body if not isinstance(n, ast.ImportFrom)]
        names = {
            name: lambda name=name, **given: read_strictly(getattr(configs, name), given)
            for name in ("ParallelismConfig", "TrainingConfig", "CompileConfig")
        } | {"FullAC": Policy, **losses}
        exec(compile(tree, "planned.py", "exec"), names)  # noqa: S102 -- the text is under test
        config = type("Config", (), {})()
        config.training = configs.TrainingConfig()
        made.append(names["planned"](config).parallelism)
        assert config.loss["kind"] in losses
    assert {type(p).__name__ for p in made} == {"ParallelismConfig"}
    with pytest.raises(ValidationError):
        read_strictly(configs.ParallelismConfig, {"tensor_parallel_degree": "2"})


#: What a plan does not know and Megatron's script wants.
OWN = ("--lr", "1e-4", "--train-iters", "100", "--tokenizer-type", "NullTokenizer")


@pytest.mark.filterwarnings("ignore::UserWarning")  # advice: deprecated defaults, a dtype of routers
def test_megatron_parses_its_arguments_and_makes_its_configuration(monkeypatch):
    def parse(module, plan, text, *others):
        words = [w for name, values in arguments(text).items() for w in (name, *values)]
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words, *OWN, *others])
        monkeypatch.setenv("WORLD_SIZE", str(plan.layout.num_chips))
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        for line in text.splitlines():
            if line.startswith("export "):
                monkeypatch.setenv(*line.removeprefix("export ").split("="))
        args = module.parse_args()
        module.validate_args(args)
        return args, module.core_transformer_config_from_args(args)

    def hold(module, plan, text):
        layout = plan.layout
        args, config = parse(module, plan, text)
        ranks = layout.num_chips // (layout.tensor * layout.stage * layout.context * layout.ulysses)
        assert args.data_parallel_size == ranks
        assert args.global_batch_size == ranks * args.micro_batch_size * layout.num_microbatches
        assert config.num_layers == plan.problem.model.num_layers
        if "export CUDA_DEVICE" in text and "--overlap-moe-expert-parallel-comm" not in text:
            with pytest.raises(AssertionError, match="CUDA_DEVICE_MAX_CONNECTIONS"):  # what the text sets is needed
                parse(module, plan, text.replace("export CUDA_DEVICE_MAX_CONNECTIONS=1", ""))
        with pytest.raises(AssertionError, match="not divisible by total_model_size"):
            parse(module, plan, text, "--tensor-model-parallel-size", str(2 * layout.num_chips))

    for capability in (9, 10):
        with megatron_arguments(capability) as module:
            for plan, text in exported("megatron"):
                if (DType.FP4 in plan.problem.cluster.chip.flops_per_s) == (capability == 10):
                    hold(module, plan, text)


def test_maxtext_makes_its_configuration():
    make, usual = maxtext_config()
    for plan, text in exported("maxtext"):
        chips = plan.layout.num_chips * plan.problem.cluster.chip.devices_per_chip
        given = settings(text)
        assert set(given) - {"base_config"} <= set(usual)
        devices = {"internal_compile": True, "internal_compile_num_devices": chips, "run_name": "planned"}
        del given["base_config"]
        given |= devices | {"num_slices": plan.problem.cluster.num_slices}
        config = make(given)
        assert config.global_batch_size_to_train_on == plan.layout.sequences
        assert math.prod(config.ici_parallelism) * math.prod(config.dcn_parallelism) == chips
        assert config.num_decoder_layers == plan.problem.model.num_layers
    with pytest.raises(ValidationError):
        make(given | {"ici_context_usp_ulysses_parallelism": 2, "context_parallel_strategy": "ring"})


class Read(dict):
    """Settings that remember which of them were asked for."""

    def __init__(self, *given):
        super().__init__(*given)
        self.asked = {"sequence_parallel_size"}  # which it asks for without ranks of its own

    def __copy__(self):
        return self

    def __contains__(self, name):
        self.asked.add(name)
        return super().__contains__(name)

    def __getitem__(self, name):
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


def test_deepspeed_makes_its_configuration():
    with deepspeed_config() as module:
        check = importlib.import_module("deepspeed.module_inject.auto_ep_config").validate_autoep_config
        for plan, text in exported("deepspeed"):
            layout, read = plan.layout, Read(json.loads(text))
            del read["_comment"]
            tensor, ulysses = read.get("tensor_parallel", {}).get("autotp_size", 1), layout.ulysses
            ranks = SimpleNamespace(
                get_data_parallel_world_size=lambda n=layout.num_chips // (tensor * ulysses * layout.stage): n
            )
            config = module.DeepSpeedConfig(read, mpu=ranks)
            assert set(read) <= read.asked, "it reads every setting"
            zero = read["zero_optimization"]
            assert config.zero_config.stage == zero["stage"]
            check(
                config.expert_parallel_config, layout.num_chips, layout.stage, tensor, ulysses,
                zero_stage=zero["stage"], zero_offload_optimizer="offload_optimizer" in zero,
                zero_offload_param="offload_param" in zero,
            )  # fmt: skip
        with pytest.raises(module.DeepSpeedConfigError, match="MiCS"):
            module.DeepSpeedConfig(Read(read | {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}), mpu=ranks)


def served(engine):
    """Plans that are kept, and the best that are found for an engine on each load."""
    found = [serving_plan(case) for case, to in SERVED if to == engine]
    for load in LOADS:
        try:
            planning = serving(load, tool=engine, top=3)
        except HandoverError:
            continue  # it does not take the load
        found += [ServingPlan(planning.problem, e) for e in planning.plans]
    return [(plan, hand_over_serving(plan, engine).text) for plan in found]


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm"])
def test_engines_have_these_options(engine, ran):  # noqa: F811 -- the fixture
    """Names, types and choices are those of their sources, `tests/data/export/known_options.json`."""
    texts = served(engine)
    assert len(texts) > 6
    for _, text in texts:
        hold_types(text, ran)


def test_sglang_parses_its_arguments(ran):  # noqa: F811 -- the fixture
    parser, parsed, texts = sglang_parser(), [], served("sglang")
    for plan, text in texts:
        for name in functions(text):
            command, options = command_of(ran(text, name)[0])
            if command == "sglang.launch_server":
                parsed.append((plan.setup, parser.parse_args(options)))
    assert len(parsed) > len(texts)
    assert all(args.tp_size * args.pp_size in {s.prefill.engine_chips, s.decode.engine_chips} for s, args in parsed)
