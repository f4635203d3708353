"""Axes, colors and maps that the figures share, distinguishable without color vision and in gray."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito 2008
T = TypeVar("T")
GALLERY = 24  # images
MARKERS = "osD^vPX"
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (7, 3)))


def grid_of_axes(rows: int, columns: int, size: float = 1.5, bar: bool = False) -> tuple[Figure, np.ndarray]:
    """Return a figure and its ``(rows, columns)`` axes, ``size`` inches each, with room for a color bar."""
    figure = Figure(figsize=(max(columns * size, 2.5) + bar, max(rows * size, 1.8)), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def by_cell(values: Iterable[T], width: int) -> Iterator[tuple[dict[str, int], T]]:
    """Yield row and column in a grid, as columns of a table, with each value: what a figure shows of a map as numbers.

    Example:
        >>> list(by_cell("abc", width=2))
        [({'row': 0, 'column': 0}, 'a'), ({'row': 0, 'column': 1}, 'b'), ({'row': 1, 'column': 0}, 'c')]
    """
    for n, value in enumerate(values):
        yield {"row": n // width, "column": n % width}, value


def one_axes(width: float = 5.0, height: float = 3.4, columns: int = 1) -> tuple[Figure, np.ndarray]:
    """Return a figure for curves and its axes, ``(columns,)``."""
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def picture(axes: Axes, pixels: np.ndarray, title: str = "", size: tuple[int, int] | None = None) -> None:
    """Show an ``(H, W, C)`` image with values in [0, 1], as wide and high as one of ``size``, its own by default."""
    gray, (h, w) = pixels.shape[-1] == 1, size or pixels.shape[:2]
    extent = (-0.5, w - 0.5, h - 0.5, -0.5)
    axes.imshow(pixels[..., 0] if gray else pixels, cmap="gray" if gray else None, vmin=0, vmax=1, extent=extent)
    bare(axes, title)


def gallery(pictures: Sequence[np.ndarray] | np.ndarray, titles: Sequence[str]) -> Figure:
    """Return a figure of the first :data:`GALLERY` ``(H, W, C)`` images with their titles, six in a row."""
    columns = 6
    figure, axes = grid_of_axes(-(-min(len(pictures), GALLERY) // columns), columns, size=1.6)
    for ax in axes.flat:
        ax.axis("off")
    for ax, pixels, title in zip(axes.flat, pictures, titles, strict=False):
        picture(ax, pixels, title)
    return figure


def heat(axes: Axes, values: np.ndarray, title: str = "", diverging: bool = False, **limits: float) -> Any:
    """Show an ``(h, w)`` map; a diverging one is white at 0. Return the image, for a color bar."""
    if diverging and not limits:
        most = float(np.nanmax(np.abs(values))) or 1.0
        limits = {"vmin": -most, "vmax": most}
    shown = axes.imshow(values, cmap="PuOr_r" if diverging else "viridis", **limits)  # type: ignore[arg-type]
    bare(axes, title)
    return shown


def overlay(axes: Axes, pixels: np.ndarray, values: np.ndarray, title: str = "") -> None:
    """Draw an ``(h, w)`` map over its ``(H, W, C)`` image in gray, with the map's range below."""
    (H, W), gray = pixels.shape[:2], pixels.mean(axis=-1)
    axes.imshow(gray, cmap="gray", vmin=0, vmax=1)
    scaled = (values - values.min()) / max(float(np.ptp(values)), 1e-12)
    extent = (-0.5, W - 0.5, H - 0.5, -0.5)  # low values let the picture through
    axes.imshow(values, cmap="viridis", alpha=0.3 + 0.6 * scaled, extent=extent, interpolation="nearest")
    bare(axes, title)
    axes.set_xlabel(f"{values.min():.2g} to {values.max():.2g}", fontsize=6, labelpad=1)


def beside(axes: Axes, shape: tuple[int, ...], values: np.ndarray, title: str = "") -> None:
    """Draw an ``(h, w)`` map that has a sign beside its image of ``(H, W)`` pixels: white at 0, its range at a bar."""
    (H, W), most = shape[:2], float(np.abs(values).max()) or 1.0
    place: Any = {"extent": (-0.5, W - 0.5, H - 0.5, -0.5), "vmin": -most, "vmax": most, "interpolation": "nearest"}
    shown = axes.imshow(values, cmap="PuOr_r", **place)
    bare(axes, title)
    bar = axes.figure.colorbar(shown, cax=axes.inset_axes((0, -0.13, 1, 0.06)), orientation="horizontal")
    bar.set_ticks([-most, 0, most], labels=["−", "0", "+"], fontsize=6)
    bar.ax.tick_params(length=2, pad=1)
    bar.set_label(f"±{most:.2g}", fontsize=6, labelpad=0)


def bare(axes: Axes, title: str = "") -> None:
    """Remove ticks and set the title."""
    axes.set_xticks([])
    axes.set_yticks([])
    if title:
        axes.set_title(title, fontsize=8)


def curves(axes: Axes, table: pd.DataFrame, x: str, y: str, by: str | None = None) -> None:
    """Draw ``y`` over ``x``, a line with its own color, mark and dashes for each value of ``by``.

    Columns ``y_low`` and ``y_high``, where there are such, are a band: intervals of one measurement, in the mean.
    """
    groups: Sequence[tuple[Any, pd.DataFrame]] = list(table.groupby(by, sort=False)) if by else [(None, table)]
    for i, (label, group) in enumerate(groups):
        mean = group.groupby(x)[y].mean()
        turn = i + i // 7  # the eighth line has the color of the first, and other marks and dashes
        style = {"color": COLORS[i % 7], "marker": MARKERS[turn % 7], "linestyle": LINES[turn % 7]}
        axes.plot(mean.index, mean.to_numpy(), label=label, markersize=4, linewidth=1.4, **style)  # type: ignore[arg-type]
        if f"{y}_low" in group:
            low, high = (group.groupby(x)[f"{y}_{end}"].mean() for end in ("low", "high"))
            axes.fill_between(mean.index, low, high, color=COLORS[i % 7], alpha=0.15, linewidth=0)
    finish(axes, x, y, legend=by is not None)


def dots_per_head(axes: Axes, table: pd.DataFrame, y: str) -> None:
    """Draw a dot with its interval for each head over its layer, and the layer's mean as a line."""
    ends = np.abs(table[[f"{y}_low", f"{y}_high"]].to_numpy().T - table[y].to_numpy())
    axes.errorbar(table["layer"], table[y], np.nan_to_num(ends), fmt="o", markersize=4, color=COLORS[0], label="head")
    mean = table.groupby("layer")[y].mean()
    axes.plot(mean.index, mean.to_numpy(), color=COLORS[0], linewidth=1, label="mean of heads")
    axes.set_xticks(sorted(table["layer"].unique()))
    finish(axes, "layer", y)


def dashed(axes: Axes, value: float, label: str = "chance") -> None:
    """Draw a dashed line across at a value to compare with."""
    axes.axhline(value, color=COLORS[6], linestyle="--", linewidth=1, label=label)


def finish(axes: Axes, x: str, y: str, legend: bool = True) -> None:
    """Name the axes and take away what carries no information."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=7, frameon=False)
