"""Facts about a network, and checks of a module, before the first step."""

import traceback
from contextlib import suppress
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from vitlab.data.base import ImageData
from vitlab.errors import UsageError, in_own_code, one_line, preview
from vitlab.interface import (
    answering,
    as_outputs,
    has_grid,
    hparams_of,
    image_fact,
    is_loadable,
    network,
    own_parts,
    path_of,
    trained,
)
from vitlab.layers.custom import spare
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.pos_embed.checked import tokens_in_words
from vitlab.models.cost import (
    call_on_meta,
    count_all_parameters,
    count_macs,
    count_parameters,
    count_tokens,
    flop_counter,
)
from vitlab.models.hooks import modes_kept
from vitlab.models.vit import VisionTransformer
from vitlab.tasks.sizes import check_size


def model_facts(task: Any, data: Any) -> dict[str, Any]:
    """Return parameters, multiply-adds, tokens and grid of a network, as far as known."""
    net: Any = network(task)
    facts = {
        "parameters": count_parameters(trained(task)),
        "parameters_total": count_all_parameters(net),
    }
    if not has_grid(task):
        first: Any = getattr(net, "patch_embed", None)  # of timm
        timms = {
            "img_size": image_fact(first, "img_size"),
            "in_chans": image_fact(getattr(first, "proj", 0), "in_channels"),
        }
        images = {name: image_fact(net, name) or image_fact(data, name) or timms[name] for name in timms}
        return facts | images | _operations(_macs_of_forward(task, **images)) if all(images.values()) else facts
    return {
        **facts,
        **_operations(_macs_of_parts(net)),
        **_growing(task, data),
        "tokens": count_tokens(net),
        "grid": list(net.grid_size),
        "img_size": list(net.img_size),
        "in_chans": net.in_chans,
    }


def _growing(task: Any, data: Any) -> dict[str, list[list[int]]]:
    """Return the FLOPs per image by first epoch of each size in a schedule; refuse sizes that do not work."""
    if not isinstance(data, ImageData) or not (steps := data.pipeline.sizes.steps)[1:]:
        return {}
    net: Any = network(task)
    try:
        data.pipeline.sizes.check_end()
        if check := getattr(task, "check_images", None):
            check(data)
        for _, size in steps:
            check_size(net, size)
    except ValueError as error:
        text = str(error)
        raise UsageError(text if "img_size_schedule" in text else f"`data.img_size_schedule`: {text}") from None
    return {"flops_from": [[epoch, 2 * count_macs(net, size)] for epoch, size in steps]}


def check_module(task: L.LightningModule, data: Any) -> None:
    """Refuse a module that cannot be trained, or data or a module whose hyper-parameters could not be read again.

    Raises:
        UsageError: The module lacks a step or an optimizer, or hyper-parameters hold objects.
    """
    for name in ("training_step", "configure_optimizers"):
        if not is_overridden(name, task, L.LightningModule):
            raise UsageError(f"{path_of(task)} cannot be trained without `{name}`; see docs/bring_your_own.md")
    saved = [(path_of(each), *pair) for each in (task, data) for pair in hparams_of(each).items()]
    for owner, name, value in saved:
        if not is_loadable(value):
            raise UsageError(
                f"{owner} saves `{name}`, a {type(value).__name__}, as a hyper-parameter, but checkpoints only "
                f'hold numbers, strings and tensors: use save_hyperparameters(ignore=["{name}"])'
            )


def check_bits(task: Any, trainer: L.Trainer) -> None:
    """Refuse parameters of 64 bits, of a part of the user's, that the rest of a network of vitlab cannot compute with.

    Raises:
        UsageError: A pass of one image fails; none is tried where the precision makes all weights alike.
    """
    net: Any = network(task)
    wide = [name for name, p in net.named_parameters() if p.dtype == torch.float64]
    if not wide or not has_grid(task) or str(trainer.precision) in ("64-true", "16-true", "bf16-true"):
        return
    try:
        with modes_kept(net), torch.no_grad(), torch.random.fork_rng(), trainer.precision_plugin.forward_context():
            spare(net).eval()(torch.zeros(1, net.in_chans, *net.img_size))
    except RuntimeError as error:
        raise UsageError(
            f"parameters of 64 bits, {preview(wide)}, and the others do not go together ({one_line(error)}): make them "
            "float32, as by `.float()` in the constructor of their part, or train with --trainer.precision=64-true"
        ) from error


def _operations(macs: int | None) -> dict[str, int]:
    return {} if macs is None else {"macs": macs, "flops": 2 * macs}


def _macs_of_parts(net: VisionTransformer) -> int:
    """Count the multiply-adds of a network of vitlab with parts of one's own.

    Raises:
        UsageError: Such a part fails, or returns something else than a tensor.
    """
    entered: list[nn.Module] = []

    def check(part: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            what = f"a {type(output).__name__}"
            raise UsageError(f"`forward` of {path_of(part)} must return a tensor, got {what}: return the tokens alone")

    own = own_parts(net)
    hooks = [part.register_forward_pre_hook(lambda part, args: entered.append(part)) for part in own]
    hooks += [part.register_forward_hook(check) for part in own]
    try:
        return count_macs(net)
    except UsageError:
        raise
    except Exception as error:  # foreign code can raise anything
        if not entered:
            raise
        why = (in_own_code(error) or one_line(error)) + _tokens_of_hook(error, net)
        raise UsageError(f"the forward pass fails in or after {path_of(entered[-1])}: {why}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _tokens_of_hook(error: BaseException, net: VisionTransformer) -> str:
    """Return how many tokens a hook of a position embedding got that failed, as one written for patches does."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    hooks = [each.f_code.co_name for each in frames if isinstance(each.f_locals.get("self"), PosEmbed)]
    if not {"enter", "rotate", "bias", "relate", "leave"} & set(hooks):
        return ""
    patches = net.grid_size[0] * net.grid_size[1]
    return f"; here L = {count_tokens(net)}: {tokens_in_words(net.num_prefix_tokens, patches)}"


def _macs_of_forward(task: Any, img_size: list[int], in_chans: int) -> int | None:
    """Count on the meta device; None if the forward pass does not take images or depends on values.

    Raises:
        UsageError: The module returns several outputs for images, which could be neither predicted nor exported.
    """
    images = torch.empty(1, in_chans, *img_size, device="meta")
    net, macs = network(task), None
    outputs: Any = None
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():  # the user's code may raise anything
        with flop_counter() as counter:
            outputs = call_on_meta(net, images)
        macs = sum(counter.get_flop_counts()["Global"].values()) // 2
        outputs = outputs if (asked := answering(task)) is net else call_on_meta(asked, images)
    if isinstance(outputs, tuple | list):
        as_outputs(outputs, task)
    return macs
