import numpy as np
import pytest
import torch
from small_nets import brightness_net, distracted_net, small_net

from vitlab.analysis.attribution.curves import SHARES, analyze_faithfulness, verdict
from vitlab.analysis.attribution.fillings import FILLINGS, another_image, blurred, deleted
from vitlab.analysis.attribution.maps import (
    METHODS,
    SIGNED,
    STEPS,
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
from vitlab.analysis.head_attention import rollout
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


@pytest.mark.parametrize("filling", FILLINGS)
def test_a_patch_that_is_taken_away_has_the_filling_and_the_others_stay(filling):
    net, values = small_net(), torch.rand(3, 16)
    fill = FILLINGS[filling](net, IMAGES)
    for count in (0, 5, 16):
        changed = deleted(net, IMAGES, values, count, fill)
        best = torch.zeros(3, 16).scatter(1, values.topk(count).indices, 1).view(3, 1, 4, 4)
        is_filled = best.repeat_interleave(2, 2).repeat_interleave(2, 3).bool()
        assert torch.equal(changed[is_filled], fill[is_filled]) and torch.equal(changed[~is_filled], IMAGES[~is_filled])


def test_the_fillings_are_what_they_are_called():
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
    with pytest.raises(UsageError, match="need two images at least"):
        another_image(net, IMAGES[:1])


@pytest.mark.slow
def test_maps_that_name_the_wrong_patch_do_not_pass_though_they_name_the_right_one_next():
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
    assert "NO EVIDENCE: attention and rollout (the patch named first does no more than a random one)" in finding.note
    passed = "gradient rollout, gradient x attention, integrated gradients and occlusion"
    assert f"evidence under every filling: {passed}; NO" in finding.note
    assert "gradient x attention than attention and rollout" in finding.note
    whole = finding.table.query("share == 0")["probability"]
    expected = net(images).softmax(dim=1).amax(dim=1).mean().item()
    assert whole.nunique() == 1 and whole.iloc[0] == pytest.approx(expected, abs=1e-6)


def test_a_map_without_a_choice_is_no_evidence(monkeypatch):
    net, (images, _) = brightness_net(), one_bright_patch()
    subject = Subject(net, lambda image: image, pictures=images.repeat(8, 1, 1, 1))
    monkeypatch.setitem(METHODS, "constant", lambda net, images, classes: torch.ones(len(images), 16))
    monkeypatch.setitem(METHODS, "reverse", lambda *args: -occlusion(*args))
    finding = analyze_faithfulness(subject)
    lines = finding.table.query("share == 0").set_index("map")
    assert (lines.loc["constant", "gain"] == 0).all()
    pairs = finding.table.query("kind == 'pair'").set_index(["filling", "map", "against"])["gain"]
    gains = finding.table.query("kind == 'MoRF' and share == 0").set_index(["filling", "map"])["gain"]
    assert len(pairs) == len(FILLINGS) * 8 * 7
    for filling, first, second in pairs.index:
        assert pairs[filling, first, second] == pytest.approx(gains[filling, first] - gains[filling, second], abs=1e-9)
    for filling in FILLINGS:
        assert gains[filling, "reverse"] == pytest.approx(-gains[filling, "occlusion"], abs=0.2)
    assert finding.note.split("NO EVIDENCE: ")[1].split(" (")[0].endswith("constant and reverse")


@pytest.mark.slow
def test_areas_are_those_of_the_curves_and_fillings_that_contradict_are_told(small_subject):
    table = analyze_faithfulness(small_subject(num_images=12)).table
    for _, line in table[table["kind"] != "pair"].groupby(["filling", "kind", "map"]):
        assert tuple(line["share"]) == SHARES
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
        "evidence under every filling: attention, gradient rollout, gradient x attention, integrated gradients and "
        "occlusion; DEPENDS ON THE FILLING: rollout (evidence under mean color, own mean and another image alone); "
        "better under every filling: occlusion than attention; WHICH IS BETTER DEPENDS ON THE FILLING: attention and "
        "rollout"
    )


@pytest.mark.parametrize("method", ["integrated gradients", "occlusion"])
def test_maps_agree_with_captum(method):
    attr = pytest.importorskip("captum.attr")  # the extra `peers`
    net = small_net()
    patches = torch.arange(16).view(1, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    if method == "occlusion":
        expected = attr.FeatureAblation(lambda x: net(x).softmax(dim=1))
        pixels = expected.attribute(IMAGES, target=CLASSES, feature_mask=patches)[:, 0, ::2, ::2]
    else:
        expected = attr.IntegratedGradients(net)
        pixels = expected.attribute(IMAGES, target=CLASSES, n_steps=STEPS, method="riemann_middle")
        pixels = pixels.view(3, 4, 2, 4, 2).sum(dim=(2, 4))
    torch.testing.assert_close(METHODS[method](net, IMAGES, CLASSES), pixels.flatten(1), atol=1e-5, rtol=1e-4)


def test_random_weights_change_what_the_network_made_and_keep_what_the_picture_did(monkeypatch, small_subject):
    monkeypatch.setattr("vitlab.analysis.attribution.maps.METHODS", {
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


def test_maps_with_a_sign_are_drawn_about_zero_with_a_bar_of_their_own(small_subject):
    finding = analyze_attribution(small_subject())
    values = finding.table.set_index(["map", "image"])["weight"]
    axes = [each for each in finding.figure.axes if each.images and each.get_label() != "<colorbar>"]
    bars = {image.axes: image.colorbar for each in axes for image in each.images if image.colorbar}
    assert len(axes) == 4 * 7 and len(bars) == 4 * 2  # images, methods; those with a sign
    for i in range(4):
        for name, ax in zip(METHODS, axes[7 * i + 1 : 7 * i + 7], strict=True):
            if name not in SIGNED:
                assert ax not in bars and values[name, i].min() >= 0
                continue
            (drawn,), most = ax.images, values[name, i].abs().max()
            assert (drawn.norm.vmin, drawn.norm.vmax) == (pytest.approx(-most), pytest.approx(most))
            assert min(drawn.cmap(drawn.norm(0.0))[:3]) > 0.95  # white
            assert drawn.get_alpha() is None and np.allclose(drawn.get_array().ravel(), values[name, i])


def test_a_network_without_head_is_told(small_subject):
    with pytest.raises(UsageError, match="needs class scores, and model has no classification head"):
        analyze_attribution(small_subject(num_classes=0))
