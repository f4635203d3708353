""" Tokens-to-Token Vision Transformer (T2T-ViT)

A PyTorch implementation of T2T-ViT as described in:
'Tokens-to-Token ViT: Training Vision Transformers from Scratch on ImageNet' - https://arxiv.org/abs/2101.11986

The official code is https://github.com/yitu-opensource/T2T-ViT; its state dicts load through `checkpoint_filter_fn`.

Everything behind the tokenizer is timm's VisionTransformer, so features, pooling, resizing of positions and
`forward_intermediates` are those of the other ViTs.
"""
import math
from functools import partial
from typing import Any, Dict, Optional, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import Mlp, to_2tuple
from timm.models._builder import build_model_with_cfg  # inside of timm: from ._builder import ...
from timm.models._registry import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer

__all__ = ['T2TTokens', 'T2TVisionTransformer']


class TokenAttention(nn.Module):
    """ Single-head attention that changes the width of tokens; the values are added to its output.
    """

    def __init__(self, in_dim: int, dim: int, qkv_bias: bool = False, device=None, dtype=None):
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.scale = in_dim ** -0.5  # of the official code: the width that enters, not that of a head
        self.qkv = nn.Linear(in_dim, dim * 3, bias=qkv_bias, **dd)
        self.proj = nn.Linear(dim, dim, **dd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        x = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return v.squeeze(1) + self.proj(x.squeeze(1))


class TokenTransformer(nn.Module):
    """ Transformer layer between two soft splits.
    """

    def __init__(
            self,
            in_dim: int,
            dim: int,
            mlp_ratio: float = 1.0,
            qkv_bias: bool = False,
            device=None,
            dtype=None,
    ):
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.norm1 = nn.LayerNorm(in_dim, **dd)
        self.attn = TokenAttention(in_dim, dim, qkv_bias=qkv_bias, **dd)
        self.norm2 = nn.LayerNorm(dim, **dd)
        self.mlp = Mlp(dim, hidden_features=int(dim * mlp_ratio), **dd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokenPerformer(nn.Module):
    """ Performer layer between two soft splits: attention that is linear in the number of tokens.
    """

    def __init__(
            self,
            in_dim: int,
            dim: int,
            kernel_ratio: float = 0.5,
            drop: float = 0.1,
            device=None,
            dtype=None,
    ):
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.eps = 1e-8
        self.norm1 = nn.LayerNorm(in_dim, **dd)
        self.kqv = nn.Linear(in_dim, dim * 3, **dd)
        self.proj = nn.Linear(dim, dim, **dd)
        self.drop = nn.Dropout(drop)
        self.norm2 = nn.LayerNorm(dim, **dd)
        self.mlp = nn.Sequential(nn.Linear(dim, dim, **dd), nn.GELU(), nn.Linear(dim, dim, **dd), nn.Dropout(drop))
        m = int(dim * kernel_ratio)
        self.w = nn.Parameter(torch.empty(m, dim, **dd), requires_grad=False)
        nn.init.orthogonal_(self.w, gain=math.sqrt(m))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """ Positive random features of the softmax kernel """
        x = x @ self.w.to(x).t() - x.square().sum(dim=-1, keepdim=True) / 2
        return x.exp() / math.sqrt(self.w.shape[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, q, v = self.kqv(self.norm1(x)).chunk(3, dim=-1)
        # the features overflow in float16, and the epsilon is 0 there
        with torch.autocast(device_type=x.device.type, enabled=False):
            qp, kp = self.features(q.float()), self.features(k.float())
            y = qp @ (kp.transpose(1, 2) @ v.float()) / (qp @ kp.sum(dim=1).unsqueeze(-1) + self.eps)
        x = v + self.drop(self.proj(y.to(v.dtype)))
        return x + self.mlp(self.norm2(x))


class T2TTokens(nn.Module):
    """ Image to tokens: three soft splits (overlapping windows) with a token layer after the first and the second.

    Takes the place of PatchEmbed: a token has a stride of 16 pixels.
    """
    splits = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # kernel size, stride, padding

    def __init__(
            self,
            img_size: Union[int, Tuple[int, int]] = 224,
            patch_size: Union[int, Tuple[int, int]] = 16,
            in_chans: int = 3,
            embed_dim: int = 384,
            token_dim: int = 64,
            performer: bool = False,
            bias: bool = True,
            output_fmt: str = 'NLC',
            strict_img_size: bool = True,
            dynamic_img_pad: bool = False,
            device=None,
            dtype=None,
    ):
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.patch_size = to_2tuple(patch_size)
        assert self.patch_size == (16, 16), 'soft splits have a stride of 16 pixels'
        assert not dynamic_img_pad, 'soft splits pad on their own'
        self.output_fmt = output_fmt
        self.strict_img_size = strict_img_size
        layer = TokenPerformer if performer else TokenTransformer
        self.attention1 = layer(in_chans * 7 * 7, token_dim, **dd)
        self.attention2 = layer(token_dim * 3 * 3, token_dim, **dd)
        self.project = nn.Linear(token_dim * 3 * 3, embed_dim, bias=bias, **dd)
        self.set_input_size(img_size)

    def set_input_size(
            self,
            img_size: Optional[Union[int, Tuple[int, int]]] = None,
            patch_size: Optional[Union[int, Tuple[int, int]]] = None,
    ):
        assert patch_size is None or to_2tuple(patch_size) == self.patch_size, 'soft splits cannot change their stride'
        if img_size is not None:
            self.img_size = to_2tuple(img_size)
            self.grid_size = self.dynamic_feat_size(self.img_size)
            self.num_patches = self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self, as_scalar=True) -> Union[Tuple[int, int], int]:
        return max(self.patch_size) if as_scalar else self.patch_size

    def dynamic_feat_size(self, img_size: Tuple[int, int]) -> Tuple[int, int]:
        """ Grid of tokens of an image size; a split has (size + 2 * padding - kernel) // stride + 1 windows """
        h, w = img_size
        for kernel, stride, padding in self.splits:
            h, w = ((s + 2 * padding - kernel) // stride + 1 for s in (h, w))
        return h, w

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-2:]
        if self.strict_img_size:
            assert tuple(size) == self.img_size, f"Input size {tuple(size)} doesn't match model {self.img_size}."
        for (kernel, stride, padding), layer in zip(self.splits, (self.attention1, self.attention2, self.project)):
            x = F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)  # (B, N, C * kernel ** 2)
            size = [(s + 2 * padding - kernel) // stride + 1 for s in size]
            x = layer(x)
            if layer is not self.project:
                x = x.transpose(1, 2).reshape(x.shape[0], -1, size[0], size[1])
        return x.reshape(x.shape[0], size[0], size[1], -1) if self.output_fmt == 'NHWC' else x


def sinusoid_table(num_tokens: int, dim: int) -> torch.Tensor:
    """ Positions of Vaswani et al. for tokens in one row, class token first: (1, num_tokens, dim) """
    angle = torch.arange(num_tokens, dtype=torch.float64)[:, None]
    angle = angle / 10000 ** (2 * (torch.arange(dim, dtype=torch.float64) // 2) / dim)
    angle[:, 0::2], angle[:, 1::2] = angle[:, 0::2].sin(), angle[:, 1::2].cos()
    return angle.float()[None]


class T2TVisionTransformer(VisionTransformer):
    """ VisionTransformer behind soft splits, with frozen sinusoidal positions.
    """

    def __init__(self, *args, token_dim: int = 64, performer: bool = False, **kwargs):
        kwargs.setdefault('embed_layer', partial(T2TTokens, token_dim=token_dim, performer=performer))
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            self.pos_embed.copy_(sinusoid_table(self.pos_embed.shape[1], self.embed_dim))
        self.pos_embed.requires_grad_(False)

    @torch.jit.ignore
    def no_weight_decay(self):
        return {'pos_embed', 'cls_token'}


def checkpoint_filter_fn(state_dict: Dict[str, Any], model: nn.Module) -> Dict[str, torch.Tensor]:
    """ Rename official checkpoints; resize positions if the grid differs """
    for name in ('state_dict_ema', 'state_dict'):
        if name in state_dict:
            state_dict = state_dict[name]
            break
    out_dict = {}
    for k, v in state_dict.items():
        out_dict[k.removeprefix('module.').replace('tokens_to_token.', 'patch_embed.', 1)] = v
    if 'pos_embed' in out_dict and out_dict['pos_embed'].shape != model.pos_embed.shape:
        from timm.layers import resample_abs_pos_embed
        out_dict['pos_embed'] = resample_abs_pos_embed(
            out_dict['pos_embed'], new_size=model.patch_embed.grid_size, num_prefix_tokens=model.num_prefix_tokens)
    return out_dict


def _cfg(url: str = '', **kwargs) -> Dict[str, Any]:
    return {
        'url': url,
        'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': None,
        'crop_pct': .9, 'interpolation': 'bicubic', 'fixed_input_size': True,
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'first_conv': (), 'classifier': 'head',
        'license': 'clear-bsd', 'paper_ids': 'arXiv:2101.11986',
        'paper_name': 'Tokens-to-Token ViT: Training Vision Transformers from Scratch on ImageNet',
        'origin_url': 'https://github.com/yitu-opensource/T2T-ViT',
        **kwargs
    }


default_cfgs = generate_default_cfgs({  # whoever adds the weights: url or hf_hub_id, and the tag in1k
    't2t_vit_7.untrained': _cfg(),
    't2t_vit_10.untrained': _cfg(),
    't2t_vit_12.untrained': _cfg(),
    't2t_vit_14.untrained': _cfg(),
    't2t_vit_19.untrained': _cfg(),
    't2t_vit_24.untrained': _cfg(),
    't2t_vit_t_14.untrained': _cfg(),
    't2t_vit_t_19.untrained': _cfg(),
    't2t_vit_t_24.untrained': _cfg(),
})


def _create_t2t_vit(variant: str, pretrained: bool = False, **kwargs) -> T2TVisionTransformer:
    out_indices = kwargs.pop('out_indices', 3)
    kwargs = dict(dict(qkv_bias=False, norm_layer=partial(nn.LayerNorm, eps=1e-5)), **kwargs)
    return build_model_with_cfg(
        T2TVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
        **kwargs,
    )


@register_model
def t2t_vit_7(pretrained: bool = False, **kwargs) -> T2TVisionTransformer:
    """ T2T-ViT-7; the token layers between the splits are performers """
    model_args = dict(performer=True, embed_dim=256, depth=7, num_heads=4, mlp_ratio=2.)
    return _create_t2t_vit('t2t_vit_7', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def t2t_vit_10(pretrained: bool = False, **kwargs) -> T2TVisionTransformer:
    """ T2T-ViT-10 """
    model_args = dict(performer=True, embed_dim=256, depth=10, num_heads=4, mlp_ratio=2.)
    return _create_t2t_vit('t2t_vit_10', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def t2t_vit_12(pretrained: bool = False, **kwargs) -> T2TVisionTransformer:
    """ T2T-ViT-12 """
    model_args = dict(performer=True, embed_dim=256, depth=12, num_heads=4, mlp_ratio=2.)
    return _create_t2t_vit('t2t_vit_12', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def t2t_vit_14(pretrained: bool = False, **kwargs) -> T2TVisionTransformer:
    """ T2T-ViT-14 """
    model_args = dict(performer=True, embed_dim=384, depth=14, num_heads=6, mlp_ratio=3.)
    return _create_t2t_vit('t2t_vit_14', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def t2t_vit_19(pretrained: bool = False, **kwargs) -> T2TVisionTransformer:
    """ T2T-ViT-19 """
    model_args = dict(performer=True, embed_dim=448, depth=19, num_heads=7, mlp_ratio=3.)
    return _create_t2t_vit('t2t_vit_19', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def t2t_vit_24(pretrained: bool = False, **kwargs) -> T2TVisionTransformer:
    """ T2T-ViT-24 """
    model_args = dict(performer=True, embed_dim=512, depth=24, num_heads=8, mlp_ratio=3.)
    return _create_t2t_vit('t2t_vit_24', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def t2t_vit_t_14(pretrained: bool = False, **kwargs) -> T2TVisionTransformer:
    """ T2T-ViT_t-14: with softmax attention between the splits """
    model_args = dict(embed_dim=384, depth=14, num_heads=6, mlp_ratio=3.)
    return _create_t2t_vit('t2t_vit_t_14', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def t2t_vit_t_19(pretrained: bool = False, **kwargs) -> T2TVisionTransformer:
    """ T2T-ViT_t-19 """
    model_args = dict(embed_dim=448, depth=19, num_heads=7, mlp_ratio=3.)
    return _create_t2t_vit('t2t_vit_t_19', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def t2t_vit_t_24(pretrained: bool = False, **kwargs) -> T2TVisionTransformer:
    """ T2T-ViT_t-24 """
    model_args = dict(embed_dim=512, depth=24, num_heads=8, mlp_ratio=3.)
    return _create_t2t_vit('t2t_vit_t_24', pretrained=pretrained, **dict(model_args, **kwargs))
