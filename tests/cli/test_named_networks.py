"""Analyses of networks that have no run, by the words of the command."""

from PIL import Image

from vitlab.cli.main import main


def test_a_file_without_its_grid_is_analyzed_with_the_grid_that_is_given(tmp_path, monkeypatch, capsys):
    import timm
    import torch

    monkeypatch.chdir(tmp_path)
    torch.save(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=12).state_dict(), "w.pth")
    Image.new("RGB", (64, 64)).save("x.png")
    words = ["analyze", "attention", "timm:vit_tiny_patch16_224", "--weights", "w.pth", "--img_size", "64"]
    words += ["--images", "x.png", "--quiet"]
    assert main(words) == 2
    assert "does not say their grid" in capsys.readouterr().err
    assert main([*words, "--init_grid", "4,4"]) == 0
    assert main([*words, "--init_grid", "4"]) == 2
    assert "must be ROW,COLUMN" in capsys.readouterr().err
