"""Parts of the network that are no word: classes of torch.nn by name, and classes of anybody's by their paths."""

import re
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from vitlab.errors import UsageError
from vitlab.layers.custom import PerToken
from vitlab.layers.mlp import build_act
from vitlab.layers.norm import build_norm
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.models import VisionTransformer, create_model
from vitlab.models.cost import count_macs
from vitlab.models.load import load_network, load_weights
from vitlab.tokenizers import PatchEmbed

TINY = {"img_size": 8, "in_chans": 1, "num_classes": 3, "patch_size": 2, "embed_dim": 8, "depth": 1, "num_heads": 2}
HERE = __name__
SHAPES_OF_THEIR_OWN = {"GLU", "MultiheadAttention", "Softmax2d"}
ACTS = [name for name in nn.modules.activation.__all__ if name not in SHAPES_OF_THEIR_OWN]
NEEDED = {"Threshold": {"threshold": 0.1, "value": 0.0}, "Softmax": {"dim": -1}, "Softmin": {"dim": -1}}
NEEDED |= {"LogSoftmax": {"dim": -1}}


class Slope(AddedPosEmbed):
    def __init__(self, grid_size, embed_dim, start: float = 1.0, depth: int = 0):
        super().__init__(grid_size)
        self.slope = nn.Parameter(torch.full((embed_dim,), start))
        self.seen = depth

    def table(self, layer=0):
        return torch.arange(float(self.grid_size[0] * self.grid_size[1]))[:, None] * self.slope


class NoPosEmbed(nn.Module):
    pass


class NoGrid(nn.Module):
    def __init__(self, img_size, in_chans, embed_dim):
        super().__init__()

    def forward(self, x):
        return x


class OneSide(NoGrid):
    grid_size, patch_size = 4, 2


class Strips(nn.Module):
    def __init__(self, img_size, in_chans, embed_dim, rows: int = 2, skip: int = 0):
        super().__init__()
        self.grid_size, self.patch_size = (img_size[0] // rows, 1), (rows, img_size[1])
        self.rows, self.skip = rows, skip
        self.proj = nn.Linear(in_chans * rows * img_size[1], embed_dim)

    def forward(self, images):
        return self.proj(images.unflatten(2, (-1, self.rows)).transpose(1, 2).flatten(2))[:, self.skip :]


@pytest.mark.parametrize("name", ACTS)
def test_any_activation_of_torch_works_by_name(name):
    spec = {"class_path": name, "init_args": NEEDED[name]} if name in NEEDED else name
    theirs = getattr(nn, name)(**NEEDED.get(name, {})).eval()
    x = torch.linspace(-4, 4, 24).view(2, 3, 4)
    torch.testing.assert_close(build_act(spec, 4).eval()(x), theirs(x), rtol=0, atol=0)


def test_normalizations_of_torch_work_by_name_and_know_width_and_epsilon():
    x = torch.randn(4, 5, 8)
    torch.testing.assert_close(build_norm("LayerNorm", 8, 0.1)(x), build_norm("layernorm", 8, 0.1)(x), rtol=0, atol=0)
    batch = build_norm("BatchNorm1d", 8, 0.1)
    assert isinstance(batch, PerToken)
    expected = (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + 0.1).sqrt()
    torch.testing.assert_close(batch(x), expected, rtol=0, atol=1e-5)
    group = build_norm({"class_path": "torch.nn.GroupNorm", "init_args": {"num_groups": 2}}, 8, 0.1)
    halves = x.unflatten(2, (2, 4))
    expected = (halves - halves.mean(3, keepdim=True)) / (halves.var(3, correction=0, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(group(x), expected.flatten(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["InstanceNorm1d", "LazyInstanceNorm1d", "LocalResponseNorm"])
def test_a_layer_of_torch_that_would_take_tokens_for_channels_is_refused(name):
    spec = {"class_path": name, "init_args": {"size": 3}} if name == "LocalResponseNorm" else name
    with pytest.raises(ValueError, match=f"`norm_layer`: {name} expects channels second, .* tokens are last"):
        build_norm(spec, 8, 0.1)
    with pytest.raises(ValueError, match="`act_layer`: Softmax2d expects channels second"):
        build_act("Softmax2d", 8)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax", "Softmin"])
def test_a_softmax_over_the_images_of_a_batch_is_refused(name):
    for args, dim in (({}, None), ({"dim": 0}, 0)):
        with pytest.raises(ValueError, match=rf"`act_layer`: {name} with `dim` {dim} .* set `act_layer\.dim` to -1"):
            build_act({"class_path": name, "init_args": args}, 8)
    act, x = build_act({"class_path": name, "init_args": {"dim": -1}}, 8), torch.randn(2, 5, 8)
    torch.testing.assert_close(act(x)[:1], act(x[:1]))


class OverTokens(nn.InstanceNorm1d):
    def forward(self, x):
        return super().forward(x.mT).mT


def test_a_subclass_that_transposes_tokens_is_taken():
    x = torch.randn(2, 5, 8)
    found = build_norm(f"{HERE}.OverTokens", 8, 0.1)(x)
    torch.testing.assert_close(found, nn.functional.instance_norm(x.mT, eps=0.1).mT)


class OwnPatch(nn.Module):
    def __init__(self, img_size, in_chans, embed_dim):
        super().__init__()
        self.grid_size, self.patch_size = (img_size[0] // 2, img_size[1] // 2), 2
        self.patch = nn.Conv2d(in_chans, embed_dim, 2, 2)

    def forward(self, images):
        return self.patch(images).flatten(2).transpose(1, 2)


def test_a_tokenizer_may_call_its_layer_patch():
    assert VisionTransformer(**TINY, tokenizer=f"{HERE}.OwnPatch")(torch.zeros(1, 1, 8, 8)).shape == (1, 3)


def test_a_network_of_custom_parts_trains_and_is_rebuilt_from_its_file_alone(tmp_path):
    parts = {
        "pos_embed": {"class_path": f"{HERE}.Slope", "init_args": {"start": 0.5}},
        "tokenizer": f"{HERE}.Strips",
        "act_layer": "PReLU",
        "norm_layer": {"class_path": "BatchNorm1d", "init_args": {"momentum": 0.5}},
        "qk_norm": True,
    }
    net = create_model(**TINY, **parts)
    assert net.grid_size == (4, 1)
    assert net.patch_size == (2, 8)
    assert net.pos_embed.slope.tolist() == [0.5] * 8
    assert net.pos_embed.seen == 1, "a class gets what it asks for"
    images = torch.randn(4, 1, 8, 8)
    net(images).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert not {n for n in net.no_weight_decay() if n.endswith("fc1.weight")}
    torch.save({"hyper_parameters": {**TINY, **parts}, "state_dict": net.state_dict()}, tmp_path / "last.ckpt")
    again = load_network(tmp_path / "last.ckpt")
    torch.testing.assert_close(again(images), net.eval()(images), rtol=0, atol=0)
    assert load_weights(create_model(**TINY, **parts), tmp_path / "last.ckpt") == []


class ManyWeights(nn.Module):
    def __init__(self, dim, **arguments):
        super().__init__()
        self.attention, self.other = nn.MultiheadAttention(dim, 2), nn.MultiheadAttention(dim, 2, kdim=4, vdim=6)
        self.row, self.volume, self.up = nn.Conv1d(dim, dim, 3), nn.Conv3d(1, 1, 3), nn.ConvTranspose2d(dim, dim, 2)
        self.norm, self.matrix = nn.LayerNorm(dim), nn.Parameter(torch.zeros(dim, dim))

    def forward(self, x):
        return x


def test_weights_of_every_linear_layer_convolution_and_attention_of_torch_decay():
    net = VisionTransformer(**TINY, mlp_layer=f"{HERE}.ManyWeights")
    stays, of = net.no_weight_decay(), "blocks.0.mlp."
    decayed = {name.removeprefix(of) for name, _ in net.named_parameters() if name.startswith(of) and name not in stays}
    assert decayed == {
        *("attention.in_proj_weight", "attention.out_proj.weight", "row.weight", "volume.weight", "up.weight"),
        *(f"other.{part}_weight" for part in ("q_proj", "k_proj", "v_proj")),
        "other.out_proj.weight",
    }


def test_every_convolution_of_a_part_starts_as_init_std_says():
    mlp = VisionTransformer(**TINY, init_std=0.001, mlp_layer=f"{HERE}.ManyWeights").blocks[0].mlp
    assert all(layer.weight.abs().max() < 0.01 and not layer.bias.any() for layer in (mlp.row, mlp.volume, mlp.up))


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


class Parametrized(nn.Module):
    """Layers whose weights are computed: in a way that can be set, in one that cannot, and between orthogonal ones."""

    def __init__(self, dim):
        super().__init__()
        self.normal, self.scaled = weight_norm(nn.Linear(dim, dim)), nn.Linear(dim, dim)
        register_parametrization(self.scaled, "weight", Halved())
        self.turn = orthogonal(nn.Linear(dim, dim))
        self.fixed = orthogonal(nn.Linear(dim, dim), orthogonal_map="cayley", use_trivialization=False)

    def forward(self, x):
        return self.fixed(self.turn(self.scaled(self.normal(x))))


def test_a_weight_that_is_computed_starts_as_init_std_says_where_it_can_be_set():
    mlp = VisionTransformer(**TINY, init_std=0.001, mlp_layer=f"{HERE}.Parametrized").blocks[0].mlp
    assert mlp.normal.weight.abs().max() < 0.01 < mlp.scaled.weight.abs().max()
    for layer in (mlp.turn, mlp.fixed):
        torch.testing.assert_close(layer.weight @ layer.weight.T, torch.eye(8), atol=1e-5, rtol=0)
    assert not any(layer.bias.any() for layer in (mlp.normal, mlp.scaled, mlp.turn, mlp.fixed))


def test_a_custom_position_embedding_changes_no_other_initial_value():
    torch.manual_seed(0)
    one = VisionTransformer(**TINY, pos_embed="none").state_dict()
    torch.manual_seed(0)
    other = VisionTransformer(**TINY, pos_embed=f"{HERE}.Slope").state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_file_of_weights_imports_nothing(tmp_path):
    arguments = {**TINY, "pos_embed": "antigravity.Slope"}
    torch.save(
        {"hyper_parameters": arguments, "state_dict": VisionTransformer(**TINY).state_dict()}, tmp_path / "a.ckpt"
    )
    with pytest.raises(ValueError, match=r'"antigravity\.Slope" is not imported: import antigravity first'):
        load_network(tmp_path / "a.ckpt")
    assert "antigravity" not in sys.modules


def test_a_file_of_weights_finds_a_part_in_a_submodule_of_a_trusted_package_alone(tmp_path, monkeypatch):
    """The line told to add the flag that was given."""
    monkeypatch.setattr("vitlab.class_paths.TRUSTED", ["trusted_pkg"])
    monkeypatch.syspath_prepend(str(tmp_path))
    part = "from vitlab.layers.pos_embed import PosEmbed\n\nclass Slope(PosEmbed):\n    policies = ()\n"
    for package in ("trusted_pkg", "trusted_pkg2"):
        (tmp_path / package / "pe").mkdir(parents=True)
        (tmp_path / package / "pe" / "tables.py").write_text(part)
        state = {**TINY, "pos_embed": f"{package}.pe.tables.Slope"}
        weights = VisionTransformer(**TINY, pos_embed="none").state_dict()
        torch.save({"hyper_parameters": state, "state_dict": weights}, tmp_path / f"{package}.ckpt")
    assert type(load_network(tmp_path / "trusted_pkg.ckpt").pos_embed).__module__ == "trusted_pkg.pe.tables"
    with pytest.raises(ValueError, match=r"import trusted_pkg2\.pe\.tables first; on the command line, add"):
        load_network(tmp_path / "trusted_pkg2.ckpt")
    (tmp_path / "trusted_pkg" / "pe" / "broken.py").write_text("1 / 0")
    with pytest.raises(
        ValueError, match=r'`pos_embed`: "trusted_pkg\.pe\.broken\.Slope" cannot be imported: .*line 1\)$'
    ):
        VisionTransformer(**TINY, pos_embed="trusted_pkg.pe.broken.Slope")
    for name in [name for name in sys.modules if name.startswith("trusted_pkg")]:
        del sys.modules[name]


def spec(name, **args):
    return {"class_path": name if "." in name else f"{HERE}.{name}", "init_args": args}


class ByFirstBatch(nn.Module):
    """A normalization whose weights follow from the first images, as Glow's; it remembers that it has had them."""

    def __init__(self, dim, by_value=False):
        super().__init__()
        self.loc, self.by_value, self.is_set = nn.Parameter(torch.zeros(dim)), by_value, False
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if not self.is_set and (not self.by_value or self.calls.item() > 0):
            self.loc.data.copy_(-x.flatten(0, -2).mean(dim=0))
            self.is_set = True
        return x + self.loc


class Stem(PatchEmbed):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.norm = ByFirstBatch(sizes["embed_dim"])

    def forward(self, images):
        return self.norm(super().forward(images))


class FirstToken(ByFirstBatch):
    def forward(self, x):
        return super().forward(x)[:, 0]


@pytest.mark.parametrize("by_value", [False, True])
def test_a_network_that_is_built_and_counted_has_kept_nothing_of_a_call(by_value):
    """Weights that follow from the first batch were those of zeros, or never set."""
    norm = {"class_path": f"{HERE}.ByFirstBatch", "init_args": {"by_value": by_value}}
    net = VisionTransformer(**TINY, norm_layer=norm, tokenizer=f"{HERE}.Stem", global_pool=f"{HERE}.FirstToken")
    count_macs(net)
    parts = [part for part in net.modules() if isinstance(part, ByFirstBatch)]
    assert len(parts) == 5 and all(part.training for part in parts)
    assert not any(part.is_set or part.calls or part.loc.any() for part in parts)
    net(torch.randn(2, 1, 8, 8))
    assert all(part.is_set and part.calls == 1 for part in parts) and net.tokenizer.norm.loc.all()


class Late(nn.Module):
    """Makes its weights when it is first called."""

    def __init__(self, dim):
        super().__init__()
        self.lazy, self.more, self.dim = nn.LazyLinear(dim), None, dim

    def forward(self, x):
        if self.more is None:
            self.more = nn.Parameter(torch.rand(self.dim))
        return self.lazy(x[:, 0]) * self.more


def test_weights_that_a_first_call_makes_are_there_before_the_optimizer():
    names = {name for name, _ in VisionTransformer(**TINY, global_pool=f"{HERE}.Late").named_parameters()}
    assert {"attn_pool.more", "attn_pool.lazy.weight"} <= names


class LateInBlock(nn.Module):
    """The same in a block, whose parts no network calls before the optimizer is made."""

    def __init__(self, dim, by: str = "parameter"):
        super().__init__()
        self.layer, self.late, self.by = nn.LazyLinear(dim) if by == "lazy" else nn.Linear(dim, dim), None, by

    def forward(self, x):
        if self.late is None and self.by != "lazy":
            late = torch.ones(x.shape[2], device=x.device)
            del self.late
            self.register_buffer("late", late) if self.by == "buffer" else setattr(self, "late", nn.Parameter(late))
        return self.layer(x) * (1 if self.late is None else self.late)


class LatePlaces(PosEmbed):
    def __init__(self, grid_size, embed_dim):
        super().__init__(grid_size)
        self.layer = nn.LazyLinear(embed_dim)


@pytest.mark.parametrize("by", ["parameter", "buffer"])
def test_a_network_whose_first_call_would_make_what_its_optimizer_then_lacks_is_refused(by):
    net = VisionTransformer(**TINY, mlp_layer=spec("LateInBlock", by=by))
    with pytest.raises(UsageError, match=r"a first call makes blocks\.0\.mlp\.late: make them in `__init__`, else"):
        count_macs(net)
    assert not any("late" in name for name in net.state_dict())


def test_a_lazy_layer_is_refused_where_no_call_comes_before_the_weights_are_drawn():
    told = "`block`: `mlp.layer.weight` has no shape before a first call: use nn.Linear, with the channels"
    with pytest.raises(ValueError, match=re.escape(told)):
        VisionTransformer(**TINY, mlp_layer=spec("LateInBlock", by="lazy"))
    with pytest.raises(ValueError, match=r"`pos_embed`: `layer\.weight` has no shape"):
        VisionTransformer(**TINY, pos_embed=f"{HERE}.LatePlaces")


class Raises(nn.Module):
    grid_size = patch_size = (4, 4)

    def forward(self, x):
        raise ValueError("not now")


class Several(Raises):
    def forward(self, x):
        return x, x


WRONG = {
    "no PosEmbed": ({"pos_embed": f"{HERE}.NoPosEmbed"}, r"NoPosEmbed must be a subclass of vitlab.*\.PosEmbed"),
    "no class": ({"pos_embed": f"{HERE}.Slop"}, 'has no class "Slop"; did you mean "Slope"'),
    "no argument": ({"pos_embed": spec("Slope", strt=1)}, 'takes no argument `strt`; did you mean "start"'),
    "a value it refuses": ({"pos_embed": spec("Slope", start="x")}, "Slope refuses its arguments: "),
    "no such key": ({"pos_embed": {"path": "x"}}, "`pos_embed` must be a word, a class path or {class_path"),
    "joins it has not": ({"pos_embed": "none", "pos_embed_join": "stem"}, "`pos_embed.join` must be null for"),
    "another shape": ({"act_layer": "GLU"}, r"GLU must keep the shape of tokens, but maps .* to \(2, 3, 16\)"),
    "no activation": ({"act_layer": "Linear"}, "`act_layer`: torch.nn.modules.linear.Linear refuses its arguments"),
    "a norm of maps": ({"norm_layer": "BatchNorm2d"}, r"BatchNorm2d does not take \(B, L, 8\) tokens"),
    "another number of tokens": ({"tokenizer": spec("Strips", skip=1)}, r"must map an image to \(1, 4, 8\) .*, got"),
    "no tokenizer": ({"tokenizer": f"{HERE}.NoPosEmbed"}, "NoPosEmbed has no `forward`, which maps what it gets"),
    "no grid": ({"tokenizer": spec("NoGrid")}, "must have a `grid_size`"),
    "a side": ({"tokenizer": spec("OneSide")}, "`grid_size` of .*OneSide must be rows and columns, got 4"),
    **{
        f"{key} that {kind}": ({key: spec(kind)}, told)
        for key in ("act_layer", "tokenizer", "global_pool")
        for kind, told in (
            ("Raises", r"Raises does not take .*: .*test_own_parts.py, line \d+, `raise .*`: ValueError: not now$"),
            ("Several", rf"`{key}`: .*Several must .* a tuple( for B = 2)?$"),
        )
    },
}


@pytest.mark.parametrize(("arguments", "answer"), WRONG.values(), ids=WRONG)
def test_a_class_of_the_wrong_kind_is_refused_by_name_with_the_way_out(arguments, answer):
    with pytest.raises(ValueError, match=answer):
        VisionTransformer(**{**TINY, **arguments})


def test_the_class_path_of_a_vitlab_part_equals_its_word():
    torch.manual_seed(0)
    word = VisionTransformer(**TINY)
    torch.manual_seed(0)
    paths = {"pos_embed": "vitlab.layers.pos_embed.added.Learned", "tokenizer": "vitlab.tokenizers.patch.PatchEmbed"}
    path = VisionTransformer(**TINY, **paths)
    assert isinstance(path.tokenizer, PatchEmbed)
    assert all(torch.equal(value, path.state_dict()[name]) for name, value in word.state_dict().items())


WORDS = [("global_pool", word) for word in ("token", "avg", "max", "map")]
WORDS += [("act_layer", "quick_gelu"), ("norm_layer", "rmsnorm")]


@pytest.mark.parametrize(("part", "word"), WORDS)
def test_a_word_as_a_class_path_is_the_word(part, word):
    nets = []
    for value in (word, {"class_path": word}):
        torch.manual_seed(0)
        nets.append(VisionTransformer(**TINY, init_std=0.3, reg_tokens=1, **{part: value}).eval())
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(nets[0](images), nets[1](images))
    assert not torch.equal(nets[0](images[:1]), nets[0](images[1:]))
    assert nets[1].reads_class_token_only() == (nets[0].global_pool == "token")


@pytest.mark.parametrize("part", ["act_layer", "norm_layer", "global_pool"])
def test_a_word_takes_no_arguments(part):
    word = {"act_layer": "gelu", "norm_layer": "layernorm", "global_pool": "avg"}[part]
    with pytest.raises(ValueError, match=rf"`{part}`: {word} takes no arguments, got {word}\(x=1\)"):
        VisionTransformer(**TINY, **{part: {"class_path": word, "init_args": {"x": 1}}})


def test_a_class_path_of_the_class_token_needs_one():
    with pytest.raises(ValueError, match="needs `class_token=True`"):
        VisionTransformer(**TINY, class_token=False, global_pool={"class_path": "token"})
