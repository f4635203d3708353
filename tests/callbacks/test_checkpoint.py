"""The best checkpoint holds the weights of the best validation, and a resume repeats or skips no validation."""

import signal
from contextlib import suppress
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from test_stop import signalled
from tiny import NETWORK, Stream, batches, fit, loader, task, trainer
from torch.utils.data import DataLoader

from vitlab.callbacks.checkpoint import Checkpoint, _check_finite
from vitlab.callbacks.draws import Draws
from vitlab.callbacks.ema import EMA
from vitlab.callbacks.record import RunRecord
from vitlab.callbacks.steps import Steps
from vitlab.callbacks.stop import StopOnSignal
from vitlab.errors import Diverged, Stopped
from vitlab.runs.directory import RunDir
from vitlab.runs.format import read_resumable
from vitlab.runs.generations import WRITING
from vitlab.tasks import Classifier, LinearProbe

WITHIN = {
    "in each epoch": {"val_check_interval": 2},
    "twice an epoch": {"val_check_interval": 1},
    "by steps": {"val_check_interval": 2, "check_val_every_n_epoch": None},
}


class Validations(L.Callback):
    """The step and the loss of each validation."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.seen.append((trainer.global_step, float(trainer.callback_metrics["val/loss"])))


def rising(model):
    """Make the loss of validation rise after the second step, so that the last weights are not the best."""
    loss = model.eval_loss
    model.eval_loss = lambda *given: loss(*given) + max(0, model.trainer.global_step - 2)
    return model


def test_complex_weights_must_be_finite_in_both_parts():
    module = task()
    module.net.turn = torch.nn.Parameter(torch.tensor([complex(1, 2)]))
    at_work = SimpleNamespace(lightning_module=module, world_size=1)
    _check_finite(at_work)
    module.net.turn.data.imag.fill_(torch.nan)
    with pytest.raises(Diverged, match=r"not finite \(first: net\.turn\)"):
        _check_finite(at_work)


def test_a_validation_with_a_number_is_better_than_one_without(tmp_path):
    model = task()
    loss = model.eval_loss
    model.eval_loss = lambda *given: loss(*given) + (float("nan") if model.trainer.global_step < 4 else 0.0)
    keeper, rows = Checkpoint(monitor="val/loss", mode="min"), Validations()
    fit(tmp_path, rows, keeper, model=model, max_epochs=3)
    assert torch.tensor([loss for _, loss in rows.seen]).isnan().tolist() == [True, False, False]
    assert keeper.best_score == min(loss for _, loss in rows.seen[1:])


def test_processes_agree_on_the_best_validation_where_each_logs_its_own(tmp_path):
    """A module of the user's may log the mean of its own process, and all must save, or none."""
    keeper = Checkpoint(monitor="val/loss", mode="min")
    heard = SimpleNamespace(world_size=2, current_epoch=0, global_step=3)
    for of_first, of_second, is_better in ((1.0, 3.0, True), (2.0, 0.5, False), (0.5, 4.0, True)):
        keeper._validated, heard.callback_metrics = True, {"val/loss": torch.tensor(of_second)}
        heard.strategy = SimpleNamespace(broadcast=lambda own, first=of_first: first)
        assert keeper._improved(heard) is is_better
    assert keeper.best_score == 0.5


@pytest.mark.parametrize(("world", "waited_for"), [(1, 2.0), (2, 5.0)])
def test_a_schedule_waits_for_the_metric_of_the_first_process(tmp_path, monkeypatch, world, waited_for):
    """With that of its own process, each got another learning rate, and trained other weights from then on."""
    keeper, own = Checkpoint(), trainer(tmp_path)
    keeper.setup(own, task(), "fit")
    own._logger_connector._callback_metrics["val/loss"] = torch.tensor(2.0)
    monkeypatch.setattr(type(own), "world_size", world)
    monkeypatch.setattr(own.strategy, "broadcast", lambda value: value and 5.0)  # that of the first
    assert float(own.fit_loop.epoch_loop._get_monitor_value("val/loss")) == waited_for
    assert own.fit_loop.epoch_loop._get_monitor_value("val/lost") is None


def test_what_is_infinite_on_purpose_is_saved_and_resumed(tmp_path):
    model, run = task(), RunDir(tmp_path)
    run.write("run.json", {"status": "running"})
    run.write("model.json", {"flops": 1000})
    model.register_buffer("lowest", torch.tensor(torch.inf))
    model.mask = torch.nn.Parameter(torch.full((2, 2), -torch.inf).triu(1), requires_grad=False)
    fit(tmp_path, RunRecord(run, lambda trainer, task: None), Checkpoint(), model=model, max_epochs=1)
    content = read_resumable(tmp_path / "checkpoints/last.ckpt")
    assert content["state_dict"]["lowest"] == torch.inf and content["state_dict"]["mask"][0, 1] == -torch.inf
    assert content["vitlab"]["trained"] == [name for name, _ in model.named_parameters() if name != "mask"]


def test_a_checkpoint_in_a_second_training_knows_nothing_of_the_first(tmp_path):
    keeper, rows, second = Checkpoint(), Validations(), task()
    fit(tmp_path / "first", keeper, max_epochs=1)
    assert keeper.monitor == "val/acc1"
    loss = second.eval_loss
    second.monitor, second.eval_loss = ("min", "val/loss"), lambda *given: loss(*given) + 100
    fit(tmp_path / "second", rows, keeper, model=second, max_epochs=1)
    assert (keeper.monitor, keeper.mode, keeper.best_score) == ("val/loss", "min", rows.seen[-1][1])
    assert (tmp_path / "second/checkpoints/best.ckpt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("options", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("averages", [False, True], ids=["weights", "EMA"])
def test_the_best_checkpoint_holds_the_weights_that_were_validated(tmp_path, options, averages):
    keeper, rows = Checkpoint(monitor="val/loss", mode="min"), Validations()
    others = [EMA(decay=0.5)] if averages else []
    fit(tmp_path, rows, keeper, *others, model=rising(task()), max_epochs=3, **options)
    step, best = min(rows.seen, key=lambda row: row[1])
    assert (keeper.best_step, keeper.best_score) == (step, best)
    saved = torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)
    assert saved["global_step"] == step
    again = trainer(tmp_path / "again")
    model = task()
    model.load_state_dict(saved["state_dict"])
    (found,) = again.validate(model, loader(batch=6), verbose=False)
    assert found["val/loss"] == pytest.approx(best, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("saves", [{}, {"every_n_steps": 1}], ids=["epochs", "steps"])
def test_a_resume_repeats_and_skips_no_validation_within_an_epoch(tmp_path, options, saves):
    def parts():
        keeper, rows = Checkpoint("val/loss", "min", **saves), Validations()
        return [EMA(decay=0.5), rows, StopOnSignal(keeper), keeper], rows, keeper

    callbacks, whole, best = parts()
    fit(tmp_path / "whole", *callbacks, model=rising(task()), train=batches(), max_epochs=3, **options)
    end = torch.load(tmp_path / "whole/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for cut in (2, 4):
        callbacks, first, _ = parts()
        with pytest.raises(Stopped):
            model = rising(signalled(signal.SIGTERM, step=cut))
            fit(tmp_path / f"{cut}", *callbacks, model=model, train=batches(), max_epochs=3, **options)
        callbacks, rest, again = parts()
        seen = trainer(tmp_path / f"{cut}", *callbacks, max_epochs=3, **options)
        last = tmp_path / f"{cut}/checkpoints/last.ckpt"
        seen.fit(rising(task()), batches(), loader(batch=6), ckpt_path=last, weights_only=True)
        assert first.seen + rest.seen == whole.seen, cut
        assert again.state_dict() == best.state_dict(), cut
        state = torch.load(last, weights_only=True)["state_dict"]
        assert state.keys() == end.keys() and all(torch.equal(state[k], end[k]) for k in end), cut


@pytest.mark.slow
def test_a_resume_within_an_epoch_accumulates_as_many_batches_as_before(tmp_path):
    """Lightning does not begin the epoch again, where its scheduler of accumulation is asked."""

    def parts():
        keeper = Checkpoint()
        return [L.pytorch.callbacks.GradientAccumulationScheduler({0: 2}), StopOnSignal(keeper), keeper]

    whole = fit(tmp_path / "whole", *parts(), train=batches(size=2), max_epochs=1)
    with pytest.raises(Stopped):
        fit(tmp_path, *parts(), model=signalled(signal.SIGTERM, step=2), train=batches(size=2), max_epochs=1)
    seen = trainer(tmp_path, *parts(), max_epochs=1)
    last = tmp_path / "checkpoints/last.ckpt"
    seen.fit(task(), batches(size=2), loader(batch=6), ckpt_path=last, weights_only=True)
    assert seen.global_step == whole.global_step == 3


SPLIT = {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_epochs": 1}  # six batches, three steps


@pytest.mark.slow
def test_a_signal_in_a_validation_within_an_accumulated_step_loses_nothing_of_its_gradient(tmp_path):
    def parts():
        keeper, rows = Checkpoint("val/loss", "min"), Validations()
        return [rows, StopOnSignal(keeper), keeper], rows

    callbacks, all_rows = parts()
    whole = fit(tmp_path / "whole", *callbacks, train=batches(size=2), **SPLIT)
    callbacks, first = parts()
    with pytest.raises(Stopped):  # two batches of the sanity check come before
        model = signalled(signal.SIGTERM, step=3, validation=True)
        fit(tmp_path, *callbacks, model=model, train=batches(size=2), **SPLIT)
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 2
    callbacks, rest = parts()
    seen, model = trainer(tmp_path, *callbacks, **SPLIT), task()
    last = RunDir(tmp_path).last_checkpoint()
    seen.fit(model, batches(size=2), loader(batch=6), ckpt_path=last, weights_only=True)
    assert first.seen + rest.seen == all_rows.seen
    ends = model.state_dict(), whole.lightning_module.state_dict()
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


@pytest.mark.parametrize(("batch", "names"), [(3, ["last.ckpt"]), (4, ["best.ckpt"]), (5, ["best.ckpt", "last.ckpt"])])
def test_what_is_saved_within_an_accumulated_step_is_nothing_to_resume_from(tmp_path, batch, names):
    """The best is kept for its weights, and a hang in the middle of a step saves nothing."""
    keeper = Checkpoint("val/loss", "min")

    class Hangs(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, given, batch_idx):
            if batch_idx + 1 == batch:
                raise Stopped(signal.SIGTERM)

        def on_exception(self, trainer, pl_module, exception):  # as of Deadline, which waited for this batch
            trainer.fit_loop.epoch_loop.batch_progress.current.ready -= 1
            keeper.save_between(trainer, pl_module)

    with pytest.raises(Stopped):
        fit(tmp_path, Hangs(), keeper, train=batches(size=2), **SPLIT)
    run = RunDir(tmp_path)
    if batch == 4:  # killed between two renames, the last of which is that of the manifest
        run.update("checkpoints/manifest.json", **{WRITING: run.read("checkpoints/manifest.json").pop("best.ckpt")})
        run.update("checkpoints/manifest.json", **{"best.ckpt": {"sha256": "", "size": 0}})
    assert [path.name for path in sorted(run.checkpoints.glob("*.ckpt"))] == names
    assert (run.last_checkpoint() is None) == (batch == 4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_steps": 6}, {"max_steps": 4, "val_check_interval": 1}], ids=["epoch", "cut"])
def test_the_validation_after_the_last_of_max_steps_is_repeated_before_the_run_ends(tmp_path, options):
    def parts():
        keeper, rows = Checkpoint("val/loss", "min"), Validations()
        return [rows, StopOnSignal(keeper), keeper], rows, keeper

    callbacks, all_rows, best = parts()
    fit(tmp_path / "whole", *callbacks, train=batches(), max_epochs=-1, **options)
    callbacks, first, _ = parts()
    with pytest.raises(Stopped):
        model = signalled(signal.SIGTERM, step=2 * len(all_rows.seen) + 1, validation=True)
        fit(tmp_path / "cut", *callbacks, model=model, train=batches(), max_epochs=-1, **options)
    callbacks, rest, again = parts()
    seen = trainer(tmp_path / "cut", *callbacks, max_epochs=-1, **options)
    last = tmp_path / "cut/checkpoints/last.ckpt"
    seen.fit(task(), batches(), loader(batch=6), ckpt_path=last, weights_only=True)
    assert first.seen + rest.seen == all_rows.seen and len(rest.seen) == 1
    assert again.state_dict() == best.state_dict()
    assert seen.global_step == seen.max_steps == options["max_steps"]
    callbacks, none, _ = parts()  # of the run that is done
    done = trainer(tmp_path / "cut", *callbacks, max_epochs=-1, **options)
    done.fit(task(), batches(), loader(batch=6), ckpt_path=last, weights_only=True)
    assert not none.seen and done.max_steps == options["max_steps"]


@pytest.mark.slow
def test_a_validation_that_is_saved_after_an_interrupted_one_of_its_epoch_is_not_repeated(tmp_path):
    def run(model, **options):
        keeper, rows = Checkpoint("val/loss", "min", every_n_steps=2), Validations()
        parts = {"max_epochs": 1, "val_check_interval": 2}
        with suppress(Stopped, RuntimeError):
            at_work = trainer(tmp_path, rows, StopOnSignal(keeper), keeper, **parts)
            at_work.fit(model, batches(size=2), loader(batch=6), **options)
        return [step for step, _ in rows.seen]

    def fails(*given):
        if failing.trainer.global_step == 4:
            raise RuntimeError
        return loss(*given)

    failing, last = task(), {"ckpt_path": tmp_path / "checkpoints/last.ckpt", "weights_only": True}
    loss, failing.train_loss = failing.train_loss, fails
    assert run(signalled(signal.SIGTERM, step=3, validation=True)) == []
    assert run(failing, **last) == [2, 4]
    assert run(task(), **last) == [6]


@pytest.mark.slow
def test_a_training_that_is_stopped_within_an_accumulated_step_ends_with_it_and_resumes_to_the_same_bits(
    tmp_path,
):
    class Stops(L.Callback):  # as a Timer
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx >= 2

    def run(folder, *parts, **given):
        at_work = trainer(tmp_path / folder, *parts, Checkpoint(), accumulate_grad_batches=2, max_epochs=2)
        at_work.fit(model := task(), batches(size=2), loader(batch=6), **given)
        return at_work.global_step, model.state_dict()

    assert run("cut", Stops())[0] == 2
    (steps, whole), last = run("whole"), tmp_path / "cut/checkpoints/last.ckpt"
    again, state = run("cut", ckpt_path=last, weights_only=True)
    assert again == steps == 6 and all(torch.equal(state[k], whole[k]) for k in whole)


@pytest.mark.slow
def test_a_training_that_a_validation_stops_within_an_accumulated_step_ends_with_it_and_resumes_to_the_same_bits(
    tmp_path,
):
    """It ended at once, and was resumed without the gradient of the first batch of the step."""

    class Stops(Validations):  # as EarlyStopping
        def on_validation_end(self, trainer, pl_module):
            super().on_validation_end(trainer, pl_module)
            trainer.should_stop |= len(self.seen) == 1

    def run(folder, *parts, **given):
        options = {**SPLIT, "max_epochs": 2}
        at_work = trainer(tmp_path / folder, *parts, Checkpoint("val/loss", "min"), **options)
        at_work.fit(model := task(), batches(size=2), loader(batch=6), **given)
        return at_work.global_step, model.state_dict()

    assert run("cut", Stops())[0] == 2  # validated after three of six batches
    last = RunDir(tmp_path / "cut").last_checkpoint()
    assert last.name == "last.ckpt"
    steps, whole = run("whole")
    again, state = run("cut", ckpt_path=last, weights_only=True)
    assert again == steps == 6 and all(torch.equal(state[k], whole[k]) for k in whole)


def test_a_metric_that_early_stopping_misses_is_told_in_a_line_once_all_steps_are_saved(tmp_path):
    for steps, options in (3, {}), (2, {"val_check_interval": 2}):
        with pytest.raises(RuntimeError, match=r"metric val/los, its `monitor`, .* val/loss.*\"val/loss\"\?$"):
            fit(tmp_path, EarlyStopping("val/los"), Checkpoint(), num_sanity_val_steps=0, **options)
        assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["global_step"] == steps


@pytest.mark.parametrize(("accumulated", "expected"), [(1, [8, 12]), (2, [8, 12]), (5, [10, 12])])
def test_the_clock_is_read_where_a_step_ends_after_eight_batches(tmp_path, accumulated, expected):
    """It was read at batches 8, 16, ... alone, and nothing was saved where no step ends there."""

    class Notes(Checkpoint):
        def save(self, trainer, names, is_last=True):
            saved.append(trainer.fit_loop.epoch_loop.batch_idx + 1)
            super().save(trainer, names, is_last)

    saved = []
    fit(tmp_path, Notes("val/loss", "min", every_minutes=1e-9), train=batches(size=1), max_epochs=1,
        accumulate_grad_batches=accumulated)  # fmt: skip
    assert saved == expected


def test_the_network_of_a_linear_probe_is_without_dropout_in_each_step_also_after_a_resume_within_an_epoch(tmp_path):
    def probe(cut=0):
        task, modes = LinearProbe(**NETWORK, dropout=0.5), []
        loss = task.train_loss

        def noting(*given):
            modes.append(task.net.training)
            if len(modes) == cut:
                signal.raise_signal(signal.SIGTERM)
            return loss(*given)

        task.train_loss = noting
        return task, modes

    keeper, (task, modes) = Checkpoint(), probe(cut=2)
    with pytest.raises(Stopped):
        fit(tmp_path, StopOnSignal(keeper), keeper, model=task, train=batches())
    keeper, (task, rest) = Checkpoint(), probe()
    seen = trainer(tmp_path, keeper)
    last = tmp_path / "checkpoints/last.ckpt"
    seen.fit(task, batches(), loader(batch=6), ckpt_path=last, weights_only=True)
    assert [*modes, *rest] == [False] * 6


@pytest.mark.slow
@pytest.mark.parametrize("how", [True, "link"])
def test_lightnings_own_checkpoints_are_whole_beside_those_of_the_run(tmp_path, how):
    own = L.pytorch.callbacks.ModelCheckpoint(tmp_path / "own", save_top_k=2, monitor="val/loss", save_last=how)
    fit(tmp_path, Checkpoint(every_n_steps=1), own, max_epochs=4, val_check_interval=2)
    for path in (*own.best_k_models, own.last_model_path, tmp_path / "checkpoints/last.ckpt"):
        assert torch.load(path, weights_only=True)["state_dict"]
    assert len(own.best_k_models) == 2 and (tmp_path / "checkpoints/best.ckpt").is_file()


def test_a_loader_without_a_length_ends_its_epochs_as_others_do(tmp_path):
    with pytest.raises(ValueError, match=r"`trainer\.max_steps` must be set: .* the images have no number"):
        fit(tmp_path, train=DataLoader(Stream(), batch_size=4))
    keeper, saved = Checkpoint(every_n_steps=1), []
    keeper.save = lambda trainer, names, is_last=True: saved.append((trainer.global_step, is_last))
    RunDir(tmp_path).write("model.json", {"flops": 1000})
    record = RunRecord(RunDir(tmp_path), lambda trainer, task: None)
    fit(tmp_path, keeper, record, train=DataLoader(Stream(), batch_size=4), max_epochs=2, max_steps=6)
    assert saved == [(1, False), (2, False), (3, False), (4, False), (5, False), (6, True)]
    train = [(row["step"], row["epoch"]) for row in record.run.rows() if "train/loss" in row]
    assert train == [(2, 0), (3, 0), (5, 1), (6, 1)]  # every 2 steps, and 3 in an epoch


class Plain(L.LightningModule):
    """A module of a user's, whose loss vitlab sums."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(64, 3)

    def training_step(self, batch, batch_idx):
        if self.global_step == 1 and self.stops:
            signal.raise_signal(signal.SIGTERM)
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [Plain, task])
def test_a_row_of_metrics_covers_the_steps_before_and_after_a_resume(tmp_path, kind):
    def run(folder, stops, **options):
        keeper, run = Checkpoint(), RunDir(tmp_path / folder)
        run.write("model.json", {"flops": 1000})
        parts = RunRecord(run, lambda trainer, task: None), StopOnSignal(keeper), keeper
        model = kind() if kind is Plain or not stops else signalled(signal.SIGTERM, step=2)
        model.stops = stops
        at_work = trainer(run.path, *parts, log_every_n_steps=3, max_epochs=1)
        at_work.fit(model, batches(), loader(batch=6), **options)
        return [row["train/loss"] for row in run.rows() if "train/loss" in row]

    whole = run("whole", False)
    with pytest.raises(Stopped):
        run("cut", True)
    last = tmp_path / "cut/checkpoints/last.ckpt"
    assert run("cut", False, ckpt_path=last, weights_only=True) == whole and len(whole) == 1


class Dropping(Plain):
    """One with dropout, which is stopped in the step after ``stops``."""

    def training_step(self, batch, batch_idx):
        if self.global_step == self.stops:
            signal.raise_signal(signal.SIGTERM)
        return torch.nn.functional.cross_entropy(self.layer(torch.dropout(batch[0].flatten(1), 0.5, True)), batch[1])


class Reordered(DataLoader):
    """A loader with another order in each epoch, which reads its state in ``iter``, as torchdata's does."""

    epoch = done = -1
    state = None

    def __iter__(self):
        self.epoch, self.done = self.state or (self.epoch + 1, 0)
        self.state = None
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.epoch)).split(4)
        return self.rest(order[self.done :])

    def rest(self, order):
        for indices in order:
            self.done += 1
            yield self.dataset[indices]

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.state = state["epoch"], (state["epoch"], state["done"]) if state["done"] < len(self) else None


class Later(Reordered):
    """One that reads its state at the first batch."""

    def __iter__(self):
        yield from super().__iter__()


LOADERS = {
    "state in iter": (lambda: Reordered(loader().dataset, batch_size=4), (1, 2, 4)),
    "state in next": (lambda: Later(loader().dataset, batch_size=4), (1, 2)),
    "two loaders": (
        lambda: {"a": Reordered(loader().dataset, batch_size=4), "b": Reordered(loader().dataset, batch_size=4)},
        (1, 2),
    ),
    "no state": (lambda: DataLoader(loader().dataset, batch_size=4, shuffle=True), (2, 5)),  # epochs' last steps
}


@pytest.mark.slow
@pytest.mark.parametrize(("train", "cuts"), LOADERS.values(), ids=LOADERS)
def test_a_module_and_a_loader_of_ones_own_resume_to_the_same_bits(tmp_path, train, cuts):
    class Both(Dropping):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"] if isinstance(batch, dict) else batch, batch_idx)

    def run(folder, stops=None, **options):
        keeper, model = Checkpoint(), Both()
        model.stops = stops
        at_work = trainer(tmp_path / folder, StopOnSignal(keeper), keeper, max_epochs=3)
        at_work.fit(model, train(), loader(batch=6), **options)
        return at_work.global_step, model.layer.weight

    whole = run("whole")
    for cut in cuts:
        with pytest.raises(Stopped):
            run("cut", cut)
        last = tmp_path / "cut/checkpoints/last.ckpt"
        steps, weight = run("cut", ckpt_path=last, weights_only=True)
        assert steps == whole[0] == 9 and torch.equal(weight, whole[1]), cut


@pytest.mark.parametrize(("world", "rank", "expected"), [(2, 0, 3), (2, 1, 7), (3, 2, 3)])
def test_a_loader_goes_on_where_that_of_its_own_process_was(world, rank, expected):
    draws, given = Draws(), Reordered(loader().dataset, batch_size=4)
    loops = {"fit_loop": {"state_dict": {}}}
    positions = [[{"epoch": at, "done": 1}] for at in (3, 7)]
    saved = {"loops": loops, "train_loader": {"epoch": 3, "done": 1}, "loader_states": positions}
    draws.load(saved)
    ended = SimpleNamespace(_num_ready_batches_reached=lambda: True)
    fit_loop = {"_combined_loader": SimpleNamespace(flattened=[given]), "restarted_mid_epoch": True}
    place = {"world_size": world, "global_rank": rank, "strategy": SimpleNamespace(root_device=None)}
    draws.restore(SimpleNamespace(fit_loop=SimpleNamespace(**fit_loop, epoch_loop=ended), **place))
    assert given.epoch == expected


def test_sums_of_two_processes_are_saved_and_restored_once(tmp_path):
    model = task()
    of_both = {"reduce": lambda values, reduce_op: values + torch.tensor([6.0, 3.0])}  # with those of the second
    for key in ("train_sums", "returned_sums"):  # the latter in older checkpoints, of steps of the user's
        for first in (True, False):
            model._trainer = SimpleNamespace(is_global_zero=first, strategy=SimpleNamespace(**of_both))
            record, other, checkpoint = RunRecord(RunDir(tmp_path), print), RunRecord(RunDir(tmp_path), print), {}
            record._steps.sums = {"n": 4, "loss": torch.tensor(2.0)}
            record.on_save_checkpoint(model._trainer, model, checkpoint)
            assert checkpoint == {"train_sums": {"n": 10.0, "loss": 5.0}}
            other.on_load_checkpoint(model._trainer, model, {"train_sums": {}, key: checkpoint["train_sums"]})
            assert other._steps.sums == ({"n": 10.0, "loss": 5.0} if first else {"n": 0, "loss": 0})


def test_sums_of_a_step_of_ones_own_are_added_by_name_over_processes(monkeypatch):
    """They were added by place: processes that count other things gave each the numbers of another one."""

    class Mine(Classifier):
        def step_loss(self, batch):
            return super().step_loss(batch)

    monkeypatch.setattr("vitlab.callbacks.steps.of_all", lambda own: [own, ["rare", "n", "loss"]])
    model, steps = Mine(**NETWORK), Steps()
    model._trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(reduce=lambda values, reduce_op: values))
    steps.sums = {"loss": torch.tensor(2.0), "n": 4}
    assert steps.state(model) == {"loss": 2.0, "n": 4.0, "rare": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("average", [EMA, EMAWeightAveraging])
@pytest.mark.parametrize("place", ["on_validation_start", "eval_loss", "on_validation_epoch_end"])
def test_a_hang_anywhere_in_a_validation_saves_average_and_weights_each_in_its_place(tmp_path, place, average):
    keeper, averages, model, held = Checkpoint(), average(decay=0.5), task(), {}

    class Hangs(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *given):
            held["state_dict"] = averages._average_model.module.net.head.weight.detach().clone()
            held["current_model_state"] = pl_module.net.head.weight.detach().clone()

        def on_exception(self, trainer, pl_module, exception):  # as of Deadline
            keeper.save_between(trainer, pl_module)

    def hang(*given):
        raise Stopped(signal.SIGTERM)

    setattr(model, place, hang)
    with pytest.raises(Stopped):
        fit(tmp_path, averages, Hangs(), keeper, model=model, num_sanity_val_steps=0)
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert not torch.equal(*held.values())
    assert all(torch.equal(saved[name]["net.head.weight"], weight) for name, weight in held.items())
