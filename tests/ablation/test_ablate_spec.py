"""The file of an ablation: every mistake is one line with file, line and way out, before anything starts."""

import argparse
import dataclasses
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml

from tests.ablation.made_up import built
from vitlab.ablation.evidence import bundle
from vitlab.ablation.evidence.bundle import export_bundle, load_bundle
from vitlab.ablation.evidence.protocol import texts
from vitlab.ablation.execution import probe, resolve
from vitlab.ablation.execution.cells import Cell
from vitlab.ablation.execution.commands import start_args
from vitlab.ablation.file.arms import COLUMNS
from vitlab.ablation.file.claims import parse_claim
from vitlab.ablation.file.schema import File
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.inference.baselines import NOT_COMPARED, ArmRow, answer_columns
from vitlab.ablation.lab import Lab
from vitlab.analysis import ANALYSES
from vitlab.cli import ablate
from vitlab.cli.main import main
from vitlab.errors import UsageError

ROOT = Path(__file__).parents[2]
GOOD = {
    "name": "toy",
    "base": "base.yaml",
    "axes": {
        "pos_embed": {"none": {"model.pos_embed": "none"}, "learned": {"model.pos_embed": "learned"}},
        "model.global_pool": ["token", "avg"],
    },
    "seeds": 2,
    "baseline": {"pos_embed": "none"},
    "metric": {"primary": "acc1"},
    "claims": ["learned > none"],
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("model: {lr: 0.1}\n")

    def write(**changes):
        content = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
        path = tmp_path / "ablation.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


def test_the_product_of_the_axes_gives_the_arms_in_the_order_of_the_file(write):
    ablation = read_ablation(write())
    assert [arm.name for arm in ablation.arms] == ["none-token", "none-avg", "learned-token", "learned-avg"]
    assert ablation.arms[3].overrides == {"model.pos_embed": "learned", "model.global_pool": "avg"}
    assert ablation.seeds == (0, 1)
    assert ablation.baseline_of(ablation.arms[3]) is ablation.arms[1]


def test_excluded_arms_are_left_out(write):
    ablation = read_ablation(write(exclude=[{"pos_embed": "learned", "global_pool": "avg"}]))
    assert [arm.name for arm in ablation.arms] == ["none-token", "none-avg", "learned-token"]


def test_adjust_changes_only_the_arms_with_these_levels(write):
    wide = {"class_path": "learned", "init_args": {"scale": 2}}
    ablation = read_ablation(
        write(adjust=[{"of": {"pos_embed": "learned", "global_pool": "avg"}, "set": {"model.pos_embed": wide}}])
    )
    assert [arm.overrides["model.pos_embed"] for arm in ablation.arms] == ["none", "none", "learned", wide]


def test_a_level_starts_from_the_weights_of_the_cells_own_seed(write, tmp_path):
    levels = {"scratch": {}, "mae": {"init_from": "weights-{seed}.pt"}}
    arm = read_ablation(write(axes={"start": levels, **GOOD["axes"]})).arms[4]
    assert (arm.name, arm.weights(3)) == ("mae-none-token", "weights-3.pt")
    assert "init_from" not in arm.overrides
    ids = []
    for text in ("a", "b", "b"):
        (tmp_path / "weights-3.pt").write_text(text)
        ids.append(Cell(None, built({}, arm), 3).id)
    assert ids[0] != ids[1] == ids[2]
    assert start_args(arm, 3) == ["--init_from", "weights-3.pt"]


def test_an_exported_ablation_knows_its_cells_without_the_weights_that_they_started_from(write, tmp_path):
    levels = {"scratch": {}, "mae": {"init_from": "weights-{seed}.pt"}}
    ablation = read_ablation(write(axes={"start": levels, **GOOD["axes"]}, seeds=1))
    (tmp_path / "weights-0.pt").write_text("a")
    arms = [built({}, arm) for arm in ablation.arms]
    export_bundle(ablation, arms, tmp_path / "evidence")
    (tmp_path / "weights-0.pt").unlink()
    again, known = load_bundle(tmp_path / "evidence")
    (tmp_path / "weights-0.pt").write_text("a")
    assert [Cell(again, arm, 0).id for arm in known] == [Cell(ablation, arm, 0).id for arm in arms]
    (tmp_path / "weights-0.pt").unlink()
    assert Cell(again, known[4], 0).name.startswith("mae-none-token/s0-")


def test_exported_evidence_is_not_verified_by_repetition_as_it_has_no_weights(write, tmp_path, monkeypatch):
    ablation = read_ablation(write(seeds=1))
    export_bundle(ablation, [built({}, arm) for arm in ablation.arms], tmp_path / "evidence")
    monkeypatch.setattr("vitlab.ablation.evidence.verify.verify_evidence", None)  # not after a verification of all
    with pytest.raises(UsageError, match=r"evidence: it can be .* verified, not repeated \(--deep\), as it has no w"):
        Lab("evidence").verify(deep=True)


WRONG = {  # what is changed, and words of the message
    "unknown key": ({"sedes": 3}, ["line", "unknown key `sedes`", 'did you mean "seeds"']),
    "a key that others call so": ({"arms": {}}, ["line", "unknown key `arms`; use `axes`"]),
    "what all cells share": ({"trainer": {}}, ["unknown key `trainer`; for all cells", "list that in `base`"]),
    "unknown key in a section": ({"stats": {"magrin": 1}}, ["unknown key `magrin`", '"margin"']),
    "missing key": ({"metric": None}, ["`metric` is missing"]),
    "adjusted key": (
        {"adjust": [{"of": {"pos_embed": "none"}, "set": {"lr": 1}}]},
        ["line", "`lr`", "not a dotted key"],
    ),
    "adjusted arm": ({"adjust": [{"of": {"pos_embed": "non"}, "set": {}}]}, ["no level `non`", '"none"']),
    "adjusted by a list": ({"adjust": {"none": {}}}, ["`adjust` must be a list"]),
    "no such base": ({"base": "bas.yaml"}, ["no config bas.yaml"]),
    "level without effect on a config": ({"axes": {"a": {"x": {"pos_embed": 1}, "y": {}}}}, ["not a dotted key"]),
    "one level": ({"axes": {"a": {"x": {}}}, "claims": []}, ["two levels"]),
    "boolean name": ({"axes": {"a": {True: {}, "y": {}}}}, ["unquoted on, off,", "quote the name, as in 'on'"]),
    "null as name": (
        {"axes": {"a": {None: {}, "y": {}}}},
        ["null or ~ as a value: quote", "(a value needs no quotes)"],
    ),
    "null as baseline": ({"baseline": {"pos_embed": None}}, ["the axis `pos_embed` has no level `None`"]),
    "upper case": ({"axes": {"a": {"No": {}, "y": {}}}}, ["a-z"]),
    "axes that undo each other": (
        {"axes": {"a": {"x": {"model.lr": 1}, "y": {}}, "b": {"z": {"model.lr": 2}, "w": {}}}},
        ["`a` and `b` both set `model.lr`"],
    ),
    "an axis called as a column": (
        {"axes": {"kind": GOOD["axes"]["pos_embed"]}, "baseline": {"kind": "none"}},
        ["line 4: the axis `kind` would share its column", "another name: {NAME: {LEVEL: {KEY: VALUE}}}"],
    ),
    "a key that ends as a column": ({"axes": {"model.value": [1, 2]}, "claims": []}, ["the axis `value` would share"]),
    "a level that is no name": (
        {"axes": {"model.join": [None, "stem"]}},
        ["None is no name of a level", "{NAME: {LEVEL: {model.join: VALUE}}}"],
    ),
    "a level below zero": ({"axes": {"model.x": [1, -1]}}, ["line 6: '-1' is no name", "{model.x: VALUE}"]),
    "a level with keys": (
        {"axes": {"model.opt": [{"momentum": 0.9}, {"momentum": 0.0}]}},
        ["{'momentum': 0.9} is no name of a level", "name the levels: {NAME: {LEVEL: {model.opt: VALUE}}}"],
    ),
    "weights of a word": ({"axes": {"a": {"x": {"init_from": "last"}, "y": {}}}}, ["must name its run", "`last` is"]),
    "a number of weights": ({"axes": {"a": {"x": {"init_from": 3}, "y": {}}}}, ["must be a run", "got 3"]),
    "a seed too large": ({"seeds": [2**32, 1]}, ["from 0 to 4294967295, got [4294967296, 1]"]),
    "a seed in an arm": ({"axes": {"a": {"x": {"seed_everything": 1}, "y": {}}}}, ["is set by the ablation"]),
    "devices in an arm": ({"axes": {"a": {"x": {"trainer.devices": 2}, "y": {}}}}, ["one device"]),
    "baseline of no axis": ({"baseline": {"pos": "none"}}, ["no axis `pos`"]),
    "baseline of no level": ({"baseline": {"pos_embed": "nonne"}}, ["no level `nonne`", '"none"']),
    "excluded baseline": ({"exclude": [{"pos_embed": "none"}]}, ["is not an arm"]),
    "everything excluded": ({"exclude": [{"global_pool": "token"}, {"pos_embed": "learned"}]}, ["leaves 1"]),
    "equal seeds": ({"seeds": [1, 1]}, ["different"]),
    "more seeds than there are": ({"seeds": 10**30}, ["`seeds` must be a number of seeds up to 10000", "got 1000000"]),
    "no seeds": ({"seeds": 0}, ["`seeds` must be"]),
    "choice": ({"evaluate": "train"}, ["`evaluate` must be one of val, test"]),
    "a claim on nobody": ({"claims": ["lerned > none"]}, ["`lerned`", '"learned"']),
    "a claim that cannot be read": ({"claims": ["learned >> none"]}, ["cannot read", "A > B"]),
    "equal without margin": ({"claims": ["learned ~ none"]}, ["within M"]),
    "equal gaps without margin": (
        {"claims": ["gap(learned, none | global_pool=avg) ~ gap(learned, none | global_pool=token)"]},
        ["within M"],
    ),
    "a smaller gap with a margin": (
        {"claims": ["gap(learned, none | global_pool=avg) < gap(learned, none | global_pool=token) within 0.1"]},
        ["must not have it"],
    ),
    "gaps of different pairs": (
        {"claims": ["gap(learned, none | global_pool=avg) < gap(none, learned | global_pool=token)"]},
        ["same two levels"],
    ),
    "a metric of an analysis": ({"metric": {"primary": "resolution/acc1@12"}}, ["add resolution to `analyses`"]),
    "analyses": ({"analyses": {"scramble": {}}}, ["`analyses` must be a list"]),
    "timeout": ({"run": {"timeout": "soon"}}, ["`run.timeout`", "20m"]),
    "negative retries": ({"run": {"retries": -1}}, ["`run.retries`", "whole number"]),
    "fewer seeds at most than there are": (
        {"seeds": 5, "stats": {"seeds_max": 3}},
        ["`stats.seeds_max` must be at least", "got 3 and 5"],
    ),
    "within": ({"match": {"within": ["tokenizer"]}}, ["no axis `tokenizer`"]),
    "within a number": ({"match": {"within": 3}}, ["`match.within` must be a list"]),
    "a number of claims": ({"claims": 3}, ["`claims` must be a list"]),
    "a number as metric": ({"metric": {"primary": "acc1", "secondary": [5]}}, ["`metric.secondary` must be a list"]),
    "a margin that is no number": ({"claims": ["learned ~ none within 1-2"]}, ["the margin must be a number above 0"]),
    "a margin of nothing": ({"claims": ["learned ~ none within 0"]}, ["the margin must be a number above 0"]),
    "infinite margin": ({"stats": {"margin": float("inf")}}, ["`stats.margin` must be a number"]),
    "a claim on no number": ({"claims": ["learned > nan"]}, ["`nan`, which is not a level"]),
    "a number that is no level": (
        {
            "claims": ["2 > 3"],
            **(depths := {"axes": {"model.depth": [1, 2]}, "baseline": {"depth": 1}, "exclude": None}),
        },
        ["'2 > 3': acc1 is a number from 0 to 1, and is never 3; `depth` has the levels 1, 2"],
    ),
    "a level in other words": ({"claims": ["2 > 1.0"], **depths}, ["`1.0`, which is not a level of `depth`"]),
    "an accuracy in percent": (
        {"claims": ["learned > 85"]},
        ["from 0 to 1, and is never 85; 85 % are 0.85"],
    ),
    "a loss below 0": ({"claims": ["learned > -1 on loss"]}, ["loss is a number from 0, and is never -1"]),
    "a margin in percent": ({"claims": ["learned ~ none within 3"]}, ["margin must be below 1, got 3; 3 % are 0.03"]),
    "a margin of everything": ({"stats": {"margin": 1}}, ["so a margin must be below 1, got 1"]),
    "an arm against itself": ({"claims": ["learned > learned"]}, ["compares arms with themselves"]),
    "a gap against itself": (
        {"claims": ["gap(learned, none | global_pool=avg) < gap(learned, none | global_pool=avg)"]},
        ["compares arms with themselves"],
    ),
    "a condition on what is compared": ({"claims": ["learned > none | pos_embed=none"]}, ["sets `pos_embed` twice"]),
    "two conditions on one axis": (
        {"claims": ["learned > none | global_pool=avg, global_pool=token"]},
        ["sets `global_pool` twice"],
    ),
    "a timeout of two points": ({"run": {"timeout": "1.2.3h"}}, ["`run.timeout`", "20m"]),
    "no time": ({"run": {"timeout": 0}}, ["`run.timeout`", "20m"]),
    "a command in one string": ({"run": {"command": "python train.py"}}, ["`run.command` must be a list of words"]),
    "a test without a value": ({"stats": {"test": None}}, ["`stats.test` must be one of auto,", "got no value"]),
    "forks without a value": ({"run": {"fork": None}}, ["`run.fork` must be one of True, False, got no value"]),
    "workers without a value": ({"run": {"workers": None}}, ["`run.workers` must be a whole number", "got None"]),
    "retries without a value": ({"run": {"retries": None}}, ["`run.retries` must be a whole number", "got None"]),
    "a project without a value": ({"wandb": {"project": None}}, ["`wandb.project` must be a name, got None"]),
    "slurm without keys": ({"run": {"slurm": 4}}, ["`run.slurm` must have keys"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_the_file_is_reported_with_its_line(write, case):
    changes, words = WRONG[case]
    path = write(**changes)
    with pytest.raises(UsageError) as caught:
        read_ablation(path)
    message = str(caught.value)
    assert "ablation.yaml, line " in message
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_aliases_that_multiply_are_refused_in_the_file_of_an_ablation(tmp_path):
    lines = [f"a{i}: &a{i} {{{', '.join(f'k{k}: *a{i - 1}' for k in range(8))}}}" for i in range(1, 9)]
    (tmp_path / "a.yaml").write_text("\n".join(["a0: &a0 {x: 1, y: 2}", *lines]))
    with pytest.raises(UsageError, match=r"a\.yaml`: its aliases expand to more than 100,000 values"):
        read_ablation(tmp_path / "a.yaml")


def test_a_proposed_command_can_be_typed_and_a_report_has_one_source(write, capsys):
    write().rename("my file.yaml")
    assert main(["ablate", "report", "my file.yaml"]) == 2
    assert "start with `vitlab ablate run 'my file.yaml'`" in capsys.readouterr().err
    assert main(["ablate", "report", "my file.yaml", "--from", "evidence"]) == 2
    assert "takes a FILE, or --from DIR, a folder of `vitlab ablate export`, not both" in capsys.readouterr().err


def test_a_config_that_is_no_text_is_named(write, tmp_path):
    path = write()
    (tmp_path / "base.yaml").write_bytes("model: {x: ü}".encode("latin-1"))
    with pytest.raises(UsageError, match=r"base\.yaml is not YAML: 'utf-8' codec can't decode byte 0xfc"):
        texts(read_ablation(path))


@pytest.mark.parametrize("key", ["evaluate", "checkpoint"])
def test_a_key_without_a_value_is_not_its_default(write, key):
    path = write()
    path.write_text(f"{path.read_text()}{key}:\n")
    with pytest.raises(UsageError, match=f"`{key}` must be one of .*, got no value"):
        read_ablation(path)


def test_a_section_whose_lines_are_all_comments_has_the_defaults(write):
    path = write()
    path.write_text(f"{path.read_text()}run:\n  # workers: 2\nstats: {{margin: null}}\n")
    assert read_ablation(path).run == read_ablation(write()).run


def test_a_level_is_named_as_it_is_written(write):
    axes = {"model.qk_norm": [True, False], 1: {"a": {"model.lr": 1}, "b": {"model.lr": 2}}}
    choice = {"qk_norm": False, 1: "a"}
    ablation = read_ablation(write(axes=axes, baseline=choice, claims=None, exclude=[{"qk_norm": True, 1: "b"}]))
    assert ablation.baseline == {"qk_norm": "false", "1": "a"}
    assert [arm.name for arm in ablation.arms] == ["true-a", "false-a", "false-b"]


def test_every_column_beside_those_of_the_axes_is_no_name_of_an_axis():
    row = {field.name for field in dataclasses.fields(ArmRow)} - {"levels", "answer"}
    seeds = pd.read_csv(ROOT / "experiments/position_embeddings/results/photos/seeds.csv", nrows=1)
    assert row | set(answer_columns(NOT_COMPARED)) | set(seeds.columns) - {"tokenizer", "pos_embed"} <= set(COLUMNS)


def test_evidence_of_before_may_have_an_axis_that_is_called_as_a_column(write):
    path = write(axes={"kind": GOOD["axes"]["pos_embed"]}, baseline={"kind": "none"})
    assert list(read_ablation(path, is_evidence=True).axes) == ["kind"]


def test_a_single_name_is_a_list_and_1e3_is_a_number(write):
    path = write(claims="learned > none", stats={"margin": "1e-2"}, match={"within": "global_pool", "flops": "1e-1"})
    ablation = read_ablation(path)
    assert ([c.text for c in ablation.claims], ablation.stats.margin) == (["learned > none"], 0.01)
    assert (ablation.match.within, ablation.match.flops) == (("global_pool",), 0.1)
    ablation = read_ablation(write(metric={"primary": "acc1", "secondary": ["loss", "acc1", "loss"]}))
    assert ablation.secondary == ("loss",)  # the primary metric is one family, not two


def test_a_metric_of_one_target_is_not_taken_for_an_analysis(write):
    tune = {"model.lr": [1, 2]}
    ablation = read_ablation(write(metric={"primary": "mae/height", "mode": "min"}, analyses=["resolution"], tune=tune))
    assert ablation.primary == "mae/height" and not ablation.is_analyzed("mae/height")
    assert ablation.is_analyzed("resolution/acc1@12") and not ablation.is_analyzed("resolution")


def test_a_metric_of_features_that_no_evaluation_measures_is_refused(write):
    quality = {"class_path": "vitlab.callbacks.quality.FeatureQuality"}
    rows = [{"val/loss": 1.0, "val/knn": 0.5, "val/rankme": 3.0}]
    config = {"trainer": {"callbacks": [quality]}}
    found = probe._metrics(rows, config)
    assert found == ["loss"] and probe._metrics(rows, {"trainer": {"callbacks": None}}) == ["knn", "loss", "rankme"]
    for metric in ({"primary": "knn"}, {"primary": "loss", "secondary": ["rankme"]}):
        ablation = read_ablation(write(metric=metric, analyses=["knn"]))
        arms = [SimpleNamespace(metrics=found, config=config)]
        with pytest.raises(UsageError, match=r"no arm measures a metric `\w+`; a callback .* has `knn/acc1@20`"):
            resolve._refuse_metrics(ablation, arms)
    ablation = read_ablation(write(metric={"primary": "knn/acc1@20"}, analyses=["knn"]))
    resolve._refuse_metrics(ablation, arms)


def test_a_metric_of_an_analysis_without_numbers_to_compare_is_refused(write):
    for given in (
        {"metric": {"primary": "fewshot/acc1"}},
        {"metric": {"primary": "acc1", "secondary": ["fewshot/acc1"]}},
        {"claims": ["learned > none on fewshot/acc1"]},
    ):
        ablation = read_ablation(write(analyses=["fewshot", "knn"], **given))
        with pytest.raises(UsageError, match=r"`fewshot/acc1`: the analysis fewshot gives .*; these do: .*\bknn\b"):
            resolve._refuse_metrics(ablation, [])


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("knn/acc1@7", "knn/acc1@1, knn/acc1@5, knn/acc1@20"),
        ("scramble/acc5", "scramble/acc1, scramble/flipped"),
        ("resolution/loss@12", r"resolution/acc1@\*"),
        ("shift/acc1", r"shift/acc1@\*, shift/agreement@\*"),
    ],
)
def test_a_number_that_an_analysis_does_not_measure_is_refused_before_training(write, name, measured):
    analysis = name.partition("/")[0]
    for given in ({"metric": {"primary": name}}, {"claims": [f"learned > none on {name}"]}):
        with pytest.raises(UsageError, match=f"`{name}`: the analysis {analysis} .* it measures {measured}$"):
            resolve._refuse_metrics(read_ablation(write(analyses=[analysis], **given)), [])
    for known in ("knn/acc1@20", "scramble/flipped", "resolution/acc1@12/canvas", "shift/agreement@4"):
        ablation = read_ablation(write(metric={"primary": known}, analyses=[known.partition("/")[0]]))
        resolve._refuse_metrics(ablation, [])


def test_a_size_that_an_analysis_does_not_measure_is_refused_before_training(write):
    model = {"img_size": [8, 8], "grid": [4, 4]}
    coarse, fine = (
        SimpleNamespace(metrics=[], model={**model, "grid": [8 // step] * 2}, start={"token_steps": [step, step]})
        for step in (4, 2)
    )
    for name, there, arms in (
        ("resolution/acc1@13", "4, 6, 8, 10, 12, 16", [fine]),
        ("resolution/acc1@6/canvas", "4, 8, 12, 16", [coarse]),
        ("resolution/acc1@x", "4, 6, 8, 10, 12, 16", [coarse, fine]),
        ("shift/agreement@3", "0, 1, 2, 4", [fine]),
    ):
        given = {"analyses": [name.partition("/")[0]], "claims": [f"learned > none on {name}"]}
        with pytest.raises(UsageError, match=f"`{name}`: the analysis .* not measure it at .*: it does at {there}$"):
            resolve._refuse_metrics(read_ablation(write(**given)), arms)
    unknown = SimpleNamespace(metrics=[], model=model, start={})  # a probe of before
    for name, arms in (("resolution/acc1@6", [coarse, fine]), ("resolution/acc1@13", [fine, unknown])):
        ablation = read_ablation(write(metric={"primary": name}, analyses=["resolution"]))
        resolve._refuse_metrics(ablation, arms)


def test_the_names_of_metrics_are_those_that_the_analyses_give():
    numbers = {"k": 5, "pixels": 4, "blocks": 4, "acc1": 0.5, "agreement": 0.5, "flipped": 0.1}
    table = pd.DataFrame([numbers | {"fill": "black", "protocol": "canvas", "metric": "resolution/acc1@12/rescale"}])
    for name in ("knn", "scramble", "scramble_image", "shift", "resolution"):
        given = ANALYSES[name].metrics(table)
        assert given and {resolve._not_of_analysis(f"{name}/{one}", []) for one in given} == {""}


@pytest.mark.parametrize(
    ("key", "sets", "owner"),
    [
        ("model.lr", {"model.lr": 0.5}, "`adjust`"),
        ("model.init_args.lr", {"model.lr": 0.5}, "`adjust`"),
        ("model.pos_embed.scale", {"model.pos_embed.init_args.scale": 0.5}, "`adjust`"),
        ("model.attn", {"model.attn.qk_norm": True}, "`adjust`"),
        ("model.attn.qk_norm", {"model.attn": {"class_path": "gated", "init_args": {"qk_norm": True}}}, "`adjust`"),
        ("model.attn.value_skip", {"model.attn": "gated"}, ""),
        ("model.pos_embed.scale", {"model.lr": 0.5}, ""),
        ("model.global_pool", {"model.lr": 0.5}, "the axis `global_pool`"),
    ],
)
def test_what_an_axis_or_adjust_sets_is_not_tuned_as_the_candidates_would_replace_it(write, key, sets, owner):
    path = write(adjust=[{"of": {"pos_embed": "learned"}, "set": sets}], tune={key: [1, 2], "seeds": [9]})
    if not owner:
        assert read_ablation(path).tune
        return
    with pytest.raises(UsageError, match=rf"line \d+: `tune` names `{key}`, which {owner} sets: leave it out of one"):
        read_ablation(path)
    assert read_ablation(path, is_evidence=True).tune  # evidence of before is read as it is


def test_a_key_that_an_arm_cannot_take_is_refused_before_candidates_are_trained(write, tmp_path, monkeypatch):
    asked = []

    def dry_run(words, *more, **given):
        assert "--dry_run" in words
        settings = [yaml.safe_load(Path(words[i + 1]).read_text()) for i, w in enumerate(words) if w == "--config"][-1]
        asked.append((settings["model.pos_embed"], settings["model.pos_embed.scale"], settings["model.opt"]))
        is_wrong = asked[-1][0] == "none" and "learned" not in levels
        return (2, ["vitlab: `model.pos_embed`: PosEmbed takes no argument `scale`"]) if is_wrong else (0, [])

    levels = ["none", "learned"]
    monkeypatch.setattr(resolve, "run_in_slot", dry_run)
    tune = {"model.pos_embed.scale": [0.1, 0.2, 0.3], "model.opt": ["adamw", "sgd"], "seeds": [9]}
    ablation = read_ablation(write(tune=tune, axes=dict(list(GOOD["axes"].items())[:1])))
    arms = [SimpleNamespace(fingerprint=name, code="") for name in levels]
    resolve._refuse_candidates(ablation, arms, 1, lambda: False)
    assert asked == [(arm, scale, opt) for scale, opt in ((0.1, "adamw"), (0.3, "sgd")) for arm in levels]
    resolve._refuse_candidates(ablation, arms, 1, lambda: False)
    assert len(asked) == 4  # and no more: it is noted
    levels.remove("learned")
    told = r"line \d+: the arm none cannot be built with model.pos_embed.scale = 0.1, .* takes no argument `scale`"
    with pytest.raises(UsageError, match=told) as error:
        resolve._refuse_candidates(ablation, arms[:1], 1, lambda: False)
    line = (tmp_path / "ablation.yaml").read_text().splitlines().index("  model.pos_embed.scale:") + 1
    assert f"line {line}:" in str(error.value)


@pytest.mark.parametrize(
    ("bad", "error", "line"),
    [
        (["learned-token", "learned-avg"], "PosEmbed takes no argument `scale`", "    model.pos_embed.scale: 0.5"),
        (["learned-token", "learned-avg"], "no module named lerned", "    learned:"),
        (["none-avg"], "`model.depth` must be at least 1, got 0", "    model.depth: 0"),
        (["none-token", "none-avg"], "`model.depth` must be at least 1, got 0", "    none:"),
        (["none-avg", "learned-token"], "`model.depth` must be at least 1, got 0", "    model.depth: 0"),
        (["none-token", "learned-avg"], "it breaks", "axes:"),
    ],
)
def test_an_arm_that_cannot_be_built_is_told_at_the_line_of_its_level_or_of_what_adjust_sets(write, bad, error, line):
    adjust = [
        {"of": {"pos_embed": "learned"}, "set": {"model.lr": 0.2, "model.pos_embed.scale": 0.5}},
        {"of": {"pos_embed": "none", "global_pool": "avg"}, "set": {"model.depth": 0}},
    ]
    ablation = read_ablation(path := write(adjust=adjust))
    errors = [UsageError(error) if arm.name in bad else None for arm in ablation.arms]
    with pytest.raises(UsageError, match=f"the arm {bad[0]} cannot be built") as told:
        resolve._refuse_mistakes(ablation, errors)
    assert f"line {path.read_text().splitlines().index(line) + 1}: " in str(told.value)


def test_candidates_that_are_tried_before_any_is_trained_have_the_ends_of_a_list_and_of_a_range(write):
    tune = {"model.drop_path_rate": {"low": 0, "high": 1.5}, "model.depth": [2, 0, 4], "budget": 3, "seeds": [9]}
    assert read_ablation(write(tune=tune)).tune.samples() == [
        {"model.drop_path_rate": 0.0, "model.depth": 0},
        {"model.drop_path_rate": 1.5, "model.depth": 4},
    ]


def test_a_date_is_text_as_in_a_config(write):
    path = write(tune={"model.schedule": ["x", "y"]})
    path.write_text(path.read_text().replace("name: toy", "name: 2026-11-23").replace("- token", "- 2026-11-22"))
    path.write_text(path.read_text().replace("- x", "- 2026-11-21"))
    ablation = read_ablation(path)
    assert (ablation.name, ablation.arms[0].overrides["model.global_pool"]) == ("2026-11-23", "2026-11-22")
    assert ablation.tune.candidates[0] == {"model.schedule": "2026-11-21"}


@pytest.fixture
def export(write, tmp_path):
    """A measured cell, and a call that exports its ablation into ``sent``."""
    ablation = read_ablation(write())
    arms = [built({"model": dict(arm.overrides)}, arm) for arm in ablation.arms]
    cell = Cell(ablation, arms[0], 0)
    cell.run.write("results.json", {"val": {"acc1": 0.5}})
    (cell.run.path / "predictions").mkdir()
    pd.DataFrame({"target": [1], "prediction": [1]}).to_parquet(cell.run.path / "predictions" / "val.parquet")
    return cell, lambda: export_bundle(ablation, arms, tmp_path / "sent")


@pytest.mark.parametrize("call", [(pd.DataFrame, "to_parquet"), (shutil, "copyfile")], ids=["predictions", "others"])
def test_an_export_to_a_disk_that_fills_up_leaves_nothing_and_can_be_repeated(export, tmp_path, monkeypatch, call):
    def full(*words, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    cell, send = export
    with monkeypatch.context() as patch:
        patch.setattr(*call, full)
        with pytest.raises(OSError, match="No space left"):
            send()
    assert not (tmp_path / "sent").exists()
    assert tmp_path / "sent" / cell.name / "predictions" / "val.parquet" in send()


def test_an_export_does_not_leave_out_predictions_that_cannot_be_listed(export, tmp_path, monkeypatch):
    (_, send), scan, listed = export, os.scandir, os.listdir

    def fails(call, place):
        if str(place).endswith("predictions"):
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return call(place)

    monkeypatch.setattr(os, "scandir", lambda place=".": fails(scan, place))
    monkeypatch.setattr(os, "listdir", lambda place=".": fails(listed, place))
    with pytest.raises(PermissionError, match="predictions"):
        send()
    assert not (tmp_path / "sent").exists()


def test_what_cannot_be_read_around_an_export_leaves_no_folder_or_is_told(tmp_path, capsys, monkeypatch):
    done: list[str] = []
    toy = SimpleNamespace(directory=tmp_path / "toy")
    lab = SimpleNamespace(ablation=toy, export=lambda folder, allow_missing: done.append(folder) or [])
    options = argparse.Namespace(folder=str(tmp_path / "sent"), allow_missing=False)
    (tmp_path / "toy" / "chain.jsonl").mkdir(parents=True)  # a file that cannot be read
    with pytest.raises(IsADirectoryError, match=r"toy/chain\.jsonl"):
        ablate._export(lab, options)
    assert not done  # the repetition would find a folder there
    (tmp_path / "toy" / "chain.jsonl").rmdir()
    (tmp_path / "sent" / "SHA256SUMS").mkdir(parents=True)
    monkeypatch.setattr("vitlab.errors.TRUSTED", ["mine"])
    assert ablate._export(lab, options) == 0 and done
    out = capsys.readouterr().out
    assert f"`vitlab ablate report --from {tmp_path}/sent` writes" in out  # others lack the modules trusted here
    assert f"no seal of the folder now: {tmp_path}/sent/SHA256SUMS: Is a directory; `sha256sum" in out


def test_an_export_that_was_killed_leaves_no_folder_and_can_be_repeated(export, tmp_path, monkeypatch):
    _, send = export
    with monkeypatch.context() as patch:
        patch.setattr(bundle, "collect", lambda *words: [].pop())
        patch.setattr(shutil, "rmtree", lambda *words, **more: None)  # as after SIGKILL, nothing is tidied up
        with pytest.raises(IndexError):
            send()
    assert not (tmp_path / "sent").exists()
    (tmp_path / "sent").mkdir()
    assert all(path.is_file() and path.is_relative_to(tmp_path / "sent") for path in send())
    assert not list(tmp_path.glob(".sent*"))
    with pytest.raises(UsageError, match="not empty; export into a new folder"):
        send()


@pytest.mark.slow
def test_a_file_without_an_end_is_refused(tmp_path):
    for text in ("a: &a {b: *a}\n", f"{'[' * 2000}{']' * 2000}\n"):
        (tmp_path / "deep.yaml").write_text(text)
        with pytest.raises(UsageError):
            read_ablation(tmp_path / "deep.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "weights.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not YAML"):
        read_ablation(tmp_path / "weights.yaml")


def test_an_analysis_that_nobody_knows_is_refused(write, capsys):
    path = write(analyses=["resolution", "scrambel"])
    assert main(["ablate", "status", str(path)]) == 2
    err = capsys.readouterr().err
    assert 'no analysis called "scrambel"; did you mean "scramble"?' in err and ", line " in err
    assert err.count("\n") == 1


def test_a_stored_arm_that_cannot_be_read_now_is_not_taken_for_one_that_is_missing(write, monkeypatch):
    monkeypatch.setattr(probe, "code_digest", lambda own: "")
    ablation = read_ablation(write())
    assert probe.known(ablation) == []
    (ablation.directory / "arms").mkdir(parents=True)
    probe._cache(ablation, ablation.arms[1], "").mkdir()  # reading it fails, also for root
    with pytest.raises(OSError, match=ablation.arms[1].name):
        probe.known(ablation)


def test_a_disk_that_fails_while_an_arm_is_built_is_no_mistake_of_the_file(write, monkeypatch):
    def fails(*words):
        raise OSError(errno.EIO, "Input/output error", "arms/log")

    monkeypatch.setattr(probe, "code_digest", lambda own: "")
    monkeypatch.setattr(resolve, "code_digest", lambda own: "")
    monkeypatch.setattr(resolve, "probed", fails)
    with pytest.raises(OSError, match="arms/log"):
        resolve.resolve(read_ablation(write()), 1)


def test_the_line_is_that_of_the_mistake(write):
    path = write()
    text = path.read_text().replace("seeds: 2", "seeds: many")
    path.write_text(text)
    line = next(i for i, t in enumerate(text.splitlines(), 1) if t.startswith("seeds"))
    with pytest.raises(UsageError, match=f"line {line}: `seeds`"):
        read_ablation(path)


@pytest.mark.parametrize("key", ["model.tokenizer.global_pool", "global_pool"])
def test_two_axes_of_one_name_are_refused(write, key):
    levels = {"x": {"model.lr": 1}, "y": {"model.lr": 2}} if key == "global_pool" else [1, 2]
    with pytest.raises(UsageError, match="line 12: two axes are called global_pool; give them names"):
        read_ablation(write(axes={**GOOD["axes"], key: levels}))


def test_a_key_that_is_there_twice_is_refused(write):
    path = write()
    path.write_text(path.read_text() + "seeds: 4\n")
    with pytest.raises(UsageError, match="twice"):
        read_ablation(path)


def claim(write, text):
    path = write()
    return parse_claim(File(path), 0, text, read_ablation(path).axes)


def test_a_claim_without_a_condition_speaks_of_every_setting(write):
    found = claim(write, "learned > none")
    axes = read_ablation(write()).axes
    assert (found.axis, found.a, found.b, found.sign) == ("pos_embed", "learned", "none", ">")
    assert found.settings(axes) == [{"global_pool": "token"}, {"global_pool": "avg"}]


def test_a_claim_says_metric_margin_and_setting_in_any_order(write):
    found = claim(write, "learned ~ pos_embed=none within 0.5 on loss | global_pool=avg")
    assert (found.metric, found.margin, dict(found.where)) == ("loss", 0.5, {"global_pool": "avg"})
    assert claim(write, "learned ~ none within 0.5 | global_pool=avg on loss").metric == "loss"


def test_a_claim_may_compare_with_a_number(write):
    assert claim(write, "none ~ 0.25 within 0.04").b == 0.25


def test_gaps_stay_in_the_order_in_which_they_are_written(write):
    a = claim(write, "gap(learned, none | global_pool=avg) < gap(learned, none | global_pool=token)")
    b = claim(write, "gap(learned, none | global_pool=token) > gap(learned, none | global_pool=avg)")
    c = claim(write, "gap(learned, none | global_pool=avg) ~ gap(learned, none | global_pool=token) within 0.5 on loss")
    assert (a.first, a.second, a.sign, a.margin) == ("avg", "token", "<", None)
    assert (b.first, b.second, b.sign, b.margin) == ("token", "avg", ">", None)
    assert (c.first, c.second, c.sign, c.margin, c.metric) == ("avg", "token", "~", 0.5, "loss")
    assert a.settings(read_ablation(write()).axes) == [{}]


@pytest.mark.parametrize(
    "text",
    [
        "learned > global_pool=avg",
        "pos_embed=learned ~ global_pool=avg within 0.5",
        "gap(learned, global_pool=avg | width=a) < gap(learned, global_pool=avg | width=b)",
    ],
)
def test_a_claim_on_levels_of_two_axes_is_refused(write, text):
    axes = {**GOOD["axes"], "width": {"a": {"model.lr": 1}, "b": {"model.lr": 2}}}
    with pytest.raises(UsageError, match=r"line 24: .*`global_pool=avg` is not of `pos_embed`"):
        read_ablation(write(axes=axes, claims=["learned > none", text]))


def test_a_module_of_ones_own_may_log_its_accuracy_in_percent(write):
    assert read_ablation(write(claims=["learned > 85"], trust_imports=["mine"])).claims[0].b == 85.0


def test_a_claim_over_an_axis_is_one_verdict_on_its_mean(write):
    axes = read_ablation(write()).axes
    found = claim(write, "learned > none over global_pool on loss")
    assert (found.over, found.metric, found.settings(axes)) == (("global_pool",), "loss", [{}])
    assert found.averaged(axes) == [{"global_pool": "token"}, {"global_pool": "avg"}]
    assert claim(write, "learned > none").averaged(axes) == [{}]


@pytest.mark.parametrize(
    ("text", "a", "b", "metric", "over"),
    [
        ("off > on over global_pool", "off", "on", None, ("global_pool",)),
        ("on > off over global_pool on score", "on", "off", "score", ("global_pool",)),
        ("off > on | global_pool=avg", "off", "on", None, ()),
        ("off ~ on within 0.02 on loss", "off", "on", "loss", ()),
        ("off >  on on loss", "off", "on", "loss", ()),
        ("gap(off, on | global_pool=avg) > gap(off, on | global_pool=token) on loss", "off", "on", "loss", ()),
        ("off > over on loss over global_pool", "off", "over", "loss", ("global_pool",)),
    ],
)
def test_levels_may_be_called_as_words_of_a_claim(write, text, a, b, metric, over):
    levels = {name: {"model.rope": name} for name in ("off", "on", "over")}
    ablation = read_ablation(write(axes={**GOOD["axes"], "rope": levels}, claims=[text]))
    (found,) = ablation.claims
    assert (found.a, found.b, found.metric, found.over) == (a, b, metric, over)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learned > none over global_pol", 'over `global_pol`, which is not an axis; did you mean "global_pool"'),
        ("learned > none over pos_embed", "sets `pos_embed` twice"),
        ("learned > none over global_pool | global_pool=avg", "sets `global_pool` twice"),
    ],
)
def test_a_mean_over_what_is_no_free_axis_is_refused(write, text, words):
    with pytest.raises(UsageError, match=words):
        claim(write, text)
