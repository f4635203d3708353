import inspect
from typing import get_args

import pytest
import torch

from vitlab.class_paths import choice_text
from vitlab.cli import models
from vitlab.cli.main import main
from vitlab.config.options import POLICIES
from vitlab.layers.resample import ResizePolicy
from vitlab.models import SIZES, VisionTransformer
from vitlab.models.cost import count_macs, count_parameters, count_tokens
from vitlab.models.old_names import OLD
from vitlab.models.sizes import PUBLISHED


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.rare] * bool(i % 3)) for i, n in enumerate(SIZES)])
def test_the_printed_cost_is_the_counted_one(name):
    with torch.device("meta"):
        model = VisionTransformer(**SIZES[name])
    facts = PUBLISHED[name]
    counted = (count_parameters(model), count_macs(model), count_tokens(model))
    assert counted == (facts.parameters, facts.macs, facts.tokens)


def test_every_size_is_published_and_nothing_else():
    assert list(PUBLISHED) == list(SIZES)


def test_accuracies_measured_by_two_sources_agree():
    for name, facts in PUBLISHED.items():
        if facts.again:
            assert facts.top1 == pytest.approx(facts.again[0], abs=0.05 + 1e-9), name


def test_torchvisions_accuracy_is_the_one_it_ships():
    from torchvision.models import ViT_L_16_Weights

    accuracy = ViT_L_16_Weights.IMAGENET1K_V1.meta["_metrics"]["ImageNet-1K"]["acc@1"]
    assert PUBLISHED["vit_l16"].top1 == round(accuracy, 1)


def test_one_model_shows_its_size_cost_and_arguments(capsys):
    assert main(["models", "t2t_vit_14"]) == 0
    shown = capsys.readouterr().out
    for text in ("21.5 M", "4.78 GMACs", "9.57 GFLOPs", "197", "81.5 %", "2101.11986", "81.50 %, top-5 95.67 %"):
        assert text in shown
    for key, value in SIZES["t2t_vit_14"].items():
        assert f"{key}: {choice_text(value)}" in shown
    assert shown.endswith('in Python   vitlab.create_model("t2t_vit_14")\n')


def test_the_table_has_a_line_for_every_model(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(SIZES)]] == list(SIZES)
    row = next(line for line in lines if line.startswith("t2t_vit_t_24 "))
    assert row.split()[1:6] == ["64.0", "M", "14.97", "197", "82.6"]
    assert next(line for line in lines if line.startswith("vit_h14")).split()[5] == "-"


@pytest.mark.parametrize("pattern", ["t2t_vit_t_*", "vit_t_"])
def test_a_pattern_or_a_part_of_names_lists_those_alone(pattern, capsys):
    assert main(["models", pattern]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["t2t_vit_t_14", "t2t_vit_t_19", "t2t_vit_t_24"]


def test_an_unknown_model_names_the_closest_and_ends_with_2(capsys):
    assert main(["models", "t2t_vit14"]) == 2
    error = capsys.readouterr().err
    assert '"t2t_vit14"' in error and 'did you mean "t2t_vit_14"?' in error and error.count("\n") == 1


def test_the_config_that_trains_a_model_is_found_by_its_network(here, capsys):
    folder = here / "configs" / "imagenet"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "model:\n  init_args: {tokenizer: t2t, t2t_attn: transformer, patch_size: 8, embed_dim: 448, depth: 19,"
        " num_heads: 7, mlp_ratio: 3}\n"
    )
    (folder / "other.yaml").write_text("model:\n  init_args: {embed_dim: 448, depth: 19, num_heads: 7, mlp_ratio: 3}\n")
    (folder / "broken.yaml").write_text("a: [")
    shipped = ["configs/imagenet/t2t_vit_t_19.yaml"]
    assert models._trainers("t2t_vit_t_19", models._configs()) == ["configs/imagenet/mine.yaml", *shipped]
    assert main(["models", "t2t_vit_t_19"]) == 0
    assert "configs/imagenet/mine.yaml" in capsys.readouterr().out


def test_the_shipped_configs_train_the_models_they_are_named_after(here):
    configs = models._configs()
    for path in configs:
        name = path.split("/")[-1].removesuffix(".yaml")
        if name in SIZES:
            assert path in models._trainers(name, configs)
    assert not models._trainers("vit5_s16", configs)  # whose norms are others


def test_what_commands_know_without_torch_is_what_the_network_has():
    defaults = {name: old.default for name, old in OLD.items()}
    defaults |= {name: p.default for name, p in inspect.signature(VisionTransformer).parameters.items()}
    assert {name: defaults[name] for name in models._DEFAULTS} == models._DEFAULTS
    assert get_args(ResizePolicy) == POLICIES
