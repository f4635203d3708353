"""Figures in print: whatever is drawn can be read at the width of a column."""

import warnings

import matplotlib
import numpy as np
import pandas as pd
import pytest
from figure_faults import faults, fits_a_column
from matplotlib.figure import Figure
from small_nets import SMALL, small_net

from vitlab.analysis import ANALYSES
from vitlab.analysis.figures import COLORS, curves, finish, grid_of_axes, one_axes, overlay, picture
from vitlab.analysis.subject import Finding, Subject
from vitlab.analysis.typeset import _touching, figure_bytes, printed, shown_texts
from vitlab.errors import UsageError
from vitlab.models.vit import VisionTransformer

QUICK = {"attention", "displacement", "resolution", "confusion", "calibration"}  # pictures, maps, lines, bars, points

ELSEWHERE = {"reconstruction", "segmentation", "labels"}  # need more than a run; in a column by `fits_a_column` there


@pytest.fixture(scope="module")
def subjects(digits):
    """A plain network and a T2T one, as they start."""
    t2t = {**SMALL, "tokenizer": "t2t", "t2t_kernels": (3, 3), "t2t_attn": "transformer", "t2t_dim": 8}
    del t2t["patch_size"]
    nets = [(small_net(), SMALL), (VisionTransformer(**t2t).eval(), t2t)]
    return [Subject(net, digits, known, num_images=16) for net, known in nets]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.rare) for n in ANALYSES])
def test_a_figure_of_each_analysis_can_be_read_in_a_column(subjects, name):
    for subject in subjects:
        try:
            finding = ANALYSES[name].measure(subject)
        except UsageError:
            continue
        fits_a_column(finding.figure)
        return
    assert name in ELSEWHERE


def test_overlapping_cut_off_and_small_text_is_detected():
    figure = Figure((2, 1))
    figure.text(0.5, 0.5, "a title"), figure.text(0.5, 0.55, "another")
    figure.text(0.95, 0.1, "too far right"), figure.text(0.1, 0.1, "small", fontsize=5)
    assert [fault.split(" ")[-1] for fault in faults(figure)] == ["title'", "100", "pt"]


@pytest.mark.slow
def test_overlapping_titles_are_wrapped_or_stacked():
    figure = Figure((8, 2), layout="constrained")
    for ax in figure.subplots(1, 4):
        ax.plot([0, 1])
        ax.set_title("images: validation, positions: without", fontsize=9)
    figure.set_size_inches(3.3, 2)
    assert any("lies on" in fault for fault in faults(figure))
    assert not faults(printed(figure, 3.3))


@pytest.mark.slow
def test_oblong_maps_with_long_names_of_rows_and_columns_stay_as_wide_as_a_page_allows():
    figure, axes = grid_of_axes(4, 11)
    names = ["image", *(f"map of gradients{i}" for i in range(10))]
    for i, row in enumerate(axes):
        for j, (ax, name) in enumerate(zip(row, names, strict=True)):
            title = "as sunflower" if j == 0 else name if i == 0 else ""
            overlay(ax, np.zeros((48, 80, 3)), np.random.default_rng(i + j).random((3, 5)), title)
    with warnings.catch_warnings(action="error"):
        done = printed(figure, 6.9)
    assert not faults(done)
    assert min(ax.get_position().width for ax in done.axes) * 6.9 > 0.5
    assert [ax.title.get_rotation() for ax in done.axes if ax.get_title()] == [0] * 14


@pytest.mark.slow
def test_titles_of_a_gallery_whose_last_row_is_not_full_stay_upright():
    """An empty panel is wider than a picture: it once counted as a column a few hundredths beside the picture's."""
    figure, axes = grid_of_axes(2, 6, size=1.6)
    for ax in axes.flat:
        ax.axis("off")
    for ax, name in zip(axes.flat, ("3.0", "b,c", "rare", "b,c", "rare", "3.0", "b,c"), strict=False):
        picture(ax, np.zeros((8, 8, 3)), f"{name}\nas Löwe & Co 0.25")
    done = printed(figure, 6.9)
    assert [ax.title.get_rotation() for ax in done.axes] == [0] * 12 and not faults(done)
    assert done.axes[1].get_title() == "b,c\nas Löwe & Co 0.25"


@pytest.mark.slow
def test_dollar_signs_are_no_formulas_and_ticks_of_powers_stay_numbers():
    figure, axes = one_axes(columns=2)
    axes[0].barh(["US$5, $x_$", "a$b$"], [1, 2])
    axes[1].plot([1e-4, 1], [0, 1])
    axes[1].set_xscale("log")
    axes[1].set_title("$x_$")
    Finding(pd.DataFrame(), figure).picture()  # a figure that was drawn before
    text = figure_bytes(printed(figure, 6.9, "errors of $x_$"), "svg").decode()
    assert all(f">{word}</text>" in text for word in ("US$5, $x_$", "a$b$", "$x_$", "errors of $x_$"))
    assert "mathdefault" not in text


@pytest.mark.slow
def test_lines_have_their_names_at_their_ends_and_none_is_lost():
    names = [f"line {i}" for i in range(6)]
    table = pd.DataFrame([{"x": x, "y": 1.0 + i * x / 100, "line": n} for i, n in enumerate(names) for x in (0, 1)])
    figure, (axes,) = one_axes()
    curves(axes, table, "x", "y", by="line")
    done = printed(figure, 3.3)
    assert not done.axes[0].get_legend() and not done.legends and not faults(done)
    placed = {text.get_text(): text.get_window_extent().y0 for text in done.axes[0].texts}
    assert sorted(placed, key=placed.get) == names  # in the order of the lines
    assert axes.get_legend()  # the figure itself stays as it is


@pytest.mark.slow
def test_many_panels_below_each_other_are_laid_out_without_a_warning(recwarn):
    """Matplotlib said that the layout was "not applied", of a height that the next step of typesetting replaces."""
    figure = Figure(figsize=(7.2, 30), layout="constrained")
    for k, ax in enumerate(figure.subplots(14, 1)):
        ax.plot([1, 2], label=f"shared-zeros-mix-none{k}")
        ax.set_title("shared, zeros, mix\nimages: validation\npositions: without")
        ax.legend()
    printed(figure, 6.9, "probe: mean")
    assert not recwarn.list


def test_a_legend_of_all_panels_gives_a_mark_one_meaning():
    figure, axes = one_axes(columns=2)
    for ax, title, names in zip(axes, ("heads", "images"), (("head", "null"), ("image", "null")), strict=True):
        ax.scatter([0, 1], [0, 1], color=COLORS[0], label=names[0])
        ax.plot([0, 1], [1, 0], color=COLORS[1], label=names[1])
        ax.set_title(title)
        finish(ax, "x", "y")
    (legend,) = printed(figure, 6.9).legends
    assert [text.get_text() for text in legend.get_texts()] == ["heads: head", "null", "images: image"]
    axes[1].lines[0].set_linestyle(":")
    finish(axes[1], "x", "y")
    (legend,) = printed(figure, 6.9).legends
    assert {"heads: null", "images: null"} < {text.get_text() for text in legend.get_texts()}


@pytest.mark.slow
def test_text_stays_text_and_fonts_are_embedded():
    figure, (axes,) = one_axes()
    axes.set_title("what it shows")
    done = printed(figure, 3.3)
    assert ">what it shows</text>" in figure_bytes(done, "svg").decode()
    with matplotlib.rc_context({"pdf.compression": 0}):
        page = figure_bytes(done, "pdf")
    assert b"/Subtype /Type0" in page and b"/FontFile2" in page and b"/Type3" not in page
    assert figure_bytes(done, "pdf") == figure_bytes(done, "pdf")
    assert {text.get_fontsize() for text in shown_texts(done)} <= {6.5, 7.0}


@pytest.mark.slow
def test_other_formats_of_an_earlier_figure_are_removed(tmp_path):
    finding = Finding(pd.DataFrame({"x": [1]}), one_axes()[0])
    finding.save(tmp_path, "position")
    finding.save(tmp_path, "position", ("pdf",), "column")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".pdf"]


def test_a_figure_with_categories_is_copied_and_both_go_on_counting_them():
    figure = Figure()
    axes = figure.subplots()
    axes.barh(["a", "b"], [1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python 3.12 and 3.13 warn of what 3.14 refuses
        copy = printed(figure, 3.3)
    for one in (copy.axes[0], axes):
        one.barh(["c"], [3])
        assert [round(bar.get_y() + bar.get_height() / 2) for bar in one.patches] == [0, 1, 2]


@pytest.mark.slow
def test_a_list_of_names_makes_a_figure_taller_and_loses_none():
    """Of 20 rows in two lines of panels, every other name was left out, as numbers are."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    names = [f"method{i}" for i in range(20)]
    for ax in figure.subplots(2, 4, sharey=True).ravel():
        ax.plot(range(20), range(20), "o")
        ax.set_yticks(range(20), names)
    for ax in (copy := printed(figure, 6.9)).axes[::4]:
        labels = ax.get_yticklabels()
        assert [label.get_text() for label in labels] == names
        assert not _touching(labels)
    assert copy.get_figheight() < 9
