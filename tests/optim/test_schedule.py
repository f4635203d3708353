import pytest
import torch
from timm.scheduler import CosineLRScheduler

from vitlab.optim import warmed_up
from vitlab.tasks.schedule import schedule


def test_the_schedule_is_timms_with_ten_epochs_of_cooldown():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = CosineLRScheduler(optimizer, t_initial=300, warmup_t=10, warmup_lr_init=1e-6, lr_min=1e-5)
    for epoch in range(310):
        theirs.step(epoch)
        ours = 1e-3 * warmed_up(epoch, warmup=10, total=300, start=1e-3, final=1e-2)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)


def test_the_learning_rate_rises_falls_and_stays():
    values = [warmed_up(t, warmup=4, total=10, final=0.1) for t in range(13)]
    assert values[0] == 0
    assert values[:4] == sorted(values[:4])
    assert values[4:] == sorted(values[4:], reverse=True)
    assert values[10:] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("per_epoch", [7, 10, 30])
def test_a_share_of_an_epoch_steps_where_it_ends(per_epoch):
    values = [warmed_up(t, 0, 9e9, shape="step", epoch=per_epoch, every=1 / per_epoch, gamma=0.5) for t in range(99)]
    assert values == [0.5**t for t in range(99)]


def test_without_warmup_the_schedule_starts_at_one():
    assert warmed_up(0, warmup=0, total=10) == 1


@pytest.mark.parametrize(
    ("per_epoch", "warmup", "cooldown", "rates"),
    [
        (20, 0.2, 0.1, [0.1, 0.325, 0.55, 0.775, 1.0, 1.0, 1.0, 1.0, 0.05, 0.05]),  # 4 and 2 steps of an epoch of 20
        (20, 0.2, 1.0, [0.1, 0.325, 0.55, 0.775, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05]),  # longer than the training
        (5, 4.0, 0.0, [0.1, 0.19, 0.28, 0.37, 0.46, 0.55, 0.64, 0.73, 0.82, 0.91]),  # rises to the end
        (float("inf"), 0.2, 0.1, [0.1, 0.55, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.05]),  # then of the training
    ],
)
def test_epochs_are_those_of_the_data_also_in_a_training_shorter_than_one(per_epoch, warmup, cooldown, rates):
    recipe = {"lr_scheduler": "constant", "warmup_epochs": warmup, "cooldown_epochs": cooldown}
    factor = schedule({**recipe, "warmup_lr": 0.2, "min_lr": 0.1, "lr": 2.0}, 10, per_epoch)
    assert [factor(step) for step in range(10)] == pytest.approx(rates)
