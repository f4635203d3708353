"""Keep the prediction for every image of a split during evaluation."""

from itertools import chain, islice
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from vitlab.interface import measured_with
from vitlab.runs.launch import of_all


class Predictions(Callback):
    """Keep target and prediction of every image, on the device until :meth:`table` is called.

    For classes it keeps the predicted class and all probabilities, for labels the probabilities, for regression the
    predicted numbers, and for targets of several kinds the number, or the class and its probability.

    Example:
        >>> import vitlab
        >>> predictions, data = Predictions(), vitlab.Digits()
        >>> net = {"img_size": 8, "in_chans": 1, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2}
        >>> task = vitlab.Classifier(num_classes=10, **net)
        >>> trainer = L.Trainer(callbacks=[predictions], logger=False, accelerator="cpu", enable_progress_bar=False)
        >>> _ = trainer.validate(task, data, verbose=False)
        >>> len(predictions.kept)
        3
    """

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Forget the evaluation before."""
        self.kept = []

    on_test_start = on_validation_start

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep a batch, unless outputs are others than the task has measured: of a foreign module, or a user's step."""
        if (targets := measured_with(outputs)) is None or outputs.ndim != 2:
            return
        if targets.ndim == 1:
            shares = outputs.float().softmax(dim=1)
            probability, prediction = shares.max(dim=1)
            row = {"target": targets, "prediction": prediction, "probability": probability}
            self.kept.append({**row, "probabilities": shares.cpu()})  # too large for the device with many classes
        elif hasattr(pl_module, "answers"):
            rows: dict[str, Tensor] = {}
            for k, (answer, share) in enumerate(pl_module.answers(outputs)):
                rows |= {f"target_{k}": targets[:, k], f"prediction_{k}": answer}
                rows |= {} if share is None else {f"probability_{k}": share}
            self.kept.append(rows)
        else:
            pairs = enumerate(zip(targets.T, outputs.float().T, strict=True))
            self.kept.append({f"{k}_{i}": v for i, (t, p) in pairs for k, v in (("target", t), ("prediction", p))})

    on_test_batch_end = on_validation_batch_end

    def table(self, loader: Any, measured: float | None = None) -> pd.DataFrame:
        """Return a row for each image of the split, in its order, from all processes; every process must call it.

        ``index`` is the place of the image in the split, and -1 in all rows if the sampler of the loader draws another
        order each time, or if several processes take samples that have no numbers, as of an IterableDataset. The rows
        then have the order of the evaluation.

        Args:
            loader: The loader of the batches.
            measured: Number of images that were measured; a step that returns the outputs of some has no table.
        """
        parts = of_all(self._rows(loader))
        if not (parts := [part for part in parts if len(part)]):
            return pd.DataFrame()
        table = pd.concat(parts)
        if table["index"].isna().any():
            table["index"] = np.arange(len(table)) if len(parts) == 1 else -1
        if measured not in (None, len(table)):
            return pd.DataFrame()
        return table.sort_values("index", kind="stable", ignore_index=True)

    def _rows(self, loader: Any) -> pd.DataFrame:
        """Return a row for each image that this process has measured."""
        if not self.kept:
            return pd.DataFrame()
        columns = {name: torch.cat([part[name] for part in self.kept]).cpu().numpy() for name in self.kept[0]}
        n = len(next(iter(columns.values())))
        return pd.DataFrame(
            {"index": _images_of(loader, n), **{k: v if v.ndim == 1 else list(v) for k, v in columns.items()}}
        )


def _images_of(loader: Any, n: int) -> np.ndarray[Any, Any] | None:
    """Return the indices of the first ``n`` images that a loader has given; -1 if it draws another order each time.

    None if its samples have no numbers: of a single process, they come in their order.
    """
    if handed := getattr(loader, "handed", None):  # indices of delivered images: unreadable files are missing
        return np.concatenate(handed)[:n]
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or not loader.batch_sampler:
        return None
    drawn, again = ([*islice(chain.from_iterable(loader.batch_sampler), n)] for _ in range(2))
    if drawn != again:  # as by a SubsetRandomSampler: nothing tells which order was drawn in the evaluation
        return np.full(n, -1)
    return np.array(drawn) if all(isinstance(i, int | np.integer) for i in drawn) else None
