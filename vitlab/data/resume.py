"""What a resumed run must share with its beginning: the state of its data in a checkpoint, and what is compared."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from vitlab.data.files.sets import Images, Statistics
from vitlab.data.files.splits import SplitName

ORDER = 2  # version of the order of training, in checkpoints; 1, which they lack, had copies of an image side by side


def state_of(data: Any, statistics: Statistics | None) -> dict[str, Any]:
    """Return the state that later stages must share with a training run, as plain values."""
    known = {} if statistics is None else dict(zip(("mean", "std"), map(list, statistics), strict=True))
    whole = {"whole_arrays": True} if data.arrays else {}
    splits = _hashes(data.splits)
    return {"class_names": data.class_names, "seed": data.seed, "order": ORDER, **known, **splits, **whole, **_at(data)}


def _hashes(splits: Mapping[SplitName, Images]) -> dict[str, str]:
    """Return the hashes by which a resumed run knows its images, and the order in which training numbers them."""
    names: dict[str, SplitName] = {"split_hash": "train", "val_hash": "val"}
    found = {key: splits[name].split_hash for key, name in names.items() if name in splits}
    return {**found, "rows_hash": splits["train"].rows_hash} if "train" in splits else found


def _at(data: Any) -> dict[str, Any]:
    """Return the number of processes, and whether an epoch has begun that has not ended."""
    if data.trainer is None or data.trainer.state.fn != TrainerFn.FITTING:
        return {}
    progress = data.trainer.fit_loop.epoch_loop.batch_progress
    return {"world": data.trainer.world_size, "in_epoch": progress.current.ready > 0 and not progress.is_last_batch}


def check_same_training(data: Any, state: Mapping[str, Any]) -> None:
    """Refuse to resume a run on other training or validation images, or an epoch in another order of the images.

    Checkpoints of an earlier vitlab know the training images alone. It cut arrays that are larger than the input.
    """
    (height, width), (h, w) = data.pipeline.native_size or (0, 0), data.img_size
    if data.arrays and not state.get("whole_arrays") and (height > h or width > w):
        raise ValueError(
            f"the run was trained on crops of arrays of {height}x{width}, which are now seen whole: start a new run"
        )
    now = _hashes(data.splits)
    changed = {key for key in now.keys() & state.keys() if now[key] != state[key]}
    if "split_hash" in changed:
        then = state["split_hash"]
        why = "" if data.rule.fold is None else " (an earlier vitlab divided small classes into other folds)"
        raise ValueError(
            f"the training split is {now['split_hash']}, the checkpoint was trained on {then}{why}: start a new run"
        )
    if "val_hash" in changed:
        raise ValueError(
            f"the validation split is {now['val_hash']}, the best epoch so far was chosen on {state['val_hash']}: "
            "restore its images, or start a new run"
        )
    if not state.get("in_epoch"):
        return
    if "rows_hash" in changed:
        raise ValueError(
            "the training images have another order than in the checkpoint, which is from the middle of an epoch: "
            "restore the order (of a table's rows, a list of shards, or `data.split_file`), or start a new run"
        )
    world = data.trainer.world_size
    if data.pipeline.own_ratio and state["world"] != world:
        raise ValueError(
            f"the checkpoint is from the middle of an epoch on {state['world']} processes, now {world}, which divide "
            f"the photos of `data.native_patch` otherwise: resume it on {state['world']}"
        )


def changed_order(data: Any, state: Mapping[str, Any]) -> list[str]:
    """Return a sentence if the batches of a resumed run are arranged otherwise than before its checkpoint."""
    if state.get("order", 1) == ORDER or (data.repeats == 1 and data.sampling == "natural"):
        return []
    return [
        "an earlier vitlab began this run and arranged copies of an image otherwise: from here on each step has the "
        "same images as it would have had, but other partners in mixup and cutmix, and others in each process"
    ]
