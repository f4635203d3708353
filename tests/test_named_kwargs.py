"""Tasks and data sets show every argument to a person and to an editor, as the command has them."""

import copy
import inspect
import pickle
import typing

import pytest
from jsonargparse import ArgumentParser

import vitlab.data
import vitlab.tasks
from vitlab.data import CIFAR10, Digits, FakeData, ImageFolder
from vitlab.data.base import ImageData
from vitlab.layers.pos_embed.added import Learned
from vitlab.models.arguments import NetworkArgs
from vitlab.models.old_names import OLD, OldArgs
from vitlab.models.vit import VisionTransformer
from vitlab.tasks import Classifier, Regressor

FRAMES = {"ImageData", "Photos"}  # of data sets, and none themselves
CLASSES = [getattr(m, name) for m in (vitlab.tasks, vitlab.data) for name in m.__all__ if name not in FRAMES]
TINY = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_signature_has_the_arguments_and_defaults_of_the_command(cls):
    parser = ArgumentParser()
    parser.add_class_arguments(cls, fail_untyped=False)
    required = {action.dest: action.required for action in parser._actions if not action.dest.endswith("help")}
    defaults = parser.get_defaults()
    shown = inspect.signature(cls).parameters
    old = set(getattr(cls, "old_names", ()))  # taken, and shown to nobody
    assert set(shown) | old == set(required) and not set(shown) & old
    assert not any(required[name] or name in defaults for name in old)
    for name, parameter in shown.items():
        assert (parameter.default is parameter.empty) == required[name], name
        if not required[name]:
            assert _as_list(defaults[name]) == _as_list(parameter.default), name


def _as_list(value):
    return list(value) if isinstance(value, tuple) else value


def test_the_arguments_of_the_network_are_those_of_the_class():
    taken = inspect.signature(VisionTransformer).parameters
    hints = typing.get_type_hints(NetworkArgs)
    assert set(hints) == {*taken, *OLD} - {"num_classes"} and len(taken) < 30
    assert {name: taken[name].annotation for name in hints if name in taken} == {
        name: kind for name, kind in hints.items() if name in taken
    }
    assert set(OLD) == set(typing.get_type_hints(OldArgs))


def test_help_shows_the_arguments_that_people_set():
    text = str(inspect.signature(Classifier))
    assert "lr: float = 0.001" in text
    assert "pos_embed:" in text
    assert "batch_size: int = 128" in str(inspect.signature(Digits))


def test_what_a_subclass_fixes_is_not_one_of_its_arguments():
    assert "native_size" not in inspect.signature(Digits).parameters
    assert "test_share" not in inspect.signature(CIFAR10).parameters
    assert "num_outputs" not in inspect.signature(Regressor).parameters


def test_a_custom_subclass_adds_arguments_to_those_it_passes_on():
    class Mine(Classifier):
        def __init__(self, weight: float, **rest):
            super().__init__(**rest)

    parameters = inspect.signature(Mine).parameters
    assert next(iter(parameters)) == "weight"
    assert parameters["depth"].default == 12


@pytest.mark.parametrize("base", [Classifier, VisionTransformer, Learned])
def test_a_signature_that_a_subclass_writes_itself_is_its_own(base):
    class Mine(base):
        __signature__ = inspect.Signature([inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY)])

    class Later(Mine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    assert [*inspect.signature(Mine).parameters] == [*inspect.signature(Later).parameters] == ["x"]
    assert "x" not in inspect.signature(base).parameters


@pytest.mark.parametrize(
    ("cls", "wrong", "right"),
    [
        (Classifier, "pos_embd", "pos_embed"),
        (Regressor, "weight_decy", "weight_decay"),
        (Digits, "batch_sise", "batch_size"),
        (ImageFolder, "max_unreadble", "max_unreadable"),
    ],
)
def test_a_wrong_name_gets_the_closest(cls, wrong, right):
    with pytest.raises(ValueError, match=f'{cls.__name__} takes no argument `{wrong}`; did you mean "{right}"'):
        cls(**{wrong: 1})


def test_copies_and_pickles_need_no_arguments():
    task, data = Classifier(num_classes=3, **TINY), FakeData(n=8)
    assert copy.deepcopy(task).hparams == task.hparams
    assert isinstance(pickle.loads(pickle.dumps(data)), ImageData)
