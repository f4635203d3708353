"""Every analysis is asked about every network it takes, and those whose answer is known must say it."""

import pytest
from answers import ALWAYS, ANSWERS, ask, check_intervals
from zoo import ZOO, build

from vitlab.analysis import ANALYSES
from vitlab.errors import UsageError

pytestmark = pytest.mark.slow
SHOWN_ALONE = {"errors"}  # a table that may be empty
OFTEN = {"no_positions_t2t", "constant", "one_patch"}
DEAR = {
    "sanity",
    "faithfulness",
    "scramble",
    "scramble_image",
    "shift",
    "displacement",
}  # analyses that take seconds; one network is asked often
TWICE = {  # and dear, too
    ("faithfulness", "dead_heads"),
    ("faithfulness", "shortcut"),
    ("displacement", "uniform"),
    ("sanity", "with_positions"),
    ("cka", "twin_of_another_seed"),
    ("token_layers", "no_positions_t2t"),
}


def seldom(values, is_seldom):
    """Return parameters of which some are rare."""
    return [
        pytest.param(
            *(value if type(value) is tuple else (value,)), marks=[pytest.mark.rare] if is_seldom(value) else []
        )
        for value in values
    ]


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch, hasty):
    """Let maps of gradients take a quarter of their steps: the networks are simple."""
    monkeypatch.setattr("vitlab.analysis.attribution.maps.STEPS", 8)
    monkeypatch.setattr("vitlab.analysis.attribution.maps.SAMPLES", 4)


def test_there_are_twelve_networks_and_an_answer_for_each():
    assert len(ZOO) >= 12 and {answer.network for answer in ANSWERS} == set(ZOO)


@pytest.mark.parametrize(
    "answer",
    seldom(ANSWERS, lambda a: (a.analysis, a.network) in TWICE or (a.analysis in DEAR and "no_positions" in a.network)),
    ids=lambda a: f"{a.analysis}-{a.network}",
)
def test_an_analysis_tells_the_truth_of_a_network_whose_answer_is_known(answer):
    said, right = answer.said
    assert right, f"{answer.analysis} of {answer.network} says {said}; true is: {answer.true}"


@pytest.mark.parametrize(
    ("analysis", "network"),
    seldom(
        [(analysis, network) for analysis in ANALYSES for network in ZOO],
        lambda pair: pair[1] not in (OFTEN if pair[0] not in DEAR else {"one_patch"}),
    ),
)
def test_every_analysis_takes_a_network_or_refuses_it_in_a_line(analysis, network):
    found = ask(analysis, network)
    if isinstance(found, UsageError):
        assert "\n" not in str(found)
        return
    assert found.note and (len(found.table) or analysis in SHOWN_ALONE)
    check_intervals(found.table)
    if analysis in ALWAYS:
        ALWAYS[analysis](found.table, build(network))
