"""Looking at what a trained network has learned; nothing here trains."""

from typing import TYPE_CHECKING

from vitlab.errors import UsageError, did_you_mean
from vitlab.lazy import lazy

if TYPE_CHECKING:
    from vitlab.analysis.attention import (
        analyze_attention,
        analyze_distance,
        analyze_entropy,
        analyze_rollout,
        distances,
        entropy,
        mean_distance,
        rollout,
        uniform_distance,
    )
    from vitlab.analysis.cka import analyze_cka
    from vitlab.analysis.cost import analyze_cost
    from vitlab.analysis.features import analyze_fewshot, analyze_knn, few_shot_accuracy, knn_accuracy
    from vitlab.analysis.filters import analyze_filters
    from vitlab.analysis.outcomes.calibration import analyze_calibration
    from vitlab.analysis.outcomes.confusion import analyze_confusion
    from vitlab.analysis.outcomes.errors import analyze_errors
    from vitlab.analysis.positions import (
        analyze_displacement,
        analyze_position,
        displacement_profile,
        mosaic,
        similarity,
    )
    from vitlab.analysis.probes import analyze_probe, without_positions
    from vitlab.analysis.resolution import analyze_resolution
    from vitlab.analysis.scramble import analyze_scramble, analyze_scramble_image, scramble_image, scramble_tokens
    from vitlab.analysis.shift import analyze_shift
    from vitlab.analysis.subject import Finding, Subject
    from vitlab.analysis.token_layers import analyze_token_layers, token_layer_maps
else:
    _HOMES = {
        "vitlab.analysis.attention": (
            "analyze_attention",
            "analyze_distance",
            "analyze_entropy",
            "analyze_rollout",
            "distances",
            "entropy",
            "mean_distance",
            "rollout",
            "uniform_distance",
        ),
        "vitlab.analysis.cka": ("analyze_cka",),
        "vitlab.analysis.cost": ("analyze_cost",),
        "vitlab.analysis.features": (
            "analyze_fewshot",
            "analyze_knn",
            "few_shot_accuracy",
            "knn_accuracy",
        ),
        "vitlab.analysis.filters": ("analyze_filters",),
        "vitlab.analysis.outcomes.calibration": ("analyze_calibration",),
        "vitlab.analysis.outcomes.confusion": ("analyze_confusion",),
        "vitlab.analysis.outcomes.errors": ("analyze_errors",),
        "vitlab.analysis.positions": (
            "analyze_displacement",
            "analyze_position",
            "displacement_profile",
            "mosaic",
            "similarity",
        ),
        "vitlab.analysis.probes": (
            "analyze_probe",
            "without_positions",
        ),
        "vitlab.analysis.resolution": ("analyze_resolution",),
        "vitlab.analysis.scramble": (
            "analyze_scramble",
            "analyze_scramble_image",
            "scramble_image",
            "scramble_tokens",
        ),
        "vitlab.analysis.shift": ("analyze_shift",),
        "vitlab.analysis.subject": (
            "Finding",
            "Subject",
        ),
        "vitlab.analysis.token_layers": (
            "analyze_token_layers",
            "token_layer_maps",
        ),
    }
    __getattr__, __dir__ = lazy(__name__, _HOMES)

__all__ = [
    "ANALYSES",
    "Finding",
    "Subject",
    "analyze_attention",
    "analyze_calibration",
    "analyze_cka",
    "analyze_confusion",
    "analyze_cost",
    "analyze_displacement",
    "analyze_distance",
    "analyze_entropy",
    "analyze_errors",
    "analyze_fewshot",
    "analyze_filters",
    "analyze_knn",
    "analyze_position",
    "analyze_probe",
    "analyze_resolution",
    "analyze_rollout",
    "analyze_scramble",
    "analyze_scramble_image",
    "analyze_shift",
    "analyze_token_layers",
    "displacement_profile",
    "distances",
    "entropy",
    "few_shot_accuracy",
    "knn_accuracy",
    "mean_distance",
    "mosaic",
    "names_of",
    "rollout",
    "scramble_image",
    "scramble_tokens",
    "similarity",
    "token_layer_maps",
    "uniform_distance",
    "without_positions",
]

ANALYSES = {  # name: module:function that takes a Subject and returns a Finding, how to read the figure
    "attention": (
        "vitlab.analysis.attention:analyze_attention",
        "Where the class token looks in each head: bright patches weigh most; attention is no explanation by itself.",
    ),
    "rollout": (
        "vitlab.analysis.attention:analyze_rollout",
        "Attention of all layers multiplied, the residual path counted as half: which patches can reach the class "
        "token; it leaves out the MLPs and, for T2T, the token layers.",
    ),
    "distance": (
        "vitlab.analysis.attention:analyze_distance",
        "How far each head looks: dots below the dashed line look nearer than attention that ignores position.",
    ),
    "entropy": (
        "vitlab.analysis.attention:analyze_entropy",
        "How widely each head looks: near the dashed line it looks at all tokens alike, near 0 at a single one.",
    ),
    "position": (
        "vitlab.analysis.positions:analyze_position",
        "Each tile compares the position of its cell with all cells: bright neighbours mean that the table knows the "
        "grid; fixed sines do so by construction.",
    ),
    "displacement": (
        "vitlab.analysis.positions:analyze_displacement",
        "How the logit depends on where the key lies, seen from the query at the cross: a pattern is knowledge of "
        "position, by whatever method; flat is none.",
    ),
    "scramble": (
        "vitlab.analysis.scramble:analyze_scramble",
        "Tokens change places before they get positions: what is lost is what the network knows through them; without "
        "positions nothing changes.",
    ),
    "scramble_image": (
        "vitlab.analysis.scramble:analyze_scramble_image",
        "Patches of the image change places before the tokenizer: for overlapping tokenizers that changes the tokens "
        "themselves, so only `scramble` speaks of positions there.",
    ),
    "shift": (
        "vitlab.analysis.shift:analyze_shift",
        "How often the prediction survives a move of the image: whole patches round the border are exact only without "
        "positions, for the patch tokenizer.",
    ),
    "resolution": (
        "vitlab.analysis.resolution:analyze_resolution",
        "Accuracy at other sizes for each way to carry positions over: objects change size too, so compare with a run "
        "without positions (--against).",
    ),
    "probe": (
        "vitlab.analysis.probes:analyze_probe",
        "How well a token's cell can be read from it after each block: content tells cells apart too, so the excess "
        "over no positions is what counts.",
    ),
    "fewshot": (
        "vitlab.analysis.features:analyze_fewshot",
        "Accuracy of a ridge regression on frozen features from a few labels: how separable the classes lie already.",
    ),
    "knn": (
        "vitlab.analysis.features:analyze_knn",
        "Accuracy of the labels of the most similar training images: what lies together without any fitting.",
    ),
    "cka": (
        "vitlab.analysis.cka:analyze_cka",
        "How alike layers represent the same images, 1 is alike up to rotation: compare two runs with two seeds of one "
        "recipe before reading a difference.",
    ),
    "filters": (
        "vitlab.analysis.filters:analyze_filters",
        "Principal components of the filters on pixels, largest first: smooth ones are learned, salt and pepper is the "
        "random start.",
    ),
    "cost": (
        "vitlab.analysis.cost:analyze_cost",
        "Where parameters and multiply-adds are, and images per second: compare speeds on the same idle machine only.",
    ),
    "token_layers": (
        "vitlab.analysis.token_layers:analyze_token_layers",
        "Where a token between the splits of T2T looks, on the finer grids there.",
    ),
    "errors": (
        "vitlab.analysis.outcomes.errors:analyze_errors",
        "The worst mistakes of a split, least likely class first: look for wrong labels before you blame it.",
    ),
    "confusion": (
        "vitlab.analysis.outcomes.confusion:analyze_confusion",
        "Images of each class, a row each, by the class they were given, and recall and precision of each class.",
    ),
    "calibration": (
        "vitlab.analysis.outcomes.calibration:analyze_calibration",
        "How often the network is right where it says so with some probability: below the dashed line it is too sure.",
    ),
}


def names_of(text: str) -> list[str]:
    """Return the analyses that ``NAME[,NAME...]`` or ``all`` means.

    Example:
        >>> names_of("attention,rollout")
        ['attention', 'rollout']
    """
    if text == "all":
        return list(ANALYSES)
    names = text.split(",")
    for name in names:
        if name not in ANALYSES:
            hint = did_you_mean(name, ANALYSES)
            raise UsageError(f'no analysis called "{name}"{hint}; there are all, {", ".join(ANALYSES)}')
    return names
