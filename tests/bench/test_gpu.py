"""The page of a GPU is made on a CPU, of tiny networks: who has a GPU finds a command that works."""

import json
import re

import pytest

import gpu

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
T2T = {**TINY, "patch_size": 4, "tokenizer": "t2t", "t2t_kernels": (3, 3), "t2t_dim": 4, "pos_embed": "sincos1d"}


@pytest.mark.slow
def test_one_command_writes_the_page_of_positions_recipes_numerics_and_faults(tmp_path, monkeypatch):
    for name in ("vit_s16", "t2t_vit_7", "t2t_vit_t_14"):
        monkeypatch.setitem(gpu.NETWORKS, name, T2T if "t2t" in name else TINY)
    chosen = ["cifar10_vit", "fashion_mnist_t2t", "pretrain/mae_fashion_mnist", "pretrain/dino_cifar10"]
    monkeypatch.setattr(gpu, "recipe_files", lambda: [gpu.CONFIGS / f"{name}.yaml" for name in chosen])
    monkeypatch.setattr(gpu, "SECONDS", 0.0)
    monkeypatch.setattr(gpu, "ROUNDS", 3)
    monkeypatch.setattr(gpu, "faults", lambda options: [])
    words = ["--device=cpu", "--side=16", "--batch=2", "--recipe_batch=2", "--minutes=60"]
    assert gpu.main([str(tmp_path / "page.md"), *words]) == 0
    text, numbers = (tmp_path / "page.md").read_text(), json.loads((tmp_path / "page.json").read_text())
    titles = ["Position embeddings", "Compiled", "Recipes", "Numerics", "Lost processes"]
    assert re.findall("^## (.+)$", text, re.M) == titles
    assert all(f"| `{name}` |" in text for name in [*gpu.get_args(gpu.PosEmbedName), *chosen])
    assert "| `pretrain/dino_cifar10` | - | - | - | - | - | - | - | - | its crops come from the loader |" in text
    assert "one GPU" in text.split("## Lost processes")[1]
    for row in numbers["numerics"]:
        assert 0 < row["fp32"] < 1e-4 < row["bf16"] < 0.2 and row["bf16_gradients"] < 0.2, row
    for row in numbers["recipes"][:3]:
        seen = {"cifar10_vit": 300 * 50_000, "fashion_mnist_t2t": 30 * 60_000}.get(row["name"], 8 * 60_000)
        assert row["hours"] * 3600 * row["rate"] == pytest.approx(seen)


def test_the_gpu_page_lists_every_recipe_without_measured_hours():
    named = {path.relative_to(gpu.CONFIGS).as_posix() for path in gpu.recipe_files()}
    waiting = {
        path.relative_to(gpu.CONFIGS).as_posix()
        for path in gpu.CONFIGS.rglob("*.yaml")
        if re.search(r"hours\s+not\s+yet\s+run", path.read_text())
    }
    assert waiting and waiting <= named


@pytest.mark.rare
def test_losing_a_process_ends_the_other_with_one_line():
    for what, number in gpu.FAULTS.items():
        row = gpu.fault(what, number, "cpu")
        assert row["code"] in (1, 75) and row["after"] < 240 and "process" in row["line"], row
