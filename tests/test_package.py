"""What holds for every module: its examples run, its public list is right, its docstring says what it is."""

import ast
import doctest
import importlib
import inspect
import pkgutil

import pytest

import meshwise

MODULES = sorted(
    m.name for m in pkgutil.walk_packages(meshwise.__path__, "meshwise.") if not m.name.endswith(".__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_public_names_exist_and_are_documented(name):
    module = importlib.import_module(name)
    names = module.__all__
    assert len(set(names)) == len(names)
    for public in names:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{public} says nothing"


@pytest.mark.parametrize("name", [m for m in MODULES if ".families." not in m])  # families build on one another
def test_what_is_imported_from_another_module_is_public_there(name):
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "") in MODULES:
            home = importlib.import_module(statement.module)
            inner = {m.rpartition(".")[2] for m in MODULES if m.rpartition(".")[0] == statement.module}
            private = {a.name for a in statement.names} - set(home.__all__) - inner
            assert not private, f"{statement.module} does not list {private}"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name):
    assert importlib.import_module(name).__doc__


def test_the_layers_are_these():
    layers = " ".join(sorted({name.split(".")[1] for name in MODULES}))
    lower = "backward cli compiler costs dtypes errors explanation handover hardware jobs kernels models planning"
    assert layers == f"{lower} report runtime scoring sharding simulation tensors units verbs"
