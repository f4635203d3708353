"""T2T-ViT in timm's style, `benchmarks/for_timm/t2t_vit.py`: it registers, and equals ours and the official one."""

import importlib

import numpy as np
import pytest
import torch
from test_t2t_goldens import LOGITS, official_state_dict

from vitlab.models import SIZES, create_model

timm = pytest.importorskip("timm")
NAMES = ["t2t_vit_7", "t2t_vit_t_14"]


@pytest.fixture(scope="module")
def module():
    """Register the networks for as long as this file is tested, as other tests go through timm's registry."""
    registry = importlib.import_module("timm.models._registry")
    kept = {name: vars(registry)[name].copy() for name in vars(registry) if name.startswith("_model_")}
    yield importlib.import_module("for_timm.t2t_vit")
    for name, value in kept.items():
        vars(registry)[name].clear()
        vars(registry)[name].update(value)


def of_ours(net, theirs):
    """Return the state dict of ``theirs`` with the weights of ours, whose class token has its position."""
    state = {name.replace("tokenizer.", "patch_embed."): value for name, value in net.state_dict().items()}
    table = net.pos_embed.table()[None]
    state["pos_embed"] = torch.cat([table.new_zeros(1, 1, table.shape[2]), table], dim=1)
    return state


@pytest.mark.slow
def test_all_sizes_are_registered_with_timm_with_as_many_parameters_as_ours(module):
    assert set(timm.list_models("t2t_vit*")) == {n for n in SIZES if n.startswith("t2t_vit") and n[-1].isdigit()}
    for name in NAMES:
        with torch.device("meta"):
            theirs, ours = timm.create_model(name), create_model(name)
        learned = [sum(p.numel() for p in net.parameters() if p.requires_grad) for net in (theirs, ours)]
        assert learned[0] == learned[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_registered_network_equals_ours_with_converted_weights(name, module):
    size = {"img_size": (48, 80), "depth": 2, "num_classes": 5}
    theirs, ours = timm.create_model(name, **size).eval(), create_model(name, **size, init_std=0.1).eval()
    theirs.load_state_dict(of_ours(ours, theirs), strict=True)
    images = torch.randn(2, 3, 48, 80, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ours(images)
        torch.testing.assert_close(theirs(images), expected, atol=2e-5, rtol=0)  # 1.2e-5 was seen with AMX
        assert expected.std() > 0.1
        features = theirs.forward_intermediates(images, indices=[1], intermediates_only=True)
        assert features[0].shape == (2, theirs.embed_dim, 3, 5)
    theirs.train()(images).sum().backward()


def test_the_registered_network_resizes_and_changes_its_head(module):
    theirs = timm.create_model("t2t_vit_7", depth=1, num_classes=0, img_size=64).eval()
    theirs.set_input_size(img_size=(96, 64))
    assert theirs(torch.zeros(1, 3, 96, 64)).shape == (1, 256)
    theirs.reset_classifier(3, "avg")
    assert theirs(torch.zeros(1, 3, 96, 64)).shape == (1, 3)
    dynamic = timm.create_model("t2t_vit_7", depth=1, num_classes=2, img_size=64, dynamic_img_size=True).eval()
    assert dynamic(torch.zeros(1, 3, 96, 80)).shape == (1, 2)


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)])
def test_the_registered_network_loads_official_files_and_gives_their_logits(name, module):
    theirs = timm.create_model(name).eval()
    content = {"state_dict_ema": {f"module.{key}": value for key, value in official_state_dict(name).items()}}
    theirs.load_state_dict(module.checkpoint_filter_fn(content, theirs), strict=True)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        np.testing.assert_allclose(theirs(images), LOGITS[f"{name}/logits"], rtol=0, atol=2e-5)
