"""The analyses by name: what does each, how its figure is read, and what it does not show."""

from vitlab.errors import UsageError, did_you_mean

_OUT = "vitlab.analysis.outcomes."
_MAPS = "vitlab.analysis.attribution."
_VIEWS = "vitlab.analysis.views."

ANALYSES = {  # name: module:function of a Subject that returns a Finding, how to read it, what it does not show
    "attention": (
        "vitlab.analysis.attention:analyze_attention",
        "Where the class token looks in each head: bright patches weigh most.",
        "Why the network decides as it does: deleting the patches it looks at most may cost no more than deleting "
        "random ones; `faithfulness` measures that.",
    ),
    "heads": (
        _VIEWS + "heads:analyze_heads",
        "Every layer and head at one glance, a row of maps for each layer, laid over the picture.",
        "What a head does with what it looks at, and anything of other pictures than this one.",
    ),
    "rollout": (
        "vitlab.analysis.attention:analyze_rollout",
        "Attention of all layers multiplied, the residual path counted as half: what can reach the class token.",
        "What the MLPs, the values and, for T2T, the token layers do; which class a patch speaks for.",
    ),
    "attribution": (
        _MAPS + "maps:analyze_attribution",
        "Which patches the score of the predicted class depends on, by six methods side by side.",
        "Which of them is right where they differ: read `faithfulness` and `sanity` first.",
    ),
    "faithfulness": (
        _MAPS + "curves:analyze_faithfulness",
        "The probability of the predicted class while a map's best patches are deleted (good maps fall fast) or "
        "inserted (good maps rise fast): a map no better than `random` is no evidence.",
        "That a faithful map is complete: deleted patches make images that no training had.",
    ),
    "sanity": (
        _MAPS + "sanity:analyze_sanity",
        "How alike a map stays while weights become random from the head down: one that does not change shows the "
        "picture and not the network.",
        "That a map which does change is faithful.",
    ),
    "distance": (
        "vitlab.analysis.attention:analyze_distance",
        "How far each head looks: compare a dot with the hollow one, the same head with tokens in random places.",
        "Why: a head is local because it knows places, or because neighbors look alike: only the first is position.",
    ),
    "entropy": (
        "vitlab.analysis.attention:analyze_entropy",
        "How widely each head looks: near the dashed line it looks at all tokens alike, near 0 at a single one.",
        "Whether what it looks at matters.",
    ),
    "position": (
        "vitlab.analysis.positions:analyze_position",
        "Each tile compares the position of its cell with all cells: bright neighbors mean that the table knows the "
        "grid; fixed sines do so by construction.",
        "Whether the network uses what its table knows: `scramble` and `displacement` do.",
    ),
    "displacement": (
        "vitlab.analysis.positions:analyze_displacement",
        "How a logit depends on where the key lies, seen from the query at the cross. Left: tokens in random places, "
        "so that a pattern above the noise floor is knowledge of position. Right: content draws patterns too.",
        "What values and later layers make of it.",
    ),
    "scramble": (
        "vitlab.analysis.scramble:analyze_scramble",
        "Tokens change places before they get positions: what is lost is what the network knows through them; without "
        "positions nothing changes.",
        "How well a network would do that had been trained on scrambled tokens.",
    ),
    "scramble_image": (
        "vitlab.analysis.scramble:analyze_scramble_image",
        "Patches of the image change places before the tokenizer.",
        "Anything of positions where the tokenizer's windows overlap, which makes other tokens: use `scramble` there.",
    ),
    "shift": (
        "vitlab.analysis.shift:analyze_shift",
        "How often the prediction survives a move of the image: whole patches round the border are exact only without "
        "positions, for the patch tokenizer.",
        "Moves apart from what comes in at the border: compare the three fillings.",
    ),
    "resolution": (
        "vitlab.analysis.resolution:analyze_resolution",
        "Accuracy at other sizes for each way to carry positions over: compare with one without positions (--against).",
        "Positions alone: objects change size too.",
    ),
    "probe": (
        "vitlab.analysis.probes:analyze_probe",
        "How well a token's cell can be read from it after each block: content tells cells apart too, so the excess "
        "over no positions is what counts.",
        "Whether the network uses what can be read.",
    ),
    "fewshot": (
        "vitlab.analysis.features:analyze_fewshot",
        "Accuracy of a ridge regression on frozen features from a few labels: how separable the classes lie already.",
        "Learning from few labels, if the network was trained on all labels of these very classes (--data, --root).",
    ),
    "knn": (
        "vitlab.analysis.features:analyze_knn",
        "Accuracy of the labels of the most similar training images: what lies together without any fitting.",
        "Use on new classes, if the network was trained on these (--data, --root).",
    ),
    "pca": (
        _VIEWS + "pca:analyze_pca",
        "Patch features of all pictures as colors, their first three principal components: equal colors are alike to "
        "the network.",
        "What the other components hold: the title of each layer tells the share of variance that is shown.",
    ),
    "reconstruction": (
        _VIEWS + "reconstruction:analyze_reconstruction",
        "What a masked autoencoder makes of hidden patches, and what it makes of them from another picture, under the "
        "same mask: what the two share was not read from the picture.",
        "How good its features are: `knn` and a linear probe measure that. Sharpness is not asked of it.",
    ),
    "cka": (
        "vitlab.analysis.cka:analyze_cka",
        "How alike layers represent the same images, 1 is alike up to rotation: compare two runs with two seeds of one "
        "recipe before reading a difference.",
        "Whether the network uses what two layers share; few large components decide it.",
    ),
    "filters": (
        "vitlab.analysis.filters:analyze_filters",
        "Principal components of the filters on pixels, largest first: smooth ones are learned, salt and pepper is the "
        "random start.",
        "What the layers behind them need.",
    ),
    "cost": (
        "vitlab.analysis.cost:analyze_cost",
        "Where parameters and multiply-adds are, and images per second.",
        "Speed on another machine, or beside other programs.",
    ),
    "token_layers": (
        _VIEWS + "token_layers:analyze_token_layers",
        "Where a token between the splits of T2T looks, on the finer grids there; a performer's weights are those its "
        "random features imply.",
        "What the token gets: these layers add values, not inputs.",
    ),
    "splits": (
        _VIEWS + "splits:analyze_splits",
        "The features after each split of T2T as colors and single channels, as figure 2 of T2T-ViT.",
        "Which channels matter: those shown vary most.",
    ),
    "errors": (
        _OUT + "errors:analyze_errors",
        "The worst mistakes of a split, least likely class first: look for wrong labels before you blame it.",
        "What the network does elsewhere: these images were chosen for being wrong.",
    ),
    "confusion": (
        _OUT + "confusion:analyze_confusion",
        "Images of each class, a row each, by the class they were given, and recall and precision of each class.",
        "Rates elsewhere, where classes are more or less frequent; a class of few images has any recall.",
    ),
    "calibration": (
        _OUT + "calibration:analyze_calibration",
        "How often the network is right where it says so with some probability: below the dashed line it is too sure.",
        "Whether it is right: one that always says the classes' frequencies is calibrated.",
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
