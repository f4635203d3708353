"""Help is short, complete, and there at once."""

import inspect
import subprocess
import sys
import typing

import pytest

import vitlab.data
import vitlab.tasks
from vitlab.cli.main import COMMANDS, main
from vitlab.config.arguments import flags
from vitlab.config.help import SELDOM, current
from vitlab.interface import LINKS
from vitlab.models.old_names import OLD


def test_vitlab_alone_says_in_six_lines_what_to_try(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and max(len(line) for line in lines) <= 80
    assert {line.split()[1] for line in lines} - {"--help"} <= set(COMMANDS)


def test_help_mistakes_and_lists_are_answered_without_torch_or_lightning():
    code = (
        "import sys\nfrom vitlab.cli.main import main\n"
        "assert main(['--help']) == 0\nassert main(['--version']) == 0\nassert main([]) == 0\n"
        "assert main(['ftt']) == 2\n"
        "assert main(['fit', '--help']) == 0\n"
        "assert main(['fit', '--help=max_steps']) == main(['fit', '--help=data.path']) == 0\n"
        "assert main(['fit', '--config', 't2t', '--trainer.max_epoch=3']) == 2\n"
        "try:\n    main(['doctor', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'lightning', 'timm', 'numpy', 'yaml'} & set(sys.modules)\n"
        "assert main(['models']) == main(['models', 'vit_s16']) == 0\n"
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS) and "Exit code" in done.stdout
    assert 'did you mean "fit"?' in done.stderr
    assert 'did you mean "trainer.max_epochs"?' in done.stderr


def test_the_stored_flags_are_those_of_the_classes():
    assert flags() == current(), "python -m vitlab.config.help writes them anew"


def test_help_for_fit_lists_common_arguments_on_two_screens(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["fit", "--help"]) == 0
    page = capsys.readouterr().out
    assert page.count("\n") <= 100 and "default null" in page and "default None" not in page
    assert all(key.partition(".")[2] in page and key in flags()["keys"] for key in SELDOM)
    named = (
        "--name",
        "--resume",
        "--model.pos_embed",
        "--model.attn",
        "--model.tokenizer",
        "--data.root",
        "--trainer.max_epochs",
        "--seed_everything",
        "--checkpoint.monitor",
    )
    assert all(flag in page for flag in named) and "--model.t2t_" not in page


def test_help_for_fit_explains_a_key_or_a_group_in_full(capsys):
    assert main(["fit", "--help=nan_loss"]) == main(["fit", "--help=model.nan_loss"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert (
        page.count("only its step is skipped; skip makes each step wait for the device (stop | skip; default stop)")
        == 2
    )
    assert main(["fit", "--help=data"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line[2:4] == "--"} == {
        row[0] for title, rows in flags()["help"].items() for row in rows if title.startswith("--data")
    }
    for key in ("seed_everything", "checkpoint.mode", "every_n_steps", "every_minutes"):
        assert main(["fit", f"--help={key}"]) == 0
        assert f"{key} " in capsys.readouterr().out
    assert main(["fit", "--help=model.los"]) == 2
    assert 'did you mean "model.loss"' in capsys.readouterr().err


def test_help_for_fit_explains_keys_of_all_classes_under_their_names(capsys):
    def lines(key):
        assert main(["fit", f"--help={key}"]) == 0
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    for key, title in (
        ("data.train", "--data=WebDataset"), ("verify", "--data=Packed"), ("mask_ratio", "--model=MAE"),
        ("trainer.max_steps", "--trainer"),
    ):  # fmt: skip
        found = lines(key)
        assert found[0] == title and found[1].startswith(f"--{key}" if "." in key else "--") and key in found[1]
    assert any("Stop training after this number" in line for line in lines("max_steps"))
    root = lines("data.root")
    assert root[0].startswith("--data.root Folder of the photos") and any("CIFAR10" in line for line in root)
    told = {row[0][2:] for part in ("help", "others") for rows in flags()[part].values() for row in rows}
    models = {key for key in flags()["keys"] if key.startswith("model.")}
    assert models - told <= {f"model.{name}" for name in (*OLD, *LINKS)}
    for name in {*vitlab.data.__all__} - {"FakeData", "ImageData", "Photos"}:
        assert {f"data.{key}" for key in inspect.signature(getattr(vitlab.data, name)).parameters} <= told
    assert not {"data.place", "data.parts"} & (told | {*flags()["keys"]})  # which data sets fill in by themselves
    assert main(["fit", "--help=data.imge_column"]) == 2
    assert 'did you mean "data.image_column"' in capsys.readouterr().err


@pytest.mark.parametrize("cls", [vitlab.tasks.Classifier, vitlab.data.ImageFolder], ids=lambda cls: cls.__name__)
def test_help_for_fit_shows_the_values_of_every_choice(cls, capsys):
    assert main(["fit", f"--help={'data' if cls is vitlab.data.ImageFolder else 'model'}"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    choices = [_words(parameter.annotation) for parameter in inspect.signature(cls).parameters.values()]
    assert any(choices)
    for words in filter(None, choices):
        assert " | ".join(words) in page


def _words(kind):
    if typing.get_origin(kind) is typing.Literal:
        return [str(word) for word in typing.get_args(kind)]
    return [word for part in typing.get_args(kind) for word in _words(part)]
