"""``vitlab export``: write the network of a run in a format that other programs load."""

from vitlab.cli.evaluate import run_parser
from vitlab.jobs.exported import DYNAMIC, SUFFIXES, ExportOptions, export_path
from vitlab.lazy import quick_imports
from vitlab.runs.find import find_run
from vitlab.shipped import card_beside
from vitlab.tables import metrics_text

EPILOG = """safetensors: weights and the network's arguments. timm: weights for timm's VisionTransformer. onnx: a
graph for onnxruntime and others. onnx-int8: the same with weights in eight bits, a quarter of the
size, and what that changes on the validation images. pt2: a graph of torch.export. Graphs take any
number of images, and with --dynamic size images of any height and width that the tokenizer takes.
A .json beside the file says how to prepare images and what the outputs mean."""


def main(argv: list[str]) -> int:
    """Run ``vitlab export`` and return its exit code."""
    parser = run_parser("export", "Write the network of a run, without what only training needs.")
    add = parser.add_argument
    add("--to", required=True, choices=list(SUFFIXES), help="file format")
    add("-o", "--output", metavar="FILE", help="file to write (default: RUN/export/CHECKPOINT.SUFFIX)")
    add(
        "--check",
        action="store_true",
        help="compare outputs of safetensors with the run's, as those of other formats always are; fail if any "
        "differs by more than 0.0001, numbers in standard deviations",
    )
    add(
        "--dynamic",
        choices=DYNAMIC,
        default="batch",
        help="what a graph leaves open: batch, or size: batch, height and width (default: batch)",
    )
    add("--opset", type=int, metavar="N", help="version of ONNX's operators, 18 to 23 (default: torch's)")
    add("--quiet", action="store_true", help="print errors only")
    parser.epilog = EPILOG
    options = parser.parse_args(argv)
    run, checkpoint = find_run(options.run)
    output = export_path(run, checkpoint, options.to, options.output)
    asked = ExportOptions(options.to, output, options.check, options.dynamic, options.opset)
    with quick_imports():
        from vitlab.jobs.export import export
        from vitlab.jobs.terminal import open_terminal, say

    open_terminal(options.quiet)
    done = export(run, checkpoint, asked, options.quiet)
    for name, text in done.hints.items():
        say(f"{name:<6} {text}")
    if done.difference is not None:
        sizes = ", at four sizes" if options.dynamic == "size" else ""
        say(f"check  largest difference of outputs {done.difference:.1e}{done.unit}, in batches of 1 and of 5{sizes}")
    for name, values in (("run", done.compared.run), ("int8", done.compared.int8)) if done.compared else ():
        say(f"{name:<6} {metrics_text(values, split='val')}")
    if done.compared and done.compared.other_class is not None:
        say(f"       {done.compared.other_class:,} of the images get another class in int8")
    say(f"wrote  {output} ({done.megabytes:,.1f} MB) and {card_beside(output).name}")
    return 0
