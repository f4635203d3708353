"""Networks that are no Vision Transformer of vitlab: every analysis takes them or refuses in one line."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from small_nets import small_net, train
from torch import nn

from vitlab.analysis import ANALYSES
from vitlab.analysis.attribution.maps import METHODS, methods_of, relevant_maps
from vitlab.analysis.subject import Subject
from vitlab.cli.main import main
from vitlab.data.known import Digits
from vitlab.errors import UsageError
from vitlab.look.page import render
from vitlab.models.foreign import AnyNetwork, eager_attention, gradients_of
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import all_attention_maps, as_asked, block_tokens, pooled_features


def timms(name, **arguments):
    import timm

    return timm.create_model(name, num_classes=10, in_chans=1, **arguments)


def hugging_face(num_channels=1, **arguments):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=10, num_channels=num_channels, **sizes)
    return transformers.ViTForImageClassification(config)


NETWORKS = {  # what builds it, the side of its images, how many analyses it takes at least
    "resnet": (lambda: timms("resnet10t", channels=(8, 8, 16, 16), stem_width=8), 32, 16),
    "convnext": (lambda: timms("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 8, 16, 16)), 32, 16),
    "swin": (
        lambda: timms("swin_tiny_patch4_window7_224", img_size=28, window_size=7, embed_dim=8, depths=(1, 2),
                      num_heads=(2, 2)), 28, 15),
    "cait": (lambda: timms("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=16, num_heads=2, depth=2), 32, 15),
    "deit": (
        lambda: timms("deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2),
        32, 17),
}  # fmt: skip
ASK_FOR = {"segmentation": "--masks DIR", "labels": "`vitlab cv`"}  # which no network has by itself


def subject_of(name):
    make, side, _ = NETWORKS[name]
    torch.manual_seed(0)
    return Subject(make(), Digits(img_size=side, batch_size=32), name=name, num_images=12)


@pytest.mark.rare
@pytest.mark.parametrize("name", NETWORKS)
def test_fourteen_analyses_work_for_a_foreign_network_and_the_others_refuse_it_in_one_line(name, monkeypatch):
    monkeypatch.setattr("vitlab.analysis.attribution.sanity.DRAWS", 2)  # five take half of the time of this test
    subject, done = subject_of(name), []
    for analysis, own in ANALYSES.items():
        try:
            finding = own.measure(subject)
        except UsageError as error:
            assert "\n" not in str(error) and ASK_FOR.get(analysis, name) in str(error)
            continue
        assert len(finding.table) and finding.note
        done.append(analysis)
    assert len(done) >= NETWORKS[name][2], done
    page = render("page", {}, [Subject(small_net(), Digits(), name="vit"), subject], pictures=2)
    vit, other = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert vit["shape"]["depth"] == 2 and len(other["pictures"]) == 2
    assert {"Grad-CAM", "SmoothGrad", "GradientSHAP", "occlusion"} <= set(other["pictures"][0]["maps"])
    assert ("cells" in other["pictures"][0]) == (name == "deit") == (other["shape"]["depth"] > 0)
    assert page.count(' class="vl"') == 4  # the network of vitlab opens its block and its head


def test_features_are_what_the_head_reads_and_tokens_what_the_layers_return():
    import timm

    torch.manual_seed(0)
    net = timm.create_model("resnet10t", channels=(8, 8, 16, 16), stem_width=8, num_classes=7).eval()
    asked, images = AnyNetwork(net, "resnet", (64, 64), 3), torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        maps = net.forward_features(images)
        torch.testing.assert_close(pooled_features(asked, images), net.forward_head(maps, pre_logits=True))
        torch.testing.assert_close(block_tokens(asked, images)[-1], maps.flatten(2).transpose(1, 2))
        torch.testing.assert_close(asked(images), net(images))
    assert [layer.name for layer in asked.layers] == ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]
    assert [layer.grid for layer in asked.layers] == [(16, 16), (8, 8), (4, 4), (2, 2)]
    assert block_tokens(asked, images)[1].shape == (3, 14 * 14, 8)  # 16 x 16, averaged


@pytest.mark.slow
@pytest.mark.parametrize("of", ["torch", "timm", "hugging face"])
def test_attention_of_other_libraries_follows_from_their_queries_and_keys(of):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32)
    if of == "torch":
        from torchvision.models import VisionTransformer

        net = VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=10).eval()
        layer = net.encoder.layers[0]
        weight, bias = layer.self_attention.in_proj_weight, layer.self_attention.in_proj_bias
        where, norm = layer, layer.ln_1
    elif of == "timm":
        import timm

        net = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2,
                                num_heads=2, num_classes=10).eval()  # fmt: skip
        where, norm = net.blocks[0], net.blocks[0].norm1
        weight, bias = where.attn.qkv.weight, where.attn.qkv.bias
    else:
        net = hugging_face(num_channels=3).eval()
        where = net.vit.layers[0] if hasattr(net.vit, "layers") else net.vit.encoder.layer[0]
        norm, own = where.layernorm_before, dict(where.named_modules())
        parts = [next(m for k, m in own.items() if k.endswith(end)) for end in ("q_proj", "k_proj")]
        weight, bias = torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])
    caught = []
    hook = where.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    with torch.no_grad():
        net(images)
        hook.remove()
        q, k = (norm(caught[0]) @ weight.T + bias)[..., :48].unflatten(2, (2, 2, 12)).permute(2, 0, 3, 1, 4)
        expected = (q @ k.transpose(2, 3) / 12**0.5).softmax(dim=3)
        asked = AnyNetwork(net, of, (32, 32), 3)
        before = asked(images)
        found = list(all_attention_maps(asked, images))
        torch.testing.assert_close(asked(images), before)  # as before
    assert len(found) == 2 and asked.num_prefix_tokens == (2 if of == "timm" else 1)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-4)


def test_registers_of_another_library_are_not_taken_for_a_class_token():
    import timm

    words = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 10}
    words |= {"reg_tokens": 2, "global_pool": "avg"}
    for class_token, prefix in ((False, 2), (True, 3)):
        net = timm.create_model("vit_tiny_patch16_224", **words, class_token=class_token).eval()
        asked = AnyNetwork(net, "registers", (32, 32), 3)
        assert (asked.num_prefix_tokens, asked.cls_token is not None) == (prefix, class_token)


def torchvisions():
    from torchvision.models import VisionTransformer

    net = VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=10).eval()
    nn.init.normal_(net.heads.head.weight)  # zeros as it is built
    return net


class Mine(nn.Module):
    """A ViT as one builds it of PyTorch's layers, whose head reads the mean of the patches."""

    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 24, 8, stride=8), nn.Linear(24, 10)
        layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, images):
        return self.head(self.encoder(self.patch(images).flatten(2).transpose(1, 2)).mean(dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("make", [torchvisions, lambda: hugging_face(3).eval()], ids=["torchvision", "hugging face"])
def test_a_vit_of_another_library_has_all_ten_maps_converted_or_not(make):
    torch.manual_seed(0)
    images, classes, theirs = torch.randn(2, 3, 32, 32), torch.tensor([1, 2]), make()
    ours, asked = as_asked(theirs, "theirs", (32, 32), 3), AnyNetwork(theirs, "theirs", (32, 32), 3)
    assert isinstance(ours, VisionTransformer) and list(methods_of(ours)) == list(METHODS)
    assert list(methods_of(asked)) == list(METHODS) and asked.reads == "token"
    for name, method in methods_of(asked).items():
        expected = METHODS[name](ours, images, classes)
        most = expected.abs().max()
        assert most > 1e-5
        torch.testing.assert_close(method(asked, images, classes) / most, expected / most, rtol=0, atol=1e-3, msg=name)


def test_lrp_needs_a_rule_for_every_operation_of_a_network():
    torch.manual_seed(0)
    asked, images = as_asked(Mine().eval(), "mine", (32, 32), 3), torch.randn(2, 3, 32, 32)
    assert "LRP" in methods_of(asked)
    for maps in relevant_maps(asked, images, torch.tensor([3, 4])):
        assert maps.abs().sum() > 0 and (maps.sum(dim=(1, 2, 3)) <= 0.5 + 1e-5).all()  # values have the other half
    assert all(parameter.requires_grad for parameter in asked.parameters())
    waves = nn.Sequential(Mine(), Waves()).eval()
    found = methods_of(AnyNetwork(waves, "waves", (32, 32), 3))
    assert "LRP" not in found and "gradient x attention" in found


class Waves(nn.Module):
    """An operation without a rule."""

    def forward(self, x):
        return x.sin()


def test_maps_of_a_custom_vit_belong_to_what_its_head_reads():
    torch.manual_seed(0)
    asked, images = as_asked(Mine().eval(), "mine", (32, 32), 3), torch.randn(1, 3, 32, 32)
    assert isinstance(asked, AnyNetwork) and asked.reads == "patches"
    found = METHODS["gradient x attention"](asked, images, torch.tensor([3]))
    scores, maps = asked.graded_attention(images.requires_grad_())
    slopes = gradients_of(scores[0, 3], maps)
    step = torch.randn_like(maps[1]) * 1e-3  # what the last layer applies changes the score as its gradient says
    value = asked.net.encoder.layers[1].self_attn
    with torch.no_grad(), eager_attention(asked.net) as (caught, _):
        entry = []
        hook = value.register_forward_pre_hook(lambda module, args: entry.append(args[0]))
        asked(images)
        hook.remove()
        v = (entry[0] @ value.in_proj_weight[48:].T + value.in_proj_bias[48:]).unflatten(2, (2, 12)).transpose(1, 2)
        moved = value.out_proj(((caught[1] + step) @ v).transpose(1, 2).flatten(2))
        handle = value.register_forward_hook(lambda module, args, output: (moved, None))
        after = asked(images)
        handle.remove()
    difference = (after[0, 3] - scores[0, 3]).item()
    assert difference == pytest.approx((slopes[1] * step).sum().item(), rel=0.05, abs=1e-6)
    first, last = ((m * g).clamp(min=0).mean(dim=1) for m, g in zip(maps, slopes, strict=True))
    torch.testing.assert_close(found, (first + last + last @ first).mean(dim=1) + 1 / 16)


class Reads(nn.Module):
    """A ViT whose scores are those of one token, or the mean of several tokens' scores."""

    def __init__(self, rows, last=None):
        super().__init__()
        self.patch, self.rows, self.last = nn.Conv2d(3, 8, 8, stride=8), rows, last or nn.Identity()
        self.prefix = nn.Parameter(torch.randn(1, 2, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 4)

    def forward(self, images):
        x = torch.cat([self.prefix.expand(len(images), -1, -1), self.patch(images).flatten(2).transpose(1, 2)], dim=1)
        return self.last(self.head(self.encoder(x)[:, self.rows]).mean(dim=1))


@pytest.mark.parametrize(
    ("rows", "reads"),
    [([0], "token"), ([0, 1], None), ([1], None), (range(2, 18), "patches"), ([0, *range(2, 18)], None)],
    ids=["class", "class and distillation", "second", "patches", "class and patches"],
)
def test_maps_of_attention_are_left_out_unless_the_class_token_or_the_patches_are_all_that_is_read(rows, reads):
    for last in (None, nn.Softmax(dim=1)):  # probabilities, whose sum depends on nothing
        torch.manual_seed(1)
        asked = AnyNetwork(Reads([*rows], last), "mine", (32, 32), 3)
        assert (asked.num_prefix_tokens, asked.reads) == (2, reads)
        assert ("rollout" in methods_of(asked)) == ("gradient x attention" in methods_of(asked)) == (reads is not None)


class Partly(nn.Module):
    """A block whose attention shows its weights, or not."""

    def __init__(self, shows):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True) if shows else None

    def forward(self, x):
        y = self.norm(x)
        return x + (nn.functional.scaled_dot_product_attention(y, y, y) if self.attn is None else self.attn(y, y, y)[0])


def with_blocks(*stages):
    stem, stages = (nn.Conv2d(1, 16, 2, stride=2), nn.Flatten(2), Rows()), [nn.Sequential(*blocks) for blocks in stages]
    return nn.Sequential(*stem, *stages, Rows(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 10))


class Rows(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def test_attention_is_shown_of_all_blocks_of_a_class_or_of_none(digits):
    subject = Subject(with_blocks([Partly(True), Partly(False), Partly(False)]), digits, name="mix", query=(0, 0))
    for name in ("attention", "heads", "rollout"):
        with pytest.raises(UsageError, match=r"mix \(Sequential\) has none in 2 of its 3 layers, such as 3.1$"):
            ANALYSES[name].measure(subject)
    others = [Softmaxed(nn.Dropout()), Softmaxed(nn.Dropout())]
    both = AnyNetwork(with_blocks(others, [Partly(True), Partly(True)]), "both", (8, 8), 1)
    assert (len(both.layers), both.attention_heads, both.unseen) == (4, [2, 2], [])


class Softmaxed(nn.Module):
    """An attention that names its dropout as timm does."""

    def __init__(self, attn_drop):
        super().__init__()
        self.attn_drop = attn_drop

    def forward(self, x):
        return self.attn_drop((x @ x.transpose(1, 2)).softmax(dim=2)) @ x


def test_attentions_that_share_a_dropout_count_once_each():
    shared = nn.Dropout(0.1)
    net = nn.Sequential(Softmaxed(shared), Softmaxed(shared), Softmaxed(nn.Dropout(0.1))).eval()
    with eager_attention(net) as (caught, _):
        net(torch.randn(1, 4, 8))
    assert len(caught) == 3 and not torch.equal(caught[0], caught[1])
    assert not shared._forward_pre_hooks


@pytest.mark.parametrize(
    ("shape", "grid", "prefix", "last"),
    [  # of images of 16 x 32
        ((8, 5), (2, 4), 0, False),
        ((9, 5), (2, 4), 1, False),
        ((16, 5), (2, 4), 8, False),  # as many class and register tokens as are looked for
        ((17, 5), None, 0, False),
        ((6, 2, 4), (2, 4), 0, False),
        ((4, 8, 6), (4, 8), 0, True),
        ((2, 4, 8), (4, 8), 0, False),  # either could be rows and columns: channels come first
        ((5,), None, 0, False),
    ],
)
def test_the_places_of_what_a_layer_returns_follow_from_its_shape(shape, grid, prefix, last):
    asked = AnyNetwork(Pooled(), "pooled", (16, 32), 3)
    found = asked._describe("it", nn.Identity(), torch.zeros(2, *shape))
    assert found[2:] == (shape, grid, prefix, last)
    for other in (torch.zeros(3, *shape), torch.zeros(2, *shape, dtype=torch.long), [0.0, 0.0], torch.zeros(2)):
        assert asked._describe("it", nn.Identity(), other)[2:4] == ((), None)


@pytest.mark.parametrize(
    ("img_size", "grid"),
    [((16, 32), (4, 8)), ((28, 28), (14, 14)), ((7, 9), (3, 4)), ((30, 17), (10, 5)), ((1, 5), (1, 2))],
)
def test_a_network_without_tokens_is_seen_in_squares_of_two_pixels_or_more_and_14_a_side_at_most(img_size, grid):
    assert AnyNetwork(Pooled(), "pooled", img_size, 3).grid_size == grid


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, images):
        return self.head(images.mean((2, 3)))


class NoForward(nn.Module):
    pass


class Pair(nn.Module):
    def forward(self, images):
        return images.mean(dim=(2, 3)), images


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 16 * 16, 2)

    def forward(self, images):
        return self.head(images.flatten(1))


def made(side):
    return lambda image: torch.zeros(3, side, side)


WRONG = {
    "no module": (lambda images: images, made(16), "`net` must be a torch.nn.Module that maps images to outputs"),
    "no forward": (NoForward(), made(16), "its class NoForward has no `forward`"),
    "a tuple": (Pair(), made(16), r"must return class scores, a tensor \(B, K\) or `logits`, and returns a tuple"),
    "another size": (Fixed(), made(32), "does not take images of 3 x 32 x 32 .*: give a transform, or --img_size"),
    "a transform of nothing": (Fixed(), lambda image: image, r"must make a normalized \(C, H, W\) of a picture"),
    "no transform": (Fixed(), 3, "needs a data set or a function that prepares an image, got 3"),
}


@pytest.mark.parametrize(("net", "transform", "message"), WRONG.values(), ids=WRONG)
def test_an_unusable_network_or_transform_is_refused_in_one_line(net, transform, message):
    with pytest.raises(UsageError, match=message) as error:
        Subject(net, transform, pictures=[Image.new("RGB", (20, 20))])
    assert "\n" not in str(error.value)


def test_pictures_of_another_size_are_refused_in_one_line():
    with pytest.raises(UsageError, match=r"`pictures` must be \(B, 1, 8, 8\), got 2 x 1 x 9 x 9"):
        Subject(small_net(), Digits(), pictures=torch.zeros(2, 1, 9, 9))
    with pytest.raises(UsageError, match="becomes 1 x 9 x 9, and must become 1 x 8 x 8: end the transform with"):
        Subject(small_net(), lambda image: torch.zeros(1, 9, 9), pictures=[Image.new("L", (20, 20))])
    with pytest.raises(UsageError, match="takes images of 1 x 8 x 8, and its data has 1 x 12 x 12"):
        Subject(small_net(), Digits(img_size=12))


def test_layers_of_any_architecture_are_its_blocks():
    import torchvision

    found = AnyNetwork(torchvision.models.mobilenet_v3_small(), "mobilenet", (64, 64), 3)
    assert [layer.kind for layer in found.layers] == ["InvertedResidual"] * 11
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    assert [layer.name for layer in AnyNetwork(plain, "plain", (8, 8), 1).layers] == ["0", "2"]
    assert AnyNetwork(torchvision.models.squeezenet1_1(), "fire", (64, 64), 3).head is None


@pytest.fixture
def small_resnet(monkeypatch):
    import timm

    def build(name, pretrained):
        torch.manual_seed(0)
        return timm.create_model("resnet10t", channels=(8, 8, 8, 8), stem_width=8, num_classes=2).eval()

    monkeypatch.setattr("vitlab.models.create.timm_model", build)


@pytest.mark.slow
@pytest.mark.rare
def test_commands_take_a_resnet_of_timm_with_pictures_or_with_data(small_resnet, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for kind in ("a", "b"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for i in range(50):
            pixels = np.random.default_rng(i).integers(256, size=(40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / kind / f"{i}.png")
    small = ["timm:resnet10t", "--img_size", "12", "--num_images", "10"]
    assert main(["analyze", "all", *small, "--images", "photos/a"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.split(" ")[0] in ANALYSES]
    done = {line.split(" ")[0] for line in lines if "not done" not in line}
    maps = {"attribution", "faithfulness", "sanity", "shift", "scramble_image"}
    assert done == {*maps, "pca", "cka", "probe", "filters", "cost"} and len(lines) == 29
    few = "errors,confusion,calibration,knn,fewshot,shift,resolution,scramble_image"
    assert main(["analyze", few, *small, "--data", "ImageFolder", "--root", "photos", "--data.num_workers=0"]) == 0
    assert "not done" not in capsys.readouterr().out
    assert pd.read_csv("analysis/resnet10t/confusion.csv")["class"].tolist() == ["a", "b"]
    assert main(["analyze", "attribution", *small, "--images", "photos/a", "--model.depth=3"]) == 2
    assert (
        "`--model.depth` changes the configuration of a run, and timm:resnet10t is not a run" in capsys.readouterr().err
    )
    assert main(["look", "timm:resnet10t", "--img_size", "12", "--images", "photos/a", "--pictures", "2"]) == 0
    assert "BasicBlock" in (tmp_path / "look.html").read_text()
    train(tmp_path / "run", "--data.subset=0.1", "--trainer.accelerator=cpu")
    words = ["look", "run", *small[:3], "--images", "photos/a", "--pictures", "1", "-o", "both.html"]
    assert main(words) == 0  # --img_size is that of the network by name, not of the run
    page = (tmp_path / "both.html").read_text()
    assert [one["shape"]["name"] for one in json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])] == [
        "run", "resnet10t"
    ]  # fmt: skip
