"""How images were prepared for the published weights of timm."""

from collections.abc import Container, Mapping
from typing import Any, get_args

from vitlab.data.loading.transforms import CropMode, Interpolation
from vitlab.errors import one_line

KEYS = ("mean", "std", "crop_pct", "crop_mode", "interpolation")  # as timm and the data sets call them


def images_of(pretrained_cfg: Mapping[str, Any], needed: Container[str] = KEYS) -> dict[str, Any]:
    """Return how images are prepared by a description of weights in timm's form, as arguments of the data sets.

    Args:
        pretrained_cfg: The description.
        needed: The arguments whose values must exist here: not those that the user sets.

    Raises:
        ValueError: They were resized or cut in a way that does not exist here.

    >>> images_of({"input_size": (3, 224, 224), "crop_pct": 1.0, "crop_mode": "squash", "mean": [0.5] * 3})["crop_mode"]
    'squash'
    """
    from timm.data import resolve_data_config

    facts = resolve_data_config({}, pretrained_cfg=dict(pretrained_cfg))
    for key, choices in (("interpolation", get_args(Interpolation)), ("crop_mode", get_args(CropMode))):
        if key in needed and facts[key] not in choices:
            what = f"these weights take images of {key} {facts[key]}, which does not exist here"
            raise ValueError(f"{what}: set --data.{key} to one of {', '.join(choices)}")
    return {key: list(facts[key]) if isinstance(facts[key], tuple) else facts[key] for key in KEYS}


def images_of_timm(name: str, needed: Container[str] = KEYS) -> dict[str, Any]:
    """Return the same for ``timm:NAME``, empty if timm does not know the name; only one on the hub is looked up there.

    ``timm:local-dir:FOLDER`` is a folder with timm's ``config.json``.

    Args:
        name: The name.
        needed: As for :func:`images_of`.

    Raises:
        ValueError: There is no such file, or it does not describe weights; or as :func:`images_of`.

    >>> images_of_timm("timm:deit_tiny_patch16_224")["crop_pct"]
    0.9
    """
    from timm.models import get_pretrained_cfg, load_model_config_from_hf
    from timm.models._hub import load_model_config_from_path

    name = name.removeprefix("timm:")
    if name.startswith("local-dir:"):
        try:
            stated = load_model_config_from_path(name.partition(":")[2])[0]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"timm:{name} is no folder with a config.json of timm: {one_line(error)}") from error
        return images_of(stated or {}, needed)
    if ":" in name:  # such as hf-hub:OWNER/NAME
        return images_of(load_model_config_from_hf(name.partition(":")[2])[0] or {}, needed)
    known = get_pretrained_cfg(name)
    return {} if known is None else images_of(known.to_dict(), needed)
