"""The analyses by name: the function, how to read its figure, and what it does not show."""

from vitlab.errors import UsageError, did_you_mean

_OUT = "vitlab.analysis.outcomes."
_MAPS = "vitlab.analysis.attribution."
_VIEWS = "vitlab.analysis.views."

ANALYSES = {  # name: module:function of a Subject that returns a Finding, how to read it, what it does not show
    "attention": (
        "vitlab.analysis.attention:analyze_attention",
        "Where the class token attends in each head: bright patches have the largest weights.",
        "The reason for a decision: deleting the most attended patches may hurt no more than deleting "
        "random ones; `faithfulness` measures that.",
    ),
    "heads": (
        _VIEWS + "heads:analyze_heads",
        "The attention of every layer and head on one image, one row per layer.",
        "What a head does with the tokens it attends to, and other images.",
    ),
    "rollout": (
        "vitlab.analysis.attention:analyze_rollout",
        "The product of the attention of all layers, with the residual path as half: what can reach the class token.",
        "The effect of MLPs, values and T2T's token layers; which class a patch supports.",
    ),
    "attribution": (
        _MAPS + "maps:analyze_attribution",
        "Which patches the score of the predicted class depends on, by six methods side by side.",
        "Which method is right where they disagree: read `faithfulness` and `sanity` first.",
    ),
    "faithfulness": (
        _MAPS + "curves:analyze_faithfulness",
        "The probability of the predicted class while patches give way to a filling, the most relevant first (MoRF, "
        "good: falls at once) or the least relevant first (LeRF, good: falls last), under four fillings. A map is "
        "evidence where it beats random patches both ways and the patch it names first does more than a random one; "
        "what holds under some fillings only depends on the filling.",
        "Completeness of a faithful map, and other fillings: images with replaced patches are unlike any in training.",
    ),
    "sanity": (
        _MAPS + "sanity:analyze_sanity",
        "How similar a map stays while weights are randomized from the head down: a map that does not change shows the "
        "image, not the network.",
        "Faithfulness: a map that does change may still be wrong.",
    ),
    "distance": (
        "vitlab.analysis.attention:analyze_distance",
        "The mean distance of each head's attention: compare a dot with the hollow one, the same head with shuffled "
        "tokens.",
        "The cause: a head may be local because it knows positions or because neighbors have similar content.",
    ),
    "entropy": (
        "vitlab.analysis.attention:analyze_entropy",
        "How widely each head attends: near the dashed line evenly to all tokens, near 0 to a single one.",
        "Whether the attended tokens matter.",
    ),
    "position": (
        "vitlab.analysis.positions:analyze_position",
        "Each tile compares the position vector of its cell with those of all cells: bright neighbors mean that the "
        "table encodes the grid; fixed sines do so by construction.",
        "Whether the network uses the table: see `scramble` and `displacement`.",
    ),
    "displacement": (
        "vitlab.analysis.positions:analyze_displacement",
        "How a logit depends on the offset of the key from the query at the cross. Left: shuffled tokens, queries and "
        "keys apart, so a pattern above the noise floor comes from positions. Right: patterns may come from content.",
        "The effect of values and later layers.",
    ),
    "scramble": (
        "vitlab.analysis.scramble:analyze_scramble",
        "Tokens are shuffled before they get positions: the loss of accuracy is what positions contribute; without "
        "positions nothing changes.",
        "The accuracy of a network trained on shuffled tokens.",
    ),
    "scramble_image": (
        "vitlab.analysis.scramble:analyze_scramble_image",
        "Patches of the image are shuffled before the tokenizer.",
        "The role of positions where the tokenizer's windows overlap, as the tokens change too: use `scramble` there.",
    ),
    "shift": (
        "vitlab.analysis.shift:analyze_shift",
        "How often the prediction survives a shift of the image: cyclic shifts by whole patches are exact only for the "
        "patch tokenizer without positions.",
        "The shift separately from what enters at the border: compare the three fillings.",
    ),
    "resolution": (
        "vitlab.analysis.resolution:analyze_resolution",
        "Accuracy at other image sizes for each way to resample positions: compare with a run without positions "
        "(--against).",
        "The effect of positions alone: objects change size too.",
    ),
    "probe": (
        "vitlab.analysis.probes:analyze_probe",
        "How well a linear probe reads a token's cell after each block: content reveals it too, so compare with a "
        "network without positions.",
        "Whether the network uses this information.",
    ),
    "fewshot": (
        "vitlab.analysis.features:analyze_fewshot",
        "Accuracy of a ridge regression on frozen features with few labels: how separable the classes are.",
        "Learning from few labels, if the network was trained on all labels of the same classes (--data, --root).",
    ),
    "knn": (
        "vitlab.analysis.features:analyze_knn",
        "Accuracy of nearest neighbors among training images: how classes cluster without any fitting.",
        "Transfer to new classes, if the network was trained on these classes (--data, --root).",
    ),
    "pca": (
        _VIEWS + "pca:analyze_pca",
        "The first three principal components of patch features as colors: similar colors are similar features.",
        "The other components: the title of each layer gives the share of variance shown.",
    ),
    "reconstruction": (
        _VIEWS + "reconstruction:analyze_reconstruction",
        "Hidden patches as a masked autoencoder reconstructs them from the image, and from another image under the "
        "same mask: what both have in common does not come from the image.",
        "The quality of the features: use `knn` or a linear probe.",
    ),
    "cka": (
        "vitlab.analysis.cka:analyze_cka",
        "How similarly layers represent the same images, as the mean of their patch tokens (--tokens); 1 is equal up "
        "to rotation and scale. Before reading a difference between runs, compare two seeds of one recipe.",
        "Whether the network uses what two layers share; a few large components dominate the value.",
    ),
    "filters": (
        "vitlab.analysis.filters:analyze_filters",
        "Principal components of the filters on pixels, largest first: smooth ones are learned, noisy ones are still "
        "random.",
        "What later layers use.",
    ),
    "cost": (
        "vitlab.analysis.cost:analyze_cost",
        "Parameters and multiply-adds by part, and images per second.",
        "Speed on another or a busy machine.",
    ),
    "token_layers": (
        _VIEWS + "token_layers:analyze_token_layers",
        "Where a token between T2T's soft splits attends, on the finer grids there; a performer's weights are those "
        "that its random features imply.",
        "What the token receives: these layers add values, not inputs.",
    ),
    "splits": (
        _VIEWS + "splits:analyze_splits",
        "The features after each soft split of T2T as colors and as single channels, like figure 2 of T2T-ViT.",
        "Which channels matter: those shown have the largest variance.",
    ),
    "errors": (
        _OUT + "errors:analyze_errors",
        "The worst mistakes on a split, lowest probability of the true class first: check for wrong labels.",
        "Typical behavior: these images were selected for being wrong.",
    ),
    "confusion": (
        _OUT + "confusion:analyze_confusion",
        "Images by true class (rows) and predicted class (columns), with recall and precision of each class.",
        "Rates for other class frequencies; the recall of a class with few images is uncertain.",
    ),
    "calibration": (
        _OUT + "calibration:analyze_calibration",
        "Accuracy against predicted probability: below the dashed line the network is overconfident. Inside the gray "
        "bars calibrated probabilities would lie in 95 % of draws.",
        "Accuracy: a network that always predicts the class frequencies is calibrated.",
    ),
}


def names_of(text: str) -> list[str]:
    """Return the analyses in ``NAME[,NAME...]``, or all of them for ``all``.

    Example:
        >>> names_of("attention,rollout")
        ['attention', 'rollout']
    """
    if text == "all":
        return list(ANALYSES)
    names = text.split(",")
    for name in names:
        if name not in ANALYSES:
            hint = did_you_mean(name, ANALYSES) or f"; choose from all, {', '.join(ANALYSES)}"
            raise UsageError(f'no analysis called "{name}"{hint}')
    return names
