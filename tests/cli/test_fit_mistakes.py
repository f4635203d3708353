"""A mistake in a command or a file is one line, and nothing is written."""

from pathlib import Path

import pytest

from tests.cli.commands import CONFIGS, T2T
from vitlab.cli.main import main
from vitlab.config.arguments import refuse_unknown
from vitlab.config.parser import VitlabCLI
from vitlab.errors import UsageError

MISTAKES = [
    ([*T2T, "--model.pos_embed=foo"], "`model.pos_embed` must be one of none, learned"),
    ([*T2T, "--model.pos_embed=sincos"], 'did you mean "sincos2d"?'),
    ([*T2T, "--trainer.max_epoch", "3"], 'did you mean "trainer.max_epochs"?'),
    ([*T2T, "--model.dept=3"], 'there is no key `model.dept`; did you mean "model.depth"?'),
    ([*T2T, "--model.depth=x"], '`model.depth` must be int, got "x"'),
    ([*T2T, "--data.batchsize=3"], 'did you mean "data.batch_size"?'),
    ([*T2T, "--data.batch_size=0"], "`data.batch_size` must be in [1, 1e6], got 0"),
    ([*T2T, "--model", "Clasifier"], 'did you mean "Classifier"?'),
    ([*T2T, "--data", "Digts"], 'did you mean "Digits"?'),
    ([*T2T, "--model.lr", "--trainer.max_epochs=2"], "--model.lr needs a value"),
    ([*T2T, "--model.opt.help"], "`vitlab fit --help=model.opt` explains it, not --model.opt.help"),
    ([*T2T, "--data.augment.n=3"], "--data.augment='[{class_path: STEP, init_args: {n: 3}}]'"),
    (["--config", "--trainer.max_epochs=2"], "--config needs a value"),
    (["--config=", "--trainer.max_epochs=2"], "--config needs a value"),
    (
        [*T2T, "--model.label_smoothing=.2", "--model=MAE"],
        "there is no key `model.label_smoothing`: other classes of `model` have it, but not the selected one",
    ),
    ([*T2T, "--data.root=x"], "`data.root`: other classes of `data` have it, but not the selected one"),
    ([*T2T, "--nam", "x"], 'did you mean "name"?'),
    ([*T2T, "--dry-run"], "there is no argument `--dry-run`; use --dry_run"),
    ([*T2T, "--name", "a/b"], "use --run_dir for a path"),
    (
        [*T2T, "--model.num_heads=5"],
        "`model.num_heads` must divide `model.embed_dim`, got num_heads=5 and embed_dim=48",
    ),
    ([*T2T, "--model.depth=null"], "`model.depth` must be a whole number, got null"),
    ([*T2T, "--data.mixup=null"], "`data.mixup` must be a number, got null"),
    ([*T2T, "--model.lr=-1"], "`model.lr` must be in (0, 1000], got -1.0"),
    ([*T2T, "--model.num_classes=4"], "Digits has a class count of 10, got 4"),
    ([*T2T, "--model.img_size=32"], "Digits has an image size of [8, 8], got 32; set `data.img_size` instead"),
    ([*T2T, "--checkpoint.monitor=val/nothing"], "`checkpoint.monitor` must be one of val/acc1, val/acc5, val/loss"),
    ([*T2T, "--trainer.callbacks={}"], "`trainer.callbacks` must be list["),
    ([*T2T, "--checkpoint.monitor=val/los"], 'got val/los; did you mean "val/loss"?'),
    ([*T2T, "--trainer.accelerator=tpu"], "this machine has no such device"),
    ([*T2T, "--trainer.devices=[2]"], "`trainer.devices` must be auto or a number, 1 or more; with --trainer.acc"),
    ([*T2T, "--trainer.devices=0"], "or a list such as [2], got 0"),
    (["--config", str(CONFIGS / "t2.yaml")], "t2t.yaml"),
    (["--resume", "nope"], 'no run or checkpoint called "nope"'),
    (["--resume"], "needs a run"),
    ([], "missing: data, model"),
    (
        ["--config", str(CONFIGS / "fashion_mnist_t2t.yaml"), "--data.root=nowhere", "--trainer.logger=false"],
        "--data.download=true",
    ),
]


@pytest.mark.parametrize(("arguments", "told"), MISTAKES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_mistake_is_one_line_and_writes_nothing(arguments, told, here, capsys):
    assert main(["fit", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("vitlab: ") == 1
    assert "Traceback" not in error
    assert list(here.iterdir()) in ([], [here / "runs"])
    assert not list(here.glob("runs/*"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trainer:\n", "--config mine.yaml: `trainer` is empty; give it keys, or leave it out"),
        ("data: {batch_size: 64}\n", "--config mine.yaml sets `data.batch_size` before the class of `data` is known"),
        ("model: {init_args: {depth: 2}}\n", "--config or --model that names it before --config mine.yaml"),
    ],
)
def test_a_file_with_an_empty_section_or_before_the_recipe_is_named(text, told, here, capsys):
    Path("mine.yaml").write_text(text)
    assert main(["fit", "--config", "mine.yaml", *T2T]) == 2
    assert told in (error := capsys.readouterr().err) and error.count("\n") == 1


def test_files_count_first_then_classes_then_keys_in_whatever_order_they_are_typed():
    words = ["--config=t2t", "--model=Classifier", "--model.opt=SGD", "--model.opt.momentum=0.8"]
    words += ["--trainer.max_epochs=3", "--data=PositionProbe", "--data.subset=0.5", "--trainer.logger=false"]
    first, second = (VitlabCLI(order).config for order in (words, words[::-1]))
    assert first == second and first.trainer.max_epochs == 3
    assert first.model.init_args.opt == {"class_path": "SGD", "init_args": {"momentum": 0.8}}


EDITS = [
    ("max_epochs: 40", "max_epoch: 40", 'there is no key `trainer.max_epoch`; did you mean "trainer.max_epochs"?'),
    ("embed_dim: 48", "embed_dims: 48", 'did you mean "model.embed_dim"?'),
    ("lr: 2.0e-3", "lr: fast", '`model.lr` must be float, got "fast"'),
    ("class_path: Digits", "class_path: Digitz", 'did you mean "Digits"?'),
    ("\ndata:\n", "\ndta:\n", 'did you mean "data"?'),
    ("depth: 3", "depth: 3\n    depth: 4", "the key `depth` appears twice, in lines"),
    ("seed_everything: 0", "seed_everything: [0", "line "),
]


@pytest.mark.parametrize(("old", "new", "told"), EDITS, ids=[e[1].strip() for e in EDITS])
def test_a_mistake_in_a_file_is_one_line(old, new, told, here, capsys):
    text = (CONFIGS / "t2t.yaml").read_text()
    assert old in text
    (here / "mine.yaml").write_text(text.replace(old, new, 1))
    assert main(["fit", "--config", "mine.yaml"]) == 2
    assert told in capsys.readouterr().err
    assert not (here / "runs").exists()


@pytest.mark.parametrize("flag", ["--model.pos_embd", "--data.batchsize=3", "--modle.lr=1", "--trainer.nosuch", "--lr"])
def test_an_unknown_flag_is_refused_before_imports_in_the_words_of_the_parser(here, flag):
    with pytest.raises(UsageError, match="there is no") as refused:
        refuse_unknown(["--config=t2t", flag])
    with pytest.raises(UsageError) as parsed:
        VitlabCLI(["--config", "t2t", flag if "=" in flag else f"{flag}=1"])
    assert str(refused.value) == str(parsed.value)


def test_flags_of_custom_classes_are_left_to_the_parser(here):
    (here / "own.yaml").write_text("data: {class_path: mine.Data}")
    refuse_unknown(["--config=own.yaml", "--data.anything=3", "--model.anything=3"])
    refuse_unknown(["--model=mine.Net", "--model.anything=3", "--model.pos_embed.init_args.deep=1"])
    refuse_unknown(["--trainer.logger.project=x", "--trainer.callbacks+=EMA", "--model.init_args.lr=1", "-c", "t2t"])
