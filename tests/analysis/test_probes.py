import math
from statistics import stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from small_nets import SMALL, small_net

from vitlab.analysis import ANALYSES
from vitlab.analysis.features import (
    analyze_fewshot,
    analyze_knn,
    draw_shots,
    few_shot_accuracy,
    knn_accuracy,
)
from vitlab.analysis.probes import (
    PENALTIES,
    CellProbe,
    analyze_probe,
    knows_places,
    probe_layers,
    ridge,
    without_positions,
)
from vitlab.data.known import Digits
from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.pretraining import DINO, MAE
from vitlab.tasks import Classifier, LinearProbe


def test_ridge_is_where_the_penalised_loss_is_flat():
    x, y = torch.randn(20, 4).double(), torch.randn(20, 2).double()
    w = ridge(x, y, 3.0).requires_grad_()
    loss = (x @ w - y).square().sum() + 3.0 * w.square().sum()
    assert torch.autograd.grad(loss, w)[0].abs().max().item() < 1e-10


def test_the_probe_in_batches_is_one_ridge_regression_with_the_penalty_of_scikit_learn():
    fit, held_out = torch.randn(8, 6, 5), torch.randn(4, 6, 5)
    probe = CellProbe((2, 3))
    for part in fit.split(3):
        probe.add(part)
    for part in held_out.split(3):
        probe.score(part)
    targets = torch.cat([torch.eye(6), torch.tensor([[n // 3, n % 3] for n in range(6)])], dim=1).double()
    x, y = fit.flatten(0, 1).double().numpy(), targets.repeat(8, 1).numpy()
    x, y, mean = x - x.mean(axis=0), y - y.mean(axis=0), x.mean(axis=0)
    scores = {}
    for penalty in PENALTIES.numpy() * np.square(x).sum() / 5:  # generalized cross-validation, by its hat matrix
        hat = x @ np.linalg.solve(x.T @ x + penalty * np.eye(5), x.T)
        left = np.square(y - hat @ y).sum(axis=0) / np.square(y).sum(axis=0)
        scores[penalty] = left.sum() / (len(x) - 1 - np.trace(hat)) ** 2
    model = Ridge(alpha=min(scores, key=scores.get)).fit(x + mean, targets.repeat(8, 1).numpy())
    guess = torch.from_numpy(model.predict(held_out.flatten(0, 1).double().numpy()))
    accuracy = (guess[:, :6].argmax(dim=1) == torch.arange(6).repeat(4)).double().mean().item()
    places = targets[:, 6:].repeat(4, 1)
    missed = (guess[:, 6:] - places).square().sum() / (places - places.mean(dim=0)).square().sum()
    found = probe.result()
    assert found["accuracy"] == pytest.approx(accuracy)
    assert found["r2"] == pytest.approx(1 - missed.item())


@pytest.mark.parametrize("factor", [1e3, 1e-1, 1e-2, 1e-3])
def test_scaled_features_identify_their_cells_equally_well(factor):
    def found(factor):
        generator = torch.Generator().manual_seed(0)
        places, probe = torch.randn(16, 8, generator=generator), CellProbe((4, 4))
        for use in (probe.add, probe.score):
            use(factor * (places + torch.randn(64, 16, 8, generator=generator)))
        return probe.result()

    assert found(factor) == pytest.approx(found(1.0), rel=1e-4) and found(1.0)["accuracy"] > 0.5


def test_a_token_that_encodes_its_cell_is_located():
    tokens = torch.eye(6).expand(3, 6, 6) + 0.01 * torch.randn(3, 6, 6)
    probe = CellProbe((2, 3))
    probe.add(tokens)
    probe.score(tokens)
    assert probe.result()["accuracy"] == 1 and probe.result()["r2"] > 0.99


def test_noise_reveals_no_cell_without_positions_and_every_cell_with_them():
    batches = [[(torch.randn(64, 1, 8, 8), torch.zeros(64))] for _ in range(2)]
    net = small_net(pos_embed="sincos2d")
    for each, low, high in ((net, 0.8, 1.0), (without_positions(net), 0.0, 0.15)):
        for layer in probe_layers(each, *batches):
            assert low <= layer.result()["accuracy"] <= high
    assert type(net.pos_embed).__name__ == "SinCos2d"  # the network itself keeps its positions


def test_the_probe_table_has_an_excess_for_each_layer(small_subject):
    table = analyze_probe(small_subject(num_images=32)).table
    assert len(table) == 2 * 2 * 3
    plain = table[table["positions"] == "without"]
    assert (plain["excess"] == 0).all()
    both = table.pivot(index=["images", "layer"], columns="positions", values="accuracy")
    kept = table[table["positions"] == "with"].set_index(["images", "layer"])["excess"]
    np.testing.assert_allclose(kept, (both["with"] - both["without"]).loc[kept.index])


def test_the_probe_is_scored_on_images_and_noise_that_it_was_not_fitted_on(small_subject, monkeypatch):
    subject, seen = small_subject(), []

    def spied(net, fit, held_out):
        fit, held_out = list(fit), list(held_out)
        seen.append([torch.cat([images for images, _ in part]) for part in (fit, held_out)])
        return probe_layers(net, fit, held_out)

    monkeypatch.setattr("vitlab.analysis.probes.probe_layers", spied)
    analyze_probe(subject)
    train, val = (torch.cat([images for images, _ in subject.batches(split)]) for split in ("train", "val"))
    assert [len(part) for pair in seen for part in pair] == [24] * 8 and not torch.equal(train, val)
    for fit, held_out in seen[:2]:  # with and without positions
        assert torch.equal(fit, train) and torch.equal(held_out, val)
    for fit, held_out in seen[2:]:  # noise
        assert (fit - held_out).abs().flatten(1).amax(dim=1).min() > 1


def test_few_shots_are_a_whitened_ridge_regression():
    train, test = torch.randn(12, 3).double(), torch.randn(5000, 3).double()
    labels, test_labels = torch.arange(12) % 3, torch.arange(5000) % 3
    mean, std = train.numpy().mean(axis=0), train.numpy().std(axis=0) + 1e-5
    x, z = (np.hstack([(t.numpy() - mean) / std, np.full((len(t), 1), 100.0)]) for t in (train, test))
    y = 2 * np.eye(3)[labels.numpy()] - 1
    weights = np.linalg.solve(x.T @ x + 1024 * np.eye(4), x.T @ y)
    expected = ((z @ weights).argmax(axis=1) == test_labels.numpy()).mean()
    assert few_shot_accuracy(train, labels, test, test_labels, 3) == pytest.approx(expected, abs=1e-9)


def test_a_draw_takes_as_many_of_each_class():
    labels = torch.tensor([0] * 7 + [1] * 3 + [2] * 9)
    chosen = draw_shots(labels, 5, seed=0)
    assert torch.bincount(labels[chosen]).tolist() == [5, 3, 5]
    assert chosen.unique().numel() == len(chosen)
    assert not torch.equal(chosen, draw_shots(labels, 5, seed=1))


def test_no_more_labels_and_neighbors_are_named_than_there_are(small_subject):
    subject = small_subject()
    subject.data = Digits(batch_size=64)
    for split in ("train", "val"):
        subject.data.build(split)
    train = subject.data.splits["train"]
    few = np.concatenate([np.flatnonzero(np.asarray(train.labels) == k)[: 3 + 4 * (k > 0)] for k in range(10)])
    subject.data.splits["train"] = train.take(few)
    found = analyze_fewshot(subject)
    assert list(found.table["shots"]) == [1, 5]
    assert "all of a class that has fewer than 5, the smallest 3" in found.note
    subject.num_images = 10
    table = analyze_knn(subject).table
    assert list(table["k"]) == [1, 5]
    assert ANALYSES["knn"].metrics(table) == {"acc1@1": table["acc1"][0], "acc1@5": table["acc1"][1]}


@pytest.mark.parametrize(("reads_labels", "words"), [(True, "nothing of few labels"), (False, "without their labels")])
def test_features_learned_without_labels_are_named_so(small_subject, reads_labels, words):
    subject = small_subject()
    subject.task = SimpleNamespace(reads_labels=reads_labels)
    assert analyze_knn(subject).table["classes"].str.contains(words).all()
    assert (MAE.reads_labels, DINO.reads_labels, Classifier.reads_labels) == (False, False, True)


@pytest.mark.parametrize(("cls", "words"), [(LinearProbe, "frozen below the head"), (Classifier, "nothing of few")])
def test_features_below_a_linear_probe_have_learned_no_label_of_its_run(small_subject, cls, words):
    subject = small_subject()
    subject.task = cls(**SMALL)
    assert analyze_knn(subject).table["classes"].str.contains(words).all()


@pytest.mark.parametrize("analyze", [analyze_fewshot, analyze_knn])
def test_images_of_one_class_have_no_accuracy(small_subject, monkeypatch, analyze):
    subject = small_subject()
    monkeypatch.setattr(subject, "data", Digits(batch_size=64))
    subject.data.class_names = ["unlabeled"]  # as of `--data=Unlabeled`, where each guess would be right
    with pytest.raises(UsageError, match="needs two classes or more, and all images of model are of one, unlabeled"):
        analyze(subject)


def test_neighbors_vote_as_in_a_loop():
    train, test = torch.randn(15, 4).double(), torch.randn(9, 4).double()
    labels, test_labels = torch.arange(15) % 3, torch.arange(9) % 3
    right = 0
    for x, label in zip(test, test_labels.tolist(), strict=True):
        cosines = [float(x @ t / (x.norm() * t.norm())) for t in train]
        nearest = sorted(range(15), key=lambda i: -cosines[i])[:5]
        votes = [sum(math.exp(cosines[i] / 0.07) for i in nearest if labels[i] == k) for k in range(3)]
        right += votes.index(max(votes)) == label
    assert knn_accuracy(train, labels, test, test_labels, 5, 3) == pytest.approx(right / 9)


def test_tables_of_features_say_how_many_images_they_used(small_subject):
    subject = small_subject()
    finding = analyze_fewshot(subject)
    table, (dots,) = (
        finding.table,
        [each for each in finding.figure.axes[0].collections if len(each.get_offsets()) == 20],
    )
    assert list(table["shots"]) == [1, 5, 10, 25] and (table["draws"] == 5).all()
    drawn = np.asarray(dots.get_offsets())[:, 1].reshape(4, 5).tolist()
    assert table["spread"].tolist() == pytest.approx([stdev(each) for each in drawn]) and max(table["spread"]) > 0
    assert list(table["n_train"]) == [10, 50, 100, 250]
    table = analyze_knn(subject).table
    assert list(table["k"]) == [1, 5, 20] and (table["n_train"] == 24).all() and (table["n"] == 24).all()


class ToTheLeft(Attention):
    """Attention with positions of its own: each token sees the token before it."""

    def score(self, q, k, pos_embed, layer):
        return super().score(q, k, pos_embed, layer) + 5 * torch.eye(q.shape[2]).roll(-1, 1)


def test_the_probe_says_that_blocks_of_ones_own_know_places_without_the_position_embedding(small_subject):
    known = "whose blocks know places all the same"
    assert known in analyze_probe(small_subject(attn=ToTheLeft)).note
    assert not knows_places(small_net(attn=Attention, pos_embed="none"), torch.randn(2, 1, 8, 8))
