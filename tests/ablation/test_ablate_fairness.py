"""Which arms must be alike, and whether they start alike."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from vitlab.ablation.file.spec import read
from vitlab.ablation.verdict.audit import flags, shares
from vitlab.ablation.work.cells import Resolved
from vitlab.ablation.work.check import check_lines

ROOT = Path(__file__).parents[2]
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
    return read(path)


def resolved(ablation, flops):
    config = {"trainer": {"max_epochs": 2}, "model": {"lr": 0.1}, "data": {}}
    data = {"splits": {"train": {"n": 640}}}
    return [
        Resolved(arm, config, data, {"parameters": 1000, "flops": f, "tokens": 17}, (), 100.0, "")
        for arm, f in zip(ablation.arms, flops, strict=True)
    ]


FLOPS = [100, 101, 200, 230]  # patch none, patch learned, t2t none, t2t learned


def test_arms_must_match_within_the_levels_that_the_file_says(tmp_path):
    axes = {"tokenizer": TOKENIZER, "pos_embed": POS_EMBED}
    found = ablation(tmp_path, axes, match={"within": ["tokenizer"], "flops": 0.02})
    assert flags(found, resolved(found, FLOPS)) == {"t2t-learned": ["+15.0% flops than t2t-none"]}


def test_without_within_all_arms_must_match_the_baseline(tmp_path):
    axes = {"tokenizer": TOKENIZER, "pos_embed": POS_EMBED}
    found = ablation(tmp_path, axes, match={"flops": 0.02})
    unlike = flags(found, resolved(found, FLOPS))
    assert unlike == {"t2t-none": ["+100.0% flops than patch-none"], "t2t-learned": ["+130.0% flops than patch-none"]}
    assert shares(found, resolved(found, FLOPS))["patch-learned"]["flops"] == pytest.approx(0.01)


def test_a_position_embedding_that_learns_faster_is_seen(tmp_path):
    found = ablation(tmp_path, {"pos_embed": POS_EMBED})
    none, learned = resolved(found, [100, 100])
    group = {"name": "pos_embed.weight", "shape": [1, 16, 4], "weight_decay": 0.0, "lr_scale": 10.0}
    words = ["its position embedding learns at 10 times the rate, none's at 1"]
    assert flags(found, [none, replace(learned, groups=(group,))]) == {"learned": words}
    assert flags(found, [none, replace(learned, groups=({**group, "lr_scale": 1.0},))]) == {}


def test_arms_of_one_seed_start_alike(tmp_path):
    axes = {"tokenizer": TOKENIZER, "pos_embed": POS_EMBED}
    lines, is_alike = check_lines(ablation(tmp_path, axes, match={"within": ["tokenizer"]}))
    assert is_alike, lines
    for line, tokenizer in zip(lines[1::2], TOKENIZER, strict=True):
        pattern = rf"{tokenizer}-learned: \d+ tensors of .* as in {tokenizer}-none, all start alike; its own: pos_embed"
        assert re.search(pattern, line), line


def test_arms_that_start_differently_are_found(tmp_path):
    other = {**POS_EMBED, "wide": {**NONE, "model.init_std": 0.2}}
    lines, is_alike = check_lines(ablation(tmp_path, {"pos_embed": other}))
    assert not is_alike
    assert "START DIFFERENTLY" in lines[2] and "START DIFFERENTLY" not in lines[1]


def test_arms_of_different_schedules_are_told(tmp_path):
    spec = ablation(tmp_path, {"pos_embed": POS_EMBED})
    arms = resolved(spec, FLOPS[:2])
    arms[1] = replace(arms[1], config={**arms[1].config, "model": {"lr": 0.1, "lr_scheduler": "wsd"}})
    assert flags(spec, arms) == {"learned": ["lr_scheduler wsd, none has cosine"]}
