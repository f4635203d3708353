"""The benchmark measures what it says; nothing here depends on how fast the machine is."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loader_libraries
from bench import attention as attention_bench
from bench import ddp, loader, model, networks, numerics, overhead, pairs, report, saved
from bench import linear as linear_bench
from bench.model import Case, Unequal
from bench.official import check_repo
from vitlab import tables
from vitlab.cli.main import main
from vitlab.errors import UsageError
from vitlab.runs import machine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 10}
T2T = {**SMALL, "tokenizer": "t2t", "t2t_kernels": (3, 3), "t2t_dim": 4, "pos_embed": "sincos1d"}


@pytest.fixture(autouse=True)
def small_networks(monkeypatch):
    monkeypatch.setitem(networks.NETWORKS, "vit_s16", SMALL)
    monkeypatch.setitem(networks.NETWORKS, "t2t_vit_7", T2T)
    monkeypatch.setitem(networks.NETWORKS, "cifar_vit", SMALL)
    canary = pairs.canary
    monkeypatch.setattr(model, "canary", lambda dtype, device: canary(dtype, device, 64))


# Pairs


def test_contenders_take_turns_and_every_other_round_in_reverse():
    calls = []
    times = pairs.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3, warmups=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert [len(seconds) for seconds in times.values()] == [3, 3]


def test_a_budget_ends_the_rounds_but_leaves_three():
    times = pairs.interleave({"a": lambda: None}, rounds=9, budget=0.0)
    assert len(times["a"]) == 3


def test_ratios_are_taken_round_by_round_and_above_one_is_faster():
    found = pairs.compare({"slow": [2.0, 20.0, 4.0], "fast": [1.0, 10.0, 1.0]}, base="slow")
    assert found["slow"]["ratio"] == 1
    assert (found["fast"]["ratio"], found["fast"]["min"], found["fast"]["max"]) == (2, 2, 4)
    assert (found["fast"]["seconds"], found["fast"]["best_seconds"]) == (1, 1)
    low, high = found["fast"]["interval"]
    assert 0 < low < 2 and high > 4  # three rounds that differ so much show little


def test_the_interval_of_equal_values_is_that_value_and_many_narrow_it():
    assert pairs.interval([1.5] * 5) == (1.5, 1.5)
    draws = torch.randn(400, generator=torch.Generator().manual_seed(0)).tolist()
    low, high = pairs.interval(draws)
    assert -0.25 < low < 0 < high < 0.25


@pytest.mark.parametrize(("seconds", "noisy"), [([1, 1.05, 1.1], False), ([1, 1, 1.3], True), ([1, 9, 1, 1, 1], False)])
def test_a_canary_with_varying_times_marks_the_run_as_noisy(seconds, noisy):
    assert pairs.is_noisy(seconds) == noisy


# Networks


@pytest.mark.parametrize("contender", ["timm", "torchvision", "plain", "vitlab"])
def test_contenders_compute_the_same_logits(contender):
    name = "t2t_vit_7" if contender == "plain" else "vit_s16"
    images = torch.randn(2, 3, 16, 16)
    assert networks.difference(networks.build(name, contender), networks.ours(name), images) < 1e-5
    assert networks.ours(name).eval()(images).std() > 1e-3


def test_the_plain_contender_stores_windows_and_maps_and_keeps_all_tokens(monkeypatch):
    plain, seen = networks.build("t2t_vit_7", "plain"), []
    plain.net.norm.register_forward_hook(lambda _, x, y: seen.append(y.shape[1]))
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    plain(torch.randn(1, 3, 16, 16))
    assert seen == [17]
    assert not plain.net.tokenizer.fused


CLONE = """
import torch
from timm.models.helpers import load_pretrained
from timm.models.layers import trunc_normal_
from timm.models.registry import register_model
from .parts import PosEmbed, parts

class Network(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        net = parts(num_classes)
        self.tokens_to_token, self.blocks, self.norm, self.head = net.tokenizer, net.blocks, net.norm, net.head
        self.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 16))
        self.pos_embed = torch.nn.Parameter(torch.cat([torch.ones(1, 1, 16), net.pos_embed.table(0)[None]], 1), False)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, images):
        x = self.tokens_to_token(images)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for i, block in enumerate(self.blocks):
            x = block(x, PosEmbed(), i)
        return self.head(self.norm(self.drop(x))[:, 0])

@register_model
def t2t_vit_7(num_classes):
    print("adopt performer")
    return Network(num_classes)
"""


PARTS = """
from bench.networks import NETWORKS
from vitlab.layers.pos_embed import PosEmbed
from vitlab.models.vit import VisionTransformer

def parts(num_classes):
    return VisionTransformer(**NETWORKS["t2t_vit_7"] | {"num_classes": num_classes})
"""


def test_a_clone_of_the_official_code_is_measured_with_our_weights(tmp_path, capsys):
    import timm

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "t2t_vit.py").write_text(CLONE)
    (tmp_path / "models" / "parts.py").write_text(PARTS)
    rows = model.measure(Case("t2t_vit_7", "train", "fp32", 2), [], 3, 60, t2t_repo=str(tmp_path))
    assert [row["contender"] for row in rows] == ["plain", "official", "vitlab"]
    assert rows[1]["logit_difference"] < 2e-5
    assert sys.modules["timm"] is timm
    assert capsys.readouterr().out == ""
    with pytest.raises(UsageError, match="`--t2t-repo` must be a clone"):
        check_repo(str(tmp_path / "models"))


def test_libraries_that_are_not_installed_are_named():
    assert networks.contenders("vit_s16", ["timm", "no_such_library"]) == (["timm", "vitlab"], ["no_such_library"])
    for name in ("t2t_vit_7", "t2t_vit_t_14"):  # a word, and a mapping with options
        assert networks.contenders(name, ["timm"]) == (["plain", "vitlab"], [])
    assert networks.contenders("vit5_s16", ["timm"]) == (["plain", "vitlab"], [])  # no library has its parts


@pytest.mark.parametrize("mode", ["fwd", "train"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_case_has_a_row_for_each_contender_the_base_first(mode, dtype):
    rows = model.measure(Case("t2t_vit_7", mode, dtype, 2), [], rounds=3, budget=60)
    assert [row["contender"] for row in rows] == ["plain", "vitlab"]
    assert rows[0]["ratio"] == 1
    assert all(row["images_per_second"] > 0 and row["rounds"] == 3 for row in rows)
    json.dumps(rows)


def test_networks_that_differ_are_not_timed(monkeypatch):
    broken = networks.Plain(networks.ours("t2t_vit_7"))
    nn.init.normal_(broken.net.head.weight)
    monkeypatch.setattr(model, "build", lambda name, who, _: broken if who == "plain" else networks.ours(name))
    with pytest.raises(Unequal, match="the logits of plain and vitlab differ by"):
        model.measure(Case("t2t_vit_7", "fwd", "fp32", 2), [], 3, 60)


def test_a_training_step_trains_and_leaves_no_gradient():
    net = networks.ours("vit_s16")
    before = net.head.weight.clone()
    model.step(net, torch.randn(4, 3, 16, 16), Case("vit_s16", "train", "fp32", 4))()
    assert not torch.equal(net.head.weight, before)
    assert {p.grad for p in net.parameters()} == {None}


def test_only_a_quiet_machine_can_fail_for_slowness():
    row = {"model": "t2t_vit_7", "mode": "fwd", "dtype": "fp32", "contender": "vitlab", "ratio": 1.0, "noisy": False}
    row["interval"] = (0.9, 1.1)
    assert list(model.too_slow([row])) == ["t2t_vit_7 fwd: 1.00 x the plain implementation, the goal is 1.25"]
    assert not list(
        model.too_slow([{**row, "noisy": True}, {**row, "interval": (0.9, 1.2)}, {**row, "contender": "a"}])
    )


# Others


def test_numerics_pass_for_the_fast_paths_and_fail_for_a_wrong_one(monkeypatch):
    monkeypatch.setattr(numerics, "MODELS", ("t2t_vit_7", "vit_s16"))
    images = numerics.images_of(16)
    assert {"random", "white", "letterbox", "equal channels", "gray", "two grays", "two textures"} < images.keys()
    monkeypatch.setattr(numerics, "images_of", lambda: images)
    assert all(row["passes"] for row in numerics.measure())
    ours = networks.ours

    def wrong(name):
        net = ours(name)
        net.norm.eps = 1e-3
        return net

    monkeypatch.setattr(numerics, "ours", wrong)
    monkeypatch.setattr(numerics, "Plain", lambda net: networks.Plain(ours("vit_s16")))
    monkeypatch.setattr(numerics, "MODELS", ("vit_s16",))
    assert not any(row["passes"] for row in numerics.measure())


def test_the_attention_table_says_which_kernel_the_rule_chooses(monkeypatch):
    monkeypatch.setattr(attention_bench, "SHAPES", [(1, 2, 5, 4)])
    monkeypatch.setattr("vitlab.layers.kernels.HAS_TILES", True)
    monkeypatch.setattr("vitlab.layers.kernels.EMULATED", frozenset())
    rows = attention_bench.measure(rounds=3, budget=60)
    assert [(row["dtype"], row["mode"]) for row in rows] == [(d, m) for d in ("fp32", "bf16") for m in ("fwd", "train")]
    assert [row["rule"] for row in rows] == ["sdpa", "sdpa", "sdpa", "products"]


def test_the_table_of_linear_layers_says_which_library_the_rule_chooses(monkeypatch):
    monkeypatch.setattr(linear_bench, "SHAPES", [(4, 8, 6), (256, 256, 32)])
    for is_slow, rules in ((True, ["torch", "oneDNN"]), (False, ["torch", "torch"])):
        monkeypatch.setattr("vitlab.layers.linear.MKL_LEAVES_HALF", is_slow)
        rows = linear_bench.measure(rounds=3, budget=60)
        assert [(row["N"], row["mode"]) for row in rows] == [(n, m) for n in (4, 256) for m in ("fwd", "train")]
        assert [row["rule"] for row in rows[::2]] == rules


@pytest.mark.rare
def test_loaders_deliver_every_image():
    rows = loader.measure(rounds=3, budget=0, count=512, photos=72)
    assert all(row["ratio"] == 1 for row in rows if row["loader"] == row["base"])
    assert [row["loader"] for row in rows if row["ratio"] != 1] == [
        *("DataLoader, PIL, 0 workers", "vitlab, in memory") * 2, "ImageFolder, 2 workers", "Packed, 2 workers"
    ]  # fmt: skip


def test_the_page_of_loaders_says_what_was_measured():
    home = Path(loader_libraries.__file__).parent
    found = json.loads((home / "loader-libraries.json").read_text())
    assert loader_libraries.tables(found) in (home / "loader.md").read_text()


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities of TorchVision are deprecated")
def test_libraries_are_compared_on_the_same_images(tmp_path):
    found = loader_libraries.measure(count=32, rounds=3, budget=0, folder=tmp_path, awkward_files=None)
    assert found["order"]["vitlab"] and found["pixels"] == {"vitlab": True, "torchvision v2": False}
    assert found["decoded alike"] == 32 and found["speed"]["packing"].keys() >= {"vitlab", "datasets"}


@pytest.mark.slow
def test_overhead_is_relative_to_a_bare_loop():
    rows = overhead.measure(rounds=3, budget=0, steps=4)
    assert [row["loop"] for row in rows] == ["bare loop", "plain Trainer", "Classifier", "vitlab fit"]
    assert rows[0]["added_ms"] == 0


def test_a_fit_that_adds_much_more_than_a_plain_trainer_fails():
    rows = [{"loop": "plain Trainer", "least_ms": 0.4}, {"loop": "vitlab fit", "least_ms": 0.99}]
    assert not list(overhead.too_much(rows))
    rows[1]["least_ms"] = 1.01
    assert list(overhead.too_much(rows)) == [
        "vitlab fit adds 1.01 ms to a step, a plain Trainer 0.40: more than 2.5 times as much"
    ]


# Reports and the command


def test_tables_are_markdown_and_mark_what_was_not_measured():
    text = tables.table([{"a": 1.234}, {}], {"A": "{a:.1f}", "B": "{b}"})
    assert text.splitlines() == ["| A | B |", "| --- | --- |", "| 1.2 | - |", "| - | - |"]


def test_a_baseline_lists_ratios_outside_its_interval():
    row = {"model": "m", "mode": "fwd", "dtype": "fp32", "batch": 4, "contender": "vitlab", "base": "plain"}
    before = [{**row, "ratio": 1.3, "interval": (1.2, 1.4)}]
    assert list(report.changes([{**row, "ratio": 1.1}], before)) == [
        "m fwd fp32 4 vitlab: 1.10, it was 1.30 [1.20, 1.40]"
    ]
    assert not list(report.changes([{**row, "ratio": 1.25}, {**row, "ratio": 9, "mode": "train"}], before))


def row_of(contender, mode, seconds, memory):
    case = {"model": "t2t_vit_7", "mode": mode, "dtype": "fp32", "batch": 4, "noisy": False}
    return {**case, "contender": contender, "ratio": 1 / seconds, "all_seconds": [seconds] * 3, "memory": memory}


@pytest.mark.parametrize(("changes", "expected"), [("", "abc"), ("+x = 1", "abc-dirty"), (None, None)])
def test_a_measurement_names_the_commit_and_whether_the_code_differs(changes, expected, monkeypatch):
    answers = {"rev-parse": None if changes is None else "abc", "diff": changes}
    monkeypatch.setattr(machine, "git", lambda word, *_: answers[word])
    assert machine.facts()["commit"] == expected


def test_the_readmes_table_is_made_of_saved_runs_against_the_fastest_of_the_others(tmp_path, capsys):
    rows = [row_of("a", "fwd", 3, 9), row_of("b", "fwd", 2, 8), row_of("a", "train", 2, 9), row_of("b", "train", 3, 8)]
    rows += [row_of("vitlab", "fwd", 1, 4), row_of("vitlab", "train", 1.6, 2)]
    machine = {"threads": 2, "cpu": "C", "versions": {"torch": "T"}, "commit": "abc"}
    (tmp_path / "cpu-fp32.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    for _ in range(2):
        assert main(["bench", "table", "--saved", str(tmp_path), "--readme", str(readme)]) == 0
    line = "| t2t_vit_7 | fp32 | b / a | 2.00 [2.00, 2.00] | 1.25 [1.25, 1.25] | 0.50 / 0.22 |"
    text = readme.read_text()
    assert line in text and "2 threads of C, torch T, commit abc." in text
    assert text.startswith("before\n<!-- speed -->\n| network") and text.endswith("\n<!-- /speed -->\nafter\n")
    assert "old" not in text
    readme.write_text("no marks")
    assert main(["bench", "table", "--saved", str(tmp_path), "--readme", str(readme)]) == 2
    assert main(["bench", "table", "--saved", str(tmp_path / "nowhere")]) == 2
    assert "`make benchmarks` must first measure cpu-fp32.json" in capsys.readouterr().err


def test_the_readmes_state_the_numbers_of_the_saved_runs():
    begin, end = tables.marks("speed")
    steps = []
    for folder in (ROOT / "benchmarks", ROOT / "benchmarks" / "epyc", ROOT / "benchmarks" / "avx2"):
        between = (folder / "README.md").read_text().split(begin)[1].split(end)[0]
        assert between.strip() == saved.speed_table(folder)
        rows = [row.split("|") for row in between.splitlines() if row.startswith("| ") and "[" in row]
        steps += [float(row[5].split()[0]) for row in rows]
    assert f"[{min(steps):.2f} to {max(steps):.2f} times]" in (ROOT / "README.md").read_text()


def test_the_second_set_says_how_fast_the_official_code_is():
    rows = json.loads((ROOT / "benchmarks" / "epyc" / "cpu-bf16.json").read_text())["rows"]
    words = []
    for name in ("t2t_vit_7", "t2t_vit_14", "t2t_vit_t_14"):
        for mode in ("fwd", "train"):
            both = {r["contender"]: r["all_seconds"] for r in rows if (r.get("model"), r.get("mode")) == (name, mode)}
            words.append(f"{pairs.compare(both, 'official')['vitlab']['ratio']:.2f}")
    text = (ROOT / "benchmarks" / "epyc" / "README.md").read_text().split("Relative to the official code")[1]
    assert re.findall(r"\d\.\d\d", text) == words


def test_no_module_hides_a_function_of_its_name():
    """`vitlab bench model` ended in a traceback where it measures memory: its module had the place of a function."""
    package = ROOT / "benchmarks" / "bench"
    functions = re.findall(r"^def (\w+)", (package / "__init__.py").read_text(), re.MULTILINE)
    assert functions and not {*functions} & {path.stem for path in package.glob("*.py")}


@pytest.mark.rare
def test_two_processes_exchange_gradients_and_are_compared_with_one():
    rows = {row["setting"]: row for row in ddp.measure(3, 0, batch=1)}
    assert rows["one process"]["ratio"] == 1
    assert rows.keys() > set(ddp.OPTIONS)
    assert all(row["rounds"] == 3 and row["images_per_second"] > 0 for row in rows.values())


def test_the_command_writes_table_and_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model, "GOALS", {})  # of large networks
    path = tmp_path / "new" / "result.json"
    arguments = ["--models", "t2t_vit_7", "--batch", "2", "--rounds", "3", "--no-memory", "--json", str(path)]
    assert main(["bench", "model", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "| t2t_vit_7 | train | fp32 | 2 | vitlab |" in printed
    assert path.with_suffix(".md").read_text() == printed
    saved = json.loads(path.read_text())
    assert saved["machine"]["versions"]["torch"] == torch.__version__.split("+")[0]
    assert main(["bench", "model", *arguments, "--baseline", str(path)]) == 0


def test_the_command_fails_if_numerics_do(monkeypatch, capsys):
    row = {"model": "m", "images": "white", "logits": 1.0, "gradients": 1.0, "plain_logits": 0.0, "limit": 1e-5}
    monkeypatch.setattr(numerics, "measure", lambda: [{**row, "plain_gradients": 0.0, "passes": False}])
    assert main(["bench", "numerics"]) == 1
    assert "FAILS: m on white: logits off by 1.0e+00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "--models", "vit_s61"], 'got vit_s61; did you mean "vit_s16"'),
        (["model", "--rounds", "1"], "`--rounds` must be at least 3, got 1"),
        (["model", "--batch=-1"], "`--batch` must be at least 1, got -1"),
        (["model", "--baseline", "nowhere.json"], "there is no file nowhere.json"),
        (["models"], "see `vitlab bench --help`"),
    ],
)
def test_a_mistake_in_the_command_bench_is_one_line(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_installed_package_says_where_to_find_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("vitlab.cli.bench._FOLDER", tmp_path)
    assert main(["bench", "--help"]) == 2
    assert "is not part of the installed package: run it from a checkout" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


@pytest.mark.rare
def test_memory_is_measured_in_a_process_of_its_own():
    case = Case("cifar_vit", "train", "fp32", 2)
    assert 5 < model.memory(case, "vitlab") < 500


@pytest.mark.gpu
def test_memory_on_a_gpu_is_what_a_step_adds():
    rows = []
    for batch in (32, 128):
        case = model.Case("cifar_vit", "train", "bf16", batch)
        rows += [r for r in model.measure(case, [], 1, 1.0, "cuda") if r["contender"] == "vitlab"]
    assert 0.1 < rows[0]["memory"] < 10 and 2 < rows[1]["memory"] / rows[0]["memory"] < 4.1
    assert rows[0]["memory_batch"] == 32 and rows[0]["first_seconds"] > 0
