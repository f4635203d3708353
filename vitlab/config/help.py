"""``vitlab fit --help``: the common arguments, a line each, and all that the docstrings say with ``--help=KEY``.

Reading the docstrings takes seconds of imports, so ``flags.json`` beside this file stores them: the parser's own help
(``--help=all``) takes 5.4 s of CPU and 490 lines, this one .1 s and two screens;
``python -m vitlab.config.help`` regenerates it, and a test compares.
"""

import argparse
import functools
import inspect
import json
import re
import shutil
import sys
import textwrap
import typing
from contextlib import suppress
from typing import Any

from vitlab.config.arguments import FLAGS, flags
from vitlab.config.options import options_parser
from vitlab.errors import UsageError, did_you_mean
from vitlab.ranges import RANGES

TRAINER = {
    "max_epochs": "passes over the training split",
    "accelerator": "cpu, gpu or auto",
    "devices": "number of devices per machine",
    "num_nodes": "number of machines",
    "strategy": "auto, ddp, ddp_static, ddp_bf16 (slow interconnects), fsdp2 (models too large for one GPU), ...",
    "precision": "32-true, bf16-mixed, 16-mixed, ...",
    "accumulate_grad_batches": "batches per optimizer step",
    "gradient_clip_val": "largest gradient norm",
    "log_every_n_steps": "steps between rows of metrics.jsonl",
    "limit_train_batches": "batches per epoch, for quick trials",
    "logger": "a logger's class_path, or false",
    "callbacks": "class_paths of additional callbacks",
}
_SELDOM = (  # set seldom, and named without a word about them; --help=KEY explains them
    "model: lr_batch min_lr warmup_lr cooldown_epochs norm_eps reg_tokens pre_norm fc_norm head_hidden init_std",
    "model: layer_scale drop_path_subset lr_scale head_lr_mult nan_loss qkv_bias act_layer norm_layer grad_checkpoint",
    "data: max_unreadable class_map img_size_schedule repeats random_erasing crop_pct mean std value_range max_pixels",
    "data: split_seed fold split_file color_profile native_patch sampling interpolation crop_mode",
    "checkpoint: mode every_n_epochs every_n_steps every_minutes",
)
SELDOM = {f"{group}.{key}" for group, _, keys in (line.partition(": ") for line in _SELDOM) for key in keys.split()}
BASES = ("ImageData", "Photos")  # data sets of one's own call them with arguments that no configuration has
Sections = dict[str, list[list[str]]]  # rows of flag, text and notes under their title
_WIDTH = 33  # columns of the flags


def print_fit_help(options: argparse.ArgumentParser, examples: str, asked: str) -> int:
    """Print the help of ``vitlab fit`` and return its exit code.

    Args:
        options: Parser of the options that belong to the run.
        examples: Lines to end with.
        asked: ``common``, a line for each argument that people set; ``all``, the parser's own help, with every argument
            of the trainer; or a key or a group of them, such as ``model.lr``, ``pos_embed`` or ``data``, in full.

    Raises:
        UsageError: No key is called so.
    """
    if asked == "all":
        from vitlab.config.parser import VitlabCLI

        with suppress(SystemExit):  # argparse exits after printing help
            VitlabCLI(["--help"])
        return 0
    run = [[f"--{a.dest}", str(a.help), ""] for a in options._actions if a.help != argparse.SUPPRESS]
    run.append(["--seed_everything", "seed of weights, order of images, augmentation and dropout (default: 0)", ""])
    trainer = [[f"--trainer.{name}", text, _range(f"trainer.{name}", "{}")] for name, text in TRAINER.items()]
    sections = {
        "the run": run,
        "training": trainer,
        **flags()["help"],
    }
    if asked != "common":
        sys.stdout.write("\n".join(_lines_of(asked, sections, flags()["others"])) + "\n")
        return 0
    parts = [_wrapped("usage: vitlab fit --config FILE [--config FILE ...] [--KEY VALUE ...]")]
    parts[0] += _wrapped(
        "--help=KEY explains a key or a group of keys, such as model.lr or data; --help=all shows everything"
    )
    for title, rows in sections.items():
        seldom = ", ".join(row[0].partition(".")[2] for row in rows if row[0][2:] in SELDOM)
        layout = _one_line if title in flags()["help"] else _line
        lines = [layout(*row) for row in rows if row[0][2:] not in SELDOM]
        parts.append([*_wrapped(title), *lines, *(_wrapped(f"  and {seldom}") if seldom else [])])
    text = "\n\n".join("\n".join(lines) for lines in parts)
    sys.stdout.write(f"{text}\n\n{examples}")
    return 0


def _lines_of(asked: str, sections: Sections, others: Sections) -> list[str]:
    """Return the lines of a key, whole or without its group, or of a group; the names of other classes stand above."""
    rows = [row for section in sections.values() for row in section]
    words = asked.lstrip("-")
    lines = [_line(*row) for row in rows if words in _names(row)]
    for title, section in others.items():
        if found := [_line(*row) for row in section if words in _names(row)]:
            lines += ([""] if lines else []) + [*_wrapped(title), *found]
    lines = lines or [_line(*row) for row in rows if row[0][2:].startswith(f"{words}.")]
    if not lines:
        rows += [row for section in others.values() for row in section]
        near = did_you_mean(words, [name for row in rows for name in _names(row)])
        raise UsageError(f'`--help={asked}`: no argument is called "{words}"{near}; --help=all shows every one')
    return lines


def _names(row: list[str]) -> tuple[str, str]:
    """Return the key of a row, whole and without its group."""
    return row[0][2:], row[0][2:].partition(".")[2]


def current() -> dict[str, Any]:
    """Return every key of a configuration and the help rows of checkpoints, task and data, read from the classes."""
    import lightning as L

    from vitlab import data, tasks
    from vitlab.callbacks.checkpoint import Checkpoint
    from vitlab.config.parser import TASKS, Parser, classes_of

    parser = Parser()
    parser.add_lightning_class_args(L.Trainer, "trainer")
    parser.add_lightning_class_args(Checkpoint, "checkpoint")
    keys = {"config", "model", "data", "seed_everything", "print_config"}
    keys |= {action.dest for action in (*parser._actions, *options_parser()._actions)} - {"trainer"}
    for group, module in (*(("model", room) for room in TASKS), ("data", data)):
        shown = (cls for cls in classes_of(module) if cls.__name__ not in BASES)
        keys |= {f"{group}.{action.dest}" for cls in shown for action in _actions(cls)}
    return {
        "keys": sorted(key for key in keys if "link" not in key and key.split(".")[-1] != "help"),
        "help": {
            "the checkpoints": _class_rows("checkpoint", Checkpoint),
            f"--model=Classifier (or {_others('Classifier', *TASKS)})": _class_rows("model", tasks.Classifier),
            f"--data=ImageFolder (or {_others('ImageFolder', data)})": _class_rows("data", data.ImageFolder),
        },
        "others": {
            **_other_rows("model", "Classifier", *TASKS),
            **_other_rows("data", "ImageFolder", data),
            "--trainer": [row for row in _class_rows("trainer", L.Trainer) if row[0].partition(".")[2] not in TRAINER],
        },
    }


def _other_rows(group: str, shown: str, *modules: Any) -> Sections:
    """Return the rows of other classes of a group that the ``shown`` one lacks, or has with another text or default."""
    from vitlab.config.parser import classes_of

    classes = {cls.__name__: cls for module in modules for cls in classes_of(module)}
    common, having = _class_rows(group, classes[shown]), dict[tuple[str, ...], list[str]]()
    for name in _others(shown, *modules).split(", "):
        for row in _class_rows(group, classes[name]):
            if row not in common:
                having.setdefault((*row,), []).append(name)
    found: Sections = {}
    for key, names in having.items():
        found.setdefault(f"--{group}={' or '.join(names)}", []).append([*key])
    return found


def _others(shown: str, *modules: Any) -> str:
    names = [name for module in modules for name in module.__all__]
    return ", ".join(name for name in names if name not in (shown, "FakeData", *BASES))


@functools.cache  # asked for twice: for its keys and for its rows
def _actions(cls: type) -> list[argparse.Action]:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(cls, fail_untyped=False)
    return parser._actions


def _class_rows(group: str, cls: type) -> list[list[str]]:
    from vitlab.interface import LINKS

    rows = []
    for action in _actions(cls):
        name = action.dest
        hidden = group == "model" and (name in LINKS or name in getattr(cls, "old_names", ()))
        hidden |= group == "data" and name not in inspect.signature(cls).parameters  # what it gives its base itself
        if not name.endswith("help") and not hidden:
            text = str(action.help or "").rstrip(".").split(" (type: ")[0].replace("None", "null")
            default = "required" if action.required else f"default {_yaml(action.default)}"
            notes = f"{_choices(action)}{default}{_range(f'{group}.{name}')}"
            rows.append([f"--{group}.{name}", *(_without_marks(words) for words in (text, notes))])
    return rows


def _without_marks(text: str) -> str:
    """Return a text of a docstring without its marks of classes and code."""
    return re.sub(r":class:`(\w+)`", r"\1", text).replace("``", "")


def _range(key: str, form: str = "; {}") -> str:
    return form.format(f"in {RANGES[key]}") if key in RANGES else ""


def _yaml(value: Any) -> str:
    """Return a value as written in a config."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _choices(action: Any) -> str:
    names = _words(getattr(action, "_typehint", None))
    return f"{' | '.join(names)}; " if names else ""


def _words(kind: Any) -> list[str]:
    """Return the literal values that a type allows, also within ``| None``."""
    if typing.get_origin(kind) is typing.Literal:
        return [str(word) for word in typing.get_args(kind)]
    return [word for part in typing.get_args(kind) for word in _words(part)]


def _columns() -> int:
    return max(_WIDTH + 24, shutil.get_terminal_size((120, 24)).columns)


def _wrapped(title: str) -> list[str]:
    return textwrap.wrap(title, _columns() - 1, break_on_hyphens=False, subsequent_indent="    ")


def _line(flag: str, text: str, notes: str) -> str:
    """Return a flag with all that is said of it."""
    text = " ".join(text.split()) + (f" ({notes})" if notes else "")
    lines = textwrap.wrap(text, _columns() - _WIDTH - 1, break_on_hyphens=False)
    first = f"  {flag:<{_WIDTH - 3}} " if len(flag) <= _WIDTH - 3 else f"  {flag}\n{' ' * _WIDTH}"
    return first + f"\n{' ' * _WIDTH}".join(lines)


def _one_line(flag: str, text: str, notes: str) -> str:
    """Return a flag with as much of its text as one line holds beside its values and default."""
    choices, _, default = notes.rpartition("default ")
    shortest = f"{choices}default {default.partition(';')[0]}" if default else notes
    text = " ".join(text.split())
    marks = ": " if choices and ": " in text else r"\. |; |: | \(|, "  # after a colon stand the choices
    ends = [len(text), *sorted((found.start() for found in re.finditer(marks, text)), reverse=True)]
    whole = [e for e in ends if text[:e].count("(") == text[:e].count(")") and "; default" not in text[:e]]
    whole = whole or ends
    for end, said in [(len(text), notes), *((end, shortest) for end in whole)]:
        line = f"  {flag:<{_WIDTH - 3}} {text[:end]}" + (f" ({said})" if said else "")
        if len(line) < _columns():
            return line
    return _line(flag, text[: whole[-1]], shortest)


if __name__ == "__main__":
    FLAGS.write_text(json.dumps(current(), indent=1) + "\n")
