import pytest
import torch
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingMixed, apply_rot_embed_cat
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitlab.layers.attention import Attention
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.rotary import LieRE, RoPE2d, RoPEMixed, String, mixed_freqs

GRIDS = [(14, 14), (3, 5)]


def rotary(name, grid_size, head_dim=16, num_prefix_tokens=0):
    if name == "rope2d":
        return RoPE2d(grid_size, head_dim, num_prefix_tokens)
    return RoPEMixed(grid_size, head_dim, 2, 2, num_prefix_tokens)


@pytest.mark.parametrize("grid_size", GRIDS)
def test_rope2d_is_timms_axial_rotation_with_x_first(grid_size):
    x = torch.randn(2, 3, grid_size[0] * grid_size[1], 16)
    ours = RoPE2d(grid_size, 16).rotate(x, 0)
    for indexing, agrees in [("xy", True), ("ij", False)]:
        cat = RotaryEmbeddingCat(
            16, temperature=100, in_pixels=False, feat_shape=list(grid_size), grid_indexing=indexing
        )
        difference = (ours - apply_rot_embed_cat(x, cat.get_embed())).abs().max()
        assert difference <= 1e-6 if agrees else difference > 1


def test_rope2d_turns_row_1_column_3_by_the_published_angles():
    rope = RoPE2d((14, 14), 64)
    torch.testing.assert_close(rope.sin[17, [0, 1, 16]], torch.tensor([0.1411200, 0.7782725, 0.8414710]))
    torch.testing.assert_close(rope.cos[17, 0], torch.tensor(-0.9899925))


def test_rope2d_turns_pairs_as_the_slow_loop_does():
    rope, x = RoPE2d((2, 3), 8, num_prefix_tokens=1), torch.randn(1, 1, 7, 8, dtype=torch.float64)
    expected = x.clone()
    for n in range(6):
        for pair in range(4):
            position = n % 3 if pair < 2 else n // 3
            angle = torch.tensor(position * 100.0 ** -((pair % 2) / 2), dtype=torch.float64)
            a, b = x[0, 0, 1 + n, 2 * pair], x[0, 0, 1 + n, 2 * pair + 1]
            expected[0, 0, 1 + n, 2 * pair] = a * angle.cos() - b * angle.sin()
            expected[0, 0, 1 + n, 2 * pair + 1] = a * angle.sin() + b * angle.cos()
    torch.testing.assert_close(rope.rotate(x, 0), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["rope2d", "rope_mixed"])
def test_complex_products_are_the_real_ones_of_a_compiled_graph(name, dtype, monkeypatch):
    rope, got = rotary(name, (2, 3), num_prefix_tokens=1), []
    x, slope = torch.randn(2, 2, 7, 16).to(dtype), torch.randn(2, 2, 7, 16).to(dtype)
    for compiling in [False, True]:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        y = x.clone().requires_grad_()
        of = [y, *rope.parameters()]
        rotated = rope.rotate(y, 1)
        got.append([rotated, *torch.autograd.grad(rotated, of, slope)])
    for ours, theirs in zip(*got, strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("width", [17, 18])
def test_a_rotation_reads_any_strides(start, width):
    rope, wide = rotary("rope2d", (2, 3)), torch.randn(2, 3, 6, width)
    x = wide[..., start : start + 16]
    assert torch.equal(rope.rotate(x, 0), rope.rotate(x.clone(), 0))
    swapped = x.clone().mT.contiguous().mT  # channels far apart
    assert torch.equal(rope.rotate(swapped, 0), rope.rotate(x.clone(), 0))


@pytest.mark.parametrize("grid_size", GRIDS)
def test_rope_mixed_is_timms_given_the_same_frequencies(grid_size):
    theirs = RotaryEmbeddingMixed(32, depth=2, num_heads=2, feat_shape=list(grid_size))
    ours = RoPEMixed(grid_size, 16, num_heads=2, depth=2)
    ours.load_state_dict({"freqs": theirs.freqs})
    x = torch.randn(2, 2, grid_size[0] * grid_size[1], 16)
    for layer, embed in enumerate(theirs.get_embed()):
        torch.testing.assert_close(ours.rotate(x, layer), apply_rot_embed_cat(x, embed), rtol=0, atol=1e-6)


def test_rope_mixed_starts_with_two_orthogonal_directions():
    fx, fy = mixed_freqs(torch.zeros(1, 1, 1), 16, 10.0)[:, 0, 0]
    size, zeros = torch.tensor([1, 0.56234, 0.31623, 0.17783]), torch.zeros(4)
    torch.testing.assert_close(fx, torch.cat([size, zeros]), rtol=0, atol=1e-5)
    torch.testing.assert_close(fy, torch.cat([zeros, size]), rtol=0, atol=1e-5)


def test_rope_mixed_draws_one_direction_a_head_and_layer():
    freqs = RoPEMixed((2, 3), 16, num_heads=3, depth=4).freqs
    assert freqs.shape == (2, 4, 3, 8)
    angles = torch.atan2(freqs[1], freqs[0])[..., :4]  # of the first direction: one for all its frequencies
    torch.testing.assert_close(angles, angles[..., :1].expand(4, 3, 4))
    assert len(angles[..., 0].flatten().unique()) == 12


@pytest.mark.parametrize("name", ["rope2d", "rope_mixed"])
@pytest.mark.parametrize("grid_size", [(4, 4), (3, 5)])
def test_rotary_logits_depend_on_the_displacement_alone(name, grid_size):
    h, w = grid_size
    rope = rotary(name, grid_size)
    q, k = (torch.randn(1, 2, 1, 16).expand(1, 2, h * w, 16) for _ in range(2))
    logits = (rope.rotate(q, 0) @ rope.rotate(k, 0).transpose(-2, -1)).view(2, h, w, h, w)
    torch.testing.assert_close(logits[:, 0, 0, 1, 2], logits[:, 1, 1, 2, 3], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[:, 2, 1, 0, 0], logits[:, 2, 3, 0, 2], rtol=0, atol=1e-5)
    assert (logits[:, 0, 0, 1, 2] - logits[:, 0, 0, 2, 1]).abs().min() > 0.01
    assert (logits[:, 0, 0, 1, 2] - logits[:, 0, 0, 2, 1]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["rope2d", "rope_mixed"])
def test_rotation_keeps_norms_and_leaves_the_first_cell_and_prefix_tokens_alone(name):
    rope, x = rotary(name, (3, 5), num_prefix_tokens=2), torch.randn(2, 2, 17, 16)
    turned = rope.rotate(x, 1)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=0, atol=1e-5)
    assert torch.equal(turned[:, :, :3], x[:, :, :3])  # two prefix tokens and cell (0, 0)
    assert (turned[:, :, 3:] - x[:, :, 3:]).abs().amax(dim=(0, 1, 3)).min() > 0.1


@pytest.mark.parametrize("name", ["rope2d", "rope_mixed"])
def test_a_class_query_sees_the_keys_absolute_cell(name):
    rope = rotary(name, (3, 5), num_prefix_tokens=1)
    q, k = torch.randn(1, 2, 16, 16), torch.randn(1, 2, 1, 16).expand(1, 2, 16, 16)
    logits = rope.rotate(q, 0)[:, :, :1] @ rope.rotate(k, 0)[:, :, 1:].transpose(-2, -1)
    assert logits.std(dim=-1).min() > 0.1


@pytest.mark.parametrize("name", ["rope2d", "rope_mixed"])
def test_rotation_is_accurate_in_bfloat16_models(name):
    reference = rotary(name, (14, 14))
    cast = rotary(name, (14, 14))
    cast.load_state_dict(reference.state_dict())
    cast.to(torch.bfloat16)
    x = torch.randn(1, 2, 196, 16).bfloat16()
    for ours, theirs in zip(cast.cos_sin(1), reference.cos_sin(1), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert cast.rotate(x, 1).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(reference.rotate(x.float(), 1), reference.rotate(x.double(), 1).float())


@pytest.mark.parametrize("name", ["rope2d", "rope_mixed"])
def test_a_bfloat16_default_dtype_does_not_reach_the_tables(name):
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = rotary(name, (3, 5))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for x in (*module.buffers(), *module.parameters())} == {torch.float32}


def test_a_trained_frequency_gets_a_gradient():
    rope = rotary("rope_mixed", (3, 5))
    rope.rotate(torch.randn(1, 2, 15, 16), 0).square()[..., ::2].sum().backward()
    assert rope.freqs.grad[:, 0].abs().min() > 0
    assert rope.freqs.grad[:, 1].abs().max() == 0


class Cosines(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.cos.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rope", "cosines"),
    [
        (RoPE2d((3, 5), 16), 0),
        (RoPE2d((3, 5), 16, coordinates="normalized", shift=0.1), 1),
        (RoPEMixed((3, 5), 16, num_heads=2, depth=3, join="every_layer"), 3),  # trained, and others in each block
    ],
)
def test_tables_are_made_once_a_step_not_for_the_queries_and_keys_of_each_block(rope, cosines):
    blocks, tokens = [Attention(32, num_heads=2) for _ in range(3)], torch.randn(2, 15, 32)
    with Cosines() as counted:
        positions = rope.train().for_batch()
        for layer, attention in enumerate(blocks):
            tokens = attention(tokens, positions, layer)
    assert counted.count == cosines


def test_lie_rotations_are_exponentials_of_a_sum_of_generators():
    position, x = LieRE((2, 4), head_dim=8, num_heads=2, depth=3, num_prefix_tokens=1, block=4), torch.randn(1, 2, 9, 8)
    turned = position.rotate(x, layer=1)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    raw = position.generators[:, 1, 1, 0].triu(1).double()
    skew = raw - raw.transpose(-2, -1)
    rotation = torch.linalg.matrix_exp(skew[0] * 0.5 + skew[1] * 0.75)  # row 1 of 2, column 3 of 4
    torch.testing.assert_close(turned[0, 1, 8, :4], (rotation @ x[0, 1, 8, :4].double()).float())
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(4, dtype=torch.float64))


def test_lie_rotations_of_two_channels_are_mixed_rotary():
    lie, mixed = LieRE((2, 4), 4, num_heads=2, block=2), RoPEMixed((2, 4), 4, num_heads=2)
    with torch.no_grad():
        down, across = lie.generators[:, 0, :, :, 0, 1]
        mixed.freqs[0, 0], mixed.freqs[1, 0] = -across / 4, -down / 2
        x = torch.randn(3, 2, 8, 4)
        torch.testing.assert_close(lie.rotate(x, 0), mixed.rotate(x, 0), rtol=0, atol=3e-5)


@pytest.mark.parametrize(("kind", "made"), [(LieRE, "rotations"), (String, "channels"), (RoPEMixed, "cos_sin")])
def test_a_block_makes_its_rotation_once_for_queries_and_keys(kind, made, monkeypatch):
    torch.manual_seed(0)
    pos = kind((2, 3), head_dim=8, num_heads=2, num_prefix_tokens=1)
    attention, x = Attention(16, num_heads=2, qk_norm=True), torch.randn(2, 7, 16)
    calls, plain = [], getattr(kind, made)
    monkeypatch.setattr(kind, made, lambda self, layer: calls.append(layer) or plain(self, layer))
    stacked = attention(x, pos, layer=0)
    assert calls == [0]
    pos.rotates_stacked = False
    assert torch.equal(attention(x, pos, layer=0), stacked) and len(calls) == 3


def test_string_is_the_exponential_of_commuting_generators():
    string = String((2, 3), head_dim=8, num_heads=2, num_prefix_tokens=1).double()
    nn.init.normal_(string.skew, std=0.5)
    x = torch.randn(1, 2, 7, 8, dtype=torch.float64)
    turned = string.rotate(x, layer=0)
    for head in range(2):
        P = string.channels(0)[head]
        torch.testing.assert_close(P @ P.T, torch.eye(8, dtype=torch.float64))
        generators = []
        for freqs in string.freqs[:, 0, head]:  # of x, of y
            turns = [torch.tensor([[0.0, -w.item()], [w.item(), 0.0]], dtype=torch.float64) for w in freqs]
            generators.append(P @ torch.block_diag(*turns) @ P.T)
        gx, gy = generators
        torch.testing.assert_close(gx @ gy, gy @ gx)
        for token, (row, column) in enumerate([(0, 0), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]):
            R = torch.matrix_exp(column * gx + row * gy)
            torch.testing.assert_close(turned[0, head, token], R @ x[0, head, token])


def test_a_new_string_is_rope_mixed():
    torch.manual_seed(0)
    string = String((2, 3), head_dim=8, num_heads=2)
    torch.manual_seed(0)
    mixed, x = RoPEMixed((2, 3), head_dim=8, num_heads=2), torch.randn(1, 2, 6, 8)
    torch.testing.assert_close(string.rotate(x, 0), mixed.rotate(x, 0))


class Turning(PosEmbed):
    """Rotations by products of complex numbers, as in Meta's code."""

    def __init__(self, grid_size):
        super().__init__(grid_size)
        self.register_buffer("turns", torch.polar(torch.ones(6, 4), torch.arange(24.0).view(6, 4)), persistent=False)

    def rotate(self, x, layer):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns).flatten(-2)


def test_a_complex_buffer_keeps_its_imaginary_part_in_half_precision():
    x, position = torch.randn(2, 2, 6, 8), Turning((2, 3))
    expected = position.rotate(x, 0)
    position.to(torch.bfloat16)
    assert position.turns.dtype is torch.complex64
    torch.testing.assert_close(position.rotate(x.bfloat16(), 0).float(), expected, rtol=0.02, atol=0.02)
