import pytest
from small_nets import SMALL, small_net, train

from vitlab.analysis.subject import Subject
from vitlab.data.known import Digits

OWN = ("layer", "head", "query", "other", "classifies", "pictures", "num_images")


@pytest.fixture(scope="session")
def digits():
    return Digits(batch_size=64)


@pytest.fixture
def small_subject(digits):
    """Build a Subject of a small random network on Digits."""

    def build(**changes):
        own = {"num_images": 24} | {name: changes.pop(name) for name in OWN if name in changes}
        return Subject(small_net(**changes), digits, {**SMALL, **changes}, **own)

    return build


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A Digits run of three epochs."""
    return train(tmp_path_factory.mktemp("runs") / "run", "--trainer.max_epochs=3", "--data.subset=0.3")
