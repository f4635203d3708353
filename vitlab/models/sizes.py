"""The published networks as arguments of VisionTransformer; arguments that an entry omits have their default."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a list of sizes needs no torch
    from vitlab.class_paths import ClassSpec
    from vitlab.models.arguments import ModelArgs
    from vitlab.tokenizers.token_layers import T2TAttn


def _spec(word: str, **init_args: Any) -> "ClassSpec":
    return {"class_path": word, "init_args": init_args}


def _vit(patch_size: int, embed_dim: int, depth: int, num_heads: int) -> "ModelArgs":
    return {"patch_size": patch_size, "embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}


def _vit5(embed_dim: int, depth: int, num_heads: int) -> "ModelArgs":
    rope = {
        "theta": 1e4,
        "coordinates": "index",
        "pairs": "interleaved",
        "axes": "yx",
        "register_theta": 100.0,
    }
    return {
        **_vit(16, embed_dim, depth, num_heads),
        "qkv_bias": False,
        "attn": _spec("softmax", qk_norm=True),
        "norm_layer": "rmsnorm",
        "layer_scale": 1e-4,
        "reg_tokens": 4,
        "pos_embed": ["learned", _spec("rope2d", **rope)],
    }


def _t2t(t2t_attn: "T2TAttn", embed_dim: int, depth: int, num_heads: int, mlp_ratio: float) -> "ModelArgs":
    return {
        "tokenizer": _spec("t2t", t2t_attn=t2t_attn),
        "embed_dim": embed_dim,
        "depth": depth,
        "num_heads": num_heads,
        "mlp_ratio": mlp_ratio,
        "qkv_bias": False,
        "norm_eps": 1e-5,
        "pos_embed": "sincos1d",
    }


SIZES: dict[str, "ModelArgs"] = {
    # Ti, S: Touvron et al. 2021 (arXiv:2012.12877); B, L, H: Dosovitskiy et al. 2021 (arXiv:2010.11929); tables 1
    "vit_ti16": _vit(16, 192, 12, 3),
    "vit_s16": _vit(16, 384, 12, 6),
    "vit_b16": _vit(16, 768, 12, 12),
    "vit_l16": _vit(16, 1024, 24, 16),
    "vit_h14": _vit(14, 1280, 32, 16),
    # Wang et al. 2026 (arXiv:2602.08071), as wangf3014/ViT-5 builds them
    "vit5_s16": _vit5(384, 12, 6),
    "vit5_b16": _vit5(768, 12, 12),
    "vit5_l16": _vit5(1024, 24, 16),
    # Yuan et al. 2021 (arXiv:2101.11986), as the official code builds them; the paper's table gives the first depth 8
    "t2t_vit_7": _t2t("performer", 256, 7, 4, 2.0),
    "t2t_vit_10": _t2t("performer", 256, 10, 4, 2.0),
    "t2t_vit_12": _t2t("performer", 256, 12, 4, 2.0),
    "t2t_vit_14": _t2t("performer", 384, 14, 6, 3.0),
    "t2t_vit_19": _t2t("performer", 448, 19, 7, 3.0),
    "t2t_vit_24": _t2t("performer", 512, 24, 8, 3.0),
    "t2t_vit_t_14": _t2t("transformer", 384, 14, 6, 3.0),
    "t2t_vit_t_19": _t2t("transformer", 448, 19, 7, 3.0),
    "t2t_vit_t_24": _t2t("transformer", 512, 24, 8, 3.0),
    # table 6 there: more, narrower heads; fewer, wider blocks (the table gives depth 14, the official code 4)
    "t2t_vit_14_resnext": _t2t("performer", 384, 14, 32, 3.0),
    "t2t_vit_14_wide": _t2t("performer", 768, 4, 12, 3.0),
    "t2t_vit_14_se": _t2t("performer", 384, 14, 6, 3.0) | {"attn": _spec("softmax", se_reduction=16)},
    "t2t_vit_dense": _t2t("performer", 128, 19, 8, 2.0)
    | {"block": _spec("dense", dense_blocks=[3, 6, 6, 4], dense_growth=64)},
    "t2t_vit_16_ghost": _t2t("performer", 384, 16, 6, 3.0)
    | {"attn": _spec("softmax", ghost=True), "mlp_layer": "ghost"},
}
