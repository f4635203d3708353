import numpy as np
import pytest
import torch
from figure_faults import fits_a_column
from PIL import Image
from small_nets import small_net

from vitlab.analysis.head_attention import analyze_attention, analyze_distance, analyze_heads
from vitlab.analysis.outcomes.confusion import analyze_confusion
from vitlab.analysis.scramble import analyze_scramble
from vitlab.analysis.subject import Subject
from vitlab.analysis.views.pca import analyze_pca, pca_colors
from vitlab.analysis.views.reconstruction import analyze_reconstruction
from vitlab.analysis.views.token_layers import analyze_splits, split_features, token_layer_maps
from vitlab.data.known import Digits
from vitlab.data.loading.streams import MASK, shuffled_indices, stream
from vitlab.errors import UsageError
from vitlab.models.walk import attention_maps
from vitlab.pretraining import MAE
from vitlab.tokenizers.patch import cut_patches

T2T = {"tokenizer": "t2t", "t2t_kernels": [3, 3], "t2t_dim": 8}


def test_colors_are_the_principal_components_whatever_the_rotation():
    places = torch.linspace(-1, 1, 32).repeat(2, 1)
    tokens = torch.stack([4 * places, places**2, *[torch.zeros_like(places)] * 4], dim=2)
    colors, shares = pca_colors(tokens)
    assert shares[0] > 0.9 and float(shares.sum()) == pytest.approx(1)
    assert torch.corrcoef(torch.stack([colors[0, :, 0], places[0]]))[0, 1] > 0.99
    rotation = torch.linalg.qr(torch.randn(6, 6))[0]
    turned, _ = pca_colors(tokens @ rotation + 3)
    both = (turned[..., 0] - colors[..., 0]).abs().max(), (1 - turned[..., 0] - colors[..., 0]).abs().max()
    assert min(both) < 1e-3  # a sign is arbitrary


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_constant_features_have_one_color(small_subject, threads):
    torch.set_num_threads(threads)
    subject = small_subject(pos_embed="none")
    with torch.no_grad():
        subject.net.tokenizer.proj.weight.zero_()
    table = analyze_pca(subject).table
    assert (table.groupby("layer")[["red", "green", "blue"]].nunique() == 1).all(axis=None)


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "images"), [(64, 1000), (2, 1000), (64, 9)])
def test_few_and_many_pictures_begin_with_the_same_ones(batch_size, images):
    data = Digits(batch_size=batch_size)
    data.build("val")
    data.splits["val"] = data.splits["val"].take(np.arange(min(images, len(data.splits["val"]))))
    subject = Subject(small_net(), data, num_images=40)
    most = subject.shown(40)
    assert len(most) == min(images, 40)
    for count in (1, 2, 4, 8, 12, 33):
        assert torch.equal(subject.shown(count), most[:count])
    measured = torch.cat([images for images, _ in subject.batches()])
    assert all((measured == image).flatten(1).all(dim=1).any() for image in most)
    few = analyze_attention(subject).table.query("map == 'head 1' and image == 0")["weight"]
    one = analyze_heads(subject).table.query("layer == 1 and head == 1")["weight"]
    assert few.to_numpy() == pytest.approx(one.to_numpy(), abs=1e-6)


def test_the_overview_shows_each_head_of_each_layer(small_subject):
    subject = small_subject(query=(1, 2))
    table = analyze_heads(subject).table
    assert len(table) == 2 * 2 * 16
    expected = attention_maps(subject.net, subject.shown(1), 1)[0, 1, 1 + 1 * 4 + 2, 1:]
    found = table.query("layer == 1 and head == 1")["weight"].to_numpy()
    torch.testing.assert_close(torch.tensor(found).float(), expected)


@pytest.mark.parametrize("t2t_attn", ["performer", "transformer", "none"])
def test_a_token_layers_map_times_its_values_is_what_it_adds(t2t_attn):
    tokenizer = small_net(**T2T, t2t_attn=t2t_attn).tokenizer
    images = torch.randn(2, 1, 8, 8)
    (windows, left), (_, tokens) = split_features(tokenizer, images)
    torch.testing.assert_close(tokens.flatten(2).transpose(1, 2), tokenizer(images), atol=1e-5, rtol=1e-5)
    layer, (maps,) = tokenizer.attention1, token_layer_maps(tokenizer, images)
    torch.testing.assert_close(maps.sum(dim=-1), torch.ones(2, 16))
    if t2t_attn == "performer":
        k, q, v = layer.kqv(layer.norm1(windows)).chunk(3, dim=-1)
        torch.testing.assert_close(maps @ v, layer.attend(q, k, v), atol=1e-5, rtol=1e-4)
    if t2t_attn == "none":  # no token reads another
        assert torch.equal(maps, torch.eye(16).expand(2, -1, -1))
    assert left.shape == (2, 8, 4, 4)


def test_splits_show_the_channels_that_vary_most(small_subject):
    table = analyze_splits(small_subject(**T2T)).table
    assert table.groupby("split")["channel"].nunique().tolist() == [3, 3]
    with pytest.raises(UsageError, match="splits needs T2T's token layers"):
        analyze_splits(small_subject())


def test_a_custom_network_needs_only_a_function_that_prepares_pictures():
    def prepare(image):
        return (torch.tensor(list(image.resize((8, 8)).tobytes())).view(1, 8, 8) / 255 - 0.25) / 0.5

    pictures = [Image.new("RGB", (20, 10), (shade, shade, shade)) for shade in (10, 200, 90)]
    subject = Subject(small_net(), prepare, pictures=pictures, name="mine")
    assert subject.data.statistics() == ((0.25,), (0.5,))
    assert subject.pixels(subject.shown())[1].mean().item() == pytest.approx(200 / 255, abs=1e-3)
    assert set(analyze_attention(subject).table["image"]) == {0, 1, 2}
    assert len(analyze_distance(subject).table) == 4
    assert "acc1" not in analyze_scramble(subject).table  # predictions are compared
    with pytest.raises(UsageError, match="the images for mine have no classes"):
        analyze_confusion(subject)
    with pytest.raises(UsageError, match="mine has no data, and this needs images of a train split"):
        subject.batches("train")
    with pytest.raises(UsageError, match="this needs images"):
        Subject(small_net(), prepare, name="mine").shown()


@pytest.mark.slow
@pytest.mark.parametrize("norm_pix", [False, True])
def test_reconstruction_is_the_loss_and_a_network_that_reads_nothing_equals_its_null(digits, norm_pix):
    torch.manual_seed(0)
    light = {"decoder_dim": 8, "decoder_depth": 1, "decoder_heads": 2}
    network = {
        "img_size": 8,
        "in_chans": 1,
        "patch_size": 2,
        "embed_dim": 16,
        "depth": 1,
        "num_heads": 2,
        "init_std": 0.3,
    }
    task = MAE(norm_pix=norm_pix, **light, **network).eval()
    subject = Subject(task.net, digits, num_images=32, task=task)
    images, _ = subject.labeled()
    order = torch.from_numpy(shuffled_indices(stream(np.arange(32), MASK), (4, 4)))
    finding = analyze_reconstruction(subject)
    error = finding.table.set_index("seen")["error"]
    if not norm_pix:
        fits_a_column(finding.figure)
        assert error["itself"] == pytest.approx(task.pixel_loss(images, order).item(), rel=1e-5)
    patches, hidden = cut_patches(images, (4, 4)).flatten(2), task.fill(images, order)[1]
    known = patches.mean(dim=2, keepdim=True) if norm_pix else patches.mean(dim=0)  # of the patch, or of the pixel
    wanted = (patches - known).square().mean(dim=2)[hidden].mean().item()
    assert error["nothing"] == pytest.approx(wanted, rel=1e-5)
    assert abs(error["itself"] - error["another picture"]) > 1e-4
    with torch.no_grad():
        task.decoder.embed.weight.zero_()
        task.decoder.pred.weight.zero_(), task.decoder.pred.bias.zero_()
    error = analyze_reconstruction(subject).table.set_index("seen")["error"]
    assert error["itself"] == pytest.approx(error["another picture"])
    wanted = error["nothing"] if norm_pix else images.square().view(-1)  # zeros are each patch's mean, or the mean's
    assert error["itself"] == pytest.approx(float(wanted.mean()), rel=1e-5 if norm_pix else 0.2)


def small_autoencoder():
    torch.manual_seed(0)
    light = {"decoder_dim": 8, "decoder_depth": 0, "decoder_heads": 2, "depth": 1, "embed_dim": 16, "num_heads": 2}
    return MAE(img_size=8, in_chans=1, patch_size=2, **light).eval()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_what_is_filled_in_from_another_picture_is_never_from_itself(digits, monkeypatch, count):
    task, asked = small_autoencoder(), []
    fill = task.fill

    def watched(images, order, seen=None):
        asked.append((images, seen))
        return fill(images, order, seen)

    monkeypatch.setattr(task, "fill", watched)
    subject = Subject(task.net, digits, num_images=count, task=task)
    finding = analyze_reconstruction(subject)
    assert len(finding.figure.axes) == 4 * min(count, 6) and f"{count} images" in finding.note
    others = [(images, seen) for images, seen in asked if seen is not None]
    assert [len(seen) for _, seen in others] == [count, min(count, 6)]
    assert not any(torch.equal(a, b) for images, seen in others for a, b in zip(images, seen, strict=True))


def test_reconstruction_needs_another_picture(digits):
    task = small_autoencoder()
    with pytest.raises(UsageError, match=r"needs two images that differ .*, got 1"):
        analyze_reconstruction(Subject(task.net, digits, num_images=1, task=task))
    same = torch.ones(3, 1, 8, 8)
    with pytest.raises(UsageError, match=r"needs two images that differ .*, got 3"):
        analyze_reconstruction(Subject(task.net, lambda image: same[0], pictures=same, task=task))


def test_reconstruction_refuses_a_network_that_is_not_an_autoencoder(small_subject):
    with pytest.raises(UsageError, match="reconstruction needs a checkpoint of a masked autoencoder"):
        analyze_reconstruction(small_subject())
