"""Make the trained networks that vitlab ships: `python benchmarks/shipped_weights.py NAME RUN PHOTOS`.

The weights are stored in float16, half the bytes. They are measured again as stored, on PHOTOS/CLASS/IMAGE, and the
card beside them has these numbers, the recipe, the seed, and the source and license of the images.
"""

import json
import shutil
import sys
import tempfile
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
        card["measured"] = {"test": measured(file, Path(photos), card["outputs"])}
        card |= {"recipe": f"configs/{name}.yaml", "seed": trained.config["seed_everything"], "data": DATA}
        WEIGHTS.mkdir(exist_ok=True)
        shutil.copyfile(file, WEIGHTS / file.name)
        (WEIGHTS / f"{file.name}.json").write_text(json.dumps(card, indent=1) + "\n")
    print(name, card["measured"]["test"], f"{(WEIGHTS / file.name).stat().st_size / 1e6:.2f} MB")


def measured(file: Path, photos: Path, classes: list[str]) -> dict[str, float]:
    """Return the accuracy of stored weights on photos/CLASS/IMAGE, read one by one as `vitlab.load` prepares them."""
    net, transform = vitlab.load(file)
    right = n = 0
    for label, name in enumerate(classes):
        images = torch.stack([transform(Image.open(path)) for path in sorted((photos / name).iterdir())])
        with torch.no_grad():
            right += int((net(images).argmax(dim=1) == label).sum())
        n += len(images)
    return {"acc1": right / n, "n": float(n)}


if __name__ == "__main__":
    main(*sys.argv[1:])
