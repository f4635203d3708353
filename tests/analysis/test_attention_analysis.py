import math

import pytest
import torch
from small_nets import POSITIONS, small_net

from vitlab.analysis import ANALYSES
from vitlab.analysis.attribution.caught import plain_maps
from vitlab.analysis.attribution.maps import OF_ATTENTION, methods_of
from vitlab.analysis.head_attention import (
    _table,
    analyze_attention,
    analyze_distance,
    analyze_entropy,
    analyze_rollout,
    entropy,
    mean_distance,
    per_head,
    rollout,
    uniform_distance,
)
from vitlab.analysis.positions import analyze_displacement
from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.layers.block import Block
from vitlab.layers.pos_embed import PosEmbed
from vitlab.look.viewer import seen_heads, unseen
from vitlab.models.walk import (
    all_attention_maps,
    attention_inputs,
    attention_logits,
    attention_maps,
    block_tokens,
    graded_tokens,
    placed_tokens,
)

IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class OncePerBatch(PosEmbed):
    now = None

    def __init__(self, grid_size, num_heads):
        super().__init__(grid_size)
        self.weight = torch.nn.Parameter(torch.empty(num_heads, 17, 17))

    def for_batch(self):
        return self.view(now=3 * self.weight)

    def bias(self, layer):
        return self.now


@pytest.mark.parametrize("pos_embed", POSITIONS)
def test_maps_times_values_are_what_the_fused_attention_returns(pos_embed):
    net = small_net(pos_embed=pos_embed, reg_tokens=1, qk_norm=True)
    inputs = attention_inputs(net, IMAGES)
    for layer, (block, x) in enumerate(zip(net.blocks, inputs, strict=True)):
        values = block.attn.qkv(x).unflatten(2, (3, 2, 8))[:, :, 2].transpose(1, 2)  # (B, A, L, d)
        mixed = attention_maps(net, IMAGES, layer) @ values
        expected = block.attn(x, net.pos_embed, layer)
        torch.testing.assert_close(block.attn.proj(mixed.transpose(1, 2).flatten(2)), expected, atol=1e-5, rtol=1e-5)


def test_tokens_of_each_block_are_those_of_the_walk():
    net = small_net(pos_embed="conv")
    tokens = block_tokens(net, IMAGES)
    assert len(tokens) == 3
    torch.testing.assert_close(net.norm(tokens[-1]), net.forward_features(IMAGES))
    for layer, block in enumerate(net.blocks):
        torch.testing.assert_close(block(tokens[layer], net.pos_embed, layer), tokens[layer + 1])


@pytest.mark.parametrize("pos_embed", ["none", "learned", "conv"])
def test_attention_receives_the_normalized_tokens_of_the_same_images(pos_embed):
    net = small_net(pos_embed=pos_embed, **({"pos_embed_join": "every_layer"} if pos_embed == "learned" else {}))
    tokens, inputs = block_tokens(net, IMAGES), attention_inputs(net, IMAGES)
    for layer, block in enumerate(net.blocks):
        torch.testing.assert_close(inputs[layer], block.norm1(net.pos_embed.enter(tokens[layer], layer)))


def test_what_positions_compute_once_per_batch_is_in_maps_logits_and_tokens():
    net = small_net(pos_embed=OncePerBatch)
    x, positions = attention_inputs(net, IMAGES)[0], net.pos_embed.for_batch()
    maps = net.blocks[0].attn.weights(x, positions, 0)
    for shown in (attention_maps(net, IMAGES, 0), next(all_attention_maps(net, IMAGES))):
        torch.testing.assert_close(shown, maps)
    torch.testing.assert_close(next(attention_logits(net, IMAGES)), net.blocks[0].attn.logits(x, positions, 0))
    torch.testing.assert_close(net.norm(block_tokens(net, IMAGES)[-1]), net.forward_features(IMAGES))


def test_reading_attention_leaves_the_network_unchanged():
    net = small_net()
    attention_maps(net, IMAGES, 0)
    block_tokens(net, IMAGES)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


class Smooth(Attention):
    """Attention whose weights are not those that a kernel computes."""

    def weigh(self, q, k, pos_embed, layer):
        return 0.5 * super().weigh(q, k, pos_embed, layer) + 0.5 / k.shape[2]


@pytest.mark.parametrize("attn", [Attention, Smooth])
def test_a_block_or_an_attention_that_stands_in_several_places_has_a_map_for_each(attn):
    net, same = (small_net(depth=3, attn=attn, pos_embed="relpos") for _ in range(2))
    net.blocks[2] = net.blocks[0]
    net.blocks[1].attn = net.blocks[0].attn
    same.load_state_dict(net.state_dict())
    expected = plain_maps(same, IMAGES)
    for layer, (maps, shown) in enumerate(zip(plain_maps(net, IMAGES), all_attention_maps(net, IMAGES), strict=True)):
        torch.testing.assert_close(maps, expected[layer], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(shown, expected[layer], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(attention_maps(net, IMAGES, layer), shown)
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_a_block_that_calls_its_attention_twice_is_told():
    net = small_net()
    attend = net.blocks[0].attn
    net.blocks[0].forward = lambda x, pos_embed, layer: attend(attend(x, pos_embed, layer), pos_embed, layer)
    with pytest.raises(UsageError, match="2 blocks call their attention `attn` 3 times"):
        attention_maps(net, IMAGES, 0)


class OneThenTwo(Attention):
    def __init__(self, dim: int, num_heads: int, layer: int):
        super().__init__(dim, num_heads if layer else 1)


def test_blocks_may_have_other_numbers_of_heads(small_subject):
    subject = small_subject(attn=OneThenTwo, num_images=4)
    maps = list(all_attention_maps(subject.net, subject.labeled()[0]))
    heads = [(0, 0), (1, 0), (1, 1)]
    table = analyze_distance(subject).table
    assert list(zip(table["layer"], table["head"], strict=True)) == heads
    for (layer, head), found in zip(heads, table["distance"], strict=True):
        expected = mean_distance(maps[layer], (4, 4), 1)[:, head].mean()
        assert found == pytest.approx(float(expected), rel=1e-5)
    profiles = analyze_displacement(subject).table.groupby(["layer", "head"])[["logit", "position"]]
    assert list(profiles.groups) == heads and profiles.count().to_numpy().tolist() == [[49, 49]] * 3
    with pytest.raises(UsageError, match=r"layer 0 of model has heads 0\.\.0, and `--head` is 1"):
        analyze_attention(small_subject(attn=OneThenTwo, layer=0, head=1))


def test_logits_are_those_behind_the_maps():
    net = small_net(pos_embed="relpos")
    for layer, logits in enumerate(attention_logits(net, IMAGES)):
        torch.testing.assert_close(logits.softmax(dim=-1), attention_maps(net, IMAGES, layer))


def test_rollout_rows_sum_to_one_and_follow_the_loop():
    maps = [torch.randn(2, 3, 5, 5).softmax(dim=-1) for _ in range(4)]
    total = rollout(maps)
    torch.testing.assert_close(total.sum(dim=-1), torch.ones(2, 5))
    expected = torch.eye(5).expand(2, 5, 5)
    for layer in maps:
        expected = (0.5 * layer.mean(dim=1) + 0.5 * torch.eye(5)) @ expected
    torch.testing.assert_close(total, expected)
    with pytest.raises(ValueError, match="at least one block"):
        rollout([])


@pytest.mark.parametrize(("grid", "expected"), [((4, 4), 2.01), ((8, 8), 4.14), ((14, 14), 7.28)])
def test_uniform_attention_looks_as_far_as_the_mean_of_all_pairs(grid, expected):
    n = grid[0] * grid[1]
    assert uniform_distance(grid) == pytest.approx(expected, abs=0.005)
    maps = torch.full((2, 3, n + 1, n + 1), 1 / (n + 1))
    torch.testing.assert_close(mean_distance(maps, grid, 1), torch.full((2, 3), uniform_distance(grid)))


def test_attention_to_the_class_token_does_not_count_as_locality():
    maps = torch.full((1, 1, 13, 13), 0.01 / 12)
    maps[..., 0] = 0.99
    torch.testing.assert_close(mean_distance(maps, (3, 4), 1).item(), uniform_distance((3, 4)))
    local = torch.eye(13)[None, None]
    assert mean_distance(local, (3, 4), 1).item() == 0


def test_distance_is_the_weighted_mean_of_a_loop():
    maps = torch.randn(2, 2, 7, 7).softmax(dim=-1)
    expected = torch.zeros(2, 2)
    for b, a in ((b, a) for b in range(2) for a in range(2)):
        for i in range(6):
            row = maps[b, a, i + 1, 1:] / maps[b, a, i + 1, 1:].sum()
            for j in range(6):
                expected[b, a] += row[j] * math.dist((i // 3, i % 3), (j // 3, j % 3)) / 6
    torch.testing.assert_close(mean_distance(maps, (2, 3), 1), expected)


def test_entropy_is_log_l_of_uniform_and_zero_of_certain_attention():
    assert entropy(torch.full((1, 1, 5, 5), 0.2)).item() == pytest.approx(math.log(5))
    assert entropy(torch.eye(5)[None, None]).item() == 0


def test_rows_that_vanish_are_neither_near_nor_certain_and_others_need_not_sum_to_1():
    """Such as a user's attention without softmax, or a performer's."""
    maps = torch.rand(1, 2, 7, 7)
    shares = maps / maps.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(mean_distance(maps, (2, 3), 1), mean_distance(shares, (2, 3), 1))
    torch.testing.assert_close(entropy(5 * maps), entropy(shares))
    signed = maps * torch.tensor([1.0, -1, 1, 1, -1, 1, -1])
    torch.testing.assert_close(entropy(signed), entropy(shares))
    blind = maps.clone()
    blind[:, :, 3] *= 1e-9
    rest = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(entropy(blind), torch.special.entr(shares)[:, :, rest].sum(dim=-1).mean(dim=-1))
    sink = torch.zeros(1, 1, 7, 7)
    sink[..., 0] = 1.0  # all to the class token
    assert mean_distance(sink, (2, 3), 1).isnan().all() and entropy(0 * sink).isnan().all()


def test_a_row_has_the_mean_of_a_head_that_of_its_null_and_by_how_much_it_is_above_that_image_by_image():
    values = [torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 8.0]])]  # of three images and two heads
    null = [torch.tensor([[3.0, 5.0], [3.0, 5.0], [6.0, 5.0]])]
    first, second = _table("distance", values, null, 4.0, 7.0).to_dict("records")
    t = 4.302653 / 3**0.5
    assert (first["distance_low"], first["distance"], first["distance_high"]) == pytest.approx((0, 2, 2 + t))
    assert (first["null"], first["null_high"]) == pytest.approx((4, 7))  # 4 + 3^.5 t, cut at what is possible
    assert (first["above_null"], first["above_null_low"], first["above_null_high"]) == pytest.approx(
        (-2, -2 - t, t - 2)
    )
    assert (second["head"], second["above_null"], second["uniform"]) == (1, 1, 4)


def test_each_head_is_measured_on_the_images_of_all_batches():
    net = small_net()
    found = per_head(net, [(IMAGES, None), (IMAGES[:1], None)], lambda maps: maps[:, :, 0, 3])
    for layer, values in enumerate(found):
        torch.testing.assert_close(values, attention_maps(net, IMAGES, layer)[[0, 1, 2, 0], :, 0, 3])


def test_heads_above_and_below_their_null_differ_from_it(small_subject, monkeypatch):
    """Of two layers of two heads, the second is above, the third below, and the last varies."""
    values = [torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([[1.0, 0.9], [1.0, 1.1]])]
    null = [torch.tensor([[1.0, 1.0], [1.0, 1.1]]), torch.tensor([[2.0, 1.0], [2.1, 1.0]])]
    found = iter([values, null])
    monkeypatch.setattr("vitlab.analysis.head_attention.per_head", lambda *_: next(found))
    assert "; 2 of 4 heads differ from it" in analyze_distance(small_subject(num_images=2)).note


def test_tables_have_a_row_for_each_head_and_each_patch(small_subject):
    subject = small_subject()
    uniform = {"distance": uniform_distance((4, 4)), "entropy": math.log(17)}  # the class token counts in the second
    for analyze, column in ((analyze_distance, "distance"), (analyze_entropy, "entropy")):
        table = analyze(subject).table
        assert table["uniform"].tolist() == pytest.approx([uniform[column]] * 4)
        assert list(table["layer"]) == [0, 0, 1, 1] and list(table["head"]) == [0, 1, 0, 1]
        assert (table[column] > 0).all()
    table = analyze_attention(small_subject(layer=0, head=1)).table
    assert len(table) == 4 * 16 and set(table["map"]) == {"head 1"}
    reached = analyze_rollout(subject).table.groupby("image")["weight"].sum()
    assert (reached < 1).all()


def test_the_map_is_that_of_the_layer_head_and_patch_asked_for(small_subject):
    subject = small_subject(layer=1, head=0, query=(2, 3))
    table = analyze_attention(subject).table
    expected = attention_maps(subject.net, subject.shown(), 1)[0, 0, 1 + 2 * 4 + 3, 1:]
    torch.testing.assert_close(torch.tensor(table[table["image"] == 0]["weight"].to_numpy()).float(), expected)
    table = analyze_attention(small_subject(pictures=IMAGES[:1])).table  # the class token in the last layer
    of = table.pivot(index=["row", "column"], columns="map", values="weight")
    maps = attention_maps(subject.net, IMAGES, 1)[0, :, 0, 1:].numpy()
    for name, weights in {"head 0": maps[0], "head 1": maps[1], "mean of heads": maps.mean(axis=0)}.items():
        assert of[name].tolist() == pytest.approx(weights.tolist(), abs=1e-6)


def test_a_network_without_class_token_is_told_which_option_to_use(small_subject):
    bare = {"class_token": False, "global_pool": "avg"}
    for analyze in (analyze_attention, analyze_rollout):
        with pytest.raises(UsageError, match="no class token; choose a patch with --query ROW,COLUMN, or use distance"):
            analyze(small_subject(**bare))
        assert len(analyze(small_subject(**bare, query=(0, 0))).table)


@pytest.mark.parametrize("wrong", [{"layer": 2}, {"head": -1}, {"query": (0, 4)}, {"num_images": 0}])
def test_an_analysis_of_a_missing_part_is_refused(small_subject, wrong):
    with pytest.raises(ValueError, match=f"--{next(iter(wrong))}"):
        small_subject(**wrong)


class Dropping(Block):
    """Drops the last token after each block, as those that merge tokens do (ToMe, arXiv:2210.09461)."""

    def forward(self, x, pos_embed, layer):
        return super().forward(x, pos_embed, layer)[:, :-1]


@pytest.mark.parametrize("name", ["attention", "heads", "rollout", "distance", "entropy", "displacement", "probe"])
def test_blocks_that_change_the_number_of_tokens_are_named(name, small_subject):
    subject = small_subject(block=Dropping)
    with pytest.raises(UsageError, match="the blocks change the number of tokens, from 17 to 16: which cell one stan"):
        ANALYSES[name].measure(subject)


def test_tokens_that_no_cell_has_are_left_out():
    net = small_net(block=Dropping)
    assert [found is not None for found in placed_tokens(net, IMAGES)] == [True, False, False]
    assert [x.shape[1] for x, _ in graded_tokens(net, IMAGES)[1]] == [17]
    assert set(methods_of(net)).isdisjoint(OF_ATTENTION)
    assert seen_heads(net) == [] and "change the number of tokens" in unseen(net)
    assert seen_heads(small_net(block=Block)) == [2, 2]
