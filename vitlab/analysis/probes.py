"""Linear probes of frozen tokens, by closed-form ridge regression."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.analysis.catalogue import Analysis, Curve
from vitlab.analysis.figures import COLORS, curves, dashed, finish, one_axes
from vitlab.analysis.intervals import over_images
from vitlab.analysis.subject import Finding, Subject
from vitlab.data.files.splits import SplitName
from vitlab.errors import UsageError
from vitlab.interface import own_parts
from vitlab.layers.pos_embed import PosEmbed
from vitlab.layers.resample import Grid
from vitlab.models.foreign import AnyNetwork
from vitlab.models.hooks import changed_output
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import all_finite, block_tokens, placed_tokens, refuse_other_counts

PENALTIES = torch.logspace(-7, 3, 21, dtype=torch.float64)  # of a CellProbe, in mean variances of the features


def ridge(x: Tensor, y: Tensor, l2: float) -> Tensor:
    """Return the ``(F, T)`` weights that minimize ``|x w - y|^2 + l2 |w|^2`` for ``(n, F)`` and ``(n, T)``."""
    gram = x.T @ x
    return torch.linalg.solve(gram + l2 * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), x.T @ y)


def cross_validated_ridge(gram: Tensor, cross: Tensor, squares: Tensor, n: float) -> Tensor:
    """Return the weights of :func:`ridge` with the best penalty for all targets together, from sums over batches.

    Args:
        gram: ``x^T x`` of centered features, ``(D, D)``.
        cross: ``x^T y`` with centered targets, ``(D, T)``.
        squares: ``y^T y`` of each target, ``(T,)``.
        n: Number of rows of x.

    Example:
        >>> x = torch.randn(50, 3).double()
        >>> x = x - x.mean(dim=0)
        >>> y = x @ torch.ones(3, 1).double()
        >>> cross_validated_ridge(x.T @ x, x.T @ y, y.square().sum(dim=0), n=50).round(decimals=3).flatten().tolist()
        [1.0, 1.0, 1.0]
    """
    values, vectors = torch.linalg.eigh(gram)
    values, along, best = values.clamp_min(0), vectors.T @ cross, (float("inf"), torch.zeros_like(cross))
    for penalty in (PENALTIES * values.mean()).tolist() if values.any() else []:
        kept = values + penalty
        freedom = n - 1 - float((values / kept).sum())
        left = squares - (along.square() * ((values + 2 * penalty) / kept.square())[:, None]).sum(dim=0)
        score = float((left / squares.clamp_min(1e-12)).sum()) / freedom**2 if freedom > 0 else float("inf")
        if score < best[0]:
            best = score, vectors @ (along / kept[:, None])
    return best[1]


def centered(x: Tensor) -> Tensor:
    """Return ``(n, D)`` features minus their mean, in double precision.

    They are 0 if the features vary by no more than the rounding of float32: several threads round equal rows apart.

    Example:
        >>> centered(torch.tensor([[3.0], [4.0]])).tolist(), centered(torch.tensor([[3.0], [3.0 + 2e-6]])).tolist()
        ([[-0.5], [0.5]], [[0.0], [0.0]])
    """
    x = x.double()
    spread = x - x.mean(dim=0)
    return spread if spread.norm() > 1e-5 * x.norm() else torch.zeros_like(x)


def principal(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ``(n, D)`` features on their first principal components, ``(n, count)``, and these' shares of variance.

    The sign of a component is that of its largest weight; where there are fewer components, the rest is 0.

    Example:
        >>> places, shares = principal(torch.tensor([[0.0, 0.0, 1.0], [4.0, 0.0, 1.0], [0.0, 1.0, 1.0]]), count=2)
        >>> places.shape, round(float(shares.sum()), 6)
        (torch.Size([3, 2]), 1.0)
    """
    flat = centered(x)
    _, singular, components = torch.linalg.svd(flat, full_matrices=False)
    components = components[:count]
    components = components * components.gather(1, components.abs().argmax(dim=1)[:, None]).sign()
    shares = singular[:count].square() / singular.square().sum().clamp(min=1e-24)
    return F.pad(flat @ components.T, (0, count - len(components))), shares


def steady(x: Tensor) -> Tensor:
    """Return ``(n, D)`` features in double precision, all equal where :func:`centered` is 0.

    Example:
        >>> x = steady(torch.tensor([[3.0], [3.0 + 2e-6]]))
        >>> bool(x[0] == x[1])
        True
    """
    x = x.double()
    return x if centered(x).any() else x[:1].expand_as(x)


class CellProbe:
    """Ridge regression from a token to its cell: which of N, and its row and column.

    Its penalty is the one with the least generalized cross-validation among :data:`PENALTIES` (Golub et al. 1979,
    doi:10.1080/00401706.1979.10489751), so features times a number are read equally well; the intercept has none.

    Args:
        grid_size: Patch tokens per column and per row, (h, w).

    Example:
        >>> probe = CellProbe((1, 2))
        >>> probe.add(torch.tensor([[[1.0], [2.0]], [[1.1], [2.1]]]))
        >>> probe.score(torch.tensor([[[1.0], [2.1]]]))
        >>> probe.accuracies()
        tensor([1.], dtype=torch.float64)
    """

    def __init__(self, grid_size: Grid) -> None:
        h, w = grid_size
        cells = torch.arange(h * w)
        one_hot = F.one_hot(cells).double()
        self.places = torch.stack([cells // w, cells % w], dim=1).double()  # (N, 2)
        self.targets = torch.cat([one_hot, self.places], dim=1)  # (N, N + 2)
        self.gram, self.cross = torch.zeros(()), torch.zeros(())  # (D + 1, D + 1), (D + 1, N + 2)
        self._weights: Tensor | None = None
        self.right: list[Tensor] = []  # share of right cells of each image
        self.missed: list[Tensor] = []  # squared distances of each image's guesses, summed

    def add(self, tokens: Tensor) -> None:
        """Accumulate ``(B, N, D)`` training tokens."""
        x = _with_bias(tokens)  # (B, N, D + 1)
        self.gram = self.gram + torch.einsum("bni, bnj -> ij", x, x)
        self.cross = self.cross + x.sum(dim=0).T @ self.targets
        self._weights = None

    def score(self, tokens: Tensor) -> None:
        """Score ``(B, N, D)`` held-out tokens."""
        guess = _with_bias(tokens) @ self.weights()  # (B, N, N + 2)
        guess = guess.round(decimals=9)  # equal tokens get equal guesses: threads round rows of a product apart
        self.right.append((guess[..., :-2].argmax(dim=-1) == torch.arange(len(self.targets))).double().mean(dim=1))
        self.missed.append((guess[..., -2:] - self.places).square().sum(dim=(1, 2)))

    def weights(self) -> Tensor:
        """Return the ``(D + 1, N + 2)`` weights that the training tokens determine, the intercept last."""
        if self._weights is None:
            n, means, goals = self.gram[-1, -1], self.gram[-1, :-1] / self.gram[-1, -1], self.targets.mean(dim=0)
            gram = self.gram[:-1, :-1] - n * means.outer(means)
            if gram.trace() <= 1e-10 * self.gram[:-1, :-1].trace():  # the features are constant, up to rounding
                gram = torch.zeros_like(gram)
            cross = self.cross[:-1] - n * means.outer(goals)
            slopes = cross_validated_ridge(gram, cross, n * self.targets.var(dim=0, correction=0), float(n))
            self._weights = torch.cat([slopes, (goals - means @ slopes)[None]])
        return self._weights

    def accuracies(self) -> Tensor:
        """Return the share of each image's tokens with the right cell, ``(n,)``."""
        return torch.cat(self.right)

    def result(self) -> dict[str, float]:
        """Return N-way accuracy and R^2 of row and column together, each with its interval over images."""
        spread = (self.places - self.places.mean(dim=0)).square().sum()
        r2 = 1 - torch.cat(self.missed) / spread
        found = over_images("accuracy", self.accuracies().numpy(), (0, 1))
        return found | over_images("r2", r2.numpy(), (-math.inf, 1))


def probe_layers(
    net: VisionTransformer, fit: Iterable[tuple[Tensor, Tensor]], held_out: Iterable[tuple[Tensor, Tensor]]
) -> list[CellProbe]:
    """Return a :class:`CellProbe` for the tokens before block 0 and after each block."""
    probes = [CellProbe(net.grid_size) for _ in range(len(net.blocks) + 1)]
    for batches, learns in ((fit, True), (held_out, False)):
        for images, _ in batches:
            layers = block_tokens(net, images)
            refuse_other_counts([tokens.shape[1] for tokens in layers])
            for probe, tokens in zip(probes, layers, strict=True):
                (probe.add if learns else probe.score)(tokens[:, net.num_prefix_tokens :].cpu())
    return probes


def without_positions(net: VisionTransformer) -> VisionTransformer:
    """Return a copy of a network without its position embedding.

    Example:
        >>> net = VisionTransformer(img_size=8, patch_size=2, embed_dim=16, depth=1, num_heads=2, pos_embed="rope2d")
        >>> type(without_positions(net).pos_embed).__name__
        'PosEmbed'
    """
    net = copy.deepcopy(net)
    net.pos_embed = PosEmbed(net.grid_size)
    return net


def knows_places(net: VisionTransformer, images: Tensor) -> bool:
    """Return whether a network without position embedding still knows where tokens stand, by parts of the user's own.

    It does if tokens in another order give more than the same outputs in that order.

    Example:
        >>> net = VisionTransformer(img_size=8, patch_size=2, embed_dim=16, depth=1, num_heads=2, pos_embed="none")
        >>> knows_places(net, torch.randn(2, 3, 8, 8))
        False
    """
    if not own_parts(net.blocks):
        return False
    order = torch.randperm(math.prod(net.grid_size), generator=torch.Generator().manual_seed(0)).to(images.device)
    with torch.no_grad():
        before = net.forward_features(images)[:, net.num_prefix_tokens :][:, order]
        with changed_output(net.tokenizer, lambda x: x[:, order]):
            after = net.forward_features(images)[:, net.num_prefix_tokens :]
    return float((after - before).abs().max()) > 0.01 * float(before.std())


@Analysis(
    reading="How well a linear probe reads a token's cell after each block: content reveals it too, so compare with a "
    "network without positions.",
    limits="Whether the network uses this information.",
    curve=Curve(
        x="layer",
        measures={"accuracy": "accuracy", "excess": "excess", "r2": "r2"},
        lines=("images", "positions"),
        words="Share of tokens whose cell a ridge regression tells, the excess over no positions, and R^2 of row and "
        "column.",
    ),
)
def analyze_probe(subject: Subject) -> Finding:
    """Probe each token for its cell, layer by layer, with and without positions.

    Example:
        >>> finding = analyze_probe(subject)
        >>> list(finding.table.columns)[:6]
        ['images', 'positions', 'layer', 'accuracy', 'accuracy_low', 'accuracy_high']
    """
    if isinstance(subject.net, AnyNetwork):
        return _probe_foreign(subject, subject.net)
    own = subject.net
    other = subject.rival if subject.other is not None and subject.other.pos_embed == "none" else None
    if other is not None:
        _check_comparable(subject, other)
    nets = {"with": own, "without": without_positions(own) if other is None else other.transformer("probe", "tokens")}
    rows = []
    for images in ("validation", "noise"):
        probes = {}
        for positions, net in nets.items():
            of = subject if other is None or positions == "with" else other
            fit, held_out = subject.batches_for(of, "train"), subject.batches_for(of, "val")
            if images == "noise":
                fit, held_out = _noise(subject, seed=0), _noise(subject, seed=1)
            probes[positions] = probe_layers(net, fit, held_out)
        for positions, layers in probes.items():
            for layer, (probe, base) in enumerate(zip(layers, probes["without"], strict=True)):
                excess = over_images("excess", (probe.accuracies() - base.accuracies()).numpy())
                found = probe.result() | excess
                rows.append({"images": images, "positions": positions, "layer": layer, **found})
    table = pd.DataFrame(rows)
    figure, axes = one_axes(columns=2, width=4.0)
    table["line"] = table["images"] + ", " + table["positions"] + " positions"
    curves(axes[0], table, "layer", "accuracy", by="line")
    chance = 1 / (subject.net.grid_size[0] * subject.net.grid_size[1])
    dashed(axes[0], chance)
    curves(axes[1], table[table["positions"] == "with"], "layer", "excess", by="images")
    for ax, name in zip(axes, ("accuracy of the cell", "excess over no positions"), strict=True):
        ax.set_xticks(sorted(table["layer"].unique()))
        finish(ax, "blocks passed", name)
    axes[0].set_ylim(0, 1.05)
    axes[1].set_ylim(min(0.0, table["excess"].min()), 1.05)
    base_name = "the same network, positions taken out" if other is None else other.name
    if knows_places(nets["without"], next(_noise(subject, seed=0))[0]):
        base_name += ", whose blocks know places all the same: the excess lacks what they tell"
    note = (
        f"ridge on up to {subject.num_images} training images, penalty by generalized cross-validation, scored on "
        f"validation images; no positions: {base_name}"
    )
    return Finding(table.drop(columns="line"), figure, note)


def _probe_foreign(subject: Subject, net: AnyNetwork) -> Finding:
    """Probe a network whose positions cannot be taken out: the excess is over chance, on images of no fixed content.

    Images rolled by a random number of pixels show everything everywhere equally often, and noise shows nothing: what
    tells the cell of a token there is the network, by positions or by the padding of its convolutions.
    """
    sources: dict[str, Callable[[SplitName], Iterable[Tensor]]] = {}
    if not subject.has_no_data:
        sources["validation"] = lambda split: (images for images, _ in subject.batches(split))
        sources["rolled"] = lambda split: _rolled(subject, split)
    sources["noise"] = lambda split: (images for images, _ in _noise(subject, seed=int(split == "val")))
    rows = []
    for name, batches in sources.items():
        probes: dict[int, CellProbe] = {}
        for split in ("train", "val"):
            for images in batches(split):
                for layer, found in enumerate(placed_tokens(net, images)):
                    if found is not None and found[1][0] * found[1][1] > 1:
                        probe = probes.setdefault(layer, CellProbe(found[1]))
                        (probe.add if split == "train" else probe.score)(found[0].cpu())
        for layer, probe in probes.items():
            chance = 1 / len(probe.targets)
            facts = {"images": name, "positions": "with", "layer": layer, **probe.result()}
            excess = over_images("excess", (probe.accuracies() - chance).numpy())
            rows.append({**facts, **excess, "chance": chance, "of": net.stages[layer].name})
    if not rows:
        raise UsageError(f"probe needs features that have a place in the image, and {subject.kind} shows none there")
    table = pd.DataFrame(rows)
    figure, axes = one_axes(columns=2, width=4.0)
    for ax, column in zip(axes, ("accuracy", "excess"), strict=True):
        curves(ax, table, "layer", column, by="images")
        ax.set_xticks(sorted(table["layer"].unique()))
    first = table[table["images"] == table["images"].iloc[0]]
    axes[0].plot(first["layer"], first["chance"], color=COLORS[6], linestyle="--", linewidth=1, label="chance")
    for ax, name in zip(axes, ("accuracy of the cell", "excess over chance"), strict=True):
        finish(ax, "layers passed", name)
        ax.set_ylim(min(0.0, table["excess"].min()), 1.05)
    note = (
        f"ridge on up to {subject.num_images} training images, penalty by generalized cross-validation; positions of "
        "this network cannot be taken out: read the rolled images and noise, which have no content of a place"
    )
    return Finding(table, figure, note)


def _rolled(subject: Subject, split: SplitName) -> Iterator[Tensor]:
    """Yield the images of a split, each rolled by its own random number of pixels, as on a torus."""
    generator = torch.Generator().manual_seed(int(split == "val"))
    for images, _ in subject.batches(split):
        H, W = images.shape[2:]
        moves = torch.stack([torch.randint(side, (len(images),), generator=generator) for side in (H, W)], dim=1)
        yield torch.stack([image.roll((y, x), (1, 2)) for image, (y, x) in zip(images, moves.tolist(), strict=True)])


def _check_comparable(subject: Subject, other: Subject) -> None:
    """Refuse a baseline with another tokenizer: zero padding at the border reveals positions too."""
    nets = [each.transformer("probe", "tokens") for each in (subject, other)]
    kinds = [f"{type(net.tokenizer).__name__} {net.patch_size} {' x '.join(map(str, net.grid_size))}" for net in nets]
    weights = [{k: v.shape for k, v in net.tokenizer.state_dict().items()} for net in nets]
    if kinds[0] != kinds[1] or weights[0].keys() != weights[1].keys():
        raise UsageError(
            f"probe --against needs a run of the same tokenizer and grid, got {kinds[1]} and {kinds[0]}: "
            "otherwise what the tokenizer reveals of places would count as positions; leave --against out"
        )


def _noise(subject: Subject, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, subject.num_images, 32):
        count = min(32, subject.num_images - start)
        images = torch.randn(count, subject.net.in_chans, *subject.net.img_size, generator=generator)
        yield subject.for_net(images), torch.zeros(count, dtype=torch.int64)


def _with_bias(tokens: Tensor) -> Tensor:
    return F.pad(steady(all_finite(tokens, "tokens").flatten(0, 1)).view(tokens.shape), (0, 1), value=1.0)
