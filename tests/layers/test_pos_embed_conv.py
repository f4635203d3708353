import pytest
import torch
from timm.models.twins import PosConv

from vitlab.layers.pos_embed.conv import ConvPosEmbed


def test_conv_is_the_module_of_twins():
    ours, theirs = ConvPosEmbed((3, 5), 4), PosConv(4, 4)
    ours.convs[0].load_state_dict(theirs.proj[0].state_dict())
    x = torch.randn(2, 15, 4)
    torch.testing.assert_close(ours.leave(x, 0), theirs(x, (3, 5)))


def test_prefix_tokens_pass_by():
    conv, x = ConvPosEmbed((3, 5), 4), torch.randn(2, 17, 4)
    out = conv.leave(x, 0)
    assert torch.equal(out[:, :2], x[:, :2])
    torch.testing.assert_close(out[:, 2:], conv.leave(x[:, 2:], 0))


def test_stem_acts_after_the_first_block_and_every_layer_after_each():
    x = torch.randn(1, 15, 4)
    stem, every = ConvPosEmbed((3, 5), 4, depth=3), ConvPosEmbed((3, 5), 4, depth=3, join="every_layer")
    assert len(stem.convs) == 1 and stem.leave(x, 1) is x
    outs = [every.leave(x, layer) for layer in range(3)]
    assert len(every.convs) == 3 and not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])


@pytest.mark.parametrize(("padding_mode", "border"), [("zeros", False), ("circular", True)])
def test_absolute_position_comes_from_the_zero_padding_alone(padding_mode, border):
    conv = ConvPosEmbed((5, 6), 4)
    conv.convs[0].padding_mode = padding_mode
    conv.convs[0]._reversed_padding_repeated_twice = [1, 1, 1, 1]
    x = torch.randn(1, 30, 4)
    rolled = x.view(1, 5, 6, 4).roll((1, 2), dims=(1, 2)).view(1, 30, 4)
    expected = conv.leave(x, 0).view(1, 5, 6, 4).roll((1, 2), dims=(1, 2))
    difference = (conv.leave(rolled, 0).view(1, 5, 6, 4) - expected).abs().amax(dim=(0, 3))  # (h, w)
    assert difference[2:4, 3:5].max() <= 1e-5  # cells that lie inside the grid both times
    assert (difference.max() <= 1e-5) if border else (difference.max() > 1e-3)
