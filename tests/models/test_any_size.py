from typing import get_args

import pytest
import torch
from packaging.version import Version
from torch._dynamo.testing import CompileCounterWithBackend

from vitlab.layers.pos_embed import POS_EMBEDS, PosEmbedName, resample_pos_embed
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import attention_maps, block_tokens, graded_tokens, placed_tokens
from vitlab.packed_batch import PackedBatch

TINY = {"img_size": 16, "patch_size": 4, "in_chans": 1, "num_classes": 3, "embed_dim": 16, "depth": 2, "num_heads": 2}
TINY |= {"init_std": 0.2}
WINDOWS = {"t2t_kernels": [3, 3], "t2t_dim": 8}
LARGE = (24, 20)
NAMES = [*get_args(PosEmbedName), ["learned", "rope2d"]]
MOVED = {"class_path": "rope2d", "init_args": {"coordinates": "normalized", "shift": 0.3, "jitter": 1.5}}


def net_of(pos_embed, **more):
    torch.manual_seed(0)
    net = VisionTransformer(**TINY | WINDOWS | more, pos_embed=pos_embed).eval()
    for name, p in net.named_parameters():
        if p.ndim < 2 or name.startswith("pos_embed."):
            torch.nn.init.normal_(p, std=0.3)
    return net


def ways(name):
    return (POS_EMBEDS[name].policies or (None,)) if isinstance(name, str) else (None,)


RESCALED = {"class_path": "rope2d", "init_args": {"resize": "rescale"}}
TRAINED = {"class_path": "sincos2d", "init_args": {"trainable": True}}
MORE = [["sincos2d", "rope2d"], ["alibi2d", "sincos1d"], RESCALED, ["sincos1d", RESCALED], [TRAINED, "rope2d"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, policy) for name in NAMES for policy in ways(name)),
        *((name, None) for name in MORE),
        ([TRAINED, "rope2d"], "rescale"),  # which the trained table cannot be
    ],
)
def test_another_size_gives_what_a_network_built_for_it_gives(name, policy):
    for tokenizer in ("patch", "t2t", "conv") if policy in (None, ways(name)[0]) else ("patch",):
        net = net_of(name, tokenizer=tokenizer, pos_embed_resize=policy if isinstance(name, str) else None)
        net.pos_embed_resize = net.pos_embed_resize or policy
        large = VisionTransformer(**TINY | {"img_size": LARGE}, **WINDOWS, pos_embed=name, tokenizer=tokenizer).eval()
        large.load_state_dict(resample_pos_embed(net.state_dict(), large, net.grid_size, policy or "usual")[0])
        images = torch.randn(2, 1, *LARGE)
        with torch.no_grad():
            torch.testing.assert_close(net(images), large(images))


@pytest.mark.parametrize("name", NAMES)
def test_the_trained_size_needs_nothing(name):
    net = net_of(name)
    assert net.positions(torch.randn(2, 1, 16, 16)) is net.pos_embed


def attributes(pos_embed):
    parts = ("_parameters", "_buffers", "_modules")  # of which each view has dictionaries of its own
    for module in pos_embed.modules():
        yield from ((name, id(value)) for name, value in vars(module).items())
        yield from ((name, id(value)) for part in parts for name, value in vars(module)[part].items())


@pytest.mark.parametrize("name", [*NAMES, MOVED])
def test_a_batch_leaves_no_state_on_the_position_embedding(name):
    net = net_of(name, patch_size=4).train()
    before = list(attributes(net.pos_embed))
    for mode in (False, True):
        net.train(mode)
        with torch.set_grad_enabled(mode):
            net(torch.randn(2, 1, *LARGE))
            net(torch.randn(2, 1, 16, 16))
            net(PackedBatch.of([torch.randn(1, 16, 16), torch.randn(1, 8, 24)], patch=4))
            if name != "conv":
                net.forward_features(torch.randn(2, 1, 16, 16), keep=torch.tensor([[0, 3], [5, 1]]))
    assert list(attributes(net.pos_embed)) == before


@pytest.mark.parametrize("name", ["learned", "factorized", "relpos", "rope_mixed", "conv", ["learned", "rope_mixed"]])
def test_gradients_reach_positions_that_were_trained_at_another_size(name):
    net = net_of(name).train()
    net(torch.randn(2, 1, *LARGE)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.pos_embed.parameters())


def test_positions_at_another_size_follow_the_weights():
    net, images = net_of("learned"), torch.randn(1, 1, *LARGE)
    with torch.no_grad():
        before = net(images)
        net.pos_embed.weight += (change := torch.randn(1, 16, 16))
        changed = net(images)
        assert (changed - before).abs().max() > 1e-3
        net.pos_embed.weight.data.sub_(change)  # as averages of weights are put in, between two modes
        net.train().eval()
        torch.testing.assert_close(net(images), before)


def test_features_and_attention_maps_have_the_grid_of_the_images():
    net, images = net_of("rope2d"), torch.randn(1, 1, *LARGE)
    _, maps = net.forward_intermediates(images)
    assert maps[0].shape == (1, 16, 6, 5)
    torch.testing.assert_close(net.norm(block_tokens(net, images)[-1]), net.forward_features(images))
    assert attention_maps(net, images, 1).shape == (1, 2, 31, 31)
    assert [(x.shape, grid) for x, grid in placed_tokens(net, images)] == [((1, 30, 16), (6, 5))] * 3
    (tokens, as_map), *_ = graded_tokens(net, images)[1]
    assert as_map(tokens).shape == (1, 16, 6, 5)


def test_a_size_that_patches_do_not_fill_names_the_nearest():
    with pytest.raises(ValueError, match="patches of 4 x 4 do not fill images of 18 x 20; the nearest are 16 x 20, 20"):
        net_of("learned")(torch.randn(1, 1, 18, 20))
    with pytest.raises(
        ValueError, match=r"patches of 4 x 4 do not fill images of 3 x 21; the nearest are 4 x 20, 4 x 24$"
    ):
        net_of("learned")(torch.randn(1, 1, 3, 21))
    with pytest.raises(ValueError, match="`img_size` must leave every split at least one token"):
        net_of("learned", tokenizer="t2t", t2t_padding="none")(torch.randn(1, 1, 3, 3))


def test_a_policy_that_a_method_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"`pos_embed.resize` must be one of interpolate or null .* got 'rescale'"):
        net_of("learned", pos_embed_resize="rescale")
    with pytest.raises(ValueError, match=r"`pos_embed.resize` must be null for"):
        net_of("conv", pos_embed_resize="rescale")


def test_permuted_positions_have_no_other_grid():
    net = net_of("learned")
    with (
        net.pos_embed.permute_positions(torch.randperm(16)),
        pytest.raises(ValueError, match="cannot be resized to another grid"),
    ):
        net(torch.randn(1, 1, *LARGE))


@pytest.mark.parametrize("name", ["learned", "relpos", "rope2d"])
def test_a_list_of_images_gives_what_each_gives_alone(name):
    net, images = net_of(name), [torch.randn(1, *size) for size in ((16, 16), (8, 24), LARGE)]
    with torch.no_grad():
        torch.testing.assert_close(net(images), torch.cat([net(image[None]) for image in images]))


@pytest.mark.parametrize(
    ("more", "sizes", "line"),
    [
        ({}, [], "a list of images must hold at least one"),
        ({}, [(1, 1, 16, 16)], r"a list holds \(1, height, width\) images, got \(1, 1, 16, 16\) as number 0"),
        ({}, [(1, 16, 18)], "patches of 4 x 4 do not fill images of 16 x 18"),
        ({"tokenizer": "t2t"}, [(1, 16, 16)], "T2TTokenizer makes its tokens otherwise: use tokenizer=patch"),
        ({"patch_size": [4, 8]}, [(1, 16, 16)], "square patches, but the network has 4 x 8"),
    ],
)
def test_a_list_that_cannot_be_packed_is_refused_in_one_line(more, sizes, line):
    with pytest.raises(ValueError, match=line):
        net_of("learned", **more)([torch.randn(size) for size in sizes])


ONE_GRAPH = [(["learned", "alibi2d", "rope2d"], "patch")]  # a table, a bias, a rotation
ONE_GRAPH += [pytest.param(name, split, marks=pytest.mark.rare) for split in ("patch", "t2t") for name in NAMES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokenizer"), ONE_GRAPH)
def test_one_graph_serves_three_sizes(name, tokenizer):
    check_one_graph(net_of(name, tokenizer=tokenizer, depth=1))


@pytest.mark.rare
def test_one_graph_serves_positions_that_were_rescaled_once():
    net, small = net_of("rope2d", depth=1, img_size=20), net_of("rope2d", depth=1)
    net.load_state_dict(resample_pos_embed(small.state_dict(), net, small.grid_size, "rescale")[0])
    assert net.pos_embed.trained_grid is not None
    check_one_graph(net)


@pytest.mark.rare
def test_inductor_compiles_once_for_three_sizes():
    check_one_graph(net_of("learned", depth=1), "inductor")


def check_one_graph(net, backend="eager"):
    if Version(torch.__version__) < Version("2.12"):
        pytest.skip("torch 2.11 and older do not trace how positions are resized")
    torch.compiler.reset()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=graphs)
    counts = set()
    with torch.no_grad():
        for size in (LARGE, (32, 12), (28, 36)):
            images = torch.randn(3, 1, *size)
            torch.testing.assert_close(compiled(images), net(images), atol=1e-5, rtol=1e-5)
            counts.add(graphs.frame_count)
    assert len(counts) == 1  # what was compiled for the first size serves the others


DEVICES = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_positions_of_another_size_have_the_device_and_type_of_the_network(name, device):
    """A GPU is not needed to see it: the meta device, too, refuses tensors of a CPU."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        net = net_of(name).to(device, dtype)
        outputs = net(torch.zeros(2, 1, *LARGE, dtype=dtype, device=device))
        assert (outputs.dtype, outputs.device.type) == (dtype, device)
