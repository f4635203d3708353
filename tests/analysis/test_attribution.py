import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from small_nets import brightness_net, distracted_net, small_net
from torch import nn

import vitlab
from vitlab.analysis.attribution.caught import caught_maps, graded_maps
from vitlab.analysis.attribution.curves import (
    FILLINGS,
    analyze_faithfulness,
    another_image,
    blurred,
    counts_of,
    deleted,
    verdict,
)
from vitlab.analysis.attribution.maps import (
    METHODS,
    MISSED,
    NOISE,
    OF_ATTENTION,
    SAMPLES,
    SIGNED,
    STEPS,
    analyze_attribution,
    attention_rollout,
    by_patch,
    cells,
    gradient_attention,
    gradient_rollout,
    gradient_shap,
    integrated_gradients,
    last_attention,
    lrp,
    methods_of,
    missed,
    occlusion,
    plain_starts,
)
from vitlab.analysis.attribution.relevance import Relevance, relevant_maps
from vitlab.analysis.attribution.sanity import analyze_sanity, randomized, rank_correlation
from vitlab.analysis.catalogue import ANALYSES, instead_of
from vitlab.analysis.head_attention import rollout
from vitlab.analysis.parts import pool_weights
from vitlab.analysis.subject import Subject
from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.models.foreign import AnyNetwork
from vitlab.models.hooks import changed_output
from vitlab.models.walk import attention_maps

AUTHORS = [[2.99816, 6.81916, 4.04698, 9.1796], [5.6932, 2.43681, 3.14447, 2.5626]]  # in thousandths
IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([1, 7, 4])


def one_bright_patch():
    images = torch.zeros(2, 1, 8, 8)
    images[0, :, 2:4, 4:6], images[1, :, 6:8, 0:2] = 2.0, 3.0  # patches 6 and 12
    return images, torch.tensor([1, 1])


@pytest.mark.parametrize("method", ["integrated gradients", "occlusion", "Grad-CAM"])
def test_maps_find_the_only_patch_that_decides(method):
    images, classes = one_bright_patch()
    found = METHODS[method](brightness_net(), images, classes)
    assert found.argmax(dim=1).tolist() == [6, 12]
    assert found.scatter(1, torch.tensor([[6], [12]]), 0).abs().max() < 1e-6


class OnePatch(nn.Module):
    """Reads the brightness of patch 8 of 3 x 5, in the second row."""

    columns = slice(6, 8)

    def forward(self, images):
        brightness = images[:, :, 2:4, self.columns].mean(dim=(1, 2, 3))
        return torch.stack([-brightness, brightness.tanh()], dim=1)


def test_patches_that_are_covered_together_all_have_the_decrease_of_the_probability():
    """Squares of 2 x 2 on 3 x 5 patches, of which a narrow one holds patch 9; the mean color has probability 1/2."""
    net, images = AnyNetwork(reads := OnePatch(), "one patch", (6, 10), 3), torch.randn(2, 3, 6, 10) + 2
    reads.columns = slice(8, 10)
    decrease = net(images).softmax(dim=1)[:, 1] - 0.5
    expected = torch.zeros(2, 15)
    expected[:, [4, 9]] = decrease[:, None]
    torch.testing.assert_close(occlusion(net, images, torch.tensor([1, 1]), side=2), expected)


def test_maps_of_outputs_name_the_only_patch_that_is_read_whatever_else_is_in_the_batch():
    net, images = AnyNetwork(OnePatch(), "one patch", (6, 10), 3), torch.randn(4, 3, 6, 10) + 2
    assert net.grid_size == (3, 5)
    classes = torch.ones(4, dtype=torch.long)
    for name, method in methods_of(net).items():
        found = method(net, images, classes)
        assert (found.argmax(dim=1) == 8).all(), name
        assert not found.scatter(1, torch.full((4, 1), 8), 0).any(), name
        torch.testing.assert_close(method(net, images[2:3], classes[:1])[0], found[2])
    assert list(methods_of(net)) == ["SmoothGrad", "integrated gradients", "GradientSHAP", "occlusion"]


def test_maps_of_t2t_stay_in_the_window_of_the_only_token_that_is_read():
    net = small_net(img_size=(14, 22), tokenizer="t2t", t2t_kernels=[3, 3], t2t_strides=[2, 1], t2t_dim=8, depth=1,
                    class_token=False, global_pool="avg", pos_embed="none", t2t_attn="transformer")  # fmt: skip
    with torch.no_grad():
        for name, parameter in net.named_parameters():  # no attention moves what a token sees
            if "attn.proj" in name:
                parameter.zero_()
    token, images = 3 * 11 + 5, torch.randn(2, 1, 14, 22)
    alone = torch.zeros(1, 77, 1)
    alone[0, token] = 1
    rows, columns = torch.arange(77) // 11, torch.arange(77) % 11
    window = abs(rows - 2.5) + 0.5 <= 2, abs(columns - 4.5) + 0.5 <= 2  # 7 x 7 pixels, from 2 x 3 - 3 and 2 x 5 - 3 on
    with changed_output(net.tokenizer, lambda x: x * alone):
        for name in ("SmoothGrad", "integrated gradients", "GradientSHAP", "occlusion"):
            found = METHODS[name](net, images, torch.tensor([3, 6])).abs()
            assert found[:, token].min() > 0 and found[:, ~(window[0] & window[1])].max() < 1e-6 * found.max(), name


@pytest.mark.slow
def test_every_map_is_there_for_odd_sizes_and_parts_of_all_kinds():
    parts = {"norm_layer": "rmsnorm", "mlp_layer": "swiglu", "layer_scale": 0.1, "attn": "gated", "qk_norm": True}
    for changes in ({"img_size": (6, 10)}, {"pos_embed": "rope2d", "global_pool": "avg", **parts}):
        net = small_net(**changes)
        images = torch.randn(2, 1, *net.img_size)
        for name, method in methods_of(net).items():
            found = method(net, images, torch.tensor([1, 7]))
            assert found.shape == (2, net.grid_size[0] * net.grid_size[1]) and found.isfinite().all(), name
            assert (found.std(dim=1) > 0).all() and (name in SIGNED or (found >= 0).all()), name
        assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())


class Normalized(nn.Module):
    """Normalizes pixels first, as T2T does; of what it ``jumps`` by nothing is in its gradients."""

    def __init__(self, jumps=0.0):
        super().__init__()
        self.jumps, self.weight = jumps, nn.Parameter(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, images):
        pixels = images.flatten(1)
        found = nn.functional.layer_norm(pixels, (64,), eps=1e-8) @ self.weight.T
        return found + self.jumps * pixels.ne(0).any(dim=1, keepdim=True)


@pytest.mark.slow
def test_integrated_gradients_add_up_where_pixels_are_normalized_or_the_note_says_that_they_do_not():
    """Equal steps began at 1/64 of the path, where such a network has done all that it does."""
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for jumps, said in ((0.0, ""), (100.0, "; integrated gradients miss up to ")):
        subject = Subject(Normalized(jumps), lambda image: torch.zeros(1, 8, 8), pictures=images)
        classes = subject.net(images).argmax(dim=1)
        found = integrated_gradients(subject.net, images, classes)
        due = Normalized()(images).gather(1, classes[:, None])[:, 0]  # and 0 for the mean color
        torch.testing.assert_close(found.sum(dim=1), due, atol=0.01, rtol=0.02)
        alone = integrated_gradients(subject.net, images[1:2], classes[1:2])
        torch.testing.assert_close(alone[0], found[1], atol=1e-5, rtol=1e-4)
        assert analyze_attribution(subject).note.startswith(f"maps of the predicted class{said or '; colors'}")


@pytest.mark.slow
@pytest.mark.rare
def test_integrated_gradients_of_a_trained_t2t_add_up():
    net, transform = vitlab.load("vitlab:photos64_t2t")
    image = transform(Image.fromarray(load_sample_image("flower.jpg")))[None]
    classes = net(image).argmax(dim=1)
    assert missed(net, image, classes, integrated_gradients(net, image, classes)) < MISSED


def test_each_pixel_counts_once_whatever_the_size():
    """Bins of pooling overlap where the grid does not divide the image."""
    net = small_net(img_size=(37, 53), tokenizer="t2t", depth=1)
    assert net.grid_size == (3, 4)
    pixels = torch.randn(2, 1, 37, 53)
    for n in range(12):
        own = cells(net, torch.eye(12)[n : n + 1])
        torch.testing.assert_close(by_patch(net, pixels)[:, n], (pixels * own).sum(dim=(1, 2, 3)), atol=1e-4, rtol=1e-4)


def test_maps_of_attention_weigh_patches_as_a_pool_by_attention_does():
    """The map was the mean over all patches, whichever the pool attends to."""
    net = small_net(class_token=False, global_pool="map", depth=1)
    pool, features = net.attn_pool, net.forward_features(IMAGES)
    nn.init.normal_(pool.latent, std=20)
    q, k = pool.q(pool.latent).expand(3, -1, -1), pool.kv(features)[..., :16]
    heads = [x.unflatten(2, (2, 8)).transpose(1, 2) for x in (q, k)]
    weights = nn.functional.scaled_dot_product_attention(*heads, torch.eye(16).expand(3, 2, -1, -1)).mean(dim=1)
    torch.testing.assert_close(pool_weights(net, IMAGES), weights[:, 0])
    assert weights.max() > 0.1  # not all alike
    rows = attention_maps(net, IMAGES, 0).mean(dim=1)
    torch.testing.assert_close(last_attention(net, IMAGES, CLASSES), (weights @ rows)[:, 0])
    reached = (rows + torch.eye(16)) / 2
    torch.testing.assert_close(attention_rollout(net, IMAGES, CLASSES), (weights @ reached)[:, 0])


class Second(nn.Module):
    """A pool that reads one patch."""

    def forward(self, x):
        return x[:, 1]


def test_a_head_that_reads_no_weighted_mean_has_no_maps_of_attention():
    for pool in ("max", f"{__name__}.Second"):
        net = small_net(class_token=False, global_pool=pool)
        assert not set(methods_of(net)) & set(OF_ATTENTION) and "Grad-CAM" in methods_of(net)


def test_the_relevance_of_a_block_is_that_of_its_sums_products_and_layers():
    """One head, two tokens and no norms, by hand."""
    torch.manual_seed(0)
    x, up = torch.rand(1, 2, 4).requires_grad_(), nn.Linear(4, 4).requires_grad_(False)
    weights = torch.rand(1, 2, 2).requires_grad_()
    with Relevance():
        mixed = weights @ up(x)
        y = x + mixed
    given = torch.rand(1, 2, 4)
    of_x, of_weights = torch.autograd.grad(y, (x, weights), given)
    values, a = up(x).detach(), weights.detach()
    parts = [each * given / (x + mixed).detach() for each in (x.detach(), mixed.detach())]
    size = sum(part.sum().abs() for part in parts)
    skip, branch = (part * (part.sum().abs() / size * given.sum() / part.sum()) for part in parts)
    share = branch / mixed.detach()  # of each output, a term for each weight and value
    expected = sum(a[..., j, None] * values[:, None, j] * share for j in range(2)).sum()
    torch.testing.assert_close(expected, branch.sum())
    for j in range(2):
        torch.testing.assert_close(of_weights[0, :, j], (a[0, :, j, None] * values[0, j] * share[0]).sum(dim=1) / 2)
    of_values = values * (a.transpose(1, 2) @ share) / 2
    products = (x.detach()[..., None, :] * up.weight).clamp(min=0)  # (1, 2, out, in)
    through = (products / products.sum(dim=3, keepdim=True).clamp(min=1e-12) * of_values[..., None]).sum(dim=2)
    torch.testing.assert_close(of_x, skip + through, atol=1e-6, rtol=1e-5)


class Kept(Attention):
    """Tables that are kept as the queries and keys are."""

    def score(self, q, k, pos_embed, layer):
        return super().score(q * torch.ones(8).to(q), k * torch.ones(5, 1).type_as(k)[:1], pos_embed, layer)


class OfAll(Attention):
    """Adds numbers of no image, whose relevance is not defined."""

    def score(self, q, k, pos_embed, layer):
        return super().score(q, k, pos_embed, layer) * (q.sum() + k.sum())


def test_a_map_that_is_asked_for_as_an_analysis_is_told_to_be_one_of_attribution():
    """For `occlusion` "confusion" was proposed."""
    assert all(name in ANALYSES or instead_of(name).endswith('"attribution"') for name in METHODS)


def test_a_tensor_that_only_tells_how_another_one_is_kept_has_no_relevance():
    """`table.to(x)`, as on the page of own parts, ended in a traceback."""
    net, plain = small_net(attn=f"{__name__}.Kept"), small_net()
    assert list(methods_of(net)) == list(METHODS)
    for ours, theirs in zip(*(relevant_maps(each, IMAGES, CLASSES) for each in (net, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_lrp_is_left_out_where_it_fails_for_a_part_of_ones_own():
    assert METHODS.keys() - methods_of(small_net(attn=f"{__name__}.OfAll")).keys() == {"LRP"}


def test_lrp_agrees_with_the_code_of_its_authors():
    """Of a network of two blocks whose weights are sines: the numbers are of their code, run on the same weights."""
    net = small_net(img_size=4, num_classes=3)
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_((torch.arange(parameter.numel()) * (1.7 + i) + i).sin().view_as(parameter) * 0.4)
        net.pos_embed.weight.mul_(2)
    images = torch.stack([(torch.arange(16.0) * k).cos().view(1, 4, 4) for k in (0.9, 2.3)])
    found = lrp(net, images, torch.tensor([0, 2]))
    torch.testing.assert_close(found * 1e3, torch.tensor(AUTHORS), atol=0, rtol=2e-3)


def test_attention_creates_no_relevance_and_a_head_without_values_has_none():
    net = small_net(depth=1)
    with torch.no_grad():
        net.blocks[0].attn.qkv.weight[40:48].zero_()  # the values of head 1
        net.blocks[0].attn.qkv.bias[40:48].zero_()
    (found,) = relevant_maps(net, IMAGES, CLASSES)
    assert not found[:, 1].any() and found[:, 0].any()
    assert (found.sum(dim=(1, 2, 3)) <= 0.5 + 1e-5).all()  # half of what reaches the attention, and values have half


def test_gradient_shap_sums_to_the_output_minus_that_of_plain_images():
    net, images = AnyNetwork(OnePatch(), "one patch", (6, 10), 3), torch.randn(2, 3, 6, 10)
    starts = [start for start, _ in plain_starts(images)]
    assert len(starts) == SAMPLES and torch.stack(starts).mean(dim=0).abs().max() < 1e-6
    found = gradient_shap(net, images, torch.zeros(2, dtype=torch.long)).sum(dim=1)  # of the linear output
    with torch.no_grad():
        plain = torch.stack([net(start.expand(1, -1, 6, 10))[0, 0] for start in starts]).mean()
        torch.testing.assert_close(found, net(images)[:, 0] - plain)


def test_relevance_is_handed_on_from_layer_to_layer_and_heads_are_averaged_before_or_after_signs_are_cut(monkeypatch):
    """Of two layers and heads: patch 1 looks at patch 2, then the class token at patch 1."""
    maps, slopes = torch.ones(2, 1, 2, 3, 3), torch.zeros(2, 1, 2, 3, 3)
    slopes[0, 0, :, 1, 2], slopes[1, 0, :, 0, 1] = torch.tensor([0.5, -0.9]), torch.tensor([0.4, 0.8])
    monkeypatch.setattr("vitlab.analysis.attribution.maps.graded_maps", lambda *_: (list(maps), list(slopes)))
    net, images = small_net(img_size=(2, 4)), torch.zeros(1, 1, 2, 4)
    found = gradient_attention(net, images, CLASSES[:1])  # 0.6, and 0.6 of 0.5 / 2
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.15]]))
    found = gradient_rollout(net, images, CLASSES[:1])  # 0.6 of 1.6, and nothing of -0.2
    torch.testing.assert_close(found, torch.tensor([[0.375, 0.0]]))


def test_what_integrated_gradients_miss_is_a_share_of_the_difference_or_of_the_spread_of_outputs(monkeypatch):
    whole, plain = torch.tensor([[3.0, 0, 0], [3.0, 0, 0], [3.0, 0, 0]]), torch.tensor([[1.0, 0, 0]])
    found = iter([whole, plain])
    monkeypatch.setattr("vitlab.analysis.attribution.maps.outputs", lambda net, images: next(found))
    values = torch.tensor([[0.5, 0.5], [2.0, 1.0], [0.2, 0.5]])  # of a difference of 2, 2 and 0
    share = missed(None, torch.zeros(3, 1, 2, 2), torch.tensor([0, 0, 1]), values)
    torch.testing.assert_close(share, torch.tensor([1 / 2, 1 / 2, 0.7 / 2**0.5]))


def test_grad_cam_of_a_convolution_is_the_formula_of_its_paper():
    import torchvision

    torch.manual_seed(0)
    theirs = torchvision.models.squeezenet1_1(num_classes=4).eval()
    net, images = AnyNetwork(theirs, "squeezenet", (33, 47), 3), torch.randn(2, 3, 33, 47)
    x = theirs.features(images).detach().requires_grad_()  # leaves the last Fire
    score = theirs.classifier(x).flatten(1).gather(1, torch.tensor([[1], [3]])).sum()
    (slopes,) = torch.autograd.grad(score, x)
    seen = torch.einsum("bchw,bc->bhw", x.detach(), slopes.mean(dim=(2, 3))).relu()
    found = METHODS["Grad-CAM"](net, images, torch.tensor([1, 3])).view(2, *net.grid_size)
    for one, mine in zip(seen, found, strict=True):
        assert net.grid_size == (8, 11) and one.shape == (2, 2)  # four cells, with slopes between
        torch.testing.assert_close(mine[::7, ::10], one)
    with pytest.raises(UsageError, match="Grad-CAM needs an output with a gradient"):
        METHODS["Grad-CAM"](net_without_gradient(), images, torch.tensor([1, 1]))


def net_without_gradient():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3)

        def forward(self, images):
            return self.conv(images).mean(dim=(2, 3)).detach()

    return AnyNetwork(Fixed(), "fixed", (33, 47), 3)


def test_integrated_gradients_sum_to_the_output_minus_that_of_the_mean_color():
    net = brightness_net()
    images, classes = one_bright_patch()
    with torch.no_grad():
        expected = (net(images) - net(torch.zeros_like(images)))[:, 1]
    torch.testing.assert_close(integrated_gradients(net, images, classes).sum(dim=1), expected, atol=1e-3, rtol=1e-3)


def test_the_maps_that_are_caught_are_those_that_are_applied():
    net = small_net(pos_embed="relpos", qk_norm=True)
    net.skips_unread_tokens = True  # as the networks of runs: the maps must be whole all the same
    own = [block.attn.kernel for block in net.blocks]
    with torch.no_grad(), caught_maps(net) as maps:
        found = net(IMAGES)
    assert [block.attn.kernel for block in net.blocks] == own
    assert net.skips_unread_tokens
    torch.testing.assert_close(found, net(IMAGES).detach(), atol=1e-5, rtol=1e-5)
    for layer, caught in enumerate(maps):
        torch.testing.assert_close(caught, attention_maps(net, IMAGES, layer), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(last_attention(net, IMAGES, CLASSES), maps[-1].mean(dim=1)[:, 0, 1:])
    torch.testing.assert_close(attention_rollout(net, IMAGES, CLASSES), rollout(maps)[:, 0, 1:])


class LocalValues(Attention):
    def mix(self, q, k, v, pos_embed, layer):
        return self.weigh(q, k, pos_embed, layer) @ v + 0.5 * v


class ByKernel(Attention):
    def mix(self, q, k, v, pos_embed, layer):
        return 2 * self.kernel(q, k, v, self.position_bias(q, k, pos_embed, layer), self.qk_scale)


class Hidden(Attention):
    def mix(self, q, k, v, pos_embed, layer):
        return (q @ k.mT).softmax(dim=-1) @ v


@pytest.mark.parametrize("cls", [LocalValues, ByKernel])
def test_the_maps_of_a_mix_of_ones_own_are_those_that_it_applies(cls):
    """Where it called `weigh` and no other step was its own, no map was caught, and analyses ended in an IndexError."""
    net = small_net(pos_embed="relpos", attn=f"{__name__}.{cls.__name__}")
    with torch.no_grad(), caught_maps(net) as maps:
        found = net(IMAGES)
    torch.testing.assert_close(found, net(IMAGES).detach(), atol=1e-5, rtol=1e-5)
    for layer, caught in enumerate(maps):
        torch.testing.assert_close(caught, attention_maps(net, IMAGES, layer), atol=1e-6, rtol=1e-5)
    assert len(maps) == len(net.blocks) and not set(OF_ATTENTION) - {*methods_of(net)}
    assert gradient_rollout(net, IMAGES, CLASSES).isfinite().all()


def test_a_mix_that_lets_no_map_be_caught_has_none():
    net = small_net(attn=f"{__name__}.Hidden")
    assert not set(OF_ATTENTION) & {*methods_of(net)} and "occlusion" in methods_of(net)
    with pytest.raises(UsageError, match="Hidden does not let its weights be caught: its `mix` must call"):
        last_attention(net, IMAGES, CLASSES)


def test_a_head_whose_values_go_nowhere_has_no_gradient_and_no_relevance():
    net = small_net(depth=1)
    with torch.no_grad():
        net.blocks[0].attn.qkv.weight[40:48].zero_()  # the values of head 1
        net.blocks[0].attn.qkv.bias[40:48].zero_()
    maps, gradients = graded_maps(net, IMAGES, CLASSES)
    assert gradients[0][:, 1].abs().max() == 0 and gradients[0][:, 0].abs().max() > 0
    expected = (maps[0] * gradients[0])[:, 0].clamp(min=0) / 2
    torch.testing.assert_close(gradient_attention(net, IMAGES, CLASSES), expected[:, 0, 1:])


@pytest.mark.parametrize("filling", FILLINGS)
def test_a_deleted_patch_gets_the_filling_and_the_others_stay(filling):
    net, values = small_net(), torch.rand(3, 16)
    fill = FILLINGS[filling](net, IMAGES)
    for count in (0, 5, 16):
        changed = deleted(net, IMAGES, values, count, fill)
        best = torch.zeros(3, 16).scatter(1, values.topk(count).indices, 1).view(3, 1, 4, 4)
        is_filled = best.repeat_interleave(2, 2).repeat_interleave(2, 3).bool()
        assert torch.equal(changed[is_filled], fill[is_filled]) and torch.equal(changed[~is_filled], IMAGES[~is_filled])


def test_each_filling_is_what_its_name_says():
    net = small_net()
    wide = torch.zeros(2, 1, 8, 8)
    wide[:, :, 3, 4] = 1.0
    at = torch.arange(8.0)
    rows, columns = (torch.exp(-((at[:, None] - at) ** 2) / 8) for _ in range(2))  # the side of a patch is 2
    rows, columns = rows / rows.sum(1, keepdim=True), columns / columns.sum(1, keepdim=True)
    torch.testing.assert_close(blurred(net, wide)[0, 0], rows[:, 3, None] * columns[None, :, 4])
    others = another_image(net, torch.arange(40.0).view(40, 1, 1, 1).expand(-1, 1, 8, 8))[:, 0, 0, 0]
    assert sorted(others.tolist()) == list(range(40)) and (others != torch.arange(40)).all()
    torch.testing.assert_close(FILLINGS["own mean"](net, IMAGES)[:, 0, 5, 5], IMAGES.mean(dim=(1, 2, 3)))
    with pytest.raises(UsageError, match="need at least two images, got one"):
        another_image(net, IMAGES[:1])


@pytest.mark.slow
def test_a_map_that_ranks_a_wrong_patch_first_is_no_evidence_even_if_the_right_one_follows():
    net, draw = distracted_net(), torch.Generator().manual_seed(1)
    images, others = (torch.randn(48, 1, 8, 8, generator=draw) for _ in range(2))
    others[:, :, 4:6, 2:4] = images[:, :, 4:6, 2:4]  # patch 9
    assert torch.equal(net(images), net(others)) and net(images).std() > 0.5
    classes = net(images).argmax(dim=1)
    for name in ("attention", "rollout"):
        assert (METHODS[name](net, images, classes).argmax(dim=1) == 3).all()
    finding = analyze_faithfulness(Subject(net, lambda image: image, pictures=images))
    areas = finding.table[finding.table["kind"].isin(["MoRF", "LeRF"])].set_index("map")
    assert (areas.loc[["attention", "rollout"], "above_random_low"] > 0).all()  # by areas alone they would
    lost = "attention, rollout and Grad-CAM (the patch named first does no more than a random one)"
    passed = "gradient rollout, gradient x attention, LRP, SmoothGrad, integrated gradients, GradientSHAP and occlusion"
    assert f"evidence under every filling: {passed}; NO EVIDENCE: {lost};" in finding.note
    assert "gradient x attention than attention, rollout, LRP and Grad-CAM" in finding.note  # LRP: 0 where it is dark
    whole = finding.table.query("share == 0")["probability"]
    expected = net(images).softmax(dim=1).amax(dim=1).mean().item()
    assert whole.nunique() == 1 and whole.iloc[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_a_constant_map_is_no_evidence(monkeypatch):
    net, (images, _) = brightness_net(), one_bright_patch()
    subject = Subject(net, lambda image: image, pictures=images.repeat(8, 1, 1, 1))
    monkeypatch.setattr("vitlab.analysis.attribution.maps.METHODS", {
        "occlusion": occlusion, "constant": lambda net, images, classes: torch.ones(len(images), 16),
        "reverse": lambda *args: -occlusion(*args),
    })  # fmt: skip
    finding = analyze_faithfulness(subject)
    lines = finding.table.query("share == 0").set_index("map")
    assert (lines.loc["constant", "gain"] == 0).all()
    pairs = finding.table.query("kind == 'pair'").set_index(["filling", "map", "against"])["gain"]
    gains = finding.table.query("kind == 'MoRF' and share == 0").set_index(["filling", "map"])["gain"]
    assert len(pairs) == len(FILLINGS) * 3 * 2
    for filling, first, second in pairs.index:
        assert pairs[filling, first, second] == pytest.approx(gains[filling, first] - gains[filling, second], abs=1e-9)
    for filling in FILLINGS:
        assert gains[filling, "reverse"] == pytest.approx(-gains[filling, "occlusion"], abs=0.2)
    assert finding.note.split("NO EVIDENCE: ")[1].split(" (")[0].endswith("constant and reverse")


@pytest.mark.slow
def test_areas_match_their_curves_and_contradicting_fillings_are_reported(small_subject):
    table = analyze_faithfulness(small_subject(num_images=12)).table
    for _, line in table[table["kind"] != "pair"].groupby(["filling", "kind", "map"]):
        assert (
            line["share"] * 16 == counts_of(16)
        ).all()  # the shares that are replaced, not those that were asked for
        assert np.trapezoid(line["probability"], line["share"]) == pytest.approx(line["area"].iloc[0], abs=1e-9)
    both = table.query("share == 0").pivot(index=["filling", "map"], columns="kind", values=["area", "gain"])
    gain = (both["area"]["LeRF"] - both["area"]["MoRF"]).drop("random", level="map")
    assert gain.to_numpy() == pytest.approx(both["gain"]["MoRF"].drop("random", level="map").to_numpy(), abs=1e-9)
    turned = table.copy()
    facts = ["above_random_low", "first_above_random_low"]
    turned[facts] = 0.1
    turned.loc[(turned["map"] == "rollout") & (turned["filling"] == "blur"), facts] = -0.1
    pair, blur = (turned["kind"] == "pair"), turned["filling"] == "blur"
    turned.loc[pair, "gain_low"] = -0.1
    turned.loc[pair & (turned["map"] == "occlusion") & (turned["against"] == "attention"), "gain_low"] = 0.1
    turned.loc[pair & blur & (turned["map"] == "rollout") & (turned["against"] == "attention"), "gain_low"] = 0.1
    turned.loc[pair & ~blur & (turned["map"] == "attention") & (turned["against"] == "rollout"), "gain_low"] = 0.1
    assert verdict(turned) == (
        "evidence under every filling: attention, gradient rollout, gradient x attention, LRP, Grad-CAM, SmoothGrad, "
        "integrated gradients, GradientSHAP and occlusion; DEPENDS ON THE FILLING: rollout (evidence under mean color, "
        "own mean and another image alone); "
        "better under every filling: occlusion than attention; WHICH IS BETTER DEPENDS ON THE FILLING: attention and "
        "rollout"
    )


def by_patches(pixels):
    return pixels.view(len(pixels), 4, 2, 4, 2).sum(dim=(2, 4)).flatten(1)


@pytest.mark.parametrize("method", ["integrated gradients", "occlusion", "SmoothGrad", "GradientSHAP", "Grad-CAM"])
def test_maps_agree_with_captum(method, monkeypatch):
    attr = pytest.importorskip("captum.attr")  # the extra `peers`
    net, images, classes = small_net(), IMAGES, CLASSES
    patches = torch.arange(16).view(1, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    if method == "occlusion":
        ablated = attr.FeatureAblation(lambda x: net(x).softmax(dim=1))
        expected = ablated.attribute(IMAGES, target=CLASSES, feature_mask=patches)[:, 0, ::2, ::2].flatten(1)
    elif method == "integrated gradients":
        path = attr.IntegratedGradients(net)
        expected = by_patches(path.attribute(IMAGES, target=CLASSES, n_steps=STEPS, method="riemann_middle")[:, 0])
    elif method == "SmoothGrad":  # one image: captum draws noise of its own for each
        images, classes = IMAGES[:1], CLASSES[:1]
        spread = {"stdevs": NOISE * float(images.max() - images.min()), "nt_samples_batch_size": 1}
        smooth = attr.NoiseTunnel(attr.Saliency(net))
        torch.manual_seed(0)
        mean = smooth.attribute(images, "smoothgrad", nt_samples=SAMPLES, target=classes, abs=False, **spread)
        expected = by_patches(mean[:, 0].abs())
    elif method == "GradientSHAP":  # with our starts and places in place of its draws
        expected, shap = 0, attr.GradientShap(net)
        for start, place in plain_starts(IMAGES):
            monkeypatch.setattr("numpy.random.uniform", lambda low, high, size, at=place: np.full(size, at))
            found = shap.attribute(IMAGES, start.expand(1, 1, 8, 8), n_samples=1, target=CLASSES)
            expected = expected + by_patches(found[:, 0]) / SAMPLES
    else:  # of a convolution: in tokens its channels would be the wrong ones
        torch.manual_seed(0)
        conv = nn.Sequential(nn.Conv2d(1, 6, 2, stride=2), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.Flatten())
        conv.append(nn.Linear(96, 10))
        net = AnyNetwork(conv.eval(), "convolution", (8, 8), 1)
        assert net.grid_size == (4, 4)
        expected = attr.LayerGradCam(conv, conv[2]).attribute(IMAGES, CLASSES, relu_attributions=True).flatten(1)
    torch.testing.assert_close(METHODS[method](net, images, classes), expected.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_random_weights_change_what_the_network_made_and_keep_what_the_picture_did(monkeypatch, small_subject):
    monkeypatch.setattr("vitlab.analysis.attribution.maps.METHODS", {
        "picture": lambda net, images, classes: images.flatten(1)[:, ::4],
        "occlusion": occlusion,
    })  # fmt: skip
    finding = analyze_sanity(small_subject(num_images=8))
    table = finding.table.set_index(["map", "random"])["correlation"]
    assert table["picture"].min() > 0.999 and table["occlusion", "tokenizer too"] < 0.5
    assert finding.note.endswith("with all blocks random: picture")
    alone = analyze_sanity(small_subject(num_images=1)).note
    assert "none" not in alone and alone.endswith("whether maps stay similar with all blocks random is not known")


def test_randomized_parts_are_those_that_are_named():
    net = small_net()
    other = randomized(net, blocks=1)
    kept = {name for name, value in net.state_dict().items() if torch.equal(value, other.state_dict()[name])}
    assert {name.split(".")[0] for name in kept} >= {"tokenizer", "pos_embed", "cls_token"}
    assert not any(name.startswith(("blocks.1", "head")) for name in kept)
    pooled = small_net(global_pool="map", fc_norm=True)
    other = randomized(pooled, blocks=0).state_dict()
    kept = {name.split(".")[0] for name, value in pooled.state_dict().items() if torch.equal(value, other[name])}
    assert not kept & {"attn_pool", "fc_norm", "norm", "head"} and kept >= {"blocks", "tokenizer"}
    assert torch.equal(rank_correlation(torch.ones(2, 5), torch.rand(2, 5)), torch.zeros(2).double())


def test_the_stages_are_random_from_the_head_down_and_a_weight_of_one_number_stays(monkeypatch, small_subject):
    parts = ("tokenizer", "pos_embed", "cls_token", "blocks.0", "blocks.1", "blocks.2", "norm", "head")
    subject, seen = small_subject(num_images=2, depth=3), []

    def differing(net, images, classes):
        pairs = zip(net.named_parameters(), subject.net.parameters(), strict=True)
        seen.append(
            {part for (name, a), b in pairs for part in parts if name.startswith(part) and not torch.equal(a, b)}
        )
        return images.flatten(1)

    monkeypatch.setattr("vitlab.analysis.attribution.maps.METHODS", {"differing": differing})
    table = analyze_sanity(subject).table
    assert seen[0] == set() and table["blocks"].tolist() == [0, 2, 3, 3]
    assert seen[1::5] == [{"norm", "head"}, {*parts[4:]}, {*parts[3:]}, {*parts}]
    one = small_net(num_classes=1)
    assert torch.equal(randomized(one, blocks=0).head.bias, one.head.bias)  # which has no deviation


def test_random_weights_have_mean_and_deviation_of_those_they_replace():
    net = small_net(embed_dim=64)
    with torch.no_grad():
        net.blocks[1].mlp.fc1.weight.mul_(0.1).add_(1.0)  # 256 x 64
    given, drawn = (each.blocks[1].mlp.fc1.weight for each in (net, randomized(net, blocks=1)))
    assert abs(drawn.mean() - 1) < 0.01 and drawn.std().item() == pytest.approx(given.std().item(), rel=0.05)


@pytest.mark.slow
def test_maps_with_a_sign_are_drawn_about_zero_with_a_bar_of_their_own(small_subject):
    finding = analyze_attribution(small_subject(pictures=IMAGES[:2]))
    values = finding.table.set_index(["map", "image"])["weight"].sort_index()
    axes = [each for each in finding.figure.axes if each.images and each.get_label() != "<colorbar>"]
    bars = {image.axes: image.colorbar for each in axes for image in each.images if image.colorbar}
    assert len(axes) == 2 * 11 and len(bars) == 2 * 3  # images, methods; those with a sign
    for i in range(2):
        for name, ax in zip(METHODS, axes[11 * i + 1 : 11 * i + 11], strict=True):
            if name not in SIGNED:
                assert ax not in bars and values[name, i].min() >= 0
                continue
            (drawn,), most = ax.images, values[name, i].abs().max()
            assert (drawn.norm.vmin, drawn.norm.vmax) == (pytest.approx(-most), pytest.approx(most))
            assert min(drawn.cmap(drawn.norm(0.0))[:3]) > 0.95  # white
            assert drawn.get_alpha() is None and np.allclose(drawn.get_array().ravel(), values[name, i])


def test_a_network_without_a_head_is_refused(small_subject):
    with pytest.raises(UsageError, match="needs class scores, and model has no classification head"):
        analyze_attribution(small_subject(num_classes=0))
