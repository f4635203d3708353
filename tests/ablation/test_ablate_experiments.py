"""Every experiment that is shipped can be read, and every arm of it can be parsed."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from tests.ablation.made_up import without_numbers
from vitlab.ablation.file.spec import read_ablation
from vitlab.ablation.inference.verdicts import claim_questions
from vitlab.config.parser import VitlabCLI
from vitlab.errors import UsageError
from vitlab.models.cost import count_macs, count_parameters, count_tokens, macs_of_modules
from vitlab.models.load import network_args
from vitlab.models.vit import VisionTransformer
from vitlab.tokenizers.token_layers import TokenMlp, TokenPerformer

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "experiments").glob("*/*.yaml"))
FILES = [path for path in SHIPPED if "axes" in yaml.load(path.read_text(), yaml.CSafeLoader)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_an_experiment_is_read_and_has_a_question_and_a_protocol(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    ablation = read_ablation(path.relative_to(ROOT))
    assert ablation.claims or "Nothing is measured here" in path.read_text()
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


def network_of(ablation, arm, *sizes, **more):
    """Build the network of an arm, without weights, for an image size, channels and classes."""
    config = yaml.safe_load(Path(ablation.base[0]).read_text())["model"]["init_args"]
    own = {key.removeprefix("model."): value for key, value in arm.overrides.items()}
    with torch.device("meta"):
        return VisionTransformer(*sizes, **network_args({**config, **own, **more}))


def macs_of(ablation, arm, *sizes, depth):
    """Count the multiply-adds of the network of an arm, whose blocks are equal: of one of them, and as often."""
    macs = macs_of_modules(network_of(ablation, arm, *sizes, depth=1))
    return macs[""] + (depth - 1) * macs["blocks.0"]


@pytest.mark.slow
def test_the_tokenizers_of_digits_have_equal_tokens_and_flops(monkeypatch):
    monkeypatch.chdir(ROOT)
    ablation = read_ablation("experiments/tokenizers/digits.yaml")
    found = []
    for arm in ablation.arms:
        net = network_of(ablation, arm, 8, 1, 10)
        found.append((count_tokens(net), count_macs(net)))
    (tokens, macs), *others = found
    assert tokens == 17
    for other in others:
        assert other[0] == tokens
        assert abs(other[1] / macs - 1) <= ablation.match.flops == 0.02


FACTORIALS = {name: f"experiments/t2t_positions/factorial_{name}.yaml" for name in ("fashion_mnist", "cifar10")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "image", "grid_size"), [("fashion_mnist", (28, 1), (7, 7)), ("cifar10", (32, 3), (8, 8))]
)
def test_the_arms_of_a_t2t_factorial_match_in_all_but_their_factors(name, image, grid_size, monkeypatch):
    monkeypatch.chdir(ROOT)
    ablation = read_ablation(FACTORIALS[name])
    facts, built = {}, {}
    for arm in ablation.arms:
        if arm.levels["pos_embed"] != "none":
            continue
        net = network_of(ablation, arm, *image, 10)
        built[arm.name] = net.tokenizer
        macs = macs_of(ablation, arm, *image, 10, depth=len(net.blocks))
        facts[arm.name] = (count_tokens(net), net.tokenizer.grid_size, count_parameters(net), macs)
    assert len(facts) == 14
    assert {(tokens, grid) for tokens, grid, _, _ in facts.values()} == {(math.prod(grid_size), grid_size)}
    for sizes in zip(*(fact[2:] for fact in facts.values()), strict=True):
        assert max(sizes) / min(sizes) - 1 <= ablation.match.params == ablation.match.flops == 0.02
    borders = {"zeros": "zero", "mirror": "reflect", "wrap": "circular"}
    layers = {"mix": TokenPerformer, "alone": TokenMlp}
    factors = [arm for arm in ablation.arms if arm.levels["windows"] in ("shared", "apart") and arm.name in built]
    assert len(factors) == 12
    for arm in factors:
        split, level = built[arm.name], arm.levels
        assert split.padding == borders[level["border"]] and isinstance(split.attention1, layers[level["attention"]])
        windows = [(window, step, way) for (window, step, _), way in zip(split.splits, split.dilations, strict=True)]
        assert windows == {"shared": [(4, 2, 1)] * 2, "apart": [(2, 2, 3)] * 2}[level["windows"]]
        assert not split.fused and {m.p for m in split.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}


@pytest.mark.slow
def test_the_arms_for_imagenet_match_in_all_but_their_factors(monkeypatch):
    monkeypatch.chdir(ROOT)
    ablation = read_ablation("experiments/t2t_positions/imagenet.yaml")
    sizes, reach = [], set()
    for arm in ablation.arms:
        if arm.levels["pos_embed"] == "none":
            net = network_of(ablation, arm, 224, 3, 1000)
            assert net.tokenizer.grid_size == (14, 14)
            sizes.append((count_parameters(net), macs_of(ablation, arm, 224, 3, 1000, depth=len(net.blocks))))
            if arm.levels["windows"] in ("shared", "apart"):
                splits = zip(net.tokenizer.splits, net.tokenizer.dilations, strict=True)
                spans = [(way * (window - 1), step) for (window, step, _), way in splits]
                reach.add(1 + sum(span * 2**i for i, (span, _) in enumerate(spans)))
    assert len(ablation.arms) == 21 and len(sizes) == 10 and reach == {46}
    for values in zip(*sizes, strict=True):
        assert max(values) / min(values) - 1 <= 0.02


@pytest.mark.parametrize("path", FACTORIALS.values(), ids=list(FACTORIALS))
def test_the_main_effects_of_a_factorial_are_means_over_all_its_cells(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    ablation = read_ablation(path)
    questions = claim_questions(without_numbers(ablation))
    assert len(questions) == len(ablation.claims) == 10  # one verdict each
    assert [len(question.terms) for _, _, question in questions] == [2, 2, 24, 16, 16, 24, 8, 8, 4, 2]
