"""Looking at what a trained network has learned; nothing here trains."""

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
}
