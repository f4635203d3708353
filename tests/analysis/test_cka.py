from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_nets import SMALL
from torch import nn

from vitlab.analysis.cka import analyze_cka, cka, cka_interval, layer_kernels, linear_kernel, unbiased_hsic
from vitlab.analysis.subject import Subject
from vitlab.data.known import Digits
from vitlab.errors import UsageError
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import prefix_counts


def test_a_model_agrees_with_itself(small_subject):
    table = analyze_cka(small_subject()).table
    same = table[table["layer"] == table["other_layer"]]["cka"]
    np.testing.assert_allclose(same, 1, atol=1e-6)
    assert (table["cka"] < 1 + 1e-6).all()


def test_rotations_shifts_and_scales_do_not_count():
    x = torch.randn(12, 5)
    rotation = torch.linalg.qr(torch.randn(5, 5))[0]
    assert cka(linear_kernel(x), linear_kernel(3 * x @ rotation + 7)) == pytest.approx(1, abs=1e-5)


def test_unrelated_features_have_none_however_many_there_are():
    values = [cka(linear_kernel(torch.randn(40, 500)), linear_kernel(torch.randn(40, 500))) for _ in range(10)]
    assert abs(np.mean(values)) < 0.03  # the biased estimate would be above 0.9


def test_hsic_is_the_formula_of_song_et_al():
    k, m = (linear_kernel(torch.randn(7, 3)).numpy() for _ in range(2))
    np.fill_diagonal(k, 0)
    np.fill_diagonal(m, 0)
    n, ones = 7, np.ones(7)
    expected = np.trace(k @ m) + ones @ k @ ones * (ones @ m @ ones) / ((n - 1) * (n - 2))
    expected = (expected - 2 / (n - 2) * ones @ k @ m @ ones) / (n * (n - 3))
    assert unbiased_hsic(torch.tensor(k), torch.tensor(m)).item() == pytest.approx(expected)


def test_what_pairs_of_images_add_to_the_interval_is_known(monkeypatch):
    """Of 16 images there are 120 pairs, and unrelated features have a variance of 1 / 120."""
    monkeypatch.setattr("vitlab.analysis.cka.jackknife", lambda k, m: (2 / 120, 8))  # all of it is of pairs
    assert cka_interval(0.0, torch.eye(16), torch.eye(16)) == pytest.approx((0, 1.96 / 120**0.5), abs=1e-4)
    monkeypatch.setattr("vitlab.analysis.cka.jackknife", lambda k, m: (0.03, 8))  # 0.02318 beside 2 * 0.64^2 / 120
    half = (1.96**2 * 0.64**2 / 120 + 2.3646**2 * (0.03 - 2 * 0.64**2 / 120)) ** 0.5
    assert cka_interval(0.6, torch.eye(16), torch.eye(16)) == pytest.approx((0.6 - half, min(0.6 + half, 1)), abs=1e-4)


def test_comparing_two_runs_notes_the_noise_floor_of_seeds(small_subject):
    subject = small_subject()
    subject.other = small_subject(pos_embed="none")
    subject.other.name = "other"
    finding = analyze_cka(subject)
    assert set(finding.table["against"]) == {"itself", "other"}
    assert "the noise floor if only the seed differs" in finding.note


def test_too_few_images_are_refused(small_subject):
    with pytest.raises(ValueError, match="at least 10, got 3: set --num_images"):
        analyze_cka(small_subject(num_images=3))
    four = small_subject(num_images=100)
    four.batches = lambda limit: [(torch.randn(4, 1, 8, 8), torch.zeros(4))]
    with pytest.raises(ValueError, match="at least 10, got 4: the data has no more"):
        analyze_cka(four)


def trained_net(digits, seed, steps=150):
    """A network that classifies some digits, and the untrained one that it was."""
    torch.manual_seed(seed)
    net = VisionTransformer(**{**SMALL, "embed_dim": 32}).eval()
    images, labels = Subject(net, digits, num_images=1000).labeled()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        torch.nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    untrained = VisionTransformer(**{**SMALL, "embed_dim": 32}).eval()
    untrained.load_state_dict(before)
    return net, untrained


@pytest.mark.slow
@pytest.mark.rare
def test_twins_agree_and_networks_that_learned_different_things_do_not(digits):
    """Cell by cell, a network and what it was before its training seem alike: both are as bright as the images."""
    (net, untrained), (other, _) = trained_net(digits, 0), trained_net(digits, 1)

    def last(which, one, two):
        kernels = [
            layer_kernels(each, Subject(each, digits, num_images=256).batches(), which)[-1] for each in (one, two)
        ]
        value = cka(*kernels)
        return value, *cka_interval(value, *kernels)

    assert last("mean", net, net) == pytest.approx((1, 1, 1), abs=1e-6)
    for two, most in ((untrained, 0.6), (other, 0.8)):
        value, low, high = last("mean", net, two)
        assert low < value < high < most
    assert last("flattened", net, untrained)[0] > last("mean", net, untrained)[0] + 0.3


def test_tokens_are_chosen_and_the_note_says_which(small_subject):
    subject = small_subject()
    notes = {}
    for subject.tokens in ("mean", "class", "flattened"):
        finding = analyze_cka(subject)
        notes[subject.tokens] = finding.note
        last = finding.table.query("layer == 2 and other_layer == 2")["cka"]
        assert last.item() == pytest.approx(1)
    assert "mean of their patch tokens" in notes["mean"] and "cell by cell" in notes["flattened"]
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))  # which has no patches
    assert "16 validation images, mean over their places, " in analyze_cka(Subject(mlp, Digits(), num_images=16)).note
    bare = small_subject(class_token=False, global_pool="avg")
    bare.tokens = "class"
    with pytest.raises(UsageError, match="have one in each layer, and model does not; use --tokens mean"):
        analyze_cka(bare)
    with pytest.raises(ValueError, match="`--tokens` must be mean, class, flattened, got all"):
        Subject(bare.net, bare.data, tokens="all")


class Hidden(nn.Module):
    """A block whose class token reads the patches by a product, which no one sees as attention."""

    def __init__(self, seed):
        super().__init__()
        self.register_buffer("weight", torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)))
        self.act = nn.Sequential(nn.Tanh())

    def forward(self, x):
        token, patches = x[:, :1], x[:, 1:]
        read = 50 * (patches.mean(dim=1, keepdim=True) @ self.weight).sin()
        return torch.cat([token + read, patches + self.act(patches)], dim=1)


class Own(nn.Module):
    """A convolution, a class token in front of the patches, ``blocks``, and a head that reads it."""

    def __init__(self, blocks, head):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.cls_token = nn.Conv2d(1, 16, 2, stride=2), nn.Parameter(torch.randn(1, 1, 16))
        self.blocks, self.head = blocks, head

    def forward(self, images):
        x = self.stem(images).flatten(2).transpose(1, 2)
        return self.head(self.blocks(torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1))[:, 0])


def test_patches_of_networks_without_an_equivalent_are_compared_without_their_class_token(digits):
    one, other = (
        Subject(Own(nn.Sequential(Hidden(seed), Hidden(seed)), nn.Linear(16, 10)), digits, num_images=16)
        for seed in (1, 2)
    )
    assert one.net.num_prefix_tokens == 1 and one.net.cls_token and not one.net.attention_heads
    for which, last in (("mean", pytest.approx(1)), ("class", pytest.approx(0.9, abs=0.06))):
        kernels = [layer_kernels(each.net, each.batches(), which)[-1] for each in (one, other)]
        assert cka(*kernels) == last


def test_layers_of_one_network_have_prefix_tokens_of_their_own(digits):
    layer, head = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    subject = Subject(net := Own(layer, head.append(nn.Linear(16, 10))), digits, name="own", num_images=16)
    images, _ = subject.labeled()
    assert prefix_counts(subject.net) == [0, 0, 1, 1, 0]  # image, convolution, two linear layers, one after the token
    kernels = layer_kernels(subject.net, subject.batches())
    with torch.no_grad():
        torch.testing.assert_close(kernels[1], linear_kernel(net.stem(images).mean(dim=(2, 3))))
    assert all(kernel.isfinite().all() and kernel.any() for kernel in kernels)
    subject.tokens = "class"
    with pytest.raises(UsageError, match="one in each layer, and own does not"):
        analyze_cka(subject)


def test_hsic_is_that_of_a_published_implementation():
    """torch-cka 0.21 (extra `peers`) takes kernels whose diagonal is 0."""
    published = pytest.importorskip("torch_cka.cka").CKA
    k, m = (linear_kernel(torch.randn(20, 6)) for _ in range(2))
    theirs = [each - each.diag().diag() for each in (k, m)]
    ours = unbiased_hsic(k, m).item()
    own = SimpleNamespace(device="cpu")
    assert published._HSIC(own, *(each.float() for each in theirs)) == pytest.approx(ours, rel=1e-3, abs=1e-5)


def test_another_network_gets_images_normalized_as_it_was_trained(small_subject):
    net, images = small_subject().net, {"num_images": 24}
    subject = Subject(net, Digits(mean=[0.9], std=[0.05]), **images)
    subject.other = Subject(net, Digits(), name="other", **images)
    table = analyze_cka(subject).table
    kernels = layer_kernels(net, subject.batches()), layer_kernels(net, subject.other.batches())
    found = table[table["against"] == "other"]["cka"]
    assert found.tolist() == pytest.approx([cka(k, m) for k in kernels[0] for m in kernels[1]], abs=1e-4)
    assert found.iloc[-1] < 0.99  # the last layers of one network, on images of different normalization
