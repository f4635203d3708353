"""Convert state dicts of timm and of the official T2T-ViT to ours, and ours to timm; outputs do not change."""

import torch
from torch import Tensor

from vitlab.layers.pos_embed.added import SinCos1d
from vitlab.models.convert_pos import rename_blocks, rename_positions
from vitlab.tokenizers.patch import pseudo_inverse_resize

State = dict[str, Tensor]


def from_timm(state_dict: State, num_patches: int | None = None, num_heads: int | None = None) -> State:
    """Rename the state dict of a timm ViT, Eva (with rotations), BEiT or NaFlexViT to ours; outputs do not change.

    Positions that timm adds to class and register tokens are constants and become part of these tokens. DeiT, DINO,
    MAE and MoCo v3 have the same layout.

    Args:
        state_dict: State dict of timm.
        num_patches: Number of patch tokens N, from which follows how many rows of ``pos_embed`` belong to prefix
            tokens; None assumes a row for every prefix token, timm's default.
        num_heads: Number of heads A; needed only for the rotations in files of naver-ai/rope-vit.

    Example:
        >>> theirs = {"cls_token": torch.zeros(1, 1, 8), "pos_embed": torch.ones(1, 1 + 4, 8)}
        >>> {name: tuple(value.shape) for name, value in from_timm(theirs).items()}
        {'cls_token': (1, 1, 8), 'pos_embed.weight': (1, 4, 8)}
    """
    state = rename_positions(state_dict, num_heads)
    if (weight := state.get("patch_embed.proj.weight")) is not None:  # CLIP has no bias here
        state.setdefault("patch_embed.proj.bias", weight.new_zeros(len(weight)))
    return fold_prefix_positions(_rename(state, "patch_embed.", "tokenizer."), num_patches)


def to_timm(state_dict: State, pos_embed: Tensor | None = None, no_embed_class: bool = False) -> State:
    """Rename our state dict to timm's; outputs do not change. Prefix tokens get zero positions.

    With ``pre_norm``, as in CLIP, timm has no bias of patches: one of zeros is left out, another one refused.

    Args:
        state_dict: State dict of a network with ``tokenizer="patch"`` and a linear head.
        pos_embed: The ``(N, D)`` table of a method that does not save it, such as ``model.pos_embed.table(0)``.
        no_embed_class: timm's argument: whether its table has no rows for prefix tokens, as in DeiT III.

    Example:
        >>> from vitlab.models import VisionTransformer
        >>> net = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=1, num_heads=3)
        >>> list(to_timm(net.state_dict()))[-1]
        'pos_embed'
    """
    state = _rename(state_dict, "tokenizer.", "patch_embed.")
    table = state.pop("pos_embed.weight", None if pos_embed is None else pos_embed[None])
    foreign = [name for name in state if name.startswith(("pos_embed.", "head.0."))]
    foreign += [name for name in state if name.startswith("patch_embed.") and ".proj." not in name]
    if foreign or (table is not None and len(table) > 1):
        raise ValueError(f"timm's ViT has no counterpart of {', '.join(foreign) or 'a position table per block'}")
    if "norm_pre.weight" in state and (bias := state.pop("patch_embed.proj.bias")).any():
        raise ValueError(
            f"timm's ViT has no bias of patches where tokens are normalized before the blocks (CLIP), and this one is "
            f"up to {bias.abs().max():.1e}: set it to 0, or use pre_norm=False"
        )
    if table is not None:
        prefix = () if no_embed_class else ("cls_token", "reg_token")
        num_prefix_tokens = sum(state[name].shape[1] for name in prefix if name in state)
        state["pos_embed"] = torch.cat([table.new_zeros(1, num_prefix_tokens, table.shape[2]), table], dim=1)
    return state


def from_t2t(state_dict: State) -> State:
    """Rename the state dict of an official T2T-ViT (yitu-opensource/T2T-ViT) to ours; outputs do not change.

    The position of the class token becomes part of it. A table that equals the sine formula is dropped, because our
    model computes it; any other table is kept, for a model with a learned table.

    Example:
        >>> table = SinCos1d((1, 4), 8).table()
        >>> theirs = {"cls_token": torch.zeros(1, 1, 8), "pos_embed": torch.cat([torch.ones(1, 8), table])[None]}
        >>> list(from_t2t(theirs))
        ['cls_token']
    """
    state = rename_blocks(_rename(state_dict, "tokens_to_token.", "tokenizer."))
    state = fold_prefix_positions(state, state["pos_embed"].shape[1] - 1)
    table = state["pos_embed.weight"][0]
    formula = SinCos1d((1, len(table)), table.shape[1]).table()
    if same_table(table, formula, 1e-6):
        del state["pos_embed.weight"]
    return state


def convert_layout(
    state_dict: State, num_patches: int, num_prefix_tokens: int, num_heads: int
) -> tuple[State, list[str]]:
    """Convert a state dict of any supported layout to ours, keeping its position table; also say what it was.

    Args:
        state_dict: State dict of vitlab, timm or the official T2T-ViT.
        num_patches: Number of patch tokens N of the trained network if known, else of the model to load it.
        num_prefix_tokens: Number of prefix tokens P of the model.
        num_heads: Number of heads A of the model.

    Returns:
        The state dict, and a sentence if it was converted.

    Example:
        >>> convert_layout({"head.bias": torch.zeros(10)}, num_patches=196, num_prefix_tokens=1, num_heads=6)
        ({'head.bias': tensor([0., 0., 0., 0., 0., 0., 0., 0., 0., 0.])}, [])
    """
    rows = state_dict["pos_embed"].shape[1] if "pos_embed" in state_dict else 0
    if any(name.startswith("tokens_to_token.") for name in state_dict):
        state = rename_blocks(_rename(state_dict, "tokens_to_token.", "tokenizer."))
        state = fold_prefix_positions(state, rows - 1)
        return state, ["layout: converted from the official T2T-ViT"]
    if any(name.startswith(("patch_embed.", "embeds.")) for name in state_dict):
        if rows and rows - num_patches not in (0, 1, num_prefix_tokens):
            raise unknown_grid(rows)
        return from_timm(state_dict, num_patches, num_heads), ["layout: converted from timm"]
    return state_dict, []


def resize_patch_kernels(state: State, patch: tuple[int, int] | None) -> tuple[State, list[str]]:
    """Resize the patch kernels to another patch size as in FlexiViT, Beyer et al. 2023 (arXiv:2212.08013).

    Args:
        state: State dict in our layout.
        patch: Height and width of the new patches; None leaves the kernels unchanged.

    Example:
        >>> resize_patch_kernels({"tokenizer.proj.weight": torch.zeros(48, 3, 8, 8)}, (16, 16))[1]
        ['patches: kernels of 8 x 8 resized to 16 x 16']
    """
    kernel = state.get(name := "tokenizer.proj.weight")
    if patch is None or kernel is None or kernel.ndim != 4 or kernel.shape[2:] == patch:
        return state, []
    old = (kernel.shape[2], kernel.shape[3])
    resized = (kernel.double().flatten(2) @ pseudo_inverse_resize(old, patch).T).unflatten(2, patch)
    return state | {name: resized.to(kernel)}, ["patches: kernels of {} x {} resized to {} x {}".format(*old, *patch)]


def unknown_grid(count: int) -> ValueError:
    """Return the error for a file whose positions fit no known grid.

    Example:
        >>> str(unknown_grid(16))[:60]
        'the file has 16 positions and does not say their grid, which'
    """
    return ValueError(
        f"the file has {count} positions and does not say their grid, which is not the network's: give rows and "
        'columns with --init_grid (grid=... in Python), or {"network": {"img_size": ..., "patch_size": ...}} in '
        "FILE.json beside it"
    )


def same_table(table: Tensor, formula: Tensor, tolerance: float) -> bool:
    """Return whether a table of positions equals a formula, up to ``tolerance``.

    Example:
        >>> same_table(torch.ones(4, 8), torch.ones(4, 8) + 1e-7, tolerance=1e-6)
        True
    """
    return table.shape == formula.shape and bool((table - formula.to(table)).abs().max() <= tolerance)


def _rename(state_dict: State, old: str, new: str) -> State:
    return {new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in state_dict.items()}


def fold_prefix_positions(state: State, num_patches: int | None) -> State:
    """Add the rows of ``pos_embed`` for prefix tokens to these tokens; the other rows become our table.

    Example:
        >>> state = {"cls_token": torch.zeros(1, 1, 8), "pos_embed": torch.ones(1, 1 + 4, 8)}
        >>> list(fold_prefix_positions(state, 4))
        ['cls_token', 'pos_embed.weight']
    """
    state = dict(state)
    if "pos_embed" not in state:
        return state
    table = state.pop("pos_embed")  # (1, rows, D)
    prefix: dict[str, int] = {name: state[name].shape[1] for name in ("cls_token", "reg_token") if name in state}
    layouts = [prefix, {name: 1 for name in prefix if name == "cls_token"}, {}]  # prefix tokens that may have rows
    candidates = [table.shape[1] - sum(layout.values()) for layout in layouts]
    num_patches = candidates[0] if num_patches is None else num_patches
    if num_patches not in candidates:
        raise ValueError(
            f"`pos_embed` must have a row for each patch, and can have rows for prefix tokens, got {table.shape[1]} "
            f"rows, {num_patches} patches and {sum(prefix.values())} prefix tokens"
        )
    row = 0
    for name, count in layouts[candidates.index(num_patches)].items():
        state[name] = state[name] + table[:, row : row + count]
        row += count
    return state | {"pos_embed.weight": table[:, row:]}
