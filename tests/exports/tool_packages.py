"""Classes and parsers of other tools, loaded without what else these depend on: no torch, no GPU.

A module that is loaded here is the tool's own file; modules that it imports and that are not loaded, torch first, are
stood in for by modules whose every name is one class that gives itself for whatever it is asked.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import sys
import types
from pathlib import Path

import pytest
import yaml

#: Where packages lie that want a newer Python; only their configurations are read.
NEWER = Path(sys.prefix) / "tools"

#: How to install what is missing.
INSTALL = """as .ci/run does:
  pip install --no-deps -r tests/data/export/tools.txt
  pip install --no-deps -r tests/data/export/newer_tools.txt --only-binary :all: --python-version 3.12
    --ignore-requires-python --target .venv/tools"""


class _Itself(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __iter__(cls):
        return iter(())

    def __add__(cls, other):
        return other

    __radd__ = __add__


class _Any(str, metaclass=_Itself):
    """Stands for any class, function, decorator or list of names."""

    __slots__ = ()

    def __new__(cls, *_, **__):
        return super().__new__(cls)

    def __call__(self, *given, **_):
        return given[0] if given else self

    def __getattr__(self, name):
        return getattr(_Any, name)


class _StandIn(types.ModuleType):
    __version__ = "2.9.0"
    human_readable_int = int  # reads numbers, as the tool's own does
    dtype = type  # of which every name here is one
    quick_gelu = object()  # which no other function is
    is_te_min_version = is_torch_min_version = staticmethod(lambda *_, **__: True)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any


class _Bare(types.ModuleType):
    """A package without its own code, which gives the names of some of its modules."""

    def __init__(self, name, root, gives):
        super().__init__(name)
        self.__path__, self._gives = [str(root / name.replace(".", "/"))], gives

    def __getattr__(self, name):
        for module in () if name.startswith("__") else self._gives:
            with contextlib.suppress(AttributeError):
                return getattr(importlib.import_module(f"{self.__name__}.{module}"), name)
        raise AttributeError(name)


class _Finder:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, *_):
        if any(name == known or name.startswith(f"{known}.") for known in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    @staticmethod
    def create_module(spec):
        return _StandIn(spec.name)

    @staticmethod
    def exec_module(module):
        pass


@contextlib.contextmanager
def _loading(package, bare, stand_ins):
    """Import modules of an installed package: `bare` packages without their own code, `stand_ins` not at all.

    Names of `bare` end with the modules whose names they give: "megatron.core.transformer: transformer_config".
    """
    found = importlib.metadata.distributions(name=package, path=[str(NEWER), *sys.path])
    if (files := next(iter(found), None)) is None:
        pytest.fail(f"{package} is missing: install it {INSTALL}")
    root, before, finder = Path(str(files.locate_file(""))), dict(sys.modules), _Finder(stand_ins)
    for name, _, gives in (line.partition(": ") for line in bare):
        sys.modules[name] = _Bare(name, root, gives.split())
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        loaded = {line.partition(".")[0].partition(":")[0] for line in (*bare, *stand_ins)}
        for name in [n for n in sys.modules if n.partition(".")[0] in loaded]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] in loaded})


def torchtitan_configs():
    """The module `torchtitan.config.configs`: its dataclasses of parallelism and training."""
    with _loading("torchtitan", ("torchtitan", "torchtitan.config"), ("torch",)):
        return importlib.import_module("torchtitan.config.configs")


def torchtitan_losses():
    """Fields of the configurations of torchtitan's losses, by class: read from the source, which needs torch."""
    found = importlib.util.find_spec("torchtitan")
    tree = ast.parse((Path(found.submodule_search_locations[0]) / "components" / "loss.py").read_text("utf-8"))
    classes = {c.name: c for c in tree.body if isinstance(c, ast.ClassDef)}
    return {
        name: [field.target.id for config in classes[name].body if isinstance(config, ast.ClassDef)
               for field in config.body if isinstance(field, ast.AnnAssign)]
        for name in ("CrossEntropyLoss", "ChunkedLossWrapper")
    }  # fmt: skip


_MEGATRON = (
    "megatron",
    "megatron.core",
    "megatron.core.transformer: transformer_config",
    "megatron.core.distributed",
    "megatron.core.quantization",
    "megatron.training",
)
#: What Megatron's arguments and their checks import besides.
_NOT_MEGATRON = (
    "torch",
    "megatron.core.extensions",
    "megatron.core.fusions",
    "megatron.core.models",
    "megatron.core.rerun_state_machine",
    "megatron.core.tensor_parallel",
    "megatron.core.utils",
    "megatron.training.config.container",
    "megatron.training.global_vars",
    "megatron.training.models",
    "megatron.training.utils",
)


@contextlib.contextmanager
def megatron_arguments(capability):
    """The module `megatron.training.arguments`: the parser of its scripts, and what checks that arguments go together.

    Args:
        capability: of CUDA, of the chips that it is to find: 9 of H100, 10 of B200.
    """
    with _loading("megatron-core", _MEGATRON, _NOT_MEGATRON):
        module = importlib.import_module("megatron.training.arguments")
        module.torch.cuda = _StandIn("torch.cuda")
        module.torch.cuda.get_device_capability = lambda: (capability, 0)
        module.get_device_arch_version = lambda: capability
        module.update_use_dist_ckpt = lambda args: setattr(args, "use_dist_ckpt", args.ckpt_format != "torch")
        yield module


_MAXTEXT = ("maxtext", "maxtext.common", "maxtext.configs", "maxtext.utils")
#: What its configuration imports besides.
_NOT_MAXTEXT = (
    *("absl", "flax", "jax", "omegaconf"),
    *("maxtext.configs.pyconfig_deprecated", "maxtext.inference"),
    *("maxtext.utils.elastic_utils", "maxtext.utils.gcs_utils", "maxtext.utils.max_utils"),
)


def maxtext_config():
    """What makes MaxText's configuration of settings that override those of `base.yml`; the file itself, too."""
    with _loading("maxtext", _MAXTEXT, _NOT_MAXTEXT):
        reader = importlib.import_module("maxtext.configs.pyconfig")
        kinds = importlib.import_module("maxtext.configs.types")
    kinds.max_utils.get_num_slices = lambda raw: raw["num_slices"]
    kinds.gcs_utils.add_trailing_slash = "{}/".format
    usual = yaml.safe_load(Path(kinds.__file__).with_name("base.yml").read_text(encoding="utf-8"))

    def make(settings):
        kind = kinds.MaxTextConfig
        return kind(**reader._prepare_for_pydantic(usual | settings, config_class=kind))

    return make, usual


_DEEPSPEED = (
    "deepspeed",
    "deepspeed.compile",
    "deepspeed.module_inject",
    "deepspeed.runtime",
    "deepspeed.runtime.tensor_parallel: config",
    "deepspeed.runtime.model_checkpointing",
    "deepspeed.runtime.zero",
)
#: What its configuration imports besides.
_NOT_DEEPSPEED = (
    *("torch", "hjson", "deepspeed.accelerator", "deepspeed.comm", "deepspeed.elasticity", "deepspeed.utils"),
    *("deepspeed.ops", "deepspeed.monitor", "deepspeed.inference", "deepspeed.module_inject.tp_shard"),
)


@contextlib.contextmanager
def deepspeed_config():
    """The class `deepspeed.runtime.config.DeepSpeedConfig`, which reads a dictionary."""
    with _loading("deepspeed", _DEEPSPEED, _NOT_DEEPSPEED):
        yield importlib.import_module("deepspeed.runtime.config")


#: What fields of SGLang's arguments import besides.
_SGLANG = (
    "sglang.srt.utils",
    "sglang.srt.lora",
    "sglang.srt.model_executor",
)


def sglang_parser():
    """The parser of `sglang.launch_server`, of the dataclasses that its own is made of."""
    with _loading("sglang", ("sglang", "sglang.srt", "sglang.srt.arg_groups"), _SGLANG):
        utils = importlib.import_module("sglang.srt.arg_groups.arg_utils")
        fields = importlib.import_module("sglang.srt.arg_groups.fields")
        parser = argparse.ArgumentParser(prog="sglang.launch_server", allow_abbrev=False, exit_on_error=False)
        for file in sorted(Path(fields.__path__[0]).glob("[!_]*.py")):
            module = importlib.import_module(f"{fields.__name__}.{file.stem}")
            for found in vars(module).values():
                if isinstance(found, type) and found.__module__ == module.__name__ and hasattr(found, "_NS_PATH"):
                    utils.add_cli_args_from_dataclass(parser, found)
        return parser
