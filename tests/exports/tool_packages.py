"""Classes and parsers of other tools, loaded without what else these depend on: no torch, no GPU.

A module that is loaded here is the tool's own file; modules that it imports and that are not loaded, torch first, are
stood in for by modules whose every name is one class that gives itself for whatever it is asked.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import sys
import types
from pathlib import Path

import pytest

REQUIRED = Path(__file__).parents[1] / "data" / "export" / "tools.txt"


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
    """Stands for any class, function or list of names."""

    __slots__ = ()

    def __new__(cls, *_, **__):
        return super().__new__(cls)


class _StandIn(types.ModuleType):
    __version__ = "2.9.0"
    human_readable_int = int  # reads numbers, as the tool's own does

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any


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
    """Import modules of an installed package: `bare` packages without their own code, `stand_ins` not at all."""
    try:
        files = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"{package} is missing: pip install --no-deps -r {REQUIRED}")
    root, before, finder = Path(str(files.locate_file(""))), dict(sys.modules), _Finder(stand_ins)
    for name in bare:
        module = types.ModuleType(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = module
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)


def torchtitan_configs():
    """The module `torchtitan.config.configs`: its dataclasses of parallelism and training."""
    with _loading("torchtitan", ("torchtitan", "torchtitan.config"), ("torch",)):
        return importlib.import_module("torchtitan.config.configs")


#: What Megatron's configuration imports besides.
_MEGATRON = (
    "torch",
    "megatron.core.fusions",
    "megatron.core.utils",
    "megatron.core.quantization",
    "megatron.core.transformer.pipeline_parallel_layer_layout",
)


def megatron_config():
    """The module `megatron.core.transformer.transformer_config`: dataclasses that check what goes together."""
    with _loading("megatron-core", ("megatron", "megatron.core", "megatron.core.transformer"), _MEGATRON):
        return importlib.import_module("megatron.core.transformer.transformer_config")


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
