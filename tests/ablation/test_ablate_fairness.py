"""Which arms must be alike, and whether they start alike."""

import json
import logging
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from tests.ablation.made_up import give, of_runs
from vitlab.ablation.execution.candidates import with_values
from vitlab.ablation.execution.cells import Resolved
from vitlab.ablation.execution.start import Start, token_spread, whole_length
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.inference.audit import as_trained, fair_facts, mismatches, shares
from vitlab.ablation.inference.findings import find
from vitlab.ablation.inference.linear import _fit, check, gate_of, linear
from vitlab.ablation.inference.looks import Looks
from vitlab.ablation.inference.measured import CellResults, _as_built
from vitlab.ablation.inference.plan import _table, check_lines
from vitlab.ablation.report.sections import _fairness_table
from vitlab.data import Digits
from vitlab.layers.pos_embed import PosEmbed
from vitlab.models.vit import VisionTransformer
from vitlab.runs.directory import RunDir
from vitlab.tasks import Classifier
from vitlab.tasks.schedule import schedule

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SIZE = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
LENGTH = {"steps": 20, "sum_of_learning_rates": 1.0}
NONE = {"model.pos_embed": "none", "model.pos_embed_lr_mult": 1}
POS_EMBED = {"none": NONE, "learned": {"model.pos_embed": "learned"}}
TOKENIZER = {
    "patch": {},
    "t2t": {"model.tokenizer": "t2t", "model.t2t_kernels": [3, 3, 3], "model.t2t_strides": [1, 2, 1]},
}


def ablation(folder, axes, **changes):
    content = {"name": "toy", "base": str(ROOT / "configs/vit.yaml"), "axes": axes, "metric": {"primary": "acc1"}}
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump({**content, "baseline": {"pos_embed": "none"}, **changes}, sort_keys=False))
    return read_ablation(path)


def resolved(ablation, flops):
    config = {"trainer": {"max_epochs": 2}, "model": {"lr": 0.1}, "data": {}}
    data = {"splits": {"train": {"n": 640}}}
    return [
        Resolved(arm, config, data, {"parameters": 1000, "flops": f, "tokens": 17}, (), 100.0, "", length=LENGTH)
        for arm, f in zip(ablation.arms, flops, strict=True)
    ]


FLOPS = [100, 101, 200, 230]  # patch none, patch learned, t2t none, t2t learned


def test_arms_must_match_within_the_levels_that_the_file_names(tmp_path):
    axes = {"tokenizer": TOKENIZER, "pos_embed": POS_EMBED}
    found = ablation(tmp_path, axes, match={"within": ["tokenizer"], "flops": 0.02})
    assert mismatches(found, resolved(found, FLOPS)) == {"t2t-learned": ["15.0 % more FLOPs than t2t-none"]}


def test_an_arm_that_is_not_trained_is_compared_too(tmp_path):
    found = ablation(tmp_path, {"pos_embed": POS_EMBED})
    base, arm = resolved(found, [100, 100])
    still = replace(base, length={**LENGTH, "sum_of_learning_rates": 0.0})
    unlike = mismatches(found, [still, arm])
    assert unlike == {"learned": ["sum of learning rates 1, none has 0"]}
    assert mismatches(found, [still, replace(arm, length=still.length)]) == {}


SCHEDULES = ["cosine", "wsd", {"class_path": "linear"}, "constant"]


@pytest.mark.filterwarnings("ignore")  # of Lightning, on loaders and validation
@pytest.mark.parametrize("scheduler", SCHEDULES, ids=str)
@pytest.mark.parametrize("limits", [{}, {"accumulate_grad_batches": 4}, {"limit_train_batches": 7}, {"max_steps": 30}])
def test_a_probe_reports_steps_and_learning_rates_of_the_whole_training(tmp_path, monkeypatch, scheduler, limits):
    """Against the sum over all steps of a training that records each."""
    recipe = {"num_classes": 3, **SIZE, "lr_scheduler": scheduler, "warmup_epochs": 1, "lr": 0.01}
    monkeypatch.chdir(tmp_path)
    found, seen = [], []

    class Record(L.Callback):
        def on_train_start(self, trainer, pl_module):
            found.append(whole_length(trainer, pl_module, limits.get("max_steps", -1)))

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == len(seen) and not is_probe:
                seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    batches = DataLoader([(torch.randn(2, 3, 16, 16), torch.zeros(2, dtype=torch.long))] * 10, batch_size=None)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    for is_probe in (True, False):
        words = {"max_epochs": 4, **limits, **({"max_steps": 2} if is_probe else {})}
        L.Trainer(accelerator="cpu", callbacks=[Record()], **words, **off).fit(Classifier(**recipe), batches)
    assert found[0]["steps"] == len(seen) and found[0] == found[1]
    assert found[0]["sum_of_learning_rates"] == pytest.approx(sum(seen), rel=1e-6)


def test_steps_and_learning_rates_of_a_report_are_those_of_the_runs(tmp_path):
    found = ablation(tmp_path, {"pos_embed": POS_EMBED})
    arms = resolved(found, [100, 100])
    run = RunDir(tmp_path / "run")
    run.write("run.json", {"steps": 7, "sum_of_learning_rates": 0.25})
    results = of_runs(found, arms, {("learned", 0): run})
    none, learned = (fair_facts(arm) for arm in as_trained(results))
    assert (none["steps"], none["sum_lr"]) == (20, 1.0)
    assert (learned["steps"], learned["sum_lr"]) == (7, 0.25)
    run.write("run.json", {"steps": -1, "sum_of_learning_rates": 0.0})  # of a loader without length, before
    results = of_runs(found, arms, {("learned", 0): run})
    assert as_trained(results)[1].length["steps"] == 20
    run.write("run.json", {"steps": 7, "sum_of_learning_rates": 0.25})
    assert mismatches(found, as_trained(results))["learned"][-1] == "sum of learning rates 0.25, none has 1"


def test_a_training_that_stops_in_its_first_epoch_is_in_the_warm_up_of_the_whole_one(tmp_path):
    """The steps that it made were taken for an epoch, in which the rate rises to its peak."""
    found = ablation(tmp_path, {"pos_embed": POS_EMBED})
    recipe = {"lr": 0.1, "lr_scheduler": "linear", "warmup_epochs": 1, "cooldown_epochs": 0}
    recipe |= {"warmup_lr": 0.0, "min_lr": 0.0}
    config = {"model": recipe, "trainer": {"max_epochs": 4}}
    arms = [replace(arm, config={**arm.config, **config}) for arm in resolved(found, [100, 100])]
    rates = [0.1 * schedule(recipe, 40, 10)(step) for step in range(40)]
    run = RunDir(tmp_path / "run")
    run.write("run.json", {"steps": 40, "sum_of_learning_rates": sum(rates)})
    run.metrics.write_text(json.dumps({"step": 5, "epoch": 0}) + "\n")
    _, learned = as_trained(of_runs(found, arms, {("learned", 0): run}))
    assert learned.length == {"steps": 5, "sum_of_learning_rates": pytest.approx(sum(rates[:5]))}


def test_a_training_that_stops_early_counts_the_steps_that_it_trained_and_is_read_once(tmp_path, monkeypatch):
    found = ablation(tmp_path, {"pos_embed": POS_EMBED})
    recipe = {"lr": 0.1, "lr_scheduler": "linear", "warmup_epochs": 0, "cooldown_epochs": 0}
    recipe |= {"warmup_lr": 0.0, "min_lr": 0.0}
    arms = [replace(arm, config={**arm.config, "model": recipe}) for arm in resolved(found, [100, 100])]
    rates = [0.1 * schedule(recipe, 40, 10)(step) for step in range(40)]
    runs = {}
    for arm, seed, last in (("none", 0, 40), ("none", 1, 40), ("learned", 0, 20), ("learned", 1, 30)):
        run = runs[arm, seed] = RunDir(tmp_path / f"{arm}{seed}")
        run.write("run.json", {"steps": 40, "sum_of_learning_rates": sum(rates)})
        rows = [json.dumps({"step": 10 * (e + 1), "epoch": e}) + "\n" for e in range(last // 10)]
        run.metrics.write_text("".join(rows))
    results, read, rows_of = of_runs(found, arms, runs), [], RunDir.rows
    monkeypatch.setattr(RunDir, "rows", lambda run: read.append(run.name) or rows_of(run))
    none, learned = (fair_facts(arm) for arm in as_trained(results))
    assert (none["steps"], none["sum_lr"]) == (40, sum(rates)) and "steps_least" not in none
    assert [learned[key] for key in ("steps", "steps_least", "steps_most")] == [25, 20, 30]
    assert learned["sum_lr"] == pytest.approx((sum(rates[:20]) + sum(rates[:30])) / 2)
    assert mismatches(found, as_trained(results))["learned"][0] == "37.5 % fewer steps than none"
    report = _fairness_table(find(results, Looks((2,), 2, (0, 1))))
    assert [row[report[0].index("steps")] for row in report[1:]] == ["40", "20 to 30"]
    assert sorted(read) == ["learned0", "learned1", "none0", "none1"]


def test_without_within_all_arms_must_match_the_baseline(tmp_path):
    axes = {"tokenizer": TOKENIZER, "pos_embed": POS_EMBED}
    found = ablation(tmp_path, axes, match={"flops": 0.02})
    unlike = mismatches(found, resolved(found, FLOPS))
    words = {"t2t-none": "100.0 % more FLOPs than patch-none", "t2t-learned": "130.0 % more FLOPs than patch-none"}
    assert unlike == {arm: [each] for arm, each in words.items()}
    assert shares(found, resolved(found, FLOPS))["patch-learned"]["flops"] == pytest.approx(0.01)


def test_a_position_embedding_that_learns_faster_is_seen(tmp_path):
    found = ablation(tmp_path, {"pos_embed": POS_EMBED})
    none, learned = resolved(found, [100, 100])
    group = {"name": "pos_embed.weight", "shape": [1, 16, 4], "weight_decay": 0.0, "lr_scale": 10.0}
    words = "position embedding trained at 10 times the rate"
    fast = replace(learned, groups=(group,))
    assert mismatches(found, [none, fast]) == {"learned": [f"{words} of the rest"]}  # the other trains none
    usual = replace(none, groups=({**group, "lr_scale": 1.0},))
    assert mismatches(found, [usual, fast]) == {"learned": [f"{words}, none at 1"]}
    assert mismatches(found, [none, replace(learned, groups=({**group, "lr_scale": 1.0},))]) == {}


def test_different_weights_of_positions_at_the_start_are_reported_and_can_be_refused(tmp_path):
    def told(ratios, **match):
        spec = ablation(tmp_path, {"pos_embed": {**POS_EMBED, "other": {"model.pos_embed": "sincos2d"}}}, **match)
        arms = zip(resolved(spec, [1] * 3), ratios, strict=True)
        return mismatches(spec, [replace(arm, start={"pos_to_content": ratio}) for arm, ratio in arms])

    assert told([0.0, 0.3, 0.5]) == {} and told([0.0, 1.8, 0.3]).keys() == {"other"}  # by more than a factor of two
    words = {"other": ["initial ratio of positions to content 0.5, learned has 0.4"]}
    assert told([0.0, 0.4, 0.5], match={"pos_to_content": 0.2}) == words
    assert told([0.0, 0.4, 0.48], match={"pos_to_content": 0.2}) == {}
    untold = {"learned": ["initial ratio of positions to content not measured with its tuned values"]}
    assert told([0.0, None, 0.5], match={"pos_to_content": 0.2}) == untold
    assert told([0.0, None, 0.5]) == {}  # nothing asks for it


def test_a_probe_writes_the_start_of_its_network(tmp_path, monkeypatch):
    net = VisionTransformer(img_size=(8, 16), in_chans=1, patch_size=(2, 4), embed_dim=8, depth=1, num_heads=2)
    loader = [(torch.randn(2, 1, 8, 16), torch.zeros(2))]
    data = SimpleNamespace(val_dataloader=lambda: loader, iterate_batches=iter)
    monkeypatch.setattr("vitlab.ablation.execution.start.whole_length", lambda *given: {"steps": 3})
    trainer = SimpleNamespace(default_root_dir=tmp_path, datamodule=data)
    Start().on_train_start(trainer, SimpleNamespace(net=net, device=torch.device("cpu")))
    assert json.loads((tmp_path / "length.json").read_text()) == {"steps": 3}
    found = json.loads((tmp_path / "start.json").read_text())
    assert found.keys() == {"token_sd", "pos_to_content", "token_steps"} and found["token_steps"] == [2, 4]


def test_data_of_ones_own_are_measured_by_their_first_training_batch(tmp_path):
    net = VisionTransformer(img_size=8, in_chans=1, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    images, task = torch.randn(2, 1, 8, 8), SimpleNamespace(net=net, device=torch.device("cpu"))
    trainer = SimpleNamespace(default_root_dir=tmp_path, datamodule=object(), global_step=0)
    for number, batch in [(0, {"image": images}), (0, [images.byte()]), (0, [images, images]), (1, [10 * images])]:
        Start().on_train_batch_start(trainer, task, batch, number)
    found = json.loads((tmp_path / "start.json").read_text())
    assert found == {**token_spread(net, images), "token_steps": [4, 4]}


def test_what_a_probe_found_of_untuned_arms_is_not_said_of_tuned_ones(tmp_path):
    spec = ablation(tmp_path, {"pos_embed": POS_EMBED})
    ratio = {"token_sd": 2.0, "pos_to_content": 0.5, "token_steps": [4, 4]}
    arm = replace(resolved(spec, [100, 100])[1], start=ratio)
    assert with_values(spec, arm, {"model.lr": 0.1, "model.pos_embed_lr_mult": 2}).start == ratio
    unknown = {**ratio, "token_sd": None, "pos_to_content": None}
    assert with_values(spec, arm, {"model.pos_embed.scale": 0.1}).start == unknown
    assert with_values(spec, arm, {"data.noise": 0.1}).start == unknown
    run = RunDir(tmp_path / "run")
    assert _as_built(arm, SimpleNamespace(runs={(arm.name, 0): run})) == arm
    run.path.mkdir()
    group = {"name": "pos_embed.weight", "shape": [7, 1], "lr_scale": 10.0, "weight_decay": 0.1}
    (run.path / "param_groups.json").write_text(json.dumps([group]))
    run.write("model.json", {"parameters": 7, "flops": 9})
    built = _as_built(arm, SimpleNamespace(runs={("none", 0): None, (arm.name, 0): run}))
    facts = fair_facts(built)
    assert (facts["parameters"], facts["flops"], facts["pos_embed parameters"]) == (7, 9, 7)
    assert (facts["pos_embed_lr_scale"], facts["pos_embed_weight_decay"]) == (10, 0.1)
    assert mismatches(spec, [resolved(spec, [9, 9])[0], built])["learned"][-2:] == [
        "position embedding trained at 10 times the rate of the rest",
        "weight decay on the position embedding",
    ]


def test_the_start_of_a_network_is_measured_on_its_tokens():
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    images = torch.randn(8, 3, 16, 16)
    found = []
    for scale in (1.0, 0.5):
        torch.manual_seed(0)
        net = VisionTransformer(pos_embed={"class_path": "sincos2d", "init_args": {"scale": scale}}, **size)
        found.append(token_spread(net, images))
        assert net.training
    table = net.pos_embed.table()
    sd = float(net.tokenizer(images).detach().std())
    assert found[0]["token_sd"] == found[1]["token_sd"] == pytest.approx(sd)
    assert found[0]["pos_to_content"] == pytest.approx(float(table.square().mean().sqrt()) / found[0]["token_sd"])
    assert found[1]["pos_to_content"] == pytest.approx(found[0]["pos_to_content"] / 2)
    torch.manual_seed(0)
    net = VisionTransformer(pos_embed={"class_path": "sincos2d", "init_args": {"join": "every_layer"}}, **size)
    assert token_spread(net, images)["pos_to_content"] == pytest.approx(found[0]["pos_to_content"])
    assert token_spread(VisionTransformer(pos_embed="rope2d", **size), images)["pos_to_content"] == 0
    with torch.no_grad():
        net.tokenizer.proj.weight.zero_()  # as a tokenizer of one's own may start
    assert token_spread(net, images) == {"token_sd": 0, "pos_to_content": 0}


def test_the_tokens_of_a_network_of_ones_own_are_unknown_and_no_mismatch(tmp_path):
    spec = ablation(tmp_path, {"pos_embed": POS_EMBED})
    vit, own = resolved(spec, [100, 100])
    other = replace(own, model={**own.model, "tokens": 33})
    assert mismatches(spec, [vit, other]) == {"learned": ["33 tokens, none has 17"]}
    own = replace(own, model={"parameters": 1000})
    assert mismatches(spec, [vit, own]) == {}
    assert _table([vit, own])[2].split() == ["learned", "1,000", "0", "?", "?", "20", "1", "-", "100"]


def test_a_probe_trains_in_the_modes_of_before_whatever_happens(tmp_path):
    net = VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, dropout=0.1)
    net.blocks[0].eval()  # as a frozen part is kept
    modes = [module.training for module in net.modules()]
    token_spread(net, torch.randn(2, 3, 16, 16))
    assert [module.training for module in net.modules()] == modes
    with pytest.raises(RuntimeError, match="shapes"):
        token_spread(net, torch.randn(2, 1, 16, 16))
    assert [module.training for module in net.modules()] == modes


class BeforeBlocks(PosEmbed):
    """Adds ones to the patch tokens before each block."""

    def enter(self, x, layer):
        return x + torch.nn.functional.pad(torch.ones(x.shape[1] - 1, 1), (0, 0, 1, 0))


@pytest.mark.parametrize("pos_embed", ["learned", "learned, every_layer", "sincos2d", "rope2d", "relpos", "none"])
def test_the_ratio_of_one_method_is_what_it_was_when_experiments_were_published(pos_embed):
    word, _, join = pos_embed.partition(", ")
    spec = {"class_path": word, "init_args": {"join": join}} if join else word
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    net, images = VisionTransformer(pos_embed=spec, **size).eval(), torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        content = net.tokenizer(images)
        added = net.pos_embed(content) - content
        if not added.any():
            tokens = net.embed(images)
            added = (net.pos_embed.enter(tokens, 0) - tokens)[:, 1:]
    sd = float(content.float().std())
    assert token_spread(net, images) == {"token_sd": sd, "pos_to_content": float(added.square().mean().sqrt()) / sd}


def test_positions_that_are_added_at_two_places_or_to_normalized_tokens_are_measured_there():
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    own, images = f"{__name__}.BeforeBlocks", torch.randn(8, 3, 16, 16)
    for pos_embed, pre_norm in ((own, True), (["learned", own], False), (["learned", own], True)):
        torch.manual_seed(0)
        net = VisionTransformer(pos_embed=pos_embed, pre_norm=pre_norm, **size).eval()
        with torch.no_grad():
            content, entering = net.tokenizer(images), net.embed(images)[:, 1:]
        once = 0.0 if pos_embed == own else float(net.pos_embed.parts["learned"].weight.detach().square().mean().sqrt())
        wanted = ((once / float(content.std())) ** 2 + (1 / float(entering.std())) ** 2) ** 0.5
        assert token_spread(net, images)["pos_to_content"] == pytest.approx(wanted, rel=1e-5)


def test_an_arm_must_beat_logistic_regression_on_the_training_pixels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    probe = str(ROOT / "experiments/position_embeddings/probe_vit.yaml")
    spec = ablation(tmp_path, {"pos_embed": POS_EMBED}, base=probe)
    arms = resolved(spec, [100, 101])
    (found,) = linear(spec, arms).values()
    assert 0.8 < found["acc1"] < 1 and (found["n_train"], found["n"], found["inputs"]) == (3000, 750, 256)
    kept = tmp_path / "runs/ablations/toy/linear.json"
    easier = kept.read_text().replace(str(found["acc1"]), "0.5")
    kept.write_text(easier)
    assert gate_of(linear(spec, arms), spec, arms[0])["acc1"] == 0.5  # it is fitted once
    fitted = check(spec, arms)
    monkeypatch.setattr("vitlab.ablation.inference.linear._fit", lambda spec, arm: dict(found))
    assert (fitted[0], fitted[1]) == (1, [f"acc1 is 0.5, fitted again it is {found['acc1']}"])
    kept.write_text("{" + kept.read_text())
    assert "linear.json" in check(spec, arms)[1][0] and linear(spec, arms).popitem()[1] == found
    assert check(spec, arms) == (1, [], "")
    assert "images are not in this folder" in check(replace(spec, home=kept.parent, is_evidence=True), arms)[2]
    kept.write_text(easier)
    assert gate_of(linear(spec, arms), spec, replace(arms[0], data={"other": "images"})) == {}
    numbers = {(arm, seed): {"acc1": acc} for arm, acc in (("none", 0.4), ("learned", 0.6)) for seed in range(3)}
    results = give(CellResults(spec, arms), numbers)
    under, beats = (row.verdict for row in find(results, Looks((3,), 3, (0, 1, 2)), linear(spec, arms)).arms)
    assert under.endswith("; under-trained") and "under-trained" not in beats


def test_logistic_regression_is_a_shrunk_one_on_at_most_32_pixels_a_side(tmp_path, monkeypatch):
    """Pixels tell all images apart, but one of four so weakly that with C = .1 it is taken for the others."""
    images = torch.tensor([0.3, 0.3, 0.3, -0.3]).view(4, 1, 1, 1).expand(4, 1, 40, 1)
    batches = [(images[:3], torch.ones(3, dtype=torch.long)), (images[3:], torch.zeros(1, dtype=torch.long))]
    subject = SimpleNamespace(batches=lambda *words: batches)
    monkeypatch.setattr("vitlab.analysis.subject.Subject", lambda *words, **more: subject)
    arm = SimpleNamespace(model=None, datamodule=None)
    monkeypatch.setattr("vitlab.ablation.inference.linear.build_arm", lambda *asked: arm)
    spec = ablation(tmp_path, {"pos_embed": POS_EMBED})
    assert _fit(spec, resolved(spec, [100, 100])[0]) == {"acc1": 0.75, "n_train": 4, "n": 4, "inputs": 32}


def test_logistic_regression_needs_pixels_and_labels_and_no_network_of_vitlab(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = ablation(tmp_path, {"pos_embed": POS_EMBED})
    arms = resolved(spec, [100, 101])
    own = SimpleNamespace(model=L.LightningModule(), datamodule=Digits())
    monkeypatch.setattr("vitlab.ablation.inference.linear.build_arm", lambda *asked: own)
    monkeypatch.setattr("vitlab.ablation.inference.linear.MOST", 200)
    found = gate_of(linear(spec, arms), spec, arms[0])
    assert 0.8 < found["acc1"] < 1 and (found["n_train"], found["inputs"]) == (200, 64)
    assert check(spec, arms) == (1, [], "")

    def broken(split):
        raise AttributeError("the data broke")

    monkeypatch.setattr(own.datamodule, "build", broken)
    assert check(spec, arms) == (0, [], "linear.json not fitted again: the data broke")
    (tmp_path / "runs/ablations/toy/linear.json").unlink()
    assert gate_of(linear(spec, arms), spec, arms[0]) == {"why": "the data broke"}
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitlab.ablation.inference.linear._fit", lambda spec, arm: dict(found))
    assert gate_of(linear(spec, arms), spec, arms[0]) == found  # a failure may have passed
    monkeypatch.setattr("vitlab.ablation.inference.linear._fit", None)
    assert gate_of(linear(spec, arms), spec, arms[0]) == found


def test_arms_of_one_seed_start_alike(tmp_path):
    axes = {"tokenizer": TOKENIZER, "pos_embed": POS_EMBED}
    terminal = logging.getLogger("vitlab")
    before = terminal.handlers.copy(), terminal.propagate, warnings.formatwarning
    lines, is_alike = check_lines(ablation(tmp_path, axes, match={"within": ["tokenizer"]}))
    assert (terminal.handlers, terminal.propagate, warnings.formatwarning) == before  # those of the caller
    assert is_alike, lines
    for line, tokenizer in zip(lines[1::2], TOKENIZER, strict=True):
        pattern = rf"{tokenizer}-learned: \d+ tensors of .* as in {tokenizer}-none, all equal initially; only here: pos"
        assert re.search(pattern, line), line


def test_starts_of_own_modules_and_of_tensors_without_dimensions_are_compared(tmp_path, monkeypatch):
    class Own(L.LightningModule):
        def __init__(self, scale):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
            self.scale = torch.nn.Parameter(torch.tensor(scale))

        def get_extra_state(self):
            return {"words": "no tensor"}

    def built(ablation, arm):
        torch.manual_seed(0)
        return SimpleNamespace(model=Own(0.5 if arm.name == "none" else 1.0))

    monkeypatch.setattr("vitlab.ablation.inference.plan.build_arm", built)
    lines, is_alike = check_lines(ablation(tmp_path, {"pos_embed": POS_EMBED}))
    assert lines[0] == "init     none: 8 tensors" and not is_alike
    assert lines[1].endswith(": 8 tensors of the same name and shape as in none, 1 DIFFER INITIALLY: scale")


def test_weights_that_an_arm_is_given_are_not_compared_as_if_they_were_drawn(tmp_path, monkeypatch):
    built = SimpleNamespace(model=torch.nn.Linear(2, 2))
    monkeypatch.setattr("vitlab.ablation.inference.plan.build_arm", lambda ablation, arm: built)
    axes = {"start": {"drawn": {}, "given": {"init_from": "runs/mae-{seed}"}}}
    lines = ["init     drawn: 2 tensors", "init     given: weights of runs/mae-0, not compared"]
    assert check_lines(ablation(tmp_path, axes, baseline={"start": "drawn"}))[0] == lines
    lines[0] += ", not compared with the weights of runs/mae-0"
    assert check_lines(ablation(tmp_path, axes, baseline={"start": "given"}))[0] == lines


def test_arms_that_start_differently_are_found(tmp_path):
    other = {**POS_EMBED, "wide": {**NONE, "model.init_std": 0.2}}
    lines, is_alike = check_lines(ablation(tmp_path, {"pos_embed": other}))
    assert not is_alike
    assert "DIFFER INITIALLY" in lines[2] and "START DIFFERENTLY" not in lines[1]


def test_arms_with_different_schedules_are_reported(tmp_path):
    spec = ablation(tmp_path, {"pos_embed": POS_EMBED})
    arms = resolved(spec, FLOPS[:2])
    arms[1] = replace(arms[1], config={**arms[1].config, "model": {"lr": 0.1, "lr_scheduler": "wsd"}})
    assert mismatches(spec, arms) == {"learned": ["lr_scheduler wsd, none has cosine"]}
