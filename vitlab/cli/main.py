"""The ``vitlab`` command: finds the subcommand and answers ``--help`` before anything heavy is imported."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from vitlab import __version__
from vitlab.config.guesses import COMMANDS as OTHER_NAMES
from vitlab.config.trust import apply_trust_flags, refuse_forced_loading
from vitlab.errors import RunFailed, UsageError, did_you_mean, lost_loader, printable, what_failed
from vitlab.runs.atomic import is_writable

COMMANDS = {  # name: what it does, module:function that takes the arguments and returns the exit code
    "fit": ("train a model, or continue a run", "vitlab.cli.fit:main"),
    "validate": ("measure a run on its validation split", "vitlab.cli.evaluate:validate"),
    "test": ("measure a run on its test split", "vitlab.cli.evaluate:test"),
    "data": ("report on a folder of images before training on it", "vitlab.cli.data:main"),
    "pack": ("write a folder of images into a few memory-mapped files", "vitlab.cli.pack:main"),
    "predict": ("classify images with a run", "vitlab.cli.predict:main"),
    "embed": ("write the features that a run computes for images", "vitlab.cli.predict:embed"),
    "analyze": ("show what a run has learned, in tables and figures", "vitlab.cli.analyze:main"),
    "look": ("show runs, networks and their figures on one page", "vitlab.look.command:main"),
    "ablate": ("compare variants with seeds and statistics", "vitlab.cli.ablate:main"),
    "posbench": ("measure a position embedding on seven tasks against published ones", "vitlab.cli.posbench:main"),
    "cv": ("cross-validate a config: train each fold, print one table", "vitlab.cli.ablate:cv"),
    "results": ("tabulate finished runs, averaged over seeds", "vitlab.cli.results:main"),
    "runs": ("list, show and compare runs; free their disk", "vitlab.cli.runs:main"),
    "verify": ("check the files of a run against their checksums", "vitlab.cli.evaluate:verify"),
    "models": ("list the published networks: size, cost, accuracy, config", "vitlab.cli.models:main"),
    "export": ("write a run as safetensors, timm, ONNX or torch.export", "vitlab.cli.export:main"),
    "bench": ("measure speed, memory and numerics of networks and loaders", "vitlab.cli.bench:main"),
    "submit": ("train on a SLURM cluster: print or submit a batch script", "vitlab.cli.submit:main"),
    "completion": ("print the completion script for bash and zsh", "vitlab.cli.completion:main"),
    "doctor": ("check whether this machine can train: versions, devices, disk", "vitlab.cli.doctor:main"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    _replace_home()
    try:
        if args[:1] != ["doctor"]:  # doctor reports it with its other findings
            refuse_forced_loading()
        args = apply_trust_flags(args)
        return _command(args)(args[1:])
    except UsageError as error:
        _say_first(str(error))
        return 2
    except RunFailed as error:
        if not error.said:
            _say_first(str(error))
        return 1
    except BrokenPipeError:  # the reader closed the pipe, as in `vitlab models | head`
        sys.stderr.close()
        return 1
    except (OSError, RuntimeError) as error:
        line = what_failed(error) if isinstance(error, OSError) else lost_loader(error) or _lost_peer(error)
        if line is None:
            raise
        _say(printable(line))
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr on the null device if they are closed, as in ``2>&-`` and under some daemons.

    Otherwise the next file to be opened, such as a checkpoint, gets the descriptor, and what a library prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _replace_home() -> None:
    """Give libraries a temporary folder if there is no home directory or it is read-only, as in containers.

    Otherwise matplotlib and W&B fail, or print warnings and logs between the lines of a training.
    """
    if not os.path.isabs(os.path.expanduser("~")):  # Path.home() raises
        os.environ["HOME"] = _temporary()
    homes = {"MPLCONFIGDIR": ("XDG_CONFIG_HOME", ".config"), "WANDB_CACHE_DIR": ("XDG_CACHE_HOME", ".cache")}
    for name, (variable, folder) in homes.items():
        place = Path(os.environ.get(variable) or Path.home() / folder)
        if name not in os.environ and not is_writable(place):
            os.environ[name] = _temporary()


def _temporary() -> str:
    import atexit
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="vitlab-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _say(line: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        sys.stderr.write(f"vitlab: {line}\n")


def _say_first(text: str) -> None:
    """Say ``text`` unless another process of this command has said it."""
    if "torch" in sys.modules:
        from vitlab.runs.launch import first_to_say

        if not first_to_say(text):
            return
    _say(printable(text))


def _lost_peer(error: Exception) -> str | None:
    from vitlab.runs.launch import lost_peer

    return lost_peer(error)


def _command(args: list[str]) -> Callable[[list[str]], int]:
    if not args:
        return _first_words
    if args[0] in ("-h", "--help", "help"):
        return _help
    if args[0] in ("-V", "--version"):
        return _version
    if args[0] not in COMMANDS:
        ours = OTHER_NAMES.get(args[0])
        hint = f'; did you mean "{ours}"?' if ours else did_you_mean(args[0], COMMANDS) or ";"
        raise UsageError(f'unknown command "{args[0]}"{hint} `vitlab --help` lists them')
    module, function = COMMANDS[args[0]][1].split(":")
    return getattr(importlib.import_module(module), function)


def _first_words(args: list[str]) -> int:
    sys.stdout.write(
        "vitlab fit --config t2t    train a T2T-ViT on images of digits, a minute or two\n"
        "vitlab test last           measure it on its test split\n"
        "vitlab look last           write a page with its curves, attention and mistakes\n"
        "vitlab analyze --help      what can be asked about a trained network\n"
        "vitlab ablate --help       compare variants with seeds and statistics\n"
        f"vitlab --help              all {len(COMMANDS)} commands of vitlab {__version__}\n"
    )
    return 0


def _help(args: list[str]) -> int:
    commands = "\n".join(f"  {name:<10} {text}" for name, (text, _) in COMMANDS.items())
    sys.stdout.write(
        f"vitlab {__version__}: a research framework for Vision Transformers\n\n"
        f"usage: vitlab COMMAND [arguments]\n\n{commands}\n\n"
        "examples:\n"
        "  vitlab fit --config configs/t2t.yaml --model.pos_embed=sincos2d\n"
        "  vitlab test last\n\n"
        "`vitlab COMMAND --help` explains a command.\n"
    )
    return 0


def _version(args: list[str]) -> int:
    sys.stdout.write(f"vitlab {__version__}\n")
    return 0
