"""The source of classes of a notebook or script that a run keeps: loaded elsewhere, it computes what they compute."""

import dataclasses
import linecache
import sys
from textwrap import dedent

import pytest
import torch

from vitlab.errors import UsageError
from vitlab.notebook import check_classes, load_classes, source_of


@pytest.fixture(autouse=True)
def notebook(monkeypatch):
    """Leave out the file of pytest, which is no cell."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)


@pytest.fixture
def loaded(tmp_path):
    """Return a class of the notebook as another process loads it from what a run keeps, in parts.py."""
    main = vars(sys.modules["__main__"])

    def load(name):
        (tmp_path / "parts.py").write_text(source_of([name]))
        own = [key for key, value in main.items() if getattr(value, "__module__", None) == "__main__"]
        here = {key: main.pop(key) for key in own}
        load_classes(tmp_path / "parts.py")
        found = main[name]
        main.update(here)
        return found

    return load


HELPERS = {
    "beside a method of its name": """
        def scale(x):
            return 10 * x

        class Helper:
            def scale(x):
                return 0 * x

        def outer():
            def scale(x):
                return 0 * x
        """,
    "in the branch that ran": """
        import functools

        def same(f):
            return functools.wraps(f)(lambda *given: f(*given))

        if not torch:
            def scale(x):
                return 1 * x
        elif torch:
            @same
            @same
            def scale(x):
                return len('''
        ten 678''') * x - x
        else:
            def scale(x):
                return 0 * x
        """,
}
ACT = """
import torch
from torch import nn

class Act(nn.Module):
    def forward(self, x):
        return scale(x)
"""


@pytest.mark.parametrize("text", HELPERS.values(), ids=HELPERS)
def test_a_function_is_kept_as_it_is_used(text, cell, loaded):
    cell(ACT)
    cell(dedent(text))
    x = torch.ones(1)
    assert loaded("Act")()(x) == sys.modules["__main__"].Act()(x) != 0


def test_a_function_that_was_wrapped_after_its_definition_is_refused(cell, loaded):
    text = ACT.replace("class", "import functools\n\n@functools.cache\ndef scale(x):\n    return 10 * x\n\nclass")
    cell(text)
    assert loaded("Act")()(torch.ones(1)) == 10
    cell(text.replace("@functools.cache\n", "") + "\nscale = torch.vmap(scale)")
    with pytest.raises(UsageError, match=r"^scale was wrapped after its definition, which is not kept: make"):
        source_of(["Act"])


KINDS = {
    "in the branch that ran": """
        if torch:
            class Kind:
                @property
                def number(self):
                    return 10
        else:
            class Kind:
                def number(self):
                    return 0
        """,
    "beside a class in a function": """
        class Kind:
            number = 10

        def outer():
            class Kind:
                number = 0
        """,
    "after one of its name": """
        class Kind:
            number = 0

        class Kind:
            number = 10
        """,
    "in the newest cell": """
        class Kind:
            number = 0
        # cell
        class Kind:
            number = 10

        def outer():
            class Kind:
                number = 0
        # cell
        text = "class Kind: pass"
        """,
    "of values in the branch that ran": """
        if torch:
            class Kind:
                number, other = torch.e, 0
                number: int = 10
        else:
            class Kind:
                number, other = torch.e, 0
                number: int = 0
        """,
    "beside a generated method": """
        import dataclasses

        class Kind:
            pass

        @dataclasses.dataclass
        class Kind:
            number: int = 10
        """,
}


@pytest.mark.parametrize("text", KINDS.values(), ids=KINDS)
def test_a_class_is_kept_as_it_is_used(text, cell, loaded):
    for one in ["import torch", *dedent(text).split("# cell\n")]:
        cell(one)
    assert loaded("Kind")().number == 10


def test_a_class_of_a_cell_that_ran_again_is_kept_as_it_is(cell, loaded):
    text = "class Kind({}):\n    number = {}"
    for given in [("float", 10), ("int", 10), ("float", 10.0), ("float", "None")]:
        cell(text.format(*given))
    again = compile(text.format("float", 10), "ipykernel_0/0.py", "exec")  # Jupyter has one file for a text
    exec(again, vars(sys.modules["__main__"]))
    kind = loaded("Kind")
    assert kind.__bases__ == (float,) and repr(kind.number) == "10"


def test_a_class_of_a_cell_whose_source_is_not_known_is_not_taken_from_another_cell(cell):
    text = "class Kind:\n    def number(self):\n        return {}\n"
    cell(text.format(0))
    exec(compile(text.format(10), "<timed exec>", "exec"), vars(sys.modules["__main__"]))
    with pytest.raises(UsageError, match="the source of Kind is not known"):
        source_of(["Kind"])


def test_a_class_whose_base_changed_since_is_refused(cell, loaded):
    base, act = "class Base:\n    number = 0", "class Mid(Base):\n    pass\n\nclass Act(Mid):\n    pass"
    for text in (base, act, base + "  # the same"):
        cell(text)
    assert loaded("Act").number == 0
    cell(base.replace("0", "10"))
    with pytest.raises(UsageError, match=r"^Act derives from Base as it was before Base changed: define what derives"):
        source_of(["Act"])
    cell(act)
    assert loaded("Act").number == 10


ALIASES = """
import torch
from torch import nn

def double(x):
    return 2 * x

class Base(nn.Module):
    def forward(self, x):
        return twice(x)

twice, Alias = double, Base

class Act(Alias):
    pass
"""


def test_another_name_of_an_own_class_or_function_is_kept_with_what_it_names(cell, loaded):
    cell(ALIASES)
    x = torch.tensor([-1.0, 3.0])
    for name in ("Act", "Alias"):
        assert loaded(name)()(x).tolist() == [-2.0, 6.0]
    main = vars(sys.modules["__main__"])
    main["Act"] = loaded("Act")  # as in another process
    del main["Base"], main["Alias"]
    cell("Other = Act\nclass Outer(Other):\n    def forward(self, x):\n        return super().forward(x) + 1")
    assert loaded("Outer")()(x).tolist() == [-1.0, 7.0]
    cell("Alias = Act\nclass Inner(Alias):\n    pass")  # which the file of Act defines, too
    with pytest.raises(UsageError, match=r"Act of \S+ uses `Alias`, which this notebook or script defines otherwise"):
        source_of(["Inner"])


IMPORTS = """
import theirpack.inner.deep
import torch as t
from torch import cat, nn
from theirpack.inner import *
from theirpack.inner import TABLE as table

class Act(nn.Module):
    def forward(self, x):
        return act(cat([x * theirpack.inner.deep.SCALE + table, t.zeros(1)]))
"""


def test_submodules_and_what_does_not_say_where_it_is_from_are_imported(cell, tmp_path, monkeypatch):
    inner, parts = tmp_path / "theirpack" / "inner", tmp_path / "parts.py"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text("import torch\nTABLE = torch.ones(1)\nact = lambda x: -x\n")
    (inner / "deep.py").write_text("SCALE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    cell(IMPORTS)
    parts.write_text(source_of(["Act"]))
    (tmp_path / "config.yaml").write_text("model: __main__.Act\n")
    here = vars(sys.modules["__main__"]).pop("Act")
    for name in ("theirpack", "theirpack.inner", "theirpack.inner.deep"):  # as in another process
        monkeypatch.delitem(sys.modules, name)
    load_classes(parts)
    x = torch.tensor([2.0])
    assert sys.modules["__main__"].Act()(x).tolist() == here()(x).tolist() == [-7.0, 0.0]
    cell(IMPORTS.replace("import theirpack.inner.deep", "import theirpack, theirpack.inner.deep as other"))
    check_classes(tmp_path)
    parts.write_text(parts.read_text().replace("import theirpack.inner.deep\n", ""))  # as it was written before
    check_classes(tmp_path)
    for name in ("theirpack", "theirpack.inner", "theirpack.inner.deep"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match="Act uses `act` of its notebook, a function, whose source cannot be kept"):
        source_of(["Act"])  # it is no longer that of a module


FUTURE = """
import dataclasses
from typing import ClassVar

@dataclasses.dataclass
class Act:
    calls: ClassVar[int] = 0
    before: Act | None = None

    def copy(self) -> Act:
        return Act(self)
"""


def test_annotations_that_are_text_stay_text(cell, loaded):
    cell("from __future__ import annotations\n" + FUTURE)
    main = vars(sys.modules["__main__"])
    main["Act"] = act = loaded("Act")  # as in another process
    assert [field.name for field in dataclasses.fields(act)] == ["before"] and act().copy().before == act()
    linecache.cache.pop("ipykernel_0/0.py")
    cell("class Outer(Act):\n    pass")
    assert loaded("Outer")().copy().before.calls == 0


ORDER = """
from torch import nn

class Act(nn.Module):
    def forward(self, x):
        return helper(self, x)

def helper(act: Act, x):
    return 2 * x

def inner(f):
    return f

def made(f):
    return inner(f)

class Outer(Act):
    number = 3

    @made
    def forward(self, x):
        return super().forward(x) + other(x)

def other(x, of=Outer):
    return of.number * x
"""


def test_what_is_kept_stands_in_an_order_in_which_it_can_be_defined(cell, loaded):
    cell(ORDER)
    x = torch.ones(1)
    assert loaded("Act")()(x) == 2 and loaded("Outer")()(x) == 5
