"""The published networks: arguments that differ from the defaults, costs, and accuracies with their source."""

from typing import TYPE_CHECKING, Any, NamedTuple

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


_T2T = "Yuan et al. 2021 (arXiv:2101.11986), README of yitu-opensource/T2T-ViT"
_T2T_TABLE = "Yuan et al. 2021 (arXiv:2101.11986), table 6"
_DEIT = "Touvron et al. 2021 (arXiv:2012.12877)"
_VIT5 = "Wang et al. 2026 (arXiv:2602.08071), README of wangf3014/ViT-5"
_TORCHVISION = "torchvision, ViT_L_16_Weights.IMAGENET1K_V1"
_NONE = "none from ImageNet-1k alone; Dosovitskiy et al. 2021 (arXiv:2010.11929) pre-train on more"


class Published(NamedTuple):
    """A published network at its own image size, 224 pixels, with 1,000 classes.

    Args:
        parameters: Trained values, counted here, where the class token's position is part of the token.
        macs: Multiply-adds for one image, attention products included; tests recount both.
        tokens: Tokens in every block, the class token included.
        top1: ImageNet-1k accuracy in percent when trained only on ImageNet-1k at 224 pixels; None if unpublished.
        source: Who published the accuracy.
        again: Top-1 and top-5 of the published weights as measured by others, in percent.

    Example:
        >>> PUBLISHED["t2t_vit_14"].top1
        81.5
    """

    parameters: int
    macs: int
    tokens: int
    top1: float | None
    source: str
    again: tuple[float, float] | None = None


AGAIN = "huggingface/pytorch-image-models#2426"  # where others measured the weights of T2T-ViT

PUBLISHED = {
    "vit_ti16": Published(5_717_224, 1_253_683_200, 197, 72.2, _DEIT),
    "vit_s16": Published(22_050_280, 4_598_882_304, 197, 79.9, _DEIT),
    "vit_b16": Published(86_566_888, 17_563_828_224, 197, 81.8, _DEIT),
    "vit_l16": Published(304_325_608, 61_554_712_576, 197, 79.7, _TORCHVISION),
    "vit_h14": Published(632_044_520, 167_295_109_120, 257, None, _NONE),
    "vit5_s16": Published(22_039_144, 4_698_488_832, 201, 82.2, _VIT5),
    "vit5_b16": Published(86_543_080, 17_932_910_592, 201, 84.2, _VIT5),
    "vit5_l16": Published(304_258_024, 62_840_922_112, 201, 84.9, _VIT5),
    "t2t_vit_7": Published(4_255_694, 1_146_863_616, 197, 71.7, _T2T, (71.676, 90.886)),
    "t2t_vit_10": Published(5_834_702, 1_516_328_448, 197, 75.2, _T2T, (75.150, 92.806)),
    "t2t_vit_12": Published(6_887_374, 1_762_638_336, 197, 76.5, _T2T, (76.480, 93.484)),
    "t2t_vit_14": Published(21_465_806, 4_783_468_544, 197, 81.5, _T2T, (81.500, 95.666)),
    "t2t_vit_19": Published(39_085_070, 8_479_682_176, 197, 81.9, _T2T, (81.932, 95.744)),
    "t2t_vit_24": Published(64_000_974, 13_661_874_688, 197, 82.3, _T2T, (82.276, 95.886)),
    "t2t_vit_t_14": Published(21_465_422, 6_088_721_920, 197, 81.7, _T2T, (81.688, 95.852)),
    "t2t_vit_t_19": Published(39_084_686, 9_784_935_552, 197, 82.4, _T2T, (82.442, 96.082)),
    "t2t_vit_t_24": Published(64_000_590, 14_967_128_064, 197, 82.6, _T2T, (82.554, 96.064)),
    "t2t_vit_14_resnext": Published(21_465_806, 4_783_468_544, 197, 81.5, _T2T_TABLE),
    "t2t_vit_14_wide": Published(25_000_910, 5_229_349_376, 197, 77.9, _T2T_TABLE),
    "t2t_vit_14_se": Published(21_723_854, 4_783_726_592, 197, 81.6, _T2T_TABLE),
    "t2t_vit_dense": Published(23_617_750, 5_276_107_968, 197, 76.8, _T2T_TABLE),
    "t2t_vit_16_ghost": Published(16_173_518, 3_797_321_216, 197, 73.7, _T2T_TABLE),
}
