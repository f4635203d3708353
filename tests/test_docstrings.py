"""Every public name shows what a reader can type, and what it shows is so."""

import doctest
import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.analysis.catalogue import ANALYSES
from vitlab.data.pack.write import pack

WHOLE = ["layers", "tokenizers", "models", "optim"]  # rooms in which each module shows all that it has
EXPORTS = ["ablation", "analysis", "callbacks", "data", "pretraining", "tasks"]  # rooms that show what they export
MODULES = ["api", "run", "runs.records", "stats", "tables"]
RUNS = {"directory": "RunDir", "find": "find_run"}  # what a reader may want of vitlab.runs
TRAINS = ["fit", "Run"]  # what takes seconds
RUN = ("vitlab.analysis", "vitlab.api")  # rooms whose examples speak of a run
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def modules():
    for name in (*WHOLE, *MODULES):
        module = importlib.import_module(f"vitlab.{name}")
        yield module
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
            yield importlib.import_module(found.name)


def public():
    """Yield the classes and functions that a reader may call."""
    shown = [(name, value, module) for module in modules() for name, value in vars(module).items()]
    for room in EXPORTS:
        package = importlib.import_module(f"vitlab.{room}")
        values = [(name, getattr(package, name)) for name in package.__all__]
        shown += [(n, value, inspect.getmodule(value)) for n, value in values if inspect.getmodule(value) is not None]
    for file, name in RUNS.items():
        module = importlib.import_module(f"vitlab.runs.{file}")
        shown.append((name, getattr(module, name), module))
    for name, value, module in shown:
        is_code = inspect.isclass(value) or inspect.isfunction(value)
        if is_code and value.__module__ == module.__name__ and not name.startswith("_"):
            marks = [pytest.mark.slow] if name in TRAINS or module.__name__.startswith(RUN) else []
            yield pytest.param(value, module, id=f"{module.__name__}.{name}", marks=marks)


@pytest.fixture(autouse=True)
def analyses():
    """Forget an analysis that an example defines."""
    yield
    for name in set(ANALYSES._known) - set(ANALYSES._shipped):
        del ANALYSES._known[name]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the examples speak of: a run called first, a digit, photos of cats and dogs."""
    folder = tmp_path_factory.mktemp("examples")
    pixels = np.random.default_rng(0)
    for name in ("photos/cat", "photos/dog", "ilsvrc/train/n01440764", "ilsvrc/val/n01440764"):
        (folder / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(pixels.integers(0, 255, (40, 36, 3), np.uint8)).save(folder / name / f"{i}.png")
    Image.fromarray(pixels.integers(0, 255, (8, 8), np.uint8)).save(folder / "digit.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        short = {"trainer.max_epochs": 1, "trainer.logger": False, "data.subset": 0.2}
        vitlab.fit("t2t", {**short, "model.pos_embed": "sincos2d"}, name="first", quiet=True).test()
        pack("photos", "packed", size=40, num_workers=0)
    return folder


@pytest.fixture(scope="module")
def subjects():
    """Networks as they start, with digits to look at them with."""
    size = {"img_size": 8, "in_chans": 1, "num_classes": 10, "embed_dim": 16, "depth": 2, "num_heads": 2}
    patch = {**size, "patch_size": 2}
    t2t = {**size, "tokenizer": "t2t", "t2t_kernels": (3, 3), "t2t_attn": "transformer", "t2t_dim": 8}
    nets = [(vitlab.create_model(**arguments).eval(), arguments) for arguments in (patch, t2t)]
    light = {"decoder_dim": 8, "decoder_depth": 1, "decoder_heads": 2}
    mae = vitlab.MAE(**light, **{name: value for name, value in patch.items() if name != "num_classes"})
    digits = vitlab.Digits(batch_size=16)
    found = [vitlab.Subject(net, digits, known, num_images=16) for net, known in nets]
    return [*found, vitlab.Subject(mae.net, digits, num_images=16, task=mae)]


@pytest.mark.parametrize(("value", "module"), list(public()))
def test_every_public_class_and_function_has_an_example_that_runs(value, module, request, monkeypatch):
    finder = doctest.DocTestFinder(recurse=inspect.isclass(value))
    names = {"torch": torch, **vars(module)}
    examples = [test for test in finder.find(value, module=module, globs=names) if test.examples]
    assert examples, "its docstring shows nothing that a reader could type"
    if module.__name__.split(".")[1] not in WHOLE:
        monkeypatch.chdir(request.getfixturevalue("place"))
        names["subject"], names["t2t_subject"], names["mae_subject"] = request.getfixturevalue("subjects")
        names["run"] = vitlab.Run("first")
        monkeypatch.setattr("vitlab.analysis.attribution.maps.STEPS", 8)  # no example shows numbers of maps
        monkeypatch.setattr("vitlab.analysis.attribution.maps.SAMPLES", 4)
        monkeypatch.setattr("vitlab.analysis.attribution.sanity.DRAWS", 2)
        for file in ("sanity", "curves"):
            monkeypatch.setattr(f"vitlab.analysis.attribution.{file}.MOST", 4)
        if value is not vitlab.analysis.Finding:
            request.getfixturevalue("hasty")
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    said = []
    for test in examples:
        test.globs.update(names)
        assert runner.run(test, out=said.append).failed == 0, "".join(said)


def others():
    """Yield the other modules that show examples, with the names of what is tested above."""
    tested = {(case.values[1].__name__, case.values[0].__name__) for case in public()}
    for found in pkgutil.walk_packages(vitlab.__path__, "vitlab."):
        source = found.module_finder.find_spec(found.name).loader.get_source(found.name)
        if ">>> " in source:
            yield pytest.param(found.name, {name for module, name in tested if module == found.name}, id=found.name)


@pytest.mark.parametrize(("name", "tested"), list(others()))
def test_examples_of_what_is_not_public_run_too(name, tested, place, monkeypatch):
    module = importlib.import_module(name)
    monkeypatch.chdir(place)
    runner, said = doctest.DocTestRunner(optionflags=FLAGS), []
    for test in doctest.DocTestFinder().find(module, globs={"torch": torch, **vars(module)}):
        if test.examples and test.name.removeprefix(f"{name}.").split(".")[0] not in tested:
            assert runner.run(test, out=said.append).failed == 0, "".join(said)
