import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from small_nets import small_net
from torch import nn

from vitlab.analysis.cost import analyze_cost, macs_by_part, parameters_by_part
from vitlab.analysis.filters import analyze_filters, filter_components
from vitlab.analysis.head_attention import distances
from vitlab.analysis.views.token_layers import analyze_token_layers, token_layer_maps
from vitlab.errors import UsageError
from vitlab.layers import Attention, Mlp
from vitlab.models.cost import count_macs
from vitlab.models.foreign import AnyNetwork

T2T = {"tokenizer": "t2t", "t2t_kernels": (3, 3, 3), "t2t_strides": (1, 2, 1), "t2t_dim": 8}


def test_components_are_orthonormal_and_rebuild_the_filters():
    filters = torch.randn(20, 2, 3, 3)
    components, shares = filter_components(filters)
    flat = components.flatten(1)
    torch.testing.assert_close(flat @ flat.T, torch.eye(18).double())
    centered = (filters - filters.mean(dim=0)).flatten(1).double()
    torch.testing.assert_close(centered @ flat.T @ flat, centered)
    variance = (centered @ flat.T).square().sum(dim=0)
    torch.testing.assert_close(shares, variance / variance.sum())
    assert (shares.diff() <= 0).all()


@pytest.mark.parametrize(
    "arguments", [{}, {"tokenizer": "conv", "t2t_kernels": (3, 3), "t2t_strides": (2, 1), "t2t_dim": 8}]
)
def test_filters_on_pixels_are_shown(small_subject, arguments):
    table = analyze_filters(small_subject(**arguments)).table
    side = 3 if arguments else 2
    assert set(table["row"]) == set(range(side)) and table["component"].max() < 28
    assert table.groupby("component")["share"].first().sum() <= 1 + 1e-6


def test_t2t_has_no_filters_on_pixels(small_subject):
    with pytest.raises(UsageError, match="use token_layers"):
        analyze_filters(small_subject(**T2T))


def test_filters_of_a_tokenizer_of_ones_own_are_those_of_its_convolution(small_subject):
    subject = small_subject()
    expected = analyze_filters(subject).table["weight"].tolist()
    subject.net.tokenizer = torch.nn.Sequential(subject.net.tokenizer.proj, torch.nn.Flatten(2))
    assert analyze_filters(subject).table["weight"].tolist() == expected
    subject.net.tokenizer = torch.nn.Linear(4, 4)
    with pytest.raises(UsageError, match="tokenizer=Linear does not begin with a convolution"):
        analyze_filters(subject)


def test_token_layer_maps_are_those_that_lead_to_the_tokens():
    net, images = small_net(**T2T, t2t_attn="transformer"), torch.randn(2, 1, 8, 8)
    tokenizer = net.tokenizer
    maps = token_layer_maps(tokenizer, images)
    assert [tuple(m.shape) for m in maps] == [(2, 64, 64), (2, 16, 16)]
    x = images
    with torch.no_grad():
        for i, attention in enumerate(maps):
            kernel, stride, padding = tokenizer.splits[i]
            x = F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)
            layer = tokenizer.get_submodule(f"attention{i + 1}")
            values = layer.attn.qkv(layer.norm1(x)).chunk(3, dim=-1)[2]
            x = values + layer.attn.proj(attention @ values)
            x = (x + layer.mlp(layer.norm2(x))).transpose(1, 2).unflatten(2, tokenizer.grids[i])
        kernel, stride, padding = tokenizer.splits[-1]
        tokens = tokenizer.project(F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2))
        torch.testing.assert_close(tokens, tokenizer(images), atol=1e-4, rtol=1e-4)


def test_the_shown_cell_lies_where_the_query_patch_does(small_subject):
    subject = small_subject(**T2T, t2t_attn="transformer", query=(3, 0))
    table = analyze_token_layers(subject).table
    maps = token_layer_maps(subject.net.tokenizer, subject.shown())
    first = table[(table["layer"] == 1) & (table["image"] == 0)]
    torch.testing.assert_close(torch.tensor(first["weight"].to_numpy()).float(), maps[0][0, 7 * 8 + 1])
    expected = (maps[0] * distances((8, 8))).sum(dim=-1).mean().item()
    assert first["mean_distance"].iloc[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("count", [10, 64])  # of 64 tokens
def test_tokens_that_read_nothing_have_no_distance(small_subject, monkeypatch, count):
    """Such as those of a performer whose features vanish."""
    subject = small_subject(**T2T, t2t_attn="transformer", query=(0, 0))

    def vanishing(tokenizer, images):
        first, second = token_layer_maps(tokenizer, images)
        first[:, :count] *= 1e-9
        return [first, second]

    monkeypatch.setattr("vitlab.analysis.views.token_layers.token_layer_maps", vanishing)
    finding = analyze_token_layers(subject)
    names = ["mean_distance", "mean_distance_low", "mean_distance_high"]
    (found,) = finding.table[finding.table["layer"] == 1][names].drop_duplicates().to_numpy()
    assert f"; {count / 64:.1%} of the tokens of layer 1 read nothing" in finding.note and "layer 2" not in finding.note
    if count == 64:
        shown = finding.figure.axes[1]
        assert np.isnan(found).all() and "its weights vanish" in shown.get_title()
        assert shown.images[0].get_clim() == (0, 1 / 64)
    else:
        whole = token_layer_maps(subject.net.tokenizer, subject.shown())[0][:, count:]
        assert found[0] == pytest.approx((whole * distances((8, 8))[count:]).sum(dim=-1).mean().item(), abs=1e-4)
        assert 0 <= found[1] <= found[0] <= found[2] <= 7 * 2**0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": "patch"}, "tokenizer=patch has none; use attention"),
        ({"tokenizer": "conv"}, "tokenizer=conv has none"),
    ],
)
def test_a_tokenizer_without_token_maps_is_told_what_to_use(small_subject, arguments, message):
    with pytest.raises(UsageError, match=message):
        analyze_token_layers(small_subject(**arguments))


@pytest.mark.parametrize("arguments", [{}, T2T, {"pos_embed": "conv", "global_pool": "map"}])
def test_parts_add_up_to_the_whole(arguments):
    net = small_net(**arguments)
    counts = parameters_by_part(net)
    assert sum(counts.values()) == sum(p.numel() for p in net.parameters())
    assert counts["attention"] == 2 * sum(p.numel() for p in net.blocks[0].attn.parameters())
    macs = macs_by_part(net)
    assert sum(macs.values()) == count_macs(net)
    assert min(macs["tokenizer"], macs["attention"], macs["mlp"]) > 0
    assert macs["mlp"] == 2 * 17 * 2 * 16 * 64


class Bare(nn.Module):
    """A block of one's own with the usual attention and MLP."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.attn, self.mlp = Attention(dim, num_heads), Mlp(dim, 2 * dim)

    def forward(self, x, pos_embed, layer):
        return self.mlp(self.attn(x, pos_embed, layer))


def test_what_stands_in_several_blocks_counts_once_and_parts_of_own_blocks_count():
    net, own = small_net(), small_net(block=Bare)
    net.blocks[1] = net.blocks[0]
    for each, times in ((net, 1), (own, 2)):
        attention, mlp = (
            times * sum(p.numel() for p in m.parameters()) for m in (each.blocks[0].attn, each.blocks[0].mlp)
        )
        counts, macs = parameters_by_part(each), macs_by_part(each)
        assert (counts["attention"], counts["mlp"]) == (attention, mlp) and macs["attention"] > macs["the rest"] > 0
        assert sum(counts.values()) == sum(p.numel() for p in each.parameters()) and counts["the rest"] > 0
    layer = nn.Linear(64, 64)
    tied = AnyNetwork(
        nn.Sequential(nn.Flatten(), nn.Sequential(layer), nn.Sequential(nn.ReLU(), layer)), "tied", (8, 8), 1
    )
    assert parameters_by_part(tied) == {"1": 64 * 65, "the rest": 0}


@pytest.mark.slow
class Fused(nn.Module):
    """Attention that torch computes in one operation, of which the counter sees nothing on a CPU."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])


@pytest.mark.parametrize("part", [Fused, lambda: nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)])
def test_products_of_fused_attention_count_on_a_cpu(part):
    net = AnyNetwork(nn.Sequential(nn.Flatten(2), layer := part(), nn.Flatten(), nn.Linear(60, 3)), "own", (3, 4), 5)
    net.eval()  # in which torch fuses a whole layer
    more = 0 if isinstance(layer, Fused) else 2 * 5 * 12 * 24
    assert macs_by_part(net)["1"] == 5 * 4 * 12 * 12 + 2 * 5 * 5 * 12 + more
    assert torch.backends.mha.get_fastpath_enabled()
    last = net.net[3]
    last.bias.requires_grad_(False)
    macs_by_part(net)
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["net.3.bias"]  # as before


@pytest.mark.slow
def test_cost_is_measured_and_every_parameter_is_in_the_file(small_subject, monkeypatch, tmp_path):
    monkeypatch.setattr("vitlab.analysis.cost.SECONDS", 0.01)
    path = analyze_cost(small_subject(embed_dim=256)).save(tmp_path, "cost")[0]
    table = pd.read_csv(path).set_index(["quantity", "of"])["value"]
    count = sum(p.numel() for p in small_net(embed_dim=256).parameters())
    assert table["parameters", "all"] == count > 1_000_000
    assert (table["images per second"] > 0).all() and (table["peak memory, MiB"] > 1).all()
