import pytest
import torch
from timm.models.swin_transformer_v2 import WindowAttention

from vitlab.layers.attention import Attention
from vitlab.layers.pos_embed.added import Fourier
from vitlab.layers.pos_embed.biases import ContinuousBias
from vitlab.layers.pos_embed.rotary import LieRE, RoPEMixed, String


@pytest.mark.parametrize("trained", [None, (2, 3)])
def test_log_spaced_biases_are_swin_v2s(trained):
    theirs = WindowAttention(8, (4, 5), 2, pretrained_window_size=trained or (0, 0))
    ours = ContinuousBias((4, 5), num_heads=2)
    if trained:
        ours.load_state_dict(ours.resized_state(ours.state_dict(), trained, "extrapolate"))
    ours.mlps[0].load_state_dict(theirs.cpb_mlp.state_dict())
    table = theirs.cpb_mlp(theirs.relative_coords_table).view(-1, 2)
    expected = 16 * table[theirs.relative_position_index.view(-1)].sigmoid().view(20, 20, 2).permute(2, 0, 1)
    torch.testing.assert_close(ours.bias(0) + 8, expected)


def test_fourier_features_follow_the_papers_formula():
    position = Fourier((3, 4), embed_dim=6, gamma=2.0)
    for n, (y, x) in enumerate((y, x) for y in range(3) for x in range(4)):
        angles = position.freqs @ torch.tensor([float(y), float(x)])
        features = torch.cat([angles.cos(), angles.sin()]) / 6**0.5
        torch.testing.assert_close(position.table()[n], position.mlp(features))


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


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LieRE((2, 2), head_dim=6, num_heads=1, block=4), "`block` must divide the head width"),
        (lambda: Fourier((2, 2), embed_dim=7), "`embed_dim` must be even"),
    ],
)
def test_widths_that_cannot_be_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


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
