import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

import vitlab

ROOMS = ["layers", "tokenizers", "models", "optim"]


def modules():
    for room in ROOMS:
        package = importlib.import_module(f"{vitlab.__name__}.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def public():
    """Yield the classes and functions of each module that a reader may call."""
    for module in modules():
        for name, value in vars(module).items():
            is_code = inspect.isclass(value) or inspect.isfunction(value)
            if is_code and value.__module__ == module.__name__ and not name.startswith("_"):
                yield pytest.param(value, module, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize(("value", "module"), list(public()))
def test_every_public_class_and_function_has_an_example_that_runs(value, module):
    finder = doctest.DocTestFinder(recurse=inspect.isclass(value))
    examples = [
        test for test in finder.find(value, module=module, globs={"torch": torch, **vars(module)}) if test.examples
    ]
    assert examples, "its docstring shows nothing that a reader could type"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples:
        assert runner.run(test, out=print).failed == 0
