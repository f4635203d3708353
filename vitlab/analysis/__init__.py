"""Analyses of trained networks; nothing here trains."""

from typing import TYPE_CHECKING

from vitlab.analysis.catalogue import ANALYSES, Analysis, Curve, names_of
from vitlab.lazy import lazy

if TYPE_CHECKING:
    from vitlab.analysis.attribution.curves import analyze_faithfulness, deleted
    from vitlab.analysis.attribution.maps import (
        analyze_attribution,
        gradient_attention,
    )
    from vitlab.analysis.attribution.sanity import analyze_sanity
    from vitlab.analysis.cka import analyze_cka
    from vitlab.analysis.cost import analyze_cost
    from vitlab.analysis.features import analyze_fewshot, analyze_knn, few_shot_accuracy, knn_accuracy
    from vitlab.analysis.filters import analyze_filters
    from vitlab.analysis.head_attention import (
        analyze_attention,
        analyze_distance,
        analyze_entropy,
        analyze_heads,
        analyze_rollout,
        distances,
        entropy,
        mean_distance,
        rollout,
        uniform_distance,
    )
    from vitlab.analysis.outcomes.calibration import analyze_calibration
    from vitlab.analysis.outcomes.confusion import analyze_confusion
    from vitlab.analysis.outcomes.errors import analyze_errors
    from vitlab.analysis.outcomes.labels import analyze_labels
    from vitlab.analysis.parts import similarity
    from vitlab.analysis.positions import (
        analyze_displacement,
        analyze_position,
        displacement_profile,
        mosaic,
    )
    from vitlab.analysis.probes import analyze_probe, without_positions
    from vitlab.analysis.resolution import analyze_resolution
    from vitlab.analysis.scramble import analyze_scramble, analyze_scramble_image, scramble_image, scramble_tokens
    from vitlab.analysis.segmentation import analyze_segmentation
    from vitlab.analysis.shift import analyze_shift
    from vitlab.analysis.subject import Finding, Subject
    from vitlab.analysis.views.pca import analyze_pca, pca_colors
    from vitlab.analysis.views.reconstruction import analyze_reconstruction
    from vitlab.analysis.views.token_layers import (
        analyze_splits,
        analyze_token_layers,
        split_features,
        token_layer_maps,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ANALYSES",
    "Analysis",
    "Curve",
    "Finding",
    "Subject",
    "analyze_attention",
    "analyze_attribution",
    "analyze_calibration",
    "analyze_cka",
    "analyze_confusion",
    "analyze_cost",
    "analyze_displacement",
    "analyze_distance",
    "analyze_entropy",
    "analyze_errors",
    "analyze_faithfulness",
    "analyze_fewshot",
    "analyze_filters",
    "analyze_heads",
    "analyze_knn",
    "analyze_labels",
    "analyze_pca",
    "analyze_position",
    "analyze_probe",
    "analyze_reconstruction",
    "analyze_resolution",
    "analyze_rollout",
    "analyze_sanity",
    "analyze_scramble",
    "analyze_scramble_image",
    "analyze_segmentation",
    "analyze_shift",
    "analyze_splits",
    "analyze_token_layers",
    "deleted",
    "displacement_profile",
    "distances",
    "entropy",
    "few_shot_accuracy",
    "gradient_attention",
    "knn_accuracy",
    "mean_distance",
    "mosaic",
    "names_of",
    "pca_colors",
    "rollout",
    "scramble_image",
    "scramble_tokens",
    "similarity",
    "split_features",
    "token_layer_maps",
    "uniform_distance",
    "without_positions",
]
