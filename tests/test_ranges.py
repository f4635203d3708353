import inspect
import re
import typing

import lightning as L
import pytest
from jsonargparse import ArgumentParser

from vitlab import data, pretraining, tasks
from vitlab.callbacks.checkpoint import Checkpoint
from vitlab.config.explain import explain, user_mistakes
from vitlab.errors import UsageError
from vitlab.ranges import RANGES, check_ranges

GROUPS = (("model", tasks), ("model", pretraining), ("data", data), ("trainer", L.Trainer), ("checkpoint", Checkpoint))


def _takes_numbers(kind):
    return kind in (int, float) or any(_takes_numbers(part) for part in typing.get_args(kind) if part is not dict)


def numeric_keys():
    for group, source in GROUPS:
        for _, cls in inspect.getmembers(source, inspect.isclass) if inspect.ismodule(source) else [("", source)]:
            parser = ArgumentParser()
            parser.add_class_arguments(cls, fail_untyped=False)
            for action in parser._actions:
                if _takes_numbers(getattr(action, "_typehint", None) or action.type):
                    yield f"{group}.{action.dest}", action.default


def test_a_training_of_no_batches_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"`trainer.limit_train_batches` must be in \(0, 1e9\], got 0"):
        check_ranges("trainer", {"limit_train_batches": 0})


@pytest.mark.slow
def test_every_numeric_key_has_a_range_that_holds_its_default():
    keys = dict(numeric_keys())
    assert len(keys) > 70
    assert set(keys) - set(RANGES) == {"trainer.max_time"}  # a time, which Lightning reads
    assert set(RANGES) <= {*keys, "model.theta", "model.register_theta"}  # an option of some positions
    for key, default in keys.items():
        group, _, name = key.partition(".")
        check_ranges(group, {name: default})


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model.norm_eps", -1.0, "in [0, 1], got -1.0"),
        ("model.lr", float("nan"), "in (0, 1000], got nan"),
        ("model.weight_decay", 1e30, "in [0, 1000], got 1e+30"),
        ("model.dropout", 1.0, "in [0, 1), got 1.0"),
        ("model.t2t_kernels", [3, [3, 0]], "in [1, 1000], got 0"),
        ("model.opt", {"init_args": {"eps": float("inf")}}, "a finite number, got inf"),
        ("data.repeats", 10**9, "in [1, 1000], got 1000000000"),
        ("trainer.check_val_every_n_epoch", -1, "in [1, 1e6], got -1"),
        ("checkpoint.every_minutes", 1e30, "in [0, 1e6], got 1e+30"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_key(key, value, told):
    group, _, name = key.partition(".")
    with pytest.raises(ValueError, match=re.escape(f"`{key}` must be {told}")):
        check_ranges(group, {name: value})


UNION = """Parser key "model":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'lightning.pytorch.core.module.LightningModule'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'vitlab.Classifier':
        Parser key "qk_scale":
          Does not validate against any of the Union subtypes
          Subtypes: [<class 'float'>, <class 'NoneType'>]
          Errors:
            - Expected a <class 'float'>
          Given value type: <class 'str'>
          Given value: nan
  Given value type: <class 'jsonargparse._util.NestedArg'>
  Given value: NestedArg(key='qk_scale', val='nan')"""


def test_a_value_of_none_of_several_types_is_refused_with_its_key():
    assert explain(UNION, ["model.qk_scale"], []) == '`model.qk_scale` must be float or null, got "nan"'


def test_a_name_that_several_classes_have_is_refused_with_their_paths():
    """One of a notebook as of vitlab; the line asked for a LightningModule."""
    errors = "Multiple subclasses with name Mine. Give the full class path to avoid ambiguity: a.Mine, b.Mine.\n"
    message = (
        f'Parser key "model":\n  Does not validate\n  Subtypes: [int]\n  Errors:\n    - {errors}  Given value: Mine'
    )
    told = "`model`: several classes are called Mine: give the whole path of one, a.Mine, b.Mine"
    assert explain(message, ["model"], []) == told


@pytest.mark.parametrize("key", ["warmup_epochs ", "warmup-epochs", "w\u0430rmup_epochs"])
def test_a_key_with_a_blank_a_dash_or_a_letter_of_another_alphabet_is_named(key):
    message = f"""Parser key "model":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'lightning.pytorch.core.module.LightningModule'>, <class 'NoneType'>]
  Given value: NestedArg(key='{key}', val='3')"""
    if key.isascii():
        told = f'there is no key `model.{key}`; did you mean "model.warmup_epochs"?'
        assert explain(message, ["model.warmup_epochs"], []) == told
    option = f"Parser key \"model\":\n  Option '{key}' is not accepted"
    assert explain(option, ["model.warmup_epochs"], []).startswith(f"there is no key `model.{key}`; did you mean")


def test_what_a_library_refuses_keeps_the_key_that_it_was_given_by():
    with pytest.raises(UsageError, match=r"^`model\.opt`: SGD refuses its arguments: Invalid$"), user_mistakes(["opt"]):
        try:
            try:
                raise ValueError("Invalid")
            except ValueError as error:
                raise ValueError(f"`opt`: SGD refuses its arguments: {error}") from error
        except ValueError as error:
            raise ValueError("Problem with given class_path") from error
