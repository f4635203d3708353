"""``vitlab export``: the network of a run in a form that other programs load."""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from vitlab.cli.evaluate import run_parser
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir, find_run
from vitlab.runs.manifest import file_digest

SUFFIXES = {"safetensors": ".safetensors", "timm": ".timm.safetensors", "onnx": ".onnx", "pt2": ".pt2"}
LIMIT = 1e-4  # of the difference between outputs, in their own units
EPILOG = """safetensors: weights, and how the network is built. timm: weights for timm's VisionTransformer. onnx: a
graph for onnxruntime and others. pt2: a graph of torch.export. Graphs take any number of images at a time. A .json
beside the file says how images are prepared and what the outputs mean."""


def main(argv: list[str]) -> int:
    """Run ``vitlab export`` and return its exit code."""
    parser = run_parser("export", "Write the network of a run, without what only training needs.")
    add = parser.add_argument
    add("--to", required=True, choices=list(SUFFIXES), help="form of the file")
    add("-o", "--output", metavar="FILE", help="file to write (default: RUN/export/CHECKPOINT.SUFFIX)")
    add("--check", action="store_true", help=f"compare the file's outputs with the run's; fail above {LIMIT:g}")
    add("--quiet", action="store_true", help="print nothing but mistakes")
    parser.epilog = EPILOG
    options = parser.parse_args(argv)
    run, checkpoint = find_run(options.run)
    output = Path(options.output or run.path / "export" / f"{checkpoint.stem}{SUFFIXES[options.to]}")
    suffix = f".{SUFFIXES[options.to].split('.')[-1]}"
    if output.suffix != suffix:
        raise UsageError(f"`--output` must end with {suffix}, got {output}")
    if options.to == "onnx":
        _need_packages()
    with _folder_beside(output) as folder:
        return _export(run, checkpoint, output, Path(folder), options)


def _folder_beside(output: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=".export-", dir=output.parent)
    except OSError as error:
        raise UsageError(f"`--output {output}` cannot be written: {error.strerror}") from error


def _need_packages() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"`--to onnx` needs {', '.join(missing)}: pip install 'vitlab[export]'")


def _export(run: RunDir, checkpoint: Path, output: Path, folder: Path, options: argparse.Namespace) -> int:
    """Write into ``folder``, which lies beside ``output``, and move it there once it is whole and right."""
    from vitlab.jobs.formats import FORMATS, largest_difference, network_arguments
    from vitlab.jobs.restore import restore
    from vitlab.jobs.terminal import open_terminal, say

    open_terminal(options.quiet)
    cli = restore(run, checkpoint, ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"])
    net = cli.model.net.float()
    network = network_arguments(net, cli.model.hparams)
    write, read = FORMATS[options.to]
    unfinished, beside = folder / output.name, folder / f"{output.name}.json"
    hints = write(net, network, unfinished)
    difference = largest_difference(net, read(unfinished, network)) if options.check else 0.0
    if not difference <= LIMIT:  # this way round, no number is not small
        sys.stderr.write(f"vitlab: the outputs differ by {difference:.1e}, more than {LIMIT:g}; nothing was written\n")
        return 1
    facts = {"format": options.to, **_facts(run, checkpoint, cli.model), "network": network, **hints}
    beside.write_text(json.dumps(facts, indent=1) + "\n")
    megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    mode = beside.stat().st_mode
    for file in sorted(folder.iterdir()):
        file.chmod(mode)  # safetensors lets nobody else read its files
        os.replace(file, output.parent / file.name)
    for name, text in hints.items():
        say(f"{name:<6} {text}")
    if options.check:
        say(f"check  largest difference of outputs {difference:.1e}, in batches of 1 and of 5")
    say(f"wrote  {output} ({megabytes:,.1f} MB) and {output.name}.json")
    return 0


def _facts(run: RunDir, checkpoint: Path, task: Any) -> dict[str, Any]:
    """Return what a user of the file must know: whose weights, which images, what the outputs are."""
    from vitlab.tasks import Regressor

    data = run.need("data.json")
    shape = ["batch", task.net.in_chans, *task.net.img_size]
    prepared = {"shape": shape, "values": "(x - mean) / std of x in [0, 1]", "mean": data["mean"], "std": data["std"]}
    return {
        "run": run.path.resolve().name,
        "checkpoint": {"file": checkpoint.name, "sha256": file_digest(checkpoint)},
        "images": prepared,
        "outputs": "numbers" if isinstance(task, Regressor) else data["class_names"],
    }
