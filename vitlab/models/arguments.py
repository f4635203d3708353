"""Typed dictionaries of the network's arguments; a test compares them with :class:`VisionTransformer`."""

from collections.abc import Sequence

from vitlab.layers.attention import AttnChoice
from vitlab.layers.block import BlockChoice
from vitlab.layers.mlp import ActChoice, MlpChoice
from vitlab.layers.norm import NormChoice
from vitlab.layers.pool import PoolChoice
from vitlab.layers.pos_embed import PosEmbedChoice
from vitlab.models.old_names import OldArgs
from vitlab.tokenizers.build import TokenizerChoice


class NetworkArgs(OldArgs, total=False):
    """Arguments of :class:`vitlab.models.vit.VisionTransformer` except ``num_classes``, and the old names of options.

    >>> arguments: NetworkArgs = {"depth": 3, "pos_embed": "rope2d"}
    """

    img_size: int | Sequence[int]
    in_chans: int
    tokenizer: TokenizerChoice
    patch_size: int | Sequence[int]
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    qkv_bias: bool
    block: BlockChoice
    attn: AttnChoice
    act_layer: ActChoice
    mlp_layer: MlpChoice
    norm_layer: NormChoice
    norm_eps: float
    pos_embed: PosEmbedChoice
    class_token: bool
    reg_tokens: int
    global_pool: PoolChoice
    pre_norm: bool
    fc_norm: bool
    head_hidden: int
    init_std: float
    layer_scale: float | None
    dropout: float
    drop_path_rate: float
    drop_path_subset: bool
    grad_checkpoint: bool


class ModelArgs(NetworkArgs, total=False):
    """All arguments of :class:`vitlab.models.vit.VisionTransformer`.

    >>> arguments: ModelArgs = {"depth": 3, "num_classes": 10}
    """

    num_classes: int
