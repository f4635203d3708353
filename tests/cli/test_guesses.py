"""What people type who know other programs: the answer names what it is called here."""

import pytest

from vitlab.cli.main import main

T2T = ["fit", "--config", "t2t", "--trainer.logger=false"]
GUESSES = [
    ([*T2T, "--lr=1e-4"], 'did you mean "model.lr"?'),
    ([*T2T, "--seed", "1"], "use --seed_everything"),
    ([*T2T, "--max_epochs", "2"], 'did you mean "trainer.max_epochs"?'),
    ([*T2T, "--epochs=2"], "use --trainer.max_epochs"),
    ([*T2T, "--batch-size=3"], 'did you mean "data.batch_size"?'),
    ([*T2T, "--optimizer=SGD"], "use --model.opt"),
    ([*T2T, "--model.optimizer=SGD"], "use --model.opt"),
    ([*T2T, "--ckpt_path", "last"], "use --resume RUN"),
    ([*T2T, "--checkpoint", "last"], "a group of keys, such as --checkpoint.monitor; use --resume RUN"),
    (["validate", "a", "--ckpt-path", "last"], "there is no argument `--ckpt-path`; use --ckpt_path"),
    (["test", "a", "--checkpoint=last"], "a group of keys, such as --checkpoint.monitor; use --ckpt_path"),
    (["validate", "a", "--resume", "b"], "there is no argument `--resume`; use RUN without a flag"),
    (["test", "a", "--output_dir", "b"], "there is no argument `--output_dir`"),
    (["analyze", "all", "a", "--output_dir", "b"], "there is no argument `--output_dir`; use --output"),
    (["look", "a", "--overwrit"], 'there is no argument `--overwrit`; did you mean "overwrite"?'),
    (["test", "a", "--seed=1"], "there is no argument `--seed`; use --seed_everything"),
    (["fit", "--model.fc_norm=true", "--data=Digits"], "--model.fc_norm=true needs the class of `model`"),
    (["fit", "configs/t2t.yaml"], "`configs/t2t.yaml` needs its flag: --config configs/t2t.yaml"),
    (["fit", "photos_vit", "--data.root=photos"], "`photos_vit` needs its flag: --config photos_vit"),
    (["fit", "mine.yml", "--data.root", "photos"], "`mine.yml` needs its flag: --config mine.yml"),
    ([*T2T, "model.depth=3"], "`model.depth=3` needs its dashes: --model.depth=3"),
    (["fit", "photo_vit"], 'unexpected word "photo_vit"; did you mean "--config photos_vit"?'),
    (["fit", "cats"], 'unexpected word "cats"; no flag stands before it; see `vitlab fit --help`'),
    (["validate", "a", "b"], 'unexpected word "b"; no flag stands before it; see `vitlab validate --help`'),
    (["test", "--data.num_workers", "0", "gone"], 'no run or checkpoint called "gone"'),
    (["analyze", "--data.num_workers", "0", "cost", "gone"], 'called "gone"'),
    (["look", "--data.num_workers", "0", "gone"], 'called "gone"'),
    (["train"], 'unknown command "train"; did you mean "fit"?'),
    (["run"], 'unknown command "run"; did you mean "runs"?'),
    ([*T2T, "--data=Cifar10"], 'did you mean "CIFAR10"?'),
    ([*T2T, "--trainer.callbacks+=EarlyStoping"], 'did you mean "EarlyStopping"?'),
    (
        [*T2T, "--trainer.strategy=dpp"],
        '`trainer.strategy` must be auto or a name such as ddp, got "dpp"; did you mean',
    ),
    ([*T2T, "--data=ImageFolder"], "missing: --data.root"),
    ([*T2T, "--model.t2t_kernels", "3"], '`model.t2t_kernels` must be a list such as [3, 3] or null, got "3"'),
    ([*T2T, "--trainer.precision=fp16"], '32, 16, bf16, got "fp16"; did you mean "16-mixed"?'),
    (["models", "deit"], "configs with this name: imagenet/deit3_l16, imagenet/deit_b16, imagenet/deit_s16,"),
    ([*T2T, "--model.t2t-attn=full"], 'did you mean "model.t2t_attn"'),
    ([*T2T, "--model.pos_embed=rope2d "], "got 'rope2d '; did you mean \"rope2d\"?"),
    (
        [*T2T, "--model.lr_scheduler={class_path: StepLR, init_args: {step_size: 1}, interval: week}"],
        "`model.lr_scheduler`: interval must be epoch or step, got 'week'",
    ),
    ([*T2T, "--data=Digits "], 'there is no class "Digits"; leave out the space'),
]


@pytest.mark.parametrize(("words", "answer"), GUESSES, ids=[" ".join(words[4:] or words) for words, _ in GUESSES])
def test_a_common_guess_is_answered_with_vitlabs_name(words, answer, here, capsys):
    assert main(words) == 2
    text = capsys.readouterr().err.strip()
    assert answer in text
    assert "\n" not in text and ("--run_dir" not in text or words[0] == "fit")
    assert not (here / "runs").exists()
