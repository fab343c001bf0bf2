"""What holds for every module: its examples run, its public list is right, its docstring says what it is."""

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import meshwise

MODULES: dict[str, ModuleType] = {
    m.name: importlib.import_module(m.name)
    for m in pkgutil.walk_packages(meshwise.__path__, "meshwise.")
    if not m.name.endswith(".__main__")
}


def test_examples_in_docstrings_run():
    having = {name: module for name, module in MODULES.items() if ">>> " in inspect.getsource(module)}
    assert len(having) > 50
    found = [test for module in having.values() for test in doctest.DocTestFinder().find(module) if test.examples]
    assert len(found) > len(having)  # others are left out: a run begins by looking at every file that was imported
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert not [test.name for test in found if runner.run(test).failed]


def test_public_names_exist_and_are_documented():
    for name, module in MODULES.items():
        names = getattr(module, "__all__", ())
        assert len(set(names)) == len(names), name
        for public in names:
            value = getattr(module, public)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert inspect.getdoc(value), f"{name}.{public} has no docstring"


def test_only_packages_list_their_public_names():
    assert [
        name for name, module in MODULES.items() if hasattr(module, "__all__") and not hasattr(module, "__path__")
    ] == []


def test_every_module_says_what_it_is_for():
    assert [name for name, module in MODULES.items() if not module.__doc__] == []


def test_the_layers_are_these():
    layers = sorted({name.split(".")[1] for name in MODULES})
    expected = "book cli commands compiler core costs engine exports hardware jobs models profile report runtime"
    assert layers == f"{expected} scheduling scoring search sharding simulation web".split()
