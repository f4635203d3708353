from contextlib import nullcontext
from typing import get_args

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitlab.layers.pos_embed import PosEmbedName
from vitlab.models.vit import VisionTransformer
from vitlab.optim import param_groups

NAMES = get_args(PosEmbedName)
TINY = {"img_size": [12, 20], "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
N = 15  # patch tokens, 3 x 5


def tiny(pos_embed, randomize=True, **options):
    torch.manual_seed(1)
    model = VisionTransformer(**(TINY | {"pos_embed": pos_embed} | options)).eval()
    if randomize:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def images(batch=2, size=(12, 20)):
    torch.manual_seed(2)
    return torch.randn(batch, 3, *size)


def permuted(model, pictures, order, move_tokens, move_positions):
    """Return logits where patch slot i holds token or position order[i]; tokens are moved after the tokenizer."""
    hook = model.tokenizer.register_forward_hook(lambda module, args, tokens: tokens[:, order]) if move_tokens else None
    with torch.no_grad(), model.pos_embed.permute_positions(order) if move_positions else nullcontext():
        logits = model(pictures)
    if hook is not None:
        hook.remove()
    return logits


def zero_position(model):
    """Set what carries position to zero: tables, biases, frequencies, slopes, kernels."""
    pos_embed = model.pos_embed
    for parameter in pos_embed.parameters():
        torch.nn.init.zeros_(parameter)
    buffers = dict(pos_embed.named_buffers())
    for key in ("weight", "slopes", "sin"):
        if key in buffers:
            buffers[key].zero_()
    if "cos" in buffers:
        buffers["cos"].fill_(1.0)


@pytest.mark.parametrize("tokenizer", ["patch", "t2t"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_a_method_whose_numbers_are_zero_is_exactly_none(name, tokenizer):
    options = {"img_size": [16, 32], "tokenizer": tokenizer, "t2t_dim": 8}
    model, none = tiny(name, **options), tiny("none", **options)
    none.load_state_dict({key: v for key, v in model.state_dict().items() if not key.startswith("pos_embed.")})
    pictures = images(size=(16, 32))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # other kernels round a bias of zero differently than no bias
        assert (model(pictures) - none(pictures)).abs().max() > 1e-5
        zero_position(model)
        assert torch.equal(model(pictures), none(pictures))


@pytest.mark.parametrize("join", ["stem", "every_layer", "every_layer_shared"])
@pytest.mark.parametrize("name", ["learned", "factorized", "sincos1d", "sincos2d"])
def test_a_table_of_zeros_is_exactly_none_at_every_join(name, join):
    model, none = tiny(name, pos_embed_join=join), tiny("none")
    none.load_state_dict({key: v for key, v in model.state_dict().items() if not key.startswith("pos_embed.")})
    zero_position(model)
    with torch.no_grad():
        assert torch.equal(model(images()), none(images()))


@pytest.mark.parametrize(
    ("name", "join"), [*((name, None) for name in NAMES), ("learned", "every_layer"), ("conv", "every_layer")]
)
def test_permuting_tokens_and_positions_alike_cancels_and_tokens_alone_does_not(name, join):
    model, order = tiny(name, pos_embed_join=join, reg_tokens=1), torch.randperm(N)
    logits = permuted(model, images(), order, move_tokens=False, move_positions=False)
    both = permuted(model, images(), order, move_tokens=True, move_positions=True)
    tokens = permuted(model, images(), order, move_tokens=True, move_positions=False)
    positions = permuted(model, images(), order, move_tokens=False, move_positions=True)
    torch.testing.assert_close(both, logits, rtol=0, atol=1e-5)
    for moved in (tokens, positions):
        assert (moved - logits).abs().max() <= 1e-5 if name == "none" else (moved - logits).abs().max() > 1e-3


def test_none_with_the_patch_tokenizer_does_not_notice_that_patches_move_in_the_image():
    model = tiny("none").double()
    pictures = images().double()
    with torch.no_grad():
        torch.testing.assert_close(model(pictures.roll((4, 8), dims=(2, 3))), model(pictures), rtol=0, atol=1e-12)


def test_the_t2t_tokenizer_tells_the_border_of_a_constant_image():
    tokenizer = tiny("none", tokenizer="t2t", img_size=112, t2t_dim=8).tokenizer
    with torch.no_grad():
        tokens = tokenizer(torch.ones(1, 3, 112, 112)).view(7, 7, 16)
    inside = tokens[2:5, 2:5].flatten(0, 1)
    torch.testing.assert_close(inside, inside[:1].expand(9, 16), rtol=0, atol=1e-6)
    assert (tokens[0, 0] - tokens[3, 3]).norm() / tokens[3, 3].norm() > 0.1


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_fast_attention_is_the_explicit_one(name, dtype):
    model = tiny(name)
    attn, x = model.blocks[0].attn, 0.5 * torch.randn(2, 1 + N, 16)
    autocast = torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()
    with torch.no_grad(), autocast:
        fast = attn(x, model.pos_embed, 1)
    with torch.no_grad():
        v = attn.qkv(x).unflatten(2, (3, 2, 8))[:, :, 2].transpose(1, 2)
        slow = attn.proj((attn.weights(x, model.pos_embed, 1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(
        fast.float() / slow.abs().max(), slow / slow.abs().max(), rtol=0, atol=2e-2 if dtype else 1e-5
    )


@pytest.mark.parametrize("tokenizer", ["patch", "t2t"])
def test_one_seed_gives_all_methods_the_same_other_weights(tokenizer):
    options = {"img_size": [16, 32], "tokenizer": tokenizer, "t2t_dim": 8, "reg_tokens": 2, "global_pool": "map"}
    reference = tiny("none", randomize=False, **options).state_dict()
    for name in NAMES:
        state = tiny(name, randomize=False, **options).state_dict()
        others = {key: value for key, value in state.items() if not key.startswith("pos_embed.")}
        assert others.keys() == reference.keys()
        assert [key for key, value in others.items() if not torch.equal(value, reference[key])] == []


@pytest.mark.parametrize("name", ["learned", "factorized", "relpos", "rope_mixed", "conv"])
def test_positions_do_not_decay_have_their_own_rate_and_are_absent_when_frozen(name):
    for trainable in (None, False):
        model = tiny(name, pos_embed_trainable=trainable)
        positions = {id(parameter) for parameter in model.pos_embed.parameters()}
        groups = param_groups(model, lr=0.5, weight_decay=0.1, pos_embed_lr_mult=10 if trainable is None else 1)
        mine = [(g["lr"], g["weight_decay"]) for g in groups for p in g["params"] if id(p) in positions]
        assert mine == ([(5.0, 0.0)] * len(positions) if trainable is None else [])


@pytest.mark.parametrize("name", ["learned", "factorized", "relpos", "rope_mixed"])
def test_equal_tables_in_every_layer_are_one_shared_table(name):
    every = tiny(name, pos_embed_join="every_layer")
    shared = tiny(name, pos_embed_join="every_layer_shared")
    state = every.state_dict()
    for key, value in shared.state_dict().items():
        if key.startswith("pos_embed."):
            state[key] = value.expand_as(state[key])
    every.load_state_dict(state)
    shared.load_state_dict({key: v for key, v in state.items() if not key.startswith("pos_embed.")}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(every(images()), shared(images()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["learned", "factorized", "sincos1d", "sincos2d"])
def test_one_block_makes_every_join_the_same(name):
    stem = tiny(name, depth=1)
    with torch.no_grad():
        logits = stem(images())
        for join in ("every_layer", "every_layer_shared"):
            other = tiny(name, depth=1, pos_embed_join=join)
            other.load_state_dict(stem.state_dict())
            torch.testing.assert_close(other(images()), logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_bfloat16_model_and_autocast_run_and_stay_near(name):
    model = tiny(name)
    with torch.no_grad():
        logits = model(images())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            automatic = model(images())
        cast = model.to(torch.bfloat16)(images().bfloat16())
        back = model.double().float()(images())
    assert cast.dtype == torch.bfloat16 and back.dtype == torch.float32
    assert all(value.dtype != torch.float64 for value in model.state_dict().values())
    assert all(value.dtype != torch.float64 for value in model.pos_embed.buffers())
    for other in (automatic, cast):
        assert (other.float() - logits).abs().max() <= 0.15 * logits.abs().max()


@pytest.mark.parametrize("name", ["relpos", "alibi2d", "rope2d", "rope_mixed"])
def test_lightnings_bf16_true_leaves_rotations_and_biases_in_float32_and_trains(name):
    precision = HalfPrecision("bf16-true")
    with precision.module_init_context():
        model = tiny(name, randomize=False)
    model = precision.convert_module(model).train()
    assert model.head.weight.dtype == torch.bfloat16
    reference = tiny(name, randomize=False).pos_embed
    reference.load_state_dict(model.pos_embed.state_dict())
    for ours, theirs in zip(position_numbers(model.pos_embed), position_numbers(reference), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(images().bfloat16()).square().sum().backward()
    optimizer.step()
    assert all(p.grad is not None for p in model.pos_embed.parameters())


def position_numbers(pos_embed):
    """Return cosines and sines of block 1, or its biases."""
    return pos_embed.cos_sin(1) if hasattr(pos_embed, "cos_sin") else (pos_embed.bias(1),)
