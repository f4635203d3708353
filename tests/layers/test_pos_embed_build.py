import inspect
from typing import get_args

import pytest
import torch
from torch import nn

from vitlab.errors import UsageError
from vitlab.jobs.train.describe import _model_line
from vitlab.layers.pos_embed import POS_EMBEDS, PosEmbed, PosEmbedName, build_pos_embed
from vitlab.layers.pos_embed.added import AddedPosEmbed, Fourier
from vitlab.layers.pos_embed.rotary import LieRE
from vitlab.models import VisionTransformer
from vitlab.tasks import Classifier

NAMES = get_args(PosEmbedName)


class DrawnBias(PosEmbed):
    drawn = None

    def for_batch(self):
        return self.view(drawn=torch.rand(5, 5))

    def bias(self, layer):
        return self.drawn


SIZE = {"grid_size": (14, 14), "embed_dim": 384, "num_heads": 6, "depth": 12, "num_prefix_tokens": 1}


def build(name, **options):
    given = {key: options.pop(key) for key in ("join", "trainable", "theta", "style") if key in options}
    return build_pos_embed({"class_path": name, "init_args": given} if given else name, **(SIZE | options))


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("none", {}, {}),
        ("learned", {}, {"weight": (1, 196, 384)}),
        ("learned", {"join": "every_layer"}, {"weight": (12, 196, 384)}),
        ("learned", {"join": "every_layer_shared"}, {"weight": (1, 196, 384)}),
        ("factorized", {}, {"row": (1, 14, 384), "col": (1, 14, 384)}),
        ("factorized", {"grid_size": (3, 5)}, {"row": (1, 3, 384), "col": (1, 5, 384)}),
        ("sincos1d", {}, {}),
        ("sincos1d", {"join": "every_layer"}, {}),
        ("sincos1d", {"trainable": True}, {"weight": (1, 196, 384)}),
        ("sincos2d", {"trainable": False}, {}),
        ("sincos2d", {"trainable": True, "join": "every_layer"}, {"weight": (12, 196, 384)}),
        ("relpos", {}, {"bias_table": (12, 732, 6)}),
        ("relpos", {"num_prefix_tokens": 0}, {"bias_table": (12, 729, 6)}),
        ("relpos", {"join": "every_layer_shared"}, {"bias_table": (1, 732, 6)}),
        ("alibi2d", {}, {}),
        ("rope2d", {}, {}),
        ("rope_mixed", {}, {"freqs": (2, 12, 6, 32)}),
        ("rope_mixed", {"join": "every_layer_shared"}, {"freqs": (2, 1, 6, 32)}),
        ("conv", {}, {"convs.0.weight": (384, 1, 3, 3), "convs.0.bias": (384,)}),
        ("conv", {"join": "every_layer", "depth": 1}, {"convs.0.weight": (384, 1, 3, 3), "convs.0.bias": (384,)}),
    ],
)
def test_state_dict_has_these_keys_and_shapes_all_trained(name, options, shapes):
    module = build(name, **options)
    assert {key: tuple(value.shape) for key, value in module.state_dict().items()} == shapes
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("name", ["learned", "factorized", "relpos", "rope_mixed", "conv"])
def test_trainable_false_freezes_every_tensor_of_the_method(name):
    module = build(name, trainable=False)
    assert module.state_dict() and not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("name", ["none", "alibi2d", "rope2d"])
def test_a_method_with_nothing_to_train_refuses_trainable(name, trainable):
    with pytest.raises(ValueError, match=f"pos_embed='{name}' has nothing to train: leave `pos_embed.trainable`"):
        build(name, trainable=trainable)


@pytest.mark.parametrize(
    ("name", "join", "allowed"),
    [
        ("none", "stem", "null"),
        ("relpos", "stem", "one of every_layer, every_layer_shared or null"),
        ("alibi2d", "every_layer", "one of every_layer_shared or null"),
        ("rope2d", "stem", "one of every_layer_shared or null"),
        ("rope_mixed", "stem", "one of every_layer, every_layer_shared or null"),
        ("conv", "every_layer_shared", "one of stem, every_layer or null"),
        ("learned", "twice", "one of stem, every_layer, every_layer_shared or null"),
    ],
)
def test_a_join_that_a_method_lacks_names_those_it_has(name, join, allowed):
    with pytest.raises(ValueError, match=f"`pos_embed.join` must be {allowed} for pos_embed='{name}'"):
        build(name, join=join)


@pytest.mark.parametrize("theta", [1.0, 0.0, -2.0, float("nan")])
@pytest.mark.parametrize("name", ["rope2d", "rope_mixed"])
def test_theta_must_be_above_1(name, theta):
    with pytest.raises(ValueError, match=rf"`theta` must be in \(1, 1e12\], got {theta}"):
        build(name, theta=theta)


def test_a_theta_of_null_says_nothing_to_a_method_without_one():
    arguments = {"grid_size": (2, 2), "embed_dim": 8, "num_heads": 2, "depth": 1, "num_prefix_tokens": 0}
    build_pos_embed({"class_path": "learned", "init_args": {"theta": None}}, **arguments)
    with pytest.raises(UsageError, match=r"Learned takes no argument `theta`"):
        build_pos_embed({"class_path": "learned", "init_args": {"theta": 100.0}}, **arguments)


def test_theta_defaults_to_the_published_value_of_each_method():
    assert torch.equal(build("rope2d").sin, build("rope2d", theta=100.0).sin)
    thetas = {}, {"theta": 10.0}, {"theta": 100.0}
    sizes = [build("rope_mixed", **theta).freqs.square().sum(dim=0).sqrt() for theta in thetas]
    torch.testing.assert_close(sizes[0], sizes[1])
    assert (sizes[0] - sizes[2]).abs().max() > 0.1


def test_widths_that_4_does_not_divide_are_refused():
    with pytest.raises(
        ValueError, match="`embed_dim` must be divisible by 4 for pos_embed='sincos2d', got embed_dim=6"
    ):
        build("sincos2d", embed_dim=6)
    for name in ("rope2d", "rope_mixed"):
        with pytest.raises(ValueError, match=f"divisible by 4 for pos_embed='{name}', got a head width of 6"):
            build(name, embed_dim=12, num_heads=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_built_on_meta_gets_its_tables_when_it_is_materialised(name):
    reference = build(name)
    with torch.device("meta"):
        module = build(name)
    module.to_empty(device="cpu")
    module.load_state_dict(reference.state_dict())
    for key, buffer in module.named_buffers():
        assert torch.equal(buffer, reference.get_buffer(key)), key


@pytest.mark.parametrize("name", NAMES)
def test_order_must_be_a_permutation_and_ends_with_the_block(name):
    module = build(name, grid_size=(2, 3))
    with (
        pytest.raises(ValueError, match="permutation of the 6 patch positions"),
        module.permute_positions(torch.zeros(6, dtype=torch.long)),
    ):
        pass
    with module.permute_positions(torch.randperm(6)):
        assert module.order is not None
    assert module.order is None


def test_the_names_of_the_methods_are_those_of_the_documented_table():
    assert tuple(POS_EMBEDS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_class_does_what_it_declares(name):
    cls, parameters = POS_EMBEDS[name], inspect.signature(POS_EMBEDS[name]).parameters
    assert ("join" in parameters) == (len(cls.joins) > 1)
    trained = [build(name, join=join, trainable=trainable) for join in cls.joins for trainable in [True] * cls.trains]
    assert all(any(p.requires_grad for p in module.parameters()) for module in trained)
    assert cls.trains or not list(build(name).parameters())


@pytest.mark.parametrize("name", NAMES)
def test_what_acts_after_a_block_changes_its_tokens(name):
    module, x = build(name, depth=2, grid_size=(2, 3)), torch.randn(1, 7, 384)
    for layer in (0, 1):
        assert module.acts_after(layer) == (not torch.equal(module.leave(x, layer), x))


def test_adding_one_is_a_class_and_a_name(monkeypatch):
    class Tilt(AddedPosEmbed):
        joins = ("stem",)

        def __init__(self, grid_size, embed_dim):
            super().__init__(grid_size)
            self.slope = torch.nn.Parameter(torch.ones(embed_dim))

        def table(self, layer=0):
            return torch.arange(196.0)[:, None] * self.slope

    monkeypatch.setitem(POS_EMBEDS, "tilt", Tilt)
    assert build("tilt")(torch.zeros(1, 196, 384))[0, 3, 0] == 3
    with pytest.raises(ValueError, match=r"`pos_embed.join` must be one of stem or null for pos_embed='tilt'"):
        build("tilt", join="every_layer")


@pytest.mark.parametrize("path", ["sincos.SinCos2d", "added.SinCos2d"])
def test_a_class_path_of_an_older_version_still_leads_to_its_class(path):
    spec = {"class_path": f"vitlab.layers.pos_embed.{path}", "init_args": {"trainable": True}}
    assert type(build(spec)) is POS_EMBEDS["sincos2d"]


def test_a_class_path_that_never_was_one_is_refused():
    with pytest.raises(ValueError, match="is not imported"):
        build("vitlab.layers.pos_embed.sincos.SinCos3d")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LieRE((2, 2), head_dim=6, num_heads=1, block=4), "`pos_embed.block` must divide the head width"),
        (lambda: Fourier((2, 2), embed_dim=7), "`embed_dim` must be even"),
        (lambda: build("sincos2d", style="mea"), "`style` must be one of mae, moco, big_vision, timm, got 'mea'"),
    ],
)
def test_impossible_options_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.rare
@pytest.mark.parametrize("name", ["cpb", "liere", "string", "fire", "relpos1d"])
def test_methods_are_compiled_whole_and_exported_for_any_batch(name):
    size = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    net = VisionTransformer(pos_embed=name, **size).eval()
    images = torch.randn(3, 3, 16, 24)
    with torch.no_grad():
        expected = net(images)
        torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(images), expected)
        batch = {"images": {0: torch.export.Dim("batch", min=1, max=8)}}
        exported = torch.export.export(net, (images[:2],), dynamic_shapes=batch).module()
        torch.testing.assert_close(exported(images), expected, rtol=0, atol=1e-5)


TINY = {"img_size": 8, "in_chans": 1, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
FACTS = {"parameters": 1, "parameters_total": 1, "macs": 1}


def header_of(**arguments):
    """Return what the header of a run says of its network, and the task."""
    task = Classifier(num_classes=3, **TINY | arguments)
    return _model_line(task, FACTS), task


@pytest.mark.parametrize(("name", "ruled_out"), [("relpos1d", True), ("fire", True), ("string", False)])
def test_the_header_says_what_rules_out_flash_kernels(name, ruled_out):
    line = header_of(pos_embed=name)[0]
    assert ("rules out flash kernels" in line) == ruled_out


def test_the_header_knows_a_bias_that_is_computed_once_per_batch_and_draws_no_number_of_the_training():
    before = torch.get_rng_state()
    task = Classifier(num_classes=3, pos_embed=DrawnBias, **TINY)
    torch.set_rng_state(before)
    assert "rules out flash kernels" in _model_line(task, FACTS)
    assert torch.equal(torch.get_rng_state(), before)


class Mean(nn.Module):
    """An attention that knows no positions, unless it ``turns`` its tokens."""

    def __init__(self, dim, turns=False):
        super().__init__()
        self.out, self.turns = nn.Linear(dim, dim), turns

    def forward(self, x, pos_embed, layer):
        x = pos_embed.rotate(x[:, None, :, :8], layer).repeat(1, 1, 1, 2)[:, 0] if self.turns else x
        return self.out(x.cumsum(dim=1))


class Bare(Mean):
    """A block that calls no hook."""

    def __init__(self, dim):
        super().__init__(dim)


@pytest.mark.parametrize(
    ("method", "part", "said"),
    [
        ("rope2d", {"attn": Mean}, "`rotate` of RoPE2d"),
        ("rope2d", {"attn": {"class_path": f"{__name__}.Mean", "init_args": {"turns": True}}}, ""),
        ("rope2d", {}, ""),
        (["learned", "relpos"], {"attn": Mean}, "`bias` of RelPos"),
        ("conv", {"block": Bare}, "`leave` of ConvPosEmbed"),
        ("learned", {"block": Bare}, ""),
        ({"class_path": "learned", "init_args": {"join": "every_layer"}}, {"block": Bare}, "`enter` of Learned"),
        ("none", {"block": Bare}, ""),
    ],
)
def test_the_header_of_a_run_tells_of_positions_that_no_block_of_ones_own_asks_for(method, part, said):
    line = header_of(pos_embed=method, depth=2, **part)[0]
    assert line.partition("; no block of yours calls ")[2].partition(", which")[0] == said


@pytest.mark.parametrize("registers", [2, 3])
def test_the_header_of_a_run_tells_of_registers_that_are_too_few_to_rotate(registers):
    rope = {"class_path": "rope2d", "init_args": {"register_theta": 50.0}}
    line, task = header_of(pos_embed=rope, reg_tokens=registers)
    turned = not task.net.pos_embed.sin[: 1 + registers].eq(0).all()
    assert turned == (registers == 3) == ("register_theta` has no effect below 4 prefix tokens, here 3" not in line)


def test_the_header_of_a_run_tells_of_a_policy_that_a_trained_table_does_not_follow():
    def line_of(in_list, **args):
        entry = {"class_path": "sincos2d", "init_args": args}
        return header_of(pos_embed=[entry, "rope2d"] if in_list else entry)[0]

    for in_list in (False, True):
        said = "`pos_embed.resize` rescale has no effect: these positions are resized by interpolate"
        assert said in line_of(in_list, trainable=True, resize="rescale")
        assert "no effect" not in line_of(in_list, trainable=True, resize="interpolate")
        assert "no effect" not in line_of(in_list, trainable=True) + line_of(in_list, resize="rescale")
