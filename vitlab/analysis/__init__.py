"""Looking at what a trained network has learned; nothing here trains."""

from vitlab.errors import UsageError, did_you_mean

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
}


def names_of(text: str) -> list[str]:
    """Return the analyses that ``NAME[,NAME...]`` or ``all`` means."""
    if text == "all":
        return list(ANALYSES)
    names = text.split(",")
    for name in names:
        if name not in ANALYSES:
            hint = did_you_mean(name, ANALYSES)
            raise UsageError(f'no analysis called "{name}"{hint}; there are all, {", ".join(ANALYSES)}')
    return names
