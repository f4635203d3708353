import pytest
import torch
from small_nets import brightness_net, small_net

from vitlab.analysis.attention import rollout
from vitlab.analysis.attribution.curves import analyze_faithfulness, deleted, inserted
from vitlab.analysis.attribution.maps import (
    METHODS,
    analyze_attribution,
    attention_rollout,
    caught_maps,
    graded_maps,
    gradient_attention,
    integrated_gradients,
    last_attention,
    occlusion,
)
from vitlab.analysis.attribution.sanity import analyze_sanity, randomized, rank_correlation
from vitlab.analysis.subject import Subject
from vitlab.errors import UsageError
from vitlab.models.walk import attention_maps

IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([1, 7, 4])


def one_bright_patch():
    images = torch.zeros(2, 1, 8, 8)
    images[0, :, 2:4, 4:6], images[1, :, 6:8, 0:2] = 2.0, 3.0  # patches 6 and 12
    return images, torch.tensor([1, 1])


@pytest.mark.parametrize("method", ["integrated gradients", "occlusion"])
def test_only_the_patch_that_decides_is_found(method):
    images, classes = one_bright_patch()
    found = METHODS[method](brightness_net(), images, classes)
    assert found.argmax(dim=1).tolist() == [6, 12]
    assert found.scatter(1, torch.tensor([[6], [12]]), 0).abs().max() < 1e-6


def test_integrated_gradients_add_up_to_what_the_picture_adds():
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


def test_a_head_whose_values_go_nowhere_has_no_gradient_and_no_relevance():
    net = small_net(depth=1)
    with torch.no_grad():
        net.blocks[0].attn.qkv.weight[40:48].zero_()  # the values of head 1
        net.blocks[0].attn.qkv.bias[40:48].zero_()
    maps, gradients = graded_maps(net, IMAGES, CLASSES)
    assert gradients[0][:, 1].abs().max() == 0 and gradients[0][:, 0].abs().max() > 0
    expected = (maps[0] * gradients[0])[:, 0].clamp(min=0) / 2
    torch.testing.assert_close(gradient_attention(net, IMAGES, CLASSES), expected[:, 0, 1:])


def test_deleting_and_inserting_share_the_picture_between_them():
    net, values = small_net(), torch.rand(3, 16)
    for count in (0, 5, 16):
        parts = deleted(net, IMAGES, values, count), inserted(net, IMAGES, values, count)
        assert torch.equal(parts[0] + parts[1], IMAGES)
        assert int((parts[0] == 0).sum()) == 3 * count * 4


def test_a_faithful_map_beats_random_and_the_page_says_which_do_not(monkeypatch):
    net, (images, _) = brightness_net(), one_bright_patch()
    subject = Subject(net, lambda image: image, pictures=images.repeat(8, 1, 1, 1))
    monkeypatch.setitem(METHODS, "constant", lambda net, images, classes: torch.ones(len(images), 16))
    finding = analyze_faithfulness(subject)
    areas = finding.table.drop_duplicates(["kind", "map"]).set_index(["kind", "map"])
    for kind in ("deletion", "insertion"):
        assert areas.loc[(kind, "occlusion"), "above_random_low"] > 0
        assert areas.loc[(kind, "constant"), "above_random_low"] < 0
        assert f"constant ({kind})" in finding.note and f"occlusion ({kind})" not in finding.note
    start = finding.table.query("kind == 'deletion' and share == 0")["probability"]
    assert start.nunique() == 1 and start.iloc[0] > 0.5  # the whole picture


def test_random_weights_change_what_the_network_made_and_keep_what_the_picture_did(monkeypatch, small_subject):
    monkeypatch.setattr("vitlab.analysis.attribution.sanity.METHODS", {
        "picture": lambda net, images, classes: images.flatten(1)[:, ::4],
        "occlusion": occlusion,
    })  # fmt: skip
    finding = analyze_sanity(small_subject(num_images=8))
    table = finding.table.set_index(["map", "random"])["correlation"]
    assert table["picture"].min() > 0.999 and table["occlusion", "tokenizer too"] < 0.5
    assert finding.note.endswith("with all blocks random: picture")


def test_randomized_parts_are_those_that_are_named():
    net = small_net()
    other = randomized(net, blocks=1)
    kept = {name for name, value in net.state_dict().items() if torch.equal(value, other.state_dict()[name])}
    assert {name.split(".")[0] for name in kept} >= {"tokenizer", "pos_embed", "cls_token"}
    assert not any(name.startswith(("blocks.1", "head")) for name in kept)
    assert torch.equal(rank_correlation(torch.ones(2, 5), torch.rand(2, 5)), torch.zeros(2).double())


def test_a_network_without_head_is_told(small_subject):
    with pytest.raises(UsageError, match="needs class scores, and model has no classification head"):
        analyze_attribution(small_subject(num_classes=0))
