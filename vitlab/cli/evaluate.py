"""``vitlab validate`` and ``vitlab test``: measure a run; everything comes from its directory."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitlab.config.arguments import CommandParser
from vitlab.config.options import POLICIES
from vitlab.config.trust import add_trust
from vitlab.runs.directory import RunDir, find_run, whole

if TYPE_CHECKING:
    import pandas as pd

Split = Literal["validate", "test"]


def validate(argv: list[str]) -> int:
    """Run ``vitlab validate RUN``."""
    return _main("validate", argv)


def test(argv: list[str]) -> int:
    """Run ``vitlab test RUN``."""
    return _main("test", argv)


def run_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return a parser whose first argument is a run."""
    parser = CommandParser(f"vitlab {command}", description=description, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="run directory, its name, a checkpoint in it, or last")
    add_trust(parser)
    return parser


def _main(command: Split, argv: list[str]) -> int:
    split = {"validate": "val", "test": "test"}[command]
    options, rest = _parser(command, split).parse_known_args(argv)
    run, checkpoint = find_run(options.run)
    from vitlab.callbacks.console import EvaluationConsole
    from vitlab.callbacks.predictions import Predictions
    from vitlab.config.parser import VitlabCLI, settings, user_mistakes
    from vitlab.jobs.rebuild import evaluation_args
    from vitlab.jobs.terminal import open_terminal, say
    from vitlab.jobs.train import checkpoint_facts
    from vitlab.models.convert import load_weights
    from vitlab.models.weights_file import check_readable

    open_terminal(options.quiet)
    predictions, console = Predictions(), EvaluationConsole(options.quiet)
    cli = VitlabCLI(evaluation_args(run, rest), [predictions, console], default_root_dir=str(run.path))
    path: Path | None = checkpoint
    conditions = dict(settings(rest))
    with user_mistakes():
        if list(cli.model.net.grid_size) != run.need("model.json")["grid"] or options.resize:  # Lightning cannot resize
            path = None
            cli.datamodule.load_state_dict(run.need("data.json"))
            resize, antialias = options.resize or "usual", not options.no_antialias
            for sentence in load_weights(cli.model.net, checkpoint, resize, antialias):  # type: ignore[arg-type]
                say(sentence)
                conditions |= {"resize": sentence} if sentence.startswith("positions") else {}
        else:
            check_readable(checkpoint)
        measure = getattr(cli.trainer, command)
        measure(cli.model, datamodule=cli.datamodule, ckpt_path=path, weights_only=True, verbose=False)
    table = predictions.table(getattr(cli.trainer, f"{split}_dataloaders"))
    if cli.trainer.is_global_zero:
        found = {k: float(v) for k, v in cli.trainer.callback_metrics.items() if k.startswith(f"{split}/")}
        values = {k.removeprefix(f"{split}/"): v for k, v in found.items()}
        result: dict[str, Any] = {**values, **checkpoint_facts(checkpoint), "overrides": conditions}
        _keep(run, split, result, table)
        shown = ", ".join(f"{split}/{k} {v:.4f}" for k, v in values.items() if k != "n")
        say(f"{shown} on {values['n']:.0f} images")
        say(f"run   {run.path} ({checkpoint.name})")
    return 0


def _parser(command: Split, split: str) -> argparse.ArgumentParser:
    parser = run_parser(command, f"Measure a run on its {split} split: results.json, predictions/{split}.parquet.")
    parser.add_argument(
        "--resize", choices=POLICIES, help="how to carry positions to another image size (the usual way)"
    )
    parser.add_argument("--no_antialias", action="store_true", help="interpolate positions without smoothing")
    parser.add_argument("--quiet", action="store_true", help="print nothing but mistakes")
    parser.epilog = "Any --trainer.*, --model.* or --data.* argument changes a value of the run's configuration."
    return parser


def _keep(run: RunDir, split: str, result: dict[str, Any], predictions: "pd.DataFrame") -> None:
    results = run.read("results.json")
    if result["overrides"]:  # measured under other conditions: kept beside the run's own result, not in its place
        others = [
            r for r in results.get("variations", []) if (r["split"], r["overrides"]) != (split, result["overrides"])
        ]
        run.update("results.json", variations=[*others, {"split": split, **result}])
    else:
        with whole(run.path / "predictions" / f"{split}.parquet") as beside:  # first: whoever finds the result finds it
            predictions.to_parquet(beside, index=False)
        run.update("results.json", **{split: result})
