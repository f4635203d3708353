"""Every experiment that is shipped can be read, and every arm of it can be parsed."""

from pathlib import Path

import pytest
import torch
import yaml

from vitlab.ablation.file.spec import read_ablation
from vitlab.config.parser import VitlabCLI
from vitlab.errors import UsageError
from vitlab.models.cost import count_macs, count_tokens
from vitlab.models.load import network_args
from vitlab.models.vit import VisionTransformer

ROOT = Path(__file__).parents[2]
FILES = [p for p in sorted((ROOT / "experiments").glob("*/*.yaml")) if "axes" in yaml.safe_load(p.read_text())]


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_an_experiment_is_read_and_has_a_question_and_a_protocol(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    ablation = read_ablation(path.relative_to(ROOT))
    assert ablation.claims
    text = path.with_name("README.md").read_text()
    assert path.name in text and "## Protocol" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.rare] * (p.stem != "probe"), id=f"{p.parent.name}/{p.stem}") for p in FILES],
)
def test_every_arm_of_an_experiment_can_be_built(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    for arm in read_ablation(path.relative_to(ROOT)).arms:
        ablation = read_ablation(path.relative_to(ROOT))
        given = tmp_path / "overrides.yaml"
        given.write_text(yaml.safe_dump({**arm.overrides, "trainer.logger": False, "trainer.accelerator": "cpu"}))
        args = [w for p in (*ablation.base, *arm.configs, str(given)) for w in ("--config", p)]
        try:
            VitlabCLI(args)
        except UsageError as error:
            assert "data." in str(error), error  # the images are not on this machine


def test_the_tokenizers_of_digits_have_equal_tokens_and_flops(monkeypatch):
    monkeypatch.chdir(ROOT)
    ablation = read_ablation("experiments/tokenizers/digits.yaml")
    config = yaml.safe_load(Path(ablation.base[0]).read_text())["model"]["init_args"]
    found = []
    for arm in ablation.arms:
        values = {**config, **{key.removeprefix("model."): value for key, value in arm.overrides.items()}}
        with torch.device("meta"):
            net = VisionTransformer(8, 1, 10, **network_args(values))
        found.append((count_tokens(net), count_macs(net)))
    (tokens, macs), *others = found
    assert tokens == 17
    for other in others:
        assert other[0] == tokens
        assert abs(other[1] / macs - 1) <= ablation.match.flops == 0.02
