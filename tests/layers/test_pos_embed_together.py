import pytest
import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
from timm.models.eva import Eva

from vitlab.layers.pos_embed import PosEmbed, build_pos_embed
from vitlab.layers.pos_embed.biases import BiasPosEmbed, RelPos
from vitlab.layers.pos_embed.rotary import RoPE2d
from vitlab.layers.pos_embed.together import Together
from vitlab.models.convert import from_timm
from vitlab.models.vit import VisionTransformer
from vitlab.optim import param_groups

SIZE = {"grid_size": (2, 3), "embed_dim": 16, "num_heads": 2, "depth": 2, "num_prefix_tokens": 1}
GRID = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
HALF = {"class_path": "rope2d", "init_args": {"pairs": "half", "theta": 10.0}}


def build(name):
    return build_pos_embed(name, **SIZE)


def test_parts_of_a_list_act_one_after_the_other_each_in_its_place():
    torch.manual_seed(0)
    both = build(["learned", HALF, "relpos", "alibi2d", "conv"])
    parts = both.parts
    patches, tokens, q = torch.randn(1, 6, 16), torch.randn(1, 7, 16), torch.randn(1, 2, 7, 8)
    assert torch.equal(both(patches), parts["learned"](patches))
    assert torch.equal(both.rotate(q, 1), parts["rope2d"].rotate(q, 1)) and parts["rope2d"].theta == 10.0
    assert torch.equal(both.bias(1), parts["relpos"].bias(1) + parts["alibi2d"].bias(1))
    assert torch.equal(both.leave(tokens, 0), parts["conv"].leave(tokens, 0)) and both.acts_after(0)
    with both.permute_positions(order := torch.randperm(6)):
        assert torch.equal(both(patches), patches + parts["learned"].table()[order])


class SelfBias(BiasPosEmbed):
    """One bias for all heads."""

    def biases(self, layer):
        return torch.eye(7)[None]


def test_a_bias_for_all_heads_is_added_to_one_for_each():
    own, table = SelfBias((2, 3), 1), RelPos((2, 3), num_heads=2, num_prefix_tokens=1)
    for parts in ({"own": own, "relpos": table}, {"relpos": table, "own": own}):
        assert torch.equal(Together((2, 3), parts).bias(0), table.bias(0) + torch.eye(7))


def test_parts_keep_their_options_and_their_rates():
    list_ = [{"class_path": "learned", "init_args": {"join": "every_layer", "trainable": False}}, "rope_mixed"]
    net = VisionTransformer(**GRID, pos_embed=list_)
    assert not net.pos_embed.learned.weight.requires_grad and len(net.pos_embed.learned.weight) == 2
    rates = {id(p): group["lr"] for group in param_groups(net, 1.0, 0.0, layer_decay=0.5) for p in group["params"]}
    assert rates[id(net.pos_embed.rope_mixed.freqs)] == 0.5


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (["learned", "sincos2d"], "learned and sincos2d are both added to the tokens"),
        (["rope2d", "rope_mixed"], "rope2d and rope_mixed both rotate"),
        (["learned", "none"], "at least two methods, and 'none' is not one"),
        (["learned"], "at least two methods"),
        (["relpos", "relpos"], "methods of a list need names of their own, got relpos . relpos"),
        (["learned", "ropd"], 'did you mean "rope2d"'),
    ],
)
def test_lists_of_methods_that_conflict_are_refused(parts, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(parts)


class Wave(PosEmbed):
    pass


def test_two_classes_of_one_name_in_a_list_are_refused_with_their_paths():
    with pytest.raises(ValueError, match=rf"need names of their own, got {__name__}\.Wave . other\.Wave"):
        build([f"{__name__}.Wave", "other.Wave"])


def test_every_method_of_a_list_is_resized_by_a_policy_that_it_has():
    torch.manual_seed(0)
    small, large = (VisionTransformer(**GRID | {"img_size": s}, pos_embed=["learned", "rope2d"]) for s in (16, 32))
    own = {k.removeprefix("pos_embed."): v for k, v in small.state_dict().items() if k.startswith("pos_embed.")}
    assert large.pos_embed.policies_for(own) == ("interpolate", "extrapolate", "rescale")
    new = large.pos_embed.resized_state(own, (2, 2), "rescale")
    assert new["learned.weight"].shape == (1, 16, 32) and new["rope2d.trained_grid"].tolist() == [2, 2]
    with pytest.raises(ValueError, match="policy must be one of interpolate, extrapolate, rescale"):
        large.pos_embed.resized_state(own, (2, 2), None)


def test_a_table_and_a_rotation_are_timms_eva_with_both():
    torch.manual_seed(0)
    options = {"use_rot_pos_emb": True, "rope_grid_indexing": "xy", "attn_type": "rope", "rope_type": "cat"}
    theirs = Eva(**GRID, **options, rope_temperature=100.0, global_pool="token").eval()
    ours = VisionTransformer(**GRID, pos_embed=["learned", "rope2d"]).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    state = from_timm(theirs.state_dict(), num_patches=15)
    state["pos_embed.learned.weight"] = state.pop("pos_embed.weight")
    ours.load_state_dict(state)
    images = torch.randn(2, 3, 24, 40)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=2e-5)


DINO = {"coordinates": "normalized", "pairs": "half", "axes": "yx"}


@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_normalized_coordinates_in_half_pairs_are_dinov3s(grid):
    theirs = RotaryEmbeddingDinoV3(8, feat_shape=list(grid))
    ours, x = RoPE2d(grid, 8, **DINO), torch.randn(1, 8, *grid)
    expected = theirs(x)[0].flatten(1).t()
    actual = ours.rotate(x.flatten(2).transpose(1, 2)[:, None], layer=0)[0, 0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_neighbors_and_halves_are_the_same_rotation_of_other_channels():
    x, order = torch.randn(1, 1, 6, 8), torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    a, b = (RoPE2d((2, 3), 8, pairs=pairs) for pairs in ("interleaved", "half"))
    torch.testing.assert_close(a.rotate(x, 0)[..., order], b.rotate(x[..., order], 0))


def test_training_moves_all_coordinates_of_a_batch_together_and_evaluation_none():
    torch.manual_seed(0)
    rope = RoPE2d((2, 3), 8, num_prefix_tokens=1, **DINO, shift=0.3, jitter=1.5, rescale=2.0)
    x, still = torch.randn(1, 1, 7, 8), RoPE2d((2, 3), 8, num_prefix_tokens=1, **DINO)
    cells, factors, shifts = still._cells(), [], []
    for _ in range(200):
        drawn = rope.for_batch()
        assert torch.equal(drawn.rotate(x, 0), drawn.rotate(x, 1))  # one draw for all blocks
        assert torch.equal(drawn.rotate(x, 0)[:, :, 0], x[:, :, 0])  # prefix tokens stay
        assert torch.equal(rope.rotate(x, 0), still.rotate(x, 0))  # the method itself is as before
        angle = torch.atan2(*drawn.cos_sin(0)[::-1])[1:, [1, 3]] * 10 / (2 * torch.pi)  # frequency 1/10
        slope = (angle[-1] - angle[0]) / (cells[:, -1] - cells[:, 0])
        factors.append(slope)
        shifts.append(angle[0] / slope - cells[:, 0])
    factors, shifts = torch.stack(factors), torch.stack(shifts)
    assert 1 / 3 <= factors.min() < 0.5 and 2.0 < factors.max() <= 3.0
    assert 0.25 < shifts.abs().max() <= 0.3001 and (factors[:, 0] - factors[:, 1]).abs().max() > 0.2
    assert rope.eval().for_batch() is rope


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pairs": "halves"}, "`pairs` must be one of interleaved, half, got 'halves'"),
        ({"shift": 0.1}, "apply only to coordinates='normalized'"),
        ({"register_theta": 1.0}, r"`register_theta` must be in \(1, 1e12\], got 1.0"),
        ({"register_theta": 100.0}, "`register_theta` rotates prefix tokens, and the network has none: leave it out"),
        ({**DINO, "jitter": 0.5}, "`jitter` and `rescale` 1, got 0.0, 0.5"),
    ],
)
def test_impossible_options_of_a_rotation_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        RoPE2d((2, 3), 8, **options)
