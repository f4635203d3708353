"""Which ViTs of timm's registry vitlab reads with equal outputs: writes docs/timm.md.

See ``COMMAND``. No weights are fetched: networks have two blocks and random parameters.
"""

import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models._registry import _model_to_module
from torch import nn

from vitlab.models.convert import weights_for_timm
from vitlab.models.load import load_weights
from vitlab.models.timm_networks import timm_arguments, timm_file
from vitlab.models.vit import VisionTransformer

COMMAND = "python benchmarks/timm_table.py docs/timm.md"
FILES = (  # of timm, with networks of a patch embedding and attention blocks at one resolution
    *("vision_transformer", "deit", "beit", "eva", "naflexvit", "vision_transformer_relpos"),
    *("vision_transformer_hybrid", "vision_transformer_sam", "cait", "vitamin"),
    *("deepseek_vit", "gemma4_vit", "qwen3_vit"),
)
DEPTH = 2
CLASSES = 10
WORK = 6e9  # products of a forward pass, at most: parameters times tokens
LARGEST = 100e6  # parameters of the smallest network of a family that is tried all the same
TOLERANCE = 1e-5  # of the largest logit
INTRODUCTION = """# Networks of timm

`vitlab.create_model("timm:NAME")` and `--init_from timm:NAME` read a network of timm with its weights. Here is every
ViT-like name of timm {timm}, by the file of timm that has it: networks of patches and attention over all of them, not
pyramids such as Swin. `{command}` wrote the page.

Of {names} names: **{counts}**. {back} go back, too:
a network of timm takes our weights with a strict load and gives the same logits again. The largest difference of
logits was {worst}.

- **Equal**: the logits of one random image differ by at most {tolerance} of the largest one (of 1 if that is smaller).
  Networks were built with **{depth} blocks in place of all**, {classes} classes and random parameters; no weights were
  fetched. When weights are read, the logits of the whole network are compared anew, and a difference is an error.
- **Refused**: vitlab lacks a part, and the reader says which. Every name was asked, at {depth} blocks as well (the
  networks of Sapiens 2, which timm does not cut, whole).
- **Not tried**: no missing part was seen, but the network is too large to be compared quickly. Where a row counts equal
  ones, smaller networks of the family were compared; where it says what is missing, they probably lack the same.

A row is a family, whose names differ in size, patch, number of registers or resolution alone. Tags of published
weights, as in `vit_base_patch16_224.augreg_in21k`, are not counted as names.
"""
SIZE = re.compile(  # words of a name that say how large a network is, not which one
    r"x?small|tiny|base|medium|mediumd|large|huge|giant|giantopt|gigantic|enormous|betwixt|d?little|d?p?wee|so\d+m2?|intern300m"
    r"|x{0,2}(?:s|m)\d+|[1-9]b|patch\d+|\d{3}|reg\d"
)


@dataclass
class Found:
    """What was found of one network.

    Args:
        name: Of timm.
        reason: Why it was refused; None if it was not.
        difference: Largest difference of logits relative to the largest logit, or to 1; None if it was not tried.
        back: Difference of timm's network after a strict load of our weights; None if it was not tried.
        no_way_back: Why it does not go back, or None.
    """

    name: str
    reason: str | None = None
    difference: float | None = None
    back: float | None = None
    no_way_back: str | None = None


def family_of(name: str) -> str:
    """Return a name of timm without its size.

    >>> family_of("vit_base_patch16_clip_quickgelu_224"), family_of("vit_large_patch14_reg4_dinov2")
    ('vit_clip_quickgelu', 'vit_reg_dinov2')
    """
    words = (("reg" if re.fullmatch(r"reg\d", word) else word) for word in name.split("_"))
    return "_".join(word for word in words if not SIZE.fullmatch(word))


def build(name: str, device: str) -> nn.Module:
    """Return the network without its weights, two blocks deep; as deep as it is if timm cannot cut it."""
    with torch.device(device):
        try:
            return timm.create_model(name, depth=DEPTH, num_classes=CLASSES).eval()
        except AssertionError:  # Sapiens 2 has a list with an entry for each block
            if device != "meta":
                raise
            return timm.create_model(name, num_classes=CLASSES).eval()


def look(name: str) -> tuple[Found, float, float]:
    """Return whether a network is refused, without its weights in memory, its parameters, and its work."""
    theirs: Any = build(name, "meta")
    parameters = float(sum(p.numel() for p in theirs.parameters()))
    try:
        arguments: Any = timm_arguments(theirs)
    except ValueError as error:
        return Found(name, reason_of(error)), parameters, 0.0
    tokens = arguments["img_size"][0] * arguments["img_size"][1] / arguments["patch_size"][0] ** 2
    return Found(name), parameters, parameters * tokens


def reason_of(error: ValueError) -> str:
    """Return what our reader says is missing, without the words that all its messages have.

    >>> reason_of(ValueError("this network of timm has no counterpart here: it has scale_mlp"))
    'it has scale_mlp'
    """
    text = str(error).split(" does not fit the model: ")[-1]  # weights that have no place
    return (
        text.split("has no counterpart here: ")[-1]
        .replace("its Vis", "only timm's Vis")
        .replace("have one", "have a counterpart")
    )


def compare(name: str) -> Found:
    """Build both networks with the same random parameters and compare their logits, there and back."""
    torch.manual_seed(0)
    theirs = build(name, "cpu")
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.02 * torch.randn_like(p))
    try:
        ours = VisionTransformer(**timm_arguments(theirs)).eval()
        load_weights(ours, timm_file(theirs, f"timm:{name}"))
    except ValueError as error:
        return Found(name, reason_of(error))
    images = torch.randn(1, ours.in_chans, *ours.img_size)
    with torch.no_grad():
        expected, outputs = theirs(images), ours(images)
        scale = expected.abs().max().clamp(min=1.0)
        found = Found(name, difference=float((outputs - expected).abs().max() / scale))
        try:
            state = weights_for_timm(ours, theirs)
        except ValueError as error:
            found.no_way_back = str(error)
            return found
        state = {key: value.clone() for key, value in state.items()}
        for p in theirs.parameters():
            p.fill_(float("nan"))  # what is not loaded shows
        theirs.load_state_dict(state, strict=True)
        found.back = float((theirs(images) - expected).abs().max() / scale)
    return found


def survey(names: list[str]) -> Iterator[tuple[str, str, Found]]:
    """Yield timm's file, the family, and what was found, for every name."""
    families: dict[tuple[str, str], list[tuple[Found, float, float]]] = defaultdict(list)
    for name in names:
        families[_model_to_module[name], family_of(name)].append(look(name))
    for (file, family), members in sorted(families.items(), key=lambda item: (FILES.index(item[0][0]), item[0][1])):
        smallest = min((work for found, _, work in members if found.reason is None), default=0.0)
        for found, parameters, work in members:
            small = work <= WORK or (work == smallest and parameters <= LARGEST)
            yield file, family, compare(found.name) if found.reason is None and small else found
        print(file, family, len(members), file=sys.stderr, flush=True)


def row(family: str, members: list[Found]) -> str:
    """Return the row of a family."""
    equal = [found.difference for found in members if found.difference is not None and found.difference <= TOLERANCE]
    wrong = [found for found in members if found.difference is not None and not found.difference <= TOLERANCE]
    back = [found for found in members if found.back is not None and found.back <= TOLERANCE]
    lost = {found.no_way_back for found in members if found.no_way_back} | {
        f"differs by {found.back:.0e}" for found in members if found.back is not None and not found.back <= TOLERANCE
    }
    reasons: dict[str, list[str]] = defaultdict(list)
    for found in members:
        if found.reason is not None:
            reasons[found.reason].append(found.name)
    refused = [
        f"{len(names)}: {text}" + ("" if len(names) == len(members) else f" ({', '.join(f'`{n}`' for n in names)})")
        for text, names in reasons.items()
    ]
    untried = sum(found.reason is None and found.difference is None for found in members)
    cells = [
        f"`{family}`",
        ", ".join(f"`{found.name}`" for found in members),
        f"{len(equal)}, {max(equal):.1e}" if equal else "",
        (f"{len(back)}" if back else "") + "".join(f"; {text}" for text in sorted(lost)),
        "; ".join([*refused, *(f"`{found.name}` DIFFERS by {found.difference:.0e}" for found in wrong)]),
        str(untried or ""),
    ]
    return f"| {' | '.join(cells)} |"


def page(results: list[tuple[str, str, Found]]) -> str:
    """Return the page."""
    state: Counter[str] = Counter()
    for _, _, found in results:
        tried = found.difference is not None
        equal = tried and (found.difference or 0.0) <= TOLERANCE
        state["refused" if found.reason else "equal" if equal else "different" if tried else "not tried"] += 1
        state["back"] += found.back is not None and found.back <= TOLERANCE
    worst = max(found.difference for _, _, found in results if found.difference is not None)
    counts = ", ".join(
        f"{state[kind]} {kind}" for kind in ("equal", "different", "refused", "not tried") if state[kind]
    )
    text = [
        INTRODUCTION.format(
            timm=timm.__version__,
            names=len(results),
            counts=counts,
            back=state["back"],
            worst=f"{worst:.1e}",
            tolerance=f"{TOLERANCE:g}",
            depth=DEPTH,
            classes=CLASSES,
            command=COMMAND,
        )
    ]
    grouped: dict[str, dict[str, list[Found]]] = defaultdict(lambda: defaultdict(list))
    for file, family, found in results:
        grouped[file][family].append(found)
    for file, families in grouped.items():
        text += ["", f"## {file}.py", "", "| family | names | equal, worst | go back | refused | not tried |"]
        text += ["|---|---|---|---|---|---|", *(row(family, members) for family, members in families.items())]
    return "\n".join(text).replace("\n\n\n", "\n\n") + "\n"


def main() -> None:
    """Survey the registry, and write the page."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    names = [name for name in timm.list_models() if _model_to_module[name] in FILES]
    path = Path(sys.argv[1])
    _, mark, end = (path.read_text() if path.is_file() else "").partition("<!-- peers -->")  # of peers_table.py
    path.write_text(page(list(survey(names))) + (f"\n{mark}{end}" if mark else ""))


if __name__ == "__main__":
    main()
