"""The one table of valid ranges for the numbers of a configuration, used by checks and help; and a check of words."""

import math
from collections.abc import Collection, Iterator, Mapping
from numbers import Real
from typing import Any

MOST_SEED = 2**32 - 1  # which NumPy takes

_INTERVALS = {  # [ and ] include the limit, ( and ) do not
    "model": {
        "(0, 1000]": "lr mlp_ratio t2t_mlp_ratio qk_scale t2t_qk_scale distill_tau "
        "student_temp teacher_temp warmup_teacher_temp target_weights",
        "[0, 1000]": "min_lr warmup_lr weight_decay pos_embed_lr_mult head_lr_mult layer_scale decoder_depth "
        "weight_decay_end ibot_weight koleo_weight freeze_last_layer warmup_teacher_temp_epochs",
        "[0, 1]": "label_smoothing distill_alpha norm_eps momentum_teacher center_momentum",
        "(0, 1)": "mask_ratio",
        "[0, 1)": "mask_share attn_dropout dropout drop_path_rate t2t_dropout",
        "(0, 1]": "layer_decay",
        "(0, 10]": "init_std",
        "(1, 1e12]": "rope_theta theta register_theta",
        "[0, 1e6]": "warmup_epochs cooldown_epochs num_classes num_targets class_weights",
        "[1, 1e9]": "lr_batch prototypes",
        "[1, 1000]": "depth mask_block dense_blocks dense_growth t2t_kernels t2t_strides t2t_dilations",
        "[1, 65536]": "img_size patch_size flexi_patch in_chans embed_dim num_heads t2t_dim t2t_num_heads t2t_features "
        "decoder_dim decoder_heads proj_hidden proj_dim",
        "[0, 65536]": "reg_tokens head_hidden se_reduction",
    },
    "data": {
        "(0, 1]": "crop_scale crop_pct test_share subset",
        "(0, 1)": "val_share",
        "[0, 1]": "random_erasing",
        "[0, 1000]": "mixup cutmix",
        "[1, 1000]": "repeats",
        "[0, 1024]": "num_workers",
        "[1, 65536]": "img_size native_patch native_size in_chans sizes",
        "[1, 1e6]": "batch_size num_classes",
        "[0, 1e6]": "img_size_schedule cache_gb",
        "[1, 1e10]": "n max_pixels",
        "[0, 1e9]": "max_unreadable fold",
        "[-1e18, 1e18]": "split_seed value_range mean",
        "(0, 1e18]": "std",
    },
    "trainer": {
        "[-1, 1e6]": "max_epochs devices num_sanity_val_steps",
        "[0, 1e6]": "min_epochs fast_dev_run reload_dataloaders_every_n_epochs gradient_clip_val",
        "[1, 1e6]": "num_nodes check_val_every_n_epoch log_every_n_steps accumulate_grad_batches",
        "[-1, 1e12]": "max_steps",
        "[0, 1e12]": "min_steps",
        "(0, 1e9]": "val_check_interval limit_train_batches",
        "[0, 1e9]": "limit_val_batches limit_test_batches limit_predict_batches overfit_batches",
    },
    "checkpoint": {"[1, 1e6]": "every_n_epochs", "[0, 1e9]": "every_n_steps", "[0, 1e6]": "every_minutes"},
}
RANGES = {
    f"{group}.{name}": interval
    for group, intervals in _INTERVALS.items()
    for interval, names in intervals.items()
    for name in names.split()
}


def check_ranges(group: str, values: Mapping[str, Any], prefix: str | None = None) -> None:
    """Refuse numbers outside of their range, NaN anywhere, and infinite numbers in mappings.

    Args:
        group: model, data, trainer or checkpoint.
        values: Arguments by name; numbers in lists and mappings are checked too.
        prefix: What stands before a name in the message; default: the group and a dot, as on a command line.

    Raises:
        ValueError: Names key, range and value.

    Example:
        >>> check_ranges("model", {"lr": 1e-3, "depth": 12})
    """
    prefix = f"{group}." if prefix is None else prefix
    for name, value in values.items():
        interval = RANGES.get(f"{group}.{name}")
        for number in _numbers(value):
            strange = math.isnan(number) or (math.isinf(number) and isinstance(value, Mapping))
            if strange or (interval and not _holds(interval, number)):
                rule = f"in {interval}" if interval else "a finite number"
                raise ValueError(f"`{prefix}{name}` must be {rule}, got {number}")


def check_arguments(**numbers: float | None) -> None:
    """Refuse numbers of a network or task that are outside of their range, by the names that they have in Python.

    Example:
        >>> check_arguments(depth=12, dropout=0.1)
    """
    check_ranges("model", numbers, prefix="")


def check_word(name: str, value: Any, words: Collection[str]) -> None:
    """Refuse a value that is not one of ``words``.

    Example:
        >>> check_word("axes", "xy", ("xy", "yx"))
    """
    if value not in words:
        raise ValueError(f"`{name}` must be one of {', '.join(words)}, got {value!r}")


def _numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, Real) and not isinstance(value, bool):  # NumPy's, too
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(part)


def _holds(interval: str, number: float) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    return low < number < high or (number == low and interval[0] == "[") or (number == high and interval[-1] == "]")
