"""The official T2T-ViT from the user's clone of github.com/yitu-opensource/T2T-ViT, which vitlab does not include."""

import contextlib
import importlib
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from vitlab.errors import UsageError
from vitlab.models.vit import VisionTransformer

_PACKAGE = "official_t2t_vit"


def official(net: VisionTransformer, model: str, repo: str) -> nn.Module:
    """Build the official network called ``model`` with the weights of ``net`` and without dropout.

    Args:
        net: Our network of the same name.
        model: A name of both, such as t2t_vit_14.
        repo: The clone's folder.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # it prints which token layers it takes
        theirs = getattr(_import(repo), model)(num_classes=len(net.state_dict()["head.weight"]))
    state = {name.replace("tokenizer.", "tokens_to_token.", 1): value for name, value in net.state_dict().items()}
    positions = theirs.state_dict()["pos_embed"]  # (1, 1 + N, D), sines; ours gives the class token none
    theirs.load_state_dict(state | {"pos_embed": positions, "cls_token": state["cls_token"] - positions[:, :1]})
    for module in theirs.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return theirs


def check_repo(repo: str) -> None:
    """Refuse a folder that is not a clone of the official code."""
    if not (Path(repo) / "models" / "t2t_vit.py").is_file():
        raise UsageError(f"`--t2t-repo` must be a clone of github.com/yitu-opensource/T2T-ViT, got {repo}")


def _import(repo: str) -> ModuleType:
    """Import ``models/t2t_vit.py``, written for a timm of 2021, with stand-ins for the names it imports."""

    def of_timm(name: str, **members: Any) -> None:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)

    names = ("timm", "timm.models", "timm.models.helpers", "timm.models.registry", "timm.models.layers", "timm.data")
    before = {name: sys.modules.get(name) for name in names}
    package = sys.modules[_PACKAGE] = ModuleType(_PACKAGE)
    package.__path__ = [str(Path(repo) / "models")]  # its own __init__ imports networks that are not needed
    of_timm("timm")
    of_timm("timm.models")
    of_timm("timm.data", IMAGENET_DEFAULT_MEAN=None, IMAGENET_DEFAULT_STD=None)
    of_timm("timm.models.helpers", load_pretrained=None)
    of_timm("timm.models.registry", register_model=lambda build: build)
    of_timm("timm.models.layers", trunc_normal_=nn.init.trunc_normal_, DropPath=nn.Identity)  # rate 0 is not built
    try:
        return importlib.import_module(f"{_PACKAGE}.t2t_vit")
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
