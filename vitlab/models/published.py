"""Facts about the published networks: cost as counted here, accuracy as published, with its source."""

from typing import NamedTuple

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
