"""posbench: which methods can be measured, their names, prices and refusals."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.posbench.planted import HERE, Scaled, Wrong, tiny
from vitlab.cli.main import main
from vitlab.config.trust import trust
from vitlab.errors import UsageError
from vitlab.layers.pos_embed import PosEmbed
from vitlab.position_bench import costs as costs_module
from vitlab.position_bench.costs import check_method, cost_of, price_lines
from vitlab.position_bench.methods import label_of, method_of


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Nan", "not finite in train mode"),
        ("NanInTests", "not finite in eval mode"),
        ("Longer", "changes the tokens"),
        ("Late", r"a first call makes pos_embed\.table: make them in `__init__`"),
        ("Wrong", "PosEmbed"),
        ("Stacked", r"must return \(N, D\), .* got \(1, 64, 8\)"),
    ],
)
def test_a_method_that_cannot_be_measured_is_refused_in_one_line(name, says):
    with pytest.raises(UsageError, match=says) as error:
        check_method({"class_path": f"{HERE}.{name}"}, tiny())
    assert "\n" not in str(error.value)


def test_the_cost_of_a_method_is_relative_to_none(monkeypatch):
    def of(mine, none):
        return lambda net, *words: none if type(net.pos_embed) is PosEmbed else mine

    monkeypatch.setattr(costs_module, "_activations", of(300, 200))
    monkeypatch.setattr(costs_module, "_seconds_of_step", of(0.5, 0.25))
    assert cost_of("learned", tiny()) == {"step_cpu_seconds": 0.5, "time": 2.0, "memory": 1.5}


def test_the_price_of_a_method_that_cannot_be_trained_is_one_line():
    with pytest.raises(UsageError, match=r"NoBackward.* cannot be trained: RuntimeError: my backward is broken"):
        price_lines({"class_path": f"{HERE}.NoBackward"}, tiny())


def test_a_method_with_arguments_can_be_named_on_the_command_line(monkeypatch, capsys):
    method = f"{HERE}.Needs"
    words = f"give {method} as '{{class_path: {method}, init_args: {{...}}}}'"
    with pytest.raises(UsageError, match=f"missing 1 required .*'base'; {re.escape(words)}"):
        price_lines(method, tiny())
    monkeypatch.setattr("vitlab.position_bench.costs.price_lines", lambda method, protocol: [label_of(method)])
    asked = ["posbench", f"{{class_path: {method}, init_args: {{base: 50}}}}"]
    assert main([*asked, "--price"]) == 0
    assert capsys.readouterr().out == f"{method}_base_50\n"
    assert main([*asked, "verify", "--folder", "nowhere"]) == 2
    assert f"nowhere/{method}_base_50 does not exist: train it first, without verify" in capsys.readouterr().err
    assert main(["posbench", "{class_path: mine", "--price"]) == 2
    assert "`METHOD` line 1: a bracket that opens in line 1 is not closed" in capsys.readouterr().err


def test_methods_that_differ_in_a_sign_have_folders_of_their_own():
    labels = [label_of({"class_path": "mine.Joined", "init_args": {"op": op}}) for op in "*/-"]
    assert len(set(labels)) == 3 and labels[2] == "mine.Joined_op_-"


def test_an_object_with_arguments_is_a_method():
    square = {"class_path": f"{HERE}.Scaled", "init_args": {"by": 2}}
    assert method_of(Scaled(by=2)) == method_of(Scaled((2, 2), 8, by=2)) == square
    with pytest.raises(UsageError, match="Wrong is not a PosEmbed"):
        method_of(partial(Wrong))


def test_a_slow_method_is_refused_before_it_is_trained():
    with pytest.raises(UsageError, match="too slow"):
        check_method("none", tiny() | {"limit_cpu_seconds": 1e-9})


def test_a_class_that_is_not_a_posembed_is_refused():
    with pytest.raises(UsageError, match="Wrong is not a PosEmbed"):
        method_of(Wrong)
    with pytest.raises(UsageError, match="'rope3d' is not a position embedding"):
        method_of("rope3d")


def test_the_example_is_a_method_that_can_be_measured():
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    trust(["coordinates"])
    assert check_method(method_of("coordinates.Coordinates"), tiny()) > 0
