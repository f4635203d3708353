"""Modules and data of a user's own, as words of a command, and what is said of them."""

from pathlib import Path

from PIL import Image

TESTS = Path(__file__).parents[1]
NET = ["--model=userpkg.Net", "--trust_imports", "userpkg"]
BARS = ["--data=userpkg.Bars", "--trust_imports", "userpkg"]
VIT = ["--model=Classifier", "--model.patch_size=2", "--model.embed_dim=48", "--model.depth=1", "--model.num_heads=3"]
FACTS = ["--model.img_size=8", "--model.in_chans=1", "--model.num_classes=10"]
SHORT = ["--trainer.accelerator=cpu", "--trainer.max_epochs=2"]


def save_digit(folder):
    folder.mkdir(parents=True)
    Image.new("L", (8, 8), 128).save(folder / "a.png")


def one_line(capsys):
    text = capsys.readouterr().err.strip()
    assert text.startswith("vitlab: ")
    assert "\n" not in text
    return text
