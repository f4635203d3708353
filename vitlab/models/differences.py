"""Say what two networks compute differently, although the same weights fit both."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from vitlab.layers.pos_embed.added import AddedPosEmbed
from vitlab.models.vit import VisionTransformer
from vitlab.named_kwargs import taken_by
from vitlab.tokenizers.conv import ConvStem
from vitlab.tokenizers.t2t import T2TTokenizer
from vitlab.tokenizers.token_layers import TokenAttention, TokenPerformer

_COMPUTE_THE_SAME = {  # arguments that change no output in evaluation, or what weights and other sentences show
    *("img_size", "grid_size", "patch_size", "eval_patch", "flexi_patch", "in_chans", "num_classes", "embed_dim"),
    *("dim", "depth"),
    *("dropout", "attn_dropout", "drop_path_rate", "drop_path_subset", "init_std", "grad_checkpoint", "fused"),
    *("rate", "subset", "trainable", "shift", "jitter", "rescale", "resize", "head_hidden", "layer_scale"),
}
_PARTS = {"tokenizer": "tokenizer", "attn": "attn", "mlp": "mlp_layer", "norm1": "norm_layer", "norm2": "norm_layer"}


def other_scale(trained: VisionTransformer, model: VisionTransformer) -> list[str]:
    """Return a sentence if the model multiplies its position tables by another ``scale``: tables stay as they are.

    Example:
        >>> sizes = {"img_size": 32, "embed_dim": 48, "depth": 1, "num_heads": 3}
        >>> scaled = {"class_path": "learned", "init_args": {"scale": 0.5}}
        >>> other_scale(VisionTransformer(**sizes), VisionTransformer(**sizes, pos_embed=scaled))
        ["`scale` of positions: the file's is 1 and the model's 0.5, so that the same table adds 0.5 times as much"]
    """
    added = [part for part in trained.pos_embed.modules() if isinstance(part, AddedPosEmbed)]
    own = [part for part in model.pos_embed.modules() if isinstance(part, AddedPosEmbed)]
    return [
        f"`scale` of positions: the file's is {a.chosen_scale:g} and the model's {b.chosen_scale:g}, so that the same "
        f"table adds {b.chosen_scale / a.chosen_scale:.3g} times as much"
        for a, b in zip(added, own, strict=False)
        if type(a) is type(b) and a.chosen_scale != b.chosen_scale
    ]


def other_settings(
    trained: VisionTransformer, model: VisionTransformer, has_new_head: bool, has_other_positions: bool
) -> list[str]:
    """Return a sentence if the model computes something else with the same weights.

    Args:
        trained: The network of the weights.
        model: The network that takes them.
        has_new_head: Whether its head is new, which may then pool otherwise.
        has_other_positions: Whether it has another position embedding, of which another sentence tells.

    Example:
        >>> sizes = {"img_size": 32, "embed_dim": 48, "depth": 1}
        >>> trained, model = VisionTransformer(**sizes, num_heads=3), VisionTransformer(**sizes, num_heads=6)
        >>> other_settings(trained, model, has_new_head=False, has_other_positions=False)
        ["weights: the file's network has num_heads=3 where this one has num_heads=6, and computes something else"]
    """
    file, own = _settings(trained), _settings(model)
    if has_other_positions:
        file = {key: value for key, value in file.items() if not key[0].startswith("pos_embed")}
    differ = {key[-1]: key for key in reversed(file) if key in own and file[key] != own[key]}  # the first of each name
    if "num_heads" in differ:
        differ.pop("qk_scale", None)  # which follows from it
    pool = differ.pop("global_pool", None)
    theirs, ours = (", ".join(f"{k}={of[key]}" for k, key in sorted(differ.items())) for of in (file, own))
    told = [f"weights: the file's network has {theirs} where this one has {ours}, and computes something else"]
    told = told if differ else []
    if pool and not has_new_head and not getattr(model, "pools_nothing", False):
        what = "head: the file's reads" if model.num_classes else "features: the file's network has"
        told.append(f"{what} global_pool={file[pool]} where this one has {own[pool]}")
    return told


def _settings(model: VisionTransformer) -> dict[tuple[str, str], Any]:
    """Return what decides, beside weights, what the parts of a network compute, by the part and the argument.

    That are the classes of parts, and the arguments that they keep; one that only draws weights is not kept.
    """
    found: dict[tuple[str, str], Any] = {}
    for name, part in model.named_modules():
        kept, last = vars(part), name.rpartition(".")[2]
        if not type(part).__module__.startswith("torch."):
            left_out = {*_COMPUTE_THE_SAME, *getattr(part, "completed_by", ())}
            left_out |= {"style"} if kept.get("trainable") else set()  # of a formula that only begins a table
            taken = {key: _class_of(kept[key]) for key in taken_by(type(part)) if key in kept and key not in left_out}
            found |= {(name, key): _plain(value) for key, value in taken.items() if _is_plain(value)}
        elif "eps" in kept:
            found[name, "norm_eps"] = kept["eps"]
        if name.endswith((".act", ".mlp.1", ".transition.1")):
            found[name, "act_layer"] = f"{type(part).__name__}({part.extra_repr()})"
        if last in _PARTS or (last.isdigit() and name == f"blocks.{last}"):
            found[name, _PARTS.get(last, "block")] = type(part).__name__
        found |= {(name, key): _plain(value) for key, value in _of_tokenizer(part).items()}
    return found


def _of_tokenizer(part: nn.Module) -> dict[str, Any]:
    """Return the arguments of a tokenizer of windows or one of its layers that it keeps in another form."""
    if isinstance(part, TokenPerformer):
        return {"t2t_attn": "performer_relu" if part.relu else "performer"}
    if isinstance(part, TokenAttention):
        return {"t2t_qk_scale": part.scale}
    if not isinstance(part, T2TTokenizer | ConvStem):
        return {}
    kernels, strides, _ = zip(*part.splits, strict=True)
    own = {"t2t_kernels": kernels, "t2t_strides": strides}
    return own | {"t2t_dilations": part.dilations, "t2t_padding": part.padding}


def _class_of(value: Any) -> Any:
    """Return the class path of a part that is given with arguments, as the part keeps these; anything else as it is."""
    return value.get("class_path") if isinstance(value, Mapping) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | None)


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
