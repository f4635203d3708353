"""Names from other programs and their counterparts in vitlab, to suggest the right one."""

import re
from collections.abc import Iterable, Mapping

from vitlab.config.keys import GROUPS
from vitlab.errors import did_you_mean
from vitlab.runs.find import run_called
from vitlab.shipped import HOME, find_shipped

NAMES = {  # argument of other programs, without dashes: what to type instead, in every command
    "seed": "--seed_everything",
    "epochs": "--trainer.max_epochs",
    "batch": "--data.batch_size",
    "learning_rate": "--model.lr",
    "optimizer": "--model.opt",
    "wd": "--model.weight_decay",
    "workers": "--data.num_workers",
    "gpus": "--trainer.devices",
    "dataset": "--data",
}
FOR_FIT = {"ckpt_path": "--resume RUN", "checkpoint": "--resume RUN", "output_dir": "--run_dir"}
FOR_A_RUN = {  # of the commands that take one
    **dict.fromkeys(("resume", "run", "run_dir", "name"), "RUN without a flag"),
    "checkpoint": "--ckpt_path",
    "output_dir": "--output",
}
FOR_RUN = {  # of the methods of `vitlab.Run`
    **dict.fromkeys(("resume", "run", "run_dir", "name"), "vitlab.Run(NAME)"),
    **dict.fromkeys(("checkpoint", "ckpt_path"), "vitlab.Run(FILE)"),
    "resize": "the argument `resize` of the method",
}
COMMANDS = {
    "train": "fit",
    "eval": "test",
    "evaluate": "test",
    "val": "validate",
    "infer": "predict",
    "sweep": "ablate",
    "runs": "results",
    "list": "results",
}
_FOR_ALL = "for all cells, write it into a config and list that in `base`: [vit, mine.yaml]"
ABLATION_KEYS = {  # key of an ablation's file, as others would name it: what to write instead
    **dict.fromkeys(("arms", "factors", "grid", "levels", "parameters", "sweep", "variants"), "use `axes`"),
    **dict.fromkeys(("config", "defaults"), "use `base`"),
    **dict.fromkeys(("data", "fixed", "model", "overrides", "set", "trainer"), _FOR_ALL),
    **dict.fromkeys(("hypotheses", "hypothesis"), "use `claims`"),
    **dict.fromkeys(("executor", "timeout", "workers"), "it is a key of `run`"),
}
VALUES = {  # what other programs call a value of trainer.precision: its name in Lightning
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "amp": "16-mixed",
    "bfloat16": "bf16-mixed",
    "fp32": "32-true",
    "float32": "32-true",
}


def suggest_argument(key: str, known: Iterable[str], names: Mapping[str, str] = FOR_FIT) -> str:
    """Return a hint on what to type in place of an unknown argument, never that argument itself.

    Args:
        key: The argument, without dashes.
        known: Every argument of the command.
        names: Names of other programs for what the command alone has, and what to type instead.

    >>> suggest_argument("lr", ["model.lr", "model.depth"])
    '; did you mean "model.lr"?'
    >>> suggest_argument("epochs", [])
    '; use --trainer.max_epochs'
    >>> suggest_argument("dry-run", ["dry_run"])
    '; use --dry_run'
    """
    name, choices = key.replace("-", "_"), {k for k in known if k != key}
    group, _, last = name.rpartition(".")
    if not group and name in choices:  # with hyphens
        return f"; use --{name}"
    theirs = {**NAMES, **names}
    if last in theirs and group in ("", theirs[last][2:].partition(".")[0]):
        return f"; use {theirs[last]}"
    same = [k for k in choices if k.rpartition(".")[2] == last]
    for before in (group, *GROUPS) if not group or group in GROUPS else (group,):
        if (found := f"{before}.{last}") in same:
            return f'; did you mean "{found}"?'
    beside = [k for k in choices if k.rpartition(".")[0] == group]
    return did_you_mean(name, beside) or did_you_mean(name.split(".")[0], {k.split(".")[0] for k in choices} - {key})


def about_word(word: str, keys: Iterable[str] = ()) -> str:
    """Return the message about a word that no flag takes: the flag that it lacks, as far as one can tell.

    Args:
        word: The word.
        keys: Every key of a configuration.

    >>> about_word("t2t"), about_word("model.lr=1e-3", ["model.lr"])
    ('`t2t` needs its flag: --config t2t', '`model.lr=1e-3` needs its dashes: --model.lr=1e-3')
    """
    if word.endswith((".yaml", ".yml")) or find_shipped(word):
        return f"`{word}` needs its flag: --config {word}"
    if word.partition("=")[0] in {*keys}:
        return f"`{word}` needs its dashes: --{word}"
    if run_called(word):
        return f"`{word}` needs its flag: --resume {word} continues this run"
    hint = did_you_mean(word, [path.stem for path in (HOME / "configs").glob("*.yaml")]).replace('"', '"--config ', 1)
    return f'unexpected word "{word}"{hint or "; no flag stands before it; see `vitlab fit --help`"}'


def with_typed_names(text: str, of_model: Iterable[str]) -> str:
    """Return a message with the model's arguments as a user types them; ``img_size`` belongs to the data.

    >>> with_typed_names("`depth` must be at least 1, and `img_size` is [8, 8]", ["depth", "img_size"])
    '`model.depth` must be at least 1, and `data.img_size` is [8, 8]'
    """
    names = "|".join(of_model)
    typed = re.sub(rf"`({names})(?=[`=.])", r"`model.\1", text) if names else text
    return typed.replace("`model.img_size", "`data.img_size")
