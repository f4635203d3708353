"""Make the trained networks that vitlab ships: `python benchmarks/shipped_weights.py NAME RUN PHOTOS`.

RUN is a run, or one of its checkpoints. The weights are stored in float16, half the bytes. They are measured again as
stored, on PHOTOS/CLASS/IMAGE, and the card beside them has these numbers, class by class with the frequent mistakes,
the recipe, the seed, and the source and license of the images.
"""

import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

import vitlab
from vitlab.models.weights_file import weights_digest
from vitlab.shipped import WEIGHTS

DATA = {
    "name": "20 classes of Caltech-101, at most 100 photos of each",
    "license": "CC BY 4.0",
    "cite": "Li, Andreeto, Ranzato, Perona: Caltech 101. CaltechDATA 2022, doi:10.22002/D1.20086",
    "choice": "of each class the first 100 files by name whose short side has at least 160 pixels; "
    "every 5th is a test photo, the rest are 1,161 to train and 290 to validate on",
}


def main(name: str, run: str, photos: str) -> None:
    """Write NAME.safetensors and NAME.safetensors.json into the package."""
    with tempfile.TemporaryDirectory() as folder:
        trained, file = vitlab.Run(run), Path(folder) / f"{name}.safetensors"
        trained.export("safetensors", file)
        with safe_open(file, framework="pt") as stored:
            facts = stored.metadata()
            state = {key: stored.get_tensor(key).half() for key in stored.keys()}  # noqa: SIM118
        facts["sha256"] = weights_digest(state, facts["hyper_parameters"])
        save_file(state, file, metadata=facts)
        card = json.loads(Path(f"{file}.json").read_text())
        said = answers(file, Path(photos), card["outputs"])
        right, n = sum(one == other for one, other in said.elements()), said.total()
        card["measured"] = {"test": {"acc1": right / n, "n": float(n)}}
        card |= {"recipe": f"configs/{name}.yaml", "seed": trained.config["seed_everything"], "data": DATA}
        of = Counter(true for true, _ in said.elements())
        card["per_class"] = {kind: [said[kind, kind], of[kind]] for kind in card["outputs"]}
        card["mistakes"] = sorted([*pair, count] for pair, count in said.items() if pair[0] != pair[1] and count > 2)
        WEIGHTS.mkdir(exist_ok=True)
        shutil.copyfile(file, WEIGHTS / file.name)
        (WEIGHTS / f"{file.name}.json").write_text(f"{short_lists(json.dumps(card, indent=1))}\n")
    print(name, card["measured"]["test"], f"{(WEIGHTS / file.name).stat().st_size / 1e6:.2f} MB")


def short_lists(text: str) -> str:
    """Put lists of two or three values in one line."""
    lists = re.compile(r"\[\n\s+([^][{}\n]+(?:,\n[^][{}\n]+){1,2})\n\s+\]")
    return lists.sub(lambda found: "[" + re.sub(r",\s+", ", ", found[1]) + "]", text)


def answers(file: Path, photos: Path, classes: list[str]) -> Counter[tuple[str, str]]:
    """Return how often stored weights say a class of a class, on photos/CLASS/IMAGE as `vitlab.load` prepares them."""
    net, transform = vitlab.load(file)
    said: Counter[tuple[str, str]] = Counter()
    for name in classes:
        images = torch.stack([transform(Image.open(path).convert("RGB")) for path in sorted((photos / name).iterdir())])
        with torch.no_grad():
            said.update((name, classes[i]) for i in net(images).argmax(dim=1).tolist())
    return said


if __name__ == "__main__":
    main(*sys.argv[1:])
