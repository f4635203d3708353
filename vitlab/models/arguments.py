"""Typed dictionaries of the network's arguments; a test compares them with :class:`VisionTransformer`."""

from collections.abc import Sequence

from vitlab.layers.mlp import ActChoice, MlpName
from vitlab.layers.norm import NormChoice
from vitlab.layers.pool import PoolName
from vitlab.layers.pos_embed import PosEmbedChoice, PosEmbedJoin
from vitlab.layers.resample import ResizePolicy
from vitlab.tokenizers.build import TokenizerChoice
from vitlab.tokenizers.t2t import T2TArgs


class NetworkArgs(T2TArgs, total=False):
    """Arguments of :class:`vitlab.models.vit.VisionTransformer` except ``num_classes``.

    >>> arguments: NetworkArgs = {"depth": 3, "pos_embed": "rope2d"}
    """

    img_size: int | Sequence[int]
    in_chans: int
    tokenizer: TokenizerChoice
    patch_size: int | Sequence[int]
    flexi_patch: Sequence[int] | None
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    qkv_bias: bool
    qk_scale: float | None
    qk_norm: bool
    value_skip: bool
    act_layer: ActChoice
    mlp_layer: MlpName
    norm_layer: NormChoice
    norm_eps: float
    pos_embed: PosEmbedChoice
    pos_embed_trainable: bool | None
    pos_embed_join: PosEmbedJoin | None
    pos_embed_resize: ResizePolicy | None
    rope_theta: float | None
    class_token: bool
    reg_tokens: int
    global_pool: PoolName
    pre_norm: bool
    fc_norm: bool
    head_hidden: int
    init_std: float
    se_reduction: int
    ghost: bool
    dense_blocks: Sequence[int] | None
    dense_growth: int
    layer_scale: float | None
    attn_gate: bool
    attn_dropout: float
    dropout: float
    drop_path_rate: float
    drop_path_subset: bool
    grad_checkpoint: bool


class ModelArgs(NetworkArgs, total=False):
    """All arguments of :class:`vitlab.models.vit.VisionTransformer`.

    >>> arguments: ModelArgs = {"depth": 3, "num_classes": 10}
    """

    num_classes: int
