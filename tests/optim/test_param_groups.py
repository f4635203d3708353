import pytest
import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.optim import param_groups_layer_decay
from torch import nn

from vitlab.errors import UsageError
from vitlab.models.build import projections
from vitlab.models.vit import VisionTransformer
from vitlab.optim import describe_groups, param_groups, slow_earlier_blocks

TINY = {"img_size": 16, "patch_size": 4, "in_chans": 1, "num_classes": 3, "embed_dim": 12, "depth": 2, "num_heads": 3}
FULL = TINY | {"reg_tokens": 2, "layer_scale": 0.1, "qk_norm": True}


def decayed_names(net, **options):
    groups = param_groups(net, lr=1.0, weight_decay=0.1, **options)
    names = {id(p): name for name, p in net.named_parameters()}
    return {names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]}


@pytest.mark.parametrize("tokenizer", ["patch", "t2t", "conv"])
@pytest.mark.parametrize("pos_embed", ["learned", "frozen", "relpos", "rope_mixed", "conv", "none"])
def test_every_trained_parameter_is_in_exactly_one_group(tokenizer, pos_embed):
    positions = {"pos_embed": "learned", "pos_embed_trainable": False} if pos_embed == "frozen" else {}
    net = VisionTransformer(**FULL | {"tokenizer": tokenizer, "pos_embed": pos_embed} | positions)
    groups = param_groups(net, lr=1.0, weight_decay=0.1, layer_decay=0.5)
    trained = [id(p) for p in net.parameters() if p.requires_grad]
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(trained)


def test_weights_that_blocks_share_are_in_one_group_at_the_rate_of_the_first():
    net = VisionTransformer(**TINY)
    net.blocks[1].mlp = net.blocks[0].mlp
    groups = param_groups(net, lr=1.0, weight_decay=0.1, layer_decay=0.5)
    rates = [group["lr"] for group in groups for p in group["params"] if p is net.blocks[0].mlp.fc1.weight]
    assert rates == [0.25]  # before the second block and the head


def test_a_network_that_is_none_of_vitlab_names_the_way_out():
    with pytest.raises(UsageError, match=r"trains a VisionTransformer, got a Eva as .* LightningModule of your own"):
        param_groups(Eva(img_size=16, patch_size=8, embed_dim=8, depth=1, num_heads=2), lr=1.0, weight_decay=0.1)


class Adapted(VisionTransformer):
    """A network with a layer and a scale of its own."""

    def __init__(self, **network):
        super().__init__(**network)
        self.adapter, self.gain = nn.Conv1d(2, 2, 1), nn.Parameter(torch.ones(3, 3))


def test_what_a_subclass_adds_learns_with_the_head():
    net = Adapted(**TINY)
    groups = param_groups(net, lr=0.2, weight_decay=0.1, layer_decay=0.5, head_lr_mult=10)
    rows = {row["name"]: (row["lr_scale"], row["weight_decay"]) for row in describe_groups(net, groups, 0.2)}
    assert len(rows) == len(list(net.parameters()))
    assert (rows["adapter.weight"], rows["adapter.bias"], rows["gain"]) == ((1, 0.1), (1, 0), (1, 0))


def test_tokens_positions_norms_scales_and_biases_do_not_decay():
    net = VisionTransformer(**FULL, tokenizer="t2t", global_pool="map", pos_embed="learned")
    decayed = decayed_names(net)
    expected = {
        name
        for name, p in net.named_parameters()
        if p.ndim > 1 and name.endswith("weight") and not name.startswith("pos_embed")
    }
    assert decayed == expected
    assert not {"cls_token", "reg_token", "pos_embed.weight", "norm.weight", "blocks.0.ls1.gamma"} & decayed


def test_the_convolution_of_a_position_embedding_does_not_decay():
    assert not [n for n in decayed_names(VisionTransformer(**TINY, pos_embed="conv")) if n.startswith("pos_embed")]


@pytest.mark.parametrize(
    ("option", "scales"),
    [
        ({"layer_decay": 0.5}, {"": 0.125, "blocks.0": 0.25, "blocks.1": 0.5, "norm": 1, "head": 1}),
        ({"pos_embed_lr_mult": 10}, {"": 1, "pos_embed": 10}),
        ({"head_lr_mult": 100}, {"": 1, "head": 100}),
    ],
    ids=["layer_decay", "pos_embed_lr_mult", "head_lr_mult"],
)
def test_the_rate_of_each_part_follows_the_option(option, scales):
    net = VisionTransformer(**TINY)
    for row in describe_groups(net, param_groups(net, 0.2, 0.1, **option), 0.2):
        part = max((part for part in scales if row["name"].startswith(part)), key=len)
        assert row["lr_scale"] == pytest.approx(scales[part]), row["name"]


def test_the_no_decay_set_is_the_same_bare_wrapped_compiled_and_under_ddp(tmp_path):
    net = VisionTransformer(**FULL)
    bare = decayed_names(net)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(net)
        compiled = torch.compile(net, backend="eager")
        net.compile(backend="eager")
        for wrapped in (parallel.module, compiled._orig_mod, nn.Sequential(net)[0], compiled):
            assert decayed_names(wrapped) in (bare, {f"_orig_mod.{name}" for name in bare})
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("pos_embed", ["none", "rope2d"])
def test_a_config_for_a_table_trains_as_well_with_positions_that_train_nothing(pos_embed):
    net = VisionTransformer(**TINY, pos_embed=pos_embed)
    assert param_groups(net, 0.1, 0.1, pos_embed_lr_mult=10) == param_groups(net, 0.1, 0.1)


def test_few_groups_keep_the_optimizer_fast():
    assert len(param_groups(VisionTransformer(**FULL), 0.1, 0.1)) == 2


def timms_scales(model, decay):
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=decay)
    return {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}


def moved(pos_embed, **more):
    """Return how far one step of AdamW moves each block's positions: its learning rate."""
    net = VisionTransformer(**TINY | {"depth": 4}, pos_embed=pos_embed, **more)
    optimizer = torch.optim.AdamW(param_groups(net, lr=1.0, weight_decay=0.1, layer_decay=0.65))
    slow_earlier_blocks(optimizer, net, 0.65)
    before = {name: p.detach().clone() for name, p in net.pos_embed.named_parameters()}
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {name: before[name] - p.detach() for name, p in net.pos_embed.named_parameters()}


def test_positions_of_a_block_learn_at_the_rates_that_timm_gives_them():
    small = {"img_size": 16, "patch_size": 4, "in_chans": 1, "num_classes": 3}
    size = {"embed_dim": 12, "depth": 4, "num_heads": 3}
    beit = timms_scales(Beit(**small, **size, use_abs_pos_emb=False, use_rel_pos_bias=True), 0.65)
    table = moved("relpos")["bias_table"]
    for i in range(4):
        expected = beit[f"blocks.{i}.attn.relative_position_bias_table"]
        torch.testing.assert_close(table[i], torch.full_like(table[i], expected), rtol=1e-5, atol=0)
    shared = timms_scales(Beit(**small, **size, use_abs_pos_emb=False, use_shared_rel_pos_bias=True), 0.65)
    assert moved("relpos", pos_embed_join="every_layer_shared")["bias_table"].mean().item() == pytest.approx(
        shared["rel_pos_bias.relative_position_bias_table"], rel=1e-5
    )
    eva02 = timms_scales(Eva(**small, **size), 0.65)
    assert moved("learned")["weight"].mean().item() == pytest.approx(eva02["pos_embed"], rel=1e-5)
    freqs = moved("rope_mixed")["freqs"]  # timm gives them the head's rate, whatever the block; here it is the block's
    assert [freqs[:, i].mean().item() for i in range(4)] == pytest.approx([0.65**k for k in (4, 3, 2, 1)], rel=1e-5)


def test_convolutions_and_tables_of_a_block_learn_with_it():
    rates = [pytest.approx(0.65**k, rel=1e-5) for k in (4, 3, 2, 1)]
    tables = moved("learned", pos_embed_join="every_layer")["weight"]
    convs = moved("conv", pos_embed_join="every_layer")
    assert tables.mean((1, 2)).tolist() == rates
    assert [convs[f"convs.{i}.weight"].mean().item() for i in range(4)] == rates
    assert moved("conv")["convs.0.bias"].mean().item() == rates[0]  # after the first block


def test_the_record_of_rates_has_a_row_for_each_block_of_a_table():
    net = VisionTransformer(**TINY, pos_embed="relpos")
    rows = describe_groups(net, param_groups(net, 0.1, 0.1, layer_decay=0.5), 0.1, layer_decay=0.5)
    tables = [row for row in rows if row["name"] == "pos_embed.bias_table"]
    assert [(row["block"], row["lr_scale"]) for row in tables] == [(0, 0.25), (1, 0.5)]
    assert tables[0]["shape"] == list(net.pos_embed.bias_table.shape[1:])


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_what_a_parametrized_weight_is_computed_from_decays(norm):
    net = VisionTransformer(img_size=8, in_chans=1, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    norm(net.blocks[0].mlp.fc1)
    name = {"spectral_norm": "original", "weight_norm": "original1"}[norm.__name__]
    decaying = {id(p) for group in param_groups(net, 1.0, 0.1) if group["weight_decay"] for p in group["params"]}
    params = dict(net.blocks[0].mlp.fc1.parametrizations.weight.named_parameters())
    assert [key for key, p in params.items() if id(p) in decaying] == [name]


def pruned(layer, name):
    nn.utils.prune.l1_unstructured(layer, name, 0.2)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")  # torch prefers parametrizations
@pytest.mark.parametrize(
    "hook, stored",
    [(nn.utils.weight_norm, "weight_v"), (nn.utils.spectral_norm, "weight_orig"), (pruned, "weight_orig")],
)
def test_what_a_hook_computes_a_weight_from_decays(hook, stored):
    layer = nn.Linear(8, 4)
    hook(layer, "weight")
    assert [id(p) for p in projections(layer)] == [id(getattr(layer, stored))]
    attention = nn.MultiheadAttention(8, 2)
    pruned(attention, "in_proj_weight")
    assert [id(p) for p in projections(attention)] == [id(attention.in_proj_weight_orig)]
