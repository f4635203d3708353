"""The official implementation's logits, for weights and images that anyone can make again."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlab.layers.pos_embed.added import SinCos1d
from vitlab.models import SIZES, VisionTransformer
from vitlab.models.load import load_weights
from vitlab.models.weights_file import WeightsFile

GOLDENS = Path(__file__).parents[1] / "goldens"
KEYS = json.loads((GOLDENS / "t2t_keys.json").read_text())
LOGITS = np.load(GOLDENS / "t2t_dev.npz")
NAMES = ["t2t_vit_7", "t2t_vit_t_14"]
VARIANT_KEYS = json.loads((GOLDENS / "t2t_variants_keys.json").read_text())
VARIANT_LOGITS = np.load(GOLDENS / "t2t_variants_dev.npz")


def official_state_dict(size):
    return {name: official_value(name, shape) for name, shape in (KEYS | VARIANT_KEYS)[size].items()}


def official_value(name, shape):
    if name == "pos_embed":
        table = SinCos1d((1, shape[1] - 1), shape[2]).table()
        return torch.cat([torch.tensor([0.0, 1.0]).repeat(shape[2] // 2)[None], table])[None]
    r = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"dev:{name}".encode())))
    if name.endswith(".w"):
        return 0.7 * r
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.06 * r
    return 0.02 * r if "kqv" in name else 0.06 * r


@pytest.fixture(scope="module")
def images():
    return torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
@pytest.mark.parametrize("strides", [None, (4, 2, 2)])
def test_logits_and_tokens_are_the_official_ones(size, strides, images):
    model = VisionTransformer(**SIZES[size], t2t_strides=strides).eval()
    load_weights(model, WeightsFile(official_state_dict(size)))
    with torch.no_grad():
        tokens = model.tokenizer(images)[:, ::17, ::13]
        logits = model(images)
    np.testing.assert_allclose(tokens, LOGITS[f"{size}/tokens_17_13"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits, LOGITS[f"{size}/logits"], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", list(VARIANT_KEYS))
def test_the_authors_other_backbones_give_their_logits(size, images):
    model = VisionTransformer(**SIZES[size]).eval()
    load_weights(model, WeightsFile(official_state_dict(size)))
    with torch.no_grad():
        np.testing.assert_allclose(model(images), VARIANT_LOGITS[f"{size}/logits"], rtol=0, atol=2e-5)
