"""What the experiments' pages say is what their reports hold."""

from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "experiments").glob("*/results/*/summary.csv"))


@pytest.mark.parametrize("path", RESULTS, ids=[path.parent.name for path in RESULTS])
def test_the_page_of_an_experiment_states_the_accuracies_of_its_report(path):
    table = pd.read_csv(path)
    arms = table[(table["kind"] == "arm") & (table["metric"] == "acc1")]
    page = (path.parents[2] / "README.md").read_text()
    assert len(arms) > 1
    for arm in arms.itertuples():
        assert f" {100 * arm.mean:.1f} ± {100 * arm.sd:.1f} |" in page, arm.arm
    assert f"{arms['n'].sum():.0f} cells" in page
