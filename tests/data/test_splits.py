"""Splits: disjoint, complete, stratified, stable, seeded."""

import json

import numpy as np
import pytest
from PIL import Image

from vitlab.data.files.splits import SplitRule, by_group, by_time, split_hash
from vitlab.data.image_folder import ImageFolder
from vitlab.data.known import Digits
from vitlab.data.record import Trained, measured
from vitlab.data.resume import check_same_training


def _samples(counts=(50, 31, 7, 1)):
    labels = np.repeat(np.arange(len(counts)), counts)
    return [f"{label}/{i}".encode() for i, label in enumerate(labels)], labels


def _names(ids, indices):
    return {name: {ids[i] for i in chosen} for name, chosen in indices.items()}


@pytest.mark.parametrize("test_share, val_share", [(0.2, 0.2), (0.4, 0.1), (0.33, 0.3), (None, 0.01)])
def test_splits_are_disjoint_complete_and_stratified(test_share, val_share):
    ids, labels = _samples()
    splits = SplitRule(test_share or 0.2, val_share).indices(ids, labels, cut_test=test_share is not None)
    test_share = test_share or 0.0
    assert sorted(np.concatenate(list(splits.values()))) == list(range(len(ids)))
    assert len(splits["test"]) == round(len(ids) * test_share)
    assert len(splits["val"]) == round((len(ids) - len(splits["test"])) * val_share)
    for label in range(4):
        n = (labels == label).sum()
        test, val = ((labels[splits[name]] == label).sum() for name in ("test", "val"))
        assert abs(test - n * test_share) < 1
        assert abs(val - (n - test) * val_share) < 1


def test_equal_seeds_give_equal_splits_and_other_seeds_other_ones():
    ids, labels = _samples()
    first, again, other = (SplitRule(0.2, 0.2, seed).indices(ids, labels) for seed in (0, 0, 1))
    assert all((first[name] == again[name]).all() for name in first)
    assert any(set(first[name]) != set(other[name]) for name in first)


def test_the_order_of_the_samples_does_not_matter():
    ids, labels = _samples()
    order = np.random.default_rng(0).permutation(len(ids))
    shuffled = [ids[i] for i in order]
    rule = SplitRule(0.2, 0.2)
    assert _names(ids, rule.indices(ids, labels)) == _names(shuffled, rule.indices(shuffled, labels[order]))


def test_one_more_file_moves_at_most_two_others_over_each_cut():
    ids, labels = _samples()
    rule = SplitRule(0.2, 0.2)
    before = _names(ids, rule.indices(ids, labels))
    for i in range(40):
        new = f"0/new {i}".encode()
        after = _names([*ids, new], rule.indices([*ids, new], np.append(labels, 0)))
        moved = {x for name in before for x in before[name] - after[name]}
        assert len(moved) <= 4


def test_folds_partition_block_1_and_leave_the_test_split_alone():
    ids, labels = _samples()
    folds = [SplitRule(0.2, 0.2, fold=f"{k}/5").indices(ids, labels) for k in range(1, 6)]
    block_1 = np.sort(np.concatenate([folds[0]["train"], folds[0]["val"]]))
    assert (np.sort(np.concatenate([fold["val"] for fold in folds])) == block_1).all()
    assert all((fold["test"] == folds[0]["test"]).all() for fold in folds)
    for fold in folds:
        assert sorted([*fold["train"], *fold["val"]]) == block_1.tolist()
        for label in range(4):
            n = (labels[block_1] == label).sum()
            assert abs((labels[fold["val"]] == label).sum() - n / 5) < 1


@pytest.mark.parametrize("counts", [[1] * 7, [2] * 26, [8, 3, 1, 12, 4, 1, 9], [5, 10], [4]])
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("grouped", [False, True])
def test_folds_differ_by_at_most_one_image_or_group_in_each_class_and_in_all(counts, n, grouped):
    ids, labels = _samples(counts)
    groups = None
    if grouped:  # of three images each
        groups, ids, labels = [str(i) for i in range(len(ids)) for _ in range(3)], 3 * ids, labels.repeat(3)
    vals = [SplitRule(fold=f"{k}/{n}").indices(ids, labels, None, False, groups)["val"] for k in range(1, n + 1)]
    found = np.array([np.bincount(labels[val], minlength=len(counts)) for val in vals]) // (3 if grouped else 1)
    assert (found.sum(0) == counts).all() and np.ptp(found, axis=0).max() <= 1 and np.ptp(found.sum(1)) <= 1
    assert sorted(np.concatenate(vals)) == list(range(len(labels)))


def test_the_seed_draws_which_classes_round_up_in_which_fold():
    ids, labels = _samples([1] * 7)
    vals = {tuple(SplitRule(split_seed=s, fold="1/5").indices(ids, labels, None, False)["val"]) for s in range(8)}
    assert len(vals) > 4


def test_an_earlier_run_keeps_its_folds_and_those_that_were_even_stay_the_same():
    for counts, same in (([2] * 8, False), ([10, 5], True), ([7], True)):
        ids, labels = _samples(counts)
        now, before = SplitRule(fold="1/5"), SplitRule(fold="1/5", even_folds=False)
        vals = [rule.indices(ids, labels, None, False)["val"].tolist() for rule in (now, before)]
        assert (vals[0] == vals[1]) is same and (same or not vals[1])  # each class rounded down in the first fold
    assert now.facts()["even_folds"] and "even_folds" not in SplitRule().facts() | before.facts()
    facts = {"class_names": [], "split_rule": {**before.facts(), "fold": [1, 5]}}
    for rule, even in ((facts["split_rule"], False), (now.facts(), True), (SplitRule().facts(), True), (None, True)):
        with measured(Trained({**facts, "split_rule": rule}, None, "val")):
            assert Digits(fold="1/5").rule.even_folds is even


def test_a_run_of_an_earlier_vitlab_is_not_resumed_on_other_folds():
    data = Digits(fold="1/7", num_workers=0)
    data.build("train")
    then = {**data.state_dict(), "split_hash": "0" * 16}
    with pytest.raises(ValueError, match=r"trained on 0{16} \(an earlier vitlab divided small .*\): start a new run"):
        check_same_training(data, then)


def test_a_smaller_subset_lies_in_a_larger_one_and_keeps_every_class():
    ids, labels = _samples()
    whole, half, tenth = (SplitRule(0.2, 0.2, subset=share).indices(ids, labels) for share in (1.0, 0.5, 0.1))
    assert set(tenth["train"]) < set(half["train"]) < set(whole["train"])
    assert (whole["val"] == tenth["val"]).all() and (whole["test"] == tenth["test"]).all()
    assert set(labels[tenth["train"]]) == set(labels[whole["train"]])
    for label in range(4):
        n = (labels[whole["train"]] == label).sum()
        assert abs((labels[tenth["train"]] == label).sum() - n / 10) < 1


def test_given_lists_are_used_as_they_are(tmp_path):
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"train": [5, 3], "val": [0], "test": [1790]}))
    data = Digits(split_file=str(path), batch_size=1)
    data.setup("fit")
    data.setup("test")
    everything = data.read("all")
    assert (data.splits["train"].images == everything.images[[5, 3]]).all()
    assert (data.splits["test"].images == everything.images[[1790]]).all()


@pytest.mark.parametrize(
    "lists, message",
    [
        ({"train": [1], "val": [1]}, "disjoint"),
        ({"train": [1], "val": [5000]}, "5000"),
        ({"train": [1]}, "must list train, val"),
        ([1], r"JSON object of lists, .*, got .*\.json$"),
    ],
)
def test_a_split_file_that_contradicts_itself_or_the_data_is_refused(tmp_path, lists, message):
    path = tmp_path / "split.json"
    path.write_text(json.dumps(lists))
    with pytest.raises(ValueError, match=message):
        Digits(split_file=str(path)).setup("fit")


def test_a_split_file_that_divides_a_group_is_refused(tmp_path):
    (path := tmp_path / "split.json").write_text(json.dumps({"train": ["0/0", 2], "val": ["0/1"]}))
    ids, labels = _samples((3,))
    assert len(SplitRule(split_file=str(path)).indices(ids, labels, groups=["a", "b", "a"])["val"]) == 1
    with pytest.raises(ValueError, match=r"split.json lists 2 under train and '0/1' under val, and both are of b: "):
        SplitRule(split_file=str(path)).indices(ids, labels, groups=["a", "b", "b"])


def test_a_path_in_a_split_file_names_every_row_that_has_it(tmp_path):
    (path := tmp_path / "split.json").write_text(json.dumps({"train": ["a"], "val": ["b"], "test": [4]}))
    found = SplitRule(split_file=str(path)).indices([b"a", b"b", b"a", b"b", b"c"], np.zeros(5, int))
    assert {name: chosen.tolist() for name, chosen in found.items()} == {"train": [0, 2], "val": [1, 3], "test": [4]}


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "1", "a/b", "1/"])
def test_a_wrong_fold_is_refused(fold):
    with pytest.raises(ValueError, match=r"`data\.fold` must be k/n"):
        Digits(fold=fold)


@pytest.mark.parametrize("name", ["val_share", "test_share", "subset"])
@pytest.mark.parametrize("share", [-0.1, 0.0, 1.5])
def test_a_wrong_share_is_refused(name, share):
    with pytest.raises(ValueError, match=rf"`data\.{name}`"):
        Digits(**{name: share})


def test_the_hash_names_the_set_and_not_its_order():
    ids, labels = _samples()
    assert split_hash(ids, labels) == split_hash(ids[::-1], labels[::-1])
    assert split_hash(ids, labels) != split_hash(ids, labels[::-1])
    assert split_hash(ids, labels) != split_hash(ids[:-1], labels[:-1])


def test_of_a_listed_training_split_a_smaller_subset_lies_in_a_larger_one_and_keeps_every_class(tmp_path):
    ids, labels = _samples()
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"train": list(range(80, 20, -1)), "val": [0], "test": [1]}))
    whole, half, tenth = (SplitRule(subset=s, split_file=str(path)).indices(ids, labels) for s in (1.0, 0.5, 0.1))
    assert whole["train"].tolist() == list(range(80, 20, -1)) and tenth["val"].tolist() == [0]
    assert set(tenth["train"]) < set(half["train"]) < set(whole["train"]) and (np.diff(half["train"]) < 0).all()
    assert np.bincount(labels[half["train"]]).tolist() == [15, 16]  # of 29 and 31
    assert np.bincount(labels[tenth["train"]]).tolist() == [3, 4]
    path.write_text(json.dumps({"train": [*range(100)], "val": []}))
    part = SplitRule(subset=0.07, split_file=str(path)).indices(
        [str(i).encode() for i in range(100)], np.zeros(100, int)
    )
    assert len(part["train"]) == 7  # 0.07 * 100 is more than 7 for a computer


def test_a_subset_has_the_same_samples_whether_a_file_or_the_rule_divides_them(tmp_path):
    ids, labels = _samples()
    whole, half = (SplitRule(split_seed=5, subset=share).indices(ids, labels) for share in (1.0, 0.5))
    path = tmp_path / "split.json"
    path.write_text(json.dumps({name: chosen.tolist() for name, chosen in whole.items()}))
    listed = SplitRule(split_seed=5, subset=0.5, split_file=str(path)).indices(ids, labels)
    assert {name: chosen.tolist() for name, chosen in listed.items()} == {k: v.tolist() for k, v in half.items()}


def test_the_most_common_class_of_a_group_is_the_first_of_several():
    assert by_group(["a", "a", "a", "b", "b", "b"], np.array([2, 1, 0, 2, 2, 1]))[1].tolist() == [0, 2]


@pytest.mark.parametrize("test", [["test/a/0.png"], ["train/a/2.png"]])
def test_a_split_file_lists_no_test_split_beside_a_given_one(tmp_path, test):
    for file in ("train/a/0", "train/a/1", "train/a/2", "train/b/0", "test/a/0"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), len(file)).save(tmp_path / f"{file}.png")
    path = tmp_path / ".split.json"
    lists = {"train": ["train/a/0.png", "train/b/0.png"], "val": ["train/a/1.png"]}
    for more in ({"test": test}, {}):
        path.write_text(json.dumps({**lists, **more}))
        data = ImageFolder(str(tmp_path), split_file=str(path), num_workers=0)
        if more:
            with pytest.raises(ValueError, match="lists test, and the data has a test split: leave out the list"):
                data.setup("fit")
    data.setup("fit")
    assert data.splits["val"].names == lists["val"]


@pytest.mark.parametrize(
    "counts, fold, sizes",
    [
        ((2, 6, 2), None, (2, 6, 2)),
        ((8, 1, 1), None, (8, 1, 1)),
        ((1, 1, 8), None, (1, 1, 8)),
        ((2, 2, 2, 2, 2), None, (6, 2, 2)),
        ((5, 1, 4), "2/2", (5, 1, 4)),
        ((4, 4), None, (4, 0, 4)),
    ],
)
def test_every_split_by_time_has_images_if_there_are_three_times(counts, fold, sizes):
    found = by_time(np.repeat(np.arange(len(counts)), counts), SplitRule(fold=fold))
    assert tuple(map(len, found.values())) == sizes


def test_a_subset_by_time_is_the_latest_part_rounded_up():
    found = by_time(np.arange(14)[::-1], SplitRule(subset=0.5))
    assert [found[name].tolist() for name in ("train", "val", "test")] == [[5, 6, 7, 8, 9], [3, 4], [0, 1, 2]]


@pytest.mark.parametrize("times", [1, 2, 9])
@pytest.mark.parametrize("fold", [None, "1/3"])
def test_all_times_are_for_testing_where_the_share_is_1(times, fold):
    found = by_time(np.arange(times), SplitRule(test_share=1, fold=fold))
    assert {name: len(chosen) for name, chosen in found.items()} == {"train": 0, "val": 0, "test": times}


def test_an_empty_split_is_explained_by_what_divided_the_images():
    few = ": there are too few images, groups or times for "
    assert SplitRule(fold="1/5").why_empty("val", True) == f"{few}`data.fold=1/5`"
    assert SplitRule().why_empty("val", False) == f"{few}`data.test_share=0.2` and `data.val_share=0.2`"
    assert SplitRule(split_file="s.json").why_empty("val", True) == ": `data.split_file` s.json lists none under val"
    assert SplitRule(split_file="s.json").why_empty("test", True) == ""


@pytest.mark.parametrize("entry", [[3], {"a": 1}, True])
def test_an_entry_of_a_split_file_that_is_neither_number_nor_path_is_refused(entry, tmp_path):
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"train": [0, entry], "val": [2]}))
    with pytest.raises(ValueError, match=r"split.json lists .* under train, which is not in the data"):
        Digits(split_file=str(path)).setup("fit")
