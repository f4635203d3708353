"""The fast way through the T2T tokenizer against the plain one, which is the reference."""

import copy

import pytest
import torch
from torch import nn

from tests.networks import randomized
from vitlab.tokenizers.fused import inverse_deviation, layer_from_map, split_linear, split_norm_linear
from vitlab.tokenizers.splits import soft_split
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import TokenPerformer, TokenTransformer

SHAPES = [  # channels, image, kernels, strides
    (3, (56, 40), (7, 3, 3), None),
    (1, (28, 28), (5, 3), (3, 2)),
    (2, (19, 33), (3, 2, 4, 1), (2, 2, 1, 1)),
    (2, (9, 12), (2, 3), None),
]
KINDS = ["random", "flat", "letterbox", "gray", "colored", "two grays", "two faint textures"]


def images_of(kind, C, size):
    """White paper, bars beside a photo, a photo without color: flat windows, in which variances cancel."""
    x = torch.randn(2, C, *size)
    match kind:
        case "flat":
            return torch.full_like(x, 2.4)
        case "letterbox":
            x[:, :, : size[0] // 3] = torch.linspace(-2.1, -1.8, C)[:, None, None]
        case "gray":
            return (2.2 + 1e-3 * x[:, :1]).expand_as(x)
        case "two grays":  # where every pixel of a window is one number, and another one beside it
            return torch.where(torch.arange(size[1]) < size[1] // 2, -2.0, 2.4).expand_as(x)
        case "two faint textures":
            return torch.where(torch.arange(size[1]) < size[1] // 2, -2.0, 2.4) + 1e-3 * x[:, :1].expand_as(x)
        case "colored":
            return torch.linspace(-2.1, -1.8, C)[:, None, None] + 1e-3 * x
    return x


def outputs_and_gradients(tokenizer, images):
    images = images.clone().requires_grad_()
    y = tokenizer(images)
    gradients = torch.autograd.grad(y.square().mean(), [*tokenizer.parameters(), images])
    return y.detach(), gradients


def worst(gradients, exact):
    return max(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in zip(gradients, exact, strict=True))


@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
@pytest.mark.parametrize(("C", "size", "kernels", "strides"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_gradients_are_those_of_the_reference(t2t_attn, C, size, kernels, strides, kind):
    tokenizer = randomized(T2TTokenizer(size, C, 8, t2t_attn, kernels, strides, t2t_dim=6), 0.1)
    plain = copy.deepcopy(tokenizer).double()
    plain.fused = False
    images = images_of(kind, C, size)
    assert tokenizer.is_fused(images)
    y, gradients = outputs_and_gradients(tokenizer, images)
    exact, exact_gradients = outputs_and_gradients(plain, images.double())
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-5)
    assert worst(gradients, exact_gradients) < 1e-5
    plain.fused = True
    y, gradients = outputs_and_gradients(plain, images.double())
    torch.testing.assert_close(y, exact, rtol=0, atol=1e-9)  # its statistics are no more exact than their input
    assert worst(gradients, exact_gradients) < 1e-9


@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
def test_published_widths_in_float32_give_the_tokens_of_the_reference(t2t_attn):
    tokenizer = T2TTokenizer((64, 48), 3, 32, t2t_attn)
    images = torch.randn(2, 3, 64, 48)
    y, gradients = outputs_and_gradients(tokenizer.eval(), images)
    tokenizer.fused = False
    expected, expected_gradients = outputs_and_gradients(tokenizer, images)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
    assert worst(gradients, expected_gradients) < 1e-5


def test_windows_of_one_pixel_are_legal():
    tokenizer = randomized(T2TTokenizer((6, 5), 5, 8, t2t_kernels=(1, 3), t2t_dim=6), 0.1).double()
    images = torch.randn(2, 5, 6, 5, dtype=torch.float64)
    before = images.clone()
    y = tokenizer(images)
    assert torch.equal(images, before)
    tokenizer.fused = False
    torch.testing.assert_close(y, tokenizer(images), rtol=0, atol=1e-10)


def test_the_fast_path_and_the_reference_share_parameters_and_dropout_masks():
    tokenizer = T2TTokenizer((32, 32), 3, 8)
    plain = T2TTokenizer((32, 32), 3, 8, fused=False)
    assert tokenizer.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(tokenizer.state_dict())
    images, tokens = torch.randn(2, 3, 32, 32), []
    for way in (tokenizer, plain):
        torch.manual_seed(3)
        tokens.append(way.train()(images))
    torch.testing.assert_close(*tokens, rtol=0, atol=1e-5)


@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
def test_linear_layers_of_torch_take_the_fast_path_as_ours_do(t2t_attn):
    tokenizer = T2TTokenizer((32, 32), 3, 8, t2t_attn=t2t_attn)
    for module in tokenizer.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = nn.Linear  # as in a file of a whole network of an older version
    assert tokenizer.is_fused(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("layer", [TokenPerformer(27, 6), TokenTransformer(27, 6)])
def test_a_token_layer_takes_a_map_or_its_windows(layer):
    x = torch.randn(2, 3, 10, 14)
    expected = randomized(layer, 0.1)(soft_split(x, 3, 2, 1))
    for is_image in (True, False):
        torch.testing.assert_close(layer_from_map(layer, x, (3, 2, 1), is_image), expected, rtol=0, atol=1e-5)


def test_a_split_and_a_linear_layer_are_one_convolution():
    linear, x = nn.Linear(27, 8), torch.randn(2, 3, 10, 14)
    torch.testing.assert_close(split_linear(x, (3, 2, 1), linear), linear(soft_split(x, 3, 2, 1)), rtol=0, atol=1e-5)


def test_the_deviation_is_that_of_every_window_with_its_zeros():
    x = torch.randn(2, 3, 10, 14, dtype=torch.float64)
    expected = (soft_split(x, 5, 3, 2).var(dim=2, unbiased=False) + 0.1).rsqrt()
    torch.testing.assert_close(inverse_deviation(x, (5, 3, 2), 0.1).flatten(1), expected)


def first_stage(images, tokenizer):
    return split_norm_linear(images, (7, 4, 2), tokenizer.attention1.norm1, tokenizer.attention1.kqv, is_image=True)


@pytest.mark.parametrize("kind", [*KINDS, "black and white"])
def test_autocast_rounds_an_image_no_earlier_than_the_reference(kind):
    tokenizer = T2TTokenizer((64, 48), 3, 32)
    nn.init.normal_(tokenizer.attention1.kqv.weight, std=0.02)  # as VisionTransformer does
    images = images_of(kind, 3, (64, 48))
    if kind == "black and white":  # in color: what float32 statistics get wrong
        black, white = torch.tensor([[-2.118, -2.036, -1.804], [2.249, 2.429, 2.640]])[..., None, None]
        images = torch.where(torch.arange(48) < 24, black, white).expand(2, 3, 64, 48)
    exact = first_stage(images.double(), copy.deepcopy(tokenizer).double())
    torch.testing.assert_close(first_stage(images, tokenizer).double(), exact, rtol=0, atol=1e-5)
    layer = tokenizer.attention1
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = first_stage(images, tokenizer), layer.kqv(layer.norm1(soft_split(images, 7, 4, 2)))
    assert found.dtype == plain.dtype
    assert (found - exact).norm() <= 1.01 * (plain - exact).norm()


def test_a_flat_window_gives_the_shift_whatever_its_tone():
    tokenizer = randomized(T2TTokenizer((64, 48), 3, 32), 0.1)
    y = first_stage(torch.where(torch.arange(48) < 24, -2.0, 2.4).expand(1, 3, 64, 48), tokenizer)
    y = y.unflatten(1, tokenizer.grids[0])[0]
    torch.testing.assert_close(y[4, 2], y[4, 9], rtol=0, atol=1e-7)  # one on the dark side, one on the bright
    assert (y[4, 2] - y[4, 5]).abs().max() > 1e-2  # across the edge


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
def test_half_precision_stays_near_and_finite_as_a_cast_and_as_autocast(dtype, t2t_attn):
    tokenizer = T2TTokenizer((32, 32), 3, 8, t2t_attn).eval()
    with torch.no_grad():
        images = 5 * torch.randn(2, 3, 32, 32)
        expected = tokenizer(images)
        with torch.autocast("cpu", dtype):
            torch.testing.assert_close(tokenizer(images).float(), expected, rtol=0, atol=0.1)
        y = tokenizer.to(dtype)(images.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0.2)


def test_values_that_float16_cannot_hold_before_normalization_are_normalized_first():
    norm, linear = nn.LayerNorm(27), nn.Linear(27, 4)
    x = 3e4 * torch.randn(1, 3, 8, 8)
    expected = split_norm_linear(x, (3, 2, 1), norm, linear, is_image=False)
    with torch.autocast("cpu", torch.float16):
        y = split_norm_linear(x, (3, 2, 1), norm, linear, is_image=False)
    torch.testing.assert_close(y.float(), expected, rtol=1e-3, atol=3e-3)


def test_in_half_precision_a_window_may_be_as_wide_as_the_image():
    wide = {"t2t_kernels": [8, 1], "t2t_strides": [1, 1], "t2t_padding": "none"}
    reference = randomized(T2TTokenizer((64, 8), 3, 32, **wide), 0.1)
    reference.fused = False
    fused = copy.deepcopy(reference)
    fused.fused = True
    images = torch.randn(2, 3, 64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = fused(images), reference(images)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)


def test_half_precision_gives_the_windows_and_gradients_of_the_reference():
    norm, linear = randomized(nn.LayerNorm(45), 0.1), randomized(nn.Linear(45, 4), 0.1)
    x, gradients = torch.randn(2, 5, 9, 7, requires_grad=True), []
    with torch.autocast("cpu", torch.bfloat16):
        for y in (split_norm_linear(x, (3, 2, 1), norm, linear, False), linear(norm(soft_split(x, 3, 2, 1)))):
            gradients.append(torch.autograd.grad(y.square().sum(), [x, *norm.parameters(), *linear.parameters()]))
    assert worst(*gradients) < 2e-2  # of which bfloat16 keeps 8 bits


def test_tokens_between_the_splits_are_never_copied_to_another_order():
    tokenizer, strides = T2TTokenizer((32, 32), 3, 8), []
    tokenizer.attention2.norm2.register_forward_hook(lambda _, x, y: strides.append(x[0].stride()))
    tokenizer(torch.randn(2, 3, 32, 32))
    assert strides == [(16 * 64, 64, 1)]


@pytest.mark.parametrize("fused", [True, False])
def test_switching_takes_effect_at_once_and_meta_tensors_take_the_reference(fused):
    tokenizer = T2TTokenizer((32, 32), 3, 8)
    tokenizer.fused = fused
    assert tokenizer.is_fused(torch.zeros(1, 3, 32, 32)) == fused
    assert not tokenizer.is_fused(torch.zeros(1, 3, 32, 32, device="meta"))


@pytest.mark.rare
@pytest.mark.parametrize("t2t_attn", ["performer", "transformer"])
def test_the_fast_path_has_no_graph_break(t2t_attn):
    tokenizer = T2TTokenizer((32, 32), 3, 8, t2t_attn).eval()
    images = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(tokenizer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images), tokenizer(images), rtol=0, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):  # torch 2.10 rounds once more in attention
        torch.testing.assert_close(compiled(images), tokenizer(images), rtol=0, atol=5e-3)
