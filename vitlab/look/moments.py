"""What a network sees in eight fixed images, kept while it trains: maps, positions and predictions of validations."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from vitlab.analysis.parts import positions_added, read_out, similarity
from vitlab.data.base import ImageData
from vitlab.data.files.sets import Images
from vitlab.data.loading.order import fixed_order
from vitlab.errors import named_line
from vitlab.interface import own_ratio_of
from vitlab.models.vit import VisionTransformer
from vitlab.models.walk import all_attention_maps, heads_of, probabilities
from vitlab.runs.atomic import atomic_write
from vitlab.runs.directory import RunDir

LOG = logging.getLogger("vitlab")
FOLDER = "moments"
IMAGES = 8
SHARE = 0.01  # largest share of the run's CPU time
MOST_BYTES = 300_000  # of one validation; larger networks keep nothing
KEPT, SHOWN = 64, 40  # validations on disk, beyond which every second one goes, and on a page
_USED = [0.0]  # CPU seconds of this process when its last training ended


class Moments(Callback):
    """Keep what eight fixed validation images look like to the network, at validations, for the page of `vitlab look`.

    A file of ``moments/`` in the run holds, for one validation, the attention that the head's token pays in every layer
    and head, the cosines of the position vectors if there is a table, and the probabilities of the classes. Training
    does not change: no random numbers are drawn and nothing is differentiated. A validation is skipped where keeping it
    would take more than ``share`` of the CPU time that the run has taken, and nothing is kept of large networks, of
    weights that are sharded or compiled, of networks whose layers show no attention or have different numbers of heads,
    and of networks that are not vitlab's. ``vitlab fit`` adds this callback
    itself; one with ``share: 0`` in its place keeps nothing::

        trainer:
          callbacks:
            - {class_path: vitlab.look.moments.Moments, init_args: {share: 0}}

    Args:
        share: Largest share of the run's CPU time.

    Raises:
        ValueError: ``share`` is not from 0 to 1.

    Example:
        >>> Moments(share=0.005).kept
        0
    """

    def __init__(self, share: float = SHARE) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"`share` of Moments must lie in 0..1, got {share}")
        self.share, self.kept, self.spent = share, 0, 0.0
        self._begun, self._last = _USED[0], 0.0
        self._images: tuple[Tensor, dict[str, Any]] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Drop what was kept after the step from which the run goes on."""
        if not trainer.is_global_zero:
            return
        try:
            for path in _files(Path(trainer.default_root_dir)):
                if int(path.stem) > trainer.global_step:
                    path.unlink(missing_ok=True)
        except OSError as error:
            self._give_up(error)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep this validation, once, with its weights: those of the average under EMA."""
        if batch_idx or dataloader_idx or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        begun = time.process_time()
        if not self._is_due(trainer, pl_module, begun):
            return
        try:
            self._keep(trainer, pl_module.net)
        except Exception as error:
            self._give_up(error)
        self._last = time.process_time() - begun
        self.spent += self._last

    def _give_up(self, error: Exception) -> None:
        """Keep nothing more: what is kept for a page must not stop the training."""
        self.share = 0.0
        LOG.warning("moments/ is not continued: %s", named_line(error))

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Note where the CPU time of another training in this process begins."""
        _USED[0] = time.process_time()

    def _is_due(self, trainer: L.Trainer, pl_module: Any, now: float) -> bool:
        if not trainer.is_global_zero or self.spent + self._last > self.share * (now - self._begun) or not self.share:
            return False
        return is_small(trainer, pl_module) and len(set(heads := heads_of(pl_module.net))) == 1 and heads[0] > 0

    def _keep(self, trainer: L.Trainer, net: VisionTransformer) -> None:
        run = next((c.run for c in trainer.callbacks if isinstance(getattr(c, "run", None), RunDir)), None)  # type: ignore[attr-defined]
        images, facts = self._fixed(trainer.datamodule)  # type: ignore[attr-defined]
        weight = next(net.parameters())
        found = {**facts, **seen(net, images.to(weight)), "epoch": trainer.current_epoch + 1}
        folder = Path(trainer.default_root_dir) / FOLDER
        folder.mkdir(exist_ok=True)
        with atomic_write(folder / f"{trainer.global_step:09d}.npz", run and run.fence) as beside:
            np.savez(beside, **found)
        self.kept += 1
        if len(files := _files(folder.parent)) > KEPT:
            for path in files[1:-1:2]:
                path.unlink(missing_ok=True)

    def _fixed(self, data: ImageData) -> tuple[Tensor, dict[str, Any]]:
        """Return the eight images, and which they are."""
        if self._images is None:
            images = data.splits["val"]
            index = first_of(len(images))
            part = images.take(index)
            pixels = torch.cat([batch for batch, *_ in data.eval_batches(part, IMAGES)])
            self._images = pixels, {"index": index, "images": len(images), "hash": hash_of(part)}
        return self._images


def first_of(count: int) -> np.ndarray:
    """Return which of ``count`` validation images are kept: the first that :meth:`Subject.shown` shows.

    Example:
        >>> len(first_of(288)), len(first_of(3))
        (8, 3)
    """
    return fixed_order(count)[:IMAGES]


def hash_of(chosen: Images) -> str:
    """Return by what the kept images are known again: their content, and their order.

    Example:
        >>> from vitlab.data.files.sets import TensorImages
        >>> one = TensorImages(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.zeros(1).long())
        >>> len(hash_of(one))
        32
    """
    return chosen.split_hash + chosen.rows_hash


@torch.no_grad()
def seen(net: VisionTransformer, images: Tensor) -> dict[str, np.ndarray]:
    """Return what a network in evaluation mode makes of ``(B, C, H, W)`` images, in 16 bits.

    ``token`` is the ``(B, depth, A, N)`` attention of the token that the head reads (without one, the mean of the
    patches' rows, weighted by the pool's attention if there is one), ``probabilities`` ``(B, K)``, and ``positions``
    the cosines ``(N, N)`` of a table of positions.

    Example:
        >>> net = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3).eval()
        >>> {name: value.shape for name, value in seen(net, torch.zeros(1, 3, 8, 8)).items()}
        {'token': (1, 2, 2, 4), 'probabilities': (1, 3), 'positions': (4, 4)}
    """
    maps = torch.stack(list(all_attention_maps(net, images)), dim=1)
    found = {"token": read_out(net, maps, images), "probabilities": probabilities(net, net(images).float())}
    if (positions := positions_added(net.pos_embed.for_batch())) is not None:
        found["positions"] = similarity(positions.added().detach().float())
    return {name: value.float().cpu().numpy().astype(np.float16) for name, value in found.items()}


def can_be_shown(trainer: L.Trainer, pl_module: Any) -> bool:
    """Return whether network and data are vitlab's, and the network is neither sharded nor compiled."""
    net = getattr(pl_module, "net", None)
    whole = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
    ours = isinstance(net, VisionTransformer) and isinstance(trainer.datamodule, ImageData)  # type: ignore[attr-defined]
    return whole and ours and not any(getattr(part, "_compiled_call_impl", None) for part in pl_module.modules())


def is_small(trainer: L.Trainer, pl_module: Any) -> bool:
    """Return whether a run has a network so small that it is looked at while it trains without being asked."""
    if not can_be_shown(trainer, pl_module) or not (Path(trainer.default_root_dir) / "config.yaml").is_file():
        return False
    net, data = pl_module.net, trainer.datamodule  # type: ignore[attr-defined]
    cells = net.grid_size[0] * net.grid_size[1]
    return 2 * (IMAGES * sum(heads_of(net)) * cells + cells**2) <= MOST_BYTES and not own_ratio_of(data)


def _files(run: Path) -> list[Path]:
    return sorted(path for path in (run / FOLDER).glob("*.npz") if path.stem.isdigit())


def moments_of(
    run: RunDir, images: Images, names: list[str] | None, shape: Mapping[str, Any], most: int = SHOWN
) -> dict[str, Any] | None:
    """Return what a run kept, for the viewer; None if there is nothing of these images and this network.

    Args:
        run: The run directory.
        images: The validation images; a run that kept others, or the same in another order, has nothing of them. What
            an earlier vitlab kept is known by their number alone.
        names: Of the classes; None for a network that predicts numbers.
        shape: The network's, as of :func:`vitlab.look.viewer.shape_of`.
        most: Validations that are returned at most, the first and the last among them.
    """
    size = (shape["depth"], shape["heads"], shape["grid"][0] * shape["grid"][1])
    if not (files := _files(run.path)):
        return None
    count, own = len(images), hash_of(images.take(first_of(len(images))))
    found: dict[int, dict[str, np.ndarray]] = {}  # by epoch: the last validation of each
    for path in files:
        try:
            with np.load(path, allow_pickle=False) as one:
                kept = {name: one[name] for name in one.files}
            if (int(kept["images"]), str(kept.get("hash", own))) == (count, own) and kept["token"].shape[1:] == size:
                found[int(kept["epoch"])] = kept
        except (OSError, ValueError, KeyError, EOFError):  # cut off, or of something else
            continue
    epochs = sorted(found)
    places = np.linspace(0, len(epochs) - 1, min(most, len(epochs))).round().astype(int)
    chosen = [epochs[i] for i in np.unique(places)]
    if not chosen:
        return None

    def said(shares: np.ndarray) -> str:
        k = int(shares.argmax())
        return "" if names is None else f"{names[k] if k < len(names) else f'class {k}'}, {float(shares[k]):.0%}"

    rows = [found[epoch] for epoch in chosen]
    stacked = {"token": np.stack([row["token"] for row in rows])}
    if all("positions" in row for row in rows):
        stacked["positions"] = np.stack([row["positions"] for row in rows])
    return {
        "epochs": chosen, "count": len(rows[0]["index"]),
        "said": [[said(shares) for shares in row["probabilities"]] for row in rows],
        **{name: torch.from_numpy(values.astype(np.float32)) for name, values in stacked.items()},
    }  # fmt: skip
